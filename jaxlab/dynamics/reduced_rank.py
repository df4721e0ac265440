r"""Koopman operators of rank r estimated from snapshots: delay embedding and reduced-rank regression.

A stationary system is seen through pairs ``(x_i, y_i)`` where ``y_i`` is the state one sampling step after ``x_i``. In
features ``phi`` its transfer operator is regressed at a fixed rank,

.. math::
    C = X^\top X/n, \quad D = X^\top Y/n, \quad T = C_\gamma^{-1/2} [C_\gamma^{-1/2} D]_r, \quad
    C_\gamma = C + \gamma I, \qquad y \approx x\, T,

where ``[.]_r`` is the best approximation of rank r. With a kernel the same operator is
``sum_ij k(x_i, .) (U V^T)_ij k(y_j, .)`` and only Gram matrices appear. Both estimators return the two thin factors
of ``T``, so that its non-zero spectrum is that of an r x r matrix (`core`).

Two batched regressions (``eigh`` and ``svd``) inside one `jit` can hang on the CPU, a deadlock in XLA seen with jaxlib
0.10.2: compile them apart and run one after the other.

Reference: Kostic et al., "Learning dynamical systems via Koopman operator regression in reproducing kernel Hilbert
spaces", arXiv 2205.14027 (the estimator that Germain et al., arXiv 2509.24920, build their metric on).

Deviations from the references:

1. The default regularisation is ``1e-6`` times the largest eigenvalue of ``C`` (of ``K``), not an absolute number, so
   that a change of units leaves the spectrum alone.
2. The dual problem is solved as one symmetric eigenproblem of ``F^{1/2} L F^{1/2}``, ``F = K (K + gamma)^{-1}``,
   instead of the generalised non-symmetric ``L K u = s^2 (K + gamma) u``: same solution, no division by small
   eigenvalues of ``K``.
3. Nystroem uses one set of landmarks for inputs and outputs. Sharing it between systems puts all of them in one
   finite-dimensional space.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

__all__ = [
    "GaussianKernel",
    "KernelOperator",
    "LowRankOperator",
    "delay_embedding",
    "kernel_reduced_rank_regression",
    "linear_kernel",
    "reduced_rank_regression",
]

Kernel = Callable[[Array, Array], Array]
Scalar = int | float | Real[Array, ""]

_RELATIVE_REGULARIZATION = 1e-6


@flax.struct.dataclass
class LowRankOperator:
    """An operator ``T = input_factor @ output_factor^T`` on R^d, acting as ``y ~ x T``.

    A dense ``d x d`` matrix ``T`` is ``LowRankOperator(T, eye(d))``.
    """

    input_factor: Float[Array, "*batch d r"]
    output_factor: Float[Array, "*batch d r"]

    @property
    def matrix(self) -> Float[Array, "*batch d d"]:
        """The operator as a dense matrix."""
        return self.input_factor @ self.output_factor.mT

    @property
    def core(self) -> Float[Array, "*batch r r"]:
        """The r x r matrix with the non-zero spectrum of the operator."""
        return self.output_factor.mT @ self.input_factor


@flax.struct.dataclass
class KernelOperator:
    """An operator ``sum_ij k(x_i, .) (input_factor output_factor^T)_ij k(y_j, .)`` on the space of the kernel ``k``.

    ``x`` and ``y`` carry the functions; the kernel is static and compared by equality, so give systems that are to be
    compared the same one.
    """

    x: Float[Array, "n c"]
    y: Float[Array, "m c"]
    input_factor: Float[Array, "n r"]
    output_factor: Float[Array, "m r"]
    kernel: Kernel = flax.struct.field(pytree_node=False)

    @property
    def core(self) -> Float[Array, "r r"]:
        """The r x r matrix with the non-zero spectrum of the operator."""
        return self.output_factor.T @ self.kernel(self.y, self.x) @ self.input_factor


def linear_kernel(a: Float[Array, "n c"], b: Float[Array, "m c"]) -> Float[Array, "n m"]:
    """``k(a, b) = a . b``."""
    return a @ b.T


@dataclass(frozen=True)
class GaussianKernel:
    """``k(a, b) = exp(-|a - b|^2 / (2 bandwidth^2))``; equal bandwidths compare equal."""

    bandwidth: float

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth must be positive, got {self.bandwidth}")

    def __call__(self, a: Float[Array, "n c"], b: Float[Array, "m c"]) -> Float[Array, "n m"]:
        squared = jnp.sum(a**2, 1)[:, None] + jnp.sum(b**2, 1)[None, :] - 2 * a @ b.T
        return jnp.exp(-jnp.maximum(squared, 0) / (2 * self.bandwidth**2))


def delay_embedding(
    trajectory: Float[Array, "*batch t c"], lags: int | Sequence[float], *, dt: int | float = 1.0
) -> Float[Array, "*batch s e"]:
    """Stack each state with later ones: rows ``(z(t + lag_1), ..., z(t + lag_w))``.

    Systems sampled at different rates share a feature space only if their windows span the same time. Give ``lags`` in
    the unit of ``dt`` then; a lag between two samples is interpolated linearly, which is one filter for all rows and
    so moves no eigenvalue.

    Args:
      trajectory: samples in time order.
      lags: either a number ``w`` of consecutive samples, or the lags themselves, increasing and >= 0, in time units.
      dt: time between samples, used only with a sequence of lags.

    Returns:
      One row per time at which the whole window fits, the ``c`` channels of the first lag first.

    Raises:
      ValueError: no lag, a negative or non-increasing lag, ``dt <= 0``, a trajectory that is not finite or is too
        short for one pair of snapshots.

    Example:
      >>> delay_embedding(jnp.arange(5.0)[:, None], 3)[0]
      Array([0., 1., 2.], dtype=float32)
    """
    _check_finite("trajectory", trajectory)
    offsets = _sample_offsets(lags, dt)
    length = trajectory.shape[-2]
    rows = length - int(np.ceil(offsets[-1]))
    if rows < 2:
        raise ValueError(
            f"a delay window of {offsets[-1]:g} sampling steps needs at least {int(np.ceil(offsets[-1])) + 2} samples, "
            f"got {length}"
        )
    before, after = np.floor(offsets).astype(int), np.ceil(offsets).astype(int)
    times = np.arange(rows)[:, None]
    window = trajectory[..., times + before, :]
    if np.any(after != before):
        fraction = jnp.asarray(offsets - before, trajectory.dtype)[:, None]
        window = (1 - fraction) * window + fraction * trajectory[..., times + after, :]
    return window.reshape(*window.shape[:-2], -1)


def reduced_rank_regression(
    x: Float[Array, "*batch n d"],
    y: Float[Array, "*batch m d"],
    rank: int,
    *,
    regularization: Scalar | None = None,
) -> LowRankOperator:
    """Regress ``y ~ x T`` with ``T`` of the given rank and a ridge penalty.

    Args:
      x: features of the states.
      y: features of the states one step later, row by row.
      rank: rank of the operator, in ``[1, min(n, d)]``.
      regularization: the ridge ``gamma >= 0``, absolute; ``None`` is ``1e-6`` of the largest eigenvalue of ``C``.

    Raises:
      ValueError: differing shapes, a rank out of range, values that are not finite, a negative regularisation.
    """
    _check_snapshots(x, y, rank, min(x.shape[-2:]))
    _check_regularization(regularization)
    return _regress(x, y, regularization, rank=rank)


def kernel_reduced_rank_regression(
    x: Float[Array, "n c"],
    y: Float[Array, "n_y c"],
    rank: int,
    *,
    kernel: Kernel = linear_kernel,
    regularization: Scalar | None = None,
    landmarks: Float[Array, "m c"] | None = None,
) -> KernelOperator:
    """The same regression in the space of a kernel, O(n^3), or O(n m^2) with ``m`` landmarks (Nystroem).

    Args:
      x: states.
      y: states one step later, row by row.
      rank: rank of the operator, in ``[1, n]`` (``[1, m]`` with landmarks).
      kernel: ``kernel(a, b)`` gives the Gram matrix ``[len(a), len(b)]``. Use a hashable one that compares by value
        (`GaussianKernel`, a module-level function).
      regularization: the ridge, absolute; ``None`` is ``1e-6`` of the largest eigenvalue of ``k(X, X) / n``.
      landmarks: points whose kernel functions span the space of the operator.

    Raises:
      ValueError: differing shapes, a rank out of range, values that are not finite, a negative regularisation.
    """
    _check_snapshots(x, y, rank, len(x) if landmarks is None else len(landmarks))
    _check_regularization(regularization)
    if landmarks is not None:
        whitening = inverse_square_root(kernel(landmarks, landmarks))
        operator = reduced_rank_regression(
            kernel(x, landmarks) @ whitening, kernel(y, landmarks) @ whitening, rank, regularization=regularization
        )
        return KernelOperator(
            x=landmarks,
            y=landmarks,
            input_factor=whitening @ operator.input_factor,
            output_factor=whitening @ operator.output_factor,
            kernel=kernel,
        )
    return _kernel_regress(x, y, regularization, rank=rank, kernel=kernel)


def inverse_square_root(gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The pseudo-inverse square root of a positive semi-definite matrix, null directions (to rounding) left out."""
    values, vectors = jnp.linalg.eigh(gram)
    floor = len(gram) * jnp.finfo(gram.dtype).eps * values[-1]
    scale = jnp.where(values > floor, 1 / jnp.sqrt(jnp.maximum(values, floor)), 0)
    return (vectors * scale) @ vectors.T


