r"""Spectra of Koopman operators in the units of their generator.

An operator that advances functions by ``dt`` has eigenvalues ``mu = exp(lambda dt)``. The generator eigenvalues
``lambda = log(mu) / dt`` (1/time; real part growth, imaginary part angular frequency) do not depend on the sampling
rate, nor do the eigenfunctions. A spectrum is the list of atoms ``(lambda_j, r_j, l_j)`` with

.. math::
    T r_j = \mu_j r_j, \qquad l_j^* T = \mu_j l_j^*.

The eigenproblem is r x r. XLA has a non-symmetric eigensolver on CPU; on accelerators the r x r matrix makes one trip
to the host (LAPACK through numpy), which works under `jit` and `vmap` and leaves everything else on the device. Keep it
out of inner loops. JAX has no derivative of non-symmetric eigenvectors: spectra are data, differentiate after them.
Do not put two batched `trajectory_spectrum` into one `jit` on the CPU, it can hang (`jaxlab.dynamics.reduced_rank`).

Reference: Germain et al., "A Spectral-Grassmann Wasserstein metric for operator representations of dynamical systems",
arXiv 2509.24920, section 3.

Deviations from the paper:

1. Every atom has multiplicity one. Eigenvalues that nearly coincide stay separate atoms, and the eigenvectors of an
   exactly repeated one are whatever basis LAPACK returns.
2. Branch of the logarithm: principal, a real negative ``mu`` has imaginary part ``+pi / dt`` whatever the sign of its
   zero. Frequencies above Nyquist alias.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float, Int, Real

from jaxlab.dynamics.reduced_rank import (
    Kernel,
    KernelOperator,
    LowRankOperator,
    Scalar,
    check_landmarks,
    delay_embedding,
    integer,
    inverse_square_root,
    is_concrete,
    real_array,
    reduced_rank_regression,
)

__all__ = [
    "KernelSpectrum",
    "Spectrum",
    "biorthogonalize",
    "eigenvector_condition",
    "generator_spectrum",
    "landmark_coordinates",
    "to_operator",
    "trajectory_operator",
    "trajectory_spectrum",
]

_SMALLEST_EIGENVALUE = 1e-8
_LARGEST_CONDITION = 1e8
_DIGIT = 0.1  # eigenvectors with condition number c have a relative error of c eps; beyond this no digit is left


@flax.struct.dataclass
class Spectrum:
    """Spectral atoms of an operator on R^d; leading batch axes hold several systems.

    Scale and phase of the eigenvectors carry no meaning. ``weight`` is the mass of each atom and sums to one; ``None``
    is equal mass. An eigenvalue of multiplicity m is an atom repeated m times.
    """

    eigenvalues: Complex[Array, "*batch r"]
    right: Complex[Array, "*batch d r"]
    left: Complex[Array, "*batch d r"]
    weight: Float[Array, "*batch r"] | None = None


@flax.struct.dataclass
class KernelSpectrum:
    """Spectral atoms whose right eigenfunctions are ``sum_i right_ij k(x_i, .)``, the left ones on ``y`` alike."""

    eigenvalues: Complex[Array, "*batch r"]
    right: Complex[Array, "*batch n r"]
    left: Complex[Array, "*batch m r"]
    x: Float[Array, "*batch n c"]
    y: Float[Array, "*batch m c"]
    weight: Float[Array, "*batch r"] | None = None
    kernel: Kernel = flax.struct.field(pytree_node=False, kw_only=True)


@overload
def generator_spectrum(
    operator: LowRankOperator | Float[Array | np.ndarray, "*batch d d"],
    *,
    dt: Scalar | Float[Array, "*#batch"] = ...,
    rank: int | None = ...,
) -> Spectrum: ...
@overload
def generator_spectrum(
    operator: KernelOperator, *, dt: Scalar | Float[Array, "*#batch"] = ..., rank: int | None = ...
) -> KernelSpectrum: ...
def generator_spectrum(
    operator: LowRankOperator | KernelOperator | Float[Array | np.ndarray, "*batch d d"],
    *,
    dt: Scalar | Float[Array, "*#batch"] = 1.0,
    rank: int | None = None,
) -> Spectrum | KernelSpectrum:
    """Eigenvalues of the generator and eigenfunctions of an operator that advances time by ``dt``.

    Args:
      operator: an estimate, or a dense matrix ``T`` with ``y ~ x T``.
      dt: sampling step, in the unit of time that the eigenvalues shall have the inverse of.
      rank: how many eigenvalues to keep, largest modulus first; ``None`` keeps all of the operator. A cut through a
        complex-conjugate pair leaves half of it.

    Returns:
      A `Spectrum`, or a `KernelSpectrum` for a `KernelOperator`, with equally weighted atoms. Under `jit` an operator
      without a logarithm gives NaN instead of an error.

    Raises:
      ValueError: ``dt <= 0``, more steps than systems, a matrix that is not square, a rank out of range, an eigenvalue
        of modulus below 1e-8 (its generator eigenvalue would be minus infinity) or below the rounding of the largest
        one (``r eps``; it would be noise), an eigenvalue that is not finite.

    Warns:
      RuntimeWarning: the eigenvector matrix has a condition number above 1e8, in float32 above ``0.1 / eps = 8e5`` (the
        operator is nearly defective).
    """
    operator = _factored(operator)
    if is_concrete(dt) and not np.all((np.asarray(dt) > 0) & (np.asarray(dt) < np.inf)):
        raise ValueError(f"dt must be positive and finite, got {dt}")
    if np.ndim(dt) > operator.input_factor.ndim - 2:
        raise ValueError(
            f"one dt or one for each system is needed, got shape {np.shape(dt)} for systems of shape "
            f"{operator.input_factor.shape[:-2]}"
        )
    size = operator.input_factor.shape[-1]
    rank = size if rank is None else integer("rank", rank)
    if not 1 <= rank <= size:
        raise ValueError(f"rank must be in [1, {size}], got {rank}")

    multipliers, right, left = _eigen(operator.core, rank)
    _check_multipliers(multipliers)
    # The sign of a zero imaginary part is an accident of rounding and would flip the branch of a negative eigenvalue.
    multipliers = jax.lax.complex(
        multipliers.real, jnp.where(multipliers.imag == 0, jnp.zeros_like(multipliers.imag), multipliers.imag)
    )
    modulus = jnp.abs(multipliers)
    logarithm = jnp.where(modulus < _smallest_modulus(modulus), jnp.nan, jnp.log(multipliers))
    step = jnp.asarray(dt, right.real.dtype)
    eigenvalues = logarithm / jnp.where(step > 0, step, jnp.nan)[..., None]
    right, left = operator.input_factor @ right, operator.output_factor @ left
    if isinstance(operator, KernelOperator):
        return KernelSpectrum(
            eigenvalues=eigenvalues, right=right, left=left, x=operator.x, y=operator.y, kernel=operator.kernel
        )
    spectrum = Spectrum(eigenvalues=eigenvalues, right=right, left=left)
    if is_concrete(spectrum):
        condition = float(jnp.max(eigenvector_condition(spectrum)))
        if not condition <= min(_LARGEST_CONDITION, _DIGIT / float(jnp.finfo(right.dtype).eps)):
            warnings.warn(
                f"nearly defective operator: its eigenvector matrix has condition number {condition:.1e}; "
                "the eigenvectors are unreliable, try a lower rank",
                RuntimeWarning,
                stacklevel=2,
            )
    return spectrum


def trajectory_operator(
    trajectory: Real[Array | np.ndarray, "*batch t c"],
    rank: int,
    *,
    dt: int | float = 1.0,
    lags: int | Sequence[float] = 1,
    regularization: Scalar | None = None,
    lengths: Int[Array | np.ndarray, "*batch"] | None = None,
) -> LowRankOperator:
    """From sampled trajectories to operators: delay embedding, then regression of each row on the last.

    Systems to be compared need the same channels in the same units: scale them by statistics of the whole collection,
    never one by one.

    Args:
      trajectory: samples in time order.
      rank: rank of the operators.
      dt, lags: see `delay_embedding`.
      regularization: see `reduced_rank_regression`.
      lengths: number of valid samples of each trajectory where they differ; what follows is padding (NaN too) and has
        no effect.

    Raises:
      TypeError: lengths that are no integers; as in `delay_embedding` and `reduced_rank_regression`.
      ValueError: as in those; a length outside [shortest useful, t], other than one length for each trajectory.
    """
    trajectory = real_array("trajectory", trajectory, "[time, channel]")
    rank = integer("rank", rank)
    if lengths is not None:
        lengths = _integer_lengths(lengths, trajectory.shape[:-2])
        within = jnp.arange(trajectory.shape[-2]) < lengths[..., None]
        trajectory = jnp.where(within[..., None], trajectory, 0)
    embedded = delay_embedding(trajectory, lags, dt=dt)
    x, y = embedded[..., :-1, :], embedded[..., 1:, :]
    if lengths is not None:
        span = trajectory.shape[-2] - x.shape[-2]
        _check_lengths(lengths, span + rank, trajectory.shape[-2])
        pairs = lengths - span
        valid = jnp.arange(x.shape[-2]) < pairs[..., None]
        # Rows of zeros add nothing to the moments; the factor turns their mean over all rows into one over the valid.
        scale = (valid * jnp.sqrt(x.shape[-2] / pairs)[..., None]).astype(x.dtype)[..., None]
        x, y = x * scale, y * scale
    return reduced_rank_regression(x, y, rank, regularization=regularization)


def trajectory_spectrum(
    trajectory: Real[Array | np.ndarray, "*batch t c"],
    rank: int,
    *,
    dt: int | float = 1.0,
    lags: int | Sequence[float] = 1,
    regularization: Scalar | None = None,
    lengths: Int[Array | np.ndarray, "*batch"] | None = None,
) -> Spectrum:
    """Spectra of sampled trajectories: `trajectory_operator`, then `generator_spectrum`.

    Example:
      >>> time = jnp.arange(500) * 0.02
      >>> wave = jnp.stack([jnp.sin(2 * jnp.pi * time), jnp.cos(2 * jnp.pi * time)], 1)
      >>> abs(trajectory_spectrum(wave, 2, dt=0.02).eigenvalues.imag) / (2 * jnp.pi)  # 1 Hz, twice
      Array([1., 1.], dtype=float32)
    """
    operator = trajectory_operator(trajectory, rank, dt=dt, lags=lags, regularization=regularization, lengths=lengths)
    return generator_spectrum(operator, dt=dt)


def eigenvector_condition(spectrum: Spectrum) -> Float[Array, "*batch"]:
    """Condition number of the matrix of unit right eigenvectors; infinite for a defective operator."""
    singular = jnp.linalg.svd(unit_columns(spectrum.right), compute_uv=False)
    return singular[..., 0] / singular[..., -1]


def biorthogonalize(spectrum: Spectrum) -> Spectrum:
    """Scale and mix the vectors so that right ones have unit norm and ``left^* right = I`` (what a rank-r `T` needs).

    Raises:
      TypeError: a `KernelSpectrum`; map it with `landmark_coordinates` first.
      ValueError: values that are not finite, ``right^* left`` is singular at this precision.
    """
    if not isinstance(spectrum, Spectrum):
        raise TypeError(f"a Spectrum is needed (see landmark_coordinates), got {type(spectrum).__name__}")
    right, left = unit_columns(spectrum.right), unit_columns(spectrum.left)
    product = right.conj().mT @ left
    left = left @ jnp.linalg.inv(product)
    if is_concrete(spectrum):
        if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(spectrum)):
            raise ValueError("the spectrum has eigenvalues or eigenvectors that are not finite")
        singular = np.linalg.svd(np.asarray(product), compute_uv=False)
        if not np.all(singular[..., -1] > singular.shape[-1] * np.finfo(singular.dtype).eps * singular[..., 0]):
            raise ValueError("right and left eigenvectors cannot be made biorthogonal: right^* left is singular")
    return replace(spectrum, right=right, left=left)


def to_operator(spectrum: Spectrum, *, dt: Scalar = 1.0) -> Complex[Array, "*batch d d"]:
    """The operator ``R diag(exp(lambda dt)) L^*`` with these atoms; real to rounding if they come in conjugate pairs.

    Raises:
      TypeError, ValueError: see `biorthogonalize`; ``dt <= 0``.
    """
    if is_concrete(dt) and not 0 < dt < np.inf:
        raise ValueError(f"dt must be positive and finite, got {dt}")
    spectrum = biorthogonalize(spectrum)
    return (spectrum.right * jnp.exp(spectrum.eigenvalues * dt)[..., None, :]) @ spectrum.left.conj().mT


def landmark_coordinates(spectrum: KernelSpectrum, landmarks: Float[Array, "m c"]) -> Spectrum:
    """Eigenfunctions of a kernel operator as vectors: coordinates in the span of the landmarks' kernel functions.

    With common landmarks, spectra of kernel operators become batched arrays, so that distance matrices are matrix
    products and Frechet means (the paper's control points) need no kernel. Exact where the span holds the
    eigenfunctions, their orthogonal projection elsewhere.

    Raises:
      TypeError: a `Spectrum`, which needs no landmarks.
      ValueError: landmarks that are not finite or have other channels than the states.
    """
    if not isinstance(spectrum, KernelSpectrum):
        raise TypeError(f"landmarks are for a KernelSpectrum, got {type(spectrum).__name__}")
    landmarks = check_landmarks(landmarks, spectrum.x.shape[-1])
    kernel = spectrum.kernel
    whitening = inverse_square_root(kernel(landmarks, landmarks))
    return Spectrum(
        eigenvalues=spectrum.eigenvalues,
        right=whitening @ kernel(landmarks, spectrum.x) @ spectrum.right,
        left=whitening @ kernel(landmarks, spectrum.y) @ spectrum.left,
        weight=spectrum.weight,
    )


def unit_columns(vectors: Complex[Array, "*batch d r"]) -> Complex[Array, "*batch d r"]:
    """Every column divided by its Euclidean norm; a column of zeros becomes NaN."""
    # Squares of very large or very small entries would overflow or vanish.
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(vectors), axis=-2, keepdims=True, initial=0))
    vectors = vectors / largest
    return vectors / jnp.linalg.norm(vectors, axis=-2, keepdims=True)


@partial(jax.jit, static_argnames="rank")
def _eigen(core: Array, rank: int) -> tuple[Array, Array, Array]:
    """Leading eigenvalues with right and left eigenvectors; left ones are biorthonormal to right ones."""
    values, right = jax.lax.platform_dependent(
        core, cpu=lambda matrix: tuple(jnp.linalg.eig(matrix)), default=_host_eig
    )
    left = jnp.linalg.inv(right).conj().mT
    order = jnp.argsort(-jnp.abs(values), axis=-1)[..., :rank]
    return (
        jnp.take_along_axis(values, order, axis=-1),
        jnp.take_along_axis(right, order[..., None, :], axis=-1),
        jnp.take_along_axis(left, order[..., None, :], axis=-1),
    )


def _host_eig(core: Array) -> tuple[Array, Array]:
    dtype = jnp.result_type(core.dtype, jnp.complex64)
    result = (jax.ShapeDtypeStruct(core.shape[:-1], dtype), jax.ShapeDtypeStruct(core.shape, dtype))

    def eig(matrix: Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        matrix = np.asarray(matrix)
        usable = np.isfinite(matrix).all(axis=(-1, -2), keepdims=True)
        values, vectors = np.linalg.eig(np.where(usable, matrix, 0))
        return (
            np.where(usable[..., 0], values, np.nan).astype(dtype),
            np.where(usable, vectors, np.nan).astype(dtype),
        )

    return jax.pure_callback(eig, result, core, vmap_method="expand_dims")


def _factored(operator: Any) -> LowRankOperator | KernelOperator:
    """The operator with factors that have matrix decompositions."""
    if not isinstance(operator, LowRankOperator | KernelOperator):
        matrix = jnp.asarray(operator)
        if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or 0 in matrix.shape[-2:]:
            raise ValueError(f"an operator is a square matrix, got shape {matrix.shape}")
        identity = jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)
        operator = LowRankOperator(input_factor=matrix, output_factor=identity)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), operator)


def _integer_lengths(lengths: Any, batch: tuple[int, ...]) -> Array:
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"lengths must be integers, got {lengths.dtype}")
    if lengths.shape != batch:
        raise ValueError(f"one length for each trajectory is needed, got shape {lengths.shape} for shape {batch}")
    return lengths


def _smallest_modulus(modulus: Array) -> Array:
    """Below this an eigenvalue is zero, or the rounding of the largest one."""
    noise = modulus.shape[-1] * jnp.finfo(modulus.dtype).eps * jnp.max(modulus, axis=-1, keepdims=True)
    return jnp.maximum(noise, _SMALLEST_EIGENVALUE)


def _check_lengths(lengths: Array, shortest: int, longest: int) -> None:
    if is_concrete(lengths) and not np.all((np.asarray(lengths) >= shortest) & (np.asarray(lengths) <= longest)):
        raise ValueError(
            f"lengths must be in [{shortest}, {longest}] for this window and rank, got {int(lengths.min())} to "
            f"{int(lengths.max())}"
        )


def _check_multipliers(multipliers: Array) -> None:
    if not is_concrete(multipliers):
        return
    modulus = np.abs(np.asarray(multipliers))
    if not np.all(np.isfinite(modulus)):
        raise ValueError("the operator has eigenvalues that are not finite; lower the rank or raise the regularization")
    if np.any(modulus < np.asarray(_smallest_modulus(jnp.asarray(modulus)))):
        raise ValueError(
            f"eigenvalue ~0 (modulus {modulus.min():.1e}): its generator eigenvalue is minus infinity, lower the rank"
        )
