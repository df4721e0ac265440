"""The queues and the decision: by hand, in the limits, as invariants."""

import hypothesis.extra.numpy as arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.bidding import (
    Prediction,
    Queues,
    Settings,
    decide,
    empty_queues,
    look_ahead,
    potential,
    violations,
)

CANDIDATES = 7
NUMBERS = arrays.arrays(np.float32, (2, CANDIDATES), elements=st.floats(0, 1, width=32))
DECIDE, VIOLATIONS, LOOK_AHEAD = jax.jit(decide), jax.jit(violations), jax.jit(look_ahead)


def hand_case() -> Prediction:
    bids, win_rate = jnp.array([0.0, 0.3, 0.6]), jnp.array([0.0, 0.25, 1.0])
    return Prediction.point((0.6 - bids) * win_rate, bids * win_rate)


HAND = Settings(budget_rate=0.05, roi=1.0, budget_step=1.0, roi_step=1.0)


def test_hand_case():
    now = hand_case()
    predicted = violations(HAND, now.mean_reward, now.mean_cost)
    np.testing.assert_allclose(predicted.budget, [0, 0.025, 0.55], atol=1e-7)
    np.testing.assert_allclose(predicted.roi, [0, 0, 0.6], atol=1e-7)
    decision = decide(HAND, empty_queues(), now)
    # The reward of the highest bid is 0 and its penalties 2 * 0.55^2 and 2 * 0.6^2.
    np.testing.assert_allclose(decision.scores, [0, 0.07375, -1.325], rtol=1e-5, atol=1e-7)
    assert decision.index == 1
    np.testing.assert_allclose(decision.queues, [0.025, 0], atol=1e-7)
    np.testing.assert_allclose(decision.violation, [0.025, 0], atol=1e-7)


def test_hand_case_repeated_bids_59_or_60_times_and_never_again():
    """0.3 is worth it while 0.075 > 2 (Q + 0.025) 0.025, that is 59 rounds and one exact tie at Q = 1.475."""

    def step(queues: Queues, _: None) -> tuple[Queues, tuple]:
        decision = decide(HAND, queues, hand_case())
        return decision.queues, (decision.index, decision.queues.budget)

    index, queue = jax.jit(lambda: jax.lax.scan(step, empty_queues(), length=100)[1])()
    bought = int(np.sum(index == 1))
    assert bought in (59, 60)
    np.testing.assert_array_equal(index, np.arange(100) < bought)
    np.testing.assert_allclose(queue[-1], 0.025 * bought, rtol=1e-5)


@given(NUMBERS)
def test_without_constraints_it_is_greedy(numbers):
    reward, cost = jnp.asarray(numbers)
    free = Settings(budget_rate=1.0, roi=0.0)
    decision = DECIDE(free, Queues(jnp.asarray(3.0), jnp.asarray(2.0)), Prediction.point(reward, cost))
    assert decision.index == np.argmax(reward)
    np.testing.assert_array_equal(decision.queues, [3.0, 2.0])


@given(NUMBERS, st.floats(0, 5, width=32), st.floats(0, 5, width=32))
def test_queues_never_shrink_and_are_those_of_the_candidate(numbers, q_budget, q_roi):
    reward, cost = jnp.asarray(numbers)
    constraints = Settings(budget_rate=0.1, roi=1.5, budget_step=0.6, roi_step=6.0)
    queues = Queues(jnp.asarray(q_budget, jnp.float32), jnp.asarray(q_roi, jnp.float32))
    decision = DECIDE(constraints, queues, Prediction.point(reward, cost))
    predicted = VIOLATIONS(constraints, reward, cost)
    ahead = LOOK_AHEAD(constraints, queues, predicted)
    for new, old, of_all, step, violation in zip(decision.queues, queues, ahead, (0.6, 6.0), predicted, strict=True):
        assert old <= new <= old + step * violation.max() * (1 + 1e-6) + 1e-6
        np.testing.assert_allclose(new, of_all[decision.index], rtol=1e-6)  # compiled apart: fused products


