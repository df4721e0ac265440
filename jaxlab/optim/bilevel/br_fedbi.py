r"""BR-FedBi: federated bilevel optimisation in a single loop that Byzantine clients cannot steer.

``n`` clients, of which fewer than half may send anything they like, hold the losses of a bilevel problem whose
objectives are the averages over the honest ones,

.. math:: \min_x \frac{1}{|H|} \sum_{i \in H} f_i(x, y^*(x)), \qquad
    y^*(x) = \arg\min_y \frac{1}{|H|} \sum_{i \in H} g_i(x, y) .

In each round every client evaluates the three directions of :mod:`jaxlab.optim.bilevel.hypergradient` at the server's
``(x, y, z)`` and the server aggregates each of them robustly:

.. math::
    x &\leftarrow x - \eta_x \, \mathrm{AGG}(M_{x,1}, \dots, M_{x,n}) \\
    y &\leftarrow y - \eta_y \, \mathrm{AGG}(M_{y,1}, \dots, M_{y,n}) \\
    z &\leftarrow \Pi_R\bigl(z - \eta_z \, \mathrm{AGG}(M_{z,1}, \dots, M_{z,n})\bigr)

all three from the old ``(x, y, z)``, with :math:`\Pi_R` the projection on the ball of radius R. What a client sends
makes the three forms:

=========  ============================================================  ==================================
form       message                                                       ``estimator``
=========  ============================================================  ==================================
BR-FedBi   :math:`M = D(u_k)`                                            None
BR-FedBiM  :math:`M \leftarrow \beta M + (1 - \beta) D(u_k)`             ``client_momentum(n, beta=0.5)``
BR-FedBiP  :math:`M \leftarrow M + D(u_k; S) - D(u_{k-1}; S)`, or with   ``page(n)``
           probability p a fresh ``D`` on a big batch (PAGE)
=========  ============================================================  ==================================

The paper's guarantees: with a robust aggregator, three messages a round and :math:`O(1/\epsilon)` rounds lead to a
point whose error has a part due to the clients' differences, which no algorithm avoids, and a part due to the noise of
their gradients; more honest clients speed it up in proportion. BR-FedBiM removes the noise's part; BR-FedBiP needs
:math:`O(\epsilon^{-1.5})` samples. Where clients differ much, put nearest-neighbour mixing before the rule:
coordinate-wise rules alone can fail.

With the mean as aggregator it is FedBi, the same without protection, and with one client SOBA (arXiv 2201.13409).
:func:`br_fedbi` is an optax transformation from the stacked directions ``[n, ...]`` to the update of the point;
`make_bilevel_step` adds the evaluation of the directions. Memory of the server: the point and, for PAGE, the one
before; of each client: nothing, or one copy of ``(x, y, z)`` for momentum or PAGE.

Do not put statistics such as those of batch normalisation beside the variables: averaging them is not robust. Make
them part of ``y`` or use a normalisation without them.

Reference: *Single-Loop Byzantine-Resilient Federated Bilevel Optimization*, ICLR 2026.

Deviations from the paper:
  1. The radius R, the start of momentum at the first direction and z = 0 at the start are our choice; no code and no
     such values were published.
  2. ``server`` optimisers, schedules and stochastic aggregators are not in the paper.
  3. ``D_z`` is written so that z solves :math:`\nabla^2_{yy} g z = - \nabla_y f`: the minus sits in z.

Example:
  >>> import jax, jax.numpy as jnp
  >>> from jaxlab.optim import BilevelProblem, ClientBatches, bilevel_point, br_fedbi
  >>> from jaxlab.optim import make_aggregator, make_bilevel_step
  >>> problem = BilevelProblem(  # y*(x) = x; the honest clients' targets average to 3
  ...     upper=lambda x, y, target: 0.5 * (y - target) ** 2, lower=lambda x, y, target: 0.5 * (y - x) ** 2
  ... )
  >>> optimizer = br_fedbi(make_aggregator("trimmed_mean", f=1), 0.05)
  >>> init, step = make_bilevel_step(problem, optimizer)
  >>> targets = jnp.array([3.0, 3.0, 3.0, 1e6])  # the last client lies
  >>> def one_round(state, key):
  ...     return step(key, state, ClientBatches(targets, targets))
  >>> state = init(bilevel_point(jnp.array(0.0), jnp.array(0.0)))
  >>> state, info = jax.lax.scan(one_round, state, jax.random.split(jax.random.key(0), 500))
  >>> round(float(state.point.upper), 3)
  3.0
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxlab.optim.aggregation import Aggregator
from jaxlab.optim.attacks import Byzantine
from jaxlab.optim.bilevel.hypergradient import BilevelPoint
from jaxlab.optim.robust import Agreement, agreement, robust_aggregate
from jaxlab.optim.transforms import Scalar, ScalarOrSchedule, check_positive

__all__ = ["BRFedBiState", "RobustDescentState", "br_fedbi", "project_auxiliary", "robust_descents"]


class RobustDescentState(NamedTuple):
    """State of one variable.

    Attributes:
      attack, aggregate, server: of the attack, the aggregation and the server's optimiser.
      norm: Euclidean norm of the last aggregate.
      agreement: of the last aggregate with the honest messages, where those are known (``byzantine``); else None.
    """

    attack: Any
    aggregate: Any
    server: Any
    norm: Float[Array, ""]
    agreement: Agreement | None


class BRFedBiState(NamedTuple):
    r"""State of :func:`br_fedbi`.

    Attributes:
      count: rounds so far.
      estimator: of the estimator; leaves ``[n, ...]``.
      variables: a :class:`RobustDescentState` for each.
      on_boundary: whether the last round's z was projected.
      boundary_rounds: rounds whose z was projected.
      drift: root mean square over the clients of :math:`\lVert M - D \rVert`, all three variables together: how far
        what they sent last is from their directions.
    """

    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count is not missed
    estimator: Any
    variables: BilevelPoint
    on_boundary: Bool[Array, ""]
    boundary_rounds: Int[Array, ""]
    drift: Float[Array, ""]


def br_fedbi(
    aggregator: Aggregator,
    learning_rate: ScalarOrSchedule = 0.01,
    *,
    ratios: tuple[Scalar, Scalar] = (10.0, 2.0),
    estimator: optax.GradientTransformation | None = None,
    server: BilevelPoint | None = None,
    radius: Scalar = 10.0,
    attack: optax.GradientTransformation | None = None,
    byzantine: Byzantine | None = None,
    key: Key[Array, ""] | None = None,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The server's side of BR-FedBi: from the clients' directions to the update of (x, y, z).

    ``init(point)`` takes the server's point, ``update(directions, state, point)`` a `BilevelPoint` whose leaves have a
    leading axis of clients, and returns an update without it. Extra arguments reach estimator, attack and server.

    Args:
      aggregator: makes one message of many, each variable by itself. The mean gives FedBi.
      learning_rate: :math:`\eta_x`, or a schedule of it. The paper's values: 0.01 on MNIST, 0.03 on CIFAR-10.
      ratios: :math:`\eta_y / \eta_x` and :math:`\eta_z / \eta_x`. The paper's: (10, 2) on MNIST, (3.3, 1.7) on
        CIFAR-10.
      estimator: what clients send in place of a direction: stacked to stacked; None sends directions.
      server: optimisers without step size (``optax.scale_by_adam()``, ``optax.trace(0.9)``, ...), one a variable, that
        the aggregates go through; None for plain steps.
      radius: R of the ball that z stays in.
      attack: stacked to stacked, overwrites the messages of Byzantine clients in a simulation; each variable by itself,
        with random numbers of its own.
      byzantine: who they are, as for `simulate_attack`: the state then holds the aggregates' `Agreement` with the
        honest messages, at the price of two more passes over those.
      key: for a stochastic aggregator.
      axis_name: mesh axis that carries the clients, inside `shard_bilevel_step`.

    Raises:
      TypeError: if ``aggregator`` is no aggregator.
      ValueError: for a rate, ratio or radius that is not positive, or a stochastic aggregator without a key; in
        ``update`` for messages of more clients or fewer than the aggregator can work with.
    """
    descents = robust_descents(
        aggregator,
        learning_rate,
        ratios=ratios,
        server=server,
        attack=attack,
        byzantine=byzantine,
        key=key,
        axis_name=axis_name,
    )
    check_positive("radius", radius)
    estimate = optax.with_extra_args_support(estimator or optax.identity())

    def init(point: BilevelPoint) -> BRFedBiState:
        variables = BilevelPoint(*(one.init(tree) for one, tree in zip(descents, point, strict=True)))
        return BRFedBiState(
            jnp.zeros([], jnp.int32),
            estimate.init(point),
            variables,
            jnp.zeros([], bool),
            jnp.zeros([], jnp.int32),
            jnp.zeros_like(_norm(point)),
        )

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError("br_fedbi projects z: call update(directions, state, point) with the point")
        messages, estimator_state = estimate.update(updates, state.estimator, params, **extra_args)
        drift = state.drift if estimator is None else _drift(messages, updates, axis_name)
        done = [
            one.update(tree, own, variable, **extra_args)
            for one, tree, own, variable in zip(descents, messages, state.variables, params, strict=True)
        ]
        moves = BilevelPoint(*(move for move, _ in done))
        auxiliary, on_boundary = project_auxiliary(moves.auxiliary, params.auxiliary, radius)
        return moves._replace(auxiliary=auxiliary), BRFedBiState(
            optax.safe_increment(state.count),
            estimator_state,
            BilevelPoint(*(own for _, own in done)),
            on_boundary,
            state.boundary_rounds + on_boundary,
            drift.astype(state.drift.dtype),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def robust_descents(
    aggregator: Aggregator,
    learning_rate: ScalarOrSchedule,
    *,
    ratios: tuple[Scalar, Scalar],
    server: BilevelPoint | None = None,
    attack: optax.GradientTransformation | None = None,
    byzantine: Byzantine | None = None,
    key: Key[Array, ""] | None = None,
    axis_name: str | None = None,
) -> BilevelPoint:
    """A transformation for each variable, from its stacked messages to its update; arguments as in `br_fedbi`."""
    if not callable(learning_rate):
        check_positive("learning_rate", learning_rate)
    for index, ratio in enumerate(ratios):
        check_positive(f"ratios[{index}]", ratio)
    made = []
    for index, (scale, ratio) in enumerate(zip(server or [optax.identity()] * 3, (1.0, *ratios), strict=True)):
        own = None if key is None else jax.random.fold_in(key, index)
        rule = robust_aggregate(aggregator, axis_name=axis_name, key=own)
        rate = _scaled(learning_rate, ratio)
        descend = optax.chain(scale, optax.scale_by_learning_rate(rate))
        made.append(_robust_descent(index, attack, rule, descend, byzantine, axis_name))
    return BilevelPoint(*made)


def project_auxiliary(move: PyTree, auxiliary: PyTree, radius: Scalar) -> tuple[PyTree, Bool[Array, ""]]:
    """The update that ends where ``auxiliary + move`` is projected on the ball, and whether it had left it."""
    target = jax.tree.map(lambda z, m: z + m, auxiliary, move)
    norm = _norm(target)
    outside = norm > radius
    factor = jnp.where(outside, radius / jnp.where(outside, norm, 1), 1)

    def to_boundary(t: Array, z: Array, m: Array) -> Array:
        return jnp.where(outside, (t * factor).astype(m.dtype) - z.astype(m.dtype), m)

    return jax.tree.map(to_boundary, target, auxiliary, move), outside


def _robust_descent(
    index: int,
    attack: optax.GradientTransformation | None,
    rule: optax.GradientTransformation,
    server: optax.GradientTransformation,
    byzantine: Byzantine | None,
    axis_name: str | None,
) -> optax.GradientTransformationExtraArgs:
    strike, aggregate, descend = map(optax.with_extra_args_support, (attack or optax.identity(), rule, server))

    def own_draws(leaf: Any) -> Any:
        # One attack strikes all three variables: with one key they would receive the same random numbers.
        is_key = jax.dtypes.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
        return jax.random.fold_in(leaf, index) if is_key else leaf

    def init(params: PyTree) -> RobustDescentState:
        norm = jnp.zeros_like(_norm(params))
        known = None if byzantine is None else Agreement(norm, norm, norm)
        of_attack = jax.tree.map(own_draws, strike.init(params))
        return RobustDescentState(of_attack, aggregate.init(params), descend.init(params), norm, known)

    def update(updates, state, params=None, **extra_args):
        messages, of_attack = strike.update(updates, state.attack, params, **extra_args)
        combined, of_rule = aggregate.update(messages, state.aggregate, params, **extra_args)
        move, of_server = descend.update(combined, state.server, params, **extra_args)
        known = None if byzantine is None else agreement(messages, combined, byzantine, axis_name=axis_name)
        return move, RobustDescentState(of_attack, of_rule, of_server, _norm(combined), known)

    return optax.GradientTransformationExtraArgs(init, update)


def _scaled(rate: ScalarOrSchedule, ratio: Scalar) -> ScalarOrSchedule:
    if callable(rate):
        return lambda count: ratio * rate(count)  # type: ignore[misc]
    return ratio * rate


def _drift(messages: PyTree, directions: PyTree, axis_name: str | None) -> Float[Array, ""]:
    difference = jax.tree.map(lambda m, d: m - d.astype(m.dtype), messages, directions)
    square = jnp.square(_norm(difference)) / len(jax.tree.leaves(difference)[0])
    return jnp.sqrt(square if axis_name is None else lax.pmean(square, axis_name))


def _norm(tree: PyTree) -> Float[Array, ""]:
    return optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree))
