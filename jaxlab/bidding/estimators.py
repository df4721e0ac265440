r"""Estimates of reward and cost, with the optimism that L2FOB and its rivals need.

An `Estimator` predicts, for every candidate, a mean reward :math:`\bar r` and cost :math:`\bar c` with half-widths
:math:`\epsilon`, from which the optimistic reward :math:`\hat r = \bar r + \epsilon^r` and the lower bound of the cost
:math:`\check c = \bar c - \epsilon^c` follow. It only ever sees what an outcome reveals.

Auctions come down to the probability of winning :math:`F(b) = P(d \le b)`, counted on the grid of bids:

.. math:: \hat F(b) = \frac{n_0 F_0(b) + \#\{\text{usable rounds with } d_s \le b\}}{n_0 + N(b)}, \qquad
          \epsilon(b) = \kappa \sqrt{\frac{\log T}{2 N(b)}}.

Usable are, for a bid :math:`b` on the grid: with full feedback all rounds; with one-sided feedback of first-price
auctions the rounds bid at most :math:`b` (a loss shows :math:`d`, a win says :math:`d \le b_s \le b`), of second-price
auctions those bid at least :math:`b`; with binary feedback those bid exactly :math:`b`, after which the estimate is
made monotone by isotonic regression. Where :math:`N` differs between bids the bounds are made monotone too, since
:math:`F` is. :math:`\kappa = 1` with ``log_confidence = log(2 / p)`` is the band of Dvoretzky, Kiefer, Wolfowitz and
Massart; it is far too wide to bid with, as :math:`\sum_t b\, \epsilon_t` alone exceeds the budget of the paper's
experiment, and :math:`\kappa = 0.03` is the default::

    from jaxlab.bidding import auction_estimator, bid_grid

    estimator = auction_estimator(bid_grid(101), feedback="one_sided")
    estimate = estimator.predict(estimator.init(), 0.6)  # estimate.reward_upper, estimate.cost_lower: [101]

`ridge_estimator` regresses the reward and the cost of each arm on a context (LinUCB), `external_estimator` takes the
predictions of a model that the caller keeps.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlab.bidding.auctions import Feedback, Outcome, Reward, check_bids, check_choice
from jaxlab.bidding.l2fob import Scalar, is_concrete

__all__ = [
    "Estimate",
    "Estimator",
    "WinCounts",
    "auction_estimator",
    "external_estimator",
    "isotonic",
    "ridge_estimator",
]

PriceRule = Literal["first", "second"]

DEFAULT_WIDTH = 0.03
DEFAULT_LOG_CONFIDENCE = math.log(10_000)  # log T of the paper's first-price experiment


class Estimate(NamedTuple):
    """Mean reward and cost of every candidate, the optimistic reward, and the lower bound of the cost."""

    reward: Float[Array, " k"]
    cost: Float[Array, " k"]
    reward_upper: Float[Array, " k"]
    cost_lower: Float[Array, " k"]


class Estimator(NamedTuple):
    """Three pure functions and what they are about.

    Attributes:
      name: for error messages.
      candidates: how many there are.
      context: shape and dtype of a context, a pytree of `jax.ShapeDtypeStruct`.
      init: ``init()`` is the state before any data.
      predict: ``predict(state, context)`` is an `Estimate`.
      update: ``update(state, context, index, outcome)`` is the state after a round.
    """

    name: str
    candidates: int
    context: Any
    init: Callable[[], Any]
    predict: Callable[[Any, Any], Estimate]
    update: Callable[[Any, Any, Any, Outcome], Any]


class _Seen(NamedTuple):
    """What one round, or each of the last, has revealed."""

    price: Float[Array, "*window"]
    index: Int[Array, "*window"]  # type: ignore[assignment]  # tuple.index is not missed
    won: Bool[Array, "*window"]


class WinCounts(NamedTuple):
    """State of `auction_estimator`.

    Attributes:
      trials: usable rounds, of each bid, or one number where it is the same for all.
      wins: those of them that the bid wins.
      paid: sum of their prices, in second-price auctions, else None.
      recent: the last rounds, where only these count, else None.
      rounds: rounds seen.
    """

    trials: Float[Array, "*k"]
    wins: Float[Array, " k"]
    paid: Float[Array, " k"] | None
    recent: _Seen | None
    rounds: Int[Array, ""]


def auction_estimator(
    bids: Float[Array, " k"],
    *,
    price: PriceRule = "first",
    feedback: Feedback = "full",
    reward: Reward = "utility",
    width: Scalar = DEFAULT_WIDTH,
    log_confidence: Scalar = DEFAULT_LOG_CONFIDENCE,
    prior: Float[Array, " _"] | None = None,
    prior_count: Scalar = 0.0,
    window: int | None = None,
) -> Estimator:
    r"""Probability of winning at each bid, and from it reward and cost. The context is the value of winning, a scalar.

    First price: :math:`\bar r = (v - b) \hat F`, :math:`\check c = b (\hat F - \epsilon)^+`. Second price: with
    :math:`M(b)` the mean of :math:`d\,1\{d \le b\}`, :math:`\bar r = v \hat F - M`, :math:`\check c = (M - b
    \epsilon)^+`. The optimistic reward takes the end of the band of :math:`F` that is better, within the range of
    rewards. With ``reward="value"`` nothing is subtracted from :math:`v`.

    Args:
      bids: the candidates, ascending.
      price: what the winner pays, its bid or the price it beat.
      feedback: what outcomes reveal, as in the environment.
      reward: as in the environment.
      width: :math:`\kappa`.
      log_confidence: :math:`\log T`, or :math:`\log(2 / p)` for the DKW band.
      prior: prior guess :math:`F_0` of the probability of winning at each bid.
      prior_count: how many rounds that guess is worth, :math:`n_0`.
      window: count only the last ``window`` rounds, for prices that drift; None counts all.

    Raises:
      ValueError: bids that are no grid, a negative width, a prior that is no distribution function, a count without
        a prior, a window below 1, binary feedback with second prices.
    """
    check_choice("price", price, PriceRule)
    check_choice("feedback", feedback, Feedback)
    check_choice("reward", reward, Reward)
    if price == "second" and feedback == "binary":
        raise ValueError("binary feedback has no meaning in second-price auctions: the winner is billed the price")
    bids = check_bids(bids)
    _check_at_least_0(width=width, log_confidence=log_confidence, prior_count=prior_count)
    _check_prior(bids, prior, prior_count)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    count = bids.size

    def increments(seen: _Seen) -> tuple[Array, Array, Array | None]:
        """Trials, wins and payments that one round adds, bid by bid."""
        if feedback == "full":
            usable = jnp.ones(())
            hit = seen.price <= bids
        elif feedback == "binary":
            usable = jnp.arange(count) == seen.index
            hit = usable & seen.won
        elif price == "first":
            usable = jnp.arange(count) >= seen.index
            hit = usable & (seen.won | (seen.price <= bids))
        else:
            usable = jnp.arange(count) <= seen.index
            hit = usable & seen.won & (seen.price <= bids)
        paid = jnp.where(hit, seen.price, 0) if price == "second" else None
        return usable.astype(bids.dtype), hit.astype(bids.dtype), paid

    def init() -> WinCounts:
        guess = jnp.zeros(count, bids.dtype) if prior is None else jnp.asarray(prior, bids.dtype)
        strength = jnp.asarray(prior_count, bids.dtype)
        steps = jnp.diff(guess, prepend=0)
        recent = None
        if window is not None:
            recent = _Seen(jnp.full(window, jnp.nan, bids.dtype), jnp.zeros(window, jnp.int32), jnp.zeros(window, bool))
        return WinCounts(
            trials=strength if feedback == "full" else jnp.broadcast_to(strength, (count,)),
            wins=strength * guess,
            paid=strength * jnp.cumsum(bids * steps) if price == "second" else None,
            recent=recent,
            rounds=jnp.zeros((), jnp.int32),
        )

    def predict(state: WinCounts, value: Scalar) -> Estimate:
        trials = jnp.maximum(state.trials, 1e-9)
        rate = state.wins / trials
        if feedback == "binary":
            rate = isotonic(rate, state.trials)
        epsilon = width * jnp.sqrt(log_confidence / (2 * trials))
        lower, upper = jnp.clip(rate - epsilon, 0, 1), jnp.clip(rate + epsilon, 0, 1)
        if feedback != "full":
            lower = jax.lax.cummax(lower)
            upper = jax.lax.cummin(upper, reverse=True)
        if price == "first":
            cost, cost_lower = bids * rate, bids * lower
            margin = value - bids if reward == "utility" else jnp.broadcast_to(value, bids.shape)
            mean = margin * rate
            best = margin * jnp.where(margin >= 0, upper, lower)
        else:
            assert state.paid is not None
            cost = state.paid / trials
            cost_lower = jnp.maximum(cost - bids * epsilon, 0)
            kept = (0, 0) if reward == "value" else (cost, cost_lower)
            mean, best = value * rate - kept[0], jnp.minimum(value * upper - kept[1], value)
        return Estimate(mean, cost, best, cost_lower)

    def update(state: WinCounts, value: Scalar, index: Int[Array, ""], outcome: Outcome) -> WinCounts:
        seen = _Seen(outcome.price, index, outcome.won)
        total = jax.tree.map(jnp.add, (state.trials, state.wins, state.paid), increments(seen))
        recent = state.recent
        if recent is not None and window is not None:
            place = state.rounds % window
            old = increments(jax.tree.map(lambda leaf: leaf[place], recent))
            full = state.rounds >= window
            total = jax.tree.map(lambda new, gone: new - jnp.where(full, gone, 0), total, old)
            recent = jax.tree.map(lambda leaf, now: leaf.at[place].set(now), recent, seen)
        trials, wins, paid = total
        return WinCounts(trials, wins, paid, recent, state.rounds + 1)

    scalar = jax.ShapeDtypeStruct((), bids.dtype)
    return Estimator(f"auction_estimator({price}, {feedback})", count, scalar, init, predict, update)


def isotonic(values: Float[Array, " k"], weights: Float[Array, " k"]) -> Float[Array, " k"]:
    r"""The nearest nondecreasing values in weighted least squares, what pooling adjacent violators gives; O(k^2).

    By the minimax formula :math:`\max_{i \le k} \min_{j \ge k} \mathrm{mean}(i..j)`, with :math:`j` running downwards.
    An entry of weight 0 counts for nothing, and between others of weight 0 it may come out as anything.
    """
    index = jnp.arange(values.size)
    mass, moment = jnp.cumsum(weights), jnp.cumsum(weights * values)
    mass_before, moment_before = mass - weights, moment - weights * values

    def step(least: Array, end: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        last, mass, moment = end
        mean = (moment - moment_before) / jnp.maximum(mass - mass_before, 1e-9)
        inside = index <= last
        least = jnp.minimum(least, jnp.where(inside, mean, jnp.inf))
        return least, jnp.max(jnp.where(inside, least, -jnp.inf))

    start = jnp.full(values.size, jnp.inf, mass.dtype)
    return jax.lax.scan(step, start, (index, mass, moment), reverse=True, unroll=16)[1]


class _Ridge(NamedTuple):
    """Of every arm: inverse of ``ridge I + sum x x^T``, and ``sum x r`` and ``sum x c``."""

    inverse: Float[Array, "arms d d"]
    rewards: Float[Array, "arms d"]
    costs: Float[Array, "arms d"]


def ridge_estimator(
    arms: int, dimension: int, *, width: Scalar = 0.1, ridge: Scalar = 1.0, null_arm: bool = True
) -> Estimator:
    r"""Reward and cost of every arm, linear in a context of ``dimension`` numbers (LinUCB).

    :math:`\bar r_a = x^\top A_a^{-1} \sum x r`, width :math:`\kappa \sqrt{x^\top A_a^{-1} x}` with :math:`A_a =
    \lambda I + \sum x x^\top`, whose inverse is kept by the formula of Sherman and Morrison and made symmetric after
    each round, without which rounding errors grow. Costs are clipped at 0, optimistic rewards at 1.

    Args:
      arms: number of arms.
      dimension: of the context.
      width: :math:`\kappa`.
      ridge: :math:`\lambda`.
      null_arm: whether candidate 0 is one that brings and costs nothing, before the arms.

    Raises:
      ValueError: fewer than one arm or dimension, a negative width, a ridge that is not positive.
    """
    if arms < 1 or dimension < 1:
        raise ValueError(f"at least one arm and one dimension are needed, got {arms} and {dimension}")
    _check_at_least_0(width=width, ridge=ridge)
    if is_concrete(ridge) and ridge == 0:
        raise ValueError("ridge must be positive, got 0")

    def init() -> _Ridge:
        none = jnp.zeros((arms, dimension))
        return _Ridge(jnp.broadcast_to(jnp.eye(dimension) / ridge, (arms, dimension, dimension)), none, none)

    def predict(state: _Ridge, context: Float[Array, " d"]) -> Estimate:
        direction = jnp.einsum("d,ade->ae", context, state.inverse)
        reward, cost, spread = (
            jnp.sum(direction * of_arms, axis=1) for of_arms in (state.rewards, state.costs, context)
        )
        epsilon = width * jnp.sqrt(jnp.maximum(spread, 0))
        estimate = Estimate(reward, cost, jnp.minimum(reward + epsilon, 1), jnp.maximum(cost - epsilon, 0))
        return jax.tree.map(partial(jnp.pad, pad_width=(1, 0)), estimate) if null_arm else estimate

    def update(state: _Ridge, context: Float[Array, " d"], index: Int[Array, ""], outcome: Outcome) -> _Ridge:
        arm = jnp.maximum(index - 1, 0) if null_arm else index
        seen = jnp.where((index > 0) | (not null_arm), context, 0)
        inverse = state.inverse[arm]
        direction = inverse @ seen
        inverse = inverse - jnp.outer(direction, direction) / (1 + seen @ direction)
        return _Ridge(
            state.inverse.at[arm].set((inverse + inverse.T) / 2),
            state.rewards.at[arm].add(seen * outcome.reward),
            state.costs.at[arm].add(seen * outcome.cost),
        )

    shape = jax.ShapeDtypeStruct((dimension,), jnp.float32)
    return Estimator("ridge_estimator", arms + null_arm, shape, init, predict, update)


def external_estimator(candidates: int, *, width: Scalar = 0.0, highest_reward: Scalar = jnp.inf) -> Estimator:
    r"""Predictions of a model outside: the context is a pair ``(reward, cost)`` of arrays ``[candidates]``.

    For a model without intervals the width is :math:`\kappa / \sqrt{1 + n}` with :math:`n` the rounds a candidate was
    taken; one that has intervals (an ensemble, say) passes its bounds and leaves ``width`` at 0.

    Args:
      candidates: number of candidates.
      width: :math:`\kappa`.
      highest_reward: optimistic rewards are clipped there.

    Raises:
      ValueError: fewer than one candidate, a negative width; when predicting, arrays of another length.
    """
    if candidates < 1:
        raise ValueError(f"at least one candidate is needed, got {candidates}")
    _check_at_least_0(width=width)

    def predict(taken: Float[Array, " k"], context: tuple[Float[Array, " a"], Float[Array, " b"]]) -> Estimate:
        reward, cost = context
        if reward.shape != (candidates,) or cost.shape != (candidates,):
            raise ValueError(
                f"rewards {reward.shape} and costs {cost.shape} must both have one entry for {candidates} candidates"
            )
        epsilon = width / jnp.sqrt(1 + taken)
        return Estimate(reward, cost, jnp.minimum(reward + epsilon, highest_reward), jnp.maximum(cost - epsilon, 0))

    def update(taken: Float[Array, " k"], context: Any, index: Int[Array, ""], outcome: Outcome) -> Array:
        return taken.at[index].add(1)

    shape = jax.ShapeDtypeStruct((candidates,), jnp.float32)
    return Estimator("external_estimator", candidates, (shape, shape), lambda: jnp.zeros(candidates), predict, update)


def _check_at_least_0(**numbers: Scalar) -> None:
    for name, number in numbers.items():
        if is_concrete(number) and not 0 <= number < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {number}")


def _check_prior(bids: Array, prior: Array | None, prior_count: Scalar) -> None:
    if prior is None:
        if is_concrete(prior_count) and prior_count > 0:
            raise ValueError(f"prior_count is {prior_count} but there is no prior")
    elif prior.shape != bids.shape:
        raise ValueError(f"the prior needs one probability for each of the {bids.size} bids, got shape {prior.shape}")
    elif is_concrete(prior):
        values = np.asarray(prior)
        if not (values.min() >= 0 and values.max() <= 1 and np.all(np.diff(values) >= 0)):
            raise ValueError(f"the prior must ascend within [0, 1], got {values.min()} to {values.max()}")
