"""DDIM models as flows against DDIM's own formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.flow import ddim_as_flow, sample, uni_edit, uni_invert

ALPHA_BAR = np.cumprod(1 - np.linspace(1e-4, 0.02, 100) * 3)
TIMESTEPS = np.array([9, 29, 59, 99])


def noise_of(x, timestep, condition):
    return jnp.tanh(x) * (1 + timestep / 100) + (0 if condition is None else condition[:, None])


def v_of(x, timestep, condition):
    """The same model, predicting v = (noise - s x) / a."""
    bar = jnp.asarray(ALPHA_BAR, x.dtype)[timestep.astype(int)]
    return (noise_of(x, timestep, condition) - jnp.sqrt(1 - bar) * x) / jnp.sqrt(bar)


def ddim(x, timesteps=TIMESTEPS):
    """Noiseless DDIM as its paper writes it, ending at alpha_bar = 1."""
    bars = [1.0, *ALPHA_BAR[timesteps]]
    for i in range(len(timesteps), 0, -1):
        noise = np.asarray(noise_of(x, timesteps[i - 1], None))
        clean = (x - np.sqrt(1 - bars[i]) * noise) / np.sqrt(bars[i])
        x = np.sqrt(bars[i - 1]) * clean + np.sqrt(1 - bars[i - 1]) * noise
    return x


@pytest.mark.parametrize(("predict", "kind"), [(noise_of, "epsilon"), (v_of, "v")])
def test_euler_is_ddim(in_double, predict, kind) -> None:
    flow = ddim_as_flow(predict, ALPHA_BAR, TIMESTEPS, prediction=kind)
    x = np.random.default_rng(0).normal(size=(3, 4))
    y = sample(flow.velocity, jnp.asarray(x / flow.alpha[-1]), flow.grid)
    # Time steps are found again by interpolation in a table, to rounding.
    np.testing.assert_allclose(y, ddim(x), atol=1e-10)


@pytest.mark.parametrize("timesteps", [[0], [99], [0, 1], [0, 97, 98, 99], range(100)])
def test_odd_schedules(in_double, timesteps) -> None:
    """One step, the first, neighbours, uneven ones, all; a model in bfloat16 is wrapped inside."""
    timesteps = np.asarray(timesteps)
    x = np.random.default_rng(0).normal(size=(3, 4))
    seen = []

    def predict(x, timestep, condition):
        jax.debug.callback(lambda t: seen.append(float(t)), timestep)
        return noise_of(x, timestep, condition)

    flow = ddim_as_flow(predict, ALPHA_BAR, timesteps)
    y = sample(flow.velocity, jnp.asarray(x / flow.alpha[-1]), flow.grid)
    np.testing.assert_allclose(y, ddim(x, timesteps), atol=1e-9)
    np.testing.assert_array_equal(sorted(seen), timesteps)  # whole numbers, for models with a table


def test_uni_inv_finds_the_way_back(in_double) -> None:
    flow = ddim_as_flow(noise_of, ALPHA_BAR, TIMESTEPS)
    data = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)))
    noise = uni_invert(flow.velocity, data, flow.grid, corrections=40).z
    np.testing.assert_allclose(ddim(np.asarray(noise) * flow.alpha[-1]), data, atol=1e-6)


def test_uni_edit_runs_on_it() -> None:
    """A condition that adds c to the noise moves data by minus c times the way, strength and all."""
    flow = ddim_as_flow(lambda x, t, c: jnp.broadcast_to(c[:, None], x.shape), ALPHA_BAR, TIMESTEPS)
    zero, one = jnp.zeros(2), jnp.ones(2)
    found = uni_edit(flow.velocity, jnp.ones((2, 3)), flow.grid, source=zero, target=one, inversion=zero, strength=2.0,
                     delay_rate=0.75, channel_axis=None).z  # fmt: skip
    np.testing.assert_allclose(found, 1 - 2 * flow.sigma_max * flow.grid[3], rtol=1e-5)  # the mask is 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha_bar": ALPHA_BAR[::-1]}, "alpha_bar must decrease"),
        ({"timesteps": np.array([5, 3])}, r"timesteps must ascend within \[0, 99\]"),
        ({"timesteps": np.array([5, 100])}, r"timesteps must ascend within \[0, 99\]"),
        ({"prediction": "x0"}, "prediction must be 'epsilon' or 'v', got 'x0'"),
    ],
)
def test_bad_input_is_named(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        ddim_as_flow(noise_of, **{"alpha_bar": ALPHA_BAR, "timesteps": TIMESTEPS, **change})
