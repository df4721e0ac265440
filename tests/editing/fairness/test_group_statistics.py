"""Rates and differences against fairlearn and by hand, invariances, gradients, intervals, bad input."""

import importlib
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing.fairness import (
    bootstrap_interval,
    concerns,
    demographic_parity_difference,
    equal_opportunity_difference,
    equalized_odds_difference,
    group_statistics,
    membership_from_ids,
    one_vs_rest,
    resample,
)
from jaxlab.editing.fairness.group_statistics import _draw_rows

pytestmark = pytest.mark.filterwarnings("ignore:group . has")

LABELS = np.array([0, 1, 0, 1, 1, 0, 0, 1, 1, 0])
PREDICTIONS = np.array([0, 1, 1, 1, 0, 0, 1, 1, 0, 0])
IDS = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])


def rows(seed: int = 0, n: int = 400, groups: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predictions that depend on labels and groups, labels, ids."""
    random = np.random.default_rng(seed)
    ids = random.choice(groups, n, p=np.arange(1, groups + 1) / np.arange(1, groups + 1).sum())
    labels = (random.uniform(size=n) < 0.2 + 0.15 * ids).astype(int)
    return (random.uniform(size=n) < 0.2 + 0.4 * labels + 0.05 * ids).astype(int), labels, ids


def statistics_of(predictions, labels, ids):
    return group_statistics(predictions, labels, membership_from_ids(ids, int(ids.max()) + 1))


def test_example_by_hand():
    """Shares of positives 3/4, 1/3, 1/3; all of group a's and half of c's positives are found, none of b's."""
    found = statistics_of(PREDICTIONS, LABELS, IDS)
    assert float(demographic_parity_difference(found)) == pytest.approx(3 / 4 - 1 / 3, abs=1e-6)
    assert float(equalized_odds_difference(found)) == pytest.approx(1, abs=1e-6)
    assert float(equalized_odds_difference(found, agg="mean")) == pytest.approx(0.75, abs=1e-6)
    assert float(demographic_parity_difference(found, method="to_overall")) == pytest.approx(0.25, abs=1e-6)
    assert float(equalized_odds_difference(found, method="to_overall")) == pytest.approx(0.6, abs=1e-6)


def test_a_rate_without_rows_counts_as_zero_or_not_at_all():
    found = statistics_of(np.array([0, 1, 1, 0]), np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1]))
    assert float(equalized_odds_difference(found)) == pytest.approx(0.5)
    # One group alone has positives, the other alone negatives: nothing can be compared.
    assert np.isnan(equalized_odds_difference(found, undefined="skip"))
    assert np.isnan(equal_opportunity_difference(found, undefined="skip"))
    assert float(demographic_parity_difference(found, undefined="skip")) == 0
    three = statistics_of(np.array([0, 1, 1, 0, 1, 1]), np.array([0, 0, 1, 1, 0, 1]), np.array([0, 0, 1, 1, 2, 2]))
    # TPR of groups 1 and 2: 1/2 and 1. FPR of 0 and 2: 1/2 and 1. As zeros the gaps would be 1.
    assert float(equalized_odds_difference(three, undefined="skip")) == pytest.approx(0.5)
    assert float(equalized_odds_difference(three)) == 1


@pytest.mark.parametrize("method", ["between_groups", "to_overall"])
@pytest.mark.parametrize("seed", [0, 1])
def test_parity_with_fairlearn(seed, method):
    fairlearn = pytest.importorskip("fairlearn.metrics", reason="compares with fairlearn")
    predictions, labels, ids = rows(seed)
    found = statistics_of(predictions, labels, ids)
    theirs = partial(dict, y_true=labels, y_pred=predictions, sensitive_features=ids)
    pairs = [
        (demographic_parity_difference(found, method=method), fairlearn.demographic_parity_difference, {}),
        (equal_opportunity_difference(found, method=method), fairlearn.equal_opportunity_difference, {}),
        *(
            (
                equalized_odds_difference(found, method=method, agg=agg),
                fairlearn.equalized_odds_difference,
                {"agg": agg},
            )
            for agg in ("worst_case", "mean")
        ),
    ]
    for ours, function, options in pairs:
        expected = function(**theirs(method=method, **options))
        assert float(ours) == pytest.approx(expected, abs=1e-6), function.__name__


