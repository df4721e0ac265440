r"""Where bids meet prices: first- and second-price auctions, a contextual bandit with costs, and recorded logs.

An `Environment` is three pure functions: ``draw`` makes all rounds at once (so that no random number is drawn inside a
loop), ``context`` is what the agent sees of a round, ``outcome`` what happens to its candidate. An auction is won when
the bid is at least the price to beat :math:`d`; the winner pays its bid (first price) or :math:`d` (second price). Its
reward is the ``utility`` :math:`v - \text{payment}` or the ``value`` :math:`v`.

What an outcome reveals is part of the environment, and the rest is NaN, so that no estimator can look at it:

========= =============================================== ================================================
feedback  first price                                     second price
========= =============================================== ================================================
full      the price to beat                               the price to beat
one_sided the price to beat if lost (the winning bid)     the price to beat if won (it is what one pays)
binary    won or lost                                     not defined: the bill of a winner is the price
========= =============================================== ================================================

The paper's first-price experiment::

    from jaxlab.bidding import bid_grid, clipped_normal, first_price

    auctions = first_price(bid_grid(101), values=clipped_normal(0.6, 0.1), prices=clipped_normal(0.4, 0.1))
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxlab.bidding.l2fob import Scalar, is_concrete

__all__ = [
    "Auction",
    "Environment",
    "Feedback",
    "Outcome",
    "Reward",
    "bandit",
    "bid_grid",
    "check_bids",
    "clipped_normal",
    "first_price",
    "log_normal",
    "replay",
    "second_price",
]

Feedback = Literal["full", "one_sided", "binary"]
Reward = Literal["utility", "value"]
Sampler = Callable[[Key[Array, ""], int], Float[Array, " rounds"]]


class Outcome(NamedTuple):
    """What comes of a round.

    Attributes:
      won: whether anything was bought.
      reward, cost: what it brought and what was paid; 0 where nothing was bought.
      price: the price to beat where it is revealed, else NaN.
    """

    won: Bool[Array, "*rounds"]
    reward: Float[Array, "*rounds"]
    cost: Float[Array, "*rounds"]
    price: Float[Array, "*rounds"]


class Auction(NamedTuple):
    """Rounds of an auction: what winning is worth to the bidder, and the price to beat."""

    value: Float[Array, "*rounds"]
    price: Float[Array, "*rounds"]


class Environment(NamedTuple):
    """Rounds, what an agent sees of one, and what happens to the candidate it takes.

    Attributes:
      draw: ``draw(key, rounds)`` makes rounds, leaves ``[rounds, ...]``.
      context: ``context(round)`` of one of them.
      outcome: ``outcome(round, index)`` of the candidate with that index.
    """

    draw: Callable[[Any, int], Any]
    context: Callable[[Any], Any]
    outcome: Callable[[Any, Any], Outcome]


def bid_grid(count: int, *, highest: float = 1.0) -> Float[Array, " k"]:
    """``count`` bids from 0 to ``highest``, equally far apart.

    Raises:
      ValueError: fewer than two bids, or a highest that is not positive.
    """
    if count < 2 or not 0 < highest < math.inf:
        raise ValueError(f"a grid needs at least 2 bids up to a positive one, got {count} up to {highest}")
    return jnp.linspace(0.0, highest, count)


def check_bids(bids: Any) -> Float[Array, " k"]:
    """These bids as a floating-point array, if they are a grid; traced ones are let through.

    Raises:
      ValueError: no bid, negative ones, or ones that do not ascend.

    Warns:
      UserWarning: no bid of 0, without which a campaign cannot sit out.
    """
    bids = jnp.asarray(bids)
    bids = bids if jnp.issubdtype(bids.dtype, jnp.floating) else bids.astype(float)
    if bids.ndim != 1 or not bids.size:
        raise ValueError(f"bids must be a list with at least one entry, got shape {bids.shape}")
    if is_concrete(bids):
        values = np.asarray(bids)
        if np.any(wrong := ~(np.isfinite(values) & (values >= 0))):
            raise ValueError(f"bids must be finite and at least 0, got {values[wrong][0]}")
        if np.any(np.diff(values) <= 0):
            place = int(np.argmax(np.diff(values) <= 0))
            raise ValueError(f"bids must ascend, got {values[place + 1]} after {values[place]}")
        if values[0] > 0:
            warnings.warn(f"the lowest bid is {values[0]}; without a bid of 0 a campaign cannot sit out", stacklevel=3)
    return bids


def clipped_normal(mean: float, deviation: float, *, lowest: float = 0.0, highest: float = 1.0) -> Sampler:
    """Normal draws, clipped; the paper's values have mean 0.6, its prices 0.4, both a deviation of 0.1."""
    return lambda key, rounds: jnp.clip(mean + deviation * jax.random.normal(key, (rounds,)), lowest, highest)


def log_normal(median: float = 53.0, mean: float = 64.5, *, highest: float = 300.0) -> Sampler:
    """Log-normal draws of this median and mean before they are clipped; divided by ``highest``, so within [0, 1].

    The defaults are the rough scale of prices in real display advertising (per thousand impressions): half of the
    auctions below 53, an average of 64.5, none above 300.

    Raises:
      ValueError: unless ``0 < median < mean`` and ``highest > 0``.
    """
    if not 0 < median < mean or not highest > 0:
        raise ValueError(
            f"a log-normal needs 0 < median < mean and a positive highest, got {median}, {mean}, {highest}"
        )
    spread = math.sqrt(2 * math.log(mean / median))
    return lambda key, rounds: (
        jnp.minimum(median * jnp.exp(spread * jax.random.normal(key, (rounds,))), highest) / highest
    )


