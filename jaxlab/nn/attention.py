"""Grouped-query self-attention (Ainslie et al. 2023, arXiv 2305.13245) with rotary positions and a cache.

A query at slot q sees the key at slot k when all of these hold: k ≤ q (where causal), the key is a real token, and,
in a block with a window of w tokens, fewer than w real tokens lie between them, the key included. Slots are places in
the sequence or in the cache; padding holds a slot but is no real token, so that it counts for nothing on either side.

Example::

    visible = attention_masks(config, real=padding_mask)                     # [b, t]: left or right padding
    mixed, _ = attention(x, rotation, mask=visible.full)                     # x [b, t, hidden]
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxlab.nn.decoder_config import DecoderConfig
from jaxlab.nn.linear import Linear
from jaxlab.nn.norm import RMSNorm
from jaxlab.nn.rotary import Rotation, apply_rotary

__all__ = ["Attention", "AttentionMasks", "LayerCache", "attention_masks", "check_padding", "take_tokens"]


class AttentionMasks(NamedTuple):
    """Which keys each query sees, in blocks without and with the sliding window; None where no block is of the kind.

    Attributes:
      full: without the window.
      windowed: with it.
    """

    full: Bool[Array, "b t s"] | None
    windowed: Bool[Array, "b t s"] | None


class LayerCache(NamedTuple):
    """Keys (rotated) and values of one block, a slot for each token there is room for.

    Heads stand before slots, so that the products of a step read one contiguous piece of memory a head.
    """

    keys: Float[Array, "b kv_heads slots head_dim"]
    values: Float[Array, "b kv_heads slots head_dim"]


def attention_masks(
    config: DecoderConfig, *, real: Bool[Array, "b s"], queries: Int[Array, " t"] | None = None
) -> AttentionMasks:
    """Write out which keys each query sees.

    Args:
      config: causality and windows.
      real: which slots hold a real token.
      queries: the slots of the queries; None means all.
    """
    slots = jnp.arange(real.shape[1])
    queries = slots if queries is None else queries
    full = jnp.broadcast_to(real[:, None, :], (real.shape[0], queries.shape[0], real.shape[1]))
    if config.causal:
        full = full & (slots[None, None, :] <= queries[None, :, None])
    if config.sliding_window is None or not any(config.windowed_layers):
        return AttentionMasks(full, None)
    order = jnp.cumsum(real, axis=1)
    distance = order[:, queries][:, :, None] - order[:, None, :]
    windowed = full & (distance < config.sliding_window)
    return AttentionMasks(None if all(config.windowed_layers) else full, windowed)


def check_padding(padding_mask: Bool[Array | np.ndarray, "b t"] | None) -> None:
    """Raise ValueError, naming the row, if padding stands inside a sequence; nothing is checked while tracing."""
    if padding_mask is None or isinstance(padding_mask, jax.core.Tracer):
        return
    real = np.asarray(padding_mask)
    # A row of real tokens in one piece rises once at most and falls once at most.
    edges = np.sum(np.diff(real.astype(np.int8), axis=1, prepend=0, append=0) == 1, axis=1)
    if (edges > 1).any():
        raise ValueError(f"padding must stand left or right of a sequence, not inside; row {int(np.argmax(edges > 1))}")


def take_tokens(x: Shaped[Array, "#b t d"], index: Int[Array, " b"]) -> Shaped[Array, "b 1 d"]:
    """One token of each sequence."""
    x = jnp.broadcast_to(x, (index.shape[0], *x.shape[1:]))
    return jnp.take_along_axis(x, index[:, None, None], axis=1)


class Attention(nnx.Module):
    """The attention of one block of a decoder: four projections around the softmax, which is float32.

    Args:
      config: sizes and switches.
      rngs: source of the keys of fresh weights.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config

        def linear(in_features: int, out_features: int, use_bias: bool) -> Linear:
            return Linear(
                in_features,
                out_features,
                use_bias=use_bias,
                stddev=config.initializer_range,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )

        def head_norm() -> RMSNorm | None:
            if not config.qk_norm:
                return None
            return RMSNorm(config.head_size, eps=config.norm_eps, param_dtype=config.param_dtype)

        width, kv_width = config.num_heads * config.head_size, config.kv_heads * config.head_size
        self.q_proj = linear(config.hidden_size, width, config.qkv_bias)
        self.k_proj = linear(config.hidden_size, kv_width, config.qkv_bias)
        self.v_proj = linear(config.hidden_size, kv_width, config.qkv_bias)
        self.o_proj = linear(width, config.hidden_size, config.output_bias)
        self.q_norm = head_norm()
        self.k_norm = head_norm()

    def __call__(
        self,
        x: Float[Array, "b t hidden"],
        rotation: Rotation,
        *,
        mask: Bool[Array, "#b t s"] | None = None,
        cache: LayerCache | None = None,
        slot: Int[Array, ""] | int = 0,
        fresh: bool = True,
        only: Int[Array, " b"] | None = None,
    ) -> tuple[Float[Array, "b q hidden"], LayerCache | None]:
        """Mix the tokens, and write their keys and values into the cache where there is one.

        Args:
          x: normed hidden states.
          rotation: of the tokens' positions.
          mask: which keys each query sees; None means causality and the window of the config alone, left to flash
            attention.
          cache: keys and values of earlier tokens.
          slot: where in the cache the first of these tokens goes.
          fresh: the tokens see each other alone, s = t, and what the cache held does not count. Otherwise s is the
            number of slots of the cache.
          only: the one token of each sequence that is to be mixed, q = 1; None means all, q = t. It needs a mask.
        """
        config = self.config
        turn = rotation
        asking = x
        if only is not None and mask is not None:
            asking, mask = take_tokens(x, only), take_tokens(mask, only)
            turn = Rotation(*(take_tokens(part, only) for part in rotation))

        def heads(projection: Linear, tokens: Array) -> Array:
            number = projection.weight.shape[0] // config.head_size
            return jnp.reshape(projection(tokens), (*tokens.shape[:2], number, config.head_size))

        query, key, value = heads(self.q_proj, asking), heads(self.k_proj, x), heads(self.v_proj, x)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary(query, turn), apply_rotary(key, rotation)
        new = LayerCache(jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2))
        if cache is not None:
            cache = LayerCache(
                *(
                    lax.dynamic_update_slice_in_dim(old, part.astype(old.dtype), slot, axis=2)
                    for old, part in zip(cache, new, strict=True)
                )
            )
        if mask is None:
            mixed = self._flash(query, key, value)
        else:
            mixed = _attend(query, new if cache is None or fresh else cache, mask)
        return self.o_proj(jnp.reshape(mixed, (*asking.shape[:2], config.num_heads * config.head_size))), cache

    def _flash(self, query: Array, key: Array, value: Array) -> Array:
        config = self.config
        window = config.sliding_window if all(config.windowed_layers) else None
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=config.causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )


