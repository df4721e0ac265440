"""What the experiment adds to the battery: pieces without seams, judging of rollouts, configs that make no sense."""

import numpy as np
import pytest

from jaxlab.experiments.gldp import EXPERIMENT, Config
from jaxlab.experiments.gldp.judging import cut, kinetics, sampling_floor


def test_pieces_end_where_files_do():
    assert cut([10, 5, 20], 4, 30) == [slice(4, 10), slice(10, 15), slice(15, 30)]
    assert cut([10, 5], 0, 10) == [slice(0, 10)]
    assert cut([10], 3, 3) == []


def test_kinetics_of_what_does_not_move_are_unknown():
    still = np.ones((50, 2))
    assert np.isnan(kinetics([still], lag=2, lags=5)["t1"])
    short = np.random.default_rng(0).normal(size=(5, 2))
    assert np.isnan(kinetics([short], lag=2, lags=5)["t1"])


def test_kinetics_of_an_autoregressive_process():
    rng = np.random.default_rng(0)
    x = np.zeros((20_000, 2))
    for t in range(1, len(x)):
        x[t] = [0.9, 0.3] * x[t - 1] + rng.normal(size=2)
    found = kinetics([x], lag=2, lags=40)
    assert found["t1"] == pytest.approx(-1 / np.log(0.9), rel=0.1)
    # 20 000 frames hold 1000 independent ones: 0.03 of error at 1/e, where a lag changes it by 0.035.
    assert found["decorrelation"] == pytest.approx(-1 / np.log(0.9), rel=0.2)


def test_the_floor_of_a_perfect_sampler_falls_as_bins_over_frames():
    """``(K - 1) / (8 n)``; 64 resamples of a divergence that spreads by sqrt(2 / K) know its mean to 1 %."""
    angles = np.repeat(np.linspace(-3, 3, 20), 500)
    found = np.stack(np.meshgrid(angles[::50], angles[::50]), axis=-1).reshape(-1, 2)
    bins = len(np.unique(np.floor((found + np.pi) / (2 * np.pi) * 36), axis=0))
    assert sampling_floor(found) == pytest.approx((bins - 1) / (8 * len(found)), rel=0.05)


@pytest.mark.parametrize("preset", EXPERIMENT.presets)
def test_presets_have_shapes(preset):
    config = EXPERIMENT.presets[preset]
    shapes = EXPERIMENT.shapes(config)
    assert shapes["frames"].shape == (config.batch, 2300, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frames": 10}, "frames must be at least 100, got 10"),
        ({"steps": 5}, "steps must be at least 10, got 5"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"noise_levels": (0.1,)}, "noise_levels must be two or more"),
        ({"skips": (0,)}, "skips must be at least 1"),
        ({"ranks": (5, 21)}, r"ranks must be one or more in \[1, 20\], the width of a latent, got \(5, 21\)"),
        ({"widths": (0,)}, "hidden_size must be at least 1, got 0"),
        ({"epochs": ()}, r"widths and epochs must be one or more, got \(128, 512\) and \(\)"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"pooled": (0, 1)}, "pooled must be two sizes of at least 1"),
    ],
)
def test_bad_configs_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(**fields)
