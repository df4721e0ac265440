"""Langevin dynamics: closed forms of Euler-Maruyama, diffrax with the same noise, a double well, bad input."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.dynamics.latent import autocorrelation, langevin_propagator, langevin_solve, rollout


def gaussian(params, z):
    return -z


def double_well(slope, z):
    """Score of exp(-4 (z^2 - 1)^2 + slope z)."""
    return -16 * z * (z**2 - 1) + slope


def test_variance_and_autocorrelation_are_those_of_euler_maruyama():
    """Variance ``1 / (1 - dt / 2)`` and ``(1 - dt)^n``; 64 x 20000 steps of 20 correlated ones: 0.6 % of error."""
    dt = 0.1
    propagator = langevin_propagator(gaussian, None, dt=dt)
    path = np.asarray(rollout(propagator, np.zeros((64, 1)), 20_000, key=jax.random.key(0)).path)[:, 100:, 0]
    assert path.var() == pytest.approx(1 / (1 - dt / 2), rel=0.02)
    found = autocorrelation(list(path[:16]), lags=10)
    np.testing.assert_allclose(found, (1 - dt) ** np.arange(11), atol=0.03)


@pytest.mark.parametrize(("variant", "variance"), [("paper", 1.0), ("code", 2.0)])
def test_temperature_widens_only_the_variant_of_the_code(variant, variance):
    propagator = langevin_propagator(gaussian, None, dt=0.02, temperature=2.0, variant=variant, stride=50)
    path = rollout(propagator, np.zeros((256, 1)), 220, key=jax.random.key(1)).path[:, 20:]
    # The discretisation adds T dt / 2 = 2 % in the paper's variant, dt / 2 in the code's; sampling 1 %.
    assert float(path.var()) == pytest.approx(variance, rel=0.05)


def test_the_two_wells_are_visited_as_often_as_the_density_says():
    slope = 0.25
    propagator = langevin_propagator(double_well, jnp.asarray(slope), dt=0.01, stride=20)
    path = np.asarray(rollout(propagator, np.ones((512, 1)), 1000, key=jax.random.key(2)).path)[:, 250:]
    x = np.linspace(-3, 3, 20_001)
    density = np.exp(-4 * (x**2 - 1) ** 2 + slope * x)
    expected = density[x > 0].sum() / density[x < 0].sum()
    assert (path > 0).sum() / (path < 0).sum() == pytest.approx(expected, rel=0.05)


class Recorded(diffrax.AbstractBrownianPath):
    """A Brownian path whose increments over steps of one are given."""

    increments: jax.Array
    levy_area = diffrax.BrownianIncrement

    @property
    def t0(self):
        return 0

    @property
    def t1(self):
        return len(self.increments)

    def evaluate(self, t0, t1=None, left=True, use_levy=False):
        return self.increments[jnp.round(t0).astype(int)]


def test_diffrax_makes_the_same_steps_with_the_same_noise():
    stride, steps = 3, 5
    propagator = langevin_propagator(double_well, jnp.asarray(0.1), dt=0.01, stride=stride, clip=5.0)
    start = jnp.array([[1.0, -1.0], [0.2, 3.0]])
    noise = jax.random.normal(jax.random.key(0), (steps * stride, 2, 2))
    solved = langevin_solve(
        propagator, start, steps, key=jax.random.key(9), brownian=Recorded(noise.reshape(steps * stride, 4))
    )
    z = start
    for i in range(steps):
        z = propagator.step(z, noise[i * stride : (i + 1) * stride])
        np.testing.assert_allclose(solved[:, i], z, atol=1e-5)


def test_diffrax_has_the_same_stationary_state():
    propagator = langevin_propagator(gaussian, None, dt=0.1, stride=5)
    path = langevin_solve(propagator, np.zeros((64, 1)), 200, key=jax.random.key(3))
    assert path.shape == (64, 200, 1)
    # 64 x 200 states, of which neighbours are correlated by 0.6: about 4000 free ones, 2 % of error.
    assert float(path[:, 20:].var()) == pytest.approx(1.0526, rel=0.07)


def test_a_long_score_is_shortened_and_keeps_its_direction():
    propagator = langevin_propagator(lambda params, z: params * z, jnp.asarray(1e25), dt=1.0, clip=2.0)
    z = jnp.array([[3.0, 4.0], [3e-26, 4e-26]])
    np.testing.assert_allclose(propagator.drift(z), [[1.2, 1.6], [0.3, 0.4]], rtol=1e-5)
    assert np.all(np.isfinite(propagator.drift(jnp.zeros((1, 2)))))


def test_a_step_near_the_stiffest_variance_warns():
    with pytest.warns(UserWarning, match=r"a Langevin step of 0.1 is more than half of the smallest .* variance 0.15"):
        langevin_propagator(gaussian, None, dt=0.1, smallest_variance=0.15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dt": 0.0}, "dt must be positive and finite, got 0.0"),
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive and finite, got nan"),
        ({"clip": -1.0}, "clip must be positive and finite, got -1.0"),
        ({"stride": 0}, "stride must be at least 1, got 0"),
    ],
)
def test_bad_dynamics_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        langevin_propagator(gaussian, None, **({"dt": 0.1} | options))
