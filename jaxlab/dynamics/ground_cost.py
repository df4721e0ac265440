r"""Cost of turning one spectral atom into another: eigenvalue against eigenvalue, subspace against subspace.

An atom is a generator eigenvalue with the line spanned by ``r (x) l`` (right and left eigenfunction). With unit vectors
the lines meet at the similarity ``delta = |<r, r'> <l, l'>|`` in [0, 1], and

.. math::
    d = \eta\,|\lambda - \lambda'|_s + (1 - \eta)\, d_G(\delta)

with ``|.|_s`` after scaling real and imaginary parts. The modulus makes ``delta`` blind to scale and phase.

==============  ==========================  ===================================================================
``grassmann``   ``d_G``
==============  ==========================  ===================================================================
projector       ``sqrt(2 (1 - delta^2))``   paper: Hilbert-Schmidt norm of the difference of orthogonal projectors
chordal         ``sqrt(1 - delta^2)``       POT
geodesic        ``arccos(delta)``
procrustes      ``sqrt(2 (1 - delta))``
martin          ``sqrt(-log(delta^2))``     a pseudo-metric, cut where ``delta^2`` falls below 1e-12
==============  ==========================  ===================================================================

Reference: Germain et al., arXiv 2509.24920; POT's ``ot.sgot`` (same authors) for the second convention.

Deviations from the paper:

1. The formula of Theorem 1 is the default. POT computes ``C = (eta |dlambda|^q + (1 - eta) d_G^q)^{p/2}`` and the value
   ``((min <P, C>)^{1/p})^{1/r}``: `SpectralGrassmannMetric.pot`.
2. ``sqrt(1 - delta^2)`` has infinite slope at ``delta = 1``. ``delta`` is cut at ``1 - 4 eps`` and ``eps / 2`` added
   under the root, so that gradients stay finite; a system is then at distance 6e-8 from itself in float64 but at 1e-3
   in float32. Work in float64 (``jax.enable_x64()``) where small distances matter.
"""

import math
from dataclasses import replace
from typing import Literal, overload

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.dynamics.reduced_rank import KernelOperator, Scalar, is_concrete
from jaxlab.dynamics.spectrum import KernelSpectrum, Spectrum, unit_columns

__all__ = ["GrassmannDistance", "SpectralGrassmannMetric", "ground_cost", "similarity", "unit_norm"]

GrassmannDistance = Literal["projector", "chordal", "geodesic", "procrustes", "martin"]

_MARTIN_FLOOR = 1e-12
_POSITIVE = ("exponent", "inner_root", "outer_root")


@flax.struct.dataclass
class SpectralGrassmannMetric:
    """What distance is meant; a pytree whose numbers may be traced.

    Ground distance ``d = (eta |dlambda|_s^exponent + (1 - eta) d_G^exponent)^{1/inner_root}``, distance of two systems
    ``((min <P, d^order>)^{1/order})^{1/outer_root}``. The defaults are the metric of Theorem 1.

    Attributes:
      eta: weight of the eigenvalues in [0, 1]. 1 compares spectra alone (SOT in the paper), 0 subspaces alone (GOT).
      order: the order ``p >= 1`` of the Wasserstein distance.
      eigenvalue_scale: factors of the real and the imaginary part; ``1 / (2 pi)`` counts frequencies in cycles, the
        unit in which `eta_heuristic` balances the two terms.
      exponent, inner_root, outer_root: 1 in the theorem, ``q``, 2 and ``r`` in POT.
      grassmann: name of ``d_G``.
    """

    eta: Scalar = 0.5
    order: Scalar = 1.0
    eigenvalue_scale: tuple[Scalar, Scalar] = (1.0, 1.0)
    exponent: Scalar = 1.0
    inner_root: Scalar = 1.0
    outer_root: Scalar = 1.0
    grassmann: GrassmannDistance = flax.struct.field(pytree_node=False, default="projector")

    @classmethod
    def pot(
        cls,
        *,
        eta: Scalar = 0.5,
        p: Scalar = 2.0,
        q: Scalar = 1.0,
        r: Scalar = 2.0,
        grassmann: GrassmannDistance = "chordal",
        eigenvalue_scale: tuple[Scalar, Scalar] = (1.0, 1.0),
    ) -> "SpectralGrassmannMetric":
        """The convention of ``ot.sgot.sgot_metric``, with its argument names and defaults."""
        return cls(
            eta=eta,
            order=p,
            eigenvalue_scale=eigenvalue_scale,
            exponent=q,
            inner_root=2.0,
            outer_root=r,
            grassmann=grassmann,
        )


