r"""Campaigns: rounds of an environment and an agent under a hard budget, scanned, vmapped, or served one by one.

`simulate` is one `jax.lax.scan` over rounds and goes under `jax.vmap` over keys, settings and campaigns::

    import jax
    from jaxlab.bidding import Settings, auction_estimator, bid_grid, log_normal, make_l2fob, second_price, simulate

    bids = bid_grid(101)
    market = second_price(bids, values=log_normal(60.0, 75.0), prices=log_normal())

    def campaign(key, roi_step):
        settings = Settings(budget_rate=0.02, roi=1.2, roi_step=roi_step)
        agent = make_l2fob(auction_estimator(bids, price="second"), settings, expectation="policy", buffer=16)
        return simulate(market, agent, key, rounds=500, budget=10.0)

    traces = jax.vmap(campaign)(jax.random.split(jax.random.key(0), 3), jax.numpy.array([0.6, 6.0, 60.0]))

The budget is kept here and not by the agent, in the same way for all of them: ``strict`` refuses the first win that
would exceed it and stops for good, ``overshoot`` accepts that win and then stops. The spend is a float32 pair whose
error term is exact, since plain float32 sums lose cents within ten million rounds.

`Server` is the same agent for online use: a host loop around two compiled steps.
"""

import warnings
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxlab.bidding.agents import Agent
from jaxlab.bidding.auctions import Environment, Outcome, check_choice
from jaxlab.bidding.l2fob import Scalar, is_concrete

__all__ = ["Campaign", "Ledger", "Server", "Stop", "Trace", "advance", "open_ledger", "settle", "simulate", "start"]

Stop = Literal["strict", "overshoot"]

_DECISIONS_BEFORE_ADVICE = 100
_NOT_FINITE = -1


class Ledger(NamedTuple):
    """What was spent and earned.

    Attributes:
      spend, spend_error: their sum is the money spent, exact to twice the precision.
      reward: earned so far.
      alive: whether the campaign still bids.
    """

    spend: Float[Array, ""]
    spend_error: Float[Array, ""]
    reward: Float[Array, ""]
    alive: Bool[Array, ""]


class Campaign(NamedTuple):
    """A campaign under way: the agent's state and the ledger. A carry to scan, checkpoint, and go on with."""

    agent: PyTree
    ledger: Ledger


class Trace(NamedTuple):
    """What happened, round by round, all 0 and false after the stop.

    Attributes:
      index: the candidate taken.
      won: whether anything was bought.
      reward, cost: earned and paid.
      alive: whether the campaign still bid in that round, the refused one included.
      valid: whether the estimates were finite.
      info: what the agent tells.
    """

    index: Int[Array, "*rounds"]  # type: ignore[assignment]  # tuple.index is not missed
    won: Bool[Array, "*rounds"]
    reward: Float[Array, "*rounds"]
    cost: Float[Array, "*rounds"]
    alive: Bool[Array, "*rounds"]
    valid: Bool[Array, "*rounds"]
    info: PyTree


def open_ledger() -> Ledger:
    """The ledger before the first round."""
    zero = jnp.zeros(())
    return Ledger(zero, zero, zero, jnp.asarray(True))


def settle(ledger: Ledger, outcome: Outcome, budget: Scalar, *, stop: Stop = "strict") -> tuple[Ledger, Outcome]:
    """Book an outcome, or refuse it.

    Args:
      ledger: so far.
      outcome: of the round; a cost that is not finite is refused.
      budget: the most that may be spent.
      stop: see the module.

    Returns:
      The ledger, and the outcome as it was accepted: nothing won, earned or paid where it was refused.
    """
    # Two-sum: total + error is spend + cost without any rounding.
    total = ledger.spend + outcome.cost
    back = total - ledger.spend
    error = (ledger.spend - (total - back)) + (outcome.cost - back) + ledger.spend_error
    spend = total + error
    error = error - (spend - total)
    within = (spend < budget) | ((spend == budget) & (error <= 0))
    accepted = ledger.alive & (within if stop == "strict" else jnp.isfinite(outcome.cost))
    booked = Outcome(
        won=accepted & outcome.won,
        reward=jnp.where(accepted, outcome.reward, 0),
        cost=jnp.where(accepted, outcome.cost, 0),
        price=outcome.price,
    )
    left = within if stop == "strict" else accepted & (spend < budget)
    ledger = Ledger(
        jnp.where(accepted, spend, ledger.spend),
        jnp.where(accepted, error, ledger.spend_error),
        ledger.reward + booked.reward,
        ledger.alive & left,
    )
    return ledger, booked


