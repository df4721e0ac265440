r"""Rules that treat every coordinate by itself.

NaN counts as plus infinity: like any other extreme value it is one of the numbers that order statistics leave out.
:class:`Mean` leaves nothing out, and one NaN makes its coordinate NaN.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array

from jaxlab.optim.aggregation.aggregator import (
    CoordinatewiseAggregator,
    check_count,
    check_minority,
    largest_tolerated,
    ratio,
)
from jaxlab.optim.aggregation.ordering import median_of, ordered

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
        return _sum([rows[i] for i in range(rows.shape[0])]) / rows.shape[0]


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
        lines = ordered(rows) if self.f else [rows[i] for i in range(kept)]
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
        lines, f = ordered(rows), self.f
        kept = len(lines) - f
        median = median_of(lines)
        # In order, the values closest to the median are neighbours: windows [k, k + kept). The middle belongs to all
        # of them; sums grow from it outwards, so that no huge value is added and taken away again.
        left, right = [jnp.zeros_like(median)], [jnp.zeros_like(median)]
        for k in range(f):
            left.append(left[-1] + lines[f - 1 - k])
            right.append(right[-1] + lines[kept + k])
        best = jnp.full_like(median, jnp.inf)
        outer = jnp.full_like(median, jnp.nan)
        for k in range(f + 1):
            reach = jnp.maximum(median - lines[k], lines[k + kept - 1] - median)
            outer = jnp.where(reach < best, left[f - k] + right[k], outer)
            best = jnp.minimum(reach, best)
        return (_sum(lines[f:kept]) + outer) / kept


def _sum(lines: list[Array]) -> Array:
    return sum(lines[1:], lines[0])
