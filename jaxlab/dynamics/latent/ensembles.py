r"""How far apart two ensembles are: Jensen-Shannon divergences of histograms.

.. math::
    \mathrm{JSD}(p, q) = \tfrac12 \mathrm{KL}(p \| m) + \tfrac12 \mathrm{KL}(q \| m), \qquad m = (p + q)/2,

in natural logarithms, so that it lies in [0, ln 2]. Two finite samples of one distribution have a divergence above
zero; compare with that of two halves of the reference, the noise floor.

Reference: Sengar et al., arXiv 2509.02196 (50 bins in one dimension; 36 x 36 in two are our choice).

Example:
  >>> a = jnp.linspace(-1.0, 1.0, 1000)
  >>> float(histogram_divergence(a, a)) == 0.0
  True
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from jaxlab.dynamics.reduced_rank import check_finite, real_array

__all__ = ["coordinate_divergence", "histogram_divergence", "histogram_divergence_2d", "jensen_shannon"]

Range = tuple[float, float]


def jensen_shannon(p: Float[Array, "*bins"], q: Float[Array, "*bins"]) -> Float[Array, ""]:
    """Divergence of two histograms, normalised here; NaN where one is empty."""
    p, q = p / p.sum(), q / q.sum()
    middle = (p + q) / 2

    def half(a: Array) -> Array:
        # The inner where keeps gradients of empty bins finite, the difference of logarithms those of nearly empty ones:
        # the derivative of a quotient squares its denominator.
        logarithms = jnp.log(jnp.where(a > 0, a, 1)) - jnp.log(jnp.where(a > 0, middle, 1))
        return jnp.sum(jnp.where(a > 0, a * logarithms, 0))

    return jnp.maximum((half(p) + half(q)) / 2, 0)


def histogram_divergence(
    a: Real[Array | np.ndarray, " n"],
    b: Real[Array | np.ndarray, " m"],
    *,
    bins: int = 50,
    range: Range | None = None,
) -> Float[Array, ""]:
    """Divergence of one-dimensional histograms.

    Args:
      a: samples.
      b: samples.
      bins: number of bins.
      range: of the bins; ``None`` is that of both samples. Samples outside count in the outermost bins.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: an empty sample, values that are not finite, no bin, an empty range.
    """
    a, b = (_samples(name, one, 1) for name, one in (("a", a), ("b", b)))
    return _divergence(a[:, None], b[:, None], bins, (range,))


def histogram_divergence_2d(
    a: Real[Array | np.ndarray, "n 2"],
    b: Real[Array | np.ndarray, "m 2"],
    *,
    bins: int = 36,
    range: Range | None = (-np.pi, np.pi),
) -> Float[Array, ""]:
    """Divergence of two-dimensional histograms, by default of pairs of angles in radians.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: as in `histogram_divergence`.
    """
    a, b = (_samples(name, one, 2) for name, one in (("a", a), ("b", b)))
    return _divergence(a, b, bins, (range, range))


def coordinate_divergence(
    a: Real[Array | np.ndarray, "n ..."], b: Real[Array | np.ndarray, "m ..."], *, bins: int = 50
) -> Float[Array, ""]:
    """Mean over all coordinates of the divergence of their histograms, each over the range of both samples.

    Args:
      a: samples of aligned coordinates, for instance ``[frame, atom, 3]``.
      b: samples of the same shape but for the number.
      bins: number of bins.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: shapes that differ, values that are not finite, no bin.
    """
    if np.shape(a)[1:] != np.shape(b)[1:]:
        raise ValueError(f"samples must have the same coordinates, got shapes {np.shape(a)} and {np.shape(b)}")
    a, b = (_samples(name, np.reshape(one, (len(one), -1)), 2) for name, one in (("a", a), ("b", b)))
    _check_bins(bins)
    return _by_coordinate(a, b, bins=bins)


def _samples(name: str, values: Array | np.ndarray, axes: int) -> Array:
    values = real_array(name, values, "[sample]" if axes == 1 else "[sample, coordinate]", batch=False)
    if len(values) == 0:
        raise ValueError(f"{name} holds no sample")
    check_finite(name, values)
    return values


def _check_bins(bins: int) -> None:
    if bins < 1:
        raise ValueError(f"at least one bin is needed, got {bins}")


def _divergence(a: Array, b: Array, bins: int, ranges: tuple[Range | None, ...]) -> Array:
    _check_bins(bins)
    for given in ranges:
        if given is not None and not given[0] < given[1]:
            raise ValueError(f"range must be a pair of rising numbers, got {given}")
    return _binned(a, b, ranges=tuple(given and (float(given[0]), float(given[1])) for given in ranges), bins=bins)


@functools.partial(jax.jit, static_argnames="bins")
def _by_coordinate(a: Array, b: Array, *, bins: int) -> Array:
    def of_column(columns: tuple[Array, ...]) -> Array:
        a, b = columns
        low, high = jnp.minimum(a.min(), b.min()), jnp.maximum(a.max(), b.max())
        return jensen_shannon(*(_counts(_bin(one, bins, low, high), bins) for one in (a, b)))

    # One column after the other: all histograms at once would be as large as the samples.
    return jax.lax.map(of_column, (a.T, b.T)).mean()


@functools.partial(jax.jit, static_argnames=("ranges", "bins"))
def _binned(a: Array, b: Array, *, ranges: tuple[Range | None, ...], bins: int) -> Array:
    index = [jnp.zeros(len(one), jnp.int32) for one in (a, b)]
    for k, given in enumerate(ranges):
        pair = (a[:, k], b[:, k])
        low = jnp.minimum(pair[0].min(), pair[1].min()) if given is None else jnp.asarray(given[0], a.dtype)
        high = jnp.maximum(pair[0].max(), pair[1].max()) if given is None else jnp.asarray(given[1], a.dtype)
        index = [bins * old + _bin(values, bins, low, high) for old, values in zip(index, pair, strict=True)]
    return jensen_shannon(*(_counts(one, bins ** len(ranges)) for one in index))


def _bin(values: Array, bins: int, low: Array, high: Array) -> Array:
    # Where all samples are equal the range is empty: one bin holds them all.
    place = (values - low) / jnp.where(high > low, high - low, 1) * bins
    return jnp.clip(jnp.floor(place), 0, bins - 1).astype(jnp.int32)


def _counts(index: Array, length: int) -> Array:
    return jnp.zeros(length, jnp.float32).at[index].add(1.0)
