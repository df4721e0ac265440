r"""Robust training as optax transformations: workers' messages in, one update of the server out.

Gradients (and whatever the first links make of them) have a leading worker axis, parameters have none::

    optimizer = optax.chain(
        client_momentum(n, beta=0.9),                            # stacked to stacked
        simulate_attack(attacks.ALittleIsEnough(), byzantine=7),  # in research only
        robust_aggregate(compose(NearestNeighbourMixing(7), TrimmedMean(7))),  # stacked to one tree
        optax.adam(1e-3),                                        # ordinary optax from here on
    )
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, batches)
    updates, state = optimizer.update(grads, state, params)

``init(params)`` receives the server's parameters; transformations that remember something of every worker take the
number of workers when they are made. Inside ``jax.shard_map`` each device has the rows of its own workers (of messages
and of states) and the whole of the parameters, and ``axis_name`` says over which axis. States are
NamedTuples of arrays.

References: momentum of every worker before robust aggregation, Farhadkhani et al. 2022, arXiv 2205.12173, and
Karimireddy et al. 2021, arXiv 2012.10333; PAGE, Li et al. 2021, arXiv 2008.10898.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxlab.optim.aggregation import Aggregator
from jaxlab.optim.aggregation.aggregator import check_count
from jaxlab.optim.attacks import Attack, Byzantine
from jaxlab.optim.attacks.attack import honest_of, per_worker
from jaxlab.optim.transforms import check_decay

__all__ = [
    "Agreement",
    "AttackState",
    "ClientMomentumState",
    "PageState",
    "RobustAggregateState",
    "agreement",
    "client_momentum",
    "page",
    "robust_aggregate",
    "simulate_attack",
]


class ClientMomentumState(NamedTuple):
    """State of :func:`client_momentum`: steps so far and every worker's momentum ``[n, ...]``."""

    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count is not missed
    momentum: optax.Updates


class PageState(NamedTuple):
    """State of :func:`page`: steps so far and every worker's estimate ``[n, ...]``."""

    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count is not missed
    estimate: optax.Updates


class AttackState(NamedTuple):
    """State of :func:`simulate_attack`: steps so far and the key that each step's is made from."""

    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count is not missed
    key: Key[Array, ""]


class RobustAggregateState(NamedTuple):
    """State of :func:`robust_aggregate`.

    Attributes:
      count: aggregations so far.
      key: that each step's is made from; None for a rule that draws nothing.
      aggregator: the rule's own state; a list of them, one a leaf, with ``layerwise``.
    """

    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count is not missed
    key: Key[Array, ""] | None
    aggregator: Any


class Agreement(NamedTuple):
    r"""How an aggregate compares with the honest messages, norms over all leaves together.

    Attributes:
      cosine: of the angle between the aggregate and the honest mean; NaN where either is zero. Negative: the attackers
        have turned it round.
      error: distance of the aggregate from the honest mean.
      spread: root of the honest messages' mean squared distance to their mean. A rule with constant :math:`\kappa` has
        ``error <= sqrt(kappa) * spread``.
    """

    cosine: Float[Array, ""]
    error: Float[Array, ""]
    spread: Float[Array, ""]


def agreement(stacked: PyTree, aggregate: PyTree, byzantine: Byzantine, *, axis_name: str | None = None) -> Agreement:
    """Compare an aggregate with the messages of the honest workers, which a simulation knows.

    It reads the messages twice more; over a mesh axis it sums one model over the devices.

    Args:
      stacked: messages, leaves ``[workers, ...]`` (of this device's workers); those of Byzantine workers do not matter.
      aggregate: what a rule made of them.
      byzantine: as for `simulate_attack`.
      axis_name: mesh axis that carries the workers.

    Raises:
      ValueError: as `Attack.apply`.
    """
    honest = honest_of(stacked, byzantine, axis_name=axis_name)
    mean = honest.mean()
    result = [leaf.astype(m.dtype) for leaf, m in zip(jax.tree.leaves(aggregate), mean, strict=True)]
    scatter: Any = 0.0
    for leaf, m in zip(honest.leaves, mean, strict=True):
        scatter += jnp.sum(jnp.square(jnp.where(per_worker(honest.mask, leaf), leaf.astype(m.dtype) - m, 0)))
    if axis_name is not None:
        scatter = lax.psum(scatter, axis_name)
    cosine = optax.tree.vdot(result, mean) / (optax.tree.norm(result) * optax.tree.norm(mean))
    return Agreement(cosine, optax.tree.norm(optax.tree.sub(result, mean)), jnp.sqrt(scatter / honest.count))