def test_parity_with_fairlearn_where_a_group_has_no_positives():
    fairlearn = pytest.importorskip("fairlearn.metrics", reason="compares with fairlearn")
    predictions, labels, ids = rows(2)
    labels = np.where(ids == 1, 0, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = fairlearn.equalized_odds_difference(labels, predictions, sensitive_features=ids)
    assert float(equalized_odds_difference(statistics_of(predictions, labels, ids))) == pytest.approx(
        expected, abs=1e-6
    )


def test_rates_against_numpy():
    predictions, labels, ids = rows()
    found = statistics_of(predictions, labels, ids)
    for group in range(4):
        here = ids == group
        p, y = predictions[here], labels[here]
        expected = [p.mean(), p[y == 1].mean(), p[y == 0].mean(), (p == y).mean(), here.sum()]
        groups = found.groups
        got = [
            *(groups.positive_rate, groups.true_positive_rate, groups.false_positive_rate, groups.accuracy, groups.rows)
        ]
        np.testing.assert_allclose([rate[group] for rate in got], expected, rtol=1e-6)
    assert float(found.overall.accuracy) == pytest.approx((predictions == labels).mean())
    balanced = (predictions[labels == 1].mean() + 1 - predictions[labels == 0].mean()) / 2
    assert float(found.overall.balanced_accuracy) == pytest.approx(balanced, rel=1e-6)


def test_one_vs_rest_of_overlapping_groups():
    """Two groups that share rows, and rows in neither, which are the rest of both."""
    predictions, labels, _ = rows(3, n=200)
    membership = np.random.default_rng(3).integers(0, 2, (200, 2))
    found = group_statistics(predictions, labels, membership)
    ours = one_vs_rest(found)
    for group in range(2):
        inside = membership[:, group] == 1
        gaps = [
            abs(predictions[inside & of].mean() - predictions[~inside & of].mean())
            for of in (labels >= 0, labels == 1, labels == 0)
        ]
        got = [ours[f"{name}_difference"][group] for name in ("demographic_parity", "equal_opportunity")]
        np.testing.assert_allclose(got, gaps[:2], atol=1e-6)
        assert float(ours["equalized_odds_difference"][group]) == pytest.approx(max(gaps[1:]), abs=1e-6)
    outside = membership.sum(1) == 0
    assert float(found.overall.rows) == 200 > float((~outside).sum())


def test_invariances():
    predictions, labels, ids = rows()
    found = statistics_of(predictions, labels, ids)
    metrics = (demographic_parity_difference, equalized_odds_difference, equal_opportunity_difference)
    order = np.random.default_rng(0).permutation(len(ids))
    for metric in metrics:
        value = float(metric(found))
        assert 0 < value < 1
        assert float(metric(statistics_of(predictions[order], labels[order], ids[order]))) == pytest.approx(value)
        assert float(metric(statistics_of(predictions, labels, 3 - ids))) == pytest.approx(value)
        for constant in (np.zeros_like(labels), np.ones_like(labels)):
            assert float(metric(statistics_of(constant, labels, ids))) == 0
    swapped = statistics_of(1 - predictions, 1 - labels, ids)
    for metric in metrics[:2]:
        assert float(metric(swapped)) == pytest.approx(float(metric(found)), abs=1e-6)


def test_weights_are_repeated_rows():
    predictions, labels, ids = rows(4, n=100)
    times = np.random.default_rng(0).integers(0, 4, 100)
    weighted = group_statistics(predictions, labels, membership_from_ids(ids, 4), weights=times)
    repeated = statistics_of(*(np.repeat(a, times) for a in (predictions, labels, ids)))
    np.testing.assert_allclose(np.stack(weighted.groups), np.stack(repeated.groups))


def test_jit_vmap_and_bfloat16_are_the_same():
    predictions, labels, ids = rows()
    membership = membership_from_ids(ids, 4)

    def metric(p):
        return equalized_odds_difference(group_statistics(p, labels, membership))

    plain = float(metric(jnp.asarray(predictions)))
    both = jnp.stack([jnp.asarray(predictions), 1 - jnp.asarray(predictions)])
    batched = jax.jit(jax.vmap(metric))(both)
    np.testing.assert_allclose(batched, [plain, plain], atol=1e-6)  # the gaps of 1 - ŷ are those of ŷ
    assert float(metric(jnp.asarray(predictions, jnp.bfloat16))) == plain


def test_gradient_of_the_soft_difference_is_that_of_finite_differences():
    labels, ids = rows()[1:]
    membership = membership_from_ids(ids, 4)

    def soft(weight):
        scores = jax.nn.sigmoid(weight * jnp.sin(jnp.arange(len(ids))) + 0.3 * ids)
        statistics = group_statistics(scores, labels, membership)
        return jnp.stack([demographic_parity_difference(statistics), equalized_odds_difference(statistics)])

    with jax.enable_x64(False):
        slope = jax.jacobian(soft)(0.7)
        estimate = (soft(0.71) - soft(0.69)) / 0.02
    np.testing.assert_allclose(slope, estimate, atol=1e-4)
    assert np.abs(slope).max() > 1e-3


def test_gradients_are_finite_where_a_rate_is_undefined():
    labels = jnp.array([0, 0, 1, 1])
    membership = membership_from_ids(jnp.array([0, 0, 1, 1]), 2)
    for undefined in ("zero", "skip"):
        slope = jax.grad(
            lambda p, u=undefined: demographic_parity_difference(group_statistics(p, labels, membership), undefined=u)
        )(jnp.array([0.2, 0.3, 0.7, 0.6]))
        np.testing.assert_allclose(slope, [-0.5, -0.5, 0.5, 0.5])
    odds = jax.grad(lambda p: equalized_odds_difference(group_statistics(p, labels, membership)))(jnp.full(4, 0.4))
    assert np.isfinite(odds).all()


def test_nan_under_jit_spoils_its_groups():
    predictions = jnp.array([0.0, 1.0, jnp.nan, 1.0])
    membership = membership_from_ids(jnp.array([0, 0, 1, 1]), 2)
    found = jax.jit(group_statistics)(predictions, jnp.array([0, 1, 0, 1]), membership)
    np.testing.assert_array_equal(np.isnan(found.groups.positive_rate), [False, True])
    assert np.isnan(demographic_parity_difference(found))
    assert np.isnan(equalized_odds_difference(found))


def test_interval_of_one_rate_is_binomial():
    """Both ways of drawing give the quantiles of the normal approximation, and the same distribution."""
    n = 1000
    predictions, labels = np.arange(n) % 10 < 3, np.ones(n, int)
    membership = np.ones((n, 2), int)
    rate = lambda statistics: statistics.overall.positive_rate  # noqa: E731
    low, high = bootstrap_interval(jax.random.key(0), rate, predictions, labels, membership, resamples=4000)
    half = 1.96 * np.sqrt(0.3 * 0.7 / n)
    # The standard error of a 2.5 % quantile from 4,000 draws is 4 % of this half width.
    np.testing.assert_allclose([low, high], [0.3 - half, 0.3 + half], atol=0.15 * half)
    by_row = _draw_rows(jax.random.key(1), predictions, labels, membership, 500).overall
    assert float(by_row.rows.min()) == float(by_row.rows.max()) == n
    assert float(by_row.positive_rate.mean()) == pytest.approx(0.3, abs=5 * half / 1.96 / np.sqrt(500))
    assert float(by_row.positive_rate.std()) == pytest.approx(half / 1.96, rel=0.15)


def test_both_ways_of_drawing_agree_on_a_difference():
    predictions, labels, ids = rows(5, n=600, groups=3)
    membership = membership_from_ids(ids, 3)
    fast = jax.vmap(equalized_odds_difference)(resample(jax.random.key(0), predictions, labels, membership))
    slow = jax.vmap(equalized_odds_difference)(_draw_rows(jax.random.key(0), predictions, labels, membership, 1000))
    spread = float(fast.std())
    assert spread > 0.02
    assert float(slow.mean()) == pytest.approx(float(fast.mean()), abs=5 * spread / np.sqrt(500))
    assert float(slow.std()) == pytest.approx(spread, rel=0.15)


def test_many_rows_are_drawn_in_parts(monkeypatch):
    """1,000 resamples of a million scores would be numbers of rows of 4 GB."""
    predictions, labels, ids = rows(5, n=90, groups=3)
    arguments = (predictions, labels, membership_from_ids(ids, 3))
    module = importlib.import_module(_draw_rows.__module__)  # the package has a function of this name
    at_once = _draw_rows(jax.random.key(0), *arguments, 400)
    monkeypatch.setattr(module, "MOST_DRAWN", 90 * 150)  # 134 a part, the last one cut
    parts = _draw_rows(jax.random.key(0), *arguments, 400)
    assert parts.overall.rows.shape == (400,)
    np.testing.assert_array_equal(parts.overall.rows, 90)
    drawn = np.asarray(parts.groups.true_positives)
    assert not np.array_equal(drawn[:134], drawn[134:268])  # no part is another one again
    one, other = (np.asarray(of.overall.positive_rate) for of in (at_once, parts))
    # Means of 400 differ by less than 5 standard errors, spreads of 400 by less than 5 of theirs (3.5 %, twice).
    assert abs(one.mean() - other.mean()) < 5 * one.std() * np.sqrt(2 / 400)
    assert other.std() == pytest.approx(one.std(), rel=5 * 0.05)
    monkeypatch.setattr(module, "MOST_DRAWN", 1)
    assert _draw_rows(jax.random.key(0), *arguments, 3).groups.positives.shape == (3, 3)


def test_weights_that_are_none():
    arguments = (PREDICTIONS, LABELS, membership_from_ids(IDS, 3))
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=f"weights must be at least 0 and finite, got {bad:g} in row 3"):
            group_statistics(*arguments, weights=np.where(np.arange(10) == 3, bad, 1.0))


