r"""Rules that choose or weigh messages by their distances to one another.

They run on the ``[n, n]`` distances (see :mod:`~jaxlab.optim.aggregation.geometry`) and read the messages twice: once
for the Gram matrix, once for the weighted sum. A message that is not finite is infinitely far from every other; with
more of them than a rule tolerates the result is NaN.
"""

import dataclasses
import itertools
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxlab.optim.aggregation.aggregator import (
    GeometricAggregator,
    check_count,
    check_minority,
    largest_tolerated,
    ratio,
)
from jaxlab.optim.aggregation.geometry import Geometry, medoid

__all__ = ["GeometricMedian", "Krum", "MinimumDiameterAveraging", "Monna", "MultiKrum"]

# Subsets that the combinatorial rules enumerate at most.
MAX_SUBSETS = 20_000


@dataclasses.dataclass(frozen=True)
class GeometricMedian(GeometricAggregator):
    r"""The point with the smallest sum of distances to the messages (RFA, arXiv 1912.13445).

    Smoothed Weiszfeld iterations :math:`z \leftarrow \sum_i \beta_i v_i / \sum_i \beta_i` with :math:`\beta_i = 1 /
    \max(\lVert v_i - z \rVert, \nu)`, started at the mean of the message with the smallest median distance to the
    others and its nearest half. :math:`\kappa = 4 (1 + r)^2`, :math:`r = f / (n - 2f)`, for the exact median (arXiv
    2302.01772, table 1).

    Error: smoothing costs at most :math:`\nu / 2` in the mean distance; each iteration lowers that, by a factor when
    the median is not itself a message and slowly (as ``1 / iterations``) when it is nearly one.

    Attributes:
      smoothing: :math:`\nu` in units of the start's median distance to the messages, so that scaling the messages
        scales the result.
      iterations: how many.
      compat: ``"byzfl"`` starts at the origin and takes ``smoothing`` as it is, as the library of that name does
        (whose defaults are ``smoothing=0.1, iterations=3``).

    Raises:
      ValueError: if ``smoothing`` is not positive, ``iterations`` is below 1, ``compat`` is unknown.
    """

    smoothing: float = 1e-6
    iterations: int = 32
    compat: Literal["byzfl"] | None = None

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations, least=1)
        if not self.smoothing > 0:
            raise ValueError(f"smoothing must be positive, got {self.smoothing}")
        if self.compat not in (None, "byzfl"):
            raise ValueError(f"compat must be None or 'byzfl', got {self.compat!r}")

    def tolerates(self, n: int) -> int:
        return largest_tolerated(n)

    def kappa(self, n: int, f: int | None = None) -> float:
        f = self.tolerates(n) if f is None else f
        return 4 * (1 + ratio(n, f)) ** 2

    def _weights(self, geometry: Geometry) -> Array:
        m, points = len(geometry.finite), len(geometry.coefficients)
        if self.compat == "byzfl":
            start = jnp.zeros(points, geometry.coefficients.dtype).at[m].set(1)
            smoothing = jnp.asarray(self.smoothing, start.dtype)
        else:
            distances = geometry.squared_distances
            nearest = _nearest(distances[medoid(distances)[0]], m // 2 + 1)
            start = _padded(nearest, geometry)
            typical = jnp.sort(geometry.squared_distances_to(start))[m // 2]
            # All messages equal: any positive number will do.
            smoothing = jnp.maximum(self.smoothing * jnp.sqrt(typical), jnp.finfo(start.dtype).tiny)

        def closer(_, weights: Array) -> Array:
            inverse = 1 / jnp.maximum(jnp.sqrt(geometry.squared_distances_to(weights)), smoothing)
            # Divided by the largest first: 1 / tiny times the number of messages is infinite.
            inverse /= inverse.max()
            return _padded(inverse / inverse.sum(), geometry)

        return lax.fori_loop(0, self.iterations, closer, start)


@dataclasses.dataclass(frozen=True)
class MultiKrum(GeometricAggregator):
    r"""The mean of the ``selected`` messages with the smallest scores (Blanchard et al. 2017, arXiv 1703.02757).

    The score is the mean squared distance to the nearest others, n - f - 1 of them as ``"byzfl"`` and arXiv 2302.01772
    have it, or n - f - 2 as the paper of Blanchard et al. has it.

    With h = n - f, :math:`\kappa = 6 h / (n - 2f) = 6 (1 + r)`, :math:`r = f / (n - 2f)` (table 1 of arXiv 2302.01772
    for one message; for more, the mean of the smallest scores is at most the mean score in S, and the rest of the
    proof is the same), and :math:`6 h / (n - 2f - 1)` with one neighbour less.

    Attributes:
      f: Byzantine workers it is made for.
      selected: messages to average, by default n - f.
      neighbours: ``"byzfl"`` or ``"blanchard"``, which needs ``2 f + 2 < n``.

    Raises:
      ValueError, TypeError: if ``f`` or ``selected`` are not such numbers, ``neighbours`` is unknown.
    """

    f: int
    selected: int | None = None
    neighbours: Literal["byzfl", "blanchard"] = "byzfl"

    def __post_init__(self) -> None:
        check_count("f", self.f)
        if self.selected is not None:
            check_count("selected", self.selected, least=1)
        if self.neighbours not in ("byzfl", "blanchard"):
            raise ValueError(f"neighbours must be 'byzfl' (n-f-1) or 'blanchard' (n-f-2), got {self.neighbours!r}")

    def check(self, n: int) -> None:
        check_minority(self.f, n)
        if self.neighbours == "blanchard" and 2 * self.f + 2 >= n:
            raise ValueError(
                f"cannot tolerate f={self.f} of n={n} workers with Blanchard's n-f-2 neighbours: "
                f"need 2f + 2 < n, at most f={max((n - 3) // 2, 0)}"
            )
        if self._n_neighbours(n) < 1:
            raise ValueError(f"no neighbour to score by: f={self.f} of n={n} workers leave n-f-1={n - self.f - 1}")
        if self.selected is not None and self.selected > n - self.f:
            raise ValueError(f"selected must be at most n-f={n - self.f}, got {self.selected}")

    def tolerates(self, n: int) -> int:
        return min(self.f, largest_tolerated(n))

    def kappa(self, n: int, f: int | None = None) -> float:
        f = self.f if f is None else f
        if f > self.f or 2 * self.f >= n:
            return math.inf
        honest_neighbours = n - 2 * self.f - (self.neighbours == "blanchard")
        return 6 * (n - self.f) / honest_neighbours if honest_neighbours > 0 else math.inf

    def _n_neighbours(self, n: int) -> int:
        return n - self.f - (1 if self.neighbours == "byzfl" else 2)

    def _weights(self, geometry: Geometry) -> Array:
        m = len(geometry.finite)
        others = jnp.sort(geometry.squared_distances, axis=1)[:, 1 : 1 + self._n_neighbours(m)]
        return _padded(_nearest(others.mean(1), self.selected or m - self.f), geometry)


@dataclasses.dataclass(frozen=True)
class Krum(MultiKrum):
    r"""The message with the smallest score: :class:`MultiKrum` that selects one."""

    selected: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selected != 1:
            raise ValueError(f"Krum selects 1 message, got selected={self.selected}; MultiKrum selects more")


@dataclasses.dataclass(frozen=True)
class MinimumDiameterAveraging(GeometricAggregator):
    r"""The mean of the n - f messages with the smallest diameter (MDA, El Mhamdi et al. 2021, arXiv 2003.00010).

    Every one of the :math:`\binom{n}{f}` subsets is looked at, at most 20000. :math:`\kappa = 8 f^2 / (n - f)`: at most
    f messages are not of S, each within twice the diameter of the one it replaces, and the squared diameter is at most
    that of S, :math:`2 (n - f)` times the mean squared distance to the mean.

    Raises:
      ValueError, TypeError: if ``f`` is not an integer of at least 0.
    """

    f: int

    def __post_init__(self) -> None:
        check_count("f", self.f)

    def check(self, n: int) -> None:
        check_minority(self.f, n)
        check_subsets(n, self.f)

    def tolerates(self, n: int) -> int:
        return min(self.f, largest_tolerated(n))

    def kappa(self, n: int, f: int | None = None) -> float:
        f = self.f if f is None else f
        return 8 * self.f**2 / (n - self.f) if f <= self.f and 2 * self.f < n else math.inf

    def _weights(self, geometry: Geometry) -> Array:
        subsets = subsets_of(len(geometry.finite), self.f)
        distances = geometry.squared_distances
        diameters = distances[subsets[:, :, None], subsets[:, None, :]].max((1, 2))
        return mean_of(jnp.asarray(subsets)[jnp.argmin(diameters)], geometry)


@dataclasses.dataclass(frozen=True)
class Monna(GeometricAggregator):
    r"""The mean of the n - f messages nearest to a trusted one, a worker's own (MoNNA, arXiv 2209.10931).

    :math:`\kappa = 4 f (n - f + 1) / (n - f)` for sets S that hold the trusted worker: each message taken in place of
    one of S is no farther from the trusted one. If that worker is Byzantine there is no guarantee.

    Attributes:
      f: Byzantine workers it is made for.
      trusted: index of the trusted worker.

    Raises:
      ValueError, TypeError: if ``f`` or ``trusted`` are not integers of at least 0.
    """

    f: int
    trusted: int = 0

    def __post_init__(self) -> None:
        check_count("f", self.f)
        check_count("trusted", self.trusted)

    def check(self, n: int) -> None:
        check_minority(self.f, n)
        if self.trusted >= n:
            raise ValueError(f"trusted must be the index of one of n={n} workers, got {self.trusted}")

    def tolerates(self, n: int) -> int:
        return min(self.f, largest_tolerated(n))

    def kappa(self, n: int, f: int | None = None) -> float:
        f = self.f if f is None else f
        h = n - self.f
        return 4 * self.f * (h + 1) / h if f <= self.f and 2 * self.f < n else math.inf

    def _weights(self, geometry: Geometry) -> Array:
        m = len(geometry.finite)
        weights = _padded(_nearest(geometry.squared_distances[self.trusted], m - self.f), geometry)
        return jnp.where(geometry.finite[self.trusted], weights, jnp.nan)


def check_subsets(n: int, f: int) -> None:
    """Raise if there are too many subsets to look at each."""
    if math.comb(n, f) > MAX_SUBSETS:
        raise ValueError(f"{math.comb(n, f)} subsets of n-f={n - f} of n={n} workers: at most {MAX_SUBSETS} are tried")


def subsets_of(n: int, f: int) -> np.ndarray:
    """All subsets of ``n - f``, ``[subsets, n - f]``, in lexicographic order."""
    return np.array(list(itertools.combinations(range(n), n - f)), dtype=np.int32)


def mean_of(members: Array, geometry: Geometry) -> Array:
    """Equal weights on these messages, as weights of all points."""
    weights = jnp.zeros(len(geometry.finite), geometry.coefficients.dtype)
    return _padded(weights.at[members].set(1 / len(members)), geometry)


def _nearest(distances: Array, count: int) -> Array:
    """Equal weights ``[m]`` on the ``count`` smallest; the first of equals."""
    order = jnp.argsort(distances)  # stable
    return jnp.zeros_like(distances).at[order[:count]].set(1 / count)


def _padded(weights: Array, geometry: Geometry) -> Array:
    """Weights of the messages as weights of all points."""
    return jnp.pad(weights, (0, len(geometry.coefficients) - len(weights)))
