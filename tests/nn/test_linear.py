import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlab.nn.linear import Embedding, Linear


def test_weight_is_out_by_in_and_bias_is_added():
    layer = Linear(3, 2, use_bias=True, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.array([10.0, 20.0])
    x = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    assert layer.weight.shape == (2, 3)
    expected = x @ np.asarray(layer.weight[...]).T + np.array([10.0, 20.0])
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-6)


def test_standard_deviation_of_fresh_weights():
    # The relative error of a deviation from n = 40,000 draws is 1 / sqrt(2 n) = 0.35 %: six of those.
    layer = Linear(200, 200, stddev=0.5, rngs=nnx.Rngs(0))
    assert float(jnp.std(layer.weight[...])) == pytest.approx(0.5, rel=0.02)


def test_dtypes_of_parameters_and_products():
    layer = Linear(3, 2, use_bias=True, dtype="bfloat16", param_dtype="float32", rngs=nnx.Rngs(0))
    assert layer.weight.dtype == layer.bias.dtype == jnp.float32
    assert layer(jnp.ones((1, 3))).dtype == jnp.bfloat16


def test_embedding_gives_rows_and_nan_outside():
    table = Embedding(5, 2, rngs=nnx.Rngs(0))
    out = table(jnp.array([[0, 4], [5, -1]]))
    np.testing.assert_array_equal(out[0], table.weight[...][jnp.array([0, 4])])
    assert np.isnan(out[1]).all()
