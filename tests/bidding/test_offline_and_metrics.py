"""The linear programme's numbers and closed forms, and what campaigns are measured by."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxlab.bidding import (
    anytime_violation,
    auction_tables,
    confidence_band,
    linear_programme_optimum,
    regret,
    return_on_investment,
    stop_round,
    violation,
)

ROUNDS = 10_000


def optimum_of_the_paper(bids: int, *, reward: str, roi: float, values: int = 51):
    """The first-price experiment with the value at 51 quantiles, which come within 1 % of the limit of many."""
    quantiles = (np.arange(values) + 0.5) / values
    grid = np.linspace(0, 1, bids)
    tables = auction_tables(
        np.clip(stats.norm.ppf(quantiles, 0.6, 0.1), 0, 1), grid, stats.norm.cdf(grid, 0.4, 0.1), reward=reward
    )
    return linear_programme_optimum(*tables, budget_rate=0.01, roi=roi)


@pytest.mark.parametrize(
    ("bids", "reward", "roi", "total", "spend"),
    [
        (201, "utility", 1.8, 172.22, 95.6),
        (101, "utility", 1.8, 171.94, 95.6),
        (101, "utility", 2.5, 66.3, 26.5),
        (201, "value", 1.8, 277.86, 100.0),
    ],
)
def test_optimum_of_the_papers_experiment(bids, reward, roi, total, spend):
    found = optimum_of_the_paper(bids, reward=reward, roi=roi)
    np.testing.assert_allclose(ROUNDS * found.reward, total, rtol=5e-3)
    np.testing.assert_allclose(ROUNDS * found.spend, spend, rtol=1e-2)
    np.testing.assert_allclose(found.policy.sum(1), 1, atol=1e-9)


def test_prices_of_constraints_are_what_a_little_more_brings():
    base = optimum_of_the_paper(41, reward="value", roi=1.0)
    assert base.roi_price == pytest.approx(0, abs=1e-9)
    quantiles = (np.arange(51) + 0.5) / 51
    grid = np.linspace(0, 1, 41)
    tables = auction_tables(
        np.clip(stats.norm.ppf(quantiles, 0.6, 0.1), 0, 1), grid, stats.norm.cdf(grid, 0.4, 0.1), reward="value"
    )
    more = linear_programme_optimum(*tables, budget_rate=0.01 + 1e-5, roi=1.0)
    assert (more.reward - base.reward) / 1e-5 == pytest.approx(base.budget_price, rel=1e-3)


def test_two_arms_by_hand():
    """A cheap arm of return 2 and a dear one of return 1.5: half of each spends the budget of 0.3."""
    reward, cost = np.array([[0.0, 0.2, 0.75]]), np.array([[0.0, 0.1, 0.5]])
    found = linear_programme_optimum(reward, cost, budget_rate=0.3, roi=1.0)
    np.testing.assert_allclose(found.policy, [[0, 0.5, 0.5]], atol=1e-9)
    assert found.reward == pytest.approx(0.475)
    assert found.budget_price == pytest.approx((0.75 - 0.2) / 0.4)
    # A target of 1.6 binds: x of the cheap and y of the dear one with 0.2 x + 0.75 y = 1.6 (0.1 x + 0.5 y).
    bound = linear_programme_optimum(reward, cost, budget_rate=1.0, roi=1.6)
    y = 0.04 / 0.09
    np.testing.assert_allclose(bound.policy, [[0, 1 - y, y]], atol=1e-9)


def test_second_price_tables():
    bids = np.linspace(0, 1, 1001)
    reward, cost = auction_tables(np.array([0.6]), bids, stats.norm.cdf(bids, 0.4, 0.1), price="second")
    assert bids[np.argmax(reward[0])] == pytest.approx(0.6, abs=1e-3)  # truthful
    # E[d 1{d <= b}] of a normal: mean F(b) - deviation^2 times its density.
    exact = 0.4 * stats.norm.cdf(0.5, 0.4, 0.1) - 0.01 * stats.norm.pdf(0.5, 0.4, 0.1)
    np.testing.assert_allclose(np.interp(0.5, bids, cost[0]), exact, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probability": np.array([0.5, 0.4])}, "sum to 1, got shape .* sum 0.9"),
        ({"cost": np.zeros((2, 2))}, r"\[contexts, candidates\], got \(2, 3\) and \(2, 2\)"),
        ({"reward": np.full((2, 3), np.nan)}, "must be finite"),
        ({"roi": -1.0}, "at least 0"),
        ({"cost": np.ones((2, 3)), "reward": np.zeros((2, 3))}, "no feasible policy: add a zero bid"),
    ],
)
def test_bad_programmes(change, message):
    arguments = {"reward": np.ones((2, 3)), "cost": np.ones((2, 3)), "budget_rate": 0.5, "roi": 1.0} | change
    with pytest.raises(ValueError, match=message):
        linear_programme_optimum(**arguments)


def test_metrics_by_hand():
    reward, cost = jnp.array([0.0, 2.0, 0.0]), jnp.array([1.0, 0.0, 1.0])
    np.testing.assert_allclose(return_on_investment(reward, cost), [0, 2, 1])
    np.testing.assert_allclose(violation(reward, cost, roi=1.5), [1.5, -0.5, 1.0])
    assert anytime_violation(reward, cost, roi=1.5) == 1.5
    assert anytime_violation(reward, cost * 0, roi=1.5) == 0
    np.testing.assert_allclose(regret(reward, optimum=0.5), [0.5, -1.0, -0.5])
    assert stop_round(jnp.array([True, True, False])) == 2
    # Nothing spent: finite, and no violation without reward.
    assert np.isfinite(return_on_investment(jnp.ones(2), jnp.zeros(2))).all()
    band = confidence_band(jnp.array([[1.0, 5.0], [3.0, 5.0]]))
    np.testing.assert_allclose(band.mean, [2, 5])
    np.testing.assert_allclose(band.half_width, [1.96, 0], rtol=1e-6)
    assert confidence_band(jnp.ones((1, 3))).half_width.sum() == 0
