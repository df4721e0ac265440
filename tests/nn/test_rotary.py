import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn.rotary import RopeScaling, apply_rotary, rotary_angles, rotary_rotation


def rotate(x, positions, theta=10_000.0, scaling=None):
    return apply_rotary(x, rotary_rotation(positions, head_dim=x.shape[-1], theta=theta, scaling=scaling))


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


def test_cosines_are_computed_once_for_all_heads_and_blocks():
    """XLA would fuse them into every use: prefill on CPUs then takes a twentieth longer."""

    def turn_all(x, positions):
        rotation = rotary_rotation(positions, head_dim=8)
        for _ in range(3):
            x = jnp.einsum("bthd,ed->bthe", apply_rotary(x, rotation), jnp.ones((8, 8)))
        return x

    compiled = jax.jit(turn_all).lower(jnp.ones((2, 5, 3, 8)), jnp.zeros((2, 5), int)).compile()
    assert compiled.as_text().count(" cosine(") == 1


def test_bfloat16_is_turned_in_float32():
    x = jax.random.normal(jax.random.key(2), (4, 2, 8), jnp.bfloat16)
    out = rotate(x, jnp.arange(4) + 1000)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, rotate(x.astype(jnp.float32), jnp.arange(4) + 1000).astype(jnp.bfloat16))


def angles_at_one(scaling):
    return np.asarray(rotary_angles(np.array([1]), head_dim=8, theta=100.0, scaling=scaling))[0]


def test_linear_scaling_is_a_slower_clock():
    np.testing.assert_allclose(angles_at_one(RopeScaling("linear", 4.0)), angles_at_one(None) / 4, rtol=1e-6)


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
def test_fast_pairs_are_kept_and_slow_ones_slowed(rope_type):
    """Wavelengths are 6, 20, 63 and 199 tokens; training saw 30."""
    limits = {"yarn": {"beta_fast": 1.0, "beta_slow": 0.4}, "llama3": {"low_freq_factor": 0.4, "high_freq_factor": 1.0}}
    scaling = RopeScaling(rope_type, 4.0, original_max_position_embeddings=30, **limits[rope_type])
    ratio = angles_at_one(scaling) / angles_at_one(None)
    assert ratio[0] == pytest.approx(1, rel=1e-6)
    assert ratio[-1] == pytest.approx(0.25, rel=1e-6)
    assert (np.diff(ratio) <= 1e-6).all()


def test_dynamic_scaling_takes_each_sequence_for_itself():
    scaling = RopeScaling("dynamic", 2.0, original_max_position_embeddings=10)
    positions = np.stack([np.arange(30), np.minimum(np.arange(30), 9)])
    angles = rotary_angles(positions, head_dim=8, theta=100.0, scaling=scaling)
    base = 100.0 * (2.0 * 30 / 10 - 1) ** (8 / 6)
    exponents = np.arange(4) / 4
    # Up to 29 rad in float32.
    np.testing.assert_allclose(angles[0], positions[0][:, None] * base**-exponents, rtol=1e-5)
    np.testing.assert_allclose(angles[1], positions[1][:, None] * 100.0**-exponents, rtol=1e-5)


def test_attention_factor_of_yarn():
    assert RopeScaling("yarn", 4.0).rotation_scale == pytest.approx(0.1 * np.log(4) + 1)
    assert RopeScaling("yarn", 4.0, attention_factor=0.7).rotation_scale == 0.7
    both = RopeScaling("yarn", 4.0, mscale=2.0, mscale_all_dim=1.0)
    assert both.rotation_scale == pytest.approx((0.2 * np.log(4) + 1) / (0.1 * np.log(4) + 1))
    assert RopeScaling("llama3", 4.0).rotation_scale == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_type": "longrope"}, "rope_type must be one of linear, dynamic, yarn, llama3; got 'longrope'"),
        ({"factor": 0.5}, "factor of a rope scaling must be at least 1; got 0.5"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings must be at least 1; got 0"),
        ({"low_freq_factor": 5.0}, "low_freq_factor must be positive and below high_freq_factor; got 5.0 and 4.0"),
        ({"beta_slow": 40.0}, "beta_slow must be positive and at most beta_fast; got 40.0 and 32.0"),
        ({"attention_factor": 0.0}, "attention_factor must be positive; got 0.0"),
    ],
)
def test_scaling_names_the_bad_value(change, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**{"rope_type": "yarn", "factor": 2.0, **change})


def test_scaling_without_what_it_needs():
    with pytest.raises(ValueError, match="yarn needs original_max_position_embeddings; got None"):
        rotate(jnp.ones((1, 1, 4)), np.array([0]), scaling=RopeScaling("yarn", 2.0))
    with pytest.raises(ValueError, match="dynamic needs a head_dim above 2; got 2"):
        rotate(jnp.ones((1, 1, 2)), np.array([0]), scaling=RopeScaling("dynamic", 2.0, 8))
    with pytest.raises(ValueError, match=r"yarn needs a theta above 1; got 1\.0"):
        rotate(jnp.ones((1, 1, 4)), np.array([0]), theta=1.0, scaling=RopeScaling("yarn", 2.0, 8))
