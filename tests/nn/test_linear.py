import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlab.nn.linear import Embedding, Linear, LowRankSum


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


class TestLowRankSum:
    def terms(self, seed=0, layers=()):
        rng = np.random.default_rng(seed)
        shapes = ((*layers, 5, 4), (*layers, 2, 4), (*layers, 5, 2), layers)
        return LowRankSum(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))

    def test_linear_multiplies_by_the_sum(self):
        layer = Linear(4, 5, use_bias=True, rngs=nnx.Rngs(0))
        layer.bias[...] = jnp.arange(5.0)
        terms, x = self.terms(), jax.random.normal(jax.random.key(0), (3, 4))
        graph, state = nnx.split(layer)
        state = nnx.to_pure_dict(state)
        out = nnx.merge(graph, {**state, "weight": terms})(x)
        matrix = np.asarray(terms.weight) + float(terms.scale) * np.asarray(terms.up) @ np.asarray(terms.down)
        np.testing.assert_allclose(terms.astype("float32"), matrix, rtol=1e-5)
        np.testing.assert_allclose(out, x @ matrix.T + np.arange(5.0), rtol=1e-5, atol=1e-5)
        # A sum upon a sum.
        again = self.terms(seed=1).replace(weight=terms)
        twice = nnx.merge(graph, {**state, "weight": again})(x)
        np.testing.assert_allclose(twice, x @ again.astype("float32").T + np.arange(5.0), rtol=1e-5, atol=1e-5)

    def test_leading_axes_are_shared(self):
        terms = self.terms(layers=(3,))
        assert (terms.shape, terms.dtype) == ((3, 5, 4), jnp.float32)
        one = jax.tree.map(lambda leaf: leaf[1], terms)
        np.testing.assert_allclose(terms.astype("float32")[1], one.astype("float32"), rtol=1e-6)

    def test_a_bfloat16_sum_is_rounded_once(self):
        terms = self.terms()
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), terms)
        exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow).astype("float32")
        np.testing.assert_array_equal(narrow.astype("bfloat16"), exact.astype(jnp.bfloat16))

    def test_has_no_parts(self):
        with pytest.raises(TypeError, match="no parts; got the index 0"):
            self.terms()[0]
