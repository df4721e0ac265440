"""Rounds of federated bilevel methods: directions of all clients, then the server's step.

One device, or many::

    init, step = make_bilevel_step(problem, optimizer)
    state, info = jax.jit(step)(key, state, batches)  # clients stacked on one device
    step = jax.jit(shard_bilevel_step(step, mesh, "client", state=state, batches=batches))  # or over a mesh axis

For the second, make ``optimizer`` and ``step`` with ``axis_name="client"``; several hosts place the state with
:func:`put_bilevel_state` first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxlab.optim.bilevel.br_fedbi import BRFedBiState
from jaxlab.optim.bilevel.hypergradient import BilevelPoint, BilevelProblem, directions
from jaxlab.optim.training import place
from jaxlab.optim.transforms import Scalar

__all__ = [
    "BilevelInfo",
    "BilevelState",
    "BilevelStepper",
    "ClientBatches",
    "check_batches",
    "make_bilevel_step",
    "put_bilevel_state",
    "report",
    "shard_bilevel_step",
    "varying",
]

# A direction is a gradient of F, a gradient of G and two Jacobian-vector products of it.
_GRADIENTS_OF_DIRECTION = 4


class ClientBatches(NamedTuple):
    """Data of one round, leaves with a leading axis of clients.

    Attributes:
      lower: from each client's training data, for ``G``.
      upper: from each client's validation data, for ``F``.
    """

    lower: PyTree
    upper: PyTree


class BilevelState(NamedTuple):
    """State of a bilevel method.

    Attributes:
      point: the server's (x, y, z).
      optimizer: of the optimiser.
      previous: the point of the round before, for PAGE only.
    """

    point: BilevelPoint
    optimizer: BRFedBiState
    previous: Any


class BilevelInfo(NamedTuple):
    r"""What a round reports.

    Attributes:
      norms: of the aggregates. That of ``upper`` estimates the hypergradient's norm, that of ``auxiliary`` is the
        residual of the linear system.
      agreement: of the aggregates with the honest messages, for an optimiser that knows who is ``byzantine``; else
        three times None.
      drift: root mean square over the clients of :math:`\lVert M - D \rVert`, message less direction on this round's
        data. PAGE's grows between refreshes where steps are large; in a round that refreshes it is zero.
      on_boundary: whether z was projected on its ball.
      boundary_fraction: share of the rounds so far in which it was. Above a half at the end, the radius is too small
        (the hypergradient is biased) or the lower problem is not strongly convex.
      curvature: least over the clients of :math:`z^\top \nabla^2_{yy} G z / \lVert z \rVert^2` on this round's data.
      strongly_convex: whether that was positive.
      finite: whether the new point is.
      refreshed: whether PAGE drew a big batch.
      messages: vectors that a client sent, each the size of one variable.
      gradients: gradients and Jacobian-vector products that a client evaluated, each on one batch.
    """

    norms: BilevelPoint
    agreement: BilevelPoint
    drift: Float[Array, ""]
    on_boundary: Bool[Array, ""]
    boundary_fraction: Float[Array, ""]
    curvature: Float[Array, ""]
    strongly_convex: Bool[Array, ""]
    finite: Bool[Array, ""]
    refreshed: Bool[Array, ""]
    messages: Int[Array, ""]
    gradients: Int[Array, ""]


class BilevelStepper(NamedTuple):
    """``init(point) -> state`` and ``step(key, state, batches, ...) -> (state, info)``, both pure."""

    init: Callable[[BilevelPoint], BilevelState]
    step: Callable[..., tuple[BilevelState, BilevelInfo]]


def make_bilevel_step(
    problem: BilevelProblem,
    optimizer: optax.GradientTransformation,
    *,
    refresh_probability: Scalar | None = None,
    axis_name: str | None = None,
) -> BilevelStepper:
    """Rounds of a single-loop method: directions of all clients, then the optimiser.

    Args:
      problem: losses of one client.
      optimizer: what :func:`br_fedbi` gives.
      refresh_probability: p of PAGE, for an optimiser whose estimator is ``page(n)``; the paper's is 0.5, and 0.2 in
        its second task. None for the other estimators.
      axis_name: mesh axis that carries the clients, inside :func:`shard_bilevel_step`.

    Returns:
      ``init(point)`` and ``step(key, state, batches, refresh_batches=None, refresh=None, **extra) -> (state, info)``.
      ``batches`` and ``refresh_batches`` are :class:`ClientBatches`; the latter are PAGE's big ones, evaluated only in
      rounds that refresh (``lax.cond``). The coin is drawn from ``key``, the same for all clients, and the first round
      always refreshes; under ``vmap`` over runs give the coin as ``refresh``, which is then the same for all, or both
      branches are evaluated. A coin that you give must be True in the first round: if it is not, the estimate starts
      from the small batch. ``extra`` goes to the optimiser.

    Raises:
      ValueError: for a probability outside (0, 1]; in ``step`` for batches that are empty or whose leading axes differ.
    """
    paging = refresh_probability is not None
    probability: Any = refresh_probability
    if paging and not isinstance(probability, jax.core.Tracer) and not 0.0 < probability <= 1.0:
        raise ValueError(f"refresh_probability must be in (0, 1], got {refresh_probability}")
    optimizer = optax.with_extra_args_support(optimizer)

    def of_clients(point: BilevelPoint, batches: ClientBatches) -> tuple[BilevelPoint, Array]:
        point = varying(point, axis_name)
        return jax.vmap(lambda lower, upper: directions(problem, point, lower, upper))(*batches)

    def init(point: BilevelPoint) -> BilevelState:
        # A copy, so that a state may be donated.
        previous = jax.tree.map(jnp.copy, point) if paging else optax.EmptyState()
        return BilevelState(point, optimizer.init(point), previous)

    def step(
        key: Key[Array, ""],
        state: BilevelState,
        batches: ClientBatches,
        refresh_batches: ClientBatches | None = None,
        refresh: Bool[Array, ""] | None = None,
        **extra: Any,
    ) -> tuple[BilevelState, BilevelInfo]:
        check_batches("batches", batches)
        gradients: Any = _GRADIENTS_OF_DIRECTION
        if not paging:
            found, curvature = of_clients(state.point, batches)
            refresh = jnp.zeros([], bool)
        else:
            big = batches if refresh_batches is None else refresh_batches
            check_batches("refresh_batches", big)
            if refresh is None:
                refresh = jax.random.bernoulli(key, probability) | (state.optimizer.count == 0)

            def afresh() -> tuple:
                found, curvature = of_clients(state.point, big)
                return found, found, curvature

            def corrected() -> tuple:
                found, curvature = of_clients(state.point, batches)
                return found, of_clients(state.previous, batches)[0], curvature

            found, before, curvature = lax.cond(refresh, afresh, corrected)
            extra = extra | {"previous": before, "refresh": refresh}
            gradients = jnp.where(refresh, 1, 2) * _GRADIENTS_OF_DIRECTION
        updates, optimizer_state = optimizer.update(found, state.optimizer, state.point, **extra)
        point = optax.apply_updates(state.point, updates)
        info = report(
            point, optimizer_state, curvature, messages=3, gradients=gradients, refreshed=refresh, axis_name=axis_name
        )
        return BilevelState(point, optimizer_state, state.point if paging else state.previous), info

    return BilevelStepper(init, step)


def shard_bilevel_step(
    step: Callable[..., tuple[BilevelState, BilevelInfo]],
    mesh: Mesh,
    axis_name: str,
    *,
    state: BilevelState,
    batches: ClientBatches,
    refresh_batches: ClientBatches | None = None,
) -> Callable[..., tuple[BilevelState, BilevelInfo]]:
    """Run a step over a mesh axis that carries the clients: one or several on each device.

    Each device evaluates its own clients and sends their messages; it receives its share of the numbers of all clients,
    aggregates them, and shares the result. Every device then makes the server's step.

    Args:
      step: of :func:`make_bilevel_step`, made like its optimiser with the same ``axis_name``.
      mesh: its axis must divide the number of clients.
      axis_name: of the mesh.
      state, batches, refresh_batches: the step's arguments or their shapes.

    Returns:
      ``step(key, state, batches)``, with ``refresh_batches`` behind where those are given.

    Raises:
      ValueError: if the mesh lacks the axis or the clients do not divide among its devices.
    """
    if axis_name not in mesh.shape:
        raise ValueError(f"the mesh has axes {tuple(mesh.shape)}, not {axis_name!r}")
    n = check_batches("batches", batches)
    if n % mesh.shape[axis_name]:
        raise ValueError(f"{n} clients do not divide among the {mesh.shape[axis_name]} devices of axis {axis_name!r}")
    everywhere, clients = PartitionSpec(), PartitionSpec(axis_name)
    state_spec = _state_specs(state, axis_name, n)
    data = (clients,) if refresh_batches is None else (clients, clients)
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(everywhere, state_spec, *data),
        out_specs=(state_spec, everywhere),
        axis_names={axis_name},
    )


def put_bilevel_state(state: BilevelState, mesh: Mesh, axis_name: str, *, n_clients: int) -> BilevelState:
    """Place a state that is the same on every host on the mesh, what belongs to clients spread over the axis."""
    return place(state, mesh, _state_specs(state, axis_name, n_clients))


def varying(point: BilevelPoint, axis_name: str | None) -> BilevelPoint:
    """Marked as each device's own: else a gradient with respect to it would be summed over the devices."""
    if axis_name is None:
        return point
    return jax.tree.map(lambda leaf: lax.pcast(leaf, axis_name, to="varying"), point)


