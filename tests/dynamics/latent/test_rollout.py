"""Rollouts: what a scan gives, divergence, blocks, storage; pairs, scales and noise before them."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxlab.dynamics.latent import (
    AdditivePropagator,
    Propagator,
    fit_standardizer,
    noise_factor,
    rollout,
    snapshot_pairs,
)
from jaxlab.dynamics.latent import rollout as rollout_function
from jaxlab.dynamics.latent.rollout import _normal, _run


@flax.struct.dataclass
class Walk:
    """``factor z + 0.1 noise``, summing several draws."""

    factor: jax.Array
    draws: int = flax.struct.field(pytree_node=False, default=1)

    def step(self, z, noise):
        return self.factor * z + 0.1 * noise.sum(0)


def test_protocol_is_what_a_propagator_needs():
    assert isinstance(Walk(jnp.ones(())), Propagator)


def test_states_follow_the_recursion_and_start_is_not_among_them():
    found = rollout(Walk(jnp.asarray(0.5)), np.ones((3, 2)), 40, key=jax.random.key(1))
    assert found.path.shape == (3, 40, 2)
    noise = np.asarray(found.path)[:, 1:] - 0.5 * np.asarray(found.path)[:, :-1]
    # 234 draws of deviation 0.1: the sample deviation has a standard error of 0.0046.
    assert abs(noise.std() - 0.1) < 0.02
    assert np.all(found.lengths == 40)
    again = rollout(Walk(jnp.asarray(0.5)), np.ones((3, 2)), 40, key=jax.random.key(1))
    np.testing.assert_array_equal(found.path, again.path)


def test_blocks_do_not_change_the_recursion():
    """Within the first block the numbers are those of a rollout of the same block; the last block may be shorter."""
    start, key = jnp.ones((2, 3)), jax.random.key(0)
    of_block = {"block": 4, "dtype": jnp.float32}
    long, lengths = _run(Walk(jnp.asarray(0.9), draws=2), start, key, jnp.asarray(jnp.inf), steps=11, **of_block)
    short, _ = _run(Walk(jnp.asarray(0.9), draws=2), start, key, jnp.asarray(jnp.inf), steps=8, **of_block)
    np.testing.assert_array_equal(long[:, :8], short)
    assert lengths.tolist() == [11, 11]
    increments = np.asarray(long)[:, 1:] - 0.9 * np.asarray(long)[:, :-1]
    assert len(np.unique(increments.round(6))) == increments.size  # no block repeats another


@flax.struct.dataclass
class Added(Walk):
    """The same, its noise scaled apart."""

    def forcing(self, noise):
        return 0.1 * noise

    def advance(self, z, forcing):
        return self.factor * z + forcing.sum(0)


def test_noise_scaled_for_a_block_is_noise_scaled_in_each_step():
    assert isinstance(Added(jnp.ones(())), AdditivePropagator)
    assert not isinstance(Walk(jnp.ones(())), AdditivePropagator)
    plain, added = (
        rollout(kind(jnp.asarray(0.5), draws=2), np.ones((3, 2)), 40, key=jax.random.key(1)) for kind in (Walk, Added)
    )
    np.testing.assert_allclose(plain.path, added.path, atol=1e-6)  # a sum in another order


def test_random_numbers_are_normal_and_those_of_their_key():
    """Kolmogorov and Smirnov's distance of 100 001 numbers exceeds 0.0062 once in 1000 keys."""
    numbers = np.asarray(_normal(jax.random.key(0), 100_001, jnp.float32), np.float64)
    assert scipy.stats.kstest(numbers, "norm").statistic < 0.0062
    half = len(numbers) // 2
    # Halves of one output of the cipher, neighbours, and numbers of another key: a standard error of 0.0045 and 0.0032.
    assert abs(np.corrcoef(numbers[:half], numbers[half + 1 :])[0, 1]) < 0.015
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.011
    other = np.asarray(_normal(jax.random.key(1), 100_001, jnp.float32))
    assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.011
    np.testing.assert_array_equal(_normal(jax.random.key(0), 100_001, jnp.float32), numbers.astype(np.float32))


