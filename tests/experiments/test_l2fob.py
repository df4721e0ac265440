"""What the experiment adds to the battery: the choice of a step, settings and their optima, bad configs."""

from functools import partial

import jax
import numpy as np
import pytest

from jaxlab.experiments.l2fob import EXPERIMENT, Config
from jaxlab.experiments.l2fob.campaigns import Sweep, best_step, growth, overspend_at_any_costs, sweep
from jaxlab.experiments.l2fob.methods import METHODS, select
from jaxlab.experiments.l2fob.settings import NAMES, make_setting

SMALL = {"bids": 21, "width": 0.03, "log_confidence": 5.0}


def swept(reward: np.ndarray, spend: np.ndarray) -> Sweep:
    nothing = np.zeros_like(reward)
    return Sweep(np.array([0.1, 1.0, 10.0]), reward, spend, nothing, nothing, nothing, np.zeros((3, *reward.shape, 2)))


def test_a_step_is_chosen_on_tuning_seeds_among_those_on_target():
    reward = np.array([[9.0, 0.0], [6.0, 0.0], [5.0, 99.0]])  # the second seed is not for tuning
    spend = np.array([[9.0, 1.0], [3.0, 1.0], [2.0, 1.0]])
    options = {"tuning_seeds": 1, "candidates": 3}
    assert best_step(swept(reward, spend), roi=2.0, **options) == 1  # 9 misses the target
    assert best_step(swept(reward, spend), roi=0.5, **options) == 0
    assert best_step(swept(reward, spend), roi=4.0, **options) == 2  # none keeps it: the highest return
    assert best_step(swept(reward, spend), roi=4.0, tuning_seeds=1, candidates=2) == 1  # the last is theory's


def test_step_sizes_are_looked_up():
    found = swept(np.ones((3, 1)), np.array([[0.0], [2.0], [1.0]]))
    assert found.at(1.0) == 1
    np.testing.assert_array_equal(found.roi, [[0], [0.5], [1]])
    with pytest.raises(ValueError, match=r"step size 6.0 was not swept, only \[0.1, 1.0, 10.0\]"):
        found.at(6.0)


def test_theory_has_its_own_step_behind_the_grid():
    assert METHODS["l2fob_point"].steps((0.6, 6.0), 100) == (0.6, 6.0, 10.0)
    assert METHODS["budget_dual"].steps((0.6,), 100) == (0.6, 0.1)
    assert METHODS["greedy"].steps((0.6,), 100) == (1.0,)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        # Totals of ten thousand rounds; those of the paper's setting are known to 1 % (51 values of an infinity).
        ("first_full", 172.2),
        ("first_value", 277.9),
        ("first_tight", 66.3),
    ],
)
def test_optima_of_the_settings(name, total):
    assert 1e4 * make_setting(name, **SMALL | {"bids": 101}).optimum() == pytest.approx(total, rel=0.01)


def test_every_setting_has_an_optimum_within_its_constraints():
    for name in NAMES:
        setting = make_setting(name, **SMALL)
        assert 0 < setting.optimum() < 1
        assert setting.estimator.candidates == (11 if name == "bandit" else 21)


def test_sweep_pairs_seeds_and_keeps_the_budget():
    setting = make_setting("second_full", **SMALL)
    run = partial(sweep, setting, METHODS["two_multiplier_dual"], key=jax.random.key(0), buffer=2)
    found = Sweep(**run(steps=(0.6, 0.6), seeds=3, rounds=80))
    assert found.reward.shape == (2, 3)
    assert found.curves.shape == (3, 2, 3, 80)
    np.testing.assert_array_equal(found.reward[0], found.reward[1])  # the same step meets the same rounds
    assert found.overspend.max() <= 0
    assert found.spend.min() > 0
    np.testing.assert_allclose(found.curves[0, ..., -1], found.reward, rtol=1e-5)


def test_careless_campaigns_stop_at_their_budget():
    excess = overspend_at_any_costs(jax.random.key(1), campaigns=16, rounds=200)
    assert excess.shape == (16,)
    assert excess.max() <= 1e-12
    assert (excess > -0.9).sum() >= 8  # and most of them spend it


def test_growth_is_a_running_maximum():
    found = growth(make_setting("first_full", **SMALL), jax.random.key(0), step=0.6, seeds=2, rounds=300, first=30)
    assert found["violation"].shape == (2, len(found["horizons"]))
    assert np.all(np.diff(found["violation"], axis=1) >= 0)
    assert found["horizons"][[0, -1]].tolist() == [30, 300]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"settings": ("third_price",)}, "unknown setting 'third_price'; there are first_full"),
        ({"methods": ("luck",)}, "unknown method 'luck'; there are l2fob_point"),
        ({"step_sizes": ()}, "must not be empty"),
        ({"step_sizes": (0.0,)}, "step_sizes must be positive, got 0"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"bids": 1}, "bids must be at least 2, got 1"),
        ({"width": -0.1}, "width must be at least 0, got -0.1"),
        ({"long_rounds": 1000}, "long_rounds must be at least twice long_first, got 1000"),
    ],
)
def test_bad_configs_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(**fields)


def test_cpu_and_paper_compare_every_method():
    for preset in ("cpu", "paper"):
        assert list(select(EXPERIMENT.presets[preset].methods)) == list(METHODS)
        assert "two_multiplier_dual" in EXPERIMENT.presets[preset].other_methods
