r"""What people bid with instead: dual descent, pacing, throttling, shading, greed. All are an `Agent`.

With means :math:`\bar r, \bar c` of the estimator, a step :math:`\eta` and candidates :math:`b`:

* `budget_dual` (Wang et al., arXiv 2304.13477; budget only): :math:`b = \arg\max \bar r - \lambda \bar c`, then
  :math:`\lambda \leftarrow [\lambda + \eta (\bar c - \rho)]^+`. Theory: :math:`\eta = 1 / \sqrt T`.
* `two_multiplier_dual`: :math:`b = \arg\max (1 + \mu) \bar r - (\lambda + \gamma \mu) \bar c`, then
  :math:`\lambda \leftarrow [\lambda + \eta (c - \rho)]^+` and :math:`\mu \leftarrow [\mu + \eta (\gamma c - r)]^+`
  (the paced bid of value maximisers), or :math:`\mu \leftarrow \mu \exp(\eta (\gamma c - r))` in the style of Feng,
  Padmanabhan and Wang.
* `min_pacing` (Balseiro et al., arXiv 2302.08530): the same multipliers, each with a bid of its own, the lower of
  which is submitted.
* `optimistic_mirror` (after Guo et al. 2025): mirror descent on the probabilities of the candidates, and one queue a
  constraint that is advanced optimistically, :math:`Q \leftarrow [Q + 2 g_t - g_{t-1}]^+`.
* `greedy`: the best optimistic reward, until the budget is spent.
* `constant_shading`: a share of the value. `pid_pacing`: that share follows the spend,
  :math:`s \leftarrow s \exp(k (\rho - c) / \rho)`.
* `throttling`: greedy, taking part with probability :math:`\min(1, \rho / \bar c)`.

``bounds="optimistic"`` puts :math:`\hat r, \check c` in place of the means, without which nothing is ever tried where a
bid has to be made to be learnt about. ``feedback="predicted"`` updates the multipliers with what the estimator says of
the bid (less noise), ``"realised"`` with what was paid and earned.

Example: ``simulate(auctions, two_multiplier_dual(estimator, budget_rate=0.01, roi=1.8, step=0.6), key, 2000, 20.0)``.

Deviation: the adaptive step sizes of Guo et al.'s method for knapsacks are not public in a form that could be
transcribed; `budget_dual` over a grid of steps stands for it.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlab.bidding.agents import Action, Agent
from jaxlab.bidding.auctions import Outcome, check_choice
from jaxlab.bidding.estimators import Estimate, Estimator
from jaxlab.bidding.l2fob import Scalar, is_concrete

__all__ = [
    "Multipliers",
    "budget_dual",
    "constant_shading",
    "greedy",
    "min_pacing",
    "optimistic_mirror",
    "pid_pacing",
    "throttling",
    "two_multiplier_dual",
]

Source = Literal["predicted", "realised"]
Bounds = Literal["mean", "optimistic"]
Update = Literal["additive", "multiplicative"]

_FIRST_MULTIPLIER = 0.1  # a multiplicative update cannot leave 0


class Multipliers(NamedTuple):
    """Prices of the two constraints."""

    budget: Float[Array, "*rounds"]
    roi: Float[Array, "*rounds"]


class _State(NamedTuple):
    """The estimator's state, what the method adapts, and its prediction for what it just took."""

    estimate: Any
    own: Any
    predicted: tuple[Array, Array]


def budget_dual(
    estimator: Estimator, *, budget_rate: Scalar, step: Scalar, feedback: Source = "predicted", bounds: Bounds = "mean"
) -> Agent:
    """Dual descent on the budget alone.

    Args:
      estimator: predicts rewards and costs.
      budget_rate: :math:`\\rho`.
      step: :math:`\\eta`.
      feedback: what updates the multiplier.
      bounds: what it decides by.

    Raises:
      ValueError: numbers that are not positive, an unknown word.
    """
    return _dual(
        estimator,
        lambda of, price: jnp.argmax(of.reward - price.budget * of.cost),
        budget_rate=budget_rate,
        roi=0.0,
        step=step,
        feedback=feedback,
        bounds=bounds,
        update="additive",
    )


def two_multiplier_dual(
    estimator: Estimator,
    *,
    budget_rate: Scalar,
    roi: Scalar,
    step: Scalar,
    update: Update = "additive",
    feedback: Source = "predicted",
    bounds: Bounds = "mean",
) -> Agent:
    """Dual descent on budget and ROI; arguments as in `budget_dual`, ``update`` is that of the ROI's multiplier."""
    return _dual(
        estimator,
        lambda of, price: jnp.argmax((1 + price.roi) * of.reward - (price.budget + roi * price.roi) * of.cost),
        budget_rate=budget_rate,
        roi=roi,
        step=step,
        feedback=feedback,
        bounds=bounds,
        update=update,
    )


