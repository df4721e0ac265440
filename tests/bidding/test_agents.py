"""The three expectations against transcriptions, perfect information, and baselines round by round."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxlab.bidding import (
    Agent,
    Estimator,
    Outcome,
    Settings,
    auction_estimator,
    bid_grid,
    budget_dual,
    constant_shading,
    default_multipliers,
    external_estimator,
    greedy,
    make_l2fob,
    min_pacing,
    optimistic_mirror,
    pid_pacing,
    throttling,
    two_multiplier_dual,
)

BIDS = bid_grid(101)
CURVE = jnp.asarray(stats.norm.cdf(np.asarray(BIDS), 0.4, 0.1), jnp.float32)
FREE = Settings(budget_rate=1.0, roi=0.0)
NOTHING = Outcome(jnp.asarray(False), jnp.zeros(()), jnp.zeros(()), jnp.asarray(jnp.nan))


@functools.cache
def compiled(agent: Agent) -> tuple:
    return jax.jit(agent.act), jax.jit(agent.learn)


def informed(price: str = "first", **options) -> Estimator:
    """The distribution of prices is known."""
    return auction_estimator(BIDS, price=price, prior=CURVE, prior_count=1e6, width=0.0, **options)


@pytest.mark.parametrize("expectation", ["point", "sample", "policy"])
def test_perfect_information_first_price(expectation):
    """Within a step of the grid of the bid that maximises (v - b) F(b) on a grid a hundred times finer."""
    agent = make_l2fob(informed(), FREE, expectation=expectation, buffer=4)
    _, action = jax.jit(agent.act)(agent.init(), 0.6, 0.0)
    fine = np.linspace(0, 1, 10_001)
    best = fine[np.argmax((0.6 - fine) * stats.norm.cdf(fine, 0.4, 0.1))]
    assert abs(float(BIDS[action.index]) - best) <= 0.01


def test_perfect_information_second_price_is_truthful():
    """Bidding the value is best; bids from which it makes no difference to float32 are ties."""
    agent = make_l2fob(informed("second"), FREE, expectation="point")
    act = jax.jit(agent.act)
    for value in (0.3, 0.4, 0.5):
        _, action = act(agent.init(), value, 0.0)
        assert abs(float(BIDS[action.index]) - value) <= 0.0101


CONSTRAINTS = Settings(budget_rate=0.02, roi=1.8, budget_step=0.6, roi_step=6.0)
VALUES = np.array([0.55, 0.7, 0.4, 0.62, 0.66, 0.5], np.float32)


def transcription(expectation: str, buffer: int, multipliers: np.ndarray) -> list[int]:
    """The rounds of the paper in plain NumPy and double precision, with a known curve of winning."""
    bids, curve = np.asarray(BIDS, float), np.asarray(CURVE, float)
    q_budget = q_roi = 0.0
    taken, seen = [], []
    for value in VALUES.astype(float):
        seen = [*seen, value][-buffer:]
        reward, cost = (value - bids) * curve, bids * curve
        actions, handicap = np.arange(len(bids)), 0.0
        if expectation == "point":
            now, mean_reward, mean_cost = reward, reward, cost
        elif expectation == "sample":
            now, mean_cost = reward, cost
            mean_reward = np.mean([(v - bids) * curve for v in seen], axis=0)
        else:
            choices = [[int(np.argmax((v - bids) * curve - theta * cost)) for v in seen] for theta in multipliers]
            actions = np.array([int(np.argmax(reward - theta * cost)) for theta in multipliers])
            now = reward[actions]
            mean_cost = np.array([np.mean(cost[row]) for row in choices])
            mean_reward = np.array(
                [np.mean([(v - bids[k]) * curve[k] for v, k in zip(seen, row, strict=True)]) for row in choices]
            )
            handicap = 1e-7 * multipliers
        v_budget = np.maximum(mean_cost - 0.02, 0)
        v_roi = np.maximum(1.8 * mean_cost - mean_reward, 0)
        ahead_budget, ahead_roi = q_budget + 0.6 * v_budget, q_roi + 6 * v_roi
        score = now - 2 * ahead_budget * 0.6 * v_budget - 2 * ahead_roi * 6 * v_roi - handicap
        best = int(np.argmax(score))
        q_budget, q_roi = ahead_budget[best], ahead_roi[best]
        taken.append(int(actions[best]))
    return taken


@pytest.mark.parametrize("expectation", ["point", "sample", "policy"])
def test_rounds_equal_the_transcription(expectation):
    agent = make_l2fob(informed(), CONSTRAINTS, expectation=expectation, buffer=4)

    def step(state, value):
        state, action = agent.act(state, value, 0.0)
        return state, action.index

    _, taken = jax.jit(lambda: jax.lax.scan(step, agent.init(), jnp.asarray(VALUES)))()
    assert taken.tolist() == transcription(expectation, 4, np.asarray(default_multipliers(), float))
    assert len(set(taken.tolist())) > 2


@pytest.mark.parametrize("expectation", ["sample", "policy"])
def test_a_population_stands_for_past_contexts(expectation):
    """Given the contexts that the buffer will hold, the decision is the same."""
    remembers = make_l2fob(informed(), CONSTRAINTS, expectation=expectation, buffer=3)
    act = jax.jit(remembers.act)
    knows = make_l2fob(informed(), CONSTRAINTS, expectation=expectation, population=jnp.asarray(VALUES[:3]))
    state = remembers.init()
    for value in VALUES[:3]:
        before = state
        state, action = act(state, jnp.asarray(value), 0.0)
    start = knows.init()._replace(queues=before.queues)
    assert knows.act(start, jnp.asarray(VALUES[2]), 0.0)[1].index == action.index


def test_one_context_makes_all_expectations_but_policy_equal():
    agents = [make_l2fob(informed(), CONSTRAINTS, expectation=mode, buffer=8) for mode in ("point", "sample")]
    states = [agent.init() for agent in agents]
    for _ in range(3):
        results = [compiled(agent)[0](state, 0.6, 0.0) for agent, state in zip(agents, states, strict=True)]
        states = [state for state, _ in results]
        assert results[0][1].index == results[1][1].index
    np.testing.assert_allclose(states[0].queues, states[1].queues, rtol=1e-5)


def test_exploration_takes_the_first_candidate_and_leaves_the_queues():
    agent = make_l2fob(informed(), CONSTRAINTS, expectation="point", explore_rounds=2)
    state, taken = agent.init(), []
    for _ in range(3):
        state, action = compiled(agent)[0](state, 0.7, 0.0)
        taken.append((int(action.index), float(state.queues.budget)))
    assert taken[:2] == [(0, 0.0)] * 2
    assert taken[2][0] > 0


REWARD, COST = np.array([0.0, 0.3, 0.5]), np.array([0.0, 0.1, 0.4])


def rounds_of(agent, count: int, chance: float = 0.5, outcome: Outcome = NOTHING) -> tuple[list[int], list]:
    context = jnp.asarray(REWARD, jnp.float32), jnp.asarray(COST, jnp.float32)
    act, learn = compiled(agent)
    state, taken, info = agent.init(), [], []
    for _ in range(count):
        state, action = act(state, context, chance)
        state = learn(state, context, action.index, outcome)
        taken.append(int(action.index))
        info.append(action.info)
    return taken, info


THREE = external_estimator(3)


def test_duals_equal_their_equations():
    step, rate, roi = 0.7, 0.15, 2.0
    for update in ("additive", "multiplicative"):
        agent = two_multiplier_dual(THREE, budget_rate=rate, roi=roi, step=step, update=update)
        taken, info = rounds_of(agent, 12)
        price, mu = 0.0, 0.1 if update == "multiplicative" else 0.0
        for index, found in zip(taken, info, strict=True):
            np.testing.assert_allclose([found.budget, found.roi], [price, mu], rtol=1e-4, atol=1e-6)
            assert index == np.argmax((1 + mu) * REWARD - (price + roi * mu) * COST)
            excess = step * (roi * COST[index] - REWARD[index])
            price = max(price + step * (COST[index] - rate), 0)
            mu = mu * np.exp(excess) if update == "multiplicative" else max(mu + excess, 0)
        assert len(set(taken)) > 1
    taken, info = rounds_of(budget_dual(THREE, budget_rate=rate, step=step), 12)
    price = 0.0
    for index, found in zip(taken, info, strict=True):
        np.testing.assert_allclose(found.budget, price, rtol=1e-4, atol=1e-6)
        assert index == np.argmax(REWARD - price * COST)
        price = max(price + step * (COST[index] - rate), 0)


def test_realised_feedback_moves_by_what_was_paid():
    paid = Outcome(jnp.asarray(True), jnp.asarray(0.2), jnp.asarray(0.9), jnp.asarray(0.9))
    agent = two_multiplier_dual(THREE, budget_rate=0.1, roi=1.0, step=1.0, feedback="realised")
    _, info = rounds_of(agent, 2, outcome=paid)
    np.testing.assert_allclose([info[1].budget, info[1].roi], [0.8, 0.7], rtol=1e-6)


def test_optimistic_bounds_try_what_means_do_not():
    untried = auction_estimator(BIDS, feedback="binary", width=0.3)
    for bounds, bids in (("mean", False), ("optimistic", True)):
        agent = budget_dual(untried, budget_rate=0.1, step=0.1, bounds=bounds)
        state = agent.init()
        for _ in range(5):
            state, action = compiled(agent)[0](state, 0.6, 0.0)
            state = compiled(agent)[1](state, 0.6, action.index, NOTHING)
        assert bool(action.index > 0) is bids


def test_min_pacing_submits_the_lower_bid():
    options = {"budget_rate": 0.15, "roi": 2.0, "step": 0.7}
    taken, info = rounds_of(min_pacing(THREE, **options), 12)
    for index, found in zip(taken, info, strict=True):
        price, mu = float(found.budget), float(found.roi)
        expected = min(np.argmax(REWARD - price * COST), np.argmax((1 + mu) * REWARD - 2 * mu * COST))
        assert index == expected
    assert len(set(taken)) > 1


def test_greedy_throttling_and_shading():
    assert rounds_of(greedy(THREE), 2)[0] == [2, 2]
    throttled = throttling(THREE, budget_rate=0.1)  # a quarter of the cost of 0.4
    assert rounds_of(throttled, 1, chance=0.24)[0] == [2]
    assert rounds_of(throttled, 1, chance=0.26)[0] == [0]
    shaded = constant_shading(informed(), BIDS, share=0.5)
    assert float(BIDS[shaded.act(shaded.init(), 0.603, 0.0)[1].index]) == pytest.approx(0.30)


def test_pid_share_follows_the_spend():
    agent = pid_pacing(informed(), BIDS, budget_rate=0.1, gain=0.5, first_share=0.5)
    state = agent.learn(agent.init(), 0.6, jnp.asarray(0), NOTHING)
    assert float(state.own) == pytest.approx(0.5 * np.exp(0.5), rel=1e-6)
    paid = NOTHING._replace(cost=jnp.asarray(0.3))
    assert float(agent.learn(agent.init(), 0.6, jnp.asarray(0), paid).own) == pytest.approx(
        0.5 * np.exp(-1.0), rel=1e-6
    )


def test_mirror_draws_the_soft_maximum_and_its_queues_rise_with_violation():
    agent = optimistic_mirror(THREE, budget_rate=0.1, roi=0.0, alpha=2.0)
    chances = np.exp(REWARD / 2) / np.exp(REWARD / 2).sum()
    borders = np.cumsum(chances)
    assert [rounds_of(agent, 1, chance=c)[0][0] for c in (0.0, borders[0] + 0.01, borders[1] + 0.01)] == [0, 1, 2]
    _, info = rounds_of(agent, 1)
    np.testing.assert_allclose(info[0].budget, 2 * (chances @ COST - 0.1), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_l2fob(informed(), CONSTRAINTS, expectation="point", buffer=0), "buffer must be at least 1"),
        (lambda: make_l2fob(informed(), CONSTRAINTS, expectation="point", explore_rounds=-1), "explore_rounds must"),
        (lambda: make_l2fob(informed(), FREE._replace(roi=-1.0), expectation="point"), "roi must be finite"),
        (
            lambda: make_l2fob(informed(), FREE, expectation="policy", multipliers=jnp.array([-1.0])),
            "multipliers must be a list of finite numbers at least 0",
        ),
        (
            lambda: make_l2fob(informed(), FREE, expectation="policy", multipliers=jnp.array([jnp.nan])),
            "multipliers must be a list of finite numbers",
        ),
        (
            lambda: make_l2fob(informed(), FREE, expectation="policy", multipliers=jnp.zeros(0)),
            "multipliers must be a list of finite numbers",
        ),
        (lambda: make_l2fob(informed(), FREE, expectation="point", lyapunov="cube"), "potential must be"),
        (lambda: budget_dual(THREE, budget_rate=0.0, step=1.0), "budget_rate must be finite and positive"),
        (lambda: two_multiplier_dual(THREE, budget_rate=1.0, roi=-1.0, step=1.0), "roi must be at least 0"),
        (lambda: constant_shading(THREE, BIDS, share=-1.0), "share must be at least 0"),
        (lambda: pid_pacing(THREE, BIDS, budget_rate=0.1, gain=0.0), "gain must be finite and positive"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