def _attend(
    query: Float[Array, "b t heads head_dim"], layer: LayerCache, mask: Bool[Array, "#b t s"]
) -> Float[Array, "b t heads head_dim"]:
    """Softmax attention; the queries that share a key head are rows of one product."""
    batch, tokens, heads, size = query.shape
    kv_heads, slots = layer.keys.shape[1:3]
    sharing = heads // kv_heads
    grouped = jnp.transpose(jnp.reshape(query, (batch, tokens, kv_heads, sharing, size)), (0, 2, 3, 1, 4))
    rows = jnp.reshape(grouped, (batch, kv_heads, sharing * tokens, size)).astype(layer.keys.dtype)
    scores = jnp.einsum("bkrd,bksd->bkrs", rows, layer.keys, preferred_element_type=jnp.float32)
    scores = jnp.reshape(scores / size**0.5, (batch, kv_heads, sharing, tokens, slots))
    # The lowest finite number: a query that sees nothing (padding) then gets a mean, where -inf would give NaN.
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(mask[:, None, None], scores, lowest)
    # Softmax whose division waits until the values are summed, since they have fewer columns than there are keys.
    highest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=lowest))
    shares = jnp.exp(scores - highest)
    total = jnp.reshape(jnp.sum(shares, axis=-1), (batch, kv_heads, sharing * tokens, 1))
    rows = jnp.reshape(shares, (batch, kv_heads, sharing * tokens, slots)).astype(layer.values.dtype)
    mixed = jnp.einsum("bkrs,bksd->bkrd", rows, layer.values, preferred_element_type=jnp.float32) / total
    mixed = jnp.transpose(jnp.reshape(mixed, grouped.shape), (0, 3, 1, 2, 4))
    return jnp.reshape(mixed, (batch, tokens, heads, size)).astype(query.dtype)
