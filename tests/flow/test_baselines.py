"""SDEdit, delayed injection, RF-Inversion and FlowEdit: transcriptions, limiting cases, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.flow import (
    delayed_injection,
    flow_edit,
    invert,
    rf_inversion_edit,
    rf_inversion_invert,
    sample,
    sdedit,
    time_grids,
    uni_invert,
)

KEY = jax.random.key(0)
GRID = time_grids.uniform(5)
Z0 = jnp.array([[1.0, 2.0, 0.0], [-0.5, 0.3, 1.0]])
SOURCE, TARGET = jnp.array([0.0, 0.5]), jnp.array([1.0, -0.5])


def velocity(z, t, condition):
    return jnp.sin(z + condition[:, None]) + t


def test_sdedit_starts_on_the_path_of_the_sample() -> None:
    """With the velocity of the straight line to its own noise it comes back to the sample."""
    noise = jax.random.normal(jax.random.split(KEY, 1)[0], Z0.shape)
    back = sdedit(KEY, lambda z, t, c: noise - Z0, Z0, GRID, None, delay_rate=0.6)
    np.testing.assert_allclose(back, Z0, atol=1e-6)
    start = 0.4 * Z0 + 0.6 * noise
    expected = sample(velocity, start, GRID, TARGET, steps=3)
    np.testing.assert_allclose(sdedit(KEY, velocity, Z0, GRID, TARGET, delay_rate=0.6), expected, rtol=1e-5)


@pytest.mark.parametrize("uni_inv", [True, False])
def test_delayed_injection_is_inversion_then_sampling(uni_inv) -> None:
    inverse = (
        uni_invert(velocity, Z0, GRID, SOURCE, steps=4).z if uni_inv else invert(velocity, Z0, GRID, SOURCE, steps=4)
    )
    found = delayed_injection(velocity, Z0, GRID, target=TARGET, inversion=SOURCE, delay_rate=0.8, uni_inv=uni_inv)
    np.testing.assert_allclose(found, sample(velocity, inverse, GRID, TARGET, steps=4), rtol=1e-6)


def test_rf_inversion_limits() -> None:
    np.testing.assert_allclose(
        rf_inversion_invert(KEY, velocity, Z0, GRID, SOURCE, gamma=0.0), invert(velocity, Z0, GRID, SOURCE), rtol=1e-6
    )
    noise = jax.random.normal(jax.random.split(KEY, 1)[0], Z0.shape)
    np.testing.assert_allclose(rf_inversion_invert(KEY, velocity, Z0, GRID, SOURCE, gamma=1.0), noise, atol=1e-6)
    back = rf_inversion_edit(velocity, noise, Z0, GRID, TARGET, eta=1.0, stop=1.0)
    np.testing.assert_allclose(back, Z0, atol=1e-6)
    free = rf_inversion_edit(velocity, noise, Z0, GRID, TARGET, eta=0.9, stop=0.0)
    np.testing.assert_allclose(free, sample(velocity, noise, GRID, TARGET), rtol=1e-6)


def test_rf_inversion_transcribed() -> None:
    noise = jax.random.normal(jax.random.split(KEY, 1)[0], Z0.shape)
    z = Z0
    for i in range(5):
        v = velocity(z, GRID[i], SOURCE)
        z = z + (GRID[i + 1] - GRID[i]) * (v + 0.5 * ((noise - z) / (1 - GRID[i]) - v))
    np.testing.assert_allclose(rf_inversion_invert(KEY, velocity, Z0, GRID, SOURCE), z, rtol=1e-5)
    for k, i in enumerate(range(5, 0, -1)):
        eta = 0.9 if k < 2 else 0.0
        v = velocity(z, GRID[i], TARGET)
        z = z + (GRID[i] - GRID[i - 1]) * (-v + eta * ((Z0 - z) / GRID[i] + v))
    start = rf_inversion_invert(KEY, velocity, Z0, GRID, SOURCE)
    found = rf_inversion_edit(velocity, start, Z0, GRID, TARGET, eta=0.9, stop=0.4)
    np.testing.assert_allclose(found, z, rtol=1e-4, atol=1e-5)


def test_flow_edit_of_a_constant_difference() -> None:
    """Where the velocities differ by a constant, noise and number of draws drop out."""

    def shift(z, t, condition):
        return jnp.broadcast_to(condition[:, None], z.shape)

    for options in ({}, {"n_avg": 3}, {"batched": False}, {"target_velocity": shift}):
        found = flow_edit(KEY, shift, Z0, GRID, source=SOURCE, target=TARGET, n_max=4, **options)
        np.testing.assert_allclose(found, Z0 - 0.8 * (TARGET - SOURCE)[:, None], atol=1e-6)
    same = flow_edit(KEY, velocity, Z0, GRID, source=SOURCE, target=SOURCE, n_max=5)
    np.testing.assert_allclose(same, Z0, atol=1e-6)


def test_flow_edit_transcribed() -> None:
    """One step of FlowEdit and two of ordinary sampling."""
    keys = jax.random.split(KEY, (1, 2))[0]
    total = jnp.zeros_like(Z0)
    for key in keys:
        z_source = 0.4 * Z0 + 0.6 * jax.random.normal(jax.random.split(key, 1)[0], Z0.shape)
        total += velocity(z_source, 0.6, TARGET) - velocity(z_source, 0.6, SOURCE)
    edit = Z0 - 0.2 * total / 2
    noise = jax.random.normal(jax.random.split(jax.random.fold_in(KEY, 3), 1)[0], Z0.shape)
    expected = sample(velocity, edit + 0.4 * (noise - Z0), GRID, TARGET, steps=2)
    found = flow_edit(KEY, velocity, Z0, GRID, source=SOURCE, target=TARGET, n_max=3, n_min=2, n_avg=2)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda o: flow_edit(KEY, velocity, Z0, GRID, n_max=6, **o),
            r"n_max must be in \[1, 5\] on this time grid, got 6",
        ),
        (
            lambda o: flow_edit(KEY, velocity, Z0, GRID, n_max=3, n_min=3, **o),
            r"n_min must be in \[0, 2\] below n_max, got 3",
        ),
        (lambda o: flow_edit(KEY, velocity, Z0, GRID, n_max=3, n_avg=0, **o), "n_avg must be at least 1, got 0"),
        (lambda o: rf_inversion_edit(velocity, Z0, Z0, GRID, TARGET, stop=1.5), r"stop must be in \[0, 1\], got 1.5"),
    ],
)
def test_bad_input_is_named(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call({"source": SOURCE, "target": TARGET})
