"""After blocks are gone: low-rank training that lets the others take over, merged into the weights at the end.

The recipe of arXiv 2602.07804: LoRA of rank 8 on all matrices of the blocks, learning rate 1e-4, 2 epochs,
batches of 64.

Example::

    batch = token_batch(tokens, window=128)
    params, losses = recover(jax.random.key(0), pruned.apply_fn, pruned.params, batch)
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Key, PyTree

from jaxlab.compress.residual_stack import TokenBatch
from jaxlab.nn import lora

__all__ = ["recover"]

TARGET = ("self_attn/*_proj", "mlp/*_proj")


def recover(
    key: Key[Array, ""],
    apply_fn: Callable[..., Array],
    params: PyTree,
    batch: TokenBatch,
    *,
    rank: int = 8,
    learning_rate: float = 1e-4,
    epochs: int = 2,
    batch_size: int = 64,
    target: Sequence[str] = TARGET,
) -> tuple[Any, Float[np.ndarray, " updates"]]:
    """Train adapters on text, and merge them.

    Args:
      key: source of the adapters and of the order of the windows.
      apply_fn: causal model, ``apply_fn(params, tokens [b, t]) -> logits``.
      params: its parameters, stacked.
      batch: windows of text; the last batch of an epoch is left out where it is not full.
      rank: of the adapters, with α the same.
      learning_rate: of AdamW.
      epochs: passes over the windows.
      batch_size: windows an update; all of them where there are fewer.
      target: patterns of the matrices, as in `jaxlab.nn.lora.init`.

    Returns:
      Plain parameters like those given, and the loss before each update, NaN if training diverged.

    Raises:
      ValueError: if a number is below one.
    """
    for name, value in (("rank", rank), ("epochs", epochs), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be positive; got {learning_rate}")
    number = len(batch.tokens)
    size = min(batch_size, number)
    key_adapters, key_order = jax.random.split(key)
    adapters = lora.init(params, key_adapters, target=target, rank=rank, alpha=float(rank))
    orders = jnp.argsort(jax.random.uniform(key_order, (epochs, number)), axis=1)
    rows = orders[:, : number // size * size].reshape(-1, size)
    adapters, losses = _train(apply_fn, optax.adamw(learning_rate), params, adapters, batch, rows)
    return lora.merge(params, adapters), np.asarray(losses)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _train(
    apply_fn: Callable[..., Array],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    adapters: lora.Adapters,
    batch: TokenBatch,
    rows: Array,
) -> tuple[lora.Adapters, Array]:
    tokens, counts = jnp.asarray(batch.tokens), jnp.asarray(batch.counts)

    def step(carry: PyTree, rows: Array) -> tuple[PyTree, Array]:
        adapters, state = carry

        def loss(adapters: lora.Adapters) -> Array:
            logits = apply_fn(lora.apply(params, adapters), tokens[rows])[:, :-1]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[rows, 1:])
            return jnp.sum(jnp.where(counts[rows], losses, 0.0)) / jnp.maximum(jnp.sum(counts[rows]), 1)

        value, gradient = jax.value_and_grad(loss)(adapters)
        updates, state = optimizer.update(gradient, state, adapters)
        return (optax.apply_updates(adapters, updates), state), value

    (adapters, _), losses = lax.scan(step, (adapters, optimizer.init(adapters)), rows)
    return adapters, losses
