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
4. A rank that the data do not have at the working precision is refused: the directions beyond it would be rounding.

Integers and half precision (which has no matrix decompositions) are computed in float32.
"""

import math
import operator
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
        object.__setattr__(self, "bandwidth", float(self.bandwidth))  # an array would have no hash
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth must be positive and finite, got {self.bandwidth}")

    def __call__(self, a: Float[Array, "n c"], b: Float[Array, "m c"]) -> Float[Array, "n m"]:
        squared = jnp.sum(a**2, 1)[:, None] + jnp.sum(b**2, 1)[None, :] - 2 * a @ b.T
        return jnp.exp(-jnp.maximum(squared, 0) / (2 * self.bandwidth**2))


def delay_embedding(
    trajectory: Real[Array | np.ndarray, "*batch t c"], lags: int | Sequence[float], *, dt: int | float = 1.0
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
      TypeError: a trajectory that is no array of real numbers, a number of lags that is no integer.
      ValueError: no lag, a negative or non-increasing lag, ``dt <= 0``, a trajectory without a time and a channel axis,
        not finite, or too short for one pair of snapshots.

    Example:
      >>> delay_embedding(jnp.arange(5.0)[:, None], 3)[0]
      Array([0., 1., 2.], dtype=float32)
    """
    # Integers would cut off what lies between two samples.
    trajectory = real_array("trajectory", trajectory, "[time, channel]", half=True)
    check_finite("trajectory", trajectory)
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
    x: Real[Array | np.ndarray, "*batch n d"],
    y: Real[Array | np.ndarray, "*batch m d"],
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
      TypeError: values that are not real numbers, a rank that is no integer.
      ValueError: differing shapes, a rank out of range or (outside `jit`) above the numerical rank of the data, values
        that are not finite, so large or so small that their squares overflow or vanish, a negative regularisation.
    """
    x, y = (real_array(name, values, "[snapshot, feature]") for name, values in (("x", x), ("y", y)))
    rank = _check_snapshots(x, y, rank, min(x.shape[-2:]))
    _check_regularization(regularization)
    found, supported = _regress(x, y, regularization, rank=rank)
    _check_supported(supported, rank, found.input_factor.dtype)
    return found


def kernel_reduced_rank_regression(
    x: Real[Array | np.ndarray, "n c"],
    y: Real[Array | np.ndarray, "n_y c"],
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
      TypeError: values that are not real numbers, a rank that is no integer.
      ValueError: as in `reduced_rank_regression`; a batch of systems (use `jax.vmap`); landmarks that are not finite or
        have other channels.
    """
    x, y = (real_array(name, values, "[snapshot, channel]", batch=False) for name, values in (("x", x), ("y", y)))
    if landmarks is not None:
        landmarks = check_landmarks(landmarks, x.shape[-1])
    rank = _check_snapshots(x, y, rank, len(x) if landmarks is None else len(landmarks))
    _check_regularization(regularization)
    if landmarks is not None:
        whitening = inverse_square_root(kernel(landmarks, landmarks))
        reduced = reduced_rank_regression(
            kernel(x, landmarks) @ whitening, kernel(y, landmarks) @ whitening, rank, regularization=regularization
        )
        return KernelOperator(
            x=landmarks,
            y=landmarks,
            input_factor=whitening @ reduced.input_factor,
            output_factor=whitening @ reduced.output_factor,
            kernel=kernel,
        )
    found, supported = _kernel_regress(x, y, regularization, rank=rank, kernel=kernel)
    _check_supported(supported, rank, found.input_factor.dtype)
    return found


