"""Order statistics over workers, coordinate by coordinate.

A sort over the leading axis is slow on every backend. A sorting network (Batcher's odd-even merge sort; Knuth, The Art
of Computer Programming 3, algorithm 5.2.2M) is a straight line of minima and maxima. Unrolled, the compiler fuses it
into one loop over the coordinates and prunes it to the order statistics that a median or a trimmed mean uses. Where all
of them are kept, or there are many workers, one layer of the network after the other acts on the whole array.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxlab.optim.aggregation.geometry import UNROLLED, wide_dtype

__all__ = ["layers", "median_of", "ordered", "sorted_rows", "unrolled"]


@functools.cache
def layers(n: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Layers of disjoint pairs ``(i, j)``, ``i < j``, to be put in order; after the last all ``n`` are in order."""
    network: list[tuple[tuple[int, int], ...]] = []
    top = 1 << max((n - 1).bit_length() - 1, 0)
    size = top
    while size > 0:
        span, offset, distance = top, 0, size
        while distance > 0:
            network.append(tuple((i, i + distance) for i in range(n - distance) if i & size == offset))
            distance = span - size
            span >>= 1
            offset = size
        size >>= 1
    return tuple(layer for layer in network if layer)


def unrolled(rows: Array) -> list[Array]:
    """The rows, each by itself in float32 or wider: of all rows at once the compiler would make a copy."""
    dtype = wide_dtype([rows])
    return [rows[i].astype(dtype) for i in range(rows.shape[0])]


def ordered(rows: Array) -> list[Array]:
    """The rows of ``[m, columns]`` in ascending order, coordinate by coordinate. NaN counts as plus infinity.

    For a result that is one array: each of several outputs would compute the network again (`sorted_rows`).
    """
    m = rows.shape[0]
    if m > UNROLLED:  # the network grows as m log(m)^2, and so does the time to compile it
        return list(sorted_rows(rows))
    lines = [_number(row) for row in unrolled(rows)]
    for i, j in (pair for layer in layers(m) for pair in layer):
        lines[i], lines[j] = lax.min(lines[i], lines[j]), lax.max(lines[i], lines[j])
    return lines


def sorted_rows(rows: Float[Array, "m columns"]) -> Float[Array, "m columns"]:
    """`ordered` as one array."""
    m, network = rows.shape[0], layers(rows.shape[0])
    rows = _number(rows.astype(wide_dtype([rows])))
    if not network:
        return rows
    partner = np.tile(np.arange(m), (len(network), 1))
    for layer, pairs in enumerate(network):
        first, second = np.array(pairs).T
        partner[layer, first], partner[layer, second] = second, first
    partners, keeps_less = jnp.asarray(partner), jnp.asarray(np.arange(m) <= partner)

    def one_layer(index: Array, rows: Array) -> Array:
        others = rows[partners[index]]
        return jnp.where(keeps_less[index][:, None], lax.min(rows, others), lax.max(rows, others))

    return lax.fori_loop(0, len(network), one_layer, rows)


def median_of(lines: list[Array]) -> Array:
    """The middle of ordered lines, the average of the two middle ones for an even number."""
    m = len(lines)
    low, high = lines[(m - 1) // 2], lines[m // 2]
    # Halved first: the sum of two numbers near the largest float is infinite.
    return high if m % 2 else 0.5 * low + 0.5 * high


def _number(rows: Array) -> Array:
    return jnp.where(jnp.isnan(rows), jnp.inf, rows)