def test_interval_of_scores_under_jit_and_vmap():
    labels, ids = rows(6, n=120, groups=2)[1:]
    membership = membership_from_ids(ids, 2)
    scores = jax.random.uniform(jax.random.key(0), (2, 120))

    def interval(p):
        key = jax.random.key(1)
        return jnp.stack(bootstrap_interval(key, demographic_parity_difference, p, labels, membership, resamples=64))

    together = jax.jit(jax.vmap(interval))(scores)
    np.testing.assert_allclose(together[1], interval(scores[1]), atol=1e-6)
    assert (together[:, 0] < together[:, 1]).all()


def test_a_group_that_a_resample_misses_is_left_out():
    """One row of 40 is group 1: the e^-1 of resamples without it have no difference, and the interval skips them."""
    predictions, labels = np.arange(40) % 2, np.arange(40) // 2 % 2
    membership = membership_from_ids((np.arange(40) == 0).astype(int), 2)
    found = resample(jax.random.key(0), predictions, labels, membership)
    values = jax.vmap(demographic_parity_difference)(found)
    assert float(jnp.isnan(values).mean()) == pytest.approx((1 - 1 / 40) ** 40, abs=0.08)
    low, high = bootstrap_interval(jax.random.key(0), demographic_parity_difference, predictions, labels, membership)
    assert 0 <= float(low) < float(high) <= 1


