r"""Dynamic mode decomposition: the linear propagator, its modes and its stationary state.

From pairs ``X`` (states) and ``Y`` (states one step later), one a column, and the singular value decomposition
``X = U S V^T`` cut at rank r,

.. math::
    A = Y V_r S_r^{-1} U_r^\top, \qquad \tilde A = U_r^\top A\, U_r, \qquad z_{t+1} = A z_t + F \xi_t .

Eigenvalues ``mu`` of ``A~`` are those of ``A`` that are not zero; ``A U_r w = mu U_r w`` up to what ``Y`` leaves of the
span, and a mode decays within ``-dt / ln|mu|``. With noise of covariance ``Q = F F^T`` the covariance settles at
``S = A S A^T + Q`` where the spectral radius of A is below one.

The estimator differs from `jaxlab.dynamics.reduced_rank_regression`, which cuts the rank of the product and not of the
input; both give a `LowRankOperator`, so that `generator_spectrum` and the metric apply to either.

Reference: Sengar et al., arXiv 2509.02196; Tu et al., arXiv 1312.0041. Deviations from the paper:

1. The noise is calibrated on the residuals (`jaxlab.dynamics.latent.noise`); the released code fixes it at 1e-4 to
   1e-2.
2. Eigenvalues above 0.999 can be pulled back to it (`stabilize`), since one above 1 diverges over 10 000 steps.

Example::

    x, y = snapshot_pairs(z, skip=5)
    propagator = stabilize(fit_koopman(x, y, rank=10))
    times = relaxation_times(jnp.linalg.eigvals(propagator.operator.core), dt=5.0)
"""

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float, Real

from jaxlab.dynamics.latent.noise import NoiseKind, noise_factor
from jaxlab.dynamics.latent.snapshots import check_pairs
from jaxlab.dynamics.reduced_rank import LowRankOperator, integer, is_concrete

__all__ = [
    "KoopmanPropagator",
    "dynamic_mode_decomposition",
    "dynamic_modes",
    "fit_koopman",
    "relaxation_times",
    "stabilize",
    "stationary_covariance",
]


