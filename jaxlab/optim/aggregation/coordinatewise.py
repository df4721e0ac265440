r"""Rules that treat every coordinate by itself.

NaN counts as plus infinity: like any other extreme value it is one of the numbers that order statistics leave out.
:class:`Mean` leaves nothing out, and one NaN makes its coordinate NaN.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxlab.optim.aggregation.aggregator import (
    CoordinatewiseAggregator,
    check_count,
    check_minority,
    largest_tolerated,
    ratio,
)
from jaxlab.optim.aggregation.geometry import over_columns, wide_dtype
from jaxlab.optim.aggregation.ordering import median_of, ordered, sorted_rows, unrolled

__all__ = ["CoordinateMedian", "Mean", "MeanAroundMedian", "TrimmedMean"]


@dataclasses.dataclass(frozen=True)
class Mean(CoordinatewiseAggregator):
    """The average, which a single Byzantine worker can move anywhere. A NaN of any worker is a NaN of the result."""

    def tolerates(self, n: int) -> int:
        del n
        return 0

    def kappa(self, n: int, f: int | None = None) -> float:
        del n
        return math.inf if f else 0.0

    def _columns(self, rows: Array) -> Array:
        return _sum(unrolled(rows)) / rows.shape[0]


@dataclasses.dataclass(frozen=True)
class CoordinateMedian(CoordinatewiseAggregator):
    r"""The median of every coordinate; the average of the two middle values for an even number of workers.

    :math:`\kappa = 4 (1 + f / (n - 2f))^2` (arXiv 2302.01772, table 1).
    """

    def tolerates(self, n: int) -> int:
        return largest_tolerated(n)

    def kappa(self, n: int, f: int | None = None) -> float:
        f = self.tolerates(n) if f is None else f
        return 4 * (1 + ratio(n, f)) ** 2

    def _columns(self, rows: Array) -> Array:
        return median_of(ordered(rows))


@dataclasses.dataclass(frozen=True)
class TrimmedMean(CoordinatewiseAggregator):
    r"""The mean of what remains of every coordinate without its ``f`` smallest and ``f`` largest values.

    :math:`\kappa = 6 r (1 + r)` with :math:`r = f / (n - 2f)` (arXiv 2302.01772, table 1).

    Raises:
      ValueError, TypeError: if ``f`` is not an integer of at least 0.
    """

    f: int

    def __post_init__(self) -> None:
        check_count("f", self.f)

    def check(self, n: int) -> None:
        check_minority(self.f, n)

    def tolerates(self, n: int) -> int:
        return min(self.f, largest_tolerated(n))

    def kappa(self, n: int, f: int | None = None) -> float:
        f = self.f if f is None else f
        if f > self.f:
            return math.inf
        return 6 * ratio(n, self.f) * (1 + ratio(n, self.f))

    def _columns(self, rows: Array) -> Array:
        kept = rows.shape[0] - 2 * self.f
        lines = ordered(rows) if self.f else unrolled(rows)
        return _sum(lines[self.f : self.f + kept]) / kept


@dataclasses.dataclass(frozen=True)
class MeanAroundMedian(CoordinatewiseAggregator):
    r"""The mean of the ``n - f`` values of every coordinate that are closest to its median (MeaMed, arXiv 1802.10116).

    :math:`\kappa = \frac{4f}{n - f} (1 + 4 (1 + r)^2)`: the b <= f values taken in place of values of S are no
    farther from the median than those are, which bounds the error by twice the mean of their distances to it.

    Raises:
      ValueError, TypeError: if ``f`` is not an integer of at least 0.
    """

    f: int

    def __post_init__(self) -> None:
        check_count("f", self.f)

    def check(self, n: int) -> None:
        check_minority(self.f, n)

    def tolerates(self, n: int) -> int:
        return min(self.f, largest_tolerated(n))

    def kappa(self, n: int, f: int | None = None) -> float:
        f = self.f if f is None else f
        if f > self.f:
            return math.inf
        return 4 * self.f / (n - self.f) * (1 + 4 * (1 + ratio(n, self.f)) ** 2)

    def _columns(self, rows: Array) -> Array:
        return over_columns(self._around_median, rows, wide_dtype([rows]))

    def _around_median(self, rows: Array) -> Array:
        lines, f = sorted_rows(rows), self.f
        m = len(lines)
        kept = m - f
        median = median_of([lines[i] for i in range(m)])

        # In order, the values closest to the median are neighbours: a window [k, k + kept). Loops, because unrolled
        # the compiler would compute the order again for every window.
        def closer(k: Array, window: tuple[Array, Array]) -> tuple[Array, Array]:
            first, least = window
            reach = jnp.maximum(median - lines[k], lines[k + kept - 1] - median)
            return jnp.where(reach < least, k, first), jnp.minimum(reach, least)

        nowhere = jnp.full_like(median, m, jnp.int32)
        first, _ = lax.fori_loop(0, f + 1, closer, (nowhere, jnp.full_like(median, jnp.inf)))

        def add(i: Array, total: Array) -> Array:
            return total + jnp.where((i >= first) & (i < first + kept), lines[i], 0)

        total = lax.fori_loop(0, m, add, jnp.zeros_like(median))
        return jnp.where(first < m, total / kept, jnp.nan)


def _sum(lines: list[Array]) -> Array:
    return sum(lines[1:], lines[0])
