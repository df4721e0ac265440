"""Uni-Inv against closed forms, pinned numbers, its orders, its limit, and its promises as a JAX function."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxlab.flow import euler_slope, heun_slope, invert, sample, time_grids, uni_invert
from jaxlab.flow.velocity import in_dtype
from tests.flow.conftest import linear, wave


def round_trip(velocity, z0, steps, *, slope=euler_slope, **options):
    grid = time_grids.uniform(steps)
    noise = uni_invert(velocity, z0, grid, slope=slope, **options).z
    return sample(velocity, noise, grid, method="heun" if slope is heun_slope else "euler")


@pytest.mark.parametrize(("steps", "factor"), [(1, 0.657), (10, 0.9963783238), (20, 0.9991154738)])
def test_linear_field(in_double, steps, factor) -> None:
    np.testing.assert_allclose(round_trip(linear, jnp.ones((1, 1)), steps), factor, atol=1e-10)


@pytest.mark.parametrize(
    ("zero_init", "expected"), [(False, (1.75460201, 2.19692621)), (True, (1.76590340, 2.18692687))]
)
def test_pinned_inversion(in_double, zero_init, expected) -> None:
    z0, grid = jnp.array([[1.0, 2.0]]), time_grids.uniform(4)
    found = uni_invert(wave, z0, grid, zero_init=zero_init, return_trajectory=True)
    np.testing.assert_allclose(found.z[0], expected, atol=1e-8)  # the digits given
    np.testing.assert_array_equal(found.trajectory[-1], found.z)
    if not zero_init:
        np.testing.assert_allclose(sample(wave, found.z, grid)[0], (1.02201161, 2.06200659), atol=1e-8)


@pytest.mark.parametrize(
    ("options", "errors", "order"),
    [
        ({}, (5.26e-3, 1.43e-3), 1.88),
        ({"zero_init": True}, (5.37e-3, 1.45e-3), 1.89),
        ({"corrections": 2}, (1.32e-3, 1.53e-4), 3.1),
        ({"corrections": 3}, (2.64e-4, 1.67e-5), 4.0),
        ({"slope": heun_slope}, (6.08e-3, 1.55e-3), 1.97),
    ],
)
def test_round_trip_orders(in_double, mixture, options, errors, order) -> None:
    """Global order K + 1."""
    velocity, data = mixture
    runs = [jax.jit(functools.partial(round_trip, velocity, steps=n, **options)) for n in (32, 64)]
    found = [float(jnp.sqrt(jnp.mean((run(data) - data) ** 2))) for run in runs]
    np.testing.assert_allclose(np.log2(found[0] / found[1]), order, atol=0.15)
    # Another 256 samples of the same mixture than those of the reference numbers.
    np.testing.assert_allclose(found, errors, rtol=0.4)


def test_one_step_is_third_order(in_double, mixture) -> None:
    """Proposition 4.1: the local error of a round trip from t = 0.4 is O(h^3), Euler's O(h^2)."""
    velocity, z = mixture
    steps = 0.1 / 2.0 ** np.arange(4)
    errors = {"euler": [], "uni_inv": []}
    for h in steps:
        v_before = velocity(z, jnp.array(0.4), None)
        for name, v in (("euler", v_before), ("uni_inv", velocity(z + h * v_before, jnp.array(0.4 + h), None))):
            up = z + h * v
            down = up - h * velocity(up, jnp.array(0.4 + h), None)
            errors[name].append(float(jnp.sqrt(jnp.mean((down - z) ** 2))))
    slopes = {name: np.diff(np.log2(found)) * -1 for name, found in errors.items()}
    np.testing.assert_allclose(slopes["euler"], 2, atol=0.08)
    np.testing.assert_allclose(slopes["uni_inv"], 3, atol=0.08)


def test_many_corrections_invert_exactly(in_double) -> None:
    z0 = jnp.array([[1.0, 2.0]])
    np.testing.assert_allclose(round_trip(wave, z0, 4, corrections=60), z0, atol=1e-13)  # h times Lipschitz is 1/4