def is_concrete(tree: Any) -> bool:
    """Whether all leaves have values, that is, whether a check of values can raise."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


@partial(jax.jit, static_argnames="rank")
def _regress(x: Array, y: Array, regularization: Scalar | None, *, rank: int) -> LowRankOperator:
    n = x.shape[-2]
    values, vectors = jnp.linalg.eigh(x.mT @ x / n)
    shifted = jnp.maximum(values, 0) + _ridge(values, regularization)
    whitening = (vectors / jnp.sqrt(shifted)[..., None, :]) @ vectors.mT
    u, s, vt = jnp.linalg.svd(whitening @ (x.mT @ y / n), full_matrices=False)
    return LowRankOperator(
        input_factor=whitening @ (u[..., :rank] * s[..., None, :rank]), output_factor=vt.mT[..., :rank]
    )


@partial(jax.jit, static_argnames=("rank", "kernel"))
def _kernel_regress(x: Array, y: Array, regularization: Scalar | None, *, rank: int, kernel: Kernel) -> KernelOperator:
    n = len(x)
    values, vectors = jnp.linalg.eigh(kernel(x, x) / n)
    values = jnp.maximum(values, 0)
    shifted = values + _ridge(values, regularization)
    output_gram = kernel(y, y) / n
    half_filter = (vectors * jnp.sqrt(values / shifted)) @ vectors.T
    s2, w = jnp.linalg.eigh(half_filter @ output_gram @ half_filter)
    w, s2 = w[:, -rank:], s2[-rank:]
    g = output_gram @ (half_filter @ w) / s2
    u = (vectors / shifted) @ (vectors.T @ g)
    v = (vectors * (values / shifted)) @ (vectors.T @ g)
    return KernelOperator(x=x, y=y, input_factor=u / jnp.sqrt(n), output_factor=v / jnp.sqrt(n), kernel=kernel)


def _check_finite(name: str, values: Array) -> None:
    if is_concrete(values):
        bad = np.argwhere(~np.isfinite(np.asarray(values)))
        if len(bad):
            raise ValueError(
                f"{name} must be finite; {len(bad)} of its values are not, the first at {tuple(bad[0].tolist())}"
            )


def _check_snapshots(x: Array, y: Array, rank: int, largest: int) -> None:
    if x.shape != y.shape:
        raise ValueError(f"x and y must hold the same number of snapshots and features, got {x.shape} and {y.shape}")
    if not 1 <= rank <= largest:
        raise ValueError(f"rank must be in [1, {largest}] for snapshots of shape {x.shape}, got {rank}")
    _check_finite("x", x)
    _check_finite("y", y)


def _check_regularization(regularization: Scalar | None) -> None:
    if regularization is not None and is_concrete(regularization) and not regularization >= 0:
        raise ValueError(f"regularization must be >= 0, got {regularization}")


def _ridge(values: Array, regularization: Scalar | None) -> Array:
    if regularization is None:
        return _RELATIVE_REGULARIZATION * values[..., -1:]
    return jnp.asarray(regularization, values.dtype)


def _sample_offsets(lags: int | Sequence[float], dt: int | float) -> np.ndarray:
    if isinstance(lags, int):
        if lags < 1:
            raise ValueError(f"a delay window needs at least one sample, got {lags}")
        return np.arange(lags, dtype=float)
    times = np.asarray(lags, dtype=float)
    if not dt > 0:
        raise ValueError(f"dt must be positive, got {dt}")
    if len(times) == 0 or times[0] < 0 or np.any(np.diff(times) <= 0):
        raise ValueError(f"lags must be increasing and >= 0, got {list(lags)}")
    offsets = times / dt
    # 0.05 / 0.005 is 10.000000000000002: without the rounding a lag on the grid would ask for one sample more.
    nearest = np.round(offsets)
    return np.where(np.abs(offsets - nearest) < 1e-6, nearest, offsets)
