"""Reduced-rank regression against its equations in NumPy, its dual form, kooplearn and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxlab.dynamics import (
    GaussianKernel,
    delay_embedding,
    generator_spectrum,
    kernel_reduced_rank_regression,
    linear_kernel,
    reduced_rank_regression,
)

pytestmark = pytest.mark.usefixtures("float64")

# Eigenvalues of kooplearn 2.0.3 on `autoregression(n=500)`, sorted by (real, imaginary):
#   Ridge(n_components=4, reduced_rank=True, alpha=1e-6, eigen_solver="dense").fit(np.vstack([x, y[-1:]])).eig()
KOOPLEARN = np.array([-0.36411836, -0.27441813 - 0.85610282j, -0.27441813 + 0.85610282j, 0.43901058])


def autoregression(n: int = 60, dimension: int = 4, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Snapshots of a stable VAR(1)."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(dimension, dimension))
    matrix *= 0.9 / np.abs(np.linalg.eigvals(matrix)).max()
    states = np.zeros((n + 1, dimension))
    for i in range(n):
        states[i + 1] = states[i] @ matrix + rng.normal(size=dimension)
    return jnp.asarray(states[:-1]), jnp.asarray(states[1:])


def sorted_spectrum(matrix: np.ndarray) -> np.ndarray:
    return np.sort_complex(np.linalg.eigvals(matrix))


def test_delay_embedding_stacks_consecutive_states() -> None:
    trajectory = jnp.arange(10.0).reshape(5, 2)
    embedded = delay_embedding(trajectory, 3)
    assert embedded.shape == (3, 6)
    np.testing.assert_array_equal(embedded[1], [2, 3, 4, 5, 6, 7])


def test_lags_are_times_and_interpolate_between_samples() -> None:
    line = (3 + 2 * jnp.arange(12) * 0.1)[None, :, None].repeat(2, axis=0)  # 3 + 2 t, a batch of two
    embedded = delay_embedding(line, (0.0, 0.2, 0.25), dt=0.1)
    assert embedded.shape == (2, 12 - 3, 3)
    np.testing.assert_allclose(embedded[0, 4], 3 + 2 * np.array([0.4, 0.6, 0.65]), rtol=1e-14)


def test_a_lag_on_the_grid_asks_for_no_further_sample() -> None:
    assert 0.05 / 0.005 != 10 or 0.15 / 0.05 != 3  # rounding is in play
    assert delay_embedding(jnp.zeros((20, 1)), (0.0, 0.15), dt=0.05).shape == (17, 2)


def test_full_rank_without_ridge_is_least_squares() -> None:
    x, y = autoregression()
    expected = np.linalg.lstsq(np.asarray(x), np.asarray(y), rcond=None)[0]
    np.testing.assert_allclose(reduced_rank_regression(x, y, 4, regularization=0.0).matrix, expected, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_reduced_rank_follows_the_equations(rank: int) -> None:
    x, y = (np.asarray(v) for v in autoregression())
    gamma = 0.1
    whitening = np.linalg.inv(scipy.linalg.sqrtm(x.T @ x / len(x) + gamma * np.eye(4))).real
    u, s, vt = np.linalg.svd(whitening @ x.T @ y / len(x))
    expected = whitening @ (u[:, :rank] * s[:rank]) @ vt[:rank]
    operator = reduced_rank_regression(jnp.asarray(x), jnp.asarray(y), rank, regularization=gamma)
    np.testing.assert_allclose(operator.matrix, expected, atol=1e-12)
    nonzero = sorted_spectrum(np.asarray(operator.core))
    full = np.linalg.eigvals(expected)
    np.testing.assert_allclose(nonzero, np.sort_complex(full[np.argsort(-abs(full))[:rank]]), atol=1e-10)


def test_default_ridge_is_relative() -> None:
    x, y = autoregression()
    largest = float(np.linalg.eigvalsh(np.asarray(x.T @ x / len(x)))[-1])
    default = reduced_rank_regression(x, y, 2).matrix
    np.testing.assert_allclose(default, reduced_rank_regression(x, y, 2, regularization=1e-6 * largest).matrix)
    np.testing.assert_allclose(default, reduced_rank_regression(1e3 * x, 1e3 * y, 2).matrix, atol=1e-10)


def test_dual_with_the_linear_kernel_is_the_primal() -> None:
    x, y = autoregression()
    primal = reduced_rank_regression(x, y, 3, regularization=0.05)
    dual = kernel_reduced_rank_regression(x, y, 3, kernel=linear_kernel, regularization=0.05)
    np.testing.assert_allclose(x.T @ dual.input_factor @ dual.output_factor.T @ y, primal.matrix, atol=1e-11)
    np.testing.assert_allclose(
        sorted_spectrum(np.asarray(dual.core)), sorted_spectrum(np.asarray(primal.core)), atol=1e-11
    )


def test_dual_solves_the_generalised_eigenproblem() -> None:
    """Literally ``L K u = s^2 (K + gamma) u``, ``u^T K (K + gamma) u = 1``, ``G = V^T M U``."""
    x, y = (np.asarray(v) for v in autoregression(n=25))
    kernel, gamma, rank, n = GaussianKernel(2.0), 1e-2, 3, 25
    gram, output_gram, cross = (
        np.asarray(kernel(jnp.asarray(a), jnp.asarray(b))) / n for a, b in ((x, x), (y, y), (y, x))
    )
    shifted = gram + gamma * np.eye(n)
    s2, u = scipy.linalg.eig(output_gram @ gram, shifted)
    u = u[:, np.argsort(-s2.real)[:rank]].real
    u = u / np.sqrt(np.sum(u * (gram @ shifted @ u), axis=0))
    expected = sorted_spectrum((gram @ u).T @ cross @ u)
    operator = kernel_reduced_rank_regression(jnp.asarray(x), jnp.asarray(y), rank, kernel=kernel, regularization=gamma)
    np.testing.assert_allclose(sorted_spectrum(np.asarray(operator.core)), expected, atol=1e-9)


def test_nystroem_with_all_points_is_the_dual() -> None:
    x, y = autoregression(n=20)
    kernel = GaussianKernel(3.0)
    dense = kernel_reduced_rank_regression(x, y, 3, kernel=kernel, regularization=1e-2)
    sketched = kernel_reduced_rank_regression(
        x, y, 3, kernel=kernel, regularization=1e-2, landmarks=jnp.concatenate([x, y[-1:]])
    )
    np.testing.assert_allclose(
        sorted_spectrum(np.asarray(sketched.core)), sorted_spectrum(np.asarray(dense.core)), atol=1e-7
    )  # null directions of the Gram matrix (condition 1e14) are cut


def test_eigenvalues_of_kooplearn_are_matched() -> None:
    x, y = autoregression(n=500)
    ours = generator_spectrum(reduced_rank_regression(x, y, 4, regularization=1e-6), dt=1.0)
    # 2e-7 is the agreement the two solvers (eigh of a pencil, SVD after whitening) reach in double precision.
    np.testing.assert_allclose(np.sort_complex(np.exp(ours.eigenvalues)), KOOPLEARN, atol=2e-7)


def test_kooplearn_agrees_when_installed() -> None:
    linear_model = pytest.importorskip("kooplearn.linear_model", reason="kooplearn is not installed")
    kernel_model = pytest.importorskip("kooplearn.kernel")
    x, y = autoregression(n=300, seed=3)
    path = np.vstack([x, y[-1:]])
    peer = linear_model.Ridge(n_components=4, reduced_rank=True, alpha=1e-6, eigen_solver="dense").fit(path)
    ours = generator_spectrum(reduced_rank_regression(x, y, 4, regularization=1e-6))
    np.testing.assert_allclose(np.sort_complex(np.exp(ours.eigenvalues)), np.sort_complex(peer.eig()), atol=2e-7)

    x, y = x[:60], y[:60]
    peer = kernel_model.KernelRidge(
        n_components=3, reduced_rank=True, kernel="rbf", gamma=1 / 8, alpha=1e-2, eigen_solver="dense"
    ).fit(path[:61])
    operator = kernel_reduced_rank_regression(x, y, 3, kernel=GaussianKernel(2.0), regularization=1e-2)
    ours = np.sort_complex(np.exp(generator_spectrum(operator).eigenvalues))
    np.testing.assert_allclose(ours, np.sort_complex(peer.eig()), atol=2e-7)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: reduced_rank_regression(x, y[:-1], 2), "same number of snapshots"),
        (lambda x, y: reduced_rank_regression(x, y, 0), r"rank must be in \[1, 4\].*got 0"),
        (lambda x, y: reduced_rank_regression(x, y, 5), r"rank must be in \[1, 4\].*got 5"),
        (lambda x, y: reduced_rank_regression(x[:3], y[:3], 4), r"rank must be in \[1, 3\]"),
        (lambda x, y: reduced_rank_regression(x.at[7, 1].set(jnp.nan), y, 2), r"x must be finite.*\(7, 1\)"),
        (
            lambda x, y: reduced_rank_regression(x, y, 2, regularization=-1.0),
            "regularization must be >= 0 and finite, got -1",
        ),
        (lambda x, y: kernel_reduced_rank_regression(x, y[:-1], 2), "same number of snapshots"),
        (lambda x, y: kernel_reduced_rank_regression(x, y, 61), r"rank must be in \[1, 60\]"),
        (lambda x, y: kernel_reduced_rank_regression(x, y, 4, landmarks=x[:3]), r"rank must be in \[1, 3\]"),
        (lambda x, y: GaussianKernel(0.0), "bandwidth must be positive and finite, got 0"),
        (lambda x, y: delay_embedding(x.at[0, 0].set(jnp.inf), 2), r"trajectory must be finite.*\(0, 0\)"),
        (lambda x, y: delay_embedding(x, 0), "at least one sample, got 0"),
        (lambda x, y: delay_embedding(x, 60), "needs at least 61 samples, got 60"),
        (lambda x, y: delay_embedding(x, (0.0, 0.1), dt=0.0), "dt must be positive and finite, got 0"),
        (lambda x, y: delay_embedding(x, (0.2, 0.1), dt=0.1), "lags must be increasing"),
        (lambda x, y: delay_embedding(x, (-0.1, 0.1), dt=0.1), "lags must be increasing, >= 0 and finite"),
        (lambda x, y: delay_embedding(x, (), dt=0.1), "lags must be increasing"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(*autoregression())


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.int32])
def test_what_has_no_decomposition_is_computed_in_single_precision(dtype) -> None:
    path = jnp.asarray(np.cumsum(np.random.default_rng(0).integers(-3, 4, (40, 2)), axis=0)).astype(dtype)
    exact = path.astype(jnp.float32)
    found, expected = (reduced_rank_regression(p[:-1], p[1:], 2) for p in (path, exact))
    assert found.matrix.dtype == jnp.float32
    np.testing.assert_array_equal(found.matrix, expected.matrix)
    kernel = GaussianKernel(20.0)
    dual = [kernel_reduced_rank_regression(p[:-1], p[1:], 2, kernel=kernel, regularization=1e-3) for p in (path, exact)]
    np.testing.assert_array_equal(dual[0].core, dual[1].core)


def test_a_lag_between_two_integers_is_not_cut_off() -> None:
    np.testing.assert_array_equal(delay_embedding(jnp.arange(3)[:, None], [0.0, 0.5]), [[0, 0.5], [1, 1.5]])


def test_numpy_arrays_are_taken() -> None:
    path = np.cumsum(np.random.default_rng(0).normal(size=(30, 2)), axis=0)
    found = reduced_rank_regression(path[:-1], path[1:], 1)
    np.testing.assert_array_equal(
        found.matrix, reduced_rank_regression(jnp.asarray(path[:-1]), jnp.asarray(path[1:]), 1).matrix
    )


def line(scale: float = 1.0) -> jax.Array:
    """Two channels that hold the same signal: one direction."""
    return scale * jnp.cumsum(jax.random.normal(jax.random.key(0), (30, 1)), axis=0) * jnp.ones(2)


@pytest.mark.parametrize("precision", [jnp.float32, jnp.float64])
def test_a_rank_beyond_that_of_the_data_is_refused(precision) -> None:
    """Otherwise the second direction is rounding, and its eigenvalue an accident."""
    same = line().astype(precision)
    reduced_rank_regression(same[:-1], same[1:], 1)
    for fit in (reduced_rank_regression, kernel_reduced_rank_regression):
        with pytest.raises(ValueError, match=f"support only rank 1 in {precision.__name__}, got rank 2"):
            fit(same[:-1], same[1:], 2)
    weak = same.at[:, 1].multiply(1.01).at[::3, 1].add(1e-2)  # a second direction a hundred times weaker counts
    reduced_rank_regression(weak[:-1], weak[1:], 2)


def test_one_deficient_system_of_a_batch_is_enough() -> None:
    good = jnp.cumsum(jax.random.normal(jax.random.key(1), (30, 2)), axis=0)
    batch = jnp.stack([good, line()])
    with pytest.raises(ValueError, match="support only rank 1"):
        reduced_rank_regression(batch[:, :-1], batch[:, 1:], 2)


@pytest.mark.parametrize("scale", [0.0, 1e-170, 1e170])
def test_squares_that_overflow_or_vanish_are_refused(scale) -> None:
    path = line(scale)
    with pytest.raises(ValueError, match="squares of the values overflow or vanish in float64"):
        reduced_rank_regression(path[:-1], path[1:], 1)


def test_a_ridge_below_zero_gives_nan_under_jit() -> None:
    path = line()
    found = jax.jit(lambda ridge: reduced_rank_regression(path[:-1], path[1:], 1, regularization=ridge).matrix)
    assert np.isnan(found(-1.0)).all()
    assert np.isfinite(found(0.1)).all()


def test_bandwidths_are_numbers_that_hash() -> None:
    assert hash(GaussianKernel(np.float64(2))) == hash(GaussianKernel(2.0))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: delay_embedding(p[:, :0], 1), ValueError, r"\[time, channel\], got shape \(30, 0\)"),
        (lambda p: delay_embedding(p, [0.0, np.nan]), ValueError, "increasing, >= 0 and finite"),
        (lambda p: delay_embedding(p, [0.0, np.inf]), ValueError, "increasing, >= 0 and finite"),
        (lambda p: delay_embedding(p, [0.0, 1.0], dt=np.inf), ValueError, "dt must be positive and finite, got inf"),
        (lambda p: delay_embedding(p, [0.0, 1e-9]), ValueError, "differ by more than 1e-6 sampling steps"),
        (lambda p: reduced_rank_regression(p, p, 1, regularization=np.inf), ValueError, "and finite, got inf"),
        (lambda p: GaussianKernel(np.inf), ValueError, "bandwidth must be positive and finite, got inf"),
        (
            lambda p: kernel_reduced_rank_regression(p, p, 1, landmarks=p.at[2, 0].set(jnp.nan)),
            ValueError,
            r"landmarks must be finite; 1 of its values are not, the first at \(2, 0\)",
        ),
    ],
)
def test_further_bad_input_is_named(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call(line())
