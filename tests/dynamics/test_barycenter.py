"""Means of systems: limits, geodesic bound, real operators, and the over-damping of the Hilbert-Schmidt mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.dynamics import (
    SpectralGrassmannMetric,
    Spectrum,
    constrained_hilbert_schmidt_mean,
    frechet_mean,
    generator_spectrum,
    hilbert_schmidt_mean,
    interpolate,
    matched_mean,
    spectral_grassmann_distance,
    to_operator,
    trajectory_spectrum,
)

pytestmark = pytest.mark.usefixtures("float64")

RATE = 100
STEPS = 30
LAGS = tuple(np.linspace(0.0, 0.25, 6))


def stack(*spectra: Spectrum) -> Spectrum:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *spectra)


def oscillators(frequencies: tuple[float, float], decays: tuple[float, float]) -> Spectrum:
    """Two damped oscillators, one a channel, seen through a delay window of a quarter of a second."""
    t = jnp.arange(10 * RATE) / RATE
    channels = [jnp.exp(-d * t) * jnp.sin(2 * jnp.pi * f * t) for f, d in zip(frequencies, decays, strict=True)]
    noise = 1e-3 * jax.random.normal(jax.random.key(0), (len(t), 2))
    return trajectory_spectrum(jnp.stack(channels, 1) + noise, 4, dt=1 / RATE, lags=LAGS)


@pytest.fixture(scope="module")
def ends() -> tuple[Spectrum, Spectrum]:
    with jax.enable_x64(True):
        return oscillators((0.5, 1.0), (0.05, 0.05)), oscillators((0.5, 1.6), (0.05, 0.40))


def fastest(spectrum: Spectrum) -> tuple[float, float]:
    """Frequency in Hz and decay in 1/s of the fastest oscillation."""
    value = spectrum.eigenvalues[jnp.argmax(spectrum.eigenvalues.imag)]
    return float(value.imag / (2 * jnp.pi)), float(-value.real)


def objective(mean: Spectrum, a: Spectrum, b: Spectrum, fraction: float) -> float:
    return float(
        (1 - fraction) * spectral_grassmann_distance(mean, a) ** 2
        + fraction * spectral_grassmann_distance(mean, b) ** 2
    )


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_interpolation_is_linear_in_frequency_and_near_the_geodesic_bound(ends, fraction) -> None:
    a, b = ends
    (f_a, d_a), (f_b, d_b) = fastest(a), fastest(b)
    mean = interpolate(a, b, fraction)
    frequency, decay = fastest(mean)
    np.testing.assert_allclose(frequency, (1 - fraction) * f_a + fraction * f_b, rtol=1e-10)
    np.testing.assert_allclose(decay, (1 - fraction) * d_a + fraction * d_b, rtol=1e-10)
    bound = fraction * (1 - fraction) * float(spectral_grassmann_distance(a, b)) ** 2
    value = objective(mean, a, b, fraction)
    assert bound - 1e-12 <= value <= 1.03 * bound
    np.testing.assert_allclose(mean.left.conj().T @ mean.right, np.eye(4), atol=1e-10)
    assert np.abs(to_operator(mean, dt=1 / RATE).imag).max() < 1e-12


def test_the_hilbert_schmidt_mean_over_damps(ends) -> None:
    a, b = ends
    operators = jnp.stack([to_operator(s, dt=1 / RATE).real for s in ends])
    mean = generator_spectrum(hilbert_schmidt_mean(operators, jnp.array([0.5, 0.5])), dt=1 / RATE, rank=4)
    assert fastest(mean)[1] > 1.2 * max(fastest(a)[1], fastest(b)[1])


def test_all_weight_on_one_system_returns_it(ends) -> None:
    a, b = ends
    mean, info = frechet_mean(stack(a, b), jnp.array([1.0, 0.0]), steps=STEPS)
    assert float(info.objective[info.best_step]) < 1e-6
    assert float(spectral_grassmann_distance(mean, a)) ** 2 < 1e-6
    np.testing.assert_allclose(interpolate(a, b, 0.0).eigenvalues, a.eigenvalues, rtol=1e-12)


def test_descent_lowers_the_objective_to_the_bound_and_stays_real(ends) -> None:
    a, b = ends
    weights = jnp.array([0.5, 0.5])
    mean, info = frechet_mean(stack(a, b), weights, initial=a, steps=STEPS)
    bound = 0.25 * float(spectral_grassmann_distance(a, b)) ** 2
    assert info.objective.shape == (STEPS + 1,)
    best = float(info.objective[info.best_step])
    assert bound - 1e-12 <= best == float(info.objective.min())
    assert best < 0.95 * float(info.objective[0])
    np.testing.assert_allclose(objective(mean, a, b, 0.5), best, rtol=1e-9)
    np.testing.assert_allclose(mean.left.conj().T @ mean.right, np.eye(4), atol=1e-10)
    assert np.abs(to_operator(mean, dt=1 / RATE).imag).max() < 1e-12


def test_real_eigenvalues_stay_real() -> None:
    """Odd rank: one pair, one positive real and one negative real multiplier."""
    rng = np.random.default_rng(0)

    def system(shift: float) -> Spectrum:
        angle = 0.5 + shift
        block = np.zeros((4, 4))
        block[:2, :2] = 0.9 * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        block[2, 2], block[3, 3] = 0.6 + shift, -0.4
        basis = np.eye(4) + 0.2 * np.random.default_rng(1).normal(size=(4, 4)) + shift * rng.normal(size=(4, 4))
        return generator_spectrum(jnp.asarray(basis @ block @ np.linalg.inv(basis)), dt=0.1)

    mean, _ = frechet_mean(stack(system(0.0), system(0.05)), steps=5)
    assert mean.eigenvalues.shape == (4,)
    operator = to_operator(mean, dt=0.1)
    assert np.abs(operator.imag).max() < 1e-12
    assert sum(np.abs(mean.eigenvalues.imag) < 1e-12) == 1
    np.testing.assert_allclose(mean.eigenvalues.imag.max(), np.pi / 0.1)


def test_complex_systems_need_real_false(draw) -> None:
    systems = draw(np.random.default_rng(1), 3, 5, batch=(2,))
    with pytest.raises(ValueError, match=r"has no complex-conjugate partner.*pass real=False"):
        frechet_mean(systems)
    mean, info = frechet_mean(systems, steps=STEPS, real=False, optimizer=optax.sgd(1e-2))
    assert info.objective[info.best_step] < info.objective[0]
    np.testing.assert_allclose(mean.left.conj().T @ mean.right, np.eye(3), atol=1e-9)


def test_matched_mean_undoes_order_and_phase(draw) -> None:
    a = draw(np.random.default_rng(2), 3, 6)
    order, phase = jnp.array([2, 0, 1]), jnp.exp(1j * jnp.array([0.3, 2.0, -1.0]))
    same = Spectrum(a.eigenvalues[order], a.right[:, order] * phase, a.left[:, order] * phase)
    mean = matched_mean(stack(a, same))
    np.testing.assert_allclose(mean.eigenvalues, a.eigenvalues, rtol=1e-12)
    right = a.right / jnp.linalg.norm(a.right, axis=0)
    np.testing.assert_allclose(mean.right, right, atol=1e-12)


def test_constrained_mean_recovers_one_operator(ends) -> None:
    a, _ = ends
    operators = jnp.stack([to_operator(s, dt=1 / RATE).real for s in ends])
    _, info = constrained_hilbert_schmidt_mean(operators, jnp.array([1.0, 0.0]), initial=a, dt=1 / RATE, steps=STEPS)
    assert float(info.objective[0]) < 1e-18  # rounding of a matrix of norm one, squared
    mean, info = constrained_hilbert_schmidt_mean(operators, initial=a, dt=1 / RATE, steps=STEPS)
    free = hilbert_schmidt_mean(operators, jnp.array([0.5, 0.5]))
    bound = 0.5 * float(jnp.sum((operators - free) ** 2))
    assert bound <= float(info.objective.min()) < float(info.objective[0])
    assert np.abs(to_operator(mean, dt=1 / RATE).imag).max() < 1e-12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, pair: frechet_mean(pair, jnp.array([0.5, 0.6])), "system weights must sum to 1"),
        (lambda s, pair: frechet_mean(pair, jnp.array([1.5, -0.5])), "system weights must be >= 0"),
        (lambda s, pair: frechet_mean(pair, jnp.ones(3) / 3), r"each of the 2 systems.*\(3,\)"),
        (lambda s, pair: frechet_mean(pair, steps=-1), "steps must be >= 0, got -1"),
        (lambda s, pair: frechet_mean(pair, metric=SpectralGrassmannMetric(eta=2.0)), "eta must be in"),
        (lambda s, pair: frechet_mean(s), "stacked along one leading axis"),
        (lambda s, pair: matched_mean(pair.replace(weight=jnp.full((2, 4), 0.25))), "equally weighted atoms"),
        (lambda s, pair: interpolate(s, s, 1.5), r"fraction must be in \[0, 1\], got 1.5"),
        (lambda s, pair: interpolate(s, s.replace(right=s.right[:3], left=s.left[:3]), 0.5), "one space and one rank"),
    ],
)
def test_bad_input_is_named(ends, call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(ends[0], stack(*ends))


def test_descent_from_one_end_survives_eigenvalues_alone(ends) -> None:
    """At the start the distance to that end is zero, where the slope of the metric of order two is infinite."""
    a, b = ends
    metric = SpectralGrassmannMetric(eta=1.0, order=2.0)
    _, info = frechet_mean(stack(a, b), metric=metric, initial=a, steps=STEPS)
    assert np.isfinite(info.objective).all()
    assert info.objective[info.best_step] < info.objective[0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda s, pair: frechet_mean(pair.replace(eigenvalues=pair.eigenvalues * jnp.nan)),
            ValueError,
            "must be finite",
        ),
        (lambda s, pair: frechet_mean(jax.tree.map(lambda leaf: leaf[:0], pair)), ValueError, "at least one system"),
        (
            lambda s, pair: frechet_mean(pair, initial=s.replace(right=s.right[:5], left=s.left[:5])),
            ValueError,
            "different spaces: dimensions 5 and 12",
        ),
        (lambda s, pair: jax.jit(frechet_mean)(pair), TypeError, "pass real=False under jit"),
        (
            lambda s, pair: constrained_hilbert_schmidt_mean(jnp.ones((2, 12, 12)), initial=s, dt=0.0),
            ValueError,
            "dt must be positive and finite, got 0",
        ),
        (
            lambda s, pair: constrained_hilbert_schmidt_mean(jnp.ones((2, 3, 3)), initial=s),
            ValueError,
            "different spaces: dimensions 12 and 3",
        ),
        (
            lambda s, pair: constrained_hilbert_schmidt_mean(jnp.full((2, 12, 12), jnp.nan), initial=s),
            ValueError,
            "operators must be finite",
        ),
    ],
)
def test_further_bad_input_is_named(ends, call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call(ends[0], stack(*ends))
