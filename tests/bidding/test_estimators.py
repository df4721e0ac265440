"""Estimates against closed forms, coverage, unbiasedness, and what they must not look at."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxlab.bidding import (
    Auction,
    Estimator,
    Outcome,
    auction_estimator,
    bid_grid,
    clipped_normal,
    external_estimator,
    first_price,
    isotonic,
    ridge_estimator,
    second_price,
)
from jaxlab.bidding.auctions import check_bids

BIDS = bid_grid(11)
MAKE = {"first": first_price, "second": second_price}


def feed(estimator: Estimator, price: str, feedback: str, drawn: Auction, index: jax.Array):
    """The state after rounds with given candidates, through the environment that hides what it must."""
    nobody = clipped_normal(0.0, 0.0)
    market = MAKE[price](bid_grid(estimator.candidates), values=nobody, prices=nobody, feedback=feedback)

    def step(state, row):
        auction, candidate = row
        outcome = market.outcome(auction, candidate)
        return estimator.update(state, auction.value, candidate, outcome), outcome.price

    return jax.lax.scan(step, estimator.init(), (drawn, index))


def draws(rounds: int, seed: int = 0) -> tuple[Auction, jax.Array]:
    rng = np.random.default_rng(seed)
    prices = np.clip(rng.normal(0.4, 0.1, rounds), 0, 1).astype(np.float32)
    index = rng.integers(0, len(BIDS), rounds)
    return Auction(jnp.full(rounds, 0.6), jnp.asarray(prices)), jnp.asarray(index)


def test_full_feedback_counts_prices():
    drawn, index = draws(40)
    estimator = auction_estimator(BIDS, width=0.5, log_confidence=2.0)
    state, _ = feed(estimator, "first", "full", drawn, index)
    rate = (np.asarray(drawn.price)[:, None] <= np.asarray(BIDS)).mean(0)
    epsilon = 0.5 * math.sqrt(2.0 / 80)
    found = estimator.predict(state, 0.6)
    margin = 0.6 - np.asarray(BIDS)
    np.testing.assert_allclose(found.reward, margin * rate, atol=1e-6)
    np.testing.assert_allclose(found.cost, BIDS * rate, atol=1e-6)
    np.testing.assert_allclose(found.cost_lower, BIDS * np.maximum(rate - epsilon, 0), atol=1e-6)
    # Above the value winning loses money, so that the optimist hopes to lose the auction.
    hoped = np.where(margin >= 0, np.minimum(rate + epsilon, 1), np.maximum(rate - epsilon, 0))
    np.testing.assert_allclose(found.reward_upper, margin * hoped, atol=1e-6)
    by_value = auction_estimator(BIDS, reward="value").predict(state, 0.6)
    np.testing.assert_allclose(by_value.reward, 0.6 * rate, atol=1e-6)


def test_second_price_averages_payments():
    drawn, index = draws(40)
    estimator = auction_estimator(BIDS, price="second", width=0.0)
    state, _ = feed(estimator, "second", "full", drawn, index)
    price = np.asarray(drawn.price)[:, None]
    won = price <= np.asarray(BIDS)
    found = estimator.predict(state, 0.6)
    np.testing.assert_allclose(found.cost, (price * won).mean(0), atol=1e-6)
    np.testing.assert_allclose(found.reward, ((0.6 - price) * won).mean(0), atol=1e-6)
    np.testing.assert_array_equal(found.reward_upper, found.reward)
    np.testing.assert_array_equal(found.cost_lower, found.cost)


def test_dkw_band_covers():
    """With width 1 and log(2 / p) the band holds all of F in 1 - p of the runs, up to three deviations of 400 runs."""
    runs, rounds, p = 400, 60, 0.1
    truth = stats.norm.cdf(np.asarray(BIDS), 0.4, 0.1)
    estimator = auction_estimator(BIDS, reward="value", width=1.0, log_confidence=math.log(2 / p))

    def run(key):
        prices = 0.4 + 0.1 * jax.random.normal(key, (rounds,))
        drawn = Auction(jnp.ones(rounds), prices)
        found = estimator.predict(feed(estimator, "first", "full", drawn, jnp.zeros(rounds, int))[0], 1.0)
        lower, upper = found.cost_lower / jnp.maximum(BIDS, 1e-9), found.reward_upper
        return jnp.all((lower[1:] <= truth[1:] + 1e-6) & (truth <= upper + 1e-6)[1:])

    covered = float(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), runs)).mean())
    assert covered >= 1 - p - 3 * math.sqrt(p * (1 - p) / runs)


@pytest.mark.parametrize("price", ["first", "second"])
def test_one_sided_feedback_is_unbiased_and_never_sees_the_rest(price):
    """Bids drawn at random: the mean of 600 estimates is F at every bid, up to five of its deviations.

    In the tails, where hardly a draw falls, the deviation itself is not seen, hence the 1e-4.
    """
    runs, rounds = 600, 50
    truth = stats.norm.cdf(np.asarray(BIDS), 0.4, 0.1)
    estimator = auction_estimator(BIDS, price=price, feedback="one_sided", reward="value", width=0.0)

    def run(key):
        price_key, bid_key = jax.random.split(key)
        drawn = Auction(jnp.ones(rounds), 0.4 + 0.1 * jax.random.normal(price_key, (rounds,)))
        # The extreme bid first, so that no bid is without a usable round.
        index = jax.random.randint(bid_key, (rounds,), 0, len(BIDS)).at[0].set(0 if price == "first" else 10)
        state, shown = feed(estimator, price, "one_sided", drawn, index)
        lost = drawn.price > BIDS[index]
        hidden = ~lost if price == "first" else lost
        return state.wins / state.trials, jnp.all(jnp.isnan(shown) == hidden), jnp.isfinite(state.wins).all()

    rate, hides, finite = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(1), runs))
    assert bool(hides.all())
    assert bool(finite.all())
    error = np.abs(np.asarray(rate).mean(0) - truth)
    assert np.all(error <= 5 * np.asarray(rate).std(0) / math.sqrt(runs) + 1e-4)


def test_binary_feedback_learns_a_monotone_curve():
    drawn, index = draws(3000, seed=2)
    estimator = auction_estimator(BIDS, feedback="binary", reward="value", width=0.3)
    state, shown = feed(estimator, "first", "binary", drawn, index)
    assert bool(jnp.isnan(shown).all())
    found = estimator.predict(state, 1.0)
    truth = stats.norm.cdf(np.asarray(BIDS), 0.4, 0.1)
    assert np.all(np.diff(found.reward) >= -1e-6)
    np.testing.assert_allclose(found.reward, truth, atol=0.09)  # three deviations of 270 trials each
    assert np.all(np.diff(found.reward_upper) >= 0)
    assert np.all(found.reward_upper >= found.reward)
    # Never bid: anything is possible between its neighbours' bounds.
    fresh = estimator.predict(estimator.init(), 1.0)
    np.testing.assert_array_equal(fresh.reward_upper, np.ones(11))
    np.testing.assert_array_equal(fresh.cost_lower, np.zeros(11))


def test_isotonic_equals_pool_adjacent_violators():
    regression = pytest.importorskip("sklearn.isotonic", reason="scikit-learn is the peer")
    rng = np.random.default_rng(0)
    fit = jax.jit(isotonic)
    for _ in range(20):
        values, weights = rng.uniform(size=15).astype(np.float32), rng.integers(1, 9, 15).astype(np.float32)
        expected = regression.isotonic_regression(values.astype(float), sample_weight=weights)
        np.testing.assert_allclose(fit(jnp.asarray(values), jnp.asarray(weights)), expected, atol=2e-6)
    found = isotonic(jnp.array([0.9, 0.5, 0.1]), jnp.array([1.0, 0.0, 1.0]))
    np.testing.assert_allclose(found[jnp.array([0, 2])], [0.5, 0.5], atol=1e-6)


@pytest.mark.parametrize(("price", "feedback"), [("first", "full"), ("first", "one_sided"), ("second", "full")])
def test_window_forgets(price, feedback):
    drawn, index = draws(30)
    windowed = auction_estimator(BIDS, price=price, feedback=feedback, window=8)
    plain = auction_estimator(BIDS, price=price, feedback=feedback)
    state, _ = feed(windowed, price, feedback, drawn, index)
    expected, _ = feed(plain, price, feedback, *jax.tree.map(lambda leaf: leaf[-8:], (drawn, index)))
    for found, of_last in zip(windowed.predict(state, 0.6), plain.predict(expected, 0.6), strict=True):
        np.testing.assert_allclose(found, of_last, atol=1e-5)


@pytest.mark.parametrize("price", ["first", "second"])
def test_prior_counts_as_rounds(price):
    guess = jnp.asarray(stats.norm.cdf(np.asarray(BIDS), 0.4, 0.1), jnp.float32)
    estimator = auction_estimator(BIDS, price=price, prior=guess, prior_count=20.0, reward="value", width=0.0)
    np.testing.assert_allclose(estimator.predict(estimator.init(), 1.0).reward, guess, rtol=1e-5)
    drawn, index = draws(20)
    state, _ = feed(estimator, price, "full", drawn, index)
    seen = (np.asarray(drawn.price)[:, None] <= np.asarray(BIDS)).mean(0)
    np.testing.assert_allclose(estimator.predict(state, 1.0).reward, (guess + seen) / 2, atol=1e-6)


def test_ridge_equals_the_closed_form_and_does_not_drift():
    """5000 rank-one updates in float32 leave the inverse within 1e-3 of the one computed at once in float64."""
    arms, dimension, rounds = 2, 12, 5000
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rounds, dimension)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    index = rng.integers(0, arms + 1, rounds)
    reward, cost = rng.uniform(size=(2, rounds)).astype(np.float32)
    estimator = ridge_estimator(arms, dimension, width=0.3)

    def step(state, row):
        context, candidate, r, c = row
        return estimator.update(state, context, candidate, Outcome(candidate > 0, r, c, jnp.nan * r)), None

    state, _ = jax.jit(lambda: jax.lax.scan(step, estimator.init(), (x, index, reward, cost)))()
    found = estimator.predict(state, jnp.asarray(x[0]))
    for arm in range(arms):
        mine = index == arm + 1
        of_arm = x[mine].astype(float)
        inverse = np.linalg.inv(np.eye(dimension) + of_arm.T @ of_arm)
        np.testing.assert_allclose(state.inverse[arm], inverse, atol=1e-3 * np.abs(inverse).max())
        mean = x[0] @ inverse @ (of_arm.T @ reward[mine])
        paid = x[0] @ inverse @ (of_arm.T @ cost[mine])
        width = 0.3 * np.sqrt(x[0] @ inverse @ x[0])
        np.testing.assert_allclose(found.reward[arm + 1], mean, atol=1e-3)
        np.testing.assert_allclose(found.reward_upper[arm + 1], min(mean + width, 1), atol=1e-3)
        np.testing.assert_allclose(found.cost_lower[arm + 1], max(paid - width, 0), atol=1e-3)
    np.testing.assert_array_equal(jax.tree.map(lambda leaf: leaf[0], tuple(found)), np.zeros(4))


def test_external_predictions_pass_through_with_a_width_by_count():
    estimator = external_estimator(3, width=0.4, highest_reward=0.7)
    context = jnp.array([0.1, 0.5, 0.6]), jnp.array([0.0, 0.1, 0.9])
    state = estimator.init()
    for _ in range(3):
        state = estimator.update(state, context, jnp.asarray(2), Outcome(jnp.asarray(True), *[jnp.asarray(0.0)] * 3))
    found = estimator.predict(state, context)
    np.testing.assert_array_equal(found.reward, context[0])
    np.testing.assert_allclose(found.reward_upper, [0.5, 0.7, 0.7], rtol=1e-6)
    np.testing.assert_allclose(found.cost_lower, [0, 0, 0.7], atol=1e-6)
    with pytest.raises(ValueError, match="must both have one entry for 3 candidates"):
        estimator.predict(state, (jnp.zeros(3), jnp.zeros(2)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: auction_estimator(jnp.array([])), "at least one entry"),
        (lambda: auction_estimator(jnp.array([0.0, 0.5, 0.2])), "bids must ascend, got 0.2.* after 0.5"),
        (lambda: auction_estimator(jnp.array([-0.1, 0.5])), "at least 0, got .*-0.1"),
        (lambda: auction_estimator(jnp.array([0.0, jnp.inf])), "bids must be finite and at least 0, got inf"),
        (lambda: auction_estimator(BIDS, width=jnp.inf), "width must be finite and at least 0, got inf"),
        (lambda: auction_estimator(BIDS, prior=jnp.full(11, jnp.nan)), "must ascend within"),
        (lambda: auction_estimator(BIDS, width=-1.0), "width must be finite and at least 0, got -1"),
        (lambda: auction_estimator(BIDS, price="second", feedback="binary"), "binary feedback has no meaning"),
        (lambda: auction_estimator(BIDS, window=0), "window must be at least 1, got 0"),
        (lambda: auction_estimator(BIDS, prior_count=3.0), "there is no prior"),
        (lambda: auction_estimator(BIDS, prior=jnp.ones(3)), "one probability for each of the 11 bids"),
        (lambda: auction_estimator(BIDS, prior=jnp.linspace(1, 0, 11)), "must ascend within"),
        (lambda: ridge_estimator(0, 3), "at least one arm"),
        (lambda: ridge_estimator(2, 3, ridge=0.0), "ridge must be positive"),
        (lambda: external_estimator(0), "at least one candidate"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_whole_or_numpy_bids_are_bids():
    for bids in (np.arange(3), np.arange(3.0)):
        found = check_bids(bids)
        assert isinstance(found, jax.Array)
        assert found.dtype == jnp.float32


def test_a_grid_without_zero_is_warned_of():
    with pytest.warns(UserWarning, match="without a bid of 0 a campaign cannot sit out"):
        auction_estimator(jnp.array([0.1, 0.2]))