def test_constant_fields_are_exact_in_one_step_and_on_trees() -> None:
    z0 = {"video": jnp.ones((2, 3, 1)), "audio": jnp.zeros((2, 4))}
    found = round_trip(lambda z, t, c: jax.tree.map(lambda leaf: jnp.full_like(leaf, 2.0), z), z0, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, z0)


@pytest.mark.parametrize(("corrections", "zero_init"), [(1, False), (1, True), (3, False)])
def test_calls_are_as_counted(corrections, zero_init) -> None:
    seen = []

    def velocity(z, t, condition):
        if not isinstance(t, jax.core.Tracer):  # looks at shapes
            seen.append(t)
        return z

    with jax.disable_jit():
        uni_invert(velocity, jnp.ones((1, 1)), time_grids.uniform(5), steps=4, corrections=corrections,
                   zero_init=zero_init)  # fmt: skip
    assert len(seen) == 4 * corrections + (not zero_init)


def test_jit_vmap_and_gradient(in_double) -> None:
    grid = time_grids.uniform(6)
    z0 = jnp.array([[1.0, 2.0], [0.1, -0.4]])

    def noise(z0):
        return uni_invert(wave, z0, grid, corrections=2).z

    np.testing.assert_allclose(jax.jit(noise)(z0), noise(z0), rtol=1e-12)
    np.testing.assert_allclose(jax.vmap(lambda z: noise(z[None])[0])(z0), noise(z0), rtol=1e-12)
    np.testing.assert_array_equal(noise(z0[::-1]), noise(z0)[::-1])
    check_grads(noise, (z0,), order=1, modes=("rev",), atol=1e-6, rtol=1e-6)


def test_low_precision_networks_lose_less_than_low_precision_latents() -> None:
    """Rounding inside calls is the model's noise on both ways; rounding between steps adds up."""
    z0 = jax.random.normal(jax.random.key(0), (4, 64))
    found = round_trip(in_dtype(wave, jnp.bfloat16), z0, 20)
    ulp = 2.0**-8

    def rounded(z, times):
        for a, b in itertools.pairwise(times):
            z = (z + jnp.asarray(b - a) * wave(z, jnp.asarray(a), None)).astype(jnp.bfloat16).astype(jnp.float32)
        return z

    grid = time_grids.uniform(20)
    low = rounded(rounded(z0, grid), grid[::-1])
    exact = round_trip(wave, z0, 20)
    assert jnp.abs(found - exact).max() < 2 * ulp  # 20 calls both ways, errors of h ulp each
    assert jnp.abs(low - z0).mean() > jnp.abs(found - z0).mean()


def test_half_precision_samples_come_back_in_float32() -> None:
    z0 = jnp.ones((2, 3), jnp.bfloat16)
    found = uni_invert(wave, z0, time_grids.uniform(3)).z
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, uni_invert(wave, z0.astype(jnp.float32), time_grids.uniform(3)).z)


def test_nan_is_not_swallowed() -> None:
    found = uni_invert(lambda z, t, c: z * jnp.where(t > 0.5, jnp.nan, 1.0), jnp.ones((1, 2)), time_grids.uniform(4))
    assert np.all(np.isnan(found.z))


def test_bad_corrections_are_named() -> None:
    with pytest.raises(ValueError, match="corrections must be at least 1, got 0"):
        uni_invert(linear, jnp.ones((1, 1)), time_grids.uniform(2), corrections=0)


def test_its_noise_is_the_samplers_and_not_that_of_the_ode(in_double, mixture) -> None:
    velocity, data = mixture
    exact = invert(velocity, data, time_grids.uniform(256), method="heun")

    def distance(z):
        return float(jnp.sqrt(jnp.mean((z - exact) ** 2)))

    ours = [distance(uni_invert(velocity, data, time_grids.uniform(n)).z) for n in (16, 32)]
    assert 1.6 < ours[0] / ours[1] < 2.4  # O(h)
    assert ours[0] > 20 * distance(invert(velocity, data, time_grids.uniform(16), method="heun"))
