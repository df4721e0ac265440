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

__all__ = ["kept_counts", "magnitude_bits", "magnitude_thresholds", "streamed_threshold"]

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


def magnitude_bits(vectors: Array) -> Array:
    """Patterns of the magnitudes in float32, uint32; ordered as the magnitudes are, NaN above infinity."""
    return lax.bitcast_convert_type(jnp.abs(vectors.astype(jnp.float32)), jnp.uint32)


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
    bits = [magnitude_bits(vector).reshape(vector.shape[0], -1) for vector in vectors]
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
    blocks: Callable[[], Iterable[Iterable[np.ndarray]]], counts: Sequence[int] | np.ndarray
) -> np.ndarray:
    """The same of numbers that are read twice, holding two histograms for each vector.

    Args:
      blocks: gives, each time it is called, all pieces of the vectors: for each piece K arrays of `magnitude_bits`.
      counts: how many numbers each vector keeps.

    Returns:
      ``[K]``, float32.
    """
    upper = np.zeros((len(counts), _BINS), np.int64)
    for pieces in blocks():
        for histogram, bits in zip(upper, pieces, strict=True):
            histogram += np.bincount(_halves(bits)[..., _UPPER], minlength=_BINS)
    # From above: in which bin the count is reached, and how many are still to be taken in it.
    above = upper[:, ::-1].cumsum(1)
    places = np.array([np.searchsorted(row, count) for row, count in zip(above, counts, strict=True)])
    bins = _BINS - 1 - np.minimum(places, _BINS - 1)
    left = [count - (row[place - 1] if place else 0) for row, count, place in zip(above, counts, places, strict=True)]
    lower = np.zeros((len(counts), _BINS), np.int64)
    for pieces in blocks():
        for histogram, bits, chosen in zip(lower, pieces, bins, strict=True):
            halves = _halves(bits)
            histogram += np.bincount(halves[halves[:, _UPPER] == chosen, 1 - _UPPER], minlength=_BINS)
    above = lower[:, ::-1].cumsum(1)
    places = np.array([np.searchsorted(row, count) for row, count in zip(above, left, strict=True)])
    patterns = (bins.astype(np.uint32) << 16) | (_BINS - 1 - np.minimum(places, _BINS - 1)).astype(np.uint32)
    return np.where(np.asarray(counts) > 0, patterns, _INFINITY).astype(np.uint32).view(np.float32)


_INFINITY = 0x7F800000
_BINS = 2**16
_UPPER = 1  # of the two halves of a pattern, little-endian as everything that JAX runs on


def _halves(bits: np.ndarray) -> np.ndarray:
    return np.asarray(bits).view(np.uint16).reshape(-1, 2)
