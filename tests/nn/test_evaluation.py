import dataclasses
import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlab.nn import DecoderConfig, decoder
from jaxlab.nn.evaluation import needs_padding_mask, perplexity, score, token_losses, windows
from jaxlab.nn.rotary import RopeScaling

VOCABULARY = 7


def markov(params, tokens):
    """The logits depend on the last token only, through a table."""
    return params[tokens]


@pytest.fixture(scope="module")
def table():
    return jax.random.normal(jax.random.key(0), (VOCABULARY, VOCABULARY))


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).integers(0, VOCABULARY, 61)


def log_probs(table):
    return np.asarray(jax.nn.log_softmax(table, axis=-1), np.float64)


def test_a_uniform_model_has_the_vocabulary_as_perplexity(text):
    result = perplexity(markov, jnp.zeros((VOCABULARY, VOCABULARY)), text, window=16, stride=5, batch_size=3)
    assert result.perplexity == pytest.approx(VOCABULARY, rel=1e-6)
    assert result.nats_per_token == pytest.approx(math.log(VOCABULARY), rel=1e-6)
    assert result.tokens == len(text) - 1


@pytest.mark.parametrize(("window", "stride", "batch_size"), [(16, 5, 3), (61, 61, 1), (100, 50, 4), (2, 1, 64)])
def test_a_markov_model_has_its_closed_form_in_any_windows(table, text, window, stride, batch_size):
    expected = -log_probs(table)[text[:-1], text[1:]].mean()
    result = perplexity(markov, table, text, window=window, stride=stride, batch_size=batch_size)
    assert result.nats_per_token == pytest.approx(expected, rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-6)
    assert result.nats == pytest.approx(expected * 60, rel=1e-6)


def test_windows_without_overlap_leave_their_first_token_out(table, text):
    result = perplexity(markov, table, text, window=10, stride=10)
    counted = [t for t in range(61) if t % 10]
    assert (result.tokens, result.windows) == (len(counted), 7)
    assert result.nats == pytest.approx(-log_probs(table)[text[:-1], text[1:]][np.array(counted) - 1].sum(), rel=1e-6)


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_every_token_counts_once_with_its_context(length, window, data):
    stride = data.draw(st.integers(1, window - 1))
    tokens = np.arange(length)
    cut, counts = windows(tokens, window=window, stride=stride)
    seen = []
    for row, counted in zip(cut, counts, strict=True):
        places = np.flatnonzero(counted) + 1
        seen += row[places].tolist()
        if row[0] > 0:
            assert places.min() >= window - stride
        assert (np.diff(row[: places.max() + 1]) == 1).all()
    assert seen == list(range(1, length))


def test_losses_are_those_of_each_token(table, text):
    losses = token_losses(markov, table, text[None])
    np.testing.assert_allclose(losses[0], -log_probs(table)[text[:-1], text[1:]], rtol=1e-6)


def test_one_compilation_for_all_batches_and_texts(text):
    traced = []

    def counting(params, tokens):
        traced.append(tokens.shape)
        return params[tokens]

    table = jnp.zeros((VOCABULARY, VOCABULARY))
    for length in (61, 40, 33):
        perplexity(counting, table, text[:length], window=16, stride=8, batch_size=3)
    assert traced == [(3, 16)]


def test_score_of_continuations_has_its_closed_form(table):
    prompts, continuations = [[1, 2], [3], [0, 0, 5]], [[4, 4, 6], [2], [1, 3]]
    result = score(markov, table, prompts, continuations, batch_size=2, length_bucket=4)
    table_log_probs = log_probs(table)
    expected = [
        sum(table_log_probs[a, b] for a, b in zip([prompt[-1], *rest[:-1]], rest, strict=True))
        for prompt, rest in zip(prompts, continuations, strict=True)
    ]
    np.testing.assert_allclose(result.log_likelihoods, expected, rtol=1e-6)
    np.testing.assert_array_equal(result.tokens, [3, 1, 2])
    np.testing.assert_allclose(result.per_token, np.array(expected) / [3, 1, 2], rtol=1e-6)


def test_score_tells_what_greedy_decoding_gives(table):
    best = np.argmax(np.asarray(table), axis=1)
    chain = best[[2, best[2]]]
    other = (chain + np.arange(2)) % VOCABULARY
    assert score(markov, table, [[1, 2], [1, 2]], [chain, other]).greedy.tolist() == [True, False]


