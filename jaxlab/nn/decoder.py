"""A Llama-like decoder: one module for Llama, Qwen2 (q/k/v bias), Qwen3 (q/k norm) and Mistral (sliding window).

Each block maps the hidden states h ``[b, t, hidden]`` to ::

    h ← h + m · Attention(RMSNorm(h))
    h ← h + m · W_down (silu(W_gate z) ⊙ W_up z),   z = RMSNorm(h)

with grouped-query attention (`jaxlab.nn.attention`), rotary positions (`jaxlab.nn.rotary`), SwiGLU
(Shazeer 2020, arXiv 2002.05202) and an optional mask m per block. The architecture is that of Touvron et al. 2023
(arXiv 2302.13971). The logits are ``W_head RMSNorm(h)``, and ``W_head`` may be the embedding table.

The parameters are a nested dict whose paths are the names in a Hugging Face checkpoint and whose matrices keep its
``[out, in]`` layout::

    model/embed_tokens/weight            [vocabulary, hidden]
    model/layers/self_attn/q_proj/weight [layers, heads · head_dim, hidden]    (bias: Qwen2; q_norm, k_norm: Qwen3)
    model/layers/mlp/gate_proj/weight    [layers, intermediate, hidden]
    model/norm/weight, lm_head/weight    (no lm_head with a tied embedding)

The only change is that all blocks are stacked on a leading axis. They are run by ``lax.scan``, so that the time to
compile does not grow with the depth. `jaxlab.nn.decoder_layout` has the other layout, with which generation on CPUs is
faster, and the split over devices.

Precision: products in ``dtype``; softmax, norms, rotations, logits and loss in float32.

Example::

    config = DecoderConfig(vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4)
    apply_fn, params = init(config, jax.random.key(0))
    loss = next_token_loss(apply_fn(params, tokens), tokens)                      # tokens [b, t]
    logits = jax.vmap(apply_fn)(params_of_nodes, tokens_of_nodes)                 # one more axis in front
    logits, hidden = apply_fn(params, tokens, padding_mask=real, hidden_states=(0, 1))
    logits, cache = apply_cached(config, params, tokens, init_cache(config, batch=b, length=64), fresh=True)
    logits, cache = apply_cached(config, params, jnp.argmax(logits[:, -1:], -1), cache)
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxlab.nn.attention import Attention, AttentionMasks, LayerCache, attention_masks, check_padding, take_tokens
from jaxlab.nn.decoder_config import DecoderConfig
from jaxlab.nn.kv_cache import KVCache
from jaxlab.nn.linear import Embedding, Linear
from jaxlab.nn.norm import RMSNorm
from jaxlab.nn.pure import (
    check_block_mask,
    check_hidden_states,
    check_parameters,
    check_tokens,
    parameter_shapes,
)
from jaxlab.nn.rotary import Rotation, rotary_rotation

__all__ = [
    "Decoder",
    "DecoderConfig",
    "apply_cached",
    "init",
    "make_apply",
    "next_token_loss",
]


def init(config: DecoderConfig, key: Key[Array, ""]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Give the decoder as a pure function, and fresh parameters.

    Weights are drawn from N(0, ``initializer_range``²), norms start at one and biases at zero. Under ``jax.vmap``
    over keys the parameters come out stacked; under ``jax.eval_shape`` only their shapes.

    Returns:
      ``apply_fn`` as made by `make_apply`, and its ``params``.
    """
    params = nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(key))))
    return make_apply(config), params


def make_apply(config: DecoderConfig) -> Callable[..., Any]:
    """Give the decoder as a pure function of its parameters.

    Returns:
      ``apply_fn(params, tokens, *, positions=None, padding_mask=None, block_mask=None, hidden_states=None)``, which
      gives logits, or (logits, hidden) where hidden states are asked for; the arguments are those of `Decoder`.
      It may be jitted, differentiated, vmapped over stacked parameters and used inside ``jax.shard_map``. It raises
      ValueError, naming the parameter, when ``params`` belong to another config.
    """
    return functools.partial(_apply, config, _structure(config))