def client_momentum(
    n_workers: int, beta: Any, *, init: Literal["first", "zero"] = "first"
) -> optax.GradientTransformation:
    r"""Every worker's exponential moving average of its messages: :math:`M_i \leftarrow \beta M_i + (1 - \beta) G_i`.

    Args:
      n_workers: in the whole network.
      beta: in [0, 1); may be traced.
      init: ``"first"`` starts at the first message, ``"zero"`` at zero.

    Raises:
      ValueError: for fewer than 1 worker, ``beta`` outside [0, 1), an unknown ``init``; when the messages have another
        number of workers than the state.
    """
    check_count("n_workers", n_workers, least=1)
    check_decay("beta", beta)
    if init not in ("first", "zero"):
        raise ValueError(f"init must be 'first' or 'zero', got {init!r}")

    def init_fn(params: optax.Params) -> ClientMomentumState:
        return ClientMomentumState(jnp.zeros([], jnp.int32), _zeros_per_worker(params, n_workers))

    def update(updates, state, params=None):
        del params
        _check_workers(updates, state.momentum)
        decay = jnp.where((state.count == 0) & (init == "first"), 0.0, beta)

        def average(m: Array, g: Array) -> Array:
            return (decay * m + (1 - decay) * g.astype(m.dtype)).astype(m.dtype)

        momentum = jax.tree.map(average, state.momentum, updates)
        return momentum, ClientMomentumState(optax.safe_increment(state.count), momentum)

    return optax.GradientTransformation(init_fn, update)


def page(n_workers: int) -> optax.GradientTransformationExtraArgs:
    r"""Every worker's PAGE estimate: fresh now and then, in between the last one plus what changed on a small batch.

    .. math:: M_i \leftarrow G_i \text{ if refreshed, else } M_i + G_i - G_i^{\mathrm{prev}}

    ``update`` takes the extra arguments ``previous`` (messages of the same batch at the parameters of the step before)
    and ``refresh`` (a bool, the same for all workers). The first step refreshes in any case. Where fresh messages come
    from a larger batch, compute the messages under ``jax.lax.cond`` with the same ``refresh``.

    Raises:
      ValueError: for fewer than 1 worker; when an extra argument is missing, or the messages have another number of
        workers than the state.
    """
    check_count("n_workers", n_workers, least=1)

    def init(params: optax.Params) -> PageState:
        return PageState(jnp.zeros([], jnp.int32), _zeros_per_worker(params, n_workers))

    def update(
        updates,
        state,
        params=None,
        *,
        previous: PyTree = None,
        refresh: Bool[Array, ""] | bool | None = None,
        **extra_args,
    ):
        del params, extra_args
        if previous is None or refresh is None:
            raise ValueError("page needs update(messages, state, previous=messages of the step before, refresh=bool)")
        _check_workers(updates, state.estimate)
        _check_workers(previous, state.estimate)
        fresh = jnp.asarray(refresh) | (state.count == 0)

        def corrected(m: Array, g: Array, before: Array) -> Array:
            g = g.astype(m.dtype)
            return jnp.where(fresh, g, m + (g - before.astype(m.dtype)))

        estimate = jax.tree.map(corrected, state.estimate, updates, previous)
        return estimate, PageState(optax.safe_increment(state.count), estimate)

    return optax.GradientTransformationExtraArgs(init, update)


