"""Our language models as experts to merge.

Example::

    base = load("smollm2-135m-instruct", dtype="bfloat16")
    experts = [load(folder, dtype="bfloat16").params for folder in ("code", "math")]
    batches = [token_batch(base.tokenizer.encode_batch(texts), length=128) for texts in (snippets, problems)]
    merged = expert_merging(decoder_forward(base.config), base.params, experts, batches,
                            masks=[batch["mask"] for batch in batches])
    save("merged", base._replace(params=merged.params))

Blocks are stacked in these models; each of their matrices counts as one tensor, as in the paper.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxlab.editing.expert_merging.objectives import Forward
from jaxlab.nn.decoder import DecoderConfig, make_apply

__all__ = ["decoder_forward", "token_batch"]


@functools.cache
def decoder_forward(config: DecoderConfig, hidden_states: tuple[int, ...] | None = None) -> Forward:
    """The network of a `jaxlab.nn.decoder` for `jaxlab.editing.expert_merging.expert_merging`. Cached.

    Args:
      config: of the model.
      hidden_states: which to compare, as the decoder counts them; by default what the middle block gives, as in the
        paper.

    Returns:
      ``forward(params, batch)`` for batches of `token_batch`.
    """
    apply_fn = make_apply(config)
    states = (max(config.num_layers // 2, 1),) if hidden_states is None else hidden_states

    def forward(params: Mapping[str, Any], batch: Mapping[str, Array]) -> tuple[Array, Array]:
        return apply_fn(params, batch["tokens"], padding_mask=batch["mask"], hidden_states=states)

    return forward


def token_batch(texts: Sequence[Any], *, length: int, pad: int = 0) -> dict[str, Array]:
    """Token ids of texts, cut or padded on the right to one length.

    Args:
      texts: token ids of each.
      length: tokens of each row.
      pad: token to fill with; it is masked.

    Returns:
      ``tokens`` ``[n, length]`` int32 and ``mask`` ``[n, length]`` bool.

    Raises:
      ValueError: no texts, an empty one, or a length below one.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if not texts or not all(len(text) for text in texts):
        raise ValueError(f"texts must hold at least one, and tokens in each; got lengths {[len(t) for t in texts]}")
    tokens = np.full((len(texts), length), pad, np.int32)
    mask = np.zeros((len(texts), length), bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = np.asarray(text[:length])
        mask[row, : len(text)] = True
    return {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}