@flax.struct.dataclass
class KoopmanPropagator:
    """``z A^T + F xi`` as a `Propagator`.

    Attributes:
      operator: ``A^T`` in two thin factors.
      noise: the factor ``F``.
    """

    operator: LowRankOperator
    noise: Float[Array, "d d"]

    @property
    def draws(self) -> int:
        """One."""
        return 1

    def mean(self, z: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """The step without its noise."""
        inner, outer = self.operator.input_factor, self.operator.output_factor
        # Two thin products cost more than one where the rank is above half of the width.
        return (z @ inner) @ outer.mT if 2 * inner.shape[1] <= inner.shape[0] else z @ self.operator.matrix

    def forcing(self, noise: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
        """``F xi``."""
        return noise @ self.noise.T

    def advance(self, z: Float[Array, "*batch d"], forcing: Float[Array, "1 *batch d"]) -> Float[Array, "*batch d"]:
        """The next state, from what is added to its mean."""
        return self.mean(z) + forcing[0]

    def step(self, z: Float[Array, "*batch d"], noise: Float[Array, "1 *batch d"]) -> Float[Array, "*batch d"]:
        """The next state."""
        return self.advance(z, self.forcing(noise))


def dynamic_mode_decomposition(
    x: Real[Array | np.ndarray, "_ d"], y: Real[Array | np.ndarray, "_ d"], *, rank: int | None = None
) -> LowRankOperator:
    """The operator ``A^T`` with ``y ~ x A^T``, of the rank of the leading singular directions of ``x``.

    Args:
      x: states, one a row; centre them first.
      y: states one step later.
      rank: in ``[1, min(n, d)]``; ``None`` keeps every direction that is above rounding.

    Raises:
      TypeError: values that are no real numbers, a rank that is no integer.
      ValueError: differing shapes, values that are not finite, a rank out of range or above that of the data.
    """
    x, y = check_pairs(x, y)
    largest = min(x.shape)
    if rank is not None and not 1 <= (rank := integer("rank", rank)) <= largest:
        raise ValueError(f"rank must be in [1, {largest}] for {x.shape[0]} pairs of {x.shape[1]} latents, got {rank}")
    left, singular, right = _decompose(x)
    if is_concrete(singular):
        floor = max(x.shape) * jnp.finfo(x.dtype).eps * singular[0]
        supported = int(np.sum(np.asarray(singular > floor)))
        if rank is not None and rank > supported:
            raise ValueError(f"the data support only rank {supported} in {x.dtype}, got rank {rank}")
        rank = rank or supported
        if rank == 0:
            raise ValueError("the states are all zero: nothing can be regressed on them")
    rank = rank or largest
    return LowRankOperator(input_factor=right[:rank].T / singular[:rank], output_factor=y.T @ left[:, :rank])


def fit_koopman(
    x: Real[Array | np.ndarray, "_ d"],
    y: Real[Array | np.ndarray, "_ d"],
    *,
    rank: int | None = None,
    noise: NoiseKind = "full",
    sigma: float | None = None,
    held_out: tuple[Real[Array | np.ndarray, "_ _"], Real[Array | np.ndarray, "_ _"]] | None = None,
) -> KoopmanPropagator:
    """`dynamic_mode_decomposition` with calibrated noise.

    Args:
      x: states.
      y: states one step later.
      rank: of the operator.
      noise: kind of `noise_factor`.
      sigma: of ``noise="fixed"``.
      held_out: pairs for the calibration; ``None`` takes those of the fit, whose residuals are a little smaller.

    Raises:
      ValueError: as in `dynamic_mode_decomposition` and `noise_factor`.
    """
    operator = dynamic_mode_decomposition(x, y, rank=rank)
    before, after = check_pairs(*(held_out or (x, y)))
    if before.shape[1] != len(operator.input_factor):
        raise ValueError(
            f"held-out pairs must have the {len(operator.input_factor)} latents of the others, got {before.shape[1]}"
        )
    residuals = after - (before @ operator.input_factor) @ operator.output_factor.T
    return KoopmanPropagator(operator=operator, noise=noise_factor(residuals, kind=noise, sigma=sigma))


def dynamic_modes(operator: LowRankOperator) -> tuple[Complex[Array, " r"], Complex[Array, "d r"]]:
    """Eigenvalues of ``A``, largest first, and its eigenvectors of unit length, one a column.

    The eigenproblem of a non-symmetric matrix runs on the CPU in XLA.
    """
    # The operator acts on rows, so the modes are left eigenvectors of it.
    values, vectors = jnp.linalg.eig(operator.core.mT)
    modes = operator.output_factor @ vectors
    order = jnp.argsort(-jnp.abs(values))
    return values[order], (modes / jnp.linalg.norm(modes, axis=0))[:, order]


def relaxation_times(eigenvalues: Array, *, dt: float | int = 1.0) -> Float[Array, " r"]:
    """``-dt / ln|mu|``: infinite for ``|mu| = 1``, negative for growing modes, zero for ``mu = 0``.

    Raises:
      ValueError: ``dt`` that is not positive.
    """
    if not 0 < dt < math.inf:
        raise ValueError(f"dt must be positive and finite, got {dt}")
    return -dt / jnp.log(jnp.abs(eigenvalues))


def stationary_covariance(
    operator: LowRankOperator, noise: Float[Array, "d d"], *, doublings: int = 30
) -> Float[Array, "d d"]:
    """The solution of ``S = A S A^T + F F^T``; infinite or NaN where the spectral radius of A is one or more.

    By doubling, ``S_{k+1} = S_k + A_k S_k A_k^T`` and ``A_{k+1} = A_k^2``: ``k`` rounds sum 2^k terms of the series.

    Args:
      operator: ``A^T``.
      noise: the factor F.
      doublings: 30 are enough for a spectral radius of 1 - 1e-8.
    """

    def double(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        power, total = carry
        return (power @ power, total + power @ total @ power.T), None

    (_, total), _ = jax.lax.scan(double, (operator.matrix.T, noise @ noise.T), length=doublings)
    return total


def stabilize(propagator: KoopmanPropagator, *, largest: float | int = 0.999) -> KoopmanPropagator:
    """Pull eigenvalues with a modulus above ``largest`` back to it; modes and phases stay. Not under `jit`.

    Raises:
      ValueError: ``largest`` out of (0, 1).
    """
    if not 0 < largest < 1:
        raise ValueError(f"largest must be in (0, 1), got {largest}")
    operator = propagator.operator
    values, vectors = np.linalg.eig(np.asarray(operator.core, np.float64))
    size = np.abs(values)
    if np.all(size <= largest):
        return propagator
    # core' = core M has the eigenvalues wanted where M has their ratios to the old ones in the same basis.
    ratios = np.where(size > largest, largest / np.maximum(size, largest), 1.0)
    scaling = np.real((vectors * ratios) @ np.linalg.inv(vectors))
    factor = operator.input_factor @ jnp.asarray(scaling, operator.input_factor.dtype)
    return dataclasses.replace(propagator, operator=dataclasses.replace(operator, input_factor=factor))


@jax.jit
def _decompose(x: Array) -> tuple[Array, Array, Array]:
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    return u, s, vt