def test_a_replica_that_stopped_stays_so_in_later_blocks():
    """It doubles and passes 100 at the seventh step, in the second of three blocks."""
    start, guard = jnp.array([[0.0], [1.0]]), jnp.asarray(100.0)
    calm = Walk(jnp.array([[0.5], [2.0]]))
    path, lengths = _run(calm, start, jax.random.key(0), guard, steps=14, block=5, dtype=jnp.float32)
    assert lengths.tolist() == [14, 6]
    assert np.all(np.isfinite(path[0]))
    assert np.isnan(path[1, :, 0]).tolist() == [False] * 6 + [True] * 8


def test_a_replica_that_leaves_stops_alone():
    found = rollout(Walk(jnp.asarray(2.0)), np.array([[0.0], [1.0]]), 30, key=jax.random.key(0), guard=100.0)
    first, second = found.lengths.tolist()
    assert second == 6  # 2^7 = 128 is beyond
    assert 6 < first < 30  # grows from the noise
    path = np.asarray(found.path)
    assert np.all(np.isfinite(path[1, :6]))
    assert np.all(np.isnan(path[1, 6:]))
    assert np.nanmax(np.abs(path)) <= 100
    assert found.states().shape == (first + second, 1)
    assert np.all(np.isfinite(found.states()))


def test_without_a_guard_overflow_stops():
    found = rollout(Walk(jnp.asarray(1e10)), np.ones((1, 1)), 6, key=jax.random.key(0))
    assert found.lengths.tolist() == [3]  # 1e40 is no float32


def test_paths_are_stored_in_the_type_asked_for():
    found = rollout(Walk(jnp.asarray(0.5)), np.ones((2, 2)), 5, key=jax.random.key(0), dtype=jnp.bfloat16)
    exact = rollout(Walk(jnp.asarray(0.5)), np.ones((2, 2)), 5, key=jax.random.key(0))
    assert found.path.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.path, exact.path.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "at least one replica and one step, got 2 and 0"),
        ({"start": np.zeros((0, 2))}, "at least one replica and one step, got 0 and 3"),
        ({"start": np.full((1, 2), np.nan)}, "start must be finite; 2 of its values"),
        ({"guard": 0.0}, "guard must be positive, got 0.0"),
    ],
)
def test_bad_rollouts_are_refused(options, message):
    arguments = {"start": np.zeros((2, 2)), "steps": 3, "guard": 1.0} | options
    with pytest.raises(ValueError, match=message):
        rollout_function(Walk(jnp.ones(())), **arguments, key=jax.random.key(0))


def test_states_of_another_width_are_refused():
    with pytest.raises(ValueError, match="the propagator does not take states of 2 latents"):
        rollout(Walk(jnp.ones(3)), np.zeros((4, 2)), 3, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"must keep the shape of states \(4, 1\), it gives \(4, 3\)"):
        rollout(Walk(jnp.ones(3)), np.zeros((4, 1)), 3, key=jax.random.key(0))


def test_pairs_never_cross_from_one_trajectory_into_the_next():
    x, y = snapshot_pairs([np.arange(4.0)[:, None], 10 + np.arange(3.0)[:, None], np.zeros((1, 1))], skip=2)
    assert x[:, 0].tolist() == [0, 1, 10]
    assert y[:, 0].tolist() == [2, 3, 12]


@pytest.mark.parametrize(
    ("trajectories", "skip", "message"),
    [
        (np.zeros((4, 1)), 4, r"skip must be in \[1, 3\] for trajectories of at most 4 frames, got 4"),
        (np.zeros((4, 1)), 0, r"skip must be in \[1, 3\]"),
        ([np.zeros((4, 1)), np.zeros((4, 2))], 1, r"one latent width, got \[1, 2\]"),
        ([], 1, "no trajectory was given"),
        (np.full((4, 1), np.inf), 1, "a trajectory must be finite"),
    ],
)
def test_bad_trajectories_are_refused(trajectories, skip, message):
    with pytest.raises(ValueError, match=message):
        snapshot_pairs(trajectories, skip=skip)


