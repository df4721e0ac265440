"""The k-th largest magnitude of many numbers, exactly and without sorting.

The bit patterns of magnitudes in float32 are ordered like the numbers, so that a threshold is found by halving the
range of patterns 31 times and counting what lies above (`magnitude_thresholds`, for arrays in memory), or from two
histograms, of the upper and the lower halves of the patterns (`Histograms`, for numbers that are streamed).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxlab.editing.merging.method import is_known

__all__ = ["kept_counts", "magnitude_halves", "magnitude_thresholds", "streamed_threshold"]

_MOST = 2**32 - 1  # numbers that a 32-bit count holds


def kept_counts(density: Any, total: int, count: int) -> Any:
    """How many of ``total`` numbers each of ``count`` vectors keeps: ``⌊density · total⌋``, at least one; 0 for 0.

    Exact where the density is known while tracing; otherwise to the resolution of float32.
    """
    if is_known(density):
        values = np.broadcast_to(np.asarray(density, np.float64), (count,))
        return np.where(values > 0, np.clip(np.floor(values * total), 1, total), 0).astype(np.int64)
    traced = jnp.broadcast_to(jnp.asarray(density, jnp.float32), (count,))
    return jnp.where(traced > 0, jnp.clip(jnp.floor(traced * total), 1, total), 0).astype(jnp.uint32)


def magnitude_halves(vectors: Array) -> Array:
    """Upper and lower halves of the patterns of magnitudes in float32, ``[2, ...]``, uint16."""
    bits = _bits(vectors)
    return jnp.stack([bits >> 16, bits & 0xFFFF]).astype(jnp.uint16)


def magnitude_thresholds(vectors: Sequence[Float[Array, "k ..."]], counts: Any) -> Float[Array, " k"]:
    """For every k the ``counts[k]``-th largest magnitude over all arrays; infinity for a count of 0.

    Exactly as many numbers as asked for have this magnitude or more, unless several are equal to it.

    Args:
      vectors: arrays ``[K, ...]``.
      counts: ``[K]``.

    Raises:
      ValueError: for 2³² numbers or more, which the counters do not hold.
    """
    if (total := sum(vector[0].size for vector in vectors)) > _MOST:
        raise ValueError(f"thresholds are found among at most {_MOST} numbers, got {total}; merge files instead")
    bits = [_bits(vector).reshape(vector.shape[0], -1) for vector in vectors]
    wanted = jnp.asarray(counts, jnp.uint32)

    def halve(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # at least so many are at ``low`` or above, and fewer at ``high`` or above
        middle = low + (high - low) // 2
        above = sum(jnp.sum(b >= middle[:, None], axis=1, dtype=jnp.uint32) for b in bits)
        enough = above >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    count = vectors[0].shape[0]
    first = jnp.zeros(count, jnp.uint32), jnp.full(count, _INFINITY + 1, jnp.uint32)
    low, _ = lax.fori_loop(0, 31, halve, first)
    return lax.bitcast_convert_type(low, jnp.float32)


def streamed_threshold(
    pieces: Callable[[], Iterable[np.ndarray]], counts: Sequence[int] | np.ndarray
) -> Float[np.ndarray, " k"]:
    """The same of numbers that are read twice, with a histogram for each vector in memory.

    Args:
      pieces: gives, each time it is called, `magnitude_halves` of all pieces of the vectors, ``[2, K, n]``.
      counts: how many numbers each vector keeps.
    """
    counts = np.asarray(counts, np.int64)
    upper = np.zeros((len(counts), _BINS), np.int64)
    for halves in pieces():
        for histogram, high in zip(upper, halves[0], strict=True):
            histogram += np.bincount(high, minlength=_BINS)
    chosen, above = _reached(upper, counts)
    lower = np.zeros_like(upper)
    for halves in pieces():
        for histogram, high, low, bin_of in zip(lower, *halves, chosen, strict=True):
            histogram += np.bincount(low[high == bin_of], minlength=_BINS)
    patterns = (chosen << 16) | _reached(lower, counts - above)[0]
    return np.where(counts > 0, patterns, _INFINITY).astype(np.uint32).view(np.float32)


_INFINITY = 0x7F800000
_BINS = 2**16


def _bits(vectors: Array) -> Array:
    """Patterns of magnitudes in float32: ordered as the magnitudes are, NaN above infinity."""
    return lax.bitcast_convert_type(jnp.abs(vectors.astype(jnp.float32)), jnp.uint32)


def _reached(histograms: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From above, the bin in which each count is reached, and how many numbers lie above that bin."""
    from_above = histograms[:, ::-1].cumsum(1)
    rows = zip(from_above, counts, strict=True)
    places = np.minimum([np.searchsorted(row, count) for row, count in rows], _BINS - 1)
    each = np.arange(len(counts))
    return _BINS - 1 - places, from_above[each, places] - histograms[each, _BINS - 1 - places]
