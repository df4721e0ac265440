"""RegMean: the matrix whose outputs are nearest to those of all experts on their own inputs.

``argmin_W Σ_k ‖X_k Wᵀ - X_k W_kᵀ‖² = (Σ_k W_k G_k) (Σ_k G_k)⁻¹`` with the Gram matrices ``G_k = X_kᵀ X_k`` of the
inputs of a layer, in which numbers off the diagonal are first multiplied by ``diagonal_pull`` (Jin et al. 2023, arXiv
2212.09849). The same formula in τ_k gives the change of the base, as W_k = W_0 + τ_k.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jaxlab.editing.merging.method import MatrixMethod, check_range
from jaxlab.editing.merging.wudi import ORIENTATIONS

__all__ = ["RegMean", "input_gram"]


@struct.dataclass
class RegMean(MatrixMethod):
    """``λ (Σ_k τ_k G_k) (Σ_k G_k)⁻¹``; ``statistics`` of `combine` are the G_k, ``[K, in, in]`` (see `input_gram`).

    Attributes:
      scale: λ.
      diagonal_pull: α of the paper, which multiplies what is off the diagonal; 1 leaves it, 0 weighs each input alone.
      orientation: "out_in" for matrices ``[out, in]``, "in_out" for ``[in, out]``; static.

    Raises:
      ValueError: a pull outside [0, 1], an unknown orientation; Gram matrices that are missing or have another shape.
    """

    needs_calibration: ClassVar[bool] = True

    scale: Any = 1.0
    diagonal_pull: Any = 0.9
    orientation: str = struct.field(pytree_node=False, default="out_in")

    def __post_init__(self) -> None:
        check_range("scale", self.scale)
        check_range("diagonal_pull", self.diagonal_pull, 0.0, 1.0)
        if self.orientation not in ORIENTATIONS:
            raise ValueError(f"orientation must be 'out_in' or 'in_out', got {self.orientation!r}")

    def _combine_matrices(self, vectors: Float[Array, "k rows columns"], statistics: Any) -> Array:
        vectors = vectors.mT if self.orientation == "in_out" else vectors
        count, _, size = vectors.shape
        if statistics is None or jnp.shape(statistics) != (count, size, size):
            got = "none" if statistics is None else list(jnp.shape(statistics))
            raise ValueError(f"regmean needs the Gram matrices [{count}, {size}, {size}] of the inputs, got {got}")
        grams = jnp.asarray(statistics, vectors.dtype)
        grams = jnp.where(jnp.eye(size, dtype=bool), grams, self.diagonal_pull * grams)
        wanted = jnp.matmul(vectors, grams, precision="highest").sum(0)
        merged = jnp.matmul(wanted, jnp.linalg.pinv(grams.sum(0), hermitian=True), precision="highest")
        return merged.mT if self.orientation == "in_out" else merged


def input_gram(inputs: Float[Array, "... size"]) -> Float[Array, "size size"]:
    """``Xᵀ X / n`` of the inputs of a layer, over all axes but the last; float32.

    Divided by their number n, so that an expert with more inputs does not weigh more.
    """
    rows = inputs.reshape(-1, inputs.shape[-1]).astype(jnp.float32)
    return jnp.matmul(rows.T, rows, precision="highest") / rows.shape[0]
