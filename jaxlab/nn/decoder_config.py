"""Sizes and switches of a `jaxlab.nn.decoder.Decoder`: one dataclass for Llama, Qwen2, Qwen3, Mistral and SmolLM2.

Example::

    smollm2 = DecoderConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        rope_theta=100_000.0, norm_eps=1e-5, tie_embeddings=True, max_position_embeddings=8192,
    )
"""

import dataclasses
import math

from jaxlab.nn.fields import check_types
from jaxlab.nn.rotary import RopeScaling

__all__ = ["LAYER_TYPES", "DecoderConfig"]

LAYER_TYPES = ("full_attention", "sliding_attention")
_DTYPES = ("float32", "bfloat16", "float16")
_ATTENTION_IMPLEMENTATIONS = ("xla", "cudnn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a decoder. Defaults are those of Llama. Hashable, so it may be a static argument of jit.

    Attributes:
      vocab_size: number of token ids.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated feed-forward layer.
      num_layers: number of blocks.
      num_heads: query heads of a block.
      num_kv_heads: key and value heads, a divisor of ``num_heads``; None means as many as query heads.
      head_dim: size of a head, even; None means ``hidden_size / num_heads``.
      max_position_embeddings: tokens of the longest sequence the model was made for; None means not known. It limits
        generation, and stands in for the length of training where ``rope_scaling`` gives none.
      rope_theta: base of the rotary frequencies.
      rope_scaling: change of the rotary frequencies for longer contexts; None means none.
      norm_eps: ε of the norms.
      tie_embeddings: the head is the embedding table.
      qkv_bias: biases on the query, key and value projections (Qwen2; Llama's ``attention_bias``).
      output_bias: bias on the output projection of the attention (Llama's ``attention_bias``, beside ``qkv_bias``).
      mlp_bias: biases on the three feed-forward projections (Llama's ``mlp_bias``).
      qk_norm: RMSNorm of every query and key head before the rotation (Qwen3).
      sliding_window: a token sees this many tokens, itself included (Mistral); None means all of them.
      layer_types: "sliding_attention" or "full_attention" for each block, the former being those with the window
        (Qwen2's ``max_window_layers`` written out); None means that all blocks have it.
      causal: a token sees no later token.
      initializer_range: standard deviation of fresh weights.
      dtype: in which matrix products are computed: "float32", "bfloat16" or "float16".
      param_dtype: in which parameters are kept; the same choices.
      remat: recompute a block's activations in the backward pass instead of keeping them.
      attention_implementation: "xla", or "cudnn" for the flash attention of `jax.nn.dot_product_attention` on NVIDIA
        GPUs, in bfloat16 or float16, wherever there is neither padding nor a filled cache to look at, and either all
        blocks have the window or none.

    Raises:
      ValueError: for a value of another type, a size below one, sizes that do not divide, an unknown layer type or
        dtype, naming the value.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    causal: bool = True
    initializer_range: float = 0.02
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False
    attention_implementation: str = "xla"

    def __post_init__(self):
        check_types(self)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            _check_at_least_one(name, getattr(self, name))
        _check_at_least_one("num_kv_heads", self.kv_heads)
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads; got {self.kv_heads} and {self.num_heads}")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                "num_heads must divide hidden_size unless head_dim is given; "
                f"got {self.num_heads} and {self.hidden_size}"
            )
        _check_at_least_one("head_dim", self.head_size)
        if self.head_size % 2:
            raise ValueError(f"head_dim must be even, for rotary positions turn pairs; got {self.head_size}")
        if self.max_position_embeddings is not None:
            _check_at_least_one("max_position_embeddings", self.max_position_embeddings)
        self._check_windows()
        scaling = self.rotary_scaling
        if scaling is not None and scaling.rope_type != "linear" and scaling.original_max_position_embeddings is None:
            raise ValueError(
                f"the rope scaling {scaling.rope_type} needs original_max_position_embeddings, "
                "or max_position_embeddings of the config; got neither"
            )
        for name in ("rope_theta", "norm_eps", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        if scaling is not None and scaling.rope_type == "yarn" and not self.rope_theta > 1:
            raise ValueError(f"the rope scaling yarn needs a rope_theta above 1; got {self.rope_theta}")
        _check_choice("dtype", self.dtype, _DTYPES)
        _check_choice("param_dtype", self.param_dtype, _DTYPES)
        _check_choice("attention_implementation", self.attention_implementation, _ATTENTION_IMPLEMENTATIONS)

    def _check_windows(self):
        if self.sliding_window is not None:
            _check_at_least_one("sliding_window", self.sliding_window)
            if not self.causal:
                raise ValueError("sliding_window needs causal=True")
        if self.layer_types is None:
            return
        if len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"layer_types must have one entry for each of the {self.num_layers} blocks; got {len(self.layer_types)}"
            )
        for layer_type in self.layer_types:
            _check_choice("layer_types", layer_type, LAYER_TYPES)
        if self.sliding_window is None and "sliding_attention" in self.layer_types:
            raise ValueError("layer_types with sliding_attention need a sliding_window; got None")

    # The fields stay as given, so that `dataclasses.replace` of another size derives these anew.
    @property
    def kv_heads(self) -> int:
        """Key and value heads of a block."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each block has the sliding window."""
        if self.layer_types is None:
            return (self.sliding_window is not None,) * self.num_layers
        return tuple(layer_type == "sliding_attention" for layer_type in self.layer_types)

    @property
    def rotary_scaling(self) -> RopeScaling | None:
        """``rope_scaling`` with the length of training filled in."""
        if self.rope_scaling is None or self.rope_scaling.original_max_position_embeddings is not None:
            return self.rope_scaling
        return dataclasses.replace(self.rope_scaling, original_max_position_embeddings=self.max_position_embeddings)

    @property
    def context_length(self) -> int | None:
        """Tokens of the longest sequence the positions are good for; None where that is not known or not bounded."""
        scaling = self.rotary_scaling
        if self.max_position_embeddings is None or scaling is None:
            return self.max_position_embeddings
        if scaling.rope_type == "dynamic":  # its base grows with the sequence
            return None
        length = scaling.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, math.floor(scaling.factor * length))


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
