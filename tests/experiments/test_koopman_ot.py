"""What the experiment adds to the battery: the protocol of classification, and configs that make no sense."""

import numpy as np
import pytest

from jaxlab.experiments.koopman_ot import EXPERIMENT, Config
from jaxlab.experiments.koopman_ot.classification import DataSet, _score, choose, load_data_set


def test_scores_are_nearest_neighbour_accuracies() -> None:
    """Two classes on a line, one case astray: positions decide every score by hand."""
    positions = np.array([0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 13.0, 0.4, 14.0, 3.0])
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1, 0])
    folds = np.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 4])
    data = DataSet(np.zeros((10, 1, 1)), np.ones(10), labels, folds, 1.0)
    inner, outer = _score(np.abs(positions[:, None] - positions[None]), data).T
    # Fold 0 holds cases 0 and 5. Inside, the astray one (0.4) is labelled 0 and misleads the case at 1: 6 of 8.
    np.testing.assert_allclose(inner[0], 6 / 8)
    np.testing.assert_allclose(outer, [0.5, 0.5, 0.5, 1.0, 1.0])


def test_choice_is_made_inside_and_paid_outside() -> None:
    inner = np.array([[[[0.5, 0.9]]], [[[0.8, 0.1]]]])  # [setting, method, fold, eta]
    outer = np.array([[[[0.1, 0.2]]], [[[0.3, 0.4]]]])
    np.testing.assert_array_equal(choose(inner, outer), [[0.2]])


def test_folds_keep_the_shares_of_classes(tmp_path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "Noise"
    folder.mkdir()
    for split, cases in (("TRAIN", 12), ("TEST", 8)):
        lines = [",".join(f"{v:.6f}" for v in rng.normal(size=6)) + f":{k % 2}" for k in range(cases)]
        (folder / f"Noise_{split}.ts").write_text("@classLabel true 0 1\n@data\n" + "\n".join(lines) + "\n")
    data = load_data_set(str(folder), cases=0, seed=1)
    assert data.series.shape == (20, 6, 1)
    np.testing.assert_allclose(data.series.mean(), 0, atol=1e-12)
    np.testing.assert_allclose(data.series.std(), 1, rtol=1e-12)
    for label in (0, 1):
        np.testing.assert_array_equal(np.bincount(data.folds[data.labels == label]), [2] * 5)
    with pytest.raises(ValueError, match="5 folds need as many cases of each class"):
        load_data_set(str(folder), cases=8, seed=1)


@pytest.mark.parametrize("preset", EXPERIMENT.presets)
def test_presets_have_shapes(preset) -> None:
    config = EXPERIMENT.presets[preset]
    assert EXPERIMENT.shapes(config).shape[-1] == max(config.ranks)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"windows": (8,)}, "one window for each data set is needed"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"samples": (100,)}, "samples must hold two sizes"),
    ],
)
def test_bad_configs_are_named(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)