def apply_cached(
    config: DecoderConfig,
    params: Mapping[str, Any],
    tokens: Int[Array | np.ndarray, "b t"],
    cache: KVCache,
    *,
    padding_mask: Bool[Array | np.ndarray, "b t"] | None = None,
    block_mask: Float[Array | np.ndarray, " layers"] | None = None,
    fresh: bool = False,
    last: bool = False,
) -> tuple[Float[Array, "b t v"] | Float[Array, "b v"], KVCache]:
    """Logits of the tokens that follow those of the cache, and the cache with them in it. Pure.

    Positions count the real tokens of each sequence, those of the cache included. A rope scaling that depends on the
    length of the sequence (dynamic) leaves keys in the cache as they were turned when their token was the last.

    Args:
      config: of the decoder; a static argument under jit. It must be causal.
      params: parameters, stacked or unstacked as the cache is.
      tokens: the next tokens of each sequence.
      cache: the tokens before.
      padding_mask: True for real tokens; padding may stand left or right, and in another place at every call.
      block_mask: as for `Decoder`.
      fresh: promises that the cache is empty, so that attention need not look at it: faster for a whole prompt.
      last: give the logits of each sequence's last real token alone.

    Raises:
      ValueError: if the cache has too few slots (where ``cache.filled`` is not traced), the decoder is not causal, or
        params, cache and config do not fit each other.
    """
    if not config.causal:
        raise ValueError("a cache needs a causal decoder; got causal=False")
    check_tokens(tokens, padding_mask=padding_mask)
    batch, slots = cache.real.shape
    if tokens.shape[0] != batch:
        raise ValueError(f"tokens must have one row for each of the cache's {batch} sequences; got {tokens.shape[0]}")
    filled = 0 if isinstance(cache.filled, jax.core.Tracer) else int(cache.filled)
    if filled + tokens.shape[1] > slots:
        raise ValueError(f"{filled} + {tokens.shape[1]} tokens do not fit into a cache of {slots} slots")
    unstacked = is_unstacked(params)
    if unstacked == isinstance(cache.layers, LayerCache):
        names = ("stacked", "unstacked")
        raise ValueError(f"params are {names[unstacked]} and the cache is {names[not unstacked]}")
    network = _merge(_structure(config, unstacked=unstacked), params)
    return network.extend(tokens, cache, padding_mask=padding_mask, block_mask=block_mask, fresh=fresh, last=last)


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
      ValueError: if the sequences are shorter than two tokens, or the logits are not those of ``tokens``.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(f"logits must have the shape of the tokens, {tokens.shape}, and an axis; got {logits.shape}")
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
      unstacked: keep the blocks one by one instead of stacked.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, unstacked: bool = False):
        self.config = config
        self.model = _Stack(config, rngs=rngs, unstacked=unstacked)
        self.lm_head = None if config.tie_embeddings else _linear(config, config.hidden_size, config.vocab_size, rngs)

    def __call__(
        self,
        tokens: Int[Array | np.ndarray, "b t"],
        *,
        positions: Int[Array | np.ndarray, "#b t"] | None = None,
        padding_mask: Bool[Array | np.ndarray, "b t"] | None = None,
        block_mask: Float[Array | np.ndarray, " layers"] | None = None,
        hidden_states: tuple[int, ...] | None = None,
    ) -> Float[Array, "b t v"] | tuple[Float[Array, "b t v"], Float[Array, "n b t hidden"]]:
        """Logits, float32, of the token that follows each token.

        Args:
          tokens: token ids; one outside the vocabulary makes the logits of its sequence NaN.
          positions: positions for the rotary embedding; None means 0, 1, ... over the real tokens.
          padding_mask: True for real tokens; left or right padding. No token sees padding; the logits and hidden
            states at padding are finite and mean nothing.
          block_mask: factor in [0, 1] on the residual branches of each block: 1 runs it, 0 makes it the identity.
          hidden_states: which hidden states to give too, as `transformers` counts them: 0 is the embedding, i what
            block i - 1 gives, and ``num_layers`` (or -1) the last after the final norm. Only these are kept.

        Returns:
          Logits; with ``hidden_states`` a pair of them and those states, stacked in the order asked for.

        Raises:
          ValueError: if ``block_mask`` does not have one entry a block, ``padding_mask`` (where not traced) has
            padding inside a sequence, or a hidden state does not exist.
        """
        check_tokens(tokens, padding_mask=padding_mask, positions=positions)
        check_block_mask(block_mask, self.config.num_layers)
        check_padding(padding_mask)
        real = None if padding_mask is None else jnp.asarray(padding_mask)
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None] if real is None else _count(real)
        masks = self._masks(tokens.shape[1], real)
        wanted = _hidden_indices(hidden_states, self.config.num_layers)
        hidden, kept = self.model(tokens, positions, masks, block_mask, wanted)
        logits = self.logits(hidden)
        return logits if hidden_states is None else (logits, kept)

    def extend(self, tokens, cache, *, padding_mask=None, block_mask=None, fresh=False, last=False):
        """Logits and the longer cache, with the arguments of `apply_cached`."""
        check_block_mask(block_mask, self.config.num_layers)
        check_padding(padding_mask)
        real = jnp.ones(tokens.shape, bool) if padding_mask is None else jnp.asarray(padding_mask)
        before = jnp.sum(cache.real, axis=1, keepdims=True)
        cached = lax.dynamic_update_slice_in_dim(cache.real, real, cache.filled, axis=1)
        if fresh:
            masks = self._masks(tokens.shape[1], None if padding_mask is None else real)
        else:
            slots = cache.filled + jnp.arange(tokens.shape[1])
            masks = attention_masks(self.config, real=cached, queries=slots)
        only = tokens.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1) if last else None
        hidden, layers = self.model.extend(tokens, before + _count(real), masks, block_mask, cache, fresh, only)
        if last:
            hidden = hidden[:, 0]
        return self.logits(hidden), KVCache(layers=layers, real=cached, filled=cache.filled + tokens.shape[1])

    def logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch v"]:
        """Logits, float32, of hidden states that went through the final norm."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        weight = head.weight[...].astype(self.config.dtype)
        return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)

    def _masks(self, length: int, real: Array | None) -> AttentionMasks | None:
        """Of a whole sequence; None where flash attention knows them by itself."""
        config = self.config
        if real is None and config.attention_implementation == "cudnn" and len(set(config.windowed_layers)) == 1:
            return None
        return attention_masks(config, real=jnp.ones((1, length), bool) if real is None else real)


class _Stack(nnx.Module):
    """Embedding, blocks and final norm: tokens to hidden states."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, unstacked: bool):
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

        if unstacked:
            self.layers = nnx.List([_Block(config, rngs=rngs) for _ in range(config.num_layers)])
        else:
            self.layers = stacked(rngs)
        self.norm = _norm(config)

    def __call__(self, tokens, positions, masks, block_mask, wanted):
        hidden = self.embed_tokens(tokens)
        depth = self.config.num_layers
        kept = jnp.zeros((len(wanted) + 1, *hidden.shape), hidden.dtype)
        # Each block writes where its state is wanted, and otherwise into one row more that is dropped.
        row = {state: index for index, state in enumerate(wanted)}
        if 0 in row:
            kept = kept.at[row[0]].set(hidden)
        rows = np.array([row.get(layer + 1, len(wanted)) for layer in range(depth)])
        rotation = self._rotation(positions)

        def run_block(carry, block, inputs):
            hidden, kept = carry
            mask, windowed, index = inputs
            hidden, _ = block(hidden, rotation, _choose(masks, windowed), mask)
            if wanted:
                kept = lax.dynamic_update_index_in_dim(kept, hidden, index, axis=0)
            return hidden, kept

        windowed = np.array(self.config.windowed_layers)
        hidden, kept = self._run(run_block, (hidden, kept), (block_mask, windowed, rows))
        hidden = self.norm(hidden)
        if depth in row:
            kept = kept.at[row[depth]].set(hidden)
        return hidden, kept[:-1]

    def extend(self, tokens, positions, masks, block_mask, cache, fresh, only):
        rotation = self._rotation(positions)
        windowed = np.array(self.config.windowed_layers)
        stacked = isinstance(cache.layers, LayerCache)
        # Nobody reads what the last block makes of the other tokens. A scan runs all blocks alike.
        early = only is not None and masks is not None and not stacked

        def run_block(carry, block, inputs):
            hidden, layers = carry
            mask, windowed, index = inputs
            layer = jax.tree.map(lambda leaf: leaf[index], layers) if stacked else layers[index]
            hidden, layer = block(
                hidden,
                rotation,
                _choose(masks, windowed),
                mask,
                cache=layer,
                slot=cache.filled,
                fresh=fresh,
                only=only if early and index == self.config.num_layers - 1 else None,
            )
            if stacked:
                layers = jax.tree.map(
                    lambda leaf, new: lax.dynamic_update_index_in_dim(leaf, new, index, 0), layers, layer
                )
            else:
                layers = (*layers[:index], layer, *layers[index + 1 :])
            return hidden, layers

        inputs = (block_mask, windowed, np.arange(self.config.num_layers))
        hidden, layers = self._run(run_block, (self.embed_tokens(tokens), cache.layers), inputs)
        if only is not None and not early:
            hidden = take_tokens(hidden, only)
        return self.norm(hidden), layers

    def _rotation(self, positions) -> Rotation:
        config = self.config
        return rotary_rotation(
            positions, head_dim=config.head_size, theta=config.rope_theta, scaling=config.rotary_scaling
        )

    def _run(self, run_block, carry, inputs):
        """Fold ``run_block(carry, block, inputs of the block)`` over the blocks."""
        if isinstance(self.layers, nnx.List):
            for index, block in enumerate(self.layers):
                carry = run_block(carry, block, jax.tree.map(lambda leaf, index=index: leaf[index], inputs))
            return carry
        graph, layers = nnx.split(self.layers)

        def step(carry, xs):
            params, one = xs
            return run_block(carry, nnx.merge(graph, params), one), None

        if self.config.remat:
            # In a scan the backward pass is another loop, so that nothing merges across it: no barriers are needed.
            step = jax.checkpoint(step, prevent_cse=False)
        return lax.scan(step, carry, (layers, inputs))[0]


