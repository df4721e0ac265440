"""What may go before a rule: nearest-neighbour mixing, bucketing, clipping."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from jaxlab.optim.aggregation.aggregator import PreAggregator, check_count, check_minority, ratio
from jaxlab.optim.aggregation.geometry import Geometry, medoid

__all__ = ["AdaptiveClipping", "Bucketing", "NearestNeighbourMixing", "StaticClipping"]

Mix = tuple[Float[Array, "k p"], Bool[Array, " k"]]


@dataclasses.dataclass(frozen=True)
class NearestNeighbourMixing(PreAggregator):
    r"""Every message becomes the mean of its ``n - f`` nearest, itself among them (NNM, arXiv 2302.01772).

    A rule with constant :math:`\kappa` behind it has :math:`\frac{8 f}{n - f} (\kappa + 1)` (lemma 1 there). A message
    that is not finite is mixed as if it were the message with the smallest median distance to the others.

    Raises:
      ValueError, TypeError: if ``f`` is not an integer of at least 0.
    """

    f: int

    def __post_init__(self) -> None:
        check_count("f", self.f)

    def check(self, n: int) -> None:
        check_minority(self.f, n)

    def kappa(self, n: int, f: int, after: float) -> float:
        if f > self.f:
            return math.inf
        return 8 * self.f / (n - self.f) * (after + 1) if self.f else 0.0

    def tolerates(self, n: int, after: int) -> int:
        del n
        return min(self.f, after)

    def mix(self, geometry: Geometry, key: Key[Array, ""] | None) -> Mix:
        del key
        distances, finite = geometry.squared_distances, geometry.finite
        n = len(finite)
        kept = n - self.f
        middle, _ = medoid(distances)
        distances = jnp.where(finite[:, None], distances, distances[middle])
        nearest = jnp.argsort(distances, axis=1)[:, :kept]
        chosen = jnp.zeros_like(distances).at[jnp.arange(n)[:, None], nearest].set(1 / kept)
        enough = jnp.broadcast_to(finite.sum() >= kept, (n,))
        return _over_points(chosen, geometry), enough


@dataclasses.dataclass(frozen=True)
class Bucketing(PreAggregator):
    r"""Means of random groups of ``size`` messages; the last group may be smaller (arXiv 2006.09365).

    The spread of the messages falls by about ``size``, and so does the number of messages: what follows must tolerate f
    of :math:`\lceil n / s \rceil`. Its guarantee holds on average over the groups, not for every draw, and so no
    constant is stated.

    Raises:
      ValueError, TypeError: if ``size`` is not an integer of at least 1.
    """

    size: int

    needs_gram = False
    stochastic = True

    def __post_init__(self) -> None:
        check_count("size", self.size, least=1)

    def n_messages(self, n: int) -> int:
        return -(-n // self.size)

    def kappa(self, n: int, f: int, after: float) -> float:
        del n
        return after if self.size == 1 or f == 0 == after else math.inf

    def mix(self, geometry: Geometry, key: Key[Array, ""] | None) -> Mix:
        assert key is not None
        n = len(geometry.finite)
        order = jax.random.permutation(key, n)
        group = jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n) // self.size)
        member = (group == jnp.arange(self.n_messages(n))[:, None]).astype(geometry.coefficients.dtype)
        spoilt = (member * ~geometry.finite).any(1)
        weights = jnp.where(geometry.finite, member, 0) / member.sum(1, keepdims=True)
        return _over_points(weights, geometry), ~spoilt


@dataclasses.dataclass(frozen=True)
class StaticClipping(PreAggregator):
    """Messages longer than ``max_norm`` are scaled down to it; one that is not finite becomes zero.

    How far that moves an honest message depends on its length, and so no constant is stated.

    Raises:
      ValueError: if ``max_norm`` is negative.
    """

    max_norm: float = 2.0

    def __post_init__(self) -> None:
        if not self.max_norm >= 0:
            raise ValueError(f"max_norm must not be negative, got {self.max_norm}")

    def kappa(self, n: int, f: int, after: float) -> float:
        del n, f, after
        return math.inf

    def mix(self, geometry: Geometry, key: Key[Array, ""] | None) -> Mix:
        del key
        return _clipped(geometry, jnp.asarray(self.max_norm, geometry.coefficients.dtype))


@dataclasses.dataclass(frozen=True)
class AdaptiveClipping(PreAggregator):
    r"""The :math:`k = \lfloor 2 f (n - f) / n \rfloor` longest messages are scaled to the length of the next (ARC).

    A rule with constant :math:`\kappa` behind it has :math:`\kappa + 2 f / (n - 2f)` (Allouah et al. 2024, arXiv
    2405.14432, theorem 3.2). A message that is not finite becomes zero; with more than ``f`` of them none is left.

    Raises:
      ValueError, TypeError: if ``f`` is not an integer of at least 0.
    """

    f: int

    def __post_init__(self) -> None:
        check_count("f", self.f)

    def check(self, n: int) -> None:
        check_minority(self.f, n)

    def tolerates(self, n: int, after: int) -> int:
        del n
        return min(self.f, after)

    def kappa(self, n: int, f: int, after: float) -> float:
        return after + 2 * ratio(n, self.f) if f <= self.f else math.inf

    def mix(self, geometry: Geometry, key: Key[Array, ""] | None) -> Mix:
        del key
        n = len(geometry.finite)
        clipped = (2 * self.f * (n - self.f)) // n
        limit = jnp.sort(geometry.squared_norms)[n - clipped - 1]
        weights, _ = _clipped(geometry, jnp.sqrt(limit))
        return weights, jnp.broadcast_to(geometry.finite.sum() >= n - self.f, (n,))


def _clipped(geometry: Geometry, limit: Array) -> Mix:
    finite = geometry.finite
    norms = jnp.sqrt(geometry.squared_norms)
    # A zero message is not longer than any limit: no 0 / 0.
    factor = jnp.where(norms > limit, limit / jnp.where(norms > 0, norms, 1), 1)
    factor = jnp.where(finite, factor, 0)
    weights = _over_points(jnp.diag(factor), geometry).at[:, len(finite)].set(1 - factor)
    return weights, jnp.ones_like(finite)


def _over_points(weights: Array, geometry: Geometry) -> Array:
    """Weights over messages as weights over all points."""
    return jnp.pad(weights, ((0, 0), (0, len(geometry.coefficients) - weights.shape[1])))
