import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.nn.norm import LayerNorm, RMSNorm


def test_matches_the_formula():
    x = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32)
    norm = RMSNorm(6, eps=1e-3)
    norm.weight[...] = jnp.arange(1.0, 7.0)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3) * np.arange(1, 7)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-6)


def test_statistics_of_bfloat16_are_float32():
    # The mean square of these is 1 + 2^-9, which bfloat16 (8 bits) rounds to 1; eps is far below its resolution too.
    x = jnp.asarray([[1.0, 1.0, 1.0, 1.0078125]], jnp.bfloat16)
    out = RMSNorm(4, eps=1e-12, param_dtype="bfloat16")(1000 * x)
    assert out.dtype == jnp.bfloat16
    exact = RMSNorm(4, eps=1e-12)((1000 * x).astype(jnp.float32))
    np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16))


def test_zero_input_has_zero_output_and_finite_gradient():
    norm = RMSNorm(4)
    np.testing.assert_array_equal(norm(jnp.zeros(4)), jnp.zeros(4))
    assert np.isfinite(jax.grad(lambda x: norm(x).sum())(jnp.zeros(4))).all()


class TestLayerNorm:
    def test_matches_the_formula(self):
        x = np.random.default_rng(0).normal(2.0, 1.0, (3, 4, 6)).astype(np.float32)
        norm = LayerNorm(6, eps=1e-3)
        norm.weight[...], norm.bias[...] = jnp.arange(1.0, 7.0), jnp.arange(6.0)
        wide = x.astype(np.float64)
        expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-3)
        np.testing.assert_allclose(norm(jnp.asarray(x)), expected * np.arange(1, 7) + np.arange(6), atol=1e-5)

    def test_a_far_mean_does_not_cancel(self):
        # The squares are 1e8 and float32 resolves 8 there: mean(x²) - mean(x)² would lose the variance of 1.
        x = jnp.asarray([[1e4 - 1, 1e4 + 1]])
        np.testing.assert_allclose(LayerNorm(2, eps=1e-12)(x), [[-1.0, 1.0]], atol=1e-6)

    def test_statistics_of_bfloat16_are_float32(self):
        x = jnp.asarray([[1.0, 1.0, 1.0, 1.0078125]], jnp.bfloat16)
        out = LayerNorm(4, eps=1e-12, param_dtype="bfloat16")(x)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_array_equal(out, LayerNorm(4, eps=1e-12)(x.astype(jnp.float32)).astype(jnp.bfloat16))

    def test_equal_features_give_the_bias_and_a_finite_gradient(self):
        norm = LayerNorm(4)
        np.testing.assert_array_equal(norm(jnp.full(4, 3.0)), jnp.zeros(4))
        assert np.isfinite(jax.grad(lambda x: norm(x).sum())(jnp.full(4, 3.0))).all()