class _Block(nnx.Module):
    """Attention, then the feed-forward layer, each on a residual branch."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = _norm(config)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = _norm(config)
        self.mlp = _FeedForward(config, rngs=rngs)

    def __call__(self, hidden, rotation, mask, factor, *, only=None, **options):
        scale = 1 if factor is None else factor.astype(hidden.dtype)
        mixed, cache = self.self_attn(self.input_layernorm(hidden), rotation, mask=mask, only=only, **options)
        hidden = hidden if only is None else take_tokens(hidden, only)
        hidden = hidden + scale * mixed
        return hidden + scale * self.mlp(self.post_attention_layernorm(hidden)), cache


class _FeedForward(nnx.Module):
    """SwiGLU: ``W_down (silu(W_gate x) ⊙ W_up x)``."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        bias = config.mlp_bias
        self.gate_proj = _linear(config, config.hidden_size, config.intermediate_size, rngs, use_bias=bias)
        self.up_proj = _linear(config, config.hidden_size, config.intermediate_size, rngs, use_bias=bias)
        self.down_proj = _linear(config, config.intermediate_size, config.hidden_size, rngs, use_bias=bias)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class _Structure(NamedTuple):
    """What a config says about its parameters."""

    graph: Any
    shapes: dict[str, tuple[int, ...]]


