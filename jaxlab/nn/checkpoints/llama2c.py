"""Models of llama2.c, such as stories260K: seven sizes and the weights, and a vocabulary with scores.

``NAME.bin`` is seven little-endian int32 (width, feed-forward width, blocks, heads, key-value heads, vocabulary,
sequence length; a negative vocabulary means a head of its own), then float32 arrays, each stacked over the blocks and
``[out, in]``: embedding; attention norm; query, key, value, output; feed-forward norm; gate, down, up; final norm; two
tables of rotary positions that are not used; the head. Rotary pairs are neighbours (`jaxlab.nn.rotary`).

``tok*.bin`` is an int32 and then for each id a float32 score, an int32 length and that many bytes of text.
"""

import math
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlab.nn.checkpoints.tensors import Tensors
from jaxlab.nn.checkpoints.vocabulary import sentencepiece_bpe, with_ends
from jaxlab.nn.tokenizer import Tokenizer

__all__ = ["open_llama2c", "read_llama2c_tokenizer"]


def open_llama2c(path: str | Path) -> tuple[dict[str, Any], Tensors]:
    """Settings as a ``config.json`` has them, and tensors by their Hugging Face names.

    Raises:
      ValueError: if the size of the file is not the one that its first numbers give.
    """
    path = Path(path)
    size = path.stat().st_size
    if size < 28 or size % 4:
        raise ValueError(f"{path} is no llama2.c model: it has {size} bytes")
    values = np.memmap(path, "<f4", "r")
    hidden, intermediate, layers, heads, kv_heads, vocabulary, length = map(int, values[:7].view("<i4"))
    tied, vocabulary = vocabulary > 0, abs(vocabulary)
    if min(hidden, intermediate, layers, heads, kv_heads, vocabulary, length) < 1 or hidden % heads:
        raise ValueError(f"{path} is no llama2.c model: its sizes are {values[:7].view('<i4').tolist()}")
    # Before anything is made for each block.
    if 4 * layers * hidden * hidden > size:
        raise ValueError(f"{path} is truncated or no llama2.c model: {layers} blocks of width {hidden} in {size} bytes")
    width, kv_width = hidden, hidden // heads * kv_heads
    block = [
        ("input_layernorm", (hidden,), None),
        ("self_attn.q_proj", (width, hidden), heads),
        ("self_attn.k_proj", (kv_width, hidden), kv_heads),
        ("self_attn.v_proj", (kv_width, hidden), None),
        ("self_attn.o_proj", (hidden, width), None),
        ("post_attention_layernorm", (hidden,), None),
        ("mlp.gate_proj", (intermediate, hidden), None),
        ("mlp.down_proj", (hidden, intermediate), None),
        ("mlp.up_proj", (intermediate, hidden), None),
    ]
    layout: list[tuple[str, tuple[int, ...], int | None]] = [("model.embed_tokens", (vocabulary, hidden), None)]
    layout += [(f"model.layers.{i}.{name}", shape, pairs) for name, shape, pairs in block for i in range(layers)]
    layout += [("model.norm", (hidden,), None), ("", (2, length, hidden // heads // 2), None)]
    layout += [] if tied else [("lm_head", (vocabulary, hidden), None)]
    offset, entries = 7, {}
    for name, shape, pairs in layout:
        spec = jax.ShapeDtypeStruct(shape, np.dtype(np.float32))
        if name:
            entries[f"{name}.weight"] = (spec, _Slice(values, offset, spec, pairs))
        offset += math.prod(shape)
    if 4 * offset != size:
        raise ValueError(f"{path} is truncated or no llama2.c model: its sizes ask for {4 * offset} bytes of {size}")
    config = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config, Tensors(entries)


def read_llama2c_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of such a model; ids 0, 1 and 2 are unknown, begin and end, and 3 to 258 single bytes.

    Raises:
      ValueError: if the file is truncated.
    """
    raw, offset = Path(path).read_bytes(), 4
    pieces: list[str] = []
    scores: list[float] = []
    while offset < len(raw):
        if offset + 8 > len(raw):
            raise ValueError(f"{path} is truncated after {len(pieces)} tokens")
        score, length = struct.unpack_from("<fi", raw, offset)
        offset += 8 + length
        if length < 0 or offset > len(raw):
            raise ValueError(f"{path} is truncated after {len(pieces)} tokens")
        pieces.append(raw[offset - length : offset].decode("utf-8", "replace").replace(" ", "▁"))
        scores.append(score)
    if len(pieces) < 259:
        raise ValueError(f"{path} has {len(pieces)} tokens, fewer than three special ones and all bytes")
    pieces[:3] = ["<unk>", "<s>", "</s>"]
    pieces[3:259] = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    backend = sentencepiece_bpe(pieces, scores, kinds)
    settings = {"unk_token": pieces[0], "bos_token": pieces[1], "eos_token": pieces[2]}
    return Tokenizer(with_ends(backend, settings, begin=True), settings)


class _Slice:
    """Reads one tensor; ``heads`` says that its rows are neighbouring rotary pairs of that many heads."""

    def __init__(self, values: np.ndarray, offset: int, spec: jax.ShapeDtypeStruct, heads: int | None) -> None:
        self._values, self._offset, self._spec, self._heads = values, offset, spec, heads

    def __call__(self) -> np.ndarray:
        end = self._offset + math.prod(self._spec.shape)
        value = self._values[self._offset : end].view(np.ndarray).reshape(self._spec.shape)
        if self._heads is None:
            return value
        return value.reshape(self._heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
