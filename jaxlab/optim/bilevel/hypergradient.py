r"""Directions of bilevel optimisation: hypergradients from Jacobian-vector products alone.

A bilevel problem has an upper objective whose lower variables minimise another one:

.. math:: \min_x F(x, y^*(x)), \qquad y^*(x) = \arg\min_y G(x, y), \quad G \text{ strongly convex in } y .

By the implicit function theorem its gradient, the hypergradient, is

.. math::
    \nabla \Phi(x) = \nabla_x F + \nabla^2_{xy} G \, z^*, \qquad \nabla^2_{yy} G \, z^* + \nabla_y F = 0
    \qquad \text{at } (x, y^*(x)) .

Single-loop methods carry ``z``, the solution of the linear system, as a third variable and move all three along

.. math::
    D_x = \nabla_x F + \nabla^2_{xy} G \, z, \qquad D_y = \nabla_y G, \qquad D_z = \nabla^2_{yy} G \, z + \nabla_y F ,

which vanish together exactly at a stationary point (Dagreou et al., arXiv 2201.13409). The hypergradient of an average
of clients is *not* the average of their hypergradients; the average of their directions is the direction of the
average.

No Hessian is formed: one ``jax.jvp`` of the gradient of ``G`` along ``(0, z)`` gives ``D_y`` and both second-order
products. It costs about three gradients of ``G`` and one of ``F``, and memory for one backward pass over ``G`` and its
tangent: a constant number of copies of ``(x, y)`` and of the activations, whatever the size of ``y``.

Example:
  >>> import jax.numpy as jnp
  >>> from jaxlab.optim import BilevelProblem, exact_hypergradient
  >>> problem = BilevelProblem(  # y*(x) = x, so F(x, y*(x)) = (x - 3)^2 / 2
  ...     upper=lambda x, y, batch: 0.5 * (y - batch) ** 2, lower=lambda x, y, batch: 0.5 * (y - x) ** 2
  ... )
  >>> x = jnp.array(1.0)
  >>> float(exact_hypergradient(problem, x, x, None, jnp.array(3.0)).hypergradient)
  -2.0
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

__all__ = [
    "BilevelPoint",
    "BilevelProblem",
    "HypergradientSolution",
    "auxiliary_direction",
    "bilevel_point",
    "directions",
    "exact_hypergradient",
    "lower_direction",
    "upper_direction",
]

Objective = Callable[[PyTree, PyTree, PyTree], Float[Array, ""]]


class BilevelProblem(NamedTuple):
    """Two losses of one client.

    Attributes:
      upper: ``F(x, y, batch) -> scalar``, usually the loss on validation data.
      lower: ``G(x, y, batch) -> scalar``, usually the training loss; twice differentiable, and strongly convex in ``y``
        (a ridge on ``y`` makes a convex loss so).
    """

    upper: Objective
    lower: Objective


class BilevelPoint(NamedTuple):
    """A tree for each of the three variables, or anything that there is one of for each.

    Attributes:
      upper: ``x``, hyperparameters, weights of the data, a representation.
      lower: ``y``, the model that is trained given ``x``.
      auxiliary: ``z``, structured like ``y``: the solution of the linear system.
    """

    upper: Any
    lower: Any
    auxiliary: Any


class HypergradientSolution(NamedTuple):
    """What :func:`exact_hypergradient` returns.

    Attributes:
      hypergradient: structured like ``x``.
      auxiliary: the ``z`` that solves the linear system, structured like ``y``.
      residual: Euclidean norm of the linear system's residual relative to its right-hand side.
    """

    hypergradient: PyTree
    auxiliary: PyTree
    residual: Float[Array, ""]


def bilevel_point(upper: PyTree, lower: PyTree, auxiliary: PyTree | None = None) -> BilevelPoint:
    """A starting point; ``auxiliary`` starts at zero.

    Raises:
      ValueError: if ``upper`` or ``lower`` has no leaves, or ``auxiliary`` is not shaped like ``lower``.
      TypeError: if a leaf is not a real floating array, naming it.
    """
    if auxiliary is None:
        auxiliary = jax.tree.map(jnp.zeros_like, lower)
    point = BilevelPoint(upper, lower, auxiliary)
    for name, tree in zip(point._fields, point, strict=True):
        if not jax.tree.leaves(tree):
            raise ValueError(f"the {name} variable has no leaves")
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            dtype = jnp.result_type(leaf)
            if not jnp.issubdtype(dtype, jnp.floating):
                path = jax.tree_util.keystr(key_path)
                raise TypeError(f"variables must be real floating arrays; {name}{path} has dtype {dtype}")
    if _shapes(auxiliary) != _shapes(lower):
        raise ValueError(
            "the auxiliary variable must be shaped like the lower one; "
            f"lower has {_shapes(lower)}, auxiliary {_shapes(auxiliary)}"
        )
    return BilevelPoint(*jax.tree.map(jnp.asarray, tuple(point)))


def directions(
    problem: BilevelProblem, point: BilevelPoint, lower_batch: PyTree, upper_batch: PyTree
) -> tuple[BilevelPoint, Float[Array, ""]]:
    r"""The three directions of one client, and the curvature of its lower problem along ``z``.

    Args:
      problem: losses of the client.
      point: where.
      lower_batch: data that ``G`` is evaluated on.
      upper_batch: data that ``F`` is evaluated on.

    Returns:
      ``(D_x, D_y, D_z)`` structured like the point, and :math:`z^\top \nabla^2_{yy} G z / \lVert z \rVert^2` (1 where
      z is 0), in float32 or wider. Where that is not positive the lower problem is not strongly convex and ``z`` will
      diverge.
    """
    upper_gradient, lower_gradient = jax.grad(problem.upper, argnums=(0, 1))(point.upper, point.lower, upper_batch)
    (_, first), (mixed, second) = _second_order(problem, point, lower_batch)
    found = BilevelPoint(optax.tree.add(upper_gradient, mixed), first, optax.tree.add(second, lower_gradient))
    return found, _curvature(point.auxiliary, second)


def lower_direction(problem: BilevelProblem, point: BilevelPoint, lower_batch: PyTree) -> PyTree:
    """``D_y`` alone, which costs one gradient of ``G``."""
    return jax.grad(problem.lower, argnums=1)(point.upper, point.lower, lower_batch)


def auxiliary_direction(
    problem: BilevelProblem, point: BilevelPoint, lower_batch: PyTree, upper_batch: PyTree
) -> tuple[PyTree, Float[Array, ""]]:
    """``D_z`` alone, by a Hessian-vector product of ``G`` and a gradient of ``F``; and the curvature along ``z``."""

    def of_lower(y: PyTree) -> PyTree:
        return jax.grad(problem.lower, argnums=1)(point.upper, y, lower_batch)

    product = jax.jvp(of_lower, (point.lower,), (point.auxiliary,))[1]
    gradient = jax.grad(problem.upper, argnums=1)(point.upper, point.lower, upper_batch)
    return optax.tree.add(product, gradient), _curvature(point.auxiliary, product)


def upper_direction(problem: BilevelProblem, point: BilevelPoint, lower_batch: PyTree, upper_batch: PyTree) -> PyTree:
    """``D_x`` alone: the hypergradient where ``y`` and ``z`` solve their problems."""

    def along_z(x: PyTree) -> Array:
        slope = jax.jvp(lambda y: problem.lower(x, y, lower_batch), (point.lower,), (point.auxiliary,))[1]
        return slope + problem.upper(x, point.lower, upper_batch)

    return jax.grad(along_z)(point.upper)


def exact_hypergradient(
    problem: BilevelProblem,
    upper: PyTree,
    lower: PyTree,
    lower_batch: PyTree,
    upper_batch: PyTree,
    *,
    solver: str = "cg",
    tolerance: float = 1e-10,
    max_steps: int | None = None,
) -> HypergradientSolution:
    r"""Hypergradient at ``(x, y)`` with the linear system solved, an oracle to check other estimates with.

    It is :math:`\nabla \Phi(x)` where ``y`` is the minimiser :math:`y^*(x)`, which is the caller's to find.

    Args:
      problem: losses; average inside them to have those of many clients.
      upper, lower: x and y.
      lower_batch, upper_batch: data of ``G`` and ``F``.
      solver: ``"cg"``, conjugate gradients on Hessian-vector products, with memory for four copies of ``y``; or
        ``"dense"``, which forms and factorises the ``m x m`` Hessian of ``m`` lower variables: exact, for small ``m``.
      tolerance: relative residual at which conjugate gradients stop.
      max_steps: of conjugate gradients; None for ten times the number of lower variables.

    Raises:
      ValueError: for an unknown solver.
    """
    if solver not in ("cg", "dense"):
        raise ValueError(f"solver must be 'cg' or 'dense', got {solver!r}")
    upper_gradient, lower_gradient = jax.grad(problem.upper, argnums=(0, 1))(upper, lower, upper_batch)
    flat, unravel = ravel_pytree(lower)
    right = -ravel_pytree(lower_gradient)[0]

    def gradient(y: Array) -> Array:
        return ravel_pytree(jax.grad(problem.lower, argnums=1)(upper, unravel(y), lower_batch))[0]

    def product(z: Array) -> Array:
        return jax.jvp(gradient, (flat,), (z,))[1]

    if solver == "dense":
        solution = jnp.linalg.solve(jax.jacfwd(gradient)(flat), right)
    else:
        solution = jax.scipy.sparse.linalg.cg(product, right, tol=tolerance, maxiter=max_steps)[0]
    residual = jnp.linalg.norm(product(solution) - right)
    scale = jnp.linalg.norm(right)
    auxiliary = unravel(solution)
    mixed = _second_order(problem, BilevelPoint(upper, lower, auxiliary), lower_batch)[1][0]
    return HypergradientSolution(
        optax.tree.add(upper_gradient, mixed), auxiliary, residual / jnp.where(scale > 0, scale, 1)
    )


def _second_order(problem: BilevelProblem, point: BilevelPoint, batch: PyTree) -> tuple[Any, Any]:
    """Gradient of ``G`` in (x, y), and its derivative along (0, z)."""
    gradient = jax.grad(lambda both: problem.lower(both[0], both[1], batch))
    tangent = (jax.tree.map(jnp.zeros_like, point.upper), point.auxiliary)
    return jax.jvp(gradient, ((point.upper, point.lower),), (tangent,))


def _curvature(z: PyTree, product: PyTree) -> Float[Array, ""]:
    def wide(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)

    square = optax.tree.vdot(wide(z), wide(z))
    # At z = 0, where every run starts, there is nothing to probe.
    return jnp.where(square > 0, optax.tree.vdot(wide(z), wide(product)) / jnp.where(square > 0, square, 1), 1.0)


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(jnp.shape, tree)
