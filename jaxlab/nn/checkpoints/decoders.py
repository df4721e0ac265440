"""Families of decoders: Llama (SmolLM2 too), Mistral, Qwen2 and Qwen3.

A ``config.json`` is read as ``transformers`` reads it, of version 4, which has ``rope_theta`` and ``rope_scaling``, and
of version 5, which has ``rope_parameters`` in their place; what is written suits both. A setting that changes the
network and that ours lacks is an error.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxlab.nn import decoder
from jaxlab.nn.checkpoints.family import Family
from jaxlab.nn.decoder import DecoderConfig
from jaxlab.nn.rotary import ROPE_TYPES, RopeScaling

__all__ = ["FAMILIES", "find_decoder_family"]


def find_decoder_family(config: DecoderConfig) -> Family:
    """The first family of `FAMILIES` that has a network of this config, to save what was not loaded.

    Raises:
      ValueError: if none has.
    """
    for family in FAMILIES:
        try:
            family.write_config(config)
        except ValueError:
            continue
        return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(f"no model type of {known} has this combination of switches: {config}")


@dataclasses.dataclass(frozen=True)
class _ModelType:
    """What differs between the model types; the methods are the two directions of a family."""

    name: str
    default_kv_heads: int | None = None
    default_head_dim: int | None = None
    qkv_bias: bool = False
    attention_bias: bool = False  # the setting of that name, with a bias on the output too
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: str = ""  # "all" blocks, or "some"

    def read(self, settings: Mapping[str, Any]) -> DecoderConfig:
        get = settings.get
        try:
            layers, heads = settings["num_hidden_layers"], settings["num_attention_heads"]
            sizes = {name: settings[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
        except KeyError as error:
            raise ValueError(f"config.json lacks {error}") from None
        _check_supported(settings)
        # Not bool(...): whatever is no flag is refused by the config.
        bias = self.attention_bias and (get("attention_bias") or False)
        rope_theta, rope_scaling = _read_rope(settings)
        window, layer_types = self._read_windows(settings, layers)
        dtype = str(get("dtype") or get("torch_dtype") or "float32")
        return DecoderConfig(
            **sizes,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=get("num_key_value_heads", self.default_kv_heads),
            head_dim=get("head_dim", self.default_head_dim),
            max_position_embeddings=get("max_position_embeddings"),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_eps=get("rms_norm_eps", 1e-6),
            tie_embeddings=get("tie_word_embeddings") or False,
            qkv_bias=self.qkv_bias or bias,
            output_bias=bias,
            mlp_bias=self.mlp_bias and (get("mlp_bias") or False),
            qk_norm=self.qk_norm,
            sliding_window=window,
            layer_types=layer_types,
            initializer_range=get("initializer_range", 0.02),
            dtype=dtype,
            param_dtype=dtype,
        )

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default"}
        if (scaling := config.rotary_scaling) is not None:
            rope = {"rope_type": scaling.rope_type}
            rope |= {name: getattr(scaling, name) for name in _SCALING_FIELDS[scaling.rope_type]}
            rope = {name: value for name, value in rope.items() if value is not None}
        settings: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps,
            "initializer_range": config.initializer_range,
            "tie_word_embeddings": config.tie_embeddings,
            "rope_parameters": {"rope_theta": config.rope_theta, **rope},
            # For transformers before version 5.
            "rope_theta": config.rope_theta,
            "rope_scaling": None if scaling is None else rope,
        }
        if config.max_position_embeddings is not None:
            settings["max_position_embeddings"] = config.max_position_embeddings
        if self.attention_bias:
            settings["attention_bias"] = config.output_bias
        if self.mlp_bias:
            settings["mlp_bias"] = config.mlp_bias
        if self.windows == "all":
            settings["sliding_window"] = config.sliding_window
        elif self.windows == "some":
            windowed = config.windowed_layers
            settings |= {
                "use_sliding_window": any(windowed),
                "sliding_window": config.sliding_window,
                "layer_types": [("full_attention", "sliding_attention")[has_window] for has_window in windowed],
                "max_window_layers": windowed.index(True) if any(windowed) else config.num_layers,
            }
        self._check_kept(config, settings)
        return settings

    def _read_windows(self, settings: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[str, ...] | None]:
        if self.windows == "all":
            return settings.get("sliding_window", 4096), None
        window = settings.get("sliding_window", 4096)
        if self.windows == "" or not settings.get("use_sliding_window", False) or window is None:
            return None, None
        first = settings.get("max_window_layers", 28)
        default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        return window, tuple(settings.get("layer_types") or default)

    def _check_kept(self, config: DecoderConfig, settings: Mapping[str, Any]) -> None:
        """What is written must be read back as the same network."""
        given, kept = _network(config), _network(self.read(settings))
        for name, value in given.items():
            if kept[name] != value:
                raise ValueError(f"model_type {self.name!r} has no {name}={value!r}; save it as another family")


def _network(config: DecoderConfig) -> dict[str, Any]:
    """All that decides what the network computes."""
    runtime = ("dtype", "param_dtype", "remat", "attention_implementation", "layer_types")
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    derived = {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "rope_scaling": config.rotary_scaling,
        "sliding_window": config.sliding_window if any(config.windowed_layers) else None,
        "windowed_layers": config.windowed_layers,
    }
    return {name: value for name, value in {**fields, **derived}.items() if name not in runtime}


_SCALING_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


def _read_rope(settings: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"config.json: rotary settings that differ between blocks are not supported: {rope}")
    theta = float(rope.get("rope_theta") or settings.get("rope_theta") or 10_000.0)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "default":
        return theta, None
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"config.json: unknown rope_type {rope_type!r}: known are default, {', '.join(ROPE_TYPES)}")
    given = {name: rope[name] for name in _SCALING_FIELDS[rope_type] if rope.get(name) is not None}
    if "factor" not in given:
        raise ValueError(f"config.json: rope scaling {rope_type!r} lacks its factor")
    return theta, RopeScaling(rope_type, **given)


def _check_supported(settings: Mapping[str, Any]) -> None:
    rope = settings.get("rope_parameters") or {}
    if (activation := settings.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act {activation!r} is not supported; only silu is")
    partial = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"config.json: partial_rotary_factor {partial} is not supported; only 1 is")
    if quantisation := settings.get("quantization_config"):
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise ValueError(f"config.json: weights quantised by {method} are not supported; take the unquantised ones")


def _family(model_type: _ModelType, architecture: str) -> Family:
    return Family(
        model_type=model_type.name,
        architectures=(architecture,),
        read_config=model_type.read,
        write_config=model_type.write,
        init=decoder.init,
        make_apply=decoder.make_apply,
        blocks=("model/layers",),
        # Buffers of old versions, and the head that a tied embedding makes superfluous.
        ignored=(r"\.rotary_emb\.inv_freq$", r"^lm_head\.weight$"),
    )


FAMILIES: tuple[Family, ...] = (
    _family(_ModelType("llama", attention_bias=True, mlp_bias=True), "LlamaForCausalLM"),
    _family(_ModelType("mistral", default_kv_heads=8, windows="all"), "MistralForCausalLM"),
    _family(_ModelType("qwen2", default_kv_heads=32, qkv_bias=True, windows="some"), "Qwen2ForCausalLM"),
    _family(
        _ModelType(
            "qwen3", default_kv_heads=32, default_head_dim=128, attention_bias=True, qk_norm=True, windows="some"
        ),
        "Qwen3ForCausalLM",
    ),
)
