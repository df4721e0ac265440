"""A byte-level language model, and experts for Python code, English and sums.

The base learns a mixture of the three; each expert goes on from it on one of them, with embedding, norms and head kept,
so that the matrices of the blocks, which are what is merged, hold all that it learned.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxlab.data import load_text
from jaxlab.nn import decoder
from jaxlab.nn.decoder import DecoderConfig, make_apply, next_token_loss

__all__ = [
    "DOMAINS",
    "HELD_OUT",
    "MIXTURE",
    "fresh",
    "minus_loss",
    "network",
    "optimizer_of",
    "read_domains",
    "train_steps",
    "windows",
]

DOMAINS = ("code", "english", "sums")
MIXTURE = (0.3, 0.5, 0.2)
HELD_OUT = 0.1
_SUMS = 40_000


def network(width: int, blocks: int, context: int) -> DecoderConfig:
    """A small Llama of bytes."""
    return DecoderConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=-(-8 * width // 3 // 8) * 8,
        num_layers=blocks,
        num_heads=4,
        max_position_embeddings=context,
        tie_embeddings=True,
    )


def fresh(config: DecoderConfig, key: Array) -> dict[str, Any]:
    """Fresh parameters."""
    return decoder.init(config, key)[1]


def read_domains(code: str, english: str, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Bytes of every domain, to train on and held out.

    Raises:
      ValueError, OSError: a text that is not there.
    """
    draws = np.random.default_rng((seed, 0x5F))
    a, b, minus = draws.integers(10, 100, _SUMS), draws.integers(10, 100, _SUMS), draws.random(_SUMS) < 0.5
    sums = "".join(f"{x}-{y}={x - y};" if less else f"{x}+{y}={x + y};" for x, y, less in zip(a, b, minus, strict=True))
    texts = [np.frombuffer(text.encode(), np.uint8) for text in (load_text(code), load_text(english), sums)]
    cuts = [int(len(text) * (1 - HELD_OUT)) for text in texts]
    parts = list(zip(texts, cuts, strict=True))
    return [text[:cut] for text, cut in parts], [text[cut:] for text, cut in parts]


def windows(text: np.ndarray, draws: np.random.Generator, shape: tuple[int, ...], length: int) -> np.ndarray:
    """Random windows ``[*shape, length]`` of the bytes or tokens of a text."""
    if len(text) <= length:
        raise ValueError(f"a text of {len(text)} tokens is too short for windows of {length}")
    begins = draws.integers(0, len(text) - length, shape)
    return text[begins[..., None] + np.arange(length)].astype(np.int32)


@functools.partial(jax.jit, static_argnames=("config", "peak", "steps", "blocks_only"), donate_argnums=0)
def train_steps(
    carry: Any, batches: Array, *, config: DecoderConfig, peak: float, steps: int, blocks_only: bool
) -> tuple[Any, Array]:
    """Some steps of Adam with warm-up and cosine decay; ``carry`` is parameters and optimiser state."""
    optimizer = optimizer_of(peak, steps)
    apply_fn = make_apply(config)

    def step(carry: Any, tokens: Array) -> tuple[Any, Array]:
        params, state = carry
        loss, gradients = jax.value_and_grad(lambda p: next_token_loss(apply_fn(p, tokens), tokens))(params)
        if blocks_only:
            gradients = jax.tree.map_with_path(
                lambda path, g: g if "proj" in jax.tree_util.keystr(path) else jnp.zeros_like(g), gradients
            )
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return jax.lax.scan(step, carry, batches)


def optimizer_of(peak: float, steps: int) -> optax.GradientTransformation:
    """Adam as the base and the experts are trained with."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, max(steps // 10, 1), steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


@functools.cache
def minus_loss(config: DecoderConfig) -> Callable[[Any, Any], Array]:
    """The score of one model on windows ``[d, n, t]`` of every domain: minus the cross-entropy, in nats a byte."""
    apply_fn = make_apply(config)

    def score(params: dict[str, Any], tokens: Array) -> Float[Array, " d"]:
        return -jax.lax.map(lambda one: next_token_loss(apply_fn(params, one), one), tokens)

    return score
