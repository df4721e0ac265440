r"""Spectral-Grassmann Wasserstein distance between dynamical systems (SGOT).

Every system is a measure on spectral atoms, ``mu(T) = sum_j w_j delta_(lambda_j, r_j (x) l_j)``, and the distance of
two systems is the Wasserstein distance of their measures under the ground distance of `jaxlab.dynamics.ground_cost`:

.. math::
    d(T, T') = \Big(\min_{P \in \Pi(w, w')} \sum_{ij} P_{ij}\, d_\eta(i, j)^p\Big)^{1/p}.

It compares operators of different rank estimated at different sampling rates, as long as their eigenfunctions live in
one space (Theorem 1: a metric on non-defective operators of bounded rank). With reduced-rank regression the estimate
converges at ``n^{-1/2}`` in finite dimension (Theorem 2).

Reference: Germain et al., arXiv 2509.24920. Estimate spectra with `trajectory_spectrum` (or `generator_spectrum`).

Example:
  >>> key = jax.random.key(0)
  >>> walks = jnp.cumsum(jax.random.normal(key, (5, 300, 2)), axis=1)      # five systems, 300 samples, two channels
  >>> systems = trajectory_spectrum(walks, rank=4, dt=0.01, lags=3)
  >>> distances = spectral_grassmann_distance_matrix(systems, metric=SpectralGrassmannMetric(eta=0.1))  # [5, 5]
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, PyTree

from jaxlab.dynamics.ground_cost import (
    SpectralGrassmannMetric,
    check_atoms,
    check_metric,
    cost_of_unit_atoms,
    positive_power,
    unit_norm,
)
from jaxlab.dynamics.reduced_rank import Scalar, integer, is_concrete
from jaxlab.dynamics.spectrum import KernelSpectrum, Spectrum
from jaxlab.dynamics.transport import Transport, check_epsilon, check_weight, exact_transport, sinkhorn_transport

__all__ = [
    "Solver",
    "eta_heuristic",
    "pairwise_distances",
    "spectral_grassmann_distance",
    "spectral_grassmann_distance_matrix",
    "spectral_grassmann_transport",
]

Solver = Literal["exact", "sinkhorn"]
_THEOREM = SpectralGrassmannMetric()
_ROWS_ON_CPU = 8


def eta_heuristic(sampling_rate: int | float) -> float:
    """``1 / (1 + f_s / (2 sqrt 2))``: the largest frequency gap then weighs as much as the largest angle.

    The frequency gap is counted in cycles, up to Nyquist, so use it with ``eigenvalue_scale=(1/(2 pi), 1/(2 pi))``. The
    paper finds the best ``eta`` at or below this value: it is the upper end of a search grid.

    Raises:
      ValueError: ``sampling_rate <= 0``.
    """
    if not 0 < sampling_rate < math.inf:
        raise ValueError(f"sampling rate must be positive and finite, got {sampling_rate}")
    return 1 / (1 + sampling_rate / (2 * math.sqrt(2)))


def spectral_grassmann_distance(
    a: Spectrum | KernelSpectrum,
    b: Spectrum | KernelSpectrum,
    metric: SpectralGrassmannMetric = _THEOREM,
    *,
    solver: Solver = "exact",
    epsilon: Scalar | None = None,
) -> Float[Array, ""]:
    """Distance between two dynamical systems, differentiable in their eigenvalues and eigenvectors.

    Args:
      a: spectrum of one system.
      b: spectrum of the other, in the same space; the rank may differ.
      metric: which distance.
      solver: ``"exact"`` (equally weighted atoms) or ``"sinkhorn"`` (any weights, biased upwards).
      epsilon: regularisation of Sinkhorn, in the unit of the ground distance to the power ``order``.

    Returns:
      The distance, in the unit of the scaled eigenvalues; NaN if a spectrum is not finite. In float32 distances
      below about 1e-3 are rounding (`jaxlab.dynamics.ground_cost`, note 2).

    Raises:
      ValueError: see `spectral_grassmann_transport`.

    Warns:
      RuntimeWarning: Sinkhorn did not converge (outside `jit`; `spectral_grassmann_transport` reports it inside).
    """
    solution = spectral_grassmann_transport(a, b, metric, solver=solver, epsilon=epsilon)
    if is_concrete(solution) and bool(jnp.isfinite(solution.cost)) and not bool(solution.converged):
        warnings.warn("Sinkhorn did not converge, the distance is biased; raise epsilon", RuntimeWarning, stacklevel=2)
    return _root(solution.cost, metric)


def spectral_grassmann_transport(
    a: Spectrum | KernelSpectrum,
    b: Spectrum | KernelSpectrum,
    metric: SpectralGrassmannMetric = _THEOREM,
    *,
    solver: Solver = "exact",
    epsilon: Scalar | None = None,
) -> Transport:
    """The transport behind `spectral_grassmann_distance`: which atom goes where, the cost ``<P, d^p>``, convergence.

    Raises:
      ValueError: systems in different spaces, a metric that is none (``eta`` outside [0, 1], ``order < 1``), weights
        that are negative or do not sum to 1, the exact solver with weighted atoms, an unknown solver.
    """
    _check(a, b, metric, solver, epsilon, batch=0)
    return _transport(a, b, metric, epsilon, solver=solver)


def spectral_grassmann_distance_matrix(
    a: Spectrum | KernelSpectrum,
    b: Spectrum | KernelSpectrum | None = None,
    metric: SpectralGrassmannMetric = _THEOREM,
    *,
    solver: Solver = "exact",
    epsilon: Scalar | None = None,
    chunk_size: int | None = None,
    mesh: Mesh | None = None,
) -> Float[Array, "n m"]:
    """All distances between the systems stacked in ``a`` and those in ``b`` (in ``a`` again by default).

    Compiles once for each shape; the numbers in ``metric`` may change without a new compilation. ``chunk_size`` and
    ``mesh`` as in `pairwise_distances`, errors as in `spectral_grassmann_distance`.
    """
    _check(a, a if b is None else b, metric, solver, epsilon, batch=1)
    return _distance_matrix(a, b, metric, epsilon, solver=solver, chunk_size=chunk_size, mesh=mesh)


def pairwise_distances(
    distance: Callable[[Any, Any], Float[Array, ""]],
    a: PyTree,
    b: PyTree | None = None,
    *,
    chunk_size: int | None = None,
    mesh: Mesh | None = None,
) -> Float[Array, "n m"]:
    """Distance matrix between systems stacked along the leading axis of a pytree, for any distance of two systems.

    Without ``b`` the distance is taken to be symmetric with zeros on the diagonal, and every pair is computed once: row
    ``i`` meets the next ``n // 2`` systems in cyclic order, which is equal work for all rows.

    Args:
      distance: a traceable function of two systems (leaves without the leading axis).
      a: ``n`` systems.
      b: ``m`` systems.
      chunk_size: rows computed at once; memory grows with ``chunk_size * m``. ``None`` is all rows on an accelerator
        and 8 on a CPU, where a working set that fits the cache is about twice as fast.
      mesh: devices over which the rows are spread (all axes of the mesh); ``b`` is copied to each.

    Raises:
      TypeError: a ``chunk_size`` that is no integer.
      ValueError: a ``chunk_size`` below 1, no system, leaves without a leading axis or with different ones, a distance
        that is no scalar.
    """
    if chunk_size is not None and integer("chunk_size", chunk_size) < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    a, b = jax.tree.map(jnp.asarray, (a, b))  # rows of numpy arrays cannot be taken at a traced index
    n = _count(a)
    m = n if b is None else _count(b)
    if n == 0 or m == 0:
        raise ValueError(f"a distance matrix needs systems, got {n} and {m}")
    offsets = jnp.arange(1, n // 2 + 1) if b is None else jnp.arange(m)
    others = a if b is None else b
    of_pair = jax.eval_shape(distance, *(jax.tree.map(lambda leaf: leaf[0], systems) for systems in (a, others)))
    if jnp.shape(of_pair) != ():
        raise ValueError(f"the distance of two systems must be a scalar, got shape {jnp.shape(of_pair)}")
    if b is None and n == 1:
        return jnp.zeros((1, 1), of_pair.dtype)

    def rows(index: Array, own: PyTree, others: PyTree) -> Array:
        def row(arguments: tuple[Array, PyTree]) -> Array:
            i, system = arguments
            partners = jax.tree.map(lambda leaf: leaf[(i + offsets) % m], others)
            return jax.vmap(partial(distance, system))(partners)

        size = chunk_size or (_ROWS_ON_CPU if jax.default_backend() == "cpu" else len(index))
        return jax.lax.map(row, (index, own), batch_size=min(size, len(index)))

    index = jnp.arange(n)
    if mesh is None:
        found = rows(index, a, others)
    else:
        padded = jnp.concatenate([index, jnp.zeros(-n % mesh.size, index.dtype)])
        split = PartitionSpec(mesh.axis_names)
        # With explicit axes (the default of jax.make_mesh) shard_map would refuse rows that are not split yet.
        mesh = Mesh(mesh.devices, mesh.axis_names)
        found = jax.shard_map(
            rows, mesh=mesh, in_specs=(split, split, PartitionSpec()), out_specs=split, check_vma=False
        )(padded, jax.tree.map(lambda leaf: leaf[padded], a), others)[:n]

    columns = (index[:, None] + offsets) % m
    matrix = jnp.zeros((n, m), found.dtype).at[index[:, None], columns].set(found)
    return matrix if b is not None else jnp.maximum(matrix, matrix.T)


@partial(jax.jit, static_argnames="solver")
def _transport(
    a: Spectrum | KernelSpectrum,
    b: Spectrum | KernelSpectrum,
    metric: SpectralGrassmannMetric,
    epsilon: Scalar | None,
    *,
    solver: Solver,
) -> Transport:
    return _solve(cost_of_unit_atoms(unit_norm(a), unit_norm(b), metric), a.weight, b.weight, solver, epsilon)


@partial(jax.jit, static_argnames=("solver", "chunk_size", "mesh"))
def _distance_matrix(
    a: Spectrum | KernelSpectrum,
    b: Spectrum | KernelSpectrum | None,
    metric: SpectralGrassmannMetric,
    epsilon: Scalar | None,
    *,
    solver: Solver,
    chunk_size: int | None,
    mesh: Mesh | None,
) -> Array:
    def distance(one: Spectrum | KernelSpectrum, other: Spectrum | KernelSpectrum) -> Array:
        solution = _solve(cost_of_unit_atoms(one, other, metric), one.weight, other.weight, solver, epsilon)
        return _root(solution.cost, metric)

    # Eigenfunctions are normalised once per system here, not once per pair.
    scale = jax.vmap(unit_norm)
    return pairwise_distances(distance, scale(a), None if b is None else scale(b), chunk_size=chunk_size, mesh=mesh)


def _solve(
    cost: Array, source: Array | None, target: Array | None, solver: Solver, epsilon: Scalar | None
) -> Transport:
    if solver == "sinkhorn":
        return sinkhorn_transport(cost, source, target, epsilon=epsilon)
    return exact_transport(cost)


def _root(cost: Array, metric: SpectralGrassmannMetric) -> Array:
    return positive_power(cost, 1 / (metric.order * metric.outer_root))


def _check(
    a: Spectrum | KernelSpectrum,
    b: Spectrum | KernelSpectrum,
    metric: SpectralGrassmannMetric,
    solver: Solver,
    epsilon: Scalar | None,
    *,
    batch: int,
) -> None:
    check_metric(metric)
    check_epsilon(epsilon)
    if solver not in ("exact", "sinkhorn"):
        raise ValueError(f"solver must be 'exact' or 'sinkhorn', got {solver!r}")
    for name, system in (("first system's", a), ("second system's", b)):
        check_atoms(system, batch=batch)
        check_weight(name, system.weight, count=system.eigenvalues.shape[-1], dtype=system.right.real.dtype)
    if solver == "exact" and (a.weight is not None or b.weight is not None):
        raise ValueError("the exact solver needs equally weighted atoms (weight=None); use solver='sinkhorn'")


def _count(systems: PyTree) -> int:
    counts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(systems)}
    if len(counts) != 1 or counts == {()}:
        raise ValueError(f"all leaves need one leading axis over the systems, got lengths {sorted(counts)}")
    return counts.pop()[0]
