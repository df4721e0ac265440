import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlab.nn import DecoderConfig, decoder, generate, generate_stream, generation, partition_specs, unstack_layers

# Sizes that eight devices divide.
CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    sliding_window=5,
    layer_types=("full_attention", "sliding_attention", "full_attention"),
    tie_embeddings=True,
    max_position_embeddings=40,
)
LENGTHS = (6, 1, 4)
KEY = jax.random.key(0)
# One bucket and one number of new tokens in all tests, so that they share their programs.
NEW, BUCKET = 10, 8


def random_params(config, seed=0):
    shapes = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0))[1])
    leaves, structure = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(structure, [jnp.asarray(rng.normal(0, 0.5, x.shape).astype(np.float32)) for x in leaves])


def padded(side, width=6):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, CONFIG.vocab_size, (len(LENGTHS), width))
    real = np.arange(width) < np.array(LENGTHS)[:, None]
    rows = [rng.integers(0, CONFIG.vocab_size, length) for length in LENGTHS]
    if side == "left":
        real = real[:, ::-1].copy()
    for row, mask, prompt in zip(tokens, real, rows, strict=True):
        row[mask] = prompt
    return tokens, real, rows


def run(params, tokens, **options):
    return generate(CONFIG, params, tokens, **{"key": KEY, "max_new_tokens": NEW, "length_bucket": BUCKET, **options})


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def logits_of(params):
    """Logits of whole sequences, without a cache, at one shape."""
    apply_fn = jax.jit(decoder.make_apply(CONFIG))

    def call(sequences):
        width = max(LENGTHS) + NEW
        rows = np.stack([np.pad(row, (0, width - len(row))) for row in sequences])
        return np.asarray(apply_fn(params, rows))  # causality makes what stands behind harmless

    return call


@pytest.fixture(scope="module")
def greedy(logits_of):
    """The likeliest continuations, found token by token without a cache."""
    sequences = list(padded("left")[2])
    for _ in range(NEW):
        logits = logits_of(sequences)
        sequences = [np.append(row, logits[i, len(row) - 1].argmax()) for i, row in enumerate(sequences)]
    return np.stack([row[-NEW:] for row in sequences])


@pytest.mark.parametrize(("side", "unstacked"), [("left", False), ("right", False), ("right", True)])
def test_greedy_equals_the_decoder_without_a_cache(params, greedy, logits_of, side, unstacked):
    tokens, real, rows = padded(side)
    out = run(unstack_layers(params) if unstacked else params, tokens, padding_mask=real)
    np.testing.assert_array_equal(out.tokens, greedy)
    np.testing.assert_array_equal(out.lengths, NEW)
    log_probs = np.asarray(jax.nn.log_softmax(logits_of([np.append(*pair) for pair in zip(rows, greedy, strict=True)])))
    for row, length in enumerate(LENGTHS):
        expected = log_probs[row, np.arange(NEW) + length - 1, greedy[row]]
        np.testing.assert_allclose(out.log_probs[row], expected, atol=1e-5)


def test_temperature_of_each_sequence(params, greedy, logits_of):
    tokens, real, rows = padded("left")
    temperature = np.array([0.0, 1.5, 0.6], np.float32)
    out = run(params, tokens, padding_mask=real, temperature=temperature, key=jax.random.key(5))
    np.testing.assert_array_equal(out.tokens[0], greedy[0])
    assert (np.asarray(out.tokens[1]) != greedy[1]).any()
    sequences = [np.append(*pair) for pair in zip(rows, np.asarray(out.tokens), strict=True)]
    tempered = logits_of(sequences) / np.where(temperature > 0, temperature, 1)[:, None, None]
    for row, length in enumerate(LENGTHS):
        expected = np.asarray(jax.nn.log_softmax(tempered))[row, np.arange(NEW) + length - 1, out.tokens[row]]
        np.testing.assert_allclose(out.log_probs[row], expected, atol=1e-5)
    again = run(params, tokens, padding_mask=real, temperature=temperature, key=jax.random.key(5))
    np.testing.assert_array_equal(out.tokens, again.tokens)