def inverse_square_root(gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The pseudo-inverse square root of a positive semi-definite matrix, null directions (to rounding) left out."""
    values, vectors = jnp.linalg.eigh(gram)
    floor = len(gram) * jnp.finfo(gram.dtype).eps * values[-1]
    scale = jnp.where(values > floor, 1 / jnp.sqrt(jnp.maximum(values, floor)), 0)
    return (vectors * scale) @ vectors.T


def is_concrete(tree: Any) -> bool:
    """Whether all leaves have values, that is, whether a check of values can raise."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def real_array(name: str, values: Any, axes: str, *, batch: bool = True, half: bool = False) -> Array:
    """The values as a floating-point array whose last axes are ``axes``, in at least float32 unless ``half``.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: too few axes, too many without ``batch``, an axis of length zero after the first of ``axes``.
    """
    array = jnp.asarray(values)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"{name} must hold real numbers, got {array.dtype}")
    needed = axes.count(",") + 1
    if array.ndim < needed or (array.ndim > needed and not batch) or 0 in array.shape[array.ndim - needed + 1 :]:
        raise ValueError(f"{name} must be an array {axes}, got shape {array.shape}")
    if half and jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def integer(name: str, value: Any) -> int:
    """A static size as a Python int.

    Raises:
      TypeError: not an integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def check_landmarks(landmarks: Array, channels: int) -> Array:
    """Landmarks as an array, for states of so many channels.

    Raises:
      ValueError: other channels, values that are not finite.
    """
    landmarks = real_array("landmarks", landmarks, "[landmark, channel]", batch=False)
    if landmarks.shape[1] != channels:
        raise ValueError(f"landmarks must have the {channels} channels of the states, got shape {landmarks.shape}")
    check_finite("landmarks", landmarks)
    return landmarks


@partial(jax.jit, static_argnames="rank")
def _regress(x: Array, y: Array, regularization: Scalar | None, *, rank: int) -> tuple[LowRankOperator, Array]:
    """The operator, and the rank that the data support at this precision (-1 where it is not finite)."""
    n = x.shape[-2]
    values, vectors = jnp.linalg.eigh(x.mT @ x / n)
    shifted = jnp.maximum(values, 0) + _ridge(values, regularization)
    whitening = (vectors / jnp.sqrt(shifted)[..., None, :]) @ vectors.mT
    u, s, vt = jnp.linalg.svd(whitening @ (x.mT @ y / n), full_matrices=False)
    # The rounding of the moments, eps of the largest, goes through the whitening of the weakest direction.
    floor = jnp.finfo(s.dtype).eps * jnp.sqrt(shifted[..., -1:] / shifted[..., :1]) * s[..., :1]
    found = LowRankOperator(
        input_factor=whitening @ (u[..., :rank] * s[..., None, :rank]), output_factor=vt.mT[..., :rank]
    )
    return found, _supported_rank(found, s > floor)


@partial(jax.jit, static_argnames=("rank", "kernel"))
def _kernel_regress(
    x: Array, y: Array, regularization: Scalar | None, *, rank: int, kernel: Kernel
) -> tuple[KernelOperator, Array]:
    n = len(x)
    values, vectors = jnp.linalg.eigh(kernel(x, x) / n)
    values = jnp.maximum(values, 0)
    shifted = values + _ridge(values, regularization)
    output_gram = kernel(y, y) / n
    half_filter = (vectors * jnp.sqrt(values / shifted)) @ vectors.T
    s2, w = jnp.linalg.eigh(half_filter @ output_gram @ half_filter)
    supported = s2 > n * jnp.finfo(s2.dtype).eps * s2[-1]
    w, s2 = w[:, -rank:], s2[-rank:]
    g = output_gram @ (half_filter @ w) / s2
    u = (vectors / shifted) @ (vectors.T @ g)
    v = (vectors * (values / shifted)) @ (vectors.T @ g)
    found = KernelOperator(x=x, y=y, input_factor=u / jnp.sqrt(n), output_factor=v / jnp.sqrt(n), kernel=kernel)
    return found, _supported_rank(found, supported)


def _supported_rank(found: LowRankOperator | KernelOperator, supported: Array) -> Array:
    finite = jnp.all(jnp.isfinite(found.core), axis=(-1, -2))
    return jnp.where(finite, jnp.sum(supported, axis=-1), -1)


def _check_supported(supported: Array, rank: int, precision: jnp.dtype) -> None:
    if not is_concrete(supported):
        return
    least = np.asarray(supported).min()
    if least < 0:
        raise ValueError(
            f"the regression is not finite: the squares of the values overflow or vanish in {precision}, "
            "scale the data, or raise the regularization"
        )
    if least < rank:
        raise ValueError(
            f"the data support only rank {least} in {precision}, got rank {rank}: lower the rank or raise the "
            "regularization"
        )


def check_finite(name: str, values: Array) -> None:
    """Raise `ValueError` unless all values are finite, with the place of the first that is not."""
    if is_concrete(values):
        bad = np.argwhere(~np.isfinite(np.asarray(values)))
        if len(bad):
            raise ValueError(
                f"{name} must be finite; {len(bad)} of its values are not, the first at {tuple(bad[0].tolist())}"
            )


def _check_snapshots(x: Array, y: Array, rank: int, largest: int) -> int:
    rank = integer("rank", rank)
    if x.shape != y.shape:
        raise ValueError(f"x and y must hold the same number of snapshots and features, got {x.shape} and {y.shape}")
    if not 1 <= rank <= largest:
        raise ValueError(f"rank must be in [1, {largest}] for snapshots of shape {x.shape}, got {rank}")
    check_finite("x", x)
    check_finite("y", y)
    return rank


def _check_regularization(regularization: Scalar | None) -> None:
    if regularization is not None and is_concrete(regularization) and not 0 <= regularization < math.inf:
        raise ValueError(f"regularization must be >= 0 and finite, got {regularization}")


def _ridge(values: Array, regularization: Scalar | None) -> Array:
    if regularization is None:
        return _RELATIVE_REGULARIZATION * values[..., -1:]
    ridge = jnp.asarray(regularization, values.dtype)
    return jnp.where(ridge >= 0, ridge, jnp.nan)


def _sample_offsets(lags: int | Sequence[float], dt: int | float) -> np.ndarray:
    if np.ndim(lags) == 0:
        count = integer("the number of lags", lags)
        if count < 1:
            raise ValueError(f"a delay window needs at least one sample, got {count}")
        return np.arange(count, dtype=float)
    times = np.asarray(lags, dtype=float)
    if not 0 < dt < math.inf:
        raise ValueError(f"dt must be positive and finite, got {dt}")
    if (
        times.ndim != 1
        or len(times) == 0
        or not (times[0] >= 0 and np.all(np.diff(times) > 0) and times[-1] < math.inf)
    ):
        raise ValueError(f"lags must be increasing, >= 0 and finite, got {times.tolist()}")
    offsets = times / dt
    # 0.05 / 0.005 is 10.000000000000002: without the rounding a lag on the grid would ask for one sample more.
    nearest = np.round(offsets)
    offsets = np.where(np.abs(offsets - nearest) < 1e-6, nearest, offsets)
    if not (np.all(np.diff(offsets) > 0) and offsets[-1] < math.inf):
        raise ValueError(f"lags must differ by more than 1e-6 sampling steps, got {times.tolist()} for dt {dt}")
    return offsets
