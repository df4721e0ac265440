"""The keys and values of the tokens a decoder has read, in a buffer of fixed size.

Example::

    cache = init_cache(config, batch=2, length=64)
    logits, cache = decoder.apply_cached(config, params, prompts, cache, fresh=True)
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from jaxlab.nn.attention import LayerCache
from jaxlab.nn.decoder_config import DecoderConfig

__all__ = ["KVCache", "init_cache"]


@struct.dataclass
class KVCache:
    """Keys and values of the tokens read so far, in a buffer of fixed size; made by `init_cache`.

    Attributes:
      layers: of each block; one `LayerCache` stacked over blocks, or a tuple of them for unstacked parameters.
      real: which slots hold a real token, as opposed to padding or nothing yet.
      filled: slots taken, the same for all sequences; padding takes slots too.
    """

    layers: LayerCache | tuple[LayerCache, ...]
    real: Bool[Array, "b slots"]
    filled: Int[Array, ""]


def init_cache(
    config: DecoderConfig, batch: int, length: int, *, dtype: str | None = None, unstacked: bool = False
) -> KVCache:
    """An empty cache for ``batch`` sequences of up to ``length`` tokens, padding included.

    Args:
      config: of the decoder.
      batch: number of sequences.
      length: number of slots.
      dtype: of the keys and values; None means the ``dtype`` of the config.
      unstacked: for parameters as `unstack_layers` gives them.

    Raises:
      ValueError: if ``batch`` or ``length`` is below one.
    """
    for name, value in (("batch", batch), ("length", length)):
        if value < 1:
            raise ValueError(f"{name} of a cache must be at least 1; got {value}")
    shape = (batch, config.kv_heads, length, config.head_size)

    def empty(*leading: int) -> LayerCache:
        return LayerCache(*(jnp.zeros((*leading, *shape), dtype or config.dtype) for _ in range(2)))

    return KVCache(
        layers=tuple(empty() for _ in range(config.num_layers)) if unstacked else empty(config.num_layers),
        real=jnp.zeros((batch, length), bool),
        filled=jnp.zeros((), jnp.int32),
    )
