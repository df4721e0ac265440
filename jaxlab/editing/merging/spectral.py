"""Merging by singular values and vectors: TSV-M and Iso-C. The orientation of the matrices does not matter."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxlab.editing.merging.method import MatrixMethod, check_range

__all__ = ["IsotropicMerging", "TaskSingularVectors"]


@struct.dataclass
class TaskSingularVectors(MatrixMethod):
    """TSV-M (Gargiulo et al. 2025, arXiv 2412.00081).

    The ``r / K`` largest singular triplets of each τ_k, r being its smaller side (``max(1, ⌊r / K⌋)`` of them), are put
    side by side as U [rows, n], S [n], V [columns, n]; U and V are replaced by the nearest matrices with orthonormal
    columns, P Qᵀ of their own SVD P Σ Qᵀ; the result is ``λ U S Vᵀ``.

    Attributes:
      scale: λ.

    Raises:
      ValueError: a scale that is not finite.
    """

    scale: Any = 1.0

    def __post_init__(self) -> None:
        check_range("scale", self.scale)

    def _combine_matrices(self, vectors: Float[Array, "k rows columns"], statistics: Any) -> Array:
        del statistics
        count, rows, columns = vectors.shape
        rank = max(1, min(rows, columns) // count)
        u, s, vt = jnp.linalg.svd(vectors, full_matrices=False)
        left = jnp.moveaxis(u[:, :, :rank], 0, 1).reshape(rows, count * rank)
        right = vt[:, :rank].reshape(count * rank, columns)
        scaled = _polar(left) * s[:, :rank].reshape(-1)
        return jnp.matmul(scaled, _polar(right), precision="highest")


@struct.dataclass
class IsotropicMerging(MatrixMethod):
    """Iso-C (Marczak et al. 2025, arXiv 2502.04959): all singular values of Σ_k τ_k become their mean, times λ.

    Attributes:
      scale: λ.

    Raises:
      ValueError: a scale that is not finite.
    """

    scale: Any = 1.0

    def __post_init__(self) -> None:
        check_range("scale", self.scale)

    def _combine_matrices(self, vectors: Float[Array, "k rows columns"], statistics: Any) -> Array:
        del statistics
        u, s, vt = jnp.linalg.svd(vectors.sum(0), full_matrices=False)
        return s.mean() * jnp.matmul(u, vt, precision="highest")


def _polar(matrix: Array) -> Array:
    u, _, vt = jnp.linalg.svd(matrix, full_matrices=False)
    return jnp.matmul(u, vt, precision="highest")
