"""Sweeps against models made one by one, limits, selection rules, bad input."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing import task_vectors
from jaxlab.editing.fairness import (
    SweepTable,
    equalized_odds_difference,
    group_statistics,
    lambda_sweep,
    membership_from_ids,
    select_scale,
)

N, WIDTH = 300, 5


def logits_of(params, inputs):
    return jnp.tanh(inputs @ params["in"]) @ params["out"]


def both_logits(params, inputs):
    ours = logits_of(params, inputs)
    return jnp.stack([0.3 * ours, 1.3 * ours], 1)


@pytest.fixture(scope="module")
def problem():
    keys = jax.random.split(jax.random.key(0), 6)
    base = {"in": jax.random.normal(keys[0], (4, WIDTH)), "out": jax.random.normal(keys[1], (WIDTH,)), "step": 3}
    base["step"] = jnp.array(3)
    vectors = {
        "in": jax.random.normal(keys[2], (3, 4, WIDTH)),
        "out": jax.random.normal(keys[3], (3, WIDTH)),
    }
    inputs = jax.random.normal(keys[4], (N, 4))
    labels = jax.random.bernoulli(keys[5], 0.4, (N,)).astype(jnp.int32)
    return base, vectors, inputs, labels, membership_from_ids(jnp.arange(N) % 3, 3)


def test_every_row_is_that_of_the_model_made_alone(problem):
    base, vectors, inputs, labels, membership = problem
    scales = jnp.array([[0.0, 0.0, 0.0], [0.5, 0.1, -0.2], [1.0, 1.0, 1.0]])
    table = lambda_sweep(logits_of, base, vectors, scales, inputs, labels, membership)
    for i, scale in enumerate(scales):
        logits = logits_of(task_vectors.apply(base, vectors, scale), inputs)
        np.testing.assert_allclose(table.logits[i], logits, rtol=1e-5, atol=1e-5)
        alone = group_statistics(logits > 0, labels, membership)
        assert float(table.accuracy[i]) == pytest.approx(float(alone.overall.accuracy))
        assert float(table.equalized_odds_difference[i]) == pytest.approx(float(equalized_odds_difference(alone)))
        assert float(table.positive_rate[i]) == pytest.approx(float((logits > 0).mean()))
    one = lambda_sweep(logits_of, base, vectors, jnp.array([0.0, 1.0]), inputs, labels, membership)
    np.testing.assert_allclose(one.logits, table.logits[jnp.array([0, 2])], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(one.logits[0], logits_of(base, inputs))  # λ = 0 is the base, bit for bit


def test_chunks_and_both_logits_change_nothing(problem):
    base, vectors, inputs, labels, membership = problem
    scales = jnp.linspace(0, 1, 5)
    plain = lambda_sweep(logits_of, base, vectors, scales, inputs, labels, membership)
    chunked = lambda_sweep(
        both_logits, base, vectors, scales, inputs, labels, membership, models_at_once=2, rows_at_once=64
    )
    np.testing.assert_allclose(chunked.logits, plain.logits, rtol=1e-4, atol=1e-5)
    mean = lambda_sweep(logits_of, base, vectors, 3 * scales, inputs, labels, membership, reduce="mean")
    np.testing.assert_allclose(mean.logits, plain.logits, rtol=1e-4, atol=1e-4)
    each = lambda_sweep(
        logits_of, base, vectors, 3 * jnp.ones((5, 3)) * scales[:, None], inputs, labels, membership, reduce="mean"
    )
    np.testing.assert_allclose(each.logits, plain.logits, rtol=1e-4, atol=1e-4)


def test_logits_of_a_linear_head_are_linear_in_the_scales(problem):
    base, vectors, inputs, labels, membership = problem
    head = {"out": vectors["out"]}
    scales = jnp.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0.3, -1.2, 2]])
    logits = lambda_sweep(logits_of, base, head, scales, inputs, labels, membership).logits
    expected = logits[0] + scales[4] @ (logits[1:4] - logits[0])
    np.testing.assert_allclose(logits[4], expected, rtol=1e-4, atol=1e-4)


def test_sweep_is_differentiable_under_jit(problem):
    base, vectors, inputs, labels, membership = problem

    @jax.jit
    @jax.grad
    def slope(scale):
        return lambda_sweep(logits_of, base, vectors, scale[None], inputs, labels, membership).logits.mean()

    def mean(scale):
        return logits_of(task_vectors.apply(base, vectors, scale), inputs).mean()

    assert float(slope(jnp.float32(0.4))) == pytest.approx(float(jax.grad(mean)(0.4)), rel=1e-3)


def test_nan_raises_outside_jit_and_is_a_flag_inside(problem):
    base, vectors, inputs, labels, membership = problem
    scales = jnp.array([0.0, 1e38])
    with pytest.raises(ValueError, match=r"NaN or infinite at scale 1e\+38|NaN or infinite at scale 9.99"):
        lambda_sweep(logits_of, base, vectors, scales, inputs, labels, membership)
    table = jax.jit(lambda s: lambda_sweep(logits_of, base, vectors, s, inputs, labels, membership))(scales)
    np.testing.assert_array_equal(table.finite, [True, False])


def table_of(accuracy, parity, odds, scales=None, rate=0.4, balanced=0.7):
    size = len(accuracy)
    none = group_statistics(np.array([0, 1] * 60), np.array([0, 1] * 60), membership_from_ids(np.arange(120) // 60, 2))
    as_array = lambda values: jnp.asarray(values, jnp.float32)  # noqa: E731
    return SweepTable(
        scales=as_array(np.arange(size) / 10 if scales is None else scales),
        logits=jnp.zeros((size, 4)),
        statistics=none,
        accuracy=as_array(accuracy),
        balanced_accuracy=jnp.full(size, balanced),
        positive_rate=jnp.full(size, rate),
        demographic_parity_difference=as_array(parity),
        equalized_odds_difference=as_array(odds),
        equal_opportunity_difference=as_array(odds),
        finite=jnp.ones(size, bool),
    )


def test_rules():
    table = table_of([0.5, 0.8, 0.79, 0.7], [0.0, 0.3, 0.2, 0.1], [0.3, 0.1, 0.15, 0.1])
    constrained = select_scale(table, reference_accuracy=0.795)
    assert (int(constrained.row), bool(constrained.fulfilled)) == (2, True)
    assert int(select_scale(table, reference_accuracy=0.795, tolerance=0.0).row) == 1
    assert int(select_scale(table, rule="max_accuracy").row) == 1
    # Least parity is at 0 with sum 0.3; least odds at 1 and 3, of which 1 comes first with sum 0.4.
    assert int(select_scale(table, rule="min_disparity").row) == 0
    out_of_reach = select_scale(table, reference_accuracy=0.9)
    assert (int(out_of_reach.row), bool(out_of_reach.fulfilled)) == (1, False)
    # NaN is no small disparity.
    assert int(select_scale(table_of([0.8, 0.8], [np.nan, 0.3], [0.1, 0.3]), reference_accuracy=0.8).row) == 1


def test_of_equals_the_smallest_scale_is_taken():
    same = [0.8] * 3
    table = table_of(same, same, same, scales=[0.7, 0.2, 0.9])
    for rule in ("max_accuracy", "min_disparity", "constrained"):
        assert int(select_scale(table, rule=rule, reference_accuracy=0.8).row) == 1
    table = table_of(same, same, same, scales=[[0.5, 0.5], [0.9, 0.3], [0.1, 0.8]])
    assert int(select_scale(table, rule="max_accuracy").row) == 2


def test_selection_is_the_best_of_the_validation_rows_and_sees_no_others(problem):
    base, vectors, inputs, labels, membership = problem
    table = lambda_sweep(logits_of, base, vectors, jnp.linspace(0, 1, 11), inputs, labels, membership)
    reference = float(jnp.sort(table.accuracy)[5])
    chosen = select_scale(table, reference_accuracy=reference, tolerance=0.0)
    total = np.asarray(table.demographic_parity_difference + table.equalized_odds_difference)
    allowed = np.asarray(table.accuracy) >= reference
    assert total[int(chosen.row)] == total[allowed].min()
    jitted = jax.jit(lambda t: select_scale(t, reference_accuracy=reference, tolerance=0.0))(table)
    assert int(jitted.row) == int(chosen.row)
    for function in (lambda_sweep, select_scale):
        assert not [name for name in inspect.signature(function).parameters if "test" in name]


def test_collapse_and_chance_are_told():
    with pytest.warns(UserWarning, match=r"predicts one class for 99.5 % of the rows"):
        assert select_scale(table_of([0.9], [0.0], [0.0], rate=0.005), rule="max_accuracy").collapsed
    with pytest.warns(UserWarning, match=r"near chance: its balanced accuracy is 0.520"):
        assert select_scale(table_of([0.9], [0.0], [0.0], balanced=0.52), rule="max_accuracy").near_chance


def test_bad_input(problem):
    base, vectors, inputs, labels, membership = problem
    arguments = (inputs, labels, membership)
    with pytest.raises(ValueError, match=r"scales must be \[s\] or \[s, 3\] for 3 vectors, got \[2, 2\]"):
        lambda_sweep(logits_of, base, vectors, jnp.ones((2, 2)), *arguments)
    with pytest.raises(ValueError, match="other is not a parameter here"):
        lambda_sweep(logits_of, base, {"other": vectors["out"]}, jnp.ones(2), *arguments)
    with pytest.raises(ValueError, match="membership must be 0 or 1, got 2"):
        lambda_sweep(logits_of, base, vectors, jnp.ones(2), inputs, labels, 2 * membership)
    with pytest.raises(ValueError, match="the 300 rows of the labels"):
        lambda_sweep(logits_of, base, vectors, jnp.ones(2), inputs[:10], labels, membership)
    with pytest.raises(ValueError, match="models_at_once must be at least 1, got 0"):
        lambda_sweep(logits_of, base, vectors, jnp.ones(2), *arguments, models_at_once=0)
    with pytest.raises(ValueError, match=r"logits \[300\] or \[300, 2\], got \[300, 5\]"):
        lambda_sweep(lambda p, x: x @ p["in"], base, vectors, jnp.ones(2), *arguments)
    with pytest.raises(ValueError, match="'constrained' needs reference_accuracy"):
        select_scale(table_of([0.5], [0.5], [0.5]))
