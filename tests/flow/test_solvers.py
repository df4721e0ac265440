"""Rules against closed forms, pinned numbers, an independent solver, and their orders on a mixture."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.flow import calls, fields, invert, sample, time_grids
from tests.flow.conftest import linear, wave

METHODS = ("euler", "time_shifted", "heun", "rf_solver", "fireflow")


def round_trip_error(velocity, z0, method, steps, sampler=None):
    @jax.jit
    def there_and_back(velocity, z0):
        grid = time_grids.uniform(steps)
        return sample(velocity, invert(velocity, z0, grid, method=method), grid, method=sampler or method)

    return float(jnp.sqrt(jnp.mean((there_and_back(velocity, z0) - z0) ** 2)))


@pytest.mark.parametrize(("steps", "factor"), [(10, 0.9520664525), (20, 0.9757830340)])
def test_euler_there_and_back_on_a_linear_field(in_double, steps, factor) -> None:
    grid = time_grids.uniform(steps)
    z = sample(linear, invert(linear, jnp.ones((1, 1)), grid), grid)
    np.testing.assert_allclose(z, factor, atol=1e-10)
    np.testing.assert_allclose(z, (1 - (0.7 / steps) ** 2) ** steps, rtol=1e-12)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("euler", (1.70084629, 2.02797563)),
        ("heun", (1.72749406, 2.11100037)),
        ("rf_solver", (1.72786021, 2.11082512)),
        ("fireflow", (1.73005002, 2.11735403)),
    ],
)
def test_pinned_inversions(in_double, method, expected) -> None:
    z = invert(wave, jnp.array([[1.0, 2.0]]), time_grids.uniform(4), method=method)
    np.testing.assert_allclose(z[0], expected, atol=1e-8)  # the digits given


@pytest.mark.parametrize(("method", "solver"), [("euler", "Euler"), ("heun", "Heun"), ("rf_solver", "Midpoint")])
def test_agrees_with_diffrax(in_double, method, solver) -> None:
    diffrax = pytest.importorskip("diffrax", reason="compares with diffrax")
    grid = time_grids.shifted(6)
    z0 = jnp.array([[1.0, 2.0], [-0.5, 0.3]])
    for times, ours in ((grid, invert), (grid[::-1], sample)):
        theirs = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, z, args: wave(z, t, None)),
            getattr(diffrax, solver)(),
            t0=times[0],
            t1=times[-1],
            dt0=None,
            y0=z0,
            stepsize_controller=diffrax.StepTo(jnp.asarray(times)),
        ).ys[0]
        np.testing.assert_allclose(ours(wave, z0, grid, method=method), theirs, rtol=1e-12)


@pytest.mark.parametrize(
    ("method", "sampler", "errors", "order"),
    [
        ("euler", "euler", (7.81e-2, 3.92e-2), 1),
        ("time_shifted", "euler", (2.62e-2, 1.31e-2), 1),
        ("heun", "heun", (2.42e-4, 3.07e-5), 3),
        ("rf_solver", "rf_solver", (2.65e-4, 3.32e-5), 3),
        ("fireflow", "fireflow", (4.57e-4, 5.97e-5), 3),
    ],
)
def test_round_trip_orders(in_double, mixture, method, sampler, errors, order) -> None:
    found = [round_trip_error(*mixture, method, steps, sampler) for steps in (32, 64)]
    np.testing.assert_allclose(np.log2(found[0] / found[1]), order, atol=0.15)
    # Another 256 samples of the same mixture than those of the reference numbers.
    np.testing.assert_allclose(found, errors, rtol=0.35)


@pytest.mark.parametrize("method", METHODS)
def test_constant_fields_are_exact(method) -> None:
    grid = time_grids.flux(5, 256)
    z0 = {"a": jnp.ones((2, 3)), "b": jnp.zeros((2, 1, 4))}

    def constant(z, t, condition):
        return jax.tree.map(jnp.full_like, z, condition)

    there, path = invert(constant, z0, grid, {"a": 2.0, "b": -1.0}, method=method, return_trajectory=True)
    np.testing.assert_allclose(there["a"], 3.0, rtol=1e-6)
    np.testing.assert_allclose(path["b"][:, 0, 0, 0], -grid[1:], rtol=1e-5)


def test_gaussian_flow_is_a_shift_and_a_scale() -> None:
    mean = jnp.array([1.0, -2.0])
    z0 = mean + 0.5 * jax.random.normal(jax.random.key(0), (64, 2))
    noise = invert(fields.gaussian_velocity(mean, 0.5), z0, time_grids.uniform(200), method="heun")
    np.testing.assert_allclose(noise, (z0 - mean) / 0.5, atol=2e-4)


def test_parts_of_the_way_join(in_double) -> None:
    grid = time_grids.shifted(5)
    z0 = jnp.array([[0.3, 1.0]])
    _, path = invert(wave, z0, grid, return_trajectory=True)
    np.testing.assert_allclose(invert(wave, z0, grid, steps=3), path[2], rtol=1e-14)
    there = sample(wave, path[2], grid, steps=3)
    by_hand = path[2]
    for i in (3, 2, 1):
        by_hand = by_hand - (grid[i] - grid[i - 1]) * wave(by_hand, grid[i], None)
    np.testing.assert_allclose(there, by_hand, rtol=1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_calls_are_as_counted(method) -> None:
    seen = []

    def velocity(z, t, condition):
        if not isinstance(t, jax.core.Tracer):  # looks at shapes
            seen.append(t)
        return z

    with jax.disable_jit():
        invert(velocity, jnp.ones((1, 1)), time_grids.uniform(3), method=method)
    assert len(seen) == calls(method, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grid": [0.0, 0.5, 0.4, 1.0]}, ValueError, "time grid must increase strictly from 0 to 1"),
        ({"grid": [0.1, 1.0]}, ValueError, "time grid must increase strictly from 0 to 1"),
        ({"grid": [0.0, 0.9]}, ValueError, "time grid must increase strictly from 0 to 1"),
        ({"grid": [0.0]}, ValueError, "got shape"),
        ({"steps": 4}, ValueError, r"steps must be in \[1, 3\] on this time grid, got 4"),
        ({"method": "midpoint"}, ValueError, "method must be one of euler, time_shifted, heun, rf_solver, fireflow"),
        ({"z0": np.ones((2, 3), np.int32)}, TypeError, "latents must be floating point, got int32"),
        ({"velocity": lambda z, t, c: z[:, :2]}, ValueError, r"like the latents, float32\[2, 3\], got float32\[2, 2\]"),
        ({"velocity": lambda z, t, c: z.astype(jnp.bfloat16)}, ValueError, r"got bfloat16\[2, 3\].*in_dtype"),
        ({"velocity": lambda z, t, c: (z, z)}, ValueError, "must have the structure of the latents"),
        ({"z0": {"a": np.ones((2, 3)), "b": np.ones((3, 3))}}, ValueError, "one leading batch size"),
    ],
)  # fmt: skip
def test_bad_input_is_named(change, error, message) -> None:
    arguments = {"velocity": linear, "z0": np.ones((2, 3), np.float32), "grid": time_grids.uniform(3), **change}
    arguments["grid"] = np.asarray(arguments["grid"])
    with pytest.raises(error, match=message):
        invert(**arguments)