def correlated(t: int = 500) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(t, 3)) @ np.array([[2.0, 0, 0], [1, 0.5, 0], [0, 0, 0.1]]) + [1, 2, 3]


def test_standard_scale_is_per_dimension_and_comes_back():
    z = correlated()
    standardizer = fit_standardizer(z)
    u = np.asarray(standardizer.forward(z))
    np.testing.assert_allclose(u.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(u.std(0), 1, atol=1e-4)
    np.testing.assert_allclose(standardizer.inverse(u), z, atol=1e-4)


def test_whitened_latents_have_the_identity_as_covariance():
    z = correlated()
    standardizer = fit_standardizer(z, mode="whiten")
    u = np.asarray(standardizer.forward(z))
    np.testing.assert_allclose(np.cov(u.T, bias=True), np.eye(3), atol=1e-3)
    np.testing.assert_allclose(standardizer.inverse(u), z, atol=1e-3)


def test_directions_without_variance_are_left_out():
    z = np.concatenate([correlated(), correlated()[:, :1]], axis=1)  # the last repeats the first
    standardizer = fit_standardizer(z, mode="whiten")
    assert standardizer.forward(z).shape == (500, 3)
    np.testing.assert_allclose(standardizer.inverse(standardizer.forward(z)), z, atol=1e-3)


@pytest.mark.parametrize("mode", ["standard", "whiten"])
def test_a_constant_dimension_warns_and_stays(mode):
    z = correlated()
    z[:, 1] = 7.3
    with pytest.warns(UserWarning, match="1 of 3 latent dimensions do not vary, the first is 1"):
        standardizer = fit_standardizer(z, mode=mode)
    u = standardizer.forward(z)
    assert np.all(np.isfinite(u))
    np.testing.assert_allclose(np.asarray(standardizer.inverse(u))[:, 1], 7.3, rtol=1e-6)


@pytest.mark.parametrize(
    ("z", "options", "message"),
    [
        (np.zeros((1, 2)), {}, "at least 2 frames, got 1"),
        (np.full((3, 2), np.nan), {}, "latents must be finite"),
        (np.eye(3), {"epsilon": -1.0}, "epsilon must be >= 0 and finite, got -1.0"),
    ],
)
def test_bad_standardizers_are_refused(z, options, message):
    with pytest.raises(ValueError, match=message):
        fit_standardizer(z, **options)


def test_noise_keeps_what_its_kind_says():
    residuals = correlated() - 1.5
    covariance = np.cov(residuals.T, bias=True)
    factors = {kind: np.asarray(noise_factor(residuals, kind=kind)) for kind in ("iso", "diag", "full")}
    products = {kind: factor @ factor.T for kind, factor in factors.items()}
    np.testing.assert_allclose(products["full"], covariance, atol=1e-4)
    np.testing.assert_allclose(products["diag"], np.diag(np.diag(covariance)), atol=1e-4)
    np.testing.assert_allclose(products["iso"], np.trace(covariance) / 3 * np.eye(3), atol=1e-4)
    np.testing.assert_array_equal(noise_factor(residuals, kind="fixed", sigma=0.1), 0.1 * np.eye(3, dtype=np.float32))


def test_noise_of_few_residuals_is_finite():
    residuals = np.random.default_rng(0).normal(size=(3, 10)) * 1e3
    factor = np.asarray(noise_factor(residuals))
    np.testing.assert_allclose(factor @ factor.T, np.cov(residuals.T, bias=True), rtol=1e-3, atol=10)


@pytest.mark.parametrize(
    ("kind", "sigma", "message"),
    [
        ("fixed", None, "sigma goes with kind 'fixed' and nothing else, got kind 'fixed' and sigma None"),
        ("full", 0.1, "sigma goes with kind 'fixed'"),
        ("fixed", -1.0, "sigma must be >= 0 and finite, got -1.0"),
    ],
)
def test_bad_noise_is_refused(kind, sigma, message):
    with pytest.raises(ValueError, match=message):
        noise_factor(np.ones((3, 2)), kind=kind, sigma=sigma)
    with pytest.raises(ValueError, match="at least 2 residuals, got 1"):
        noise_factor(np.ones((1, 2)))
