"""Weighted sums of task vectors: task arithmetic and weight averages."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Key

from jaxlab.editing.merging.method import MergeMethod, check_range, of_each, products, widened

__all__ = ["TaskArithmetic", "weight_average"]


@struct.dataclass
class TaskArithmetic(MergeMethod):
    """``λ Σ_k w_k τ_k`` (Ilharco et al. 2023, arXiv 2212.04089).

    Attributes:
      scale: λ. The default is that of the experiments on language models in arXiv 2509.25712.
      weights: w, a number or K of them.
      normalize: divide by Σ_k w_k, which makes it an average of the models where λ = 1; a sum that is zero counts as 1.

    Raises:
      ValueError: a number that is not finite.
    """

    scale: Any = 0.3
    weights: Any = 1.0
    normalize: bool = struct.field(pytree_node=False, default=False)

    def __post_init__(self) -> None:
        check_range("scale", self.scale)
        check_range("weights", self.weights)

    @property
    def blockwise(self) -> bool:
        return True

    def coefficients(self, count: int) -> list[float]:
        return products(self.scale, self.weights, count, normalize=self.normalize)

    def combine(
        self, vectors: Float[Array, "k ..."], *, key: Key[Array, ""] | None = None, statistics: Any = None
    ) -> Float[Array, "..."]:
        del key, statistics
        vectors = widened(vectors)
        weights = self._coefficients(vectors)
        # Added one by one: a reduction over a stack of a few would have the compiler form the stack first.
        total = weights[0] * vectors[0]
        for k in range(1, vectors.shape[0]):
            total = total + weights[k] * vectors[k]
        return total

    def _coefficients(self, vectors: Array) -> Array:
        weights = of_each(self.weights, vectors)
        if self.normalize:
            total = weights.sum()
            weights = weights / jnp.where(jnp.abs(total) < 1e-8, 1.0, total)
        return jnp.asarray(self.scale, vectors.dtype) * weights


def weight_average(scale: Any = 1.0, weights: Any = 1.0) -> TaskArithmetic:
    """The average of the models (Wortsman et al. 2022, arXiv 2203.05482), as task arithmetic that divides by Σ w."""
    return TaskArithmetic(scale=scale, weights=weights, normalize=True)
