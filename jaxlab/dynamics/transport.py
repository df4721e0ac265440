"""Optimal transport between two short lists of atoms, exact or entropic, with the ott solvers.

``min <P, C>`` over couplings ``P`` of the two weight vectors. Equal weights make it an assignment problem (Hungarian
algorithm; unequal counts are replicated to their least common multiple), general weights need Sinkhorn.

Derivatives follow the envelope theorem: the plan is held fixed, ``d <P, C> = <P, dC>``. That is exact for the
assignment away from ties; for Sinkhorn it leaves out how the plan moves, which vanishes with epsilon.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from ott.geometry.epsilon_scheduler import Epsilon
from ott.geometry.geometry import Geometry
from ott.solvers import linear
from ott.tools.unreg import hungarian

from jaxlab.dynamics.reduced_rank import Scalar, is_concrete

__all__ = ["Transport", "exact_transport", "sinkhorn_transport"]

_RELATIVE_EPSILON = 1e-3
_MARGINAL_ERROR = 1e-4
_MOST_ITERATIONS = 20_000
_WEIGHT_TOLERANCE = 1e-6


class Transport(NamedTuple):
    """A solved transport problem.

    Attributes:
      cost: ``<plan, C>``, without any entropy.
      plan: the coupling.
      converged: whether the solver met its tolerance; always true for the exact one on a finite cost.
    """

    cost: Float[Array, ""]
    plan: Float[Array, "n m"]
    converged: Bool[Array, ""]


@jax.jit
def exact_transport(cost: Float[Array, "n m"]) -> Transport:
    """Optimal transport between equally weighted atoms, O(lcm(n, m)^3). A cost that is not finite gives NaN."""
    n, m = cost.shape
    size = math.lcm(n, m)
    finite = jnp.all(jnp.isfinite(cost))
    # The augmenting-path search compares costs; a NaN among them would decide at random, so it never sees one.
    searched = jnp.where(finite, jax.lax.stop_gradient(cost), 0)
    repeated = jnp.repeat(jnp.repeat(searched, size // n, axis=0), size // m, axis=1)
    rows, columns = hungarian(Geometry(cost_matrix=repeated))[1].paired_indices
    plan = jnp.zeros_like(cost).at[rows // (size // n), columns // (size // m)].add(1 / size)
    return Transport(cost=jnp.where(finite, jnp.sum(plan * cost), jnp.nan), plan=plan, converged=finite)


def sinkhorn_transport(
    cost: Float[Array, "n m"],
    source: Float[Array, " n"] | None = None,
    target: Float[Array, " m"] | None = None,
    *,
    epsilon: Scalar | None = None,
) -> Transport:
    """Entropic optimal transport with weights, ``epsilon`` lowered geometrically to its final value.

    Args:
      cost: cost matrix.
      source: weights of the rows, ``None`` for equal ones.
      target: weights of the columns.
      epsilon: entropic regularisation in the unit of the cost, ``None`` for 1e-3 of the mean cost. The value lies above
        the exact one by at most ``epsilon log(n m)`` once converged.

    Raises:
      ValueError: weights that are negative or do not sum to 1 (to 1e-6), ``epsilon <= 0``.
    """
    for name, weight in (("source", source), ("target", target)):
        check_weight(name, weight)
    check_epsilon(epsilon)
    fixed = jax.lax.stop_gradient(cost)
    target_epsilon = _RELATIVE_EPSILON * jnp.mean(fixed) if epsilon is None else epsilon
    # ott annotates the numbers of the schedule as floats and takes traced ones.
    schedule = Epsilon(target_epsilon, _largest_multiple(fixed, target_epsilon), decay=0.95)  # type: ignore[arg-type]
    output = linear.solve(
        Geometry(cost_matrix=fixed, epsilon=schedule),
        a=source,
        b=target,
        threshold=_MARGINAL_ERROR,
        max_iterations=_MOST_ITERATIONS,
    )
    plan = jax.lax.stop_gradient(output.matrix)
    return Transport(cost=jnp.sum(plan * cost), plan=plan, converged=jnp.asarray(output.converged))


def check_epsilon(epsilon: Scalar | None) -> None:
    """Raise `ValueError` unless the entropic regularisation is positive."""
    if epsilon is not None and is_concrete(epsilon) and not epsilon > 0:
        raise ValueError(f"epsilon must be positive, got {epsilon}")


def check_weight(name: str, weight: Float[Array, "..."] | None) -> None:
    """Raise `ValueError` unless the weights along the last axis are a probability vector."""
    if weight is None or not is_concrete(weight):
        return
    values = np.asarray(weight)
    if np.any(values < 0):
        raise ValueError(f"{name} weights must be >= 0, got {values.min()}")
    total = values.sum(-1).reshape(-1)
    worst = total[np.argmax(np.abs(total - 1))]
    if not abs(worst - 1) <= _WEIGHT_TOLERANCE:
        raise ValueError(f"{name} weights must sum to 1, got a sum of {worst}")


def _largest_multiple(cost: Array, epsilon: float | Array) -> Array:
    """Start the schedule at the scale of the cost."""
    return jnp.maximum(jnp.max(cost) / epsilon, 1.0)
