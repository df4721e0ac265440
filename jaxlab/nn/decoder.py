"""A Llama-like decoder: one module for Llama, Qwen2 (q/k/v bias), Qwen3 (q/k norm) and Mistral (sliding window).

Each block maps the hidden states h ``[b, t, hidden]`` to ::

    h ← h + m · Attention(RMSNorm(h))
    h ← h + m · W_down (silu(W_gate z) ⊙ W_up z),   z = RMSNorm(h)

with grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245), rotary positions (`jaxlab.nn.rotary`), SwiGLU
(Shazeer 2020, arXiv 2002.05202) and an optional mask m per block. The architecture is that of Touvron et al. 2023
(arXiv 2302.13971). The logits are ``W_head RMSNorm(h)``, and ``W_head`` may be the embedding table.

The parameters are a nested dict whose paths are the names in a Hugging Face checkpoint and whose matrices keep its
``[out, in]`` layout::

    model/embed_tokens/weight            [vocabulary, hidden]
    model/layers/self_attn/q_proj/weight [layers, heads · head_dim, hidden]    (bias: Qwen2; q_norm, k_norm: Qwen3)
    model/layers/mlp/gate_proj/weight    [layers, intermediate, hidden]
    model/norm/weight, lm_head/weight    (no lm_head with a tied embedding)

The only change is that all blocks are stacked on a leading axis. They are run by ``lax.scan``, so that the time to
compile does not grow with the depth.

Precision: products in ``dtype``; softmax, norms, rotations, logits and loss in float32.

Example::

    config = DecoderConfig(vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4)
    apply_fn, params = init(config, jax.random.key(0))
    loss = next_token_loss(apply_fn(params, tokens), tokens)                      # tokens [b, t]
    logits = jax.vmap(apply_fn)(params_of_nodes, tokens_of_nodes)                 # one more axis in front
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxlab.nn.linear import Embedding, Linear
from jaxlab.nn.norm import RMSNorm
from jaxlab.nn.pure import pure_function
from jaxlab.nn.rotary import apply_rotary, rotary_angles

__all__ = ["Decoder", "DecoderConfig", "init", "make_apply", "next_token_loss"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a `Decoder`. Defaults are those of Llama.

    Attributes:
      vocab_size: number of token ids.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated feed-forward layer.
      num_layers: number of blocks.
      num_heads: query heads of a block.
      num_kv_heads: key and value heads, a divisor of ``num_heads``; None means as many as query heads.
      head_dim: size of a head, even; None means ``hidden_size / num_heads``.
      rope_theta: base of the rotary frequencies.
      norm_eps: ε of the norms.
      tie_embeddings: the head is the embedding table.
      qkv_bias: biases on the query, key and value projections (Qwen2).
      qk_norm: RMSNorm of every query and key head before the rotation (Qwen3).
      sliding_window: a token sees this many tokens, itself included (Mistral); None means all of them.
      causal: a token sees no later token.
      initializer_range: standard deviation of fresh weights.
      dtype: in which matrix products are computed: "float32", "bfloat16" or "float16".
      param_dtype: in which parameters are kept; the same choices.
      remat: recompute a block's activations in the backward pass instead of keeping them.

    Raises:
      ValueError: for a size below one, sizes that do not divide, or an unknown dtype, naming the value.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    causal: bool = True
    initializer_range: float = 0.02
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False

    def __post_init__(self):
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
        if self.sliding_window is not None:
            _check_at_least_one("sliding_window", self.sliding_window)
            if not self.causal:
                raise ValueError("sliding_window needs causal=True")
        for name in ("rope_theta", "norm_eps", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(f"{name} must be one of {', '.join(_DTYPES)}; got {getattr(self, name)!r}")

    # The fields stay as given, so that `dataclasses.replace` of another size derives these anew.
    @property
    def kv_heads(self) -> int:
        """Key and value heads of a block."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim


def init(config: DecoderConfig, key: Key[Array, ""]) -> tuple[Callable[..., Array], dict[str, Any]]:
    """Give the decoder as a pure function, and fresh parameters.

    Weights are drawn from N(0, ``initializer_range``²), norms start at one and biases at zero. Under ``jax.vmap``
    over keys the parameters come out stacked; under ``jax.eval_shape`` only their shapes.

    Returns:
      ``apply_fn`` as made by `make_apply`, and its ``params``.
    """
    params = nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(key))))
    return make_apply(config), params


def make_apply(config: DecoderConfig) -> Callable[..., Array]:
    """Give the decoder as a pure function of its parameters.

    Returns:
      ``apply_fn(params, tokens, *, positions=None, block_mask=None) -> logits``, with the arguments of `Decoder`.
      It may be jitted, differentiated, vmapped over stacked parameters and used inside ``jax.shard_map``. It raises
      ValueError, naming the parameter, when ``params`` belong to another config.
    """
    return pure_function(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def next_token_loss(
    logits: Float[Array, "*batch t v"],
    tokens: Int[Array | np.ndarray, "*batch t"],
    *,
    mask: Float[Array | np.ndarray, "*batch t"] | Bool[Array | np.ndarray, "*batch t"] | None = None,
) -> Float[Array, ""]:
    """Mean cross-entropy, in nats, of each token given those before it; float32.

    The logits at position s predict the token at s + 1; those at the last position are not used.

    Args:
      logits: output of the decoder on ``tokens``.
      tokens: token ids, at least two a sequence.
      mask: weight of each token as a *target* (that of the first has no effect), say False on padding. The mean
        is over the weights; it is 0 when none is positive.

    Raises:
      ValueError: if the sequences are shorter than two tokens.
    """
    if tokens.shape[-1] < 2:
        raise ValueError(f"a next token needs sequences of at least two tokens; got {tokens.shape[-1]}")
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[..., :-1, :].astype(jnp.float32), tokens[..., 1:])
    if mask is None:
        return jnp.mean(losses)
    weights = jnp.asarray(mask[..., 1:], jnp.float32)
    total = jnp.sum(weights)
    return jnp.sum(losses * weights) / jnp.where(total > 0, total, 1.0)