def simulate(
    environment: Environment,
    agent: Agent,
    key: Key[Array, ""],
    rounds: int,
    budget: Scalar,
    *,
    stop: Stop = "strict",
) -> Trace:
    """A whole campaign.

    Args:
      environment: makes the rounds and their outcomes.
      agent: the bidder.
      key: random key of the rounds and of agents that randomise.
      rounds: how many.
      budget: the most that may be spent.
      stop: see the module.

    Raises:
      ValueError: no round, a budget that is not positive, an unknown stop.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    round_key, chance_key = jax.random.split(key)
    drawn = environment.draw(round_key, rounds)
    chances = jax.random.uniform(chance_key, (rounds,))
    return advance(environment, agent, start(agent), drawn, chances, budget, stop=stop)[1]


def start(agent: Agent) -> Campaign:
    """A campaign before its first round."""
    return Campaign(agent.init(), open_ledger())


def advance(
    environment: Environment,
    agent: Agent,
    campaign: Campaign,
    rounds: PyTree,
    chances: Float[Array, " rounds"],
    budget: Scalar,
    *,
    stop: Stop = "strict",
) -> tuple[Campaign, Trace]:
    """Go on with a campaign for some rounds, as `simulate` does; in several calls it comes to the same.

    Args:
      environment: says what is seen of a round and what comes of it.
      agent: the bidder.
      campaign: so far.
      rounds: leaves ``[rounds, ...]``, as ``environment.draw`` makes them.
      chances: a number uniform in [0, 1) a round.
      budget: the most that may be spent by the whole campaign.
      stop: see the module.

    Raises:
      ValueError: a budget that is not positive, an unknown stop.
    """
    _check_budget(budget, stop)

    def one(campaign: Campaign, drawn: tuple[PyTree, Array]) -> tuple[Campaign, Trace]:
        (row, chance), alive = drawn, campaign.ledger.alive
        context = environment.context(row)
        state, action = agent.act(campaign.agent, context, chance)
        ledger, outcome = settle(campaign.ledger, environment.outcome(row, action.index), budget, stop=stop)
        state = agent.learn(state, context, action.index, outcome)
        # A stopped campaign is frozen: it must not learn from rounds in which it does not bid.
        state = jax.tree.map(lambda new, old: jnp.where(alive, new, old), state, campaign.agent)
        trace = Trace(
            index=jnp.where(alive, action.index, 0).astype(jnp.int32),
            won=outcome.won,
            reward=outcome.reward,
            cost=outcome.cost,
            alive=alive,
            valid=action.valid,
            info=action.info,
        )
        return Campaign(state, ledger), trace

    return jax.lax.scan(one, campaign, (rounds, chances))


class Server:
    """An agent online: ask for a decision, then report what came of it.

    Both are compiled once and run in some microseconds; nothing of a model or a market is needed here. With an
    `external_estimator` each request brings its own predictions.

    Args:
      agent: the bidder.
      budget: the most that may be spent.
      budget_rate: budget a round, to advise against mode ``point`` where all costs exceed it; None gives no advice.
      campaign: to go on with, None to start.
      stop: see the module.
      seed: for agents that randomise.

    Raises:
      ValueError: a budget that is not positive, an unknown stop.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        budget: float | int,
        budget_rate: float | None = None,
        campaign: Campaign | None = None,
        stop: Stop = "strict",
        seed: int = 0,
    ) -> None:
        _check_budget(budget, stop)
        self.campaign = start(agent) if campaign is None else campaign
        self._agent = agent
        self._budget_rate = budget_rate
        self._asked = 0
        self._random = np.random.default_rng(seed)
        self._pending: tuple[Any, Array] | None = None

        def act(campaign: Campaign, context: PyTree, chance: float | Array) -> tuple[Campaign, Array]:
            alive = campaign.ledger.alive
            state, action = agent.act(campaign.agent, context, chance)
            state = jax.tree.map(lambda new, old: jnp.where(alive, new, old), state, campaign.agent)
            # One number for the host to wait for: the candidate, or what says that there is none.
            index = jnp.where(alive, jnp.where(action.valid, action.index, _NOT_FINITE), 0)
            return campaign._replace(agent=state), index

        def learn(campaign: Campaign, context: PyTree, index: Array | int, outcome: Outcome) -> Campaign:
            alive = campaign.ledger.alive
            ledger, booked = settle(campaign.ledger, outcome, budget, stop=stop)
            state = agent.learn(campaign.agent, context, index, booked)
            return Campaign(jax.tree.map(lambda new, old: jnp.where(alive, new, old), state, campaign.agent), ledger)

        self._act = jax.jit(act)
        self._learn = jax.jit(learn)

    @property
    def alive(self) -> bool:
        """Whether the campaign still bids."""
        return bool(self.campaign.ledger.alive)

    def decide(self, context: Any, chance: float | None = None) -> int:
        """The candidate to take in this context, 0 once the campaign has stopped.

        Raises:
          ValueError: the estimates are not finite; the message names the estimator.
          RuntimeError: the last decision's outcome was not reported.
        """
        if self._pending is not None:
            raise RuntimeError("report the outcome of the last decision before asking for the next")
        chance = self._random.random() if chance is None else chance
        campaign, found = self._act(self.campaign, context, chance)
        index = int(found)
        if index == _NOT_FINITE:
            raise ValueError(f"{self._agent.estimator.name} predicts values that are not finite for {context}")
        self.campaign, self._pending = campaign, (context, found)
        self._asked += 1
        if self._asked == _DECISIONS_BEFORE_ADVICE and self._budget_rate is not None:
            self._advise(context, self._budget_rate)
        return index

    def report(self, outcome: Outcome) -> None:
        """Tell what came of the last decision; a refused or late win counts for nothing.

        Raises:
          RuntimeError: no decision is waiting.
        """
        if self._pending is None:
            raise RuntimeError("there is no decision to report on")
        self.campaign = self._learn(self.campaign, *self._pending, outcome)
        self._pending = None

    def _advise(self, context: Any, budget_rate: float) -> None:
        estimate = getattr(self.campaign.agent, "estimate", None)
        if estimate is None or getattr(self.campaign.agent, "contexts", True) is not None:
            return  # not L2FOB in mode point
        estimated = self._agent.estimator.predict(estimate, jax.tree.map(jnp.asarray, context))
        costs = np.asarray(estimated.cost_lower)
        if costs.max() > 0 and (least := costs[costs > 0].min()) > budget_rate:
            warnings.warn(
                f"no candidate that costs anything costs less than {least:.3g}, above the budget rate of "
                f'{budget_rate:.3g}; expectation="point" is over-cautious there, "policy" is not',
                stacklevel=3,
            )


def _check_budget(budget: Scalar, stop: str) -> None:
    check_choice("stop", stop, Stop)
    if is_concrete(budget) and not np.all(np.asarray(budget) > 0):
        raise ValueError(f"budget must be positive, got {budget}")
