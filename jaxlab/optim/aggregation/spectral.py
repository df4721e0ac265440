r"""Rules that look at the largest eigenvalue of the messages' covariance.

The covariance of ``n`` messages has the non-zero eigenvalues of their centred ``[n, n]`` Gram matrix, so that no matrix
of the size of a model appears. The eigenvalues are exact; the library byzfl takes one power iteration from a random
vector in their place.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxlab.optim.aggregation.aggregator import GeometricAggregator, check_count, check_minority, largest_tolerated
from jaxlab.optim.aggregation.distance_based import _mean_of, _padded, check_subsets, subsets_of
from jaxlab.optim.aggregation.geometry import Geometry

__all__ = ["CovarianceFiltering", "MinimumEigenvalueAveraging"]


@dataclasses.dataclass(frozen=True)
class CovarianceFiltering(GeometricAggregator):
    r"""Weights of messages that stand out along the direction of largest variance fall until 2f of them are gone.

    Covariance-bound agnostic filtering (CAF, Allouah, Guerraoui, Stephan, ICML 2025). With weights
    c, their mean :math:`\mu_c` and covariance, and its top eigenpair :math:`(\lambda, u)`:
    :math:`\tau_i = \langle v_i - \mu_c, u \rangle^2`, :math:`c_i \leftarrow c_i (1 - \tau_i / \max_j \tau_j)` while
    :math:`\sum_i c_i > n - 2f`. The result is the :math:`\mu_c` of the smallest :math:`\lambda` on the way. No constant
    in terms of the mean squared spread is stated.

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
        del n
        return 0.0 if self.f == 0 and not f else math.inf

    def _weights(self, geometry: Geometry) -> Array:
        m = len(geometry.finite)
        assert geometry.gram is not None
        gram = geometry.gram[:m, :m]
        weights = geometry.finite.astype(gram.dtype)

        def goes_on(carry):
            weights, *_, spread = carry
            return (weights.sum() > m - 2 * self.f) & (spread > 0)

        def filtered(carry):
            weights, best, smallest, _ = carry
            mean = weights / weights.sum()
            moved = gram - (gram @ mean)[:, None] - mean @ gram + mean @ gram @ mean
            root = jnp.sqrt(mean)
            values, vectors = jnp.linalg.eigh(root[:, None] * moved * root)
            # Of the direction u only the projections of the messages on it are needed, up to a factor.
            spread = jnp.where(weights > 0, jnp.square(moved @ (root * vectors[:, -1])), 0)
            largest = spread.max()
            weights = weights * (1 - spread / jnp.where(largest > 0, largest, 1))
            better = values[-1] < smallest
            return weights, jnp.where(better, mean, best), jnp.minimum(values[-1], smallest), largest

        unbounded = jnp.asarray(jnp.inf, gram.dtype)
        start = (weights, weights / weights.sum(), unbounded, unbounded)
        return _padded(lax.while_loop(goes_on, filtered, start)[1], geometry)


@dataclasses.dataclass(frozen=True)
class MinimumEigenvalueAveraging(GeometricAggregator):
    r"""The mean of the n - f messages whose covariance has the smallest top eigenvalue (SMEA, arXiv 2302.04787).

    Every one of the :math:`\binom{n}{f}` subsets is looked at, at most 20000. Its guarantee is in terms of that
    eigenvalue. As the top eigenvalue is at most the mean squared spread :math:`\sigma^2` of S, :math:`\kappa = 4 f / (n -
    2f)`: with :math:`S'` the chosen set, the means of S and of S' each differ by at most :math:`\sigma \sqrt{f / (n -
    2f)}` from that of their common part, in the direction of their difference.

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
        return 4 * self.f / (n - 2 * self.f) if f <= self.f and 2 * self.f < n else math.inf

    def _weights(self, geometry: Geometry) -> Array:
        m = len(geometry.finite)
        assert geometry.gram is not None
        subsets = subsets_of(m, self.f)
        gram = geometry.gram[subsets[:, :, None], subsets[:, None, :]]
        gram = gram - gram.mean(1, keepdims=True) - gram.mean(2, keepdims=True) + gram.mean((1, 2), keepdims=True)
        largest = jnp.linalg.eigvalsh(gram)[:, -1]
        whole = geometry.finite[subsets].all(1)
        return _mean_of(jnp.asarray(subsets)[jnp.argmin(jnp.where(whole, largest, jnp.inf))], geometry)