def report(
    point: BilevelPoint,
    state: BRFedBiState,
    curvature: Float[Array, " n"],
    *,
    messages: int,
    gradients: int | Int[Array, ""],
    refreshed: Bool[Array, ""] | bool = False,
    axis_name: str | None = None,
) -> BilevelInfo:
    """The info of a round that ended at ``point``; arguments as the fields of `BilevelInfo`."""
    least = curvature.min() if axis_name is None else lax.pmin(curvature.min(), axis_name)
    return BilevelInfo(
        BilevelPoint(*(variable.norm for variable in state.variables)),
        BilevelPoint(*(variable.agreement for variable in state.variables)),
        state.drift,
        state.on_boundary,
        state.boundary_rounds / state.count,
        least,
        least > 0,
        jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(point)]).all(),
        jnp.asarray(refreshed),
        jnp.asarray(messages, jnp.int32),
        jnp.asarray(gradients, jnp.int32),
    )


def check_batches(name: str, batches: ClientBatches) -> int:
    """The number of clients, after a look at all leaves."""
    leaves = [
        (f"{name}.{part}{jax.tree_util.keystr(path)}", jnp.shape(leaf))
        for part, tree in zip(("lower", "upper"), batches, strict=True)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    if not leaves:
        raise ValueError(f"{name} have no leaves, and so no clients")
    for where, shape in leaves:
        if not shape or shape[0] != leaves[0][1][0]:
            raise ValueError(
                f"every leaf needs the same leading axis of clients; {where} has shape {shape}, "
                f"{leaves[0][0]} has {leaves[0][1]}"
            )
        if 0 in shape:
            raise ValueError(f"a client without data has no direction; {where} has shape {shape}")
    return leaves[0][1][0]


def _state_specs(state: BilevelState, axis_name: str, n: int) -> BilevelState:
    """Nothing but the estimator's state has an axis of clients, whatever the sizes of the others."""

    def spec(leaf: Any) -> PartitionSpec:
        return PartitionSpec(axis_name) if jnp.shape(leaf)[:1] == (n,) else PartitionSpec()

    everywhere = jax.tree.map(lambda leaf: PartitionSpec(), state)
    of_clients = jax.tree.map(spec, state.optimizer.estimator)
    return everywhere._replace(optimizer=everywhere.optimizer._replace(estimator=of_clients))