class Decoder(nnx.Module):
    """The decoder with its head; `init` gives it as a pure function.

    Args:
      config: sizes and switches.
      rngs: source of the keys of fresh weights.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.model = _Stack(config, rngs=rngs)
        self.lm_head = None if config.tie_embeddings else _linear(config, config.hidden_size, config.vocab_size, rngs)

    def __call__(
        self,
        tokens: Int[Array | np.ndarray, "b t"],
        *,
        positions: Int[Array | np.ndarray, "#b t"] | None = None,
        block_mask: Float[Array | np.ndarray, " layers"] | None = None,
    ) -> Float[Array, "b t v"]:
        """Logits, float32, of the token that follows each token.

        Args:
          tokens: token ids; one outside the vocabulary makes the logits of its sequence NaN.
          positions: positions for the rotary embedding; None means 0, 1, ...
          block_mask: factor in [0, 1] on the residual branches of each block: 1 runs it, 0 makes it the identity.

        Raises:
          ValueError: if ``block_mask`` does not have one entry a block.
        """
        if block_mask is not None and block_mask.shape != (self.config.num_layers,):
            raise ValueError(f"block_mask must have shape ({self.config.num_layers},); got {block_mask.shape}")
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None]
        hidden = self.model(tokens, positions, block_mask)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        weight = head.weight[...].astype(self.config.dtype)
        return jnp.einsum("btd,vd->btv", hidden, weight, preferred_element_type=jnp.float32)


_DTYPES = ("float32", "bfloat16", "float16")


class _Stack(nnx.Module):
    """Embedding, blocks and final norm: tokens to hidden states."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(
            config.vocab_size,
            config.hidden_size,
            stddev=config.initializer_range,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stacked(rngs):
            return _Block(config, rngs=rngs)

        self.layers = stacked(rngs)
        self.norm = _norm(config, config.hidden_size)

    def __call__(self, tokens, positions, block_mask):
        angles = rotary_angles(positions, head_dim=self.config.head_size, theta=self.config.rope_theta)
        graph, layers = nnx.split(self.layers)

        def run_block(hidden, block):
            params, mask = block
            return nnx.merge(graph, params)(hidden, angles, mask), None

        if self.config.remat:
            # In a scan the backward pass is another loop, so that nothing merges across it: no barriers are needed.
            run_block = jax.checkpoint(run_block, prevent_cse=False)
        hidden, _ = lax.scan(run_block, self.embed_tokens(tokens), (layers, block_mask))
        return self.norm(hidden)


class _Block(nnx.Module):
    """Attention, then the feed-forward layer, each on a residual branch."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = _norm(config, config.hidden_size)
        self.self_attn = _Attention(config, rngs=rngs)
        self.post_attention_layernorm = _norm(config, config.hidden_size)
        self.mlp = _FeedForward(config, rngs=rngs)

    def __call__(self, hidden, angles, mask):
        scale = 1 if mask is None else mask.astype(hidden.dtype)
        hidden = hidden + scale * self.self_attn(self.input_layernorm(hidden), angles)
        return hidden + scale * self.mlp(self.post_attention_layernorm(hidden))


class _Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, kv_width = config.num_heads * config.head_size, config.kv_heads * config.head_size
        self.q_proj = _linear(config, config.hidden_size, width, rngs, use_bias=config.qkv_bias)
        self.k_proj = _linear(config, config.hidden_size, kv_width, rngs, use_bias=config.qkv_bias)
        self.v_proj = _linear(config, config.hidden_size, kv_width, rngs, use_bias=config.qkv_bias)
        self.o_proj = _linear(config, width, config.hidden_size, rngs)
        self.q_norm = _norm(config, config.head_size) if config.qk_norm else None
        self.k_norm = _norm(config, config.head_size) if config.qk_norm else None

    def __call__(self, x, angles):
        query, key, value = (
            jnp.reshape(projection(x), (*x.shape[:2], -1, self.config.head_size))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        window = self.config.sliding_window
        mixed = jax.nn.dot_product_attention(
            apply_rotary(query, angles),
            apply_rotary(key, angles),
            value,
            is_causal=self.config.causal,
            local_window_size=None if window is None else (window - 1, 0),
        )
        return self.o_proj(jnp.reshape(mixed, (*x.shape[:2], -1)))


class _FeedForward(nnx.Module):
    """SwiGLU: ``W_down (silu(W_gate x) ⊙ W_up x)``."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.gate_proj = _linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.up_proj = _linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.down_proj = _linear(config, config.intermediate_size, config.hidden_size, rngs)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def _linear(
    config: DecoderConfig, in_features: int, out_features: int, rngs: nnx.Rngs, *, use_bias: bool = False
) -> Linear:
    return Linear(
        in_features,
        out_features,
        use_bias=use_bias,
        stddev=config.initializer_range,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _norm(config: DecoderConfig, size: int) -> RMSNorm:
    return RMSNorm(size, eps=config.norm_eps, param_dtype=config.param_dtype)


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}")