def test_filters_reach_the_sampler(params, greedy):
    tokens, real, _ = padded("left")
    out = run(params, tokens, padding_mask=real, temperature=3.0, top_k=np.array([1, 32, 1]))
    np.testing.assert_array_equal(out.tokens[::2], greedy[::2])
    assert (np.asarray(out.tokens[1]) != greedy[1]).any()


def test_stops_of_each_sequence(params, greedy):
    tokens, real, _ = padded("left")
    # The first row stops at its fifth token, the second nowhere, the third at its first.
    stops = np.array([[greedy[0, 4], -1], [-1, -1], [31, greedy[2, 0]]])
    out = run(params, tokens, padding_mask=real, stop_tokens=stops, pad_token=9)
    first = int(np.argmax(greedy[0] == greedy[0, 4])) + 1
    np.testing.assert_array_equal(out.lengths, [first, NEW, 1])
    for row, length in enumerate(np.asarray(out.lengths)):
        np.testing.assert_array_equal(out.tokens[row, :length], greedy[row, :length])
        np.testing.assert_array_equal(out.tokens[row, length:], 9)
        np.testing.assert_array_equal(out.log_probs[row, length:], 0)


def test_one_set_of_stops_ends_the_loop_early(params, greedy):
    tokens, real, _ = padded("left")
    chunks = list(
        generate_stream(
            CONFIG,
            params,
            tokens,
            key=KEY,
            max_new_tokens=NEW,
            length_bucket=BUCKET,
            padding_mask=real,
            chunk=4,
            stop_tokens={int(token) for token in greedy[:, 1]},
        )
    )
    together = np.concatenate(chunks, axis=1)
    assert together.shape[1] <= 2, "the loop ends with the last sequence, not with the chunk"
    np.testing.assert_array_equal(together[:, 0], greedy[:, 0])


def test_stream_gives_the_tokens_of_generate(params):
    tokens, real, _ = padded("right")
    options = {"padding_mask": real, "temperature": 1.0}
    whole = run(params, tokens, **options)
    chunks = list(
        generate_stream(CONFIG, params, tokens, key=KEY, max_new_tokens=NEW, length_bucket=BUCKET, chunk=4, **options)
    )
    assert [chunk.shape[1] for chunk in chunks] == [1, 4, 4, 1]
    assert all(isinstance(chunk, np.ndarray) for chunk in chunks)
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), whole.tokens)


def test_lengths_of_a_bucket_share_their_programs(params):
    for program in (generation._prefill, generation._decode):
        program.clear_cache()
    rng = np.random.default_rng(2)
    for length, new, temperature, stop in ((3, 9, 0.0, (1,)), (8, 16, 0.7, (2,)), (1, 12, 1.0, (3,))):
        prompts = rng.integers(0, CONFIG.vocab_size, (2, length))
        run(params, prompts, max_new_tokens=new, temperature=temperature, stop_tokens=stop)
    assert (generation._prefill._cache_size(), generation._decode._cache_size()) == (1, 1)
    run(params, rng.integers(0, CONFIG.vocab_size, (2, 9)))
    assert generation._prefill._cache_size() == 2


def test_inside_jit(params, greedy):
    tokens, real, _ = padded("left")
    out = jax.jit(lambda params, tokens, real: run(params, tokens, padding_mask=real))(params, tokens, real)
    np.testing.assert_array_equal(out.tokens, greedy)


def test_block_mask(params):
    tokens, real, _ = padded("left")
    mask = jnp.array([1.0, 0.0, 0.5])
    out = run(params, tokens, padding_mask=real, block_mask=mask, max_new_tokens=1)
    logits = jax.jit(decoder.make_apply(CONFIG))(params, tokens, padding_mask=real, block_mask=mask)
    np.testing.assert_array_equal(out.tokens[:, 0], np.argmax(logits[:, -1], axis=-1))