def test_concerns_name_the_group():
    labels = np.concatenate([np.zeros(50, int), np.arange(20) % 2, np.ones(40, int)])
    ids = np.repeat([0, 1, 2], [50, 20, 40])
    with pytest.warns(UserWarning, match="group 1 has 20 rows, fewer than 30") as caught:
        found = group_statistics(labels, labels, membership_from_ids(ids, 4))
    said = [str(warning.message) for warning in caught]
    assert said == list(concerns(found))
    assert concerns(found, names=["old", "young", "middle", "none"], smallest=10) == (
        "old has no positives: its true positive rate is undefined",
        "middle has no negatives: its false positive rate is undefined",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.array([0, 1, 2])}, "labels must be 0 or 1, got 2"),
        ({"membership": np.array([[1, 0], [0, 1], [0, 3]])}, "membership must be 0 or 1, got 3"),
        ({"membership": np.array([[1, 0], [0, 1]])}, "membership has 2 rows and labels 3"),
        ({"predictions": np.array([0.0, np.nan, 1.0])}, r"predictions must lie in \[0, 1\], got nan in row 1"),
        ({"predictions": np.array([0.0, 1.0])}, "predictions has 2 rows and labels 3"),
        ({"predictions": np.array([0.0, 1.0, 1.5])}, r"predictions must lie in \[0, 1\], got 1.5 in row 2"),
        ({"membership": np.array([[1, 0], [1, 0], [0, 0]])}, "at least 2 groups with rows, got 1"),
        ({"weights": np.ones(4)}, "weights has 4 rows and labels 3"),
    ],
)
def test_bad_input(change, message):
    good = {"predictions": np.array([0, 1, 1]), "labels": np.array([0, 1, 1]), "membership": np.eye(3, 2, dtype=int)}
    with pytest.raises(ValueError, match=message):
        group_statistics(**good | change)


def test_bad_options():
    found = statistics_of(PREDICTIONS, LABELS, IDS)
    arguments = (jax.random.key(0), demographic_parity_difference, PREDICTIONS, LABELS, membership_from_ids(IDS, 3))
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\), got 95"):
        bootstrap_interval(*arguments, level=95.0)
    with pytest.raises(ValueError, match="resamples must be at least 1, got 0"):
        bootstrap_interval(*arguments, resamples=0)
    with pytest.raises(ValueError, match="num_groups must be at least 2, got 1"):
        membership_from_ids(IDS, 1)
    with pytest.raises(ValueError, match="at least one row, got none"):
        group_statistics(np.zeros(0), np.zeros(0), np.zeros((0, 2)))
    # The unknown words reach the functions themselves only where types are not checked at run time.
    for name, metric in (("method", demographic_parity_difference), ("agg", equalized_odds_difference)):
        with pytest.raises(Exception, match=name):
            metric(found, **{name: "worst"})
