"""TIES: trim, elect a sign, and average what agrees (Yadav et al. 2023, arXiv 2306.01708).

1. Of each τ_k the ``density`` largest magnitudes are kept, and the rest is zero.
2. Every number elects the sign of ``Σ_k w_k τ_k``.
3. The result is ``λ Σ_k w_k τ_k / Σ_k w_k`` over the k whose trimmed number has that sign.

There are two readings of it in use, which differ in two things:

=========================== =================================== ===========================================
                            ``scope``                           ``election``, where a sum is exactly zero
=========================== =================================== ===========================================
the authors' code           "global": one threshold a model     "release": the sign that most numbers elect
mergekit                    "tensor": one for each tensor       "mergekit": plus
=========================== =================================== ===========================================

Deviations:
  1. ``max(1, ⌊density · n⌋)`` numbers are kept, as in mergekit; the authors' code keeps one more.
  2. Numbers equal to the threshold are all kept, as in the authors' code; mergekit keeps some of them, by the order in
     which its sort leaves them. Differences of bfloat16 numbers are often equal.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Key

from jaxlab.editing.merging.magnitude import kept_counts, magnitude_thresholds
from jaxlab.editing.merging.method import MergeMethod, check_range, of_each, products, widened

__all__ = ["Ties", "TiesStatistics"]


class TiesStatistics(NamedTuple):
    """What TIES takes from many tensors.

    Attributes:
      thresholds: ``[K]``, magnitudes below are trimmed.
      majority: the sign, -1, 0 or 1, where the sum is zero.
    """

    thresholds: Any
    majority: Any


@struct.dataclass
class Ties(MergeMethod):
    """Trim, elect, average.

    Attributes:
      scale: λ.
      weights: w, a number or K of them; multiplied before the election.
      density: part of each vector that is kept, a number or K of them in [0, 1].
      normalize: divide by the weights that agree; without it they are added up.
      scope: "global" trims all tensors of a model by one threshold, "tensor" each by its own.
      election: "release" or "mergekit", see above.

    Raises:
      ValueError: a density outside [0, 1], an unknown scope or election.
    """

    scale: Any = 1.0
    weights: Any = 1.0
    density: Any = 0.2
    normalize: bool = struct.field(pytree_node=False, default=True)
    scope: str = struct.field(pytree_node=False, default="global")
    election: str = struct.field(pytree_node=False, default="release")

    def __post_init__(self) -> None:
        check_range("scale", self.scale)
        check_range("weights", self.weights)
        check_range("density", self.density, 0.0, 1.0)
        if self.scope not in ("global", "tensor"):
            raise ValueError(f"scope must be 'global' or 'tensor', got {self.scope!r}")
        if self.election not in ("release", "mergekit"):
            raise ValueError(f"election must be 'release' or 'mergekit', got {self.election!r}")

    @property
    def blockwise(self) -> bool:
        return True

    def coefficients(self, count: int) -> list[float]:
        return products(self.scale, self.weights, count)

    def statistics(self, vectors: Mapping[str, Float[Array, "k ..."]]) -> TiesStatistics | None:
        return self.measure(list(vectors.values())) if self.scope == "global" else None

    def measure(self, vectors: Sequence[Float[Array, "k ..."]]) -> TiesStatistics:
        """Thresholds and majority of arrays that are trimmed and elect together."""
        vectors = [widened(vector) for vector in vectors]
        total = sum(vector[0].size for vector in vectors)
        count = vectors[0].shape[0]
        thresholds = magnitude_thresholds(vectors, kept_counts(self.density, total, count))
        if self.election == "mergekit":
            return TiesStatistics(thresholds, 1)
        return TiesStatistics(thresholds, jnp.sign(sum(self.ballot(vector, thresholds) for vector in vectors)))

    def ballot(self, vectors: Float[Array, "k ..."], thresholds: Float[Array, " k"]) -> Array:
        """How many numbers elect plus, less those that elect minus; int32."""
        total = _sum(self._trimmed(widened(vectors), thresholds))
        return jnp.sum(total > 0, dtype=jnp.int32) - jnp.sum(total < 0, dtype=jnp.int32)

    def combine(
        self, vectors: Float[Array, "k ..."], *, key: Key[Array, ""] | None = None, statistics: Any = None
    ) -> Float[Array, "..."]:
        del key
        vectors = widened(vectors)
        thresholds, majority = self.measure([vectors]) if statistics is None else statistics
        trimmed = self._trimmed(vectors, thresholds)
        total = _sum(trimmed)
        elected = jnp.where(total == 0, jnp.asarray(majority, total.dtype), total)
        agree = [((row > 0) & (elected > 0)) | ((row < 0) & (elected < 0)) for row in trimmed]
        mixed = _sum([jnp.where(kept, row, 0) for kept, row in zip(agree, trimmed, strict=True)])
        if self.normalize:
            weights = of_each(self.weights, vectors)
            divisor = _sum([jnp.where(kept, weights[k], 0) for k, kept in enumerate(agree)])
            mixed = mixed / jnp.where(divisor == 0, 1, divisor)
        # What is not a number agrees with nothing, and shall not vanish for that.
        return jnp.asarray(self.scale, vectors.dtype) * jnp.where(jnp.isnan(total), total, mixed)

    def _trimmed(self, vectors: Array, thresholds: Array) -> list[Array]:
        weights = of_each(self.weights, vectors)
        return [
            jnp.where(jnp.abs(vector) < thresholds[k].astype(vector.dtype), 0, weights[k] * vector)
            for k, vector in enumerate(vectors)
        ]


def _sum(rows: Sequence[Array]) -> Array:
    return sum(rows[1:], rows[0])