def test_padding_does_not_reach_the_score():
    config = DecoderConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, initializer_range=1.0
    )
    apply_fn, params = decoder.init(config, jax.random.key(0))
    prompts, continuations = [[1, 2, 3, 4, 5], [6]], [[1, 1, 2, 0], [2, 3]]
    together = score(apply_fn, params, prompts, continuations, length_bucket=4)
    alone = [
        score(apply_fn, params, [p], [c], length_bucket=len(p) + len(c)).log_likelihoods[0]
        for p, c in zip(prompts, continuations, strict=True)
    ]
    np.testing.assert_allclose(together.log_likelihoods, alone, rtol=1e-5)


def test_padding_does_not_count_for_a_scaling_by_length():
    """Of 10 tokens in windows of 7, the last has four: with padding dynamic rope would take it for seven."""
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        initializer_range=1.0,
        rope_scaling=RopeScaling("dynamic", 40.0, original_max_position_embeddings=3),
    )
    assert needs_padding_mask(config)
    assert not needs_padding_mask(dataclasses.replace(config, rope_scaling=None))
    apply_fn, params = decoder.init(config, jax.random.key(0))
    text = np.array([1, 2, 3, 4, 5, 6, 1, 3, 0, 2])
    losses = [token_losses(apply_fn, params, text[None, begin:end])[0] for begin, end in ((0, 7), (6, 10))]
    whole = functools.partial(perplexity, apply_fn, params, text, window=7, stride=6, batch_size=2)
    expected = float(sum(map(jnp.sum, losses)))
    assert whole(mask_padding=True).nats == pytest.approx(expected, rel=1e-5)
    assert abs(whole().nats - expected) > 0.01
    scored = score(apply_fn, params, [text[:1], text[6:7]], [text[1:7], text[7:]], length_bucket=7, mask_padding=True)
    np.testing.assert_allclose(scored.log_likelihoods, [-jnp.sum(loss) for loss in losses], rtol=1e-5)


def test_perplexity_equals_a_plain_loop_in_transformers(text, tmp_path):
    """The loop over windows of the documentation of that library, on its own network."""
    torch = pytest.importorskip("torch", reason="needs the peers extra")
    transformers = pytest.importorskip("transformers", reason="needs the peers extra")
    from jaxlab.nn.checkpoints import load

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(config).eval()
    network.save_pretrained(tmp_path)
    window, stride, total, counted, end_before = 16, 6, 0.0, 0, 1
    for begin in range(0, len(text), stride):
        end = min(begin + window, len(text))
        ids = torch.as_tensor(text[None, begin:end], dtype=torch.long)
        labels = ids.clone()
        labels[:, : -(end - end_before)] = -100
        with torch.no_grad():
            total += network(ids, labels=labels).loss.item() * (end - end_before)
        counted, end_before = counted + end - end_before, end
        if end == len(text):
            break
    model = load(tmp_path)
    result = perplexity(model.apply_fn, model.params, text, window=window, stride=stride, batch_size=4)
    assert result.tokens == counted == 60
    assert result.nats == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1, "stride": 1}, "window must be at least 2 tokens; got 1"),
        ({"window": 8, "stride": 9}, "stride must be between 1 and the window of 8 tokens; got 9"),
        ({"window": 8, "stride": 0}, "stride must be between 1 and the window of 8 tokens; got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
    ],
)
def test_bad_sizes(table, text, options, message):
    with pytest.raises(ValueError, match=message):
        perplexity(markov, table, text, **options)


def test_bad_texts(table):
    for other in (np.ones((2, 3), int), np.ones(3)):
        with pytest.raises(ValueError, match="a text must be one row of integer ids; got"):
            inspect.unwrap(windows)(other, window=2, stride=1)  # as it is without the type check of the test run
    with pytest.raises(ValueError, match="length_bucket must be at least 1; got 0"):
        score(markov, table, [[1]], [[2]], length_bucket=0)
    with pytest.raises(ValueError, match="at least two tokens to predict one from another; got 1"):
        perplexity(markov, table, [3])
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        score(markov, table, [[1], []], [[1], [2]])
    with pytest.raises(ValueError, match="continuation 0 is empty"):
        score(markov, table, [[1]], [[]])
    with pytest.raises(ValueError, match="each continuation needs a prompt; got 1 and 2"):
        score(markov, table, [[1]], [[1], [2]])
