"""Order statistics over workers, coordinate by coordinate.

A sort over the leading axis is slow on every backend. For a fixed number of workers a sorting network (Batcher's
odd-even merge sort; Knuth, The Art of Computer Programming 3, algorithm 5.2.2M) is a straight line of minima and maxima
that the compiler fuses into one loop over the coordinates and prunes to the order statistics that are used.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxlab.optim.aggregation.geometry import UNROLLED

__all__ = ["comparators", "median_of", "ordered"]


@functools.cache
def comparators(n: int) -> tuple[tuple[int, int], ...]:
    """Pairs ``(i, j)``, ``i < j``, to be put in order one after the other; then all ``n`` are in order."""
    pairs: list[tuple[int, int]] = []
    top = 1 << max((n - 1).bit_length() - 1, 0)
    size = top
    while size > 0:
        span, offset, distance = top, 0, size
        while distance > 0:
            pairs += [(i, i + distance) for i in range(n - distance) if i & size == offset]
            distance = span - size
            span >>= 1
            offset = size
        size >>= 1
    return tuple(pairs)


def ordered(rows: Array) -> list[Array]:
    """The rows of ``[m, columns]`` in ascending order, coordinate by coordinate. NaN counts as plus infinity."""
    rows = jnp.where(jnp.isnan(rows), jnp.inf, rows)
    m = rows.shape[0]
    if m > UNROLLED:  # the network grows as m log(m)^2, and so does the time to compile it
        return list(jnp.sort(rows, axis=0))
    lines = [rows[i] for i in range(m)]
    for i, j in comparators(m):
        lines[i], lines[j] = lax.min(lines[i], lines[j]), lax.max(lines[i], lines[j])
    return lines


def median_of(lines: list[Array]) -> Array:
    """The middle of ordered lines, the average of the two middle ones for an even number."""
    m = len(lines)
    low, high = lines[(m - 1) // 2], lines[m // 2]
    # Halved first: the sum of two numbers near the largest float is infinite.
    return high if m % 2 else 0.5 * low + 0.5 * high
