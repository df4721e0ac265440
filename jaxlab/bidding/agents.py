r"""L2FOB as an agent: estimator, queues and one of three ways to take expectations over contexts.

An `Agent` is three pure functions, the same for L2FOB and for every baseline::

    import jax, math
    from jaxlab.bidding import Settings, auction_estimator, bid_grid, clipped_normal, first_price, make_l2fob, simulate

    bids = bid_grid(101)
    auctions = first_price(bids, values=clipped_normal(0.6, 0.1), prices=clipped_normal(0.4, 0.1))
    agent = make_l2fob(auction_estimator(bids), Settings(budget_rate=0.01, roi=1.8), expectation="point")
    trace = simulate(auctions, agent, jax.random.key(0), rounds=2000, budget=20.0)

The expectation :math:`E_v` over contexts in the queues (`jaxlab.bidding.l2fob`) is

* ``point``: the present context alone, as in the paper's experiments. It fits auctions, where the cost of a bid is
  already an average over prices. Where single costs far exceed the budget a round it is over-cautious: every such
  candidate counts as a violation, and queues never shrink.
* ``sample``: the mean over past contexts of the same candidate; the literal reading of the equations, sensible where a
  candidate means the same in all contexts.
* ``policy``: candidates are policies, :math:`b_\theta(v) = \arg\max_b \hat r(v, b) - \theta \check c(v, b)`, whose
  reward and cost are averaged over past contexts. Among them is every bidder with a fixed price of money
  :math:`\theta`, so that single costs may exceed the budget a round as long as their average does not.

Deviations from the paper: 1. ``policy`` is an addition; the paper takes the distribution of contexts as known and does
not say how a bid is compared across contexts. 2. The contexts are the last ``buffer`` ones, or a ``population`` given.
3. ``explore_rounds`` takes candidate 0 in the first rounds, without which one-sided feedback has nothing to start from.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlab.bidding.auctions import Outcome, check_choice
from jaxlab.bidding.estimators import Estimate, Estimator
from jaxlab.bidding.l2fob import Prediction, Queues, Settings, decide, empty_queues, is_concrete, potential

__all__ = ["Action", "Agent", "Expectation", "L2FOBInfo", "L2FOBState", "default_multipliers", "make_l2fob"]

Expectation = Literal["point", "sample", "policy"]

_HANDICAP = 1e-7  # of a multiplier, so that equals go to the lowest
_UNROLL = 16


class Action(NamedTuple):
    """What an agent does in a round.

    Attributes:
      index: the candidate.
      valid: whether the estimates it rests on were finite.
      info: what a user would plot: queues, multipliers.
    """

    index: Int[Array, "*rounds"]  # type: ignore[assignment]  # tuple.index is not missed
    valid: Bool[Array, "*rounds"]
    info: Any


class Agent(NamedTuple):
    """A bidder.

    Attributes:
      init: ``init()`` is the state before the first round.
      act: ``act(state, context, chance) -> (state, action)``; ``chance`` is uniform in [0, 1), for those who randomise.
      learn: ``learn(state, context, index, outcome) -> state``, after the round.
      estimator: what it predicts with.
    """

    init: Callable[[], Any]
    act: Callable[[Any, Any, Any], tuple[Any, Action]]
    learn: Callable[[Any, Any, Any, Outcome], Any]
    estimator: Estimator


class L2FOBInfo(NamedTuple):
    """What L2FOB tells of a round: the queues after it, and the violation predicted for what it took."""

    queues: Queues
    violation: tuple[Float[Array, "*rounds"], Float[Array, "*rounds"]]


class L2FOBState(NamedTuple):
    """State of L2FOB.

    Attributes:
      queues: the virtual queues.
      estimate: state of the estimator.
      contexts: the last contexts, leaves ``[buffer, ...]``, None in mode ``point``.
      rounds: rounds so far.
    """

    queues: Queues
    estimate: Any
    contexts: Any
    rounds: Int[Array, ""]


def default_multipliers() -> Float[Array, "40"]:
    """Prices of money of the policies: 0, and 39 from 0.05 to 20 in equal ratios."""
    return jnp.concatenate([jnp.zeros(1), jnp.geomspace(0.05, 20.0, 39)])


def make_l2fob(
    estimator: Estimator,
    settings: Settings,
    *,
    expectation: Expectation,
    buffer: int = 64,
    population: Any = None,
    multipliers: Float[Array, " theta"] | None = None,
    lyapunov: str = "quadratic",
    explore_rounds: int = 0,
) -> Agent:
    """The agent.

    Args:
      estimator: predicts rewards and costs.
      settings: constraints and step sizes; may be traced.
      expectation: over contexts, see the module.
      buffer: how many past contexts stand for all, in modes ``sample`` and ``policy``.
      population: contexts that stand for all, leaves ``[contexts, ...]``, in place of past ones.
      multipliers: prices of money of the policies, `default_multipliers`.
      lyapunov: name of the Lyapunov function, see `jaxlab.bidding.potential`.
      explore_rounds: candidate 0 is taken in that many first rounds.

    Raises:
      ValueError: settings that make no sense, an unknown expectation or Lyapunov function, a buffer below 1, negative
        multipliers or exploration.
    """
    check_choice("expectation", expectation, Expectation)
    settings = settings.check()
    shape = potential(lyapunov)
    if buffer < 1:
        raise ValueError(f"buffer must be at least 1, got {buffer}")
    if explore_rounds < 0:
        raise ValueError(f"explore_rounds must be at least 0, got {explore_rounds}")
    prices = default_multipliers() if multipliers is None else jnp.asarray(multipliers)
    if prices.ndim != 1 or not prices.size or (is_concrete(prices) and not _finite_and_at_least_0(np.asarray(prices))):
        raise ValueError(f"multipliers must be a list of finite numbers at least 0, got {prices}")
    remembers = expectation != "point" and population is None

    def init() -> L2FOBState:
        contexts = None
        if remembers:
            contexts = jax.tree.map(lambda leaf: jnp.zeros((buffer, *leaf.shape), leaf.dtype), estimator.context)
        return L2FOBState(empty_queues(), estimator.init(), contexts, jnp.zeros((), jnp.int32))

    def act(state: L2FOBState, context: Any, chance: Any = 0.0) -> tuple[L2FOBState, Action]:
        now = estimator.predict(state.estimate, context)
        contexts, handicap = state.contexts, None
        actions = jnp.arange(estimator.candidates)
        if expectation == "point":
            prediction = Prediction.point(now.reward_upper, now.cost_lower)
        else:
            if remembers:
                place = state.rounds % buffer
                contexts = jax.tree.map(lambda kept, new: kept.at[place].set(new), contexts, context)
                weights = (jnp.arange(buffer) <= state.rounds) / jnp.minimum(state.rounds + 1, buffer)
            else:
                contexts = population
                size = len(jax.tree.leaves(population)[0])
                weights = jnp.full(size, 1 / size)
            of_all = jax.vmap(estimator.predict, in_axes=(None, 0))(state.estimate, contexts)
            if expectation == "sample":
                means = weights @ of_all.reward_upper, weights @ of_all.cost_lower
                prediction = Prediction(now.reward_upper, *means)
            else:
                actions, prediction = _policies(now, of_all, weights, prices)
                handicap = _HANDICAP * prices
        decision = decide(settings, state.queues, prediction, potential=shape, handicap=handicap)
        index, queues = actions[decision.index], decision.queues
        if explore_rounds:
            exploring = state.rounds < explore_rounds
            index = jnp.where(exploring, 0, index)
            queues = jax.tree.map(lambda old, new: jnp.where(exploring, old, new), state.queues, queues)
        state = L2FOBState(queues, state.estimate, contexts if remembers else None, state.rounds + 1)
        return state, Action(index, decision.valid, L2FOBInfo(queues, decision.violation))

    def learn(state: L2FOBState, context: Any, index: Int[Array, ""], outcome: Outcome) -> L2FOBState:
        return state._replace(estimate=estimator.update(state.estimate, context, index, outcome))

    return Agent(init, act, learn, estimator)


def _finite_and_at_least_0(numbers: np.ndarray) -> bool:
    return bool(np.all(np.isfinite(numbers) & (numbers >= 0)))


def _policies(
    now: Estimate, of_all: Estimate, weights: Float[Array, " m"], multipliers: Float[Array, " theta"]
) -> tuple[Int[Array, " theta"], Prediction]:
    """What every policy does now, and what it earns and pays now and on average."""
    chosen = jnp.argmax(now.reward_upper - multipliers[:, None] * now.cost_lower, axis=1)
    start = jnp.full((multipliers.size, weights.size), -jnp.inf), jnp.zeros((multipliers.size, weights.size))

    def better(best: tuple[Array, Array], of_candidate: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        (most, paid), (reward, cost) = best, of_candidate
        score = reward - multipliers[:, None] * cost
        return (jnp.maximum(most, score), jnp.where(score > most, cost, paid)), None

    # A running maximum over candidates is elementwise in policies and contexts, hence vectorised; an argmax over the
    # three axes at once is ten times slower on the CPU.
    (most, paid), _ = jax.lax.scan(better, start, (of_all.reward_upper.T, of_all.cost_lower.T), unroll=_UNROLL)
    means = (most + multipliers[:, None] * paid) @ weights, paid @ weights
    return chosen, Prediction(now.reward_upper[chosen], *means)
