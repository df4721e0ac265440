"""Optimal transport between two short lists of atoms, exact or entropic, with the ott solvers.

``min <P, C>`` over couplings ``P`` of the two weight vectors. Equal weights make it an assignment problem (Hungarian
algorithm; unequal counts are replicated to their least common multiple), general weights need Sinkhorn.

Derivatives follow the envelope theorem: the plan is held fixed, ``d <P, C> = <P, dC>``. That is exact for the
assignment away from ties; for Sinkhorn it leaves out how the plan moves, which vanishes with epsilon.
"""

import math
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Real
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


def exact_transport(cost: Real[Array, "n m"]) -> Transport:
    """Optimal transport between equally weighted atoms, O(lcm(n, m)^3). A cost that is not finite gives NaN.

    Raises:
      TypeError: a cost that is not real.
      ValueError: a cost that is no matrix, or without rows or columns.
    """
    return _assign(_cost_matrix(cost))


@jax.jit
def _assign(cost: Array) -> Transport:
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
    cost: Real[Array, "n m"],
    source: Float[Array, " n"] | None = None,
    target: Float[Array, " m"] | None = None,
    *,
    epsilon: Scalar | None = None,
) -> Transport:
    """Entropic optimal transport with weights, ``epsilon`` lowered geometrically to its final value.

    Args:
      cost: cost matrix; integers and half precision are computed in float32.
      source: weights of the rows, ``None`` for equal ones.
      target: weights of the columns.
      epsilon: entropic regularisation in the unit of the cost, ``None`` for 1e-3 of its mean modulus. The value lies
        above the exact one by at most ``epsilon log(n m)`` once converged.

    Raises:
      TypeError: a cost that is not real.
      ValueError: a cost that is no matrix, weights that are negative, do not sum to 1 (to 1e-6, in half precision to
        its rounding) or are not one for each row or column, ``epsilon <= 0``.
    """
    cost = _cost_matrix(cost)
    source, target = (
        check_weight(name, weight, count=count, dtype=cost.dtype)
        for name, weight, count in (("source", source, cost.shape[0]), ("target", target, cost.shape[1]))
    )
    check_epsilon(epsilon)
    fixed = jax.lax.stop_gradient(cost)
    if epsilon is None:
        size = jnp.mean(jnp.abs(fixed))
        # Where all costs vanish any plan is optimal; an epsilon of zero would make it NaN.
        target_epsilon = _RELATIVE_EPSILON * jnp.where(size == 0, 1, size)
    else:
        target_epsilon = jnp.where(jnp.asarray(epsilon) > 0, epsilon, jnp.nan)
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
    if epsilon is not None and is_concrete(epsilon) and not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon}")


@overload
def check_weight(name: str, weight: None, *, count: int, dtype: Any) -> None: ...
@overload
def check_weight(name: str, weight: Any, *, count: int, dtype: Any) -> Any: ...
def check_weight(name: str, weight: Any, *, count: int, dtype: Any) -> Any:
    """The weights as an array of the type, ``None`` for ``None``; NaN under `jit` where they are no weights.

    Raises:
      ValueError: unless the ``count`` weights along the last axis are a probability vector.
    """
    if weight is None:
        return None
    weight = jnp.asarray(weight)
    if weight.ndim == 0 or weight.shape[-1] != count:
        raise ValueError(f"{name} weights must be {count} numbers, got shape {weight.shape}")
    tolerance = _WEIGHT_TOLERANCE
    if jnp.issubdtype(weight.dtype, jnp.floating):
        tolerance = max(tolerance, 4 * float(jnp.finfo(weight.dtype).eps))
    weight = weight.astype(dtype)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    if is_concrete(weight):
        values = np.asarray(weight)
        if np.any(values < 0):
            raise ValueError(f"{name} weights must be >= 0, got {values.min()}")
        totals = np.asarray(total).reshape(-1)
        worst = totals[np.argmax(np.abs(totals - 1))] if totals.size else 1
        if not abs(worst - 1) <= tolerance:
            raise ValueError(f"{name} weights must sum to 1, got a sum of {worst}")
        return weight
    usable = (jnp.abs(total - 1) <= tolerance) & jnp.all(weight >= 0, axis=-1, keepdims=True)
    return jnp.where(usable, weight, jnp.nan)


def system_weights(weights: Any, count: int, dtype: Any) -> Array:
    """Weights of ``count`` systems, equal ones for ``None``; errors as in `check_weight`."""
    if count == 0:
        raise ValueError("a mean needs at least one system, got none")
    if weights is None:
        return jnp.full(count, 1 / count, dtype)
    if np.shape(weights) != (count,):
        raise ValueError(f"one weight for each of the {count} systems is needed, got shape {np.shape(weights)}")
    return check_weight("system", weights, count=count, dtype=dtype)


def _cost_matrix(cost: Any) -> Array:
    cost = jnp.asarray(cost)
    if not (jnp.issubdtype(cost.dtype, jnp.floating) or jnp.issubdtype(cost.dtype, jnp.integer)):
        raise TypeError(f"a cost must be real, got {cost.dtype}")
    if cost.ndim != 2 or 0 in cost.shape:
        raise ValueError(f"a cost is a matrix with a row and a column for each atom, got shape {cost.shape}")
    return cost.astype(jnp.promote_types(cost.dtype, jnp.float32))


def _largest_multiple(cost: Array, epsilon: float | Array) -> Array:
    """Start the schedule at the scale of the cost."""
    return jnp.maximum(jnp.max(jnp.abs(cost)) / epsilon, 1.0)