def test_bfloat16(params):
    """The tokens given, their log-probabilities are those of the decoder without a cache, up to bfloat16."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="bfloat16")
    narrow = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), params)
    tokens = padded("left")[0][:1]
    out = generate(config, narrow, tokens, key=KEY, max_new_tokens=4, length_bucket=BUCKET)
    assert out.log_probs.dtype == jnp.float32
    whole = np.append(tokens, out.tokens, axis=1)
    log_probs = jax.nn.log_softmax(jax.jit(decoder.make_apply(config))(narrow, whole))
    log_probs = np.asarray(log_probs)[0, np.arange(4) + 5, out.tokens[0]]
    # Products in other shapes round differently: 2^-8 of logits of order ten.
    np.testing.assert_allclose(out.log_probs[0], log_probs, atol=0.2)


def make_mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


class TestSharding:
    def test_specs_split_heads_units_and_vocabulary(self):
        mesh = make_mesh((2, 4), ("data", "model"))
        config = dataclasses.replace(CONFIG, qkv_bias=True, output_bias=True, tie_embeddings=False)
        specs = partition_specs(config, mesh)
        attention, mlp = specs["model"]["layers"]["self_attn"], specs["model"]["layers"]["mlp"]
        assert specs["model"]["embed_tokens"]["weight"] == specs["lm_head"]["weight"] == PartitionSpec("model", None)
        assert attention["q_proj"] == {
            "weight": PartitionSpec(None, "model", None),
            "bias": PartitionSpec(None, "model"),
        }
        assert attention["o_proj"] == {"weight": PartitionSpec(None, None, "model"), "bias": PartitionSpec()}
        assert mlp["gate_proj"]["weight"] == PartitionSpec(None, "model", None)
        assert mlp["down_proj"]["weight"] == PartitionSpec(None, None, "model")
        assert specs["model"]["norm"]["weight"] == PartitionSpec()

    def test_fewer_key_heads_than_devices_stay_whole(self):
        specs = partition_specs(CONFIG, make_mesh((8,), ("model",)))
        attention = specs["model"]["layers"]["self_attn"]
        assert attention["q_proj"]["weight"] == PartitionSpec(None, "model", None)
        assert attention["k_proj"]["weight"] == PartitionSpec()

    def test_no_such_axis(self):
        with pytest.raises(ValueError, match="the mesh has no axis 'model'; its axes are data"):
            partition_specs(CONFIG, make_mesh((8,), ("data",)))

    def test_axes_of_another_type(self):
        with pytest.raises(ValueError, match="axes of the mesh must be of type Auto; got Explicit"):
            partition_specs(CONFIG, jax.make_mesh((8,), ("model",), axis_types=(AxisType.Explicit,)))

    @pytest.mark.parametrize("shape", [(2, 4), (1, 8)])
    def test_forward_and_generation_equal_one_device(self, params, shape):
        """Sequences over one axis, tensors over the other."""
        mesh = make_mesh(shape, ("data", "model"))
        specs = partition_specs(CONFIG, mesh)
        placed = jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
        table = placed["model"]["embed_tokens"]["weight"]
        assert table.addressable_shards[0].data.shape == (32 // shape[1], 16)
        tokens = np.random.default_rng(4).integers(0, CONFIG.vocab_size, (4, 6))
        rows = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
        apply_fn = jax.jit(decoder.make_apply(CONFIG))
        # Sums over devices are added in another order; logits are of order ten.
        np.testing.assert_allclose(apply_fn(placed, rows), apply_fn(params, tokens), atol=1e-4)
        if shape == (1, 8):  # a decoder whose keys and values stay whole; its loop is that of the other mesh
            return
        ours, one = run(placed, rows), run(params, tokens)
        np.testing.assert_array_equal(ours.tokens, one.tokens)
        np.testing.assert_allclose(ours.log_probs, one.log_probs, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros((1, 0), int)}, r"at least one sequence of at least one token; got shape \(1, 0\)"),
        ({"tokens": np.zeros((0, 3), int)}, r"at least one sequence of at least one token; got shape \(0, 3\)"),
        ({"tokens": np.array([[1, 2, 3], [4, 32, 5]])}, "token 32 of prompt 1 is outside the vocabulary of 32 ids"),
        ({"tokens": np.array([[1, 2, 3], [4, -1, 5]])}, "token -1 of prompt 1 is outside the vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1; got 0"),
        ({"length_bucket": 0}, "length_bucket must be an integer of at least 1; got 0"),
        ({"max_new_tokens": 38}, "a prompt of 3 and 38 new tokens exceed the 40 positions"),
        ({"padding_mask": np.array([[True] * 3, [False] * 3])}, "row 1 is all padding"),
        ({"padding_mask": np.array([[True, False, True], [True] * 3])}, "not inside; row 0"),
        ({"padding_mask": np.ones((2, 4), bool)}, r"the shape of the prompts, \(2, 3\); got \(2, 4\)"),
        ({"temperature": -0.5}, "temperature must be at least 0 and finite; got -0.5"),
        ({"temperature": np.array([1.0, np.nan], np.float32)}, "temperature must be at least 0 and finite; got nan"),
        ({"temperature": np.ones(3, np.float32)}, r"one value or one for each of 2 sequences; got shape \(3,\)"),
        ({"top_k": 0}, r"top_k must be an integer from 1 to 2\^31 - 1; got 0"),
        ({"top_k": 2**40}, r"top_k must be an integer from 1 to 2\^31 - 1; got 1099511627776"),
        ({"pad_token": 2**40}, "pad_token must hold ids of tokens, from -1 to .*; got 1099511627776"),
        ({"stop_tokens": (2, 2**40)}, "stop_tokens must hold ids of tokens, from -1 to .*; got 1099511627776"),
        ({"stop_tokens": np.array([[-2, 3]])}, "stop_tokens must hold ids of tokens, from -1 to .*"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]; got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]; got 1.5"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]; got -0.1"),
        ({"stop_tokens": np.zeros((3, 2), int)}, "stop_tokens must have one row for each of 2 sequences; got 3"),
        ({"block_mask": np.ones(2, np.float32)}, r"block_mask must have shape \(3,\); got \(2,\)"),
    ],
)
def test_bad_input(params, change, message):
    options = {"tokens": np.ones((2, 3), int), **change}
    with pytest.raises(ValueError, match=message):
        run(params, **options)


def test_arrays_of_another_kind_are_named_in_one_line():
    with pytest.raises(
        ValueError, match=r"stop_tokens must hold .*, which are integers; got float64 of shape \(2, 2\)$"
    ):
        inspect.unwrap(generation._check_ids)("stop_tokens", np.ones((2, 2)))  # without the type check of the test run


def test_padding_may_hold_any_id(params):
    tokens, real, _ = padded("left")
    np.testing.assert_array_equal(
        run(params, np.where(real, tokens, -100), padding_mask=real).tokens,
        run(params, tokens, padding_mask=real).tokens,
    )


def test_stream_says_at_once_what_is_wrong(params):
    with pytest.raises(ValueError, match="top_p must be in"):
        generate_stream(CONFIG, params, np.ones((1, 3), int), key=KEY, max_new_tokens=2, top_p=2.0)
    with pytest.raises(ValueError, match="chunk must be an integer of at least 1; got 0"):
        generate_stream(CONFIG, params, np.ones((1, 3), int), key=KEY, max_new_tokens=2, chunk=0)
    with pytest.raises(ValueError, match="takes no pad_token"):
        generate_stream(CONFIG, params, np.ones((1, 3), int), key=KEY, max_new_tokens=2, pad_token=0)


def test_parameters_of_nothing_are_named():
    with pytest.raises(ValueError, match=r"params do not fit the config: \S+ is missing"):
        run({}, np.ones((1, 3), int))
