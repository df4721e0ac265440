"""Grids against the formulas of the schedulers that models were trained with."""

import math

import numpy as np
import pytest

from jaxlab.flow import time_grids


@pytest.mark.parametrize("grid", [time_grids.uniform(7), time_grids.shifted(7), time_grids.flux(7, 4096)])
def test_exact_ends_and_strictly_increasing(grid) -> None:
    assert (grid[0], grid[-1]) == (0, 1)
    assert np.all(np.diff(grid) > 0)


def test_shifted_is_the_scheduler_of_stable_diffusion_3() -> None:
    # FlowMatchEulerDiscreteScheduler(shift=3), sigmas of 4 steps down from 1 on its grid of 1000, in float64.
    sigmas = np.linspace(1, 0, 5)
    np.testing.assert_allclose(time_grids.shifted(4)[::-1], 3 * sigmas / (1 + 2 * sigmas), rtol=1e-15)
    np.testing.assert_allclose(time_grids.shifted(4), [0, 0.5, 0.75, 0.9, 1], rtol=1e-15)


@pytest.mark.parametrize(("length", "shift"), [(256, 0.5), (4096, 1.15), (1024, 0.63)])
def test_flux_shifts_by_the_number_of_tokens(length, shift) -> None:
    t = np.linspace(0, 1, 6)[1:]
    expected = math.exp(shift) / (math.exp(shift) + (1 / t - 1))
    np.testing.assert_allclose(time_grids.flux(5, length)[1:], expected, rtol=1e-14)


def test_no_shift_is_uniform() -> None:
    np.testing.assert_allclose(time_grids.shifted(9, shift=1.0), time_grids.uniform(9), rtol=1e-15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: time_grids.uniform(0), "steps of a time grid must be at least 1, got 0"),
        (lambda: time_grids.shifted(3, shift=0.0), "shift must be positive and finite, got 0.0"),
        (lambda: time_grids.flux(3, 0), "sequence_length must be at least 1, got 0"),
    ],
)
def test_bad_input_is_named(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
