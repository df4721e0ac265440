"""Choosing a token from logits: temperature, top-k, top-p and min-p, each of them a scalar or one value a sequence.

With logits z, temperature T and ``p = softmax(z / T)`` over the tokens that the filter before has left:

- top-k keeps the k largest (Fan et al. 2018, arXiv 1805.04833);
- top-p keeps the smallest set of largest tokens whose p sum to top_p or more (Holtzman et al. 2019, arXiv 1904.09751);
- min-p keeps those with ``p ≥ min_p · max p`` (Nguyen et al. 2024, arXiv 2407.01082).

They are applied in this order, that of `transformers`. Tokens whose logits tie with the last kept one are kept too.
Temperature 0 takes the largest logit.

Example::

    token = sample(key, logits, temperature=jnp.array([0.0, 0.8]), top_p=0.9)                     # logits [2, v]
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

__all__ = ["filter_logits", "sample", "token_log_probs"]

PerSequence = Float[Array | np.ndarray, "#b"] | Float[Array | np.ndarray, ""] | float
Count = Int[Array | np.ndarray, "#b"] | Int[Array | np.ndarray, ""] | int


def filter_logits(
    logits: Float[Array, "b v"],
    *,
    top_k: Count | None = None,
    top_p: PerSequence | None = None,
    min_p: PerSequence | None = None,
) -> Float[Array, "b v"]:
    """Set the logits of the tokens that the filters drop to minus infinity.

    Args:
      logits: already divided by the temperature.
      top_k: how many to keep, at least 1; more than the vocabulary keeps all.
      top_p: probability to keep, in (0, 1].
      min_p: smallest share of the largest probability, in [0, 1].
    """
    if top_k is not None or top_p is not None:
        vocabulary = logits.shape[-1]
        descending = -jnp.sort(-logits, axis=-1)
        if top_k is not None:
            last = jnp.clip(_column(top_k), 1, vocabulary) - 1
            lowest = jnp.take_along_axis(descending, jnp.broadcast_to(last, (logits.shape[0], 1)), axis=-1)
            logits = jnp.where(logits < lowest, -jnp.inf, logits)
            descending = jnp.where(descending < lowest, -jnp.inf, descending)
        if top_p is not None:
            probabilities = jax.nn.softmax(descending, axis=-1)
            # What stands before a token: the first token is kept whatever top_p is.
            kept = jnp.cumsum(probabilities, axis=-1) - probabilities < _column(top_p)
            lowest = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < lowest, -jnp.inf, logits)
    if min_p is not None:
        largest = jnp.max(logits, axis=-1, keepdims=True)
        logits = jnp.where(logits < largest + jnp.log(_column(min_p)), -jnp.inf, logits)
    return logits


def sample(
    key: Key[Array, ""],
    logits: Float[Array, "b v"],
    *,
    temperature: PerSequence = 1.0,
    top_k: Count | None = None,
    top_p: PerSequence | None = None,
    min_p: PerSequence | None = None,
) -> Int[Array, " b"]:
    """Draw one token of each row; where the temperature is 0, take the likeliest.

    Args:
      key: random key.
      logits: of the model.
      temperature: T, at least 0.
      top_k: see `filter_logits`, as are the others.
      top_p: see `filter_logits`.
      min_p: see `filter_logits`.
    """
    logits = logits.astype(jnp.float32)
    temperature = jnp.broadcast_to(_column(temperature).astype(jnp.float32), (logits.shape[0], 1))
    greedy = jnp.argmax(logits, axis=-1)

    def draw() -> Int[Array, " b"]:
        tempered = _temper(logits, temperature)
        kept = filter_logits(tempered, top_k=top_k, top_p=top_p, min_p=min_p)
        return jnp.where(temperature[:, 0] > 0, jax.random.categorical(key, kept, axis=-1), greedy)

    # Sorting a vocabulary and drawing noise for it cost more than a small model's step.
    return lax.cond(jnp.any(temperature > 0), draw, lambda: greedy).astype(jnp.int32)


def token_log_probs(
    logits: Float[Array, "b v"], tokens: Int[Array, " b"], *, temperature: PerSequence = 1.0
) -> Float[Array, " b"]:
    """``log softmax(logits / T)`` of the tokens, over the whole vocabulary; T = 1 where the temperature is 0."""
    tempered = _temper(logits.astype(jnp.float32), _column(temperature).astype(jnp.float32))
    chosen = jnp.take_along_axis(tempered, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(tempered, axis=-1)


def _temper(logits: Array, temperature: Array) -> Array:
    # The largest first becomes 0: divided by a tiny temperature it would be infinite, and so would what it is
    # subtracted from.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    return logits / jnp.where(temperature > 0, temperature, 1.0)


def _column(value: PerSequence | Count) -> Array:
    """One value a row: ``[b, 1]`` or ``[1, 1]``."""
    return jnp.reshape(jnp.asarray(value), (-1, 1))
