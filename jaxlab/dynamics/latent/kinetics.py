r"""How fast an ensemble is explored: time-lagged independent components, relaxation times, autocorrelation.

TICA solves ``C(lag) v = lambda C(0) v`` with covariances that are symmetrised in time,

.. math::
    C(0) = \tfrac12 \langle x x^\top + y y^\top \rangle, \qquad C(\tau) = \tfrac12 \langle x y^\top + y x^\top \rangle,
    \qquad t_j = -\tau / \ln|\lambda_j|,

over pairs ``(x, y)`` a lag apart, centred by their common mean.

Reference: Perez-Hernandez et al., J. Chem. Phys. 139, 015102 (2013); Sengar et al., arXiv 2509.02196 (cosine and sine
of the backbone dihedrals as features; the slowest time ``t_1`` and the lag at which the autocorrelation falls below
1/e).

Example::

    found = tica(features, lag=10)
    found.timescales[0]                                              # in frames
    decorrelation_time(autocorrelation(found.transform(features)[:, 0], lags=500))
"""

from collections.abc import Sequence
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from jaxlab.dynamics.latent.snapshots import Trajectories, snapshot_pairs
from jaxlab.dynamics.reduced_rank import check_finite, integer, is_concrete, real_array

__all__ = ["TICA", "autocorrelation", "decorrelation_time", "tica"]


@flax.struct.dataclass
class TICA:
    """Independent components, slowest first.

    Attributes:
      eigenvalues: their autocorrelations at the lag.
      timescales: implied relaxation times, in frames.
      mean: of the features.
      components: one a column, of unit variance.
    """

    eigenvalues: Float[Array, " k"]
    timescales: Float[Array, " k"]
    mean: Float[Array, " f"]
    components: Float[Array, "f k"]

    def transform(self, features: Float[Array | np.ndarray, "*batch f"]) -> Float[Array, "*batch k"]:
        """The components as functions of time."""
        return (jnp.asarray(features) - self.mean) @ self.components


def tica(features: Trajectories, *, lag: int, epsilon: float = 1e-6) -> TICA:
    """Time-lagged independent component analysis.

    Args:
      features: one trajectory ``[time, feature]`` or several.
      lag: in frames.
      epsilon: directions whose variance is below this share of the largest are left out; not under `jit`.

    Raises:
      TypeError: values that are no real numbers, a lag that is no integer.
      ValueError: a lag that no trajectory is longer than, values that are not finite, features that never vary.
    """
    x, y = snapshot_pairs(features, skip=lag, name="lag")
    mean, instantaneous, lagged = (np.asarray(part) for part in _moments(x, y))
    variances, axes = np.linalg.eigh(instantaneous)
    kept = np.flatnonzero(variances > epsilon * max(float(variances[-1]), 0))
    if len(kept) == 0 or not variances[-1] > 0:
        raise ValueError("the features do not vary")
    whitening = axes[:, kept] / np.sqrt(variances[kept])
    eigenvalues, vectors = np.linalg.eigh(whitening.T @ lagged @ whitening)
    order = np.argsort(-np.abs(eigenvalues))
    eigenvalues = eigenvalues[order]
    with np.errstate(divide="ignore"):
        timescales = -lag / np.log(np.abs(eigenvalues))
    components = whitening @ vectors[:, order]
    return TICA(*(jnp.asarray(part) for part in (eigenvalues, timescales, mean, components)))


@jax.jit
def _moments(x: Array, y: Array) -> tuple[Array, Array, Array]:
    mean = (x.mean(0) + y.mean(0)) / 2
    x, y = x - mean, y - mean
    lagged = x.T @ y / (2 * len(x))
    return mean, (x.T @ x + y.T @ y) / (2 * len(x)), lagged + lagged.T


def autocorrelation(
    series: Real[Array | np.ndarray, " t"] | Sequence[Real[Array | np.ndarray, " _"]], *, lags: int
) -> Float[Array, " k"]:
    """Normalised autocorrelation at lags 0 to ``lags``, of one series or averaged over several with a common mean.

    Raises:
      TypeError: values that are no real numbers, a number of lags that is no integer.
      ValueError: a series that is not longer than the lags, does not vary or is not finite.
    """
    several = list(series) if isinstance(series, Sequence) else [series]
    lags = integer("lags", lags)
    arrays = [real_array("a series", one, "[time]", batch=False) for one in several]
    if not arrays or not 0 <= lags < min(map(len, arrays)):
        shortest = min(map(len, arrays), default=0)
        raise ValueError(f"lags must be in [0, {shortest - 1}] for series of at least {shortest} frames, got {lags}")
    for one in arrays:
        check_finite("a series", one)
    mean = sum(one.sum() for one in arrays) / sum(map(len, arrays))
    products = sum(_products(one, mean, lags=lags) for one in arrays)
    counts = sum(len(one) - np.arange(lags + 1) for one in arrays)
    if is_concrete(products) and not products[0] > 0:
        raise ValueError("the series does not vary: it has no autocorrelation")
    correlation = products / counts
    return correlation / correlation[0]


@partial(jax.jit, static_argnames="lags")
def _products(series: Array, mean: Array, *, lags: int) -> Array:
    length = len(series)
    # Padded to twice the length: the product of spectra is a circular correlation.
    spectrum = jnp.fft.rfft(series - mean, 2 * length)
    return jnp.fft.irfft(jnp.abs(spectrum) ** 2, 2 * length)[: lags + 1]


def decorrelation_time(correlation: Float[Array | np.ndarray, " lags"]) -> float:
    """The first lag, between frames, at which the autocorrelation falls below 1/e; infinite where it does not.

    NaN where a value up to there is.
    """
    values = np.asarray(correlation, np.float64)
    below = np.flatnonzero(~(values >= np.exp(-1)))
    if len(below) == 0:
        return float("inf")
    after = int(below[0])
    if np.isnan(values[after]):
        return float("nan")
    if after == 0:
        return 0.0
    before = after - 1
    return before + (values[before] - np.exp(-1)) / (values[before] - values[after])