@overload
def unit_norm(spectrum: Spectrum) -> Spectrum: ...
@overload
def unit_norm(spectrum: KernelSpectrum) -> KernelSpectrum: ...
def unit_norm(spectrum: Spectrum | KernelSpectrum) -> Spectrum | KernelSpectrum:
    """Scale every right and left eigenfunction to norm one in its space."""
    if isinstance(spectrum, Spectrum):
        return replace(spectrum, right=unit_columns(spectrum.right), left=unit_columns(spectrum.left))
    return replace(
        spectrum,
        right=_unit_functions(spectrum.right, spectrum.kernel(spectrum.x, spectrum.x)),
        left=_unit_functions(spectrum.left, spectrum.kernel(spectrum.y, spectrum.y)),
    )


def similarity(a: Spectrum | KernelSpectrum, b: Spectrum | KernelSpectrum) -> Float[Array, "ra rb"]:
    """``|<r_i, r'_j> <l_i, l'_j>|`` of two systems with unit eigenfunctions (`unit_norm`).

    Raises:
      ValueError: the two live in different spaces (dimension, kernel, or kind).
    """
    _check_same_space(a, b)
    if isinstance(a, KernelSpectrum) and isinstance(b, KernelSpectrum):
        right = a.right.conj().T @ a.kernel(a.x, b.x) @ b.right
        left = a.left.conj().T @ a.kernel(a.y, b.y) @ b.left
    else:
        right, left = a.right.conj().T @ b.right, a.left.conj().T @ b.left
    return jnp.abs(right * left)


def ground_cost(
    a: Spectrum | KernelSpectrum,
    b: Spectrum | KernelSpectrum,
    metric: SpectralGrassmannMetric = SpectralGrassmannMetric(),  # noqa: B008  (immutable)
) -> Float[Array, "ra rb"]:
    """Ground distance between all atoms of ``a`` and all of ``b``, raised to the order of the metric.

    Raises:
      ValueError: ``eta`` outside [0, 1], ``order < 1``, another number of the metric out of range (under `jit` numbers
        out of range give NaN), an unknown ``grassmann``, systems in different spaces or without atoms, arrays of a
        spectrum that do not fit together.
    """
    check_metric(metric)
    check_atoms(a)
    check_atoms(b)
    return cost_of_unit_atoms(unit_norm(a), unit_norm(b), metric)


def cost_of_unit_atoms(
    a: Spectrum | KernelSpectrum, b: Spectrum | KernelSpectrum, metric: SpectralGrassmannMetric
) -> Float[Array, "ra rb"]:
    """`ground_cost` of systems that went through `unit_norm` already."""
    difference = a.eigenvalues[:, None] - b.eigenvalues[None, :]
    real_scale, imaginary_scale = metric.eigenvalue_scale
    shift = jnp.abs(jax.lax.complex(difference.real * real_scale, difference.imag * imaginary_scale))
    angle = _grassmann_distance(similarity(a, b), metric.grassmann)
    blend = metric.eta * positive_power(shift, metric.exponent) + (1 - metric.eta) * positive_power(
        angle, metric.exponent
    )
    valid = (metric.eta >= 0) & (metric.eta <= 1) & (metric.order >= 1)
    for name in _POSITIVE:
        valid = valid & (getattr(metric, name) > 0)
    return jnp.where(valid, positive_power(blend, metric.order / metric.inner_root), jnp.nan)


def positive_power(value: Array, exponent: Scalar) -> Array:
    """``value^exponent``, where not above zero 0 with derivative 0: a root has infinite slope there, NaN in a chain."""
    positive = value > 0
    return jnp.where(positive, jnp.where(positive, value, 1) ** exponent, jnp.where(jnp.isnan(value), value, 0))


