r"""A rule that looks at the largest eigenvalue of the messages' covariance.

The covariance of ``n`` messages has the non-zero eigenvalues of their centred ``[n, n]`` Gram matrix, so that no matrix
of the size of a model appears. The eigenvalues are exact; the library byzfl takes one power iteration from a random
vector in their place.

Left out: covariance-bound agnostic filtering (CAF, Allouah, Guerraoui, Stephan, ICML 2025). With exact eigenvectors it
takes thousands of decompositions for seven messages, and with byzfl's random vectors its result is random.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array

from jaxlab.optim.aggregation.aggregator import GeometricAggregator, check_count, check_minority, largest_tolerated
from jaxlab.optim.aggregation.distance_based import check_subsets, mean_of, subsets_of
from jaxlab.optim.aggregation.geometry import Geometry

__all__ = ["MinimumEigenvalueAveraging"]


@dataclasses.dataclass(frozen=True)
class MinimumEigenvalueAveraging(GeometricAggregator):
    r"""The mean of the n - f messages whose covariance has the smallest top eigenvalue (SMEA, arXiv 2302.04787).

    Every one of the :math:`\binom{n}{f}` subsets is looked at, at most 20000. Its guarantee is in terms of that
    eigenvalue. As the top eigenvalue is at most the mean squared spread :math:`\sigma^2` of S, :math:`\kappa = 4 f /
    (n - 2f)`: with :math:`S'` the chosen set, the means of S and of S' each differ by at most
    :math:`\sigma \sqrt{f / (n - 2f)}` from that of their common part, in the direction of their difference.

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
        return mean_of(jnp.asarray(subsets)[jnp.argmin(jnp.where(whole, largest, jnp.inf))], geometry)
