"""Spectra: closed forms, invariance to the sampling rate, round trips, the host route, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.dynamics import (
    GaussianKernel,
    KernelSpectrum,
    LowRankOperator,
    Spectrum,
    biorthogonalize,
    eigenvector_condition,
    generator_spectrum,
    kernel_reduced_rank_regression,
    landmark_coordinates,
    spectral_grassmann_distance,
    to_operator,
    trajectory_spectrum,
    unit_norm,
)
from jaxlab.dynamics.spectrum import _host_eig

pytestmark = pytest.mark.usefixtures("float64")


def random_matrix(seed: int = 0, d: int = 5, shape: tuple[int, ...] = ()) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (*shape, d, d)) / jnp.sqrt(d)


def test_rotation_with_scaling_has_the_closed_form() -> None:
    rho, theta, dt = 0.9, 0.7, 0.1
    block = rho * jnp.array([[jnp.cos(theta), -jnp.sin(theta)], [jnp.sin(theta), jnp.cos(theta)]])
    found = np.sort_complex(generator_spectrum(block, dt=dt).eigenvalues)
    np.testing.assert_allclose(found, (np.log(rho) + np.array([-1j, 1j]) * theta) / dt, rtol=1e-13)


def test_vectors_satisfy_their_equations() -> None:
    matrix = random_matrix()
    s = generator_spectrum(matrix, dt=0.5)
    mu = jnp.exp(s.eigenvalues * 0.5)
    np.testing.assert_allclose(matrix @ s.right, s.right * mu, atol=1e-12)
    np.testing.assert_allclose(s.left.conj().T @ matrix, mu[:, None] * s.left.conj().T, atol=1e-12)
    np.testing.assert_array_less(-1e-12, -np.diff(np.abs(mu)))  # largest modulus first


def test_low_rank_operator_has_the_spectrum_of_its_matrix() -> None:
    rng = np.random.default_rng(1)
    operator = LowRankOperator(jnp.asarray(rng.normal(size=(6, 3))), jnp.asarray(rng.normal(size=(6, 3))))
    thin, dense = generator_spectrum(operator), generator_spectrum(operator.matrix, rank=3)
    np.testing.assert_allclose(np.sort_complex(thin.eigenvalues), np.sort_complex(dense.eigenvalues), atol=1e-10)
    assert float(spectral_grassmann_distance(thin, dense)) < 1e-6


def test_real_negative_eigenvalue_has_one_convention() -> None:
    for sign in (0.0, -0.0):
        flip = jnp.array([[-0.5, sign], [0.0, 0.25]])
        found = generator_spectrum(flip, dt=0.5).eigenvalues
        np.testing.assert_allclose(found, [(np.log(0.5) + 1j * np.pi) / 0.5, np.log(0.25) / 0.5], rtol=1e-14)


def test_sampling_twice_as_slowly_changes_nothing_below_nyquist() -> None:
    theta = 0.4  # angle per step, so that 2 theta < pi
    block = 0.95 * jnp.array([[jnp.cos(theta), -jnp.sin(theta)], [jnp.sin(theta), jnp.cos(theta)]])
    basis = random_matrix(3, 2) + 2 * jnp.eye(2)
    matrix = basis @ block @ jnp.linalg.inv(basis)
    fast, slow = generator_spectrum(matrix, dt=0.1), generator_spectrum(matrix @ matrix, dt=0.2)
    np.testing.assert_allclose(np.sort_complex(fast.eigenvalues), np.sort_complex(slow.eigenvalues), atol=1e-12)
    assert float(spectral_grassmann_distance(fast, slow)) < 1e-7


def test_trajectories_at_two_rates_share_a_spectrum() -> None:
    def oscillator(rate: float) -> jax.Array:
        t = jnp.arange(int(6 * rate)) / rate
        return jnp.stack([jnp.exp(-0.3 * t) * jnp.sin(2 * jnp.pi * t), jnp.exp(-0.1 * t) * jnp.cos(jnp.pi * t)], 1)

    lags = tuple(np.linspace(0, 0.25, 6))
    found = [
        trajectory_spectrum(oscillator(rate), 4, dt=1 / rate, lags=lags, regularization=1e-12).eigenvalues
        for rate in (100, 137)  # at 137 Hz no lag but the first is on the grid
    ]
    expected = np.sort_complex([-0.3 - 2j * np.pi, -0.3 + 2j * np.pi, -0.1 - 1j * np.pi, -0.1 + 1j * np.pi])
    for values in found:
        np.testing.assert_allclose(np.sort_complex(values), expected, atol=1e-6)  # the ridge of 1e-12


def test_padding_behind_shorter_trajectories_has_no_effect() -> None:
    path = jnp.cumsum(jax.random.normal(jax.random.key(7), (2, 30, 2)), axis=1)
    padded = path.at[1, 22:].set(77.0)
    found = trajectory_spectrum(padded, 3, dt=0.1, lags=2, lengths=jnp.array([30, 22]))
    for k, length in enumerate((30, 22)):
        expected = trajectory_spectrum(path[k, :length], 3, dt=0.1, lags=2)
        np.testing.assert_allclose(found.eigenvalues[k], expected.eigenvalues, rtol=1e-9)


def test_operator_is_recovered_from_its_spectrum() -> None:
    matrix = random_matrix(4)
    np.testing.assert_allclose(to_operator(generator_spectrum(matrix, dt=0.2), dt=0.2), matrix, atol=1e-12)
    s = biorthogonalize(generator_spectrum(matrix))
    np.testing.assert_allclose(s.left.conj().T @ s.right, np.eye(5), atol=1e-12)
    np.testing.assert_allclose(jnp.linalg.norm(s.right, axis=0), 1, rtol=1e-14)


def test_batches_equal_single_systems_under_jit_and_vmap() -> None:
    matrices, dt = random_matrix(5, shape=(3,)), jnp.array([0.1, 0.2, 0.3])
    batch = generator_spectrum(matrices, dt=dt)
    mapped = jax.jit(jax.vmap(lambda m, step: generator_spectrum(m, dt=step)))(matrices, dt)
    for k in range(3):
        single = generator_spectrum(matrices[k], dt=dt[k])
        for one, other in ((batch, single), (mapped, single)):
            np.testing.assert_allclose(one.eigenvalues[k], other.eigenvalues, atol=1e-10)


def test_host_route_is_the_device_route() -> None:
    """What an accelerator runs, forced here: same spectra under jit and vmap, NaN for NaN."""
    matrices = random_matrix(6, shape=(4,))
    values, vectors = jax.jit(jax.vmap(_host_eig))(matrices)
    np.testing.assert_allclose(np.sort_complex(values), np.sort_complex(jnp.linalg.eig(matrices)[0]), atol=1e-12)
    np.testing.assert_allclose(matrices @ vectors, vectors * values[:, None, :], atol=1e-12)
    values, vectors = _host_eig(matrices.at[1].set(jnp.nan))
    assert np.isnan(values[1]).all()
    assert np.isfinite(values[0]).all()
    assert np.isfinite(vectors[2]).all()


def test_landmark_coordinates_keep_distances() -> None:
    rng = np.random.default_rng(2)
    path = [jnp.asarray(np.cumsum(rng.normal(size=(13, 2)), axis=0)) for _ in range(2)]
    systems = [
        generator_spectrum(
            kernel_reduced_rank_regression(p[:-1], p[1:], 3, kernel=GaussianKernel(1.5), regularization=1e-2)
        )
        for p in path
    ]
    assert all(isinstance(s, KernelSpectrum) for s in systems)
    everything = jnp.concatenate(path)
    mapped = [landmark_coordinates(s, everything) for s in systems]
    np.testing.assert_allclose(spectral_grassmann_distance(*mapped), spectral_grassmann_distance(*systems), rtol=1e-6)
    np.testing.assert_allclose(
        jnp.linalg.norm(landmark_coordinates(unit_norm(systems[0]), everything).right, axis=0), 1
    )


def test_nearly_defective_operators_warn() -> None:
    jordan = jnp.array([[0.5, 1.0], [0.0, 0.5 + 1e-12]])
    with pytest.warns(RuntimeWarning, match="nearly defective operator.*condition number"):
        s = generator_spectrum(jordan)
    assert float(eigenvector_condition(s)) > 1e8
    orthogonal = Spectrum(jnp.ones(2, complex), jnp.eye(2, dtype=complex), jnp.eye(2, dtype=complex))
    np.testing.assert_allclose(eigenvector_condition(orthogonal), 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: generator_spectrum(jnp.diag(jnp.array([0.5, 1e-9]))), "eigenvalue ~0 .*1.0e-09.* lower the rank"),
        (lambda: generator_spectrum(jnp.eye(2), dt=0.0), "dt must be positive and finite, got 0"),
        (lambda: generator_spectrum(jnp.eye(2), dt=jnp.array(-1.0)), "dt must be positive and finite, got -1"),
        (lambda: generator_spectrum(jnp.eye(2), rank=3), r"rank must be in \[1, 2\], got 3"),
        (lambda: generator_spectrum(jnp.full((2, 2), jnp.nan)), "not finite"),
        (lambda: trajectory_spectrum(jnp.zeros((9, 1)).at[4, 0].set(jnp.nan), 1), "trajectory must be finite"),
        (
            lambda: trajectory_spectrum(jnp.ones((1, 9, 2)), 2, lengths=jnp.array([2])),
            r"lengths must be in \[3, 9\] for this window and rank, got 2 to 2",
        ),
        (lambda: trajectory_spectrum(jnp.ones((9, 1)), 2), r"rank must be in \[1, 1\].*got 2"),
        (
            lambda: biorthogonalize(
                Spectrum(jnp.ones(2, complex), jnp.eye(2, dtype=complex), jnp.ones((2, 2), complex))
            ),
            "cannot be made biorthogonal",
        ),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_under_jit_an_operator_without_logarithm_gives_nan() -> None:
    found = jax.jit(generator_spectrum)(jnp.diag(jnp.array([0.5, 0.0]))).eigenvalues
    np.testing.assert_allclose(found[0], np.log(0.5))
    assert np.isnan(found[1])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_computed_in_single(dtype) -> None:
    matrix = jnp.array([[0.5, 0.25], [-0.25, 0.5]], dtype)  # exact in both types
    found = generator_spectrum(matrix)
    assert found.eigenvalues.dtype == jnp.complex64
    expected = np.log(np.hypot(0.5, 0.25)) + 1j * np.array([-1, 1]) * np.arctan2(0.25, 0.5)
    np.testing.assert_allclose(np.sort_complex(found.eigenvalues), expected, rtol=1e-6)


def test_numpy_matrices_are_taken() -> None:
    found = generator_spectrum(np.diag([0.5, 0.3]), dt=0.1).eigenvalues
    np.testing.assert_allclose(found, np.log([0.5, 0.3]) / 0.1, rtol=1e-12)


def test_a_jordan_block_warns_in_single_precision_too() -> None:
    with pytest.warns(RuntimeWarning, match="nearly defective"):
        generator_spectrum(jnp.array([[0.5, 1.0], [0.0, 0.5]], jnp.float32))


def test_an_eigenvalue_that_is_rounding_is_no_eigenvalue() -> None:
    """1e-7 of the largest is noise in single precision, and 1e-7 in double."""
    matrix = jnp.diag(jnp.array([1.0, 1e-7]))
    np.testing.assert_allclose(generator_spectrum(matrix).eigenvalues[1], np.log(1e-7), rtol=1e-12)
    with pytest.raises(ValueError, match=r"eigenvalue ~0 .*1\.0e-07"):
        generator_spectrum(matrix.astype(jnp.float32))


def test_eigenvectors_of_any_scale_have_unit_norm() -> None:
    vectors = jnp.asarray(random_matrix(8), complex)
    for scale in (1e-300, 1e300):
        scaled = Spectrum(jnp.ones(5, complex), scale * vectors, vectors)
        np.testing.assert_allclose(
            unit_norm(scaled).right, vectors / jnp.linalg.norm(vectors, axis=0), rtol=1e-12, atol=1e-15
        )


def test_padding_may_be_missing() -> None:
    path = jnp.cumsum(jax.random.normal(jax.random.key(7), (2, 30, 2)), axis=1)
    lengths = np.array([30, 22])
    filled, missing = (
        trajectory_spectrum(path.at[1, 22:].set(value), 3, lags=2, lengths=lengths) for value in (0.0, jnp.nan)
    )
    np.testing.assert_array_equal(filled.eigenvalues, missing.eigenvalues)


def test_under_jit_a_step_below_zero_gives_nan() -> None:
    found = jax.jit(lambda dt: generator_spectrum(jnp.diag(jnp.array([0.5, 0.2])), dt=dt).eigenvalues)
    np.testing.assert_allclose(found(2.0), np.log([0.5, 0.2]) / 2, rtol=1e-12)
    for dt in (0.0, -1.0):
        assert np.isnan(found(dt)).all()


def kernel_spectrum() -> KernelSpectrum:
    path = jnp.cumsum(jax.random.normal(jax.random.key(3), (14, 2)), axis=0)
    return generator_spectrum(kernel_reduced_rank_regression(path[:-1], path[1:], 2, kernel=GaussianKernel(2.0)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: generator_spectrum(jnp.eye(2), dt=jnp.inf), "dt must be positive and finite, got inf"),
        (lambda: to_operator(generator_spectrum(0.5 * jnp.eye(2)), dt=-1.0), "dt must be positive and finite, got -1"),
        (
            lambda: to_operator(Spectrum(jnp.full(1, jnp.nan, complex), *2 * [jnp.ones((2, 1), complex)])),
            "eigenvectors that are not finite",
        ),
        (
            # Three vectors of the plane: no error of the inverse, only rounding tells.
            lambda: biorthogonalize(
                Spectrum(jnp.ones(3, complex), *2 * [jnp.asarray(random_matrix(2, 3)[:2], complex)])
            ),
            "cannot be made biorthogonal",
        ),
        (lambda: landmark_coordinates(kernel_spectrum(), jnp.ones((4, 3))), "the 2 channels of the states"),
        (lambda: trajectory_spectrum(jnp.ones((9, 0)), 1), r"\[time, channel\], got shape \(9, 0\)"),
    ],
)
def test_further_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
