"""GGUF files of llama.cpp: settings and tensors under the names of the Hugging Face form.

A GGUF file holds metadata, among them the tokenizer (`jaxlab.nn.checkpoints.vocabulary`), and tensors that may be
quantised in blocks. Here they are given the names, layout and settings of a Hugging Face checkpoint, so that the rest
is the same for both. Tensors stay mapped and are dequantised to float32 one at a time, when they are read, by the PyPI
package ``gguf``. The metadata are parsed by `jaxlab.nn.checkpoints.gguf_format`: that package takes seconds for it.

Two things are undone. Files of the architecture ``llama`` hold the rows of the query and key projections in the order
of neighbouring rotary pairs (see `jaxlab.nn.rotary`). And where a Llama 3 scales its rotary frequencies, the file holds
the divisor of each frequency (``rope_freqs.weight``) in place of the four numbers that they come from.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlab.nn.checkpoints.gguf_format import StoredTensor, read_gguf
from jaxlab.nn.checkpoints.tensors import Tensors
from jaxlab.nn.untrusted import refused

__all__ = ["GGUF", "open_gguf"]


@dataclass(frozen=True, eq=False)
class GGUF:
    """An opened file.

    Attributes:
      config: its settings, as a ``config.json`` has them.
      tensors: its tensors by their Hugging Face names, float32.
      metadata: all of its metadata, arrays as lists.
    """

    config: dict[str, Any]
    tensors: Tensors
    metadata: Mapping[str, Any]


def open_gguf(path: str | Path) -> GGUF:
    """Open a GGUF file of a Llama, Qwen2, Qwen3 or Mistral.

    Raises:
      FileNotFoundError: if there is no such file.
      ModuleNotFoundError: if the package ``gguf`` is not installed.
      ValueError: if the file is truncated or damaged, or of another architecture, naming those that are known.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    metadata, stored = read_gguf(path)
    with refused(path):
        config = _config(metadata, stored, path)
    entries = {}
    for name, tensor in stored.items():
        if name == _ROPE_FREQUENCIES:
            continue
        heads = _heads_of_rows(name, config) if metadata["general.architecture"] == "llama" else None
        spec = jax.ShapeDtypeStruct(tensor.shape, np.dtype(np.float32))
        entries[_rename(name)] = (spec, _Dequantize(name, tensor, heads))
    return GGUF(config, Tensors(entries, sliceable=False), metadata)


_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral is one of llama
_ROPE_FREQUENCIES = "rope_freqs.weight"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Dequantize:
    """Reads one tensor; ``heads`` says that its rows are neighbouring rotary pairs of that many heads."""

    def __init__(self, name: str, tensor: StoredTensor, heads: int | None) -> None:
        self._name, self._tensor, self._heads = name, tensor, heads

    def __call__(self) -> np.ndarray:
        value = self._tensor.dequantize(self._name)
        if self._heads is None:
            return value
        pairs = value.reshape(self._heads, -1, 2, *value.shape[1:])
        return pairs.swapaxes(1, 2).reshape(value.shape)


def _config(metadata: Mapping[str, Any], stored: Mapping[str, StoredTensor], path: Path) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"{path}: unknown architecture {architecture!r}: known are {', '.join(_ARCHITECTURES)}")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if isinstance(value, list):
            raise ValueError(f"{path}: {architecture}.{key} differs between blocks, which is not supported")
        return value

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise ValueError(f"{path} lacks {architecture}.{key}")
        return value

    if "token_embd.weight" not in stored:
        raise ValueError(f"{path} lacks the tensor token_embd.weight")
    heads = need("attention.head_count")
    head_dim = get("attention.key_length", need("embedding_length") // heads)
    if get("rope.dimension_count", head_dim) != head_dim or get("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{path}: rotary positions of a part of each head are not supported")
    if get("expert_count", 0):
        raise ValueError(f"{path}: a mixture of experts is not supported")
    config = {
        "model_type": architecture,
        "vocab_size": stored["token_embd.weight"].shape[0],
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        # Stored in float32: the decimal number that was meant is the shortest one.
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": need("context_length"),
        "sliding_window": get("attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in stored,
        "rope_parameters": {
            "rope_theta": _shortest(get("rope.freq_base", 10_000.0)),
            **_rope_scaling(get, stored, path),
        },
        "dtype": "float32",
    }
    if config["sliding_window"]:
        more = {"use_sliding_window": True, "max_window_layers": 0}
        config |= {"model_type": "mistral"} if architecture == "llama" else more
    for setting, token in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        config[setting] = metadata.get(f"tokenizer.ggml.{token}_token_id")
    return config


def _rope_scaling(get: Callable[..., Any], stored: Mapping[str, StoredTensor], path: Path) -> dict[str, Any]:
    if _ROPE_FREQUENCIES in stored:
        return _llama3_scaling(stored[_ROPE_FREQUENCIES].dequantize(_ROPE_FREQUENCIES).astype(np.float64), get, path)
    kind = get("rope.scaling.type", "none")
    factor = get("rope.scaling.factor", get("rope.scale_linear"))
    if kind == "none" and factor in (None, 0.0, 1.0):
        return {"rope_type": "default"}
    if kind == "linear" or (kind == "none" and factor):
        return {"rope_type": "linear", "factor": _shortest(factor)}
    if kind != "yarn" or factor is None:
        raise ValueError(f"{path}: rope scaling {kind!r} with factor {factor} is not supported")
    scaling = {"rope_type": "yarn", "factor": _shortest(factor)}
    original = get("rope.scaling.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = original
    for key in ("beta_fast", "beta_slow"):
        if (value := get(f"rope.scaling.yarn_{key}")) is not None:
            scaling[key] = _shortest(value)
    # Here it multiplies the factor that transformers takes from the scaling, there it replaces it.
    if (value := get("rope.scaling.attn_factor", 1.0)) != 1.0:
        scaling["attention_factor"] = _shortest(value) * (0.1 * math.log(factor) + 1)
    return scaling


def _llama3_scaling(divisors: np.ndarray, get: Callable[..., Any], path: Path) -> dict[str, Any]:
    """The settings that give these divisors in Llama 3, whose models share all of them but the factor."""
    low, high, original = 1.0, 4.0, 8192
    theta = get("rope.freq_base", 10_000.0)
    factor = float(divisors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    blend = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - blend) / factor + blend)
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise ValueError(f"{path}: {_ROPE_FREQUENCIES} is not the scaling of Llama 3, and no other is supported")
    return {
        "rope_type": "llama3",
        "factor": _shortest(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _heads_of_rows(name: str, config: Mapping[str, Any]) -> int | None:
    if re.search(r"\.attn_q\.(weight|bias)$", name):
        return config["num_attention_heads"]
    if re.search(r"\.attn_k\.(weight|bias)$", name):
        return config["num_key_value_heads"]
    return None


def _rename(name: str) -> str:
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _NAMES:
        return name  # the reader of the checkpoint says that it is unexpected
    block = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{block}{_NAMES[found[2]]}.{found[3]}"


def _shortest(value: Any) -> float:
    return float(str(np.float32(value)))