def check_metric(metric: SpectralGrassmannMetric) -> None:
    """Raise `ValueError` for a metric that is none; numbers that are traced pass, and give NaN if out of range."""
    if not isinstance(metric, SpectralGrassmannMetric):
        raise TypeError(f"the metric must be a SpectralGrassmannMetric, got {metric!r}")
    if metric.grassmann not in _GRASSMANN:
        raise ValueError(f"grassmann must be one of {', '.join(_GRASSMANN)}, got {metric.grassmann!r}")
    if is_concrete(metric.eta) and not 0 <= metric.eta <= 1:
        raise ValueError(f"eta must be in [0, 1], got {metric.eta}")
    if is_concrete(metric.order) and not 1 <= metric.order < math.inf:
        raise ValueError(f"the order of a Wasserstein distance must be >= 1 and finite, got {metric.order}")
    for name in _POSITIVE:
        value = getattr(metric, name)
        if is_concrete(value) and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    scale = metric.eigenvalue_scale
    if (
        not isinstance(scale, tuple)
        or len(scale) != 2
        or not all(not is_concrete(factor) or 0 <= factor < math.inf for factor in scale)
    ):
        raise ValueError(f"eigenvalue_scale must be two finite numbers >= 0, got {scale}")


def check_atoms(spectrum: Spectrum | KernelSpectrum, *, batch: int = 0) -> None:
    """Raise `ValueError` unless the arrays of a spectrum fit together, below ``batch`` leading axes."""
    shapes = {name: np.shape(getattr(spectrum, name)) for name in ("eigenvalues", "right", "left")}
    values, right, left = shapes.values()
    if len(values) != batch + 1 or len(right) != batch + 2 or len(left) != batch + 2:
        raise ValueError(
            f"{'stacked systems' if batch else 'one system'} with eigenvalues {'[n, r]' if batch else '[r]'} needed, "
            f"got arrays of shape {shapes}"
        )
    dimension = right[-2] == left[-2] or isinstance(spectrum, KernelSpectrum)
    if (
        not values[-1] == right[-1] == left[-1]
        or not dimension
        or len({shape[:batch] for shape in shapes.values()}) > 1
    ):
        raise ValueError(f"eigenvalues, right and left vectors of a spectrum must match, got shapes {shapes}")
    if values[-1] == 0:
        raise ValueError("a spectrum needs at least one atom, got none")


def check_same_kernel(a: KernelSpectrum | KernelOperator, b: KernelSpectrum | KernelOperator) -> None:
    """Raise `ValueError` unless both live in the space of one kernel on states of one dimension."""
    if a.x.shape[-1] != b.x.shape[-1] or a.kernel != b.kernel:
        raise ValueError(
            f"operators live in different spaces: kernel {a.kernel} on R^{a.x.shape[-1]} "
            f"and {b.kernel} on R^{b.x.shape[-1]}"
        )


_GRASSMANN = {
    "projector": lambda delta, eps: jnp.sqrt(2 * (1 - delta**2) + eps),
    "chordal": lambda delta, eps: jnp.sqrt(1 - delta**2 + eps),
    "geodesic": lambda delta, eps: jnp.arccos(delta),
    "procrustes": lambda delta, eps: jnp.sqrt(2 * (1 - delta) + eps),
    "martin": lambda delta, eps: jnp.sqrt(-jnp.log(jnp.maximum(delta**2, _MARTIN_FLOOR)) + eps),
}


def _grassmann_distance(delta: Array, name: GrassmannDistance) -> Array:
    eps = jnp.finfo(delta.dtype).eps
    return _GRASSMANN[name](jnp.minimum(delta, 1 - 4 * eps), eps / 2)


def _unit_functions(coefficients: Array, gram: Array) -> Array:
    coefficients = coefficients / jax.lax.stop_gradient(jnp.max(jnp.abs(coefficients), axis=-2, keepdims=True))
    squared = jnp.einsum("...ir,...ij,...jr->...r", coefficients.conj(), gram, coefficients).real
    return coefficients / jnp.sqrt(squared)[..., None, :]


def _check_same_space(a: Spectrum | KernelSpectrum, b: Spectrum | KernelSpectrum) -> None:
    if type(a) is not type(b):
        raise ValueError(f"operators live in different spaces: {type(a).__name__} and {type(b).__name__}")
    if isinstance(a, KernelSpectrum) and isinstance(b, KernelSpectrum):
        check_same_kernel(a, b)
    elif a.right.shape[-2] != b.right.shape[-2]:
        raise ValueError(f"operators live in different spaces: dimensions {a.right.shape[-2]} and {b.right.shape[-2]}")
