"""Thresholds among magnitudes: as sorting gives them, in memory and streamed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing.merging.magnitude import kept_counts, magnitude_halves, magnitude_thresholds, streamed_threshold


def numbers(kind):
    random = np.random.default_rng(0)
    if kind == "normal":
        return random.normal(0, 1e-3, (2, 1000)).astype(np.float32)
    if kind == "equal":  # differences of bfloat16 numbers
        return np.asarray(jnp.asarray(random.normal(0, 1e-3, (2, 1000)), jnp.bfloat16), np.float32).round(4)
    if kind == "zeros":
        return np.where(random.uniform(size=(2, 1000)) < 0.9, 0, random.normal(size=(2, 1000))).astype(np.float32)
    return np.float32([[0, 1e-45, -1e-38, 1e38, -3e38, 5], [np.inf, 1, 1, -1, 2, 0]])  # subnormal, huge, infinite


@pytest.mark.parametrize("kind", ["normal", "equal", "zeros", "extreme"])
@pytest.mark.parametrize("density", [1e-9, 0.2, (0.5, 0.97), 1.0])
def test_thresholds_are_those_of_sorting(kind, density):
    rows = numbers(kind)
    size = rows.shape[1]
    counts = kept_counts(density, size, 2)
    expected = [np.sort(np.abs(row))[size - count] for row, count in zip(rows, counts, strict=True)]
    pieces = [rows[:, :3], rows[:, 3:500], rows[:, 500:]]
    in_memory = jax.jit(magnitude_thresholds)([jnp.asarray(piece) for piece in pieces], counts)
    np.testing.assert_array_equal(in_memory, expected)
    streamed = streamed_threshold(lambda: (np.asarray(magnitude_halves(jnp.asarray(p))) for p in pieces), counts)
    np.testing.assert_array_equal(streamed, expected)


def test_counts():
    np.testing.assert_array_equal(kept_counts(0.2, 6, 2), [1, 1])
    np.testing.assert_array_equal(kept_counts((0.0, 1e-6, 1.0), 5, 3), [0, 1, 5])
    np.testing.assert_array_equal(jax.jit(lambda d: kept_counts(d, 10, 2))(jnp.array([0.0, 0.35])), [0, 3])


def test_nothing_is_kept_of_a_count_of_zero():
    rows = numbers("normal")
    assert np.isposinf(magnitude_thresholds([jnp.asarray(rows)], np.array([0, 0]))).all()
    assert np.isposinf(streamed_threshold(lambda: [np.asarray(magnitude_halves(jnp.asarray(rows)))], [0, 0])).all()
