import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.nn.norm import RMSNorm


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
