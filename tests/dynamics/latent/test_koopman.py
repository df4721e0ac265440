"""Dynamic mode decomposition: exact systems, deeptime, the Lyapunov equation, stability, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxlab.dynamics.latent import (
    dynamic_mode_decomposition,
    dynamic_modes,
    fit_koopman,
    relaxation_times,
    rollout,
    snapshot_pairs,
    stabilize,
    stationary_covariance,
)


def system(d: int = 4, radius: float = 0.95, seed: int = 0) -> np.ndarray:
    matrix = np.random.default_rng(seed).normal(size=(d, d))
    return matrix * radius / np.abs(np.linalg.eigvals(matrix)).max()


def noiseless(matrix: np.ndarray, steps: int = 12, seed: int = 1) -> np.ndarray:
    states = [np.random.default_rng(seed).normal(size=len(matrix))]
    for _ in range(steps):
        states.append(matrix @ states[-1])
    return np.array(states)


@pytest.mark.usefixtures("float64")
def test_a_noiseless_linear_system_is_found_exactly():
    matrix = system()
    operator = dynamic_mode_decomposition(*snapshot_pairs(noiseless(matrix)), rank=4)
    # The condition of twelve decaying states is about 1e3.
    np.testing.assert_allclose(operator.matrix.T, matrix, atol=1e-8)


@pytest.mark.usefixtures("float64")
def test_rank_r_data_are_rolled_out_by_rank_r():
    rng = np.random.default_rng(2)
    basis = np.linalg.qr(rng.normal(size=(6, 2)))[0]
    matrix = basis @ system(2, 0.99) @ basis.T
    states = noiseless(matrix, 10)[1:]  # within the plane from here on
    operator = dynamic_mode_decomposition(*snapshot_pairs(states), rank=2)
    z = states[0]
    for expected in states[1:]:
        z = z @ operator.matrix
        np.testing.assert_allclose(z, expected, atol=1e-9)
    with pytest.raises(ValueError, match="the data support only rank 2 in float64, got rank 3"):
        dynamic_mode_decomposition(*snapshot_pairs(states), rank=3)
    assert dynamic_mode_decomposition(*snapshot_pairs(states)).input_factor.shape == (6, 2)


@pytest.mark.usefixtures("float64")
def test_modes_are_eigenvectors_largest_first():
    matrix = system()
    values, modes = dynamic_modes(dynamic_mode_decomposition(*snapshot_pairs(noiseless(matrix))))
    np.testing.assert_allclose(matrix @ modes, modes * values, atol=1e-8)
    np.testing.assert_allclose(np.sort_complex(values), np.sort_complex(np.linalg.eigvals(matrix)), atol=1e-8)
    assert np.all(np.diff(np.abs(values)) < 1e-8)
    np.testing.assert_allclose(relaxation_times(values, dt=0.5), -0.5 / np.log(np.abs(values)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rank", [2, 5])
def test_eigenvalues_are_those_of_deeptime(rank):
    deeptime = pytest.importorskip("deeptime.decomposition", reason="needs the peers extra: deeptime")
    rng = np.random.default_rng(3)
    x = rng.normal(size=(40, 5)) * [5, 4, 3, 2, 1]
    y = x @ system(5).T + 0.1 * rng.normal(size=x.shape)
    peer = deeptime.DMD(mode="standard", rank=rank).fit_fetch((x, y))
    ours = dynamic_modes(dynamic_mode_decomposition(x, y, rank=rank))[0]
    np.testing.assert_allclose(np.sort_complex(ours), np.sort_complex(peer.eigenvalues), atol=1e-10)


@pytest.mark.usefixtures("float64")
def test_stationary_covariance_solves_the_lyapunov_equation():
    matrix, factor = system(), np.tril(np.random.default_rng(4).normal(size=(4, 4)))
    operator = dynamic_mode_decomposition(*snapshot_pairs(noiseless(matrix)))
    expected = scipy.linalg.solve_discrete_lyapunov(matrix, factor @ factor.T)
    np.testing.assert_allclose(stationary_covariance(operator, jnp.asarray(factor)), expected, rtol=1e-6)


def test_a_rollout_settles_at_the_stationary_covariance():
    """10^5 steps, with at most 20 dependent ones after another: about 3 % of error, of which 5 % are allowed."""
    rng = np.random.default_rng(5)
    matrix = system(3, 0.8)
    z = np.zeros((3000, 3))
    for t in range(1, len(z)):
        z[t] = matrix @ z[t - 1] + [1.0, 0.5, 0.1] * rng.normal(size=3)
    propagator = fit_koopman(*snapshot_pairs(z))
    found = rollout(propagator, np.zeros((10, 3)), 10_000, key=jax.random.key(0))
    covariance = np.cov(found.states().T)
    expected = np.asarray(stationary_covariance(propagator.operator, propagator.noise))
    assert np.linalg.norm(covariance - expected) < 0.05 * np.linalg.norm(expected)
    # With full rank and residuals of the fit itself this is the covariance of the data, up to its ends.
    assert np.linalg.norm(expected - np.cov(z.T)) < 0.01 * np.linalg.norm(expected)


def test_noise_comes_from_the_held_out_pairs():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(200, 2))
    held_out = (x, 0.5 * x + rng.normal(size=x.shape) * [0.3, 0.0])
    propagator = fit_koopman(x, 0.5 * x, held_out=held_out, noise="diag")
    np.testing.assert_allclose(np.diag(propagator.noise), [np.std(held_out[1][:, 0] - 0.5 * x[:, 0]), 0], atol=1e-5)
    with pytest.raises(ValueError, match="held-out pairs must have the 2 latents of the others, got 3"):
        fit_koopman(x, 0.5 * x, held_out=(np.ones((4, 3)), np.ones((4, 3))))
    fixed = fit_koopman(x, 0.5 * x, noise="fixed", sigma=0.25)
    np.testing.assert_allclose(fixed.noise, 0.25 * np.eye(2))


def test_the_mean_is_that_of_the_operator_whatever_its_rank():
    """Below half of the width by two thin products, above by one; both in float32."""
    rng = np.random.default_rng(9)
    x, y = rng.normal(size=(2, 60, 6))
    for rank in (2, 3, 5):
        propagator = fit_koopman(x, y, rank=rank)
        np.testing.assert_allclose(propagator.mean(jnp.asarray(x)), x @ propagator.operator.matrix, atol=1e-5)


def test_stabilize_pulls_back_only_what_is_too_large():
    angle = 0.3
    rotation = 1.02 * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = np.zeros((3, 3))
    matrix[:2, :2], matrix[2, 2] = rotation, 0.5
    basis = np.eye(3) + 0.3 * np.random.default_rng(7).normal(size=(3, 3))
    matrix = basis @ matrix @ np.linalg.inv(basis)
    x = np.random.default_rng(8).normal(size=(50, 3))
    propagator = fit_koopman(x, x @ matrix.T)
    values = dynamic_modes(stabilize(propagator).operator)[0]
    expected = [0.999 * np.exp(1j * angle), 0.999 * np.exp(-1j * angle), 0.5]
    np.testing.assert_allclose(np.sort_complex(values), np.sort_complex(expected), atol=1e-5)
    stable = fit_koopman(x, x @ (0.5 * matrix).T)
    assert stabilize(stable) is stable
    with pytest.raises(ValueError, match=r"largest must be in \(0, 1\), got 1"):
        stabilize(propagator, largest=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones((5, 2)), np.ones((5, 2)), 3), r"rank must be in \[1, 2\] for 5 pairs of 2 latents, got 3"),
        ((np.ones((1, 2)), np.ones((1, 2)), 2), r"rank must be in \[1, 1\] for 1 pairs of 2 latents, got 2"),
        ((np.ones((5, 2)), np.ones((4, 2)), 1), r"same number of snapshots and features, got \(5, 2\) and \(4, 2\)"),
        ((np.full((5, 2), np.nan), np.ones((5, 2)), 1), r"x must be finite; 10 of its values are not, the first at"),
        ((np.zeros((5, 2)), np.ones((5, 2)), None), "the states are all zero"),
    ],
)
def test_bad_pairs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        dynamic_mode_decomposition(*arguments[:2], rank=arguments[2])


def test_times_need_a_positive_step():
    with pytest.raises(ValueError, match="dt must be positive and finite, got 0"):
        relaxation_times(jnp.ones(2), dt=0)
