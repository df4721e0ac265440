"""A network as a stack of residual blocks that may be left out: embedding, blocks, loss.

With h_0 the embedding, ``h_{l+1} = m_l ? Block_l(h_l) : h_l``, and the loss of the last. In a block that normalises
before its branches the identity is what a block of zero parameters computes, and what deleting it leaves. In a
post-norm network (the original BERT) a zeroed block still normalises; here too it is skipped as a whole.

`decoder_stack` takes the decoders of `jaxlab.nn` apart. Any other network is three functions::

    stack = ResidualStack(
        embed=lambda params, batch: (batch["x"] @ params["in"], None),
        block=lambda block, hidden, context: hidden + jnp.tanh(hidden @ block["weight"]),
        loss=lambda params, hidden, batch: jnp.mean((hidden @ params["out"] - batch["y"]) ** 2),
        blocks=lambda params: params["blocks"],                          # stacked on a leading axis
    )
    states = hidden_states(stack, params, batch)                                          # [L + 1, ...]
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxlab.nn.attention import AttentionMasks, attention_masks
from jaxlab.nn.decoder import Decoder
from jaxlab.nn.decoder_config import DecoderConfig
from jaxlab.nn.evaluation import windows
from jaxlab.nn.rotary import rotary_rotation

__all__ = ["ResidualStack", "TokenBatch", "decoder_stack", "hidden_states", "num_blocks", "stack_trees", "token_batch"]


@dataclass(frozen=True)
class ResidualStack:
    """What has to be known of a network to leave out its blocks. Hashable: a static argument of jit.

    Attributes:
      embed: ``(params, batch) -> (hidden, context)``; the context is what all blocks share, such as attention masks.
      block: ``(block, hidden, context) -> hidden`` of the same shape, with the parameters of one block.
      loss: ``(params, hidden, batch) -> scalar``, the mean loss in nats.
      blocks: ``params -> tree`` of what differs between blocks, on a leading axis.
      description: what else decides the loss, such as the config; it enters the fingerprint of stored values.
    """

    embed: Callable[[PyTree, PyTree], tuple[Array, PyTree]]
    block: Callable[[PyTree, Array, PyTree], Array]
    loss: Callable[[PyTree, Array, PyTree], Array]
    blocks: Callable[[PyTree], PyTree]
    description: str = ""


class TokenBatch(NamedTuple):
    """Windows of text.

    Attributes:
      tokens: ids; padding stands on the right.
      counts: which tokens, without the first of each window, count as targets.
    """

    tokens: Int[Array | np.ndarray, "b t"]
    counts: Bool[Array | np.ndarray, "b t-1"]


def token_batch(
    tokens: Any, *, window: int = 128, limit: int | None = None, key: Key[Array, ""] | None = None
) -> TokenBatch:
    """Cut a text into windows one after another, without overlap, as the paper does.

    Args:
      tokens: ids of the text, at least two.
      window: tokens of a window; a shorter text is one window of its length.
      limit: keep so many windows; None means all.
      key: draws which are kept; None means that they are spread evenly over the text.

    Raises:
      ValueError: if the text has fewer than two tokens, or a number is out of range.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"at least one window is needed; got {limit}")
    rows, counts = windows(tokens, window=window, stride=window)
    if limit is not None and limit < len(rows):
        # The last window may be mostly padding, and is not among those that are picked.
        chosen = np.arange(limit) * (len(rows) - 1) // limit
        if key is not None:
            chosen = np.asarray(jax.random.choice(key, len(rows) - 1, (limit,), replace=False))
        rows, counts = rows[chosen], counts[chosen]
    return TokenBatch(rows.astype(np.int32), counts)


@functools.lru_cache(maxsize=64)
def decoder_stack(config: DecoderConfig) -> ResidualStack:
    """Take a decoder of `jaxlab.nn` apart; its batches are `TokenBatch`, its loss the mean over the tokens that count.

    Sliding windows go with their blocks. The same config gives the same object, so that jit compiles once.
    """
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    block_graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)).model.layers))
    kinds = set(config.windowed_layers)

    def embed(params: PyTree, batch: TokenBatch) -> tuple[Array, PyTree]:
        length = batch.tokens.shape[1]
        rotation = rotary_rotation(
            jnp.arange(length)[None], head_dim=config.head_size, theta=config.rope_theta, scaling=config.rotary_scaling
        )
        flash = config.attention_implementation == "cudnn" and len(kinds) == 1
        masks = None if flash else attention_masks(config, real=jnp.ones((1, length), bool))
        return nnx.merge(graph, params).model.embed_tokens(jnp.asarray(batch.tokens)), (rotation, masks)

    def block(block: PyTree, hidden: Array, context: PyTree) -> Array:
        rotation, masks = context
        return nnx.merge(block_graph, block["params"])(hidden, rotation, _visible(masks, block["windowed"]), None)[0]

    def loss(params: PyTree, hidden: Array, batch: TokenBatch) -> Array:
        network = nnx.merge(graph, params)
        # The last token of a window has no target.
        logits = network.logits(network.model.norm(hidden[:, :-1]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(batch.tokens)[:, 1:])
        return jnp.sum(jnp.where(batch.counts, losses, 0.0)) / jnp.sum(jnp.asarray(batch.counts), dtype=jnp.float32)

    def blocks(params: PyTree) -> PyTree:
        return {"params": params["model"]["layers"], "windowed": jnp.array(config.windowed_layers)}

    return ResidualStack(embed, block, loss, blocks, description=repr(config))


def num_blocks(stack: ResidualStack, params: PyTree) -> int:
    """Number of blocks of a network, its L."""
    return jax.eval_shape(lambda: jax.tree.leaves(stack.blocks(params))[0]).shape[0]


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(stack: ResidualStack, params: PyTree, batch: PyTree) -> Float[Array, "states ..."]:
    """What enters the first block, and what leaves each: L + 1 states, before a final norm."""
    hidden, context = stack.embed(params, batch)

    def step(hidden: Array, block: PyTree) -> tuple[Array, Array]:
        hidden = stack.block(block, hidden, context)
        return hidden, hidden

    return jnp.concatenate([hidden[None], lax.scan(step, hidden, stack.blocks(params))[1]])


def stack_trees(blocks: Sequence[PyTree]) -> PyTree:
    """Stack the parameters of blocks on a leading axis.

    Raises:
      ValueError: if there is no block, or two differ in structure, shape or dtype, naming the parameter.
    """
    if not blocks:
        raise ValueError("at least one block is needed; got none")
    described = [
        {jax.tree_util.keystr(path): (jnp.shape(leaf), jnp.result_type(leaf)) for path, leaf in leaves}
        for leaves in map(jax.tree.leaves_with_path, blocks)
    ]
    for index, block in enumerate(described):
        for path in sorted(described[0].keys() | block.keys()):
            if described[0].get(path) != block.get(path):
                raise ValueError(
                    f"blocks must be alike to be stacked: {path} is {_words(described[0].get(path))} in block 0 and "
                    f"{_words(block.get(path))} in block {index}; keep them in a list"
                )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)


def _words(found: tuple[tuple[int, ...], Any] | None) -> str:
    return "absent" if found is None else f"{found[1]} of shape {found[0]}"


def _visible(masks: AttentionMasks | None, windowed: Array) -> Array | None:
    if masks is None:
        return None
    if masks.full is None or masks.windowed is None:
        return masks.windowed if masks.full is None else masks.full
    return jnp.where(windowed, masks.windowed, masks.full)
