"""The paper's first-price experiment, run once for all tests of its numbers."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxlab import bidding
from jaxlab.bidding import Settings, Trace

ROUNDS, BUDGET, SEEDS = 10_000, 100.0, 5


@pytest.fixture(scope="session")
def bids() -> jax.Array:
    return bidding.bid_grid(101)


@pytest.fixture(scope="session")
def auctions(bids) -> bidding.Environment:
    return bidding.first_price(bids, values=bidding.clipped_normal(0.6, 0.1), prices=bidding.clipped_normal(0.4, 0.1))


@pytest.fixture(scope="session")
def paper_campaigns(bids, auctions) -> Trace:
    """Traces ``[roi step 0.6, 6, 60, 600, seed, round]`` with the paper's budget step."""
    estimator = bidding.auction_estimator(bids)

    def campaign(step: jax.Array, key: jax.Array) -> Trace:
        settings = Settings(budget_rate=0.01, roi=1.8, budget_step=0.6, roi_step=step)
        agent = bidding.make_l2fob(estimator, settings, expectation="point")
        return bidding.simulate(auctions, agent, key, ROUNDS, BUDGET)

    keys = jax.random.split(jax.random.key(0), SEEDS)
    return jax.jit(jax.vmap(jax.vmap(campaign, (None, 0)), (0, None)))(jnp.array([0.6, 6.0, 60.0, 600.0]), keys)


@pytest.fixture(scope="session")
def theoretical_dual(bids, auctions) -> Trace:
    """Traces ``[seed, round]`` of dual descent on the budget with the step of its theory."""
    agent = bidding.budget_dual(bidding.auction_estimator(bids), budget_rate=0.01, step=1 / math.sqrt(ROUNDS))
    keys = jax.random.split(jax.random.key(0), SEEDS)
    return jax.jit(jax.vmap(lambda key: bidding.simulate(auctions, agent, key, ROUNDS, BUDGET)))(keys)
