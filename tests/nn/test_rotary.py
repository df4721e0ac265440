import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn.rotary import apply_rotary, rotary_rotation


def rotate(x, positions, theta=10_000.0):
    return apply_rotary(x, rotary_rotation(positions, head_dim=x.shape[-1], theta=theta))


def test_turns_each_pair_of_halves_as_a_complex_number():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 9, 30, 2, 2]])
    pairs = x[..., :4] + 1j * x[..., 4:]
    frequency = np.array([500.0 ** (-2 * i / 8) for i in range(4)])
    pairs = pairs * np.exp(1j * positions[:, :, None, None] * frequency)
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    # Positions up to 30 rad carry a float32 rounding of 30 * 2^-24 = 2e-6.
    np.testing.assert_allclose(rotate(jnp.asarray(x), positions, theta=500.0), expected, atol=1e-5)


@pytest.mark.parametrize("shift", [1, -3, 100])
def test_products_depend_on_relative_positions_only(shift):
    query, key = jax.random.normal(jax.random.key(0), (2, 6, 1, 16))
    positions = jnp.arange(6)

    def scores(offset):
        return jnp.einsum("tnd,snd->ts", rotate(query, positions + offset), rotate(key, positions + offset))

    # Angles up to 106 rad are rounded at 106 * 2^-24 = 6e-6; the products sum 16 terms of size 1.
    np.testing.assert_allclose(scores(shift), scores(0), atol=1e-4)
    assert np.abs(scores(0) - jnp.einsum("tnd,snd->ts", query, key)).max() > 0.1


def test_keeps_lengths_and_position_zero():
    x = jax.random.normal(jax.random.key(1), (4, 2, 8))
    np.testing.assert_allclose(
        jnp.linalg.norm(rotate(x, jnp.arange(4)), axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-6
    )
    np.testing.assert_array_equal(rotate(x, jnp.zeros(4, int)), x)


def test_bfloat16_is_turned_in_float32():
    x = jax.random.normal(jax.random.key(2), (4, 2, 8), jnp.bfloat16)
    out = rotate(x, jnp.arange(4) + 1000)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, rotate(x.astype(jnp.float32), jnp.arange(4) + 1000).astype(jnp.bfloat16))
