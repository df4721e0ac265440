"""Merging by singular values and vectors: TSV-M and Iso-C. The orientation of the matrices does not matter.

Deviation from both papers: singular vectors of singular values that are zero, up to rounding, are left out. They are
arbitrary, and change with the machine; task vectors of LoRA, experts that equal the base in a matrix and one model that
is given twice have them. Matrices of full rank are not concerned.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxlab.editing.merging.method import MatrixMethod, after, check_range

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
        rank = min(max(1, min(rows, columns) // count), rows, columns)
        u, s, vt = jnp.linalg.svd(vectors, full_matrices=False)
        there = _is_there(s, vectors)[:, :rank]
        left = jnp.moveaxis(u[:, :, :rank] * there[:, None], 0, 1).reshape(rows, count * rank)
        right = (vt[:, :rank] * there[..., None]).reshape(count * rank, columns)
        left = _polar(left)
        right = _polar(after(right, left))
        return jnp.matmul(left * s[:, :rank].reshape(-1), right, precision="highest")


@struct.dataclass
class IsotropicMerging(MatrixMethod):
    """Iso-C (Marczak et al. 2025, arXiv 2502.04959): all singular values of Σ_k τ_k become their mean, times λ.

    The mean is over those that are not zero, and these become it: their sum stays.

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
        total = vectors.sum(0)
        u, s, vt = jnp.linalg.svd(total, full_matrices=False)
        there = _is_there(s, total)
        return s.sum() / jnp.maximum(there.sum(), 1) * jnp.matmul(u * there, vt, precision="highest")


def _polar(matrix: Array) -> Array:
    """P Qᵀ of the SVD P Σ Qᵀ; without what Σ has no part in, it is the partial isometry, which is unique."""
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    return jnp.matmul(u * _is_there(s, matrix), vt, precision="highest")


def _is_there(values: Array, matrix: Array) -> Array:
    """Which singular values are more than rounding, by the rule of `numpy.linalg.matrix_rank`."""
    resolution = max(matrix.shape[-2:]) * jnp.finfo(matrix.dtype).eps
    return values > resolution * values.max(-1, keepdims=True, initial=0.0)
