"""Learned coefficients for models in files: a method for every tensor, as `merge_checkpoints` takes them.

Example::

    found = expert_merging(decoder_forward(base.config), base.params, experts, batches)
    merge_checkpoints(open_base("base"), [open_expert("code", ...), ...], "merged", tensor_methods(found.coefficients))

The tensors of a file are those of our decoders, ``model/layers/3/mlp/up_proj/weight`` as
``model.layers.3.mlp.up_proj.weight``, with the same ``[out, in]`` matrices, so that pieces are the same numbers.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Key

from jaxlab.editing.expert_merging.coefficients import Coefficients, merge, tensor_layout
from jaxlab.editing.merging import MergeMethod, TaskArithmetic

__all__ = ["PieceArithmetic", "tensor_methods"]


@struct.dataclass
class PieceArithmetic(MergeMethod):
    """``Σ_k Σ_s α_{k,s} τ_{k,s}`` of one tensor.

    Attributes:
      alpha: α, ``[K, pieces]``.
    """

    alpha: Any

    def coefficients(self, count: int) -> list[float]:
        """Means over the pieces."""
        return np.asarray(self.alpha, np.float64).mean(1).tolist()

    def combine(
        self, vectors: Float[Array, "k ..."], *, key: Key[Array, ""] | None = None, statistics: Any = None
    ) -> Float[Array, "..."]:
        """As of the base class; the tensor is flattened row by row and cut as ``torch.chunk`` does."""
        del key, statistics
        named = {"": vectors}
        layout = tensor_layout(named, chunks=int(self.alpha.shape[1]), stacked=r"(?!)")
        return merge({"": jnp.zeros(vectors.shape[1:])}, named, {"": jnp.asarray(self.alpha)}, layout)[""]


def tensor_methods(coefficients: Coefficients) -> dict[str, MergeMethod]:
    """From the name of each tensor in a file to how it is merged."""
    found: dict[str, MergeMethod] = {}
    for name, pieces in coefficients.by_name().items():
        alpha = np.array(pieces, np.float32)
        one = alpha.shape[1] == 1
        weights = tuple(alpha[:, 0].tolist())
        found[name.replace("/", ".")] = TaskArithmetic(1.0, weights=weights) if one else PieceArithmetic(alpha)
    return found
