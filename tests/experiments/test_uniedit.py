"""What the experiment adds to the battery: its data, its choices, and configs that make no sense."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import flow
from jaxlab.experiments.uniedit import EXPERIMENT, Config, editing
from jaxlab.experiments.uniedit.data import load_pictures, make_pairs
from jaxlab.experiments.uniedit.reconstruction import folds_of, local_slopes, reconstruction_psnr


@pytest.fixture(scope="module")
def digits():
    return load_pictures("digits", seed=0, held_out=100)


def test_pictures_are_split_and_in_range(digits) -> None:
    assert digits.train.shape == (1697, 8, 8, 1)
    assert digits.test.shape == (100, 8, 8, 1)
    assert (digits.train.min(), digits.train.max()) == (-1, 1)
    other = load_pictures("digits", seed=1, held_out=100)
    assert np.abs(digits.test - other.test).max() > 0
    total = np.concatenate([digits.train, digits.test]).sum()
    np.testing.assert_allclose(np.concatenate([other.train, other.test]).sum(), total, rtol=1e-6)


def test_pictures_of_a_file(tmp_path) -> None:
    x = np.arange(10 * 4 * 4, dtype=np.uint8).reshape(10, 4, 4)
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(10) % 3)
    found = load_pictures(str(tmp_path / "mine.npz"), seed=0, held_out=3)
    assert (found.name, found.classes, found.train.shape) == ("mine", ("0", "1", "2"), (7, 4, 4, 1))
    for picture, label in zip(found.train, found.train_labels, strict=True):
        index = round((picture[0, 0, 0] + 1) * 127.5) // 16
        assert label == index % 3
    np.savez(tmp_path / "other.npz", z=x)
    with pytest.raises(ValueError, match="needs pictures x"):
        load_pictures(str(tmp_path / "other.npz"), seed=0, held_out=3)
    with pytest.raises(ValueError, match=r"data must be .digits., .fashion. or an \.npz file, got .faces."):
        load_pictures("faces", seed=0, held_out=3)
    with pytest.raises(ValueError, match="too few to hold 6 out"):
        load_pictures(str(tmp_path / "mine.npz"), seed=0, held_out=6)


def test_pairs_change_the_right_class_alone(digits) -> None:
    pairs = make_pairs(digits.test, digits.test_labels, count=50, classes=10, seed=0)
    np.testing.assert_array_equal(pairs.source[:, 0], pairs.target[:, 0])
    assert np.all(pairs.source[:, 1] != pairs.target[:, 1])
    assert np.all((pairs.target >= 0) & (pairs.target < 10))
    for image, labels in zip(pairs.images, pairs.source, strict=True):
        for half, label in zip(np.split(image, 2, axis=1), labels, strict=True):
            same = np.all(digits.test == half, axis=(1, 2, 3))
            assert label in digits.test_labels[same]


def test_baselines_get_as_many_calls() -> None:
    for setting in editing.settings("all"):
        if not setting.family.startswith("uni_edit"):
            assert setting.calls >= editing.CALLS
        elif setting.family != "uni_edit_0.8":
            assert setting.calls == editing.CALLS


def test_calls_are_as_said(digits) -> None:
    """Every setting calls the model as often as its row says, a pair of conditions counting two."""
    pairs = make_pairs(digits.test, digits.test_labels, count=1, classes=10, seed=0)
    arguments = [jnp.asarray(part) for part in (*pairs, np.full((1, 2), 10))]
    for setting in editing.settings("all"):
        if setting.label not in ("0.6", "0.5", "1", "17", "0.9/0.25", "0.6/null", "0.8/source"):
            continue
        seen = []

        def velocity(z, t, condition, seen=seen):
            if not isinstance(t, jax.core.Tracer):  # looks at shapes
                seen.append(len(z))
            return z

        with jax.disable_jit():
            setting.edit(velocity, jax.random.key(0), *arguments)
        assert sum(seen) == setting.calls, setting


def test_choice_is_made_among_those_that_hit() -> None:
    background = np.array([30.0, 25.0, 20.0])
    assert editing.choose(np.array([0.5, 0.9, 1.0]), background, 0.9) == 1
    assert editing.choose(np.array([0.5, 0.6, 0.55]), background, 0.9) == 1
    accuracy = np.array([0.5, 0.8, 1.0])
    np.testing.assert_allclose(editing.background_at(accuracy, background, 0.9), 22.5)
    np.testing.assert_allclose(editing.background_at(accuracy, background, 0.4), 30)
    assert math.isnan(editing.background_at(accuracy[:2], background[:2], 0.9))


def test_reconstruction_by_hand(digits) -> None:
    """One method and bandwidth against the library called directly."""
    rest, held_out = map(jnp.asarray, folds_of(digits.train[:50], size=3, count=2))
    found = reconstruction_psnr(rest, jnp.array([0.5, 0.25]), held_out, method="rf_solver", calls=8)
    assert found.shape == (2, 6)
    data = held_out[1]
    velocity, grid = flow.fields.mixture_velocity(rest[1], 0.25), flow.time_grids.uniform(4)
    back = flow.sample(velocity, flow.invert(velocity, data, grid, method="rf_solver"), grid, method="rf_solver")
    by_hand = 10 * jnp.log10(4 / jnp.mean((back - data) ** 2, axis=1))
    np.testing.assert_allclose(found[1, 3:], by_hand, rtol=1e-3)
    assert found[0].mean() > found[1].mean()


def test_folds_hold_every_picture_out_once() -> None:
    pictures = np.arange(8.0).reshape(8, 1, 1, 1)
    rest, held_out = folds_of(pictures, size=2, count=3)
    np.testing.assert_array_equal(held_out[..., 0], [[0, 1], [2, 3], [4, 5]])
    for others, few in zip(rest, held_out, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate([others, few]).ravel()), pictures.ravel())
    with pytest.raises(ValueError, match="8 pictures are too few to hold 3 times 3 out"):
        folds_of(pictures, size=3, count=3)


def test_local_slopes_are_two_and_three() -> None:
    found = local_slopes(seed=5)
    np.testing.assert_allclose(np.diff(np.log2(found["euler"])), -2, atol=0.2)
    np.testing.assert_allclose(np.diff(np.log2(found["uni_inv"])), -3, atol=0.2)


@pytest.mark.parametrize("preset", EXPERIMENT.presets)
def test_presets_have_shapes(preset) -> None:
    config = EXPERIMENT.presets[preset]
    assert EXPERIMENT.shapes(config).shape == (config.batch, 28, 56, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 1}, "steps must be at least 2, got 1"),
        ({"folds": 0}, "folds must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"held_out": 1}, "held_out must be at least 2, got 1"),
        ({"bandwidths": (0.0,)}, "bandwidths must be positive"),
        ({"calls": (2,)}, "calls must be at least 4"),
        ({"accuracy": 1.5}, r"accuracy must be in \(0, 1\], got 1.5"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, got 0.0"),
        ({"patch_size": -1}, "patch_size must be at least 0, got -1"),
    ],
)
def test_bad_configs_are_named(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)
