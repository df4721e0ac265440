"""Divergences, TICA and autocorrelation: invariants, closed forms, deeptime, bad input; and the controls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.dynamics.latent import (
    autocorrelation,
    coordinate_divergence,
    decorrelation_time,
    gaussian_samples,
    halves,
    histogram_divergence,
    histogram_divergence_2d,
    jensen_shannon,
    shuffled,
    tica,
)


def autoregressive(rho: float, t: int, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=t)
    x = np.zeros(t)
    for i in range(1, t):
        x[i] = rho * x[i - 1] + noise[i]
    return x


def test_divergence_is_symmetric_zero_on_itself_and_at_most_ln_2():
    p, q = jnp.array([0.5, 0.5, 0.0]), jnp.array([0.0, 0.25, 0.75])
    middle = (p + q) / 2
    expected = 0.5 * sum(float(a * np.log(a / m)) for one in (p, q) for a, m in zip(one, middle, strict=True) if a > 0)
    assert float(jensen_shannon(p, q)) == pytest.approx(expected, rel=1e-6)
    assert float(jensen_shannon(q, p)) == pytest.approx(expected, rel=1e-6)
    assert float(jensen_shannon(p, 3 * p)) == 0
    assert float(jensen_shannon(jnp.array([1.0, 0]), jnp.array([0, 2.0]))) == pytest.approx(np.log(2), rel=1e-6)
    assert np.all(np.isfinite(jax.grad(jensen_shannon)(p, q)))
    assert np.all(np.isfinite(jax.grad(jensen_shannon)(p + 1e-26, q + 1e-26)))
    assert np.isnan(jensen_shannon(p, jnp.zeros(3)))


def test_histograms_are_those_of_numpy():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(-3, 3, (500, 2)), rng.normal(size=(300, 2)).clip(-3, 3)

    def plain(counts_a: np.ndarray, counts_b: np.ndarray) -> float:
        return float(jensen_shannon(jnp.asarray(counts_a, float), jnp.asarray(counts_b, float)))

    one = plain(*(np.histogram(x[:, 0], 50, (-3, 3))[0] for x in (a, b)))
    assert float(histogram_divergence(a[:, 0], b[:, 0], range=(-3.0, 3.0))) == pytest.approx(one, rel=1e-3)
    two = plain(*(np.histogram2d(*x.T, 36, [(-np.pi, np.pi)] * 2)[0] for x in (a, b)))
    assert float(histogram_divergence_2d(a, b)) == pytest.approx(two, rel=1e-3)
    low, high = min(a.min(), b.min()), max(a.max(), b.max())
    assert float(histogram_divergence(a.ravel(), b.ravel())) == pytest.approx(
        plain(*(np.histogram(x.ravel(), 50, (low, high))[0] for x in (a, b))), rel=1e-2
    )


def test_coordinates_are_averaged_each_over_its_own_range():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(200, 2, 3)) * [1, 10, 100], rng.normal(size=(150, 2, 3)) * [2, 10, 100]
    expected = np.mean([
        float(histogram_divergence(a[:, i, j], b[:, i, j])) for i in range(2) for j in range(3)
    ])  # fmt: skip
    assert float(coordinate_divergence(a, b)) == pytest.approx(expected, rel=1e-5)
    assert float(coordinate_divergence(a, a)) == 0
    assert float(coordinate_divergence(np.ones((4, 1, 3)), np.ones((5, 1, 3)))) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: histogram_divergence(np.zeros(0), np.ones(2)), "a holds no sample"),
        (lambda: histogram_divergence(np.ones(2), np.array([1.0, np.nan])), r"b must be finite; 1 .* at \(1,\)"),
        (lambda: histogram_divergence(np.ones(2), np.ones(2), bins=0), "at least one bin is needed, got 0"),
        (lambda: histogram_divergence(np.ones(2), np.ones(2), range=(1.0, 1.0)), "pair of rising numbers, got"),
        (lambda: coordinate_divergence(np.ones((2, 1, 3)), np.ones((2, 2, 3))), "must have the same coordinates"),
        (lambda: tica(np.zeros((10, 2)), lag=1), "the features do not vary"),
        (lambda: tica(np.eye(5), lag=5), r"lag must be in \[1, 4\] for trajectories of at most 5 frames, got 5"),
        (lambda: tica(np.eye(5)[:1], lag=1), "a pair needs a trajectory of at least 2 frames, the longest has 1"),
        (lambda: coordinate_divergence(np.ones((4, 0, 3)), np.ones((5, 0, 3))), r"got shape \(4, 0\)"),
        (lambda: gaussian_samples(jax.random.key(0), np.eye(3), 0), "count must be at least 1, got 0"),
        (lambda: gaussian_samples(jax.random.key(0), np.ones((1, 3)), 2), "at least 2 latents, got 1"),
        (lambda: halves(np.ones(1)), "two halves need at least 2 frames, got 1"),
        (lambda: autocorrelation(np.ones(5), lags=2), "the series does not vary"),
        (lambda: autocorrelation(np.arange(5.0), lags=5), r"lags must be in \[0, 4\] .* at least 5 frames, got 5"),
    ],
)
def test_bad_samples_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_tica_recovers_the_times_of_independent_processes():
    """The largest of the errors of 40000 frames with a relaxation time of 20 is about 3 %."""
    series = np.stack([autoregressive(0.95, 40_000, 0), autoregressive(0.8, 40_000, 1)], axis=1)
    mixed = series @ np.array([[1.0, 0.5], [0.3, 2.0]])
    found = tica(mixed, lag=3)
    np.testing.assert_allclose(found.timescales, [-1 / np.log(0.95), -1 / np.log(0.8)], rtol=0.1)
    components = np.asarray(found.transform(mixed))
    np.testing.assert_allclose(np.cov(components.T), np.eye(2), atol=0.01)
    assert abs(np.corrcoef(components[:, 0], series[:, 0])[0, 1]) > 0.99


@pytest.mark.usefixtures("float64")
def test_tica_is_that_of_deeptime():
    deeptime = pytest.importorskip("deeptime.decomposition", reason="needs the peers extra: deeptime")
    series = np.stack([autoregressive(r, 500, k) for k, r in enumerate((0.9, 0.6, 0.2))], axis=1)
    peer = deeptime.TICA(lagtime=4, scaling=None).fit_fetch(series)
    found = tica(series, lag=4)
    np.testing.assert_allclose(found.eigenvalues, peer.singular_values, atol=1e-6)
    np.testing.assert_allclose(found.timescales, peer.timescales(), rtol=1e-6)
    ours, theirs = np.asarray(found.transform(series)), peer.transform(series)
    np.testing.assert_allclose(np.abs(ours[:, 0]), np.abs(theirs[:, 0]), atol=1e-6)


def test_several_trajectories_are_not_joined():
    a, b = autoregressive(0.5, 50, 0)[:, None], 100 + autoregressive(0.5, 50, 1)[:, None]
    apart = tica([a, b], lag=1)
    joined = tica(np.concatenate([a, b]), lag=1)
    assert apart.eigenvalues[0] > joined.eigenvalues[0]  # the jump is no transition


def test_autocorrelation_of_an_autoregressive_process():
    series = autoregressive(0.9, 50_000, 3)
    found = np.asarray(autocorrelation(series, lags=20))
    centred = series - series.mean()
    direct = np.array([np.mean(centred[: len(centred) - k] * centred[k:]) for k in range(21)]) / centred.var()
    np.testing.assert_allclose(found, direct, atol=1e-4)
    assert decorrelation_time(found) == pytest.approx(-1 / np.log(0.9), rel=0.1)


def test_decorrelation_is_interpolated_and_may_not_come():
    assert decorrelation_time(np.array([1.0, 0.5, 0.5 - 2 * (0.5 - np.exp(-1))])) == pytest.approx(1.5)
    assert decorrelation_time(np.ones(3)) == float("inf")
    assert np.isnan(decorrelation_time(np.array([1.0, np.nan, 0.1])))


def test_controls():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(3000, 2)) @ np.array([[1.0, 0.5], [0.0, 0.2]]) + [1, -1]
    samples = gaussian_samples(jax.random.key(0), z, 20_000)
    np.testing.assert_allclose(samples.mean(0), z.mean(0), atol=0.03)
    np.testing.assert_allclose(np.cov(samples.T), np.cov(z.T), atol=0.04)
    mixed = np.asarray(shuffled(jax.random.key(1), z))
    assert not np.array_equal(mixed, z.astype(np.float32))
    np.testing.assert_array_equal(np.sort(mixed, axis=0), np.sort(z.astype(np.float32), axis=0))
    first, second = halves(z)
    np.testing.assert_array_equal(np.concatenate([first, second]), z)
