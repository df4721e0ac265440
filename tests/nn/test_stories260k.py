"""A real checkpoint through the decoder: stories260K, whose greedy story is known to the character."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.data import resolve
from jaxlab.nn import DecoderConfig, decoder


def read_checkpoint(path):
    """The llama2.c format: seven sizes, then float32 arrays stacked over the layers, ``[out, in]``."""
    raw = path.read_bytes()
    hidden, intermediate, layers, heads, kv_heads, vocabulary, length = np.frombuffer(raw, "<i4", 7)
    size = hidden // heads
    values, offset = np.frombuffer(raw, "<f4", offset=28), 0

    def take(*shape):
        nonlocal offset
        count = int(np.prod(shape))
        offset += count
        return values[offset - count : offset].reshape(shape)

    def take_rotary(count):
        """Rows of neighbouring rotary pairs, put in halves: first the even rows of each head, then the odd ones."""
        rows = take(layers, count, size // 2, 2, hidden)
        return rows.swapaxes(2, 3).reshape(layers, count * size, hidden)

    embedding = take(vocabulary, hidden)
    block = {
        "input_layernorm": take(layers, hidden),
        "self_attn/q_proj": take_rotary(heads),
        "self_attn/k_proj": take_rotary(kv_heads),
        "self_attn/v_proj": take(layers, kv_heads * size, hidden),
        "self_attn/o_proj": take(layers, hidden, hidden),
        "post_attention_layernorm": take(layers, hidden),
        "mlp/gate_proj": take(layers, intermediate, hidden),
        "mlp/down_proj": take(layers, hidden, intermediate),
        "mlp/up_proj": take(layers, intermediate, hidden),
    }
    norm = take(hidden)
    take(2, length, size // 2)
    assert offset == len(values)
    tree = {"self_attn": {}, "mlp": {}}
    for name, value in block.items():
        *parent, leaf = name.split("/")
        (tree[parent[0]] if parent else tree)[leaf] = {"weight": value}
    config = DecoderConfig(
        vocab_size=int(vocabulary),
        hidden_size=int(hidden),
        intermediate_size=int(intermediate),
        num_layers=int(layers),
        num_heads=int(heads),
        num_kv_heads=int(kv_heads),
        norm_eps=1e-5,
        tie_embeddings=True,
    )
    params = {"model": {"embed_tokens": {"weight": embedding}, "layers": tree, "norm": {"weight": norm}}}
    return config, jax.tree.map(jnp.asarray, params)


def read_vocabulary(path):
    raw, offset, pieces = path.read_bytes(), 4, []
    while offset < len(raw):
        length = int.from_bytes(raw[offset + 4 : offset + 8], "little")
        pieces.append(raw[offset + 8 : offset + 8 + length])
        offset += 8 + length
    return pieces


def test_greedy_story():
    try:
        folder = resolve("stories260k")
    except ValueError as error:
        pytest.skip(str(error))
    config, params = read_checkpoint(folder / "stories260K.bin")
    apply_fn = decoder.make_apply(config)
    pieces = read_vocabulary(folder / "tok512.bin")

    @jax.jit
    def continue_story(tokens):
        def step(at, tokens):
            return tokens.at[0, at].set(jnp.argmax(apply_fn(params, tokens)[0, at - 1]))

        return jax.lax.fori_loop(1, tokens.shape[1], step, tokens)

    # Causality makes the empty rest of the buffer harmless. Id 1 begins a story; ids 3 to 258 are single bytes.
    story = continue_story(jnp.zeros((1, 257), int).at[0, 0].set(1))[0, 1:]
    text = b"".join(bytes([i - 3]) if 3 <= i < 259 else pieces[i] for i in map(int, story))
    golden = (folder / "golden_greedy.txt").read_bytes().removesuffix(b"\n")
    assert text.removeprefix(b" ") == golden
