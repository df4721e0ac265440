import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn.sampling import filter_logits, sample, token_log_probs

LOGITS = np.random.default_rng(0).normal(0, 2, (4, 30)).astype(np.float32)


def kept(logits):
    return np.isfinite(np.asarray(logits))


def test_each_filter_by_its_definition():
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(kept(filter_logits(jnp.asarray(LOGITS), top_k=5)).sum(axis=1), 5)
    np.testing.assert_array_equal(
        kept(filter_logits(jnp.asarray(LOGITS), min_p=0.1)), probabilities >= 0.1 * probabilities.max(1)[:, None]
    )
    for row, mask in zip(probabilities, kept(filter_logits(jnp.asarray(LOGITS), top_p=0.7)), strict=True):
        assert row[mask].sum() >= 0.7 > row[mask].sum() - row[mask].min()
        assert row[mask].min() > row[~mask].max()


def test_limits_keep_everything_or_the_likeliest():
    logits = jnp.asarray(LOGITS)
    np.testing.assert_array_equal(filter_logits(logits, top_k=99, top_p=1.0, min_p=0.0), logits)
    for strictest in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        np.testing.assert_array_equal(kept(filter_logits(logits, **strictest)), LOGITS.max(1, keepdims=True) == LOGITS)


def test_one_value_a_sequence_equals_each_alone():
    logits = jnp.asarray(LOGITS)
    options = {
        "top_k": np.array([1, 4, 30, 9]),
        "top_p": np.array([0.9, 0.3, 1.0, 0.6], np.float32),
        "min_p": np.array([0.0, 0.1, 0.5, 0.01], np.float32),
    }
    together = filter_logits(logits, **options)
    for row in range(4):
        alone = filter_logits(logits[row : row + 1], **{name: value[row].item() for name, value in options.items()})
        np.testing.assert_array_equal(together[row : row + 1], alone)


def test_frequencies_are_the_probabilities():
    logits, draws, temperature = jnp.asarray(LOGITS[0, :6]), 40_000, 1.7
    tokens = sample(jax.random.key(0), jnp.tile(logits, (draws, 1)), temperature=temperature, top_k=4)
    expected = jax.nn.softmax(filter_logits(logits[None] / temperature, top_k=4)[0])
    # Standard errors of the frequencies are at most sqrt(1 / 4 / draws) = 0.0025; four of those.
    np.testing.assert_allclose(np.bincount(tokens, minlength=6) / draws, expected, atol=0.01)


def test_temperature_zero_is_the_argmax_of_its_row_alone():
    logits = jnp.tile(jnp.asarray(LOGITS), (50, 1))
    temperature = np.where(np.arange(200) % 4 == 2, 0.0, 5.0).astype(np.float32)
    tokens = np.asarray(sample(jax.random.key(1), logits, temperature=temperature)).reshape(50, 4)
    np.testing.assert_array_equal(tokens[:, 2], LOGITS[2].argmax())
    assert all(len(set(tokens[:, row])) > 5 for row in (0, 1, 3))
    np.testing.assert_array_equal(sample(jax.random.key(1), logits, temperature=0.0), np.argmax(logits, axis=1))


def test_log_probs_are_those_of_the_tempered_model():
    temperature = np.array([0.5, 1.0, 2.0, 0.0], np.float32)
    tokens = jnp.array([3, 0, 29, 7])
    wide = LOGITS.astype(np.float64) / np.where(temperature > 0, temperature, 1)[:, None]
    expected = wide[np.arange(4), tokens] - np.log(np.exp(wide).sum(axis=1))
    # Of order ten, in float32.
    np.testing.assert_allclose(
        token_log_probs(jnp.asarray(LOGITS), tokens, temperature=temperature), expected, atol=1e-5
    )


def test_bfloat16_logits_are_drawn_from_in_float32():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    options = {"temperature": 0.7, "top_p": 0.8}
    np.testing.assert_array_equal(
        sample(jax.random.key(2), logits, **options), sample(jax.random.key(2), logits.astype(jnp.float32), **options)
    )
    assert token_log_probs(logits, jnp.zeros(4, int)).dtype == jnp.float32


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_ties_are_kept(name):
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0]])
    option = {"top_k": 1, "top_p": 0.2, "min_p": 1.0}[name]
    np.testing.assert_array_equal(kept(filter_logits(logits, **{name: option}))[0], [False, True, True, False])


def test_tiny_temperatures_keep_log_probs_finite():
    logits = jnp.array([[1.0, 3.0, 2.0]])
    for temperature in (2e-38, 1e-30, 1e-6):  # below 1.2e-38 numbers are flushed to 0, which is another meaning
        token = sample(jax.random.key(0), logits, temperature=temperature, top_p=0.9, min_p=0.1)
        assert int(token[0]) == 1
        assert float(token_log_probs(logits, token, temperature=temperature)[0]) == 0.0