def min_pacing(
    estimator: Estimator,
    *,
    budget_rate: Scalar,
    roi: Scalar,
    step: Scalar,
    feedback: Source = "predicted",
    bounds: Bounds = "mean",
) -> Agent:
    """Two paced bids, one for each constraint, and the lower counts; candidates must ascend."""

    def choose(of: Estimate, price: Multipliers) -> Array:
        for_budget = jnp.argmax(of.reward - price.budget * of.cost)
        for_roi = jnp.argmax((1 + price.roi) * of.reward - roi * price.roi * of.cost)
        return jnp.minimum(for_budget, for_roi)

    return _dual(
        estimator,
        choose,
        budget_rate=budget_rate,
        roi=roi,
        step=step,
        feedback=feedback,
        bounds=bounds,
        update="additive",
    )


class _Mirror(NamedTuple):
    """Queues, their sums over the rounds so far, the last constraint values, and the rounds."""

    queues: Multipliers
    sums: Multipliers
    last: Multipliers
    rounds: Int[Array, ""]


def optimistic_mirror(estimator: Estimator, *, budget_rate: Scalar, roi: Scalar, alpha: Scalar = 2.0) -> Agent:
    """Mirror descent with optimistic rewards, costs and queues.

    :math:`\\pi_t \\propto \\pi_{t-1} \\exp((\\hat r - Q_\\rho \\check c - Q_\\gamma (\\gamma \\check c - \\hat r)) /
    \\alpha)`, from which the candidate is drawn. The product over past rounds is formed with the present estimates, so
    that it can be told for a context never seen before.

    Args:
      estimator: predicts rewards and costs.
      budget_rate, roi: the constraints.
      alpha: weight of the Kullback-Leibler divergence, at least 2 in theory.

    Raises:
      ValueError: numbers that are not positive.
    """
    _check_positive(budget_rate=budget_rate, alpha=alpha)

    def init() -> _State:
        zero = jnp.zeros(())
        none = Multipliers(zero, zero)
        return _State(estimator.init(), _Mirror(none, none, none, jnp.zeros((), jnp.int32)), (zero, zero))

    def act(state: _State, context: Any, chance: Any) -> tuple[_State, Action]:
        of, own = estimator.predict(state.estimate, context), state.own
        excess = roi * of.cost_lower - of.reward_upper
        sums = jax.tree.map(jnp.add, own.sums, own.queues)
        gain = (own.rounds + 1) * of.reward_upper - sums.budget * of.cost_lower - sums.roi * excess
        chances = jax.nn.softmax(gain / alpha)
        now = Multipliers(chances @ of.cost_lower - budget_rate, chances @ excess)
        queues = jax.tree.map(lambda q, g, last: jnp.maximum(q + 2 * g - last, 0), own.queues, now, own.last)
        index = jnp.minimum(jnp.sum(jnp.cumsum(chances) <= chance), estimator.candidates - 1)
        state = state._replace(own=_Mirror(queues, sums, now, own.rounds + 1))
        return state, Action(index, jnp.isfinite(jnp.sum(gain)), queues)

    return Agent(init, act, _learn(estimator), estimator)


def greedy(estimator: Estimator) -> Agent:
    """The candidate of the best optimistic reward, whatever it costs."""

    def act(state: _State, context: Any, chance: Any = 0.0) -> tuple[_State, Action]:
        of = estimator.predict(state.estimate, context)
        return state, Action(jnp.argmax(of.reward_upper), jnp.isfinite(jnp.sum(of.reward_upper)), ())

    return Agent(_init(estimator, ()), act, _learn(estimator), estimator)


def constant_shading(estimator: Estimator, bids: Float[Array, " k"], *, share: Scalar) -> Agent:
    """The highest bid of at most a share of the value, which is the context.

    Args:
      estimator: kept up to date, not looked at.
      bids: the candidates.
      share: of the value, at least 0; found offline.

    Raises:
      ValueError: a negative share.
    """
    if is_concrete(share) and not share >= 0:
        raise ValueError(f"share must be at least 0, got {share}")

    def act(state: _State, context: Any, chance: Any = 0.0) -> tuple[_State, Action]:
        return state, Action(_highest(bids, share * context), jnp.isfinite(context), ())

    return Agent(_init(estimator, ()), act, _learn(estimator), estimator)


