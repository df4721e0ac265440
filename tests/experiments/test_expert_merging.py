"""What the experiment adds to the battery: domains, the language model's side on a tiny one, and bad configs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.experiments.expert_merging import EXPERIMENT, Config, comparison, digits, language
from jaxlab.experiments.outcome import execute


def test_domains_of_the_digits_are_one_image_changed():
    splits = digits.split_digits(0, 2)
    assert splits.train.shape == (2, 5, 1300, 64)
    assert splits.test.shape == (2, 5, 497, 64)
    clean, rotated, inverted, mirrored, shifted = splits.test[0, :, 3].reshape(5, 8, 8)
    np.testing.assert_array_equal(rotated, np.rot90(clean))
    np.testing.assert_allclose((clean + inverted) * 0.38 + 0.6, 1, atol=1e-6)
    np.testing.assert_array_equal(mirrored, clean[:, ::-1])
    np.testing.assert_array_equal(shifted[2:, 2:], clean[:-2, :-2])
    assert not np.array_equal(splits.test_labels[0], splits.test_labels[1])


def test_sums_are_right_and_nothing_is_in_both_parts():
    texts, held_out = language.read_domains("python-topics", "python-topics", 0)
    lines = bytes(texts[2]).decode().split(";")[:200]
    assert all(eval(line.split("=")[0]) == int(line.split("=")[1]) for line in lines)
    assert [round(len(test) / (len(test) + len(text)), 3) for text, test in zip(texts, held_out, strict=True)] == [
        0.1
    ] * 3
    with pytest.raises(ValueError, match="a text of 5 tokens is too short for windows of 8"):
        language.windows(np.zeros(5, np.uint8), np.random.default_rng(0), (2,), 8)


def test_a_language_model(tmp_path):
    config = dataclasses.replace(
        EXPERIMENT.presets["smoke"],
        domains="language",
        blocks=1,
        batch_size=4,
        context=8,
        test_windows=2,
        steps=2,
        methods=("task_arithmetic",),
    )
    outcome = execute(EXPERIMENT, preset="quick", config=config, seed=0, out=tmp_path)
    table = {row["method"]: row for row in outcome.result["table"]}
    assert {"task_arithmetic", "expert_merging", "plus_plus", "adamerging", "few_inputs_gamma_0"} <= set(table)
    assert all(np.isfinite(row["retained_mean"]) for row in table.values())
    assert set(table["expert_merging"]) == {"method", "retained_mean", "retained_std", *language.DOMAINS}
    assert [one["id"] for one in outcome.result["skipped"]] == ["beats_wudi"]
    assert len(outcome.result["claims"]) == 6


def test_a_scale_of_nothing_is_the_base():
    """Static scores are those of the base plus a multiple of what the method gives."""
    params = jax.tree.map(lambda leaf: leaf[None], digits.init(jax.random.key(0), 16))
    splits = digits.split_digits(0, 1)
    vectors = {"embed": jax.random.normal(jax.random.key(1), (1, 4, 64, 16))}
    setting = comparison.Setting(
        params,
        vectors,
        comparison.Rows((), jnp.ones((1, 0)), ()),
        (splits.test[:, 1:, :50], splits.test_labels[:, :50]),
        lambda p, t: digits.accuracy(p, *t),
        1,
    )
    found = comparison.static_scores(setting, comparison.Ties(), scales=(0.0, 1.0))
    first = jax.tree.map(lambda leaf: leaf[0], params)
    wanted = digits.accuracy(first, jnp.asarray(splits.test[0, 1:, :50]), jnp.asarray(splits.test_labels[0, :50]))
    np.testing.assert_allclose(found[0, 0], wanted, atol=1e-6)
    assert found.shape == (1, 2, 4)


@pytest.mark.parametrize("preset", EXPERIMENT.presets)
def test_presets_have_shapes(preset):
    config = EXPERIMENT.presets[preset]
    found = EXPERIMENT.shapes(config)
    assert found.loss.shape == (config.steps + 1,)
    if preset == "paper":
        assert sum(leaf.shape[1] for leaf in jax.tree.leaves(found.alpha)) == 32 * 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"domains": "images"}, "domains must be digits, language or checkpoints, got 'images'"),
        ({"domains": "checkpoints"}, "need a model, experts and a text for each"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"pieces": 0}, "pieces must be at least 1, got 0"),
        ({"domains": "language"}, "repeats must be 1 for language, got 2"),
        ({"domains": "language", "repeats": 1, "width": 12}, "multiple of 8 for four heads, got 12"),
        ({"inputs": 5}, "positive and other than inputs"),
        ({"gammas": (0.5,)}, "must have 0, the least"),
        ({"learning_rate": 0.0}, "must be positive"),
        ({"squash": "tanh"}, "squash must be none, softplus or sigmoid, got 'tanh'"),
        ({"anchor": 1.0}, r"anchor must lie in \(0, 1\), got 1.0"),
        ({"budgets": (0.0,)}, "budgets must be positive and kappa not negative"),
        ({"methods": ("ties",)}, "methods must have task_arithmetic, and others of"),
    ],
)
def test_bad_configs_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(**fields)