def first_price(
    bids: Float[Array, " k"],
    *,
    values: Sampler,
    prices: Sampler,
    reward: Reward = "utility",
    feedback: Feedback = "full",
) -> Environment:
    """Sealed-bid auctions whose winner pays its bid.

    Args:
      bids: the candidates.
      values: what winning a round is worth, ``values(key, rounds)``.
      prices: the highest competing bid, likewise.
      reward: whether a win counts its value or its value less the payment; the paper's numbers fit the latter.
      feedback: what is revealed.

    Raises:
      ValueError: bids that are no grid, an unknown reward or feedback.
    """
    check_choice("reward", reward, Reward)
    check_choice("feedback", feedback, Feedback)
    bids = check_bids(bids)

    def outcome(auction: Auction, index: Int[Array, ""]) -> Outcome:
        bid = bids[index]
        won = auction.price <= bid
        shown = jnp.asarray(True) if feedback == "full" else ~won & (feedback == "one_sided")
        return _outcome(auction, won, bid, shown, reward)

    return Environment(_draw_auctions(values, prices), lambda auction: auction.value, outcome)


def second_price(
    bids: Float[Array, " k"],
    *,
    values: Sampler,
    prices: Sampler,
    reward: Reward = "utility",
    feedback: Feedback = "full",
) -> Environment:
    """Sealed-bid auctions whose winner pays the price it beat; arguments as in `first_price`.

    Raises:
      ValueError: bids that are no grid, an unknown reward or feedback, binary feedback.
    """
    check_choice("reward", reward, Reward)
    check_choice("feedback", feedback, Feedback)
    if feedback == "binary":
        raise ValueError("binary feedback has no meaning in second-price auctions: the winner is billed the price")
    bids = check_bids(bids)

    def outcome(auction: Auction, index: Int[Array, ""]) -> Outcome:
        won = auction.price <= bids[index]
        shown = jnp.asarray(True) if feedback == "full" else won
        return _outcome(auction, won, auction.price, shown, reward)

    return Environment(_draw_auctions(values, prices), lambda auction: auction.value, outcome)


class _Pull(NamedTuple):
    """One round of the bandit: the context, and reward and cost of every candidate."""

    features: Float[Array, "*rounds d"]
    reward: Float[Array, "*rounds k"]
    cost: Float[Array, "*rounds k"]


def bandit(
    features: Float[Array, "_ _"],
    rewards: Float[Array, "_ _"],
    costs: Float[Array, " _"],
    *,
    cost_noise: Scalar = 0.0,
    null_arm: bool = True,
) -> Environment:
    """A contextual bandit on recorded rows, drawn with replacement.

    Args:
      features: context of each row, ``[n, d]``.
      rewards: reward of each arm on each row, ``[n, arms]``.
      costs: mean cost of each arm, ``[arms]``.
      cost_noise: deviation of normal noise on the costs, which are clipped to [0, 1] afterwards.
      null_arm: put an arm in front that brings nothing and costs nothing.

    Raises:
      ValueError: row or arm counts that do not match.
    """
    if len(features) != len(rewards) or rewards.shape[1:] != costs.shape:
        raise ValueError(
            f"features {features.shape}, rewards {rewards.shape} and costs {costs.shape} do not match: expected "
            "[n, d], [n, arms] and [arms]"
        )

    def draw(key: Key[Array, ""], rounds: int) -> _Pull:
        row_key, noise_key = jax.random.split(key)
        rows = jax.random.randint(row_key, (rounds,), 0, len(features))
        noise = jax.random.normal(noise_key, (rounds * costs.size,)).reshape(rounds, costs.size)
        reward, cost = rewards[rows], jnp.clip(costs + cost_noise * noise, 0, 1)
        if null_arm:
            nothing = jnp.zeros((rounds, 1))
            reward, cost = (jnp.concatenate([nothing, of_arms], axis=1) for of_arms in (reward, cost))
        return _Pull(features[rows], reward, cost)

    def outcome(pull: _Pull, index: Int[Array, ""]) -> Outcome:
        bought = (index > 0) if null_arm else jnp.asarray(True)
        return Outcome(bought, pull.reward[index], pull.cost[index], jnp.asarray(jnp.nan))

    return Environment(draw, lambda pull: pull.features, outcome)


def replay(environment: Environment, log: Any) -> Environment:
    """The environment with recorded rounds, from the first on, in place of drawn ones.

    Args:
      environment: says what is seen of a round and what comes of a candidate.
      log: rounds as ``environment.draw`` makes them, such as an `Auction` of arrays.
    """
    recorded = len(jax.tree.leaves(log)[0])

    def draw(key: Key[Array, ""], rounds: int) -> Any:
        if rounds > recorded:
            raise ValueError(f"the log has {recorded} rounds, {rounds} were asked for")
        return jax.tree.map(lambda leaf: leaf[:rounds], log)

    return environment._replace(draw=draw)


def check_choice(what: str, given: str, kind: Any) -> None:
    """Raise `ValueError` unless ``given`` is one of the words of a `Literal`."""
    if given not in get_args(kind):
        raise ValueError(f"{what} must be one of {', '.join(get_args(kind))}, got {given!r}")


def _draw_auctions(values: Sampler, prices: Sampler) -> Callable[[Any, int], Auction]:
    def draw(key: Key[Array, ""], rounds: int) -> Auction:
        value_key, price_key = jax.random.split(key)
        return Auction(values(value_key, rounds), prices(price_key, rounds))

    return draw


def _outcome(auction: Auction, won: Array, payment: Array, shown: Array, reward: Reward) -> Outcome:
    cost = jnp.where(won, payment, 0)
    return Outcome(
        won=won,
        reward=jnp.where(won, auction.value, 0) - (cost if reward == "utility" else 0),
        cost=cost,
        price=jnp.where(shown, auction.price, jnp.nan),
    )