@settings(max_examples=50)
@given(arrays.arrays(np.int32, (2, CANDIDATES), elements=st.integers(0, 20)), st.integers(0, 8), st.integers(0, 8))
def test_large_steps_saturate(twentieths, s_budget, s_roi):
    """The best candidate without violation; where there is none, the least step-weighted (S + v) v, in double."""
    with jax.enable_x64(True):
        reward, cost = jnp.asarray(twentieths / 20.0)
        step, rate, roi = 1e5, 0.32, 1.37  # twentieths never hit the constraints exactly
        queues = Queues(jnp.asarray(step * s_budget), jnp.asarray(step * s_roi))
        decision = DECIDE(Settings(rate, roi, step, step), queues, Prediction.point(reward, cost))
        v_budget, v_roi = np.maximum(cost - rate, 0), np.maximum(roi * cost - reward, 0)
        clean = (v_budget == 0) & (v_roi == 0)
        if clean.any():
            assert decision.index == np.argmax(np.where(clean, reward, -np.inf))
        else:
            price = (s_budget + v_budget) * v_budget + (s_roi + v_roi) * v_roi
            np.testing.assert_allclose(price[decision.index], price.min(), rtol=1e-6)


def test_margin_tightens_and_decay_forgets():
    cost, reward = jnp.array([0.1]), jnp.array([0.15])
    np.testing.assert_allclose(violations(Settings(1.0, 1.5), reward, cost).roi, [0], atol=1e-7)
    np.testing.assert_allclose(violations(Settings(1.0, 1.5, roi_margin=0.5), reward, cost).roi, [0.05], rtol=1e-5)
    queues = Queues(jnp.asarray(2.0), jnp.asarray(4.0))
    ahead = look_ahead(Settings(1.0, 1.5, queue_decay=0.25), queues, violations(Settings(1.0, 1.5), reward, cost))
    np.testing.assert_allclose([ahead.budget[0], ahead.roi[0]], [1.5, 3.0], atol=1e-6)


@pytest.mark.parametrize("name", ["quadratic", "power:3", "power:1.5", "exp"])
def test_slope_is_the_derivative(name):
    of = potential(name)
    at = jnp.linspace(0.1, 3.0, 20)
    np.testing.assert_allclose(jax.vmap(jax.grad(of.value))(at), of.slope(at), rtol=1e-5)
    assert np.all(np.diff(of.slope(at)) > 0)
    assert np.all(of.slope(at) >= 0)


def test_settings_are_swept_by_vmap():
    now = hand_case()
    steps = jnp.array([0.0, 1.0, 100.0])
    swept = jax.vmap(lambda step: decide(HAND._replace(budget_step=step, roi_step=step), empty_queues(), now))(steps)
    for i, step in enumerate(steps):
        one = decide(HAND._replace(budget_step=step, roi_step=step), empty_queues(), now)
        np.testing.assert_allclose(swept.scores[i], one.scores, rtol=1e-6)
        assert swept.index[i] == one.index


def test_bfloat16_decides_too():
    now = jax.tree.map(lambda x: x.astype(jnp.bfloat16), hand_case())
    assert decide(HAND, empty_queues(), now).index == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_estimates_that_are_not_finite_change_nothing(bad):
    now = hand_case()
    queues = Queues(jnp.asarray(1.0), jnp.asarray(2.0))
    for field in Prediction._fields:
        decision = DECIDE(HAND, queues, now._replace(**{field: getattr(now, field).at[1].set(bad)}))
        assert not decision.valid
        assert decision.index == 0
        np.testing.assert_array_equal(decision.queues, [1.0, 2.0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"budget_rate": 0.0}, "budget_rate must be finite and positive, got 0"),
        ({"roi": -1.0}, "roi must be finite and at least 0, got -1"),
        ({"budget_step": -0.5}, "budget_step must be finite and at least 0"),
        ({"roi_step": np.inf}, "roi_step must be finite"),
        ({"queue_decay": 1.0}, "queue_decay must be below 1"),
    ],
)
def test_settings_that_make_no_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        Settings(**({"budget_rate": 0.1, "roi": 1.0} | fields)).check()


@pytest.mark.parametrize(("rewards", "costs"), [(3, 1), (3, 2), (0, 0)])
def test_candidates_must_match(rewards, costs):
    prediction = Prediction(jnp.zeros(rewards), jnp.zeros(rewards), jnp.zeros(costs))
    with pytest.raises(ValueError, match="must each have one entry a candidate"):
        decide(HAND, empty_queues(), prediction)


@pytest.mark.parametrize("name", ["cubic", "power:0.5", "power:x", "power", "power:inf", "power:nan"])
def test_unknown_potentials(name):
    with pytest.raises(ValueError, match=f"'power:k' with k >= 1, got '{name}'"):
        potential(name)
