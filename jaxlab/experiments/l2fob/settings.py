"""Where the methods are compared: auctions of both price rules, three kinds of feedback, and a bandit on real rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxlab import bidding
from jaxlab.bidding import Environment, Estimator, Feedback, Reward
from jaxlab.bidding.estimators import PriceRule

__all__ = ["AUCTIONS", "BANDIT", "NAMES", "Setting", "has_digits", "make_setting"]

BANDIT = "bandit"
VALUE, PRICE, DEVIATION = 0.6, 0.4, 0.1  # means of values and prices in the paper's first-price experiment
# Rough scale of real display advertising: value of an impression, price to beat, in thousandths of a currency unit.
MARKET_VALUE, MARKET_PRICE, MARKET_HIGHEST = (60.0, 75.0), (53.0, 64.5), 300.0
EXPLORE_ROUNDS = 20  # with one-sided feedback a bid of 0 reveals the price
CONTEXTS = 51  # quantiles of the value in the linear programme


@dataclass(frozen=True)
class Setting:
    """One market and what is known of it.

    Attributes:
      name: for the table.
      environment, estimator: of `jaxlab.bidding`.
      budget_rate, roi: the constraints.
      bids: the candidates, None where they are arms.
      explore_rounds: of L2FOB.
      optimistic: whether duals decide by optimistic bounds, since they would never try anything otherwise.
      optimum: reward of a round of the best stationary policy.
    """

    name: str
    environment: Environment
    estimator: Estimator
    budget_rate: float
    roi: float
    bids: Any
    explore_rounds: int
    optimistic: bool
    optimum: Callable[[], float]


@dataclass(frozen=True)
class _Market:
    """A row of the auctions: price rule, feedback, reward, constraints, and whether prices are log-normal."""

    price: PriceRule
    feedback: Feedback
    reward: Reward = "utility"
    budget_rate: float = 0.01
    roi: float = 1.8
    log_normal: bool = False


AUCTIONS = {
    "first_full": _Market("first", "full"),
    "first_value": _Market("first", "full", reward="value"),
    "first_tight": _Market("first", "full", roi=2.5),
    "first_one_sided": _Market("first", "one_sided"),
    "first_binary": _Market("first", "binary"),
    # Targets that bind: the budget alone would return 2.3 and 2.2.
    "second_full": _Market("second", "full", roi=2.4),
    "second_one_sided": _Market("second", "one_sided", roi=2.4),
    "market": _Market("first", "full", budget_rate=0.02, roi=2.5, log_normal=True),
}
NAMES = (*AUCTIONS, BANDIT)


def has_digits() -> bool:
    """Whether scikit-learn, which bundles the handwritten digits, is installed."""
    try:
        import sklearn.datasets  # noqa: F401
    except ImportError:
        return False
    return True


@lru_cache(maxsize=32)
def make_setting(name: str, *, bids: int, width: float, log_confidence: float) -> Setting:
    """The setting of that name.

    Args:
      name: one of `NAMES`.
      bids: size of the grid of bids.
      width: of the estimator's band, in auctions.
      log_confidence: logarithm of the number of rounds.

    Raises:
      ValueError: another name.
    """
    if name == BANDIT:
        return _digits()
    if name not in AUCTIONS:
        raise ValueError(f"unknown setting {name!r}; there are {', '.join(NAMES)}")
    market, grid = AUCTIONS[name], bidding.bid_grid(bids)
    if market.log_normal:
        values = bidding.log_normal(*MARKET_VALUE, highest=MARKET_HIGHEST)
        prices = bidding.log_normal(*MARKET_PRICE, highest=MARKET_HIGHEST)
    else:
        values, prices = (bidding.clipped_normal(mean, DEVIATION) for mean in (VALUE, PRICE))
    make = bidding.first_price if market.price == "first" else bidding.second_price
    return Setting(
        name=name,
        environment=make(grid, values=values, prices=prices, reward=market.reward, feedback=market.feedback),
        estimator=bidding.auction_estimator(
            grid,
            price=market.price,
            feedback=market.feedback,
            reward=market.reward,
            width=width,
            log_confidence=log_confidence,
        ),
        budget_rate=market.budget_rate,
        roi=market.roi,
        bids=grid,
        explore_rounds=EXPLORE_ROUNDS if market.feedback == "one_sided" else 0,
        optimistic=market.feedback == "binary",
        optimum=lambda: _auction_optimum(market, np.asarray(grid, float)),
    )


def _auction_optimum(market: _Market, bids: np.ndarray) -> float:
    quantiles = (np.arange(CONTEXTS) + 0.5) / CONTEXTS
    if market.log_normal:
        value, price = (
            stats.lognorm(np.sqrt(2 * np.log(mean / median)), scale=median / MARKET_HIGHEST)
            for median, mean in (MARKET_VALUE, MARKET_PRICE)
        )
    else:
        value, price = stats.norm(VALUE, DEVIATION), stats.norm(PRICE, DEVIATION)
    win = np.where(bids < 1, price.cdf(bids), 1.0)  # prices above 1 are clipped to it
    tables = bidding.auction_tables(
        np.clip(value.ppf(quantiles), 0, 1), bids, win, price=market.price, reward=market.reward
    )
    return bidding.linear_programme_optimum(*tables, budget_rate=market.budget_rate, roi=market.roi).reward


def _digits() -> Setting:
    """Ten arms, one a digit, that pay 1 for the right one and cost 0.15 to 0.85 whatever they pay."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    pixels = pixels / np.linalg.norm(pixels, axis=1, keepdims=True)
    features = np.concatenate([pixels, np.full((len(pixels), 1), 0.5)], axis=1)
    costs = 0.15 + 0.7 * np.random.default_rng(0).permutation(10) / 9
    rewards, budget_rate, roi = np.eye(10)[labels], 0.2, 1.3

    def optimum() -> float:
        # What someone who knows every label would do; no linear model gets there.
        means = np.broadcast_to(costs, rewards.shape)
        null = np.zeros((10, 1))
        reward, cost = np.hstack([null, np.eye(10)]), np.hstack([null, means[:10]])
        share = np.bincount(labels, minlength=10) / len(labels)
        return bidding.linear_programme_optimum(reward, cost, share, budget_rate=budget_rate, roi=roi).reward

    return Setting(
        name=BANDIT,
        environment=bidding.bandit(
            jnp.asarray(features, jnp.float32),
            jnp.asarray(rewards, jnp.float32),
            jnp.asarray(costs, jnp.float32),
            cost_noise=0.1,
        ),
        estimator=bidding.ridge_estimator(10, features.shape[1], width=0.1),
        budget_rate=budget_rate,
        roi=roi,
        bids=None,
        explore_rounds=0,
        optimistic=True,
        optimum=optimum,
    )
