import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn import bert, distilbert
from jaxlab.nn.bert import BertConfig, mean_pool, sentence_embedding
from jaxlab.nn.distilbert import DistilBertConfig

SMALL = BertConfig(
    vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, max_position_embeddings=6
)


def drawn_params(module, config):
    """Parameters of order one, drawn by NumPy: nothing to compile."""
    shapes = jax.eval_shape(lambda: module.init(config, jax.random.key(0))[1])
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.0, 0.5, leaf.shape), jnp.float32), shapes)


@pytest.fixture(scope="module")
def small():
    return jax.jit(bert.make_apply(SMALL)), drawn_params(bert, SMALL)


TOKENS = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
MASK = jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def test_padding_is_seen_by_none(small):
    apply_fn, params = small
    padded = apply_fn(params, TOKENS, padding_mask=MASK).last_hidden_state
    other = apply_fn(params, TOKENS.at[0, 3:].set(7), padding_mask=MASK != 0).last_hidden_state
    np.testing.assert_array_equal(padded[0, :3], other[0, :3])
    alone = apply_fn(params, TOKENS[:1, :3]).last_hidden_state
    np.testing.assert_allclose(padded[0, :3], alone[0], atol=1e-5)
    assert np.abs(apply_fn(params, TOKENS).last_hidden_state[0, :3] - alone[0]).max() > 1e-2


def test_segments_default_to_the_first(small):
    apply_fn, params = small
    plain = apply_fn(params, TOKENS).last_hidden_state
    zeros = apply_fn(params, TOKENS, token_types=jnp.zeros_like(TOKENS)).last_hidden_state
    np.testing.assert_allclose(zeros, plain, atol=1e-6)
    ones = apply_fn(params, TOKENS, token_types=jnp.ones_like(TOKENS)).last_hidden_state
    assert np.abs(ones - plain).max() > 1e-2


class TestMeanPool:
    def test_mean_over_real_tokens_alone(self):
        hidden = jnp.arange(24.0).reshape(2, 3, 4)
        mask = jnp.array([[1, 1, 0], [0, 1, 0]])
        expected = [(np.arange(4.0) + np.arange(4.0, 8.0)) / 2, np.arange(16.0, 20.0)]
        np.testing.assert_allclose(mean_pool(hidden, mask), expected)
        poisoned = hidden.at[0, 2].set(jnp.nan)
        np.testing.assert_allclose(mean_pool(poisoned, mask == 1), expected)

    def test_bfloat16_is_summed_in_float32(self):
        hidden = jnp.ones((1, 1000, 2), jnp.bfloat16)
        mean = mean_pool(hidden, jnp.ones((1, 1000), int))
        assert mean.dtype == jnp.float32
        np.testing.assert_array_equal(mean, 1.0)

    def test_a_row_without_tokens_is_nan_and_passes_no_gradient(self):
        hidden = jax.random.normal(jax.random.key(0), (2, 3, 4))
        mask = jnp.array([[1, 1, 1], [0, 0, 0]])
        embedding = sentence_embedding(hidden, mask)
        assert np.isfinite(embedding[0]).all()
        assert np.isnan(embedding[1]).all()
        gradient = jax.grad(lambda h: sentence_embedding(h, mask)[0].sum())(hidden)
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(gradient[1], 0)

    def test_embeddings_have_length_one(self):
        hidden = 100 * jax.random.normal(jax.random.key(0), (5, 3, 4))
        embedding = sentence_embedding(hidden, jnp.ones((5, 3), bool))
        np.testing.assert_allclose(jnp.linalg.norm(embedding, axis=1), 1, rtol=1e-6)


class TestBadInput:
    def test_too_long(self, small):
        apply_fn, params = small
        with pytest.raises(ValueError, match="at most max_position_embeddings = 6 tokens; got 7"):
            apply_fn(params, jnp.zeros((1, 7), int))
        config = DistilBertConfig(
            vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=1, num_heads=2, max_position_embeddings=4
        )
        other, shapes = (
            distilbert.make_apply(config),
            jax.eval_shape(lambda: distilbert.init(config, jax.random.key(0))[1]),
        )
        with pytest.raises(ValueError, match="at most max_position_embeddings = 4 tokens; got 5"):
            jax.eval_shape(other, shapes, jnp.zeros((1, 5), int))

    @pytest.mark.parametrize("token", [-1, 11])
    def test_token_outside_the_vocabulary(self, small, token):
        apply_fn, params = small
        output = apply_fn(params, TOKENS.at[0, 1].set(token))
        assert np.isnan(output.last_hidden_state[0]).all()
        np.testing.assert_array_equal(output.pooler_output[1], apply_fn(params, TOKENS).pooler_output[1])

    def test_nothing_but_padding(self, small):
        apply_fn, params = small
        mask = MASK.at[0].set(0)
        output = apply_fn(params, TOKENS, padding_mask=mask).last_hidden_state
        assert np.isfinite(output).all()
        assert np.isnan(sentence_embedding(output, mask)[0]).all()

    def test_config(self):
        with pytest.raises(ValueError, match="num_labels needs pooler=True"):
            dataclasses.replace(SMALL, num_labels=2, pooler=False)
        with pytest.raises(ValueError, match="type_vocab_size must be at least 1; got 0"):
            dataclasses.replace(SMALL, type_vocab_size=0)


# Cosines and first entries that sentence-transformers gives for the same weights.
COSINES = {
    ("red apple", "green apple"): 0.79626,
    ("red apple", "apple"): 0.69871,
    ("fire truck", "fire engine"): 0.77756,
    ("dog", "cat"): 0.66064,
    ("dog", "puppy"): 0.80401,
    ("traffic sign", "fire truck"): 0.18100,
    ("milk carton", "carton"): 0.83200,
}
RED_APPLE = [-0.01294, 0.00411, -0.03540, 0.04496, -0.01612]


def test_minilm_gives_the_cosines_of_sentence_transformers():
    pytest.importorskip("tokenizers", reason="needs the models extra: tokenizers")
    from jaxlab.nn.checkpoints import load

    try:
        model = load("all-minilm-l6-v2")
    except (ModuleNotFoundError, FileNotFoundError, ValueError) as error:
        pytest.skip(f"needs the models extra: {error}")
    words = sorted({word for pair in COSINES for word in pair})
    tokens, mask = model.tokenizer.encode_batch(words)
    assert not np.asarray(mask).all(), "some are padded"
    output = jax.jit(model.apply_fn)(model.params, jnp.asarray(tokens), padding_mask=jnp.asarray(mask))
    embedding = dict(zip(words, sentence_embedding(output.last_hidden_state, jnp.asarray(mask)), strict=True))
    for (one, other), cosine in COSINES.items():
        assert float(embedding[one] @ embedding[other]) == pytest.approx(cosine, abs=1e-4), (one, other)
    np.testing.assert_allclose(embedding["red apple"][:5], RED_APPLE, atol=1e-4)
