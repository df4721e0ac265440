"""The trained propagators: a linear system, resumption, guards, the score of a Gaussian, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.dynamics.latent import (
    DiffusionSchedule,
    DiffusionSettings,
    NeuralSettings,
    ancestral_samples,
    continue_diffusion,
    continue_neural,
    denoising_score,
    finish_neural,
    fit_koopman,
    fit_neural,
    noise_network,
    one_step_error,
    rollout,
    score_parameters,
    snapshot_pairs,
    start_diffusion,
    start_neural,
)

LINEAR = NeuralSettings(hidden_size=32, learning_rate=2e-3, dropout=0.0, weight_decay=0.0, epochs=12, batch_size=64)


@pytest.fixture(scope="module")
def linear_series() -> np.ndarray:
    rng = np.random.default_rng(0)
    matrix = np.array([[0.9, 0.2, 0.0], [-0.2, 0.8, 0.0], [0.0, 0.1, 0.5]])
    z = np.zeros((6000, 3))
    for t in range(1, len(z)):
        z[t] = matrix @ z[t - 1] + 0.3 * rng.normal(size=3)
    return z.astype(np.float32)


@pytest.fixture(scope="module")
def pairs(linear_series):
    return snapshot_pairs(linear_series[:4500]), snapshot_pairs(linear_series[4500:])


@pytest.fixture(scope="module")
def neural(pairs):
    train, held_out = pairs
    return fit_neural(jax.random.key(0), *train, held_out=held_out, settings=LINEAR, clip=1.2)


def test_a_network_learns_a_linear_system_as_well_as_regression(neural, pairs):
    train, held_out = pairs
    koopman = fit_koopman(*train)
    best = float(jnp.mean((held_out[1] - koopman.mean(held_out[0])) ** 2))
    found = float(one_step_error(neural.apply_fn, neural.params, held_out, residual=True))
    assert found < 1.05 * best


def test_its_noise_is_the_covariance_of_the_held_out_residuals(neural, pairs):
    _, (x, y) = pairs
    residuals = np.asarray(y - neural.mean(x))
    np.testing.assert_allclose(neural.noise @ neural.noise.T, np.cov(residuals.T, bias=True), atol=1e-5)


def test_clip_keeps_states_in_a_box_around_the_training_range(neural, pairs):
    (x, _), _ = pairs
    low, high = np.asarray(x.min(0)), np.asarray(x.max(0))
    np.testing.assert_allclose(neural.high - neural.low, 1.2 * (high - low), rtol=1e-5)
    wild = neural.replace(noise=100 * neural.noise)
    states = rollout(wild, np.zeros((2, 3)), 50, key=jax.random.key(0)).states()
    assert np.all((states >= np.asarray(neural.low)) & (states <= np.asarray(neural.high)))
    assert np.any(states == np.asarray(neural.high))


def test_training_continues_bit_for_bit_and_keeps_the_best(pairs):
    train, held_out = pairs
    keys = jax.random.split(jax.random.key(1), 3)
    states = [start_neural(jax.random.key(0), 3, LINEAR)]
    losses = []
    for key in keys:
        state, info = continue_neural(states[-1], train, held_out, key, LINEAR)
        states.append(state)
        losses.append(float(info["validation_loss"]))
    again, _ = continue_neural(jax.tree.map(np.asarray, states[1]), train, held_out, keys[1], LINEAR)
    jax.tree.map(np.testing.assert_array_equal, again, states[2])
    assert float(states[-1].best_loss) == pytest.approx(min(losses), rel=1e-6)
    broken = states[-1]._replace(training=states[-1].training._replace(params=jax.tree.map(
        lambda leaf: leaf + 10, states[-1].training.params
    )))  # fmt: skip
    worse, _ = continue_neural(broken, train, held_out, keys[0], LINEAR, steps=1)
    jax.tree.map(np.testing.assert_array_equal, worse.best_params, states[-1].best_params)


def test_a_network_of_the_users_own(pairs):
    train, held_out = pairs
    settings = NeuralSettings(learning_rate=0.02, weight_decay=0.0, epochs=8, residual=False)

    def apply_fn(params, z, key):
        return z @ params

    found = fit_neural(
        jax.random.key(0), *train, held_out=held_out, settings=settings, params=jnp.zeros((3, 3)), apply_fn=apply_fn
    )
    expected = fit_koopman(*train).operator.matrix
    np.testing.assert_allclose(found.params, expected, atol=0.05)  # noise of Adam at a constant rate


def test_a_fresh_residual_network_stays_where_it_is():
    state = start_neural(jax.random.key(0), 4)
    propagator = finish_neural(state._replace(best_loss=jnp.ones(())), (jnp.eye(4), jnp.eye(4)), (jnp.eye(4),) * 2)
    np.testing.assert_array_equal(propagator.mean(jnp.eye(4)), jnp.eye(4))
    np.testing.assert_allclose(propagator.noise, np.sqrt(1e-9) * np.eye(4), atol=1e-6)


def test_bad_training_is_refused(pairs):
    train, held_out = pairs
    with pytest.raises(ValueError, match="params and apply_fn go together"):
        fit_neural(jax.random.key(0), *train, held_out=held_out, params=jnp.ones(3))
    with pytest.raises(ValueError, match="held-out pairs must have the 3 latents of the others, got 2"):
        fit_neural(jax.random.key(0), *train, held_out=(np.ones((4, 2)), np.ones((4, 2))))
    with pytest.raises(ValueError, match="clip must be positive and finite, got 0"):
        finish_neural(start_neural(jax.random.key(0), 3), train, held_out, clip=0)
    with pytest.raises(ValueError, match="no validation loss was finite"):
        finish_neural(start_neural(jax.random.key(0), 3), train, held_out)
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1"):
        NeuralSettings(dropout=1.0)
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        NeuralSettings(epochs=0)


def test_schedule_of_the_paper():
    schedule = DiffusionSchedule.linear()
    assert schedule.steps == 1400
    np.testing.assert_allclose(schedule.signal**2 + schedule.noise**2, 1, atol=1e-6)
    np.testing.assert_allclose(schedule.noise[0], np.sqrt(5e-6), rtol=1e-4)
    exact = np.sqrt(np.cumprod(1 - np.linspace(5e-6, 0.03, 1400)))
    np.testing.assert_allclose(schedule.signal, exact, atol=1e-6)
    with pytest.raises(ValueError, match=r"noise level t\* must be in \[0, 1399\], got 1400"):
        schedule.check_level(1400)
    with pytest.raises(ValueError, match=r"betas must rise within \(0, 1\)"):
        DiffusionSchedule.linear(first=0.1, last=0.01)


def test_a_score_is_trained_on_latents_of_its_width():
    state, schedule = start_diffusion(jax.random.key(0), 2, SCORE), DiffusionSchedule.linear(steps=10)
    with pytest.raises(ValueError, match="the network is of 2 latents, got 3"):
        continue_diffusion(state, np.ones((4, 3)), jax.random.key(1), schedule, SCORE, steps=1)
    with pytest.raises(ValueError, match="steps of a training must be at least 1, got 0"):
        continue_diffusion(state, np.ones((4, 2)), jax.random.key(1), schedule, SCORE, steps=0)
    with pytest.raises(ValueError, match="the network is of 2 latents, samples of 3 are wanted"):
        ancestral_samples(jax.random.key(1), state.params, schedule, 5, 3, SCORE)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        ancestral_samples(jax.random.key(1), state.params, schedule, 0, 2, SCORE)


SCORE = DiffusionSettings(hidden_size=64, hidden_layers=2, learning_rate=1e-3, batch_size=256)


@pytest.fixture(scope="module")
def gaussian_score():
    """A noise network of N(0, I) in the plane, for which the best prediction is ``sqrt(1 - ab) z`` at every level."""
    schedule = DiffusionSchedule.linear(steps=100, last=0.2)
    z = np.random.default_rng(0).normal(size=(20_000, 2)).astype(np.float32)
    state = start_diffusion(jax.random.key(0), 2, SCORE)
    state, losses = continue_diffusion(state, z, jax.random.key(1), schedule, SCORE, steps=1500)
    return schedule, state, losses


def test_the_noise_network_of_a_gaussian(gaussian_score):
    schedule, state, _ = gaussian_score
    z = np.random.default_rng(1).normal(size=(500, 2)).astype(np.float32)
    level = 30
    assert 0.3 < schedule.noise[level] < 0.95
    predicted = noise_network(SCORE)(state.params, jnp.asarray(z), jnp.asarray(level / schedule.steps))
    error = np.sqrt(np.mean((predicted - schedule.noise[level] * z) ** 2))
    assert error < 0.1
    score = denoising_score(SCORE)(score_parameters(state.params, schedule, level), jnp.asarray(z))
    np.testing.assert_allclose(score, -predicted / schedule.noise[level], atol=1e-5)


def test_ancestral_samples_have_the_moments_of_the_data(gaussian_score):
    schedule, state, _ = gaussian_score
    samples = ancestral_samples(jax.random.key(2), state.params, schedule, 4000, 2, SCORE)
    # The standard error of a mean is 0.016, of a variance 0.022; the network adds its own.
    np.testing.assert_allclose(samples.mean(0), 0, atol=0.1)
    np.testing.assert_allclose(np.cov(samples.T), np.eye(2), atol=0.15)


def test_a_conservative_field_is_a_gradient():
    settings = DiffusionSettings(hidden_size=8, hidden_layers=2, conservative=True)
    state = start_diffusion(jax.random.key(0), 3, settings)
    network = noise_network(settings)
    z = jax.random.normal(jax.random.key(1), (3,))
    jacobian = jax.jacobian(lambda z: network(state.params, z[None], jnp.asarray(0.5))[0])(z)
    np.testing.assert_allclose(jacobian, jacobian.T, atol=1e-6)
    state, losses = continue_diffusion(
        state, np.ones((8, 3)), jax.random.key(2), DiffusionSchedule.linear(steps=10), settings, steps=2
    )
    assert np.all(np.isfinite(losses))
