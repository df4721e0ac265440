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

from dataclasses import replace
from typing import Literal, overload

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlab.dynamics.reduced_rank import Scalar, is_concrete
from jaxlab.dynamics.spectrum import KernelSpectrum, Spectrum, unit_columns

__all__ = ["GrassmannDistance", "SpectralGrassmannMetric", "ground_cost", "similarity", "unit_norm"]

GrassmannDistance = Literal["projector", "chordal", "geodesic", "procrustes", "martin"]

_MARTIN_FLOOR = 1e-12


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
      ValueError: ``eta`` outside [0, 1], ``order < 1``, an unknown ``grassmann``, systems in different spaces.
    """
    check_metric(metric)
    return cost_of_unit_atoms(unit_norm(a), unit_norm(b), metric)


def cost_of_unit_atoms(
    a: Spectrum | KernelSpectrum, b: Spectrum | KernelSpectrum, metric: SpectralGrassmannMetric
) -> Float[Array, "ra rb"]:
    """`ground_cost` of systems that went through `unit_norm` already."""
    difference = a.eigenvalues[:, None] - b.eigenvalues[None, :]
    real_scale, imaginary_scale = metric.eigenvalue_scale
    shift = jnp.abs(jax.lax.complex(difference.real * real_scale, difference.imag * imaginary_scale))
    angle = _grassmann_distance(similarity(a, b), metric.grassmann)
    blend = metric.eta * shift**metric.exponent + (1 - metric.eta) * angle**metric.exponent
    return blend ** (metric.order / metric.inner_root)


def check_metric(metric: SpectralGrassmannMetric) -> None:
    """Raise `ValueError` for a metric that is none; numbers that are traced pass."""
    if metric.grassmann not in _GRASSMANN:
        raise ValueError(f"grassmann must be one of {', '.join(_GRASSMANN)}, got {metric.grassmann!r}")
    if is_concrete(metric.eta) and not 0 <= metric.eta <= 1:
        raise ValueError(f"eta must be in [0, 1], got {metric.eta}")
    if is_concrete(metric.order) and not metric.order >= 1:
        raise ValueError(f"the order of a Wasserstein distance must be >= 1, got {metric.order}")


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
    squared = jnp.einsum("...ir,...ij,...jr->...r", coefficients.conj(), gram, coefficients).real
    return coefficients / jnp.sqrt(squared)[..., None, :]


def _check_same_space(a: Spectrum | KernelSpectrum, b: Spectrum | KernelSpectrum) -> None:
    if type(a) is not type(b):
        raise ValueError(f"operators live in different spaces: {type(a).__name__} and {type(b).__name__}")
    if isinstance(a, KernelSpectrum) and isinstance(b, KernelSpectrum):
        if a.x.shape[-1] != b.x.shape[-1] or a.kernel != b.kernel:
            raise ValueError(
                f"operators live in different spaces: kernel {a.kernel} on R^{a.x.shape[-1]} "
                f"and {b.kernel} on R^{b.x.shape[-1]}"
            )
    elif a.right.shape[-2] != b.right.shape[-2]:
        raise ValueError(f"operators live in different spaces: dimensions {a.right.shape[-2]} and {b.right.shape[-2]}")
