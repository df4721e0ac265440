"""A stream of tokens split into training and held-out parts, cut into one shard a node, and sampled in random crops."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key

__all__ = ["hold_out", "sample_crops", "shard_tokens"]


def hold_out(
    tokens: Int[np.ndarray, " t"], *, block: int = 320, every: int = 10
) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, "blocks block"]]:
    """Set the last of every ``every`` blocks of ``block`` tokens aside.

    Returns:
      The other tokens, in order (the blocks on either side of a gap become neighbours; a last incomplete block stays
      here), and the blocks held out.

    Raises:
      ValueError: if a size is below one or the tokens are too few for one block to be held out.
    """
    if block < 1 or every < 1:
        raise ValueError(f"block and every must be at least 1; got {block} and {every}")
    if len(tokens) < block * every:
        raise ValueError(f"need {block * every} tokens to hold out one block of {block}; got {len(tokens)}")
    complete = len(tokens) // block
    blocks = tokens[: complete * block].reshape(complete, block)
    held = np.arange(complete) % every == every - 1
    return np.concatenate([blocks[~held].reshape(-1), tokens[complete * block :]]), blocks[held]


def shard_tokens(
    tokens: Int[np.ndarray, " t"],
    n: int,
    *,
    mode: Literal["contiguous", "iid"] = "contiguous",
    chunk: int = 64,
    seed: int = 0,
) -> Int[np.ndarray, "n shard"]:
    """Cut tokens into ``n`` shards of equal length.

    Args:
      tokens: token ids in the order of the text.
      n: number of shards.
      mode: ``"contiguous"``: shard i is the i-th part of the text, so that nodes see different subjects;
        ``"iid"``: shards are made of chunks of the text drawn at random without replacement.
      chunk: length of the chunks of ``"iid"``.
      seed: seed of the order of the chunks of ``"iid"``.

    Returns:
      The shards. No token is in two of them; fewer than ``n`` (``"contiguous"``) or ``n · chunk`` (``"iid"``) tokens
      are left over.

    Raises:
      ValueError: if the mode is unknown, a size is below one, or there is not a token (a chunk) for each shard.
    """
    if mode not in ("contiguous", "iid"):
        raise ValueError(f"mode must be 'contiguous' or 'iid'; got {mode!r}")
    if n < 1 or chunk < 1:
        raise ValueError(f"n and chunk must be at least 1; got {n} and {chunk}")
    unit = chunk if mode == "iid" else 1
    share = len(tokens) // unit // n
    if share == 0:
        raise ValueError(f"need {n * unit} tokens for {n} shards; got {len(tokens)}")
    units = tokens[: len(tokens) // unit * unit].reshape(-1, unit)
    if mode == "iid":
        units = np.random.default_rng(seed).permutation(units)
    return units[: n * share].reshape(n, share * unit)


def sample_crops(
    key: Key[Array, ""],
    shards: Int[Array | np.ndarray, "n shard"],
    batch: int,
    length: int,
    *,
    nodes: Int[Array | np.ndarray, " n"] | None = None,
) -> Int[Array, "n batch window"]:
    """Draw ``batch`` random crops of ``length + 1`` tokens from each shard, uniformly and with replacement.

    A node's draw depends on ``key`` and its own number alone, so that a node gets the same crops whether all shards lie
    on one device or ``shards`` are those of a few nodes inside ``jax.shard_map``. Jit-able, for use in a ``lax.scan``.

    Args:
      key: random key, another for each step.
      shards: tokens of each node.
      batch: crops a node.
      length: tokens that have a next one; ``window`` is ``length + 1``.
      nodes: numbers of the nodes to which ``shards`` belong; None means 0, 1, ..., n - 1.

    Raises:
      ValueError: if a shard is shorter than a crop, or a size is below one.
    """
    if batch < 1 or length < 1:
        raise ValueError(f"batch and length must be at least 1; got {batch} and {length}")
    if shards.shape[1] < length + 1:
        raise ValueError(f"crops of {length + 1} tokens do not fit shards of {shards.shape[1]}")

    def draw(node, shard):
        starts = jax.random.randint(jax.random.fold_in(key, node), (batch,), 0, shard.shape[0] - length)
        return jax.vmap(lambda start: lax.dynamic_slice(shard, (start,), (length + 1,)))(starts)

    shards = jnp.asarray(shards)
    return jax.vmap(draw)(jnp.arange(shards.shape[0]) if nodes is None else jnp.asarray(nodes), shards)
