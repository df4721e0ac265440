r"""Averages of dynamical systems: Frechet means and interpolation under the spectral-Grassmann metric.

The mean of systems ``T_k`` with weights ``gamma_k`` minimises ``sum_k gamma_k d(T, T_k)^2``. It is parametrised by its
atoms, with the constraint ``L^* R = I`` and unit columns of ``R`` met by construction:

.. math::
    R = \tilde R / |\tilde R|_{col}, \qquad L = \tilde L (R^* \tilde L)^{-1}, \qquad
    T = R\, \mathrm{diag}(e^{\lambda\, dt})\, L^* .

Each step solves the K transport problems exactly with the mean held fixed and takes one gradient step on the atoms with
the plans held fixed (inexact coordinate descent). Averages of kernel operators: map them with `landmark_coordinates`
first, the landmarks are the control points.

Reference: Germain et al., arXiv 2509.24920, section 5.

Choices where the paper is open:

1. The ground metric is a sum of two, so its geodesics are not unique and a minimiser need not lie midway in
   frequency. The start decides: `matched_mean` averages matched atoms, which gives the linear midpoint.
2. With ``real=True`` only one atom of each complex-conjugate pair is free and the other is its mirror image, atoms with
   real eigenvectors stay real: ``T`` is real to rounding.
3. Plans are renewed at every step (they are r x r), the best iterate is returned.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Complex, Float

from jaxlab.dynamics.ground_cost import (
    SpectralGrassmannMetric,
    check_atoms,
    check_metric,
    cost_of_unit_atoms,
    unit_norm,
)
from jaxlab.dynamics.reduced_rank import Scalar, check_finite, integer, is_concrete, real_array
from jaxlab.dynamics.spectral_grassmann import spectral_grassmann_distance
from jaxlab.dynamics.spectrum import Spectrum, biorthogonalize, to_operator, unit_columns
from jaxlab.dynamics.transport import exact_transport, system_weights

__all__ = ["MeanInfo", "constrained_hilbert_schmidt_mean", "frechet_mean", "interpolate", "matched_mean"]

_THEOREM = SpectralGrassmannMetric()
_ADAM = optax.adam(3e-3)
_PAIR_TOLERANCE = 1e-3


class MeanInfo(NamedTuple):
    """How the search for a mean went.

    Attributes:
      objective: value at the start and after each step.
      best_step: index into ``objective`` of the mean that was returned.
    """

    objective: Float[Array, " steps+1"]
    best_step: Array


def frechet_mean(
    systems: Spectrum,
    weights: Float[Array, " k"] | None = None,
    metric: SpectralGrassmannMetric = _THEOREM,
    *,
    initial: Spectrum | None = None,
    steps: int = 200,
    optimizer: optax.GradientTransformation = _ADAM,
    real: bool = True,
) -> tuple[Spectrum, MeanInfo]:
    """The system with the least weighted mean of squared distances to the given ones.

    Args:
      systems: ``k`` spectra stacked along the leading axis, equally weighted atoms.
      weights: weights of the systems, >= 0 with sum 1; ``None`` for equal ones.
      metric: which distance.
      initial: where to start; it also sets the rank of the mean. ``None`` is `matched_mean`.
      steps: gradient steps.
      optimizer: any optax transformation (Adam at 3e-3 unless given); reuse one object to avoid compiling again.
      real: keep the mean a real operator. The pairing of atoms is read from values, so this cannot run under `jit`.

    Returns:
      The mean with ``left^* right = I``, and the course of the objective.

    Raises:
      TypeError: kernel spectra (see above), ``real=True`` under `jit`, steps that are no integer.
      ValueError: weights that are no probability vector, a negative number of steps, systems whose atoms are weighted
        or not finite, an ``initial`` in another space, atoms of ``initial`` that neither pair up nor are real while
        ``real=True``, a singular ``right^* left``.
    """
    weights = _check_systems(systems, weights, metric)
    start = matched_mean(systems, weights, metric) if initial is None else initial
    _check_start(start, systems.right.shape[-2])
    return _descend(_weighted_squared_distance, (systems, weights, metric), start, steps, optimizer, real)


def matched_mean(
    systems: Spectrum, weights: Float[Array, " k"] | None = None, metric: SpectralGrassmannMetric = _THEOREM
) -> Spectrum:
    """Average matched atoms: every system is matched to the heaviest one by the exact plan, phases are aligned to it,
    eigenvalues and unit eigenvectors are averaged, and the result is made biorthogonal.

    Arguments and errors as in `frechet_mean`.
    """
    return biorthogonalize(_matched_average(systems, _check_systems(systems, weights, metric), metric))


def interpolate(a: Spectrum, b: Spectrum, fraction: Scalar, metric: SpectralGrassmannMetric = _THEOREM) -> Spectrum:
    """The system at ``fraction`` of the way from ``a`` (0) to ``b`` (1): their `matched_mean`.

    Eigenvalues move along straight lines. Refine with `frechet_mean` where the subspaces differ much.

    Raises:
      ValueError: a fraction outside [0, 1], systems of different rank or in different spaces.
    """
    if a.right.shape != b.right.shape:
        raise ValueError(f"systems of one space and one rank are needed, got shapes {a.right.shape}, {b.right.shape}")
    if not isinstance(fraction, jax.core.Tracer) and not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1], got {fraction}")
    weights = jnp.stack([1 - jnp.asarray(fraction), jnp.asarray(fraction)]).astype(a.right.real.dtype)
    return matched_mean(jax.tree.map(lambda *leaves: jnp.stack(leaves), a, b), weights, metric)


def constrained_hilbert_schmidt_mean(
    operators: Float[Array, "k d d"],
    weights: Float[Array, " k"] | None = None,
    *,
    initial: Spectrum,
    dt: Scalar = 1.0,
    steps: int = 200,
    optimizer: optax.GradientTransformation = _ADAM,
    real: bool = True,
) -> tuple[Spectrum, MeanInfo]:
    """Baseline: minimise ``sum_k gamma_k |T - T_k|_HS^2`` over operators of the rank of ``initial``, by its atoms.

    Arguments and errors as in `frechet_mean`; ``dt > 0`` is the step of the operators.
    """
    operators = real_array("operators", operators, "[operator, d, d]", batch=False)
    check_finite("operators", operators)
    if operators.shape[1] != operators.shape[2]:
        raise ValueError(f"operators must be square matrices, got shape {operators.shape}")
    if is_concrete(dt) and not 0 < dt < np.inf:
        raise ValueError(f"dt must be positive and finite, got {dt}")
    _check_start(initial, operators.shape[-1])
    weights = system_weights(weights, len(operators), operators.dtype)
    data = (operators, weights, jnp.asarray(dt, operators.dtype))
    return _descend(_weighted_squared_frobenius, data, initial, steps, optimizer, real)


class _Atoms(NamedTuple):
    """Free parameters; a trailing axis of two holds real and imaginary part, so that any optimiser sees real arrays."""

    eigenvalues: Array
    right: Array
    left: Array


class _Parameters(NamedTuple):
    free: _Atoms  # one atom of each conjugate pair, or all atoms
    single: _Atoms  # atoms with real eigenvectors; eigenvalues hold the real part only
    branch: Array  # imaginary part of the single eigenvalues: 0, or pi / dt of a negative real multiplier


def _weighted_squared_distance(mean: Spectrum, data: tuple[Spectrum, Array, SpectralGrassmannMetric]) -> Array:
    systems, weights, metric = data
    distances = jax.vmap(lambda system: spectral_grassmann_distance(mean, system, metric))(systems)
    return weights @ distances**2


def _weighted_squared_frobenius(mean: Spectrum, data: tuple[Array, Array, Array]) -> Array:
    operators, weights, dt = data
    return weights @ jnp.sum(jnp.abs(to_operator(mean, dt=dt) - operators) ** 2, axis=(1, 2))


def _descend(
    objective: Callable[[Spectrum, Any], Array],
    data: Any,
    start: Spectrum,
    steps: int,
    optimizer: optax.GradientTransformation,
    real: bool,
) -> tuple[Spectrum, MeanInfo]:
    if integer("steps", steps) < 0:
        raise ValueError(f"steps must be >= 0, got {steps}")
    if real and not is_concrete(start):
        raise TypeError("real=True reads the pairing of atoms from values; pass real=False under jit")
    return _search(objective, data, _split(biorthogonalize(start), real), steps, optimizer, real)


@jax.jit
def _matched_average(systems: Spectrum, weights: Array, metric: SpectralGrassmannMetric) -> Spectrum:
    systems = unit_norm(systems)
    reference = jax.tree.map(lambda leaf: leaf[jnp.argmax(weights)], systems)

    def matched(system: Spectrum) -> Spectrum:
        partner = jnp.argmax(exact_transport(cost_of_unit_atoms(reference, system, metric)).plan, axis=1)
        return Spectrum(
            eigenvalues=system.eigenvalues[partner],
            right=_align_phase(reference.right, system.right[:, partner]),
            left=_align_phase(reference.left, system.left[:, partner]),
        )

    stacked = jax.vmap(matched)(systems)
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1), stacked)


@partial(jax.jit, static_argnames=("objective", "steps", "optimizer", "real"))
def _search(
    objective: Callable[[Spectrum, Any], Array],
    data: Any,
    parameters: _Parameters,
    steps: int,
    optimizer: optax.GradientTransformation,
    real: bool,
) -> tuple[Spectrum, MeanInfo]:
    branch = parameters.branch

    def loss(trained: tuple[_Atoms, _Atoms]) -> Array:
        return objective(_join(_Parameters(*trained, branch), real), data)

    def step(carry: tuple, _: None) -> tuple[tuple, Array]:
        trained, state, best, least = carry
        value, gradient = jax.value_and_grad(loss)(trained)
        better = value < least
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), trained, best)
        updates, state = optimizer.update(gradient, state, trained)
        return (optax.apply_updates(trained, updates), state, best, jnp.where(better, value, least)), value

    trained = parameters[:2]
    carry = (trained, optimizer.init(trained), trained, jnp.asarray(jnp.inf, branch.dtype))
    (trained, _, best, least), values = jax.lax.scan(step, carry, None, length=steps)
    last = loss(trained)
    free, single = jax.tree.map(lambda new, old: jnp.where(last < least, new, old), trained, best)
    values = jnp.append(values, last)
    return _join(_Parameters(free, single, branch), real), MeanInfo(objective=values, best_step=jnp.nanargmin(values))


def _split(spectrum: Spectrum, real: bool) -> _Parameters:
    if not real:
        free, single = jnp.arange(spectrum.eigenvalues.shape[0]), jnp.arange(0)
    else:
        free, single = (jnp.asarray(index, int) for index in _conjugate_pairs(spectrum))
    values = spectrum.eigenvalues
    return _Parameters(
        free=_Atoms(_parts(values[free]), _parts(spectrum.right[:, free]), _parts(spectrum.left[:, free])),
        single=_Atoms(
            values[single].real, _real_phase(spectrum.right[:, single]), _real_phase(spectrum.left[:, single])
        ),
        branch=values[single].imag,
    )


def _join(parameters: _Parameters, real: bool) -> Spectrum:
    free, single, branch = parameters
    atoms = [jax.lax.complex(leaf[..., 0], leaf[..., 1]) for leaf in free]
    if real:
        alone = (jax.lax.complex(single.eigenvalues, branch), single.right, single.left)
        atoms = [
            jnp.concatenate([atom, atom.conj(), rest.astype(atom.dtype)], axis=-1)
            for atom, rest in zip(atoms, alone, strict=True)
        ]
    return biorthogonalize(Spectrum(*atoms))


def _conjugate_pairs(spectrum: Spectrum) -> tuple[list[int], list[int]]:
    """Indices of one atom of each conjugate pair, and of the atoms with real eigenvectors."""
    values = np.asarray(spectrum.eigenvalues)
    # |v^T v| of a unit vector is 1 exactly if some phase makes it real.
    realness = np.minimum(*(np.abs(np.sum(unit_columns(v) ** 2, axis=0)) for v in (spectrum.right, spectrum.left)))
    single = [j for j in range(len(values)) if realness[j] > 1 - _PAIR_TOLERANCE]
    free, waiting = [], [j for j in np.argsort(-values.imag) if j not in single]
    while waiting:
        j = waiting.pop(0)
        gaps = [abs(values[j].conj() - values[i]) for i in waiting]
        if not gaps or min(gaps) > _PAIR_TOLERANCE * (1 + abs(values[j])):
            raise ValueError(
                f"eigenvalue {values[j]:.4g} has no complex-conjugate partner and no real eigenvectors; pass real=False"
            )
        waiting.pop(int(np.argmin(gaps)))
        free.append(int(j))
    return free, single


def _check_systems(systems: Spectrum, weights: Array | None, metric: SpectralGrassmannMetric) -> Array:
    check_metric(metric)
    if not isinstance(systems, Spectrum):
        raise TypeError(f"means need a Spectrum (see landmark_coordinates), got {type(systems).__name__}")
    if systems.eigenvalues.ndim != 2:
        raise ValueError(f"systems must be stacked along one leading axis, got shape {systems.eigenvalues.shape}")
    check_atoms(systems, batch=1)
    if systems.weight is not None:
        raise ValueError("means need systems with equally weighted atoms (weight=None)")
    for name in ("eigenvalues", "right", "left"):
        check_finite(f"the {name} of the systems", getattr(systems, name))
    return system_weights(weights, systems.eigenvalues.shape[0], systems.right.real.dtype)


def _check_start(start: Spectrum, dimension: int) -> None:
    check_atoms(start)
    if start.right.shape[0] != dimension:
        raise ValueError(f"operators live in different spaces: dimensions {start.right.shape[0]} and {dimension}")


def _align_phase(reference: Complex[Array, "d r"], vectors: Complex[Array, "d r"]) -> Complex[Array, "d r"]:
    overlap = jnp.sum(reference.conj() * vectors, axis=0)
    size = jnp.abs(overlap)
    return vectors * jnp.where(size > 0, overlap.conj() / jnp.where(size > 0, size, 1), 1)


def _real_phase(vectors: Complex[Array, "d s"]) -> Float[Array, "d s"]:
    return (vectors * jnp.exp(-0.5j * jnp.angle(jnp.sum(vectors**2, axis=0)))).real


def _parts(values: Array) -> Array:
    return jnp.stack([values.real, values.imag], axis=-1)