def simulate_attack(
    attack: Attack, byzantine: Byzantine, *, key: Key[Array, ""] | None = None, axis_name: str | None = None
) -> optax.GradientTransformation:
    """Replace the messages of Byzantine workers: for research, between the honest links and the aggregation.

    Args:
      attack: what they send.
      byzantine: how many (the last ones), or a mask over all workers. It need not be what an aggregator assumes.
      key: for attacks that draw at random; folded with the step.
      axis_name: mesh axis that carries the workers.

    Raises:
      TypeError: if ``attack`` is none.
      ValueError: if the attack needs a key and has none.
    """
    if not isinstance(attack, Attack):
        raise TypeError(f"expected an attack, got {type(attack).__name__}; make_attack(name) makes one")
    if attack.stochastic and key is None:
        raise ValueError(f"{type(attack).__name__} draws at random: give simulate_attack key=jax.random.key(...)")
    root = jax.random.key(0) if key is None else key

    def update(updates, state, params=None):
        del params
        if jax.tree.leaves(updates):
            step_key = jax.random.fold_in(state.key, state.count)
            updates = attack.apply(updates, byzantine, key=step_key, axis_name=axis_name)
        return updates, AttackState(optax.safe_increment(state.count), state.key)

    return optax.GradientTransformation(lambda params: AttackState(jnp.zeros([], jnp.int32), jnp.copy(root)), update)


def robust_aggregate(
    aggregator: Aggregator,
    *,
    axis_name: str | None = None,
    layerwise: bool = False,
    key: Key[Array, ""] | None = None,
) -> optax.GradientTransformation:
    """One update of all workers' messages; leaves lose their worker axis, and ordinary optax can follow.

    Args:
      aggregator: see :mod:`jaxlab.optim.aggregation`.
      axis_name: mesh axis that carries the workers, inside ``jax.shard_map``; the result is the same on all devices.
      layerwise: apply the rule to every leaf by itself; norms and distances are then those of the leaf.
      key: for rules that draw at random (bucketing); folded with the step.

    Raises:
      TypeError: if ``aggregator`` is none.
      ValueError: if the rule needs a key and has none; when the messages do not fit it (`Aggregator.apply`).
    """
    if not isinstance(aggregator, Aggregator):
        raise TypeError(f"expected an aggregator, got {type(aggregator).__name__}; make_aggregator(name) makes one")
    if aggregator.stochastic and key is None:
        raise ValueError(f"{type(aggregator).__name__} draws at random: give robust_aggregate key=jax.random.key(...)")

    def init(params: optax.Params) -> RobustAggregateState:
        leaves = jax.tree.leaves(params)
        own = [aggregator.init(leaf) for leaf in leaves] if layerwise else aggregator.init(params)
        return RobustAggregateState(jnp.zeros([], jnp.int32), None if key is None else jnp.copy(key), own)

    def update(updates, state, params=None):
        del params
        step_key = None if state.key is None else jax.random.fold_in(state.key, state.count)
        leaves, structure = jax.tree.flatten(updates)
        own = state.aggregator
        if layerwise:
            if len(leaves) != len(own):
                raise ValueError(f"messages have {len(leaves)} leaves, the parameters of init had {len(own)}")
            pairs = [
                aggregator.apply(leaf, one, key=step_key, axis_name=axis_name)
                for leaf, one in zip(leaves, own, strict=True)
            ]
            updates, own = jax.tree.unflatten(structure, [result for result, _ in pairs]), [one for _, one in pairs]
        elif leaves:
            updates, own = aggregator.apply(updates, own, key=step_key, axis_name=axis_name)
        return updates, RobustAggregateState(optax.safe_increment(state.count), state.key, own)

    return optax.GradientTransformation(init, update)


def _zeros_per_worker(params: optax.Params, n_workers: int) -> optax.Updates:
    def zeros(p: Any) -> Array:
        return jnp.zeros((n_workers, *jnp.shape(p)), jnp.promote_types(jnp.result_type(p), jnp.float32))

    return jax.tree.map(zeros, params)


def _check_workers(updates: optax.Updates, state: optax.Updates) -> None:
    found: Any = jax.tree.structure(updates)
    expected: Any = jax.tree.structure(state)
    if found != expected:
        raise ValueError(f"messages must be structured like the parameters of init, {expected}; got {found}")
    for (key_path, leaf), known in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(state), strict=True
    ):
        if jnp.shape(leaf) != jnp.shape(known):
            name = jax.tree_util.keystr(key_path) or "the tree"
            raise ValueError(f"messages of every worker need shape {jnp.shape(known)}; {name} has {jnp.shape(leaf)}")