def pid_pacing(
    estimator: Estimator,
    bids: Float[Array, " k"],
    *,
    budget_rate: Scalar,
    gain: Scalar = 0.01,
    first_share: Scalar = 0.5,
) -> Agent:
    """A share of the value that grows while less than the budget rate is spent, and shrinks while more is.

    Args:
      estimator: kept up to date, not looked at.
      bids: the candidates.
      budget_rate: :math:`\\rho`.
      gain: :math:`k`.
      first_share: the share to start with.

    Raises:
      ValueError: numbers that are not positive.
    """
    _check_positive(budget_rate=budget_rate, gain=gain, first_share=first_share)

    def act(state: _State, context: Any, chance: Any = 0.0) -> tuple[_State, Action]:
        return state, Action(_highest(bids, state.own * context), jnp.isfinite(context), state.own)

    def learn(state: _State, context: Any, index: Int[Array, ""], outcome: Outcome) -> _State:
        share = state.own * jnp.exp(gain * (budget_rate - outcome.cost) / budget_rate)
        # Bounded, so that a share which has run away comes back within a sensible time.
        return _learn(estimator)(state._replace(own=jnp.clip(share, 1e-3, 10.0)), context, index, outcome)

    return Agent(_init(estimator, jnp.asarray(first_share, bids.dtype)), act, learn, estimator)


def throttling(estimator: Estimator, *, budget_rate: Scalar) -> Agent:
    """Greedy, but sitting out at random so that the budget lasts; candidate 0 is to sit out.

    Raises:
      ValueError: a budget rate that is not positive.
    """
    _check_positive(budget_rate=budget_rate)

    def act(state: _State, context: Any, chance: Any) -> tuple[_State, Action]:
        of = estimator.predict(state.estimate, context)
        best = jnp.argmax(of.reward_upper)
        part = jnp.minimum(1, budget_rate / jnp.maximum(of.cost[best], 1e-9))
        index = jnp.where(chance < part, best, 0)
        return state, Action(index, jnp.isfinite(jnp.sum(of.reward_upper)), part)

    return Agent(_init(estimator, ()), act, _learn(estimator), estimator)


def _dual(
    estimator: Estimator,
    choose: Callable[[Estimate, Multipliers], Array],
    *,
    budget_rate: Scalar,
    roi: Scalar,
    step: Scalar,
    feedback: Source,
    bounds: Bounds,
    update: Update,
) -> Agent:
    check_choice("feedback", feedback, Source)
    check_choice("bounds", bounds, Bounds)
    check_choice("update", update, Update)
    _check_positive(budget_rate=budget_rate, step=step)
    if is_concrete(roi) and not roi >= 0:
        raise ValueError(f"roi must be at least 0, got {roi}")
    first = Multipliers(jnp.zeros(()), jnp.asarray(_FIRST_MULTIPLIER if update == "multiplicative" else 0.0))

    def act(state: _State, context: Any, chance: Any = 0.0) -> tuple[_State, Action]:
        of = estimator.predict(state.estimate, context)
        if bounds == "optimistic":
            of = of._replace(reward=of.reward_upper, cost=of.cost_lower)
        valid = jnp.isfinite(jnp.sum(of.reward + of.cost))
        index = jnp.where(valid, choose(of, state.own), 0)
        return state._replace(predicted=(of.reward[index], of.cost[index])), Action(index, valid, state.own)

    def learn(state: _State, context: Any, index: Int[Array, ""], outcome: Outcome) -> _State:
        reward, cost = state.predicted if feedback == "predicted" else (outcome.reward, outcome.cost)
        excess = step * (roi * cost - reward)
        of_roi = state.own.roi * jnp.exp(excess) if update == "multiplicative" else state.own.roi + excess
        own = Multipliers(
            jnp.maximum(state.own.budget + step * (cost - budget_rate), 0),
            jnp.clip(of_roi, 0, 1e6),
        )
        return _learn(estimator)(state._replace(own=own), context, index, outcome)

    return Agent(_init(estimator, first), act, learn, estimator)


def _init(estimator: Estimator, own: Any) -> Callable[[], _State]:
    return lambda: _State(estimator.init(), own, (jnp.zeros(()), jnp.zeros(())))


def _learn(estimator: Estimator) -> Callable[[_State, Any, Any, Outcome], _State]:
    return lambda state, context, index, outcome: state._replace(
        estimate=estimator.update(state.estimate, context, index, outcome)
    )


def _highest(bids: Float[Array, " k"], bid: Scalar) -> Int[Array, ""]:
    """Index of the highest candidate that does not exceed a bid, 0 where all do."""
    return jnp.maximum(jnp.sum(bids <= bid) - 1, 0)


def _check_positive(**numbers: Scalar) -> None:
    for name, number in numbers.items():
        if is_concrete(number) and not (np.isfinite(number) and number > 0):
            raise ValueError(f"{name} must be finite and positive, got {number}")