def _structure(config: DecoderConfig, *, unstacked: bool = False) -> _Structure:
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), unstacked=unstacked)))
    return _Structure(graph, parameter_shapes(nnx.to_pure_dict(state)))


def is_unstacked(params: Mapping[str, Any]) -> bool:
    """Whether the blocks lie one by one (`jaxlab.nn.decoder_layout`)."""
    model = params.get("model") if isinstance(params, Mapping) else None
    return isinstance(model, Mapping) and isinstance(model.get("layers"), tuple | list)


def _merge(structure: _Structure, params: Mapping[str, Any]) -> Decoder:
    check_parameters(params, structure.shapes)
    if is_unstacked(params):
        params = {**params, "model": {**params["model"], "layers": dict(enumerate(params["model"]["layers"]))}}
    return nnx.merge(structure.graph, params)


def _apply(
    config: DecoderConfig,
    structure: _Structure,
    params: Mapping[str, Any],
    tokens: Int[Array | np.ndarray, "b t"],
    **options: Any,
) -> Any:
    if is_unstacked(params):
        structure = _structure(config, unstacked=True)
    return _merge(structure, params)(tokens, **options)


def _count(real: Bool[Array, "b t"]) -> Int[Array, "b t"]:
    """Positions that count real tokens; padding before the first has that of the first."""
    return jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)


def _choose(masks: AttentionMasks | None, windowed: Any) -> Array | None:
    if masks is None:
        return None
    if masks.full is None or masks.windowed is None:
        return masks.windowed if masks.full is None else masks.full
    return jnp.where(windowed, masks.windowed, masks.full)


def _hidden_indices(hidden_states: tuple[int, ...] | None, depth: int) -> tuple[int, ...]:
    check_hidden_states(hidden_states)
    indices = []
    for state in hidden_states or ():
        if not -depth - 1 <= state <= depth:
            raise ValueError(f"hidden_states must be between {-depth - 1} and {depth}; got {state}")
        indices.append(state % (depth + 1))
    if len(set(indices)) < len(indices):
        raise ValueError(f"hidden_states must not name a state twice; got {hidden_states}")
    return tuple(indices)


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


def _norm(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.norm_eps, param_dtype=config.param_dtype)
