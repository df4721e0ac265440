"""Linear maps and embedding tables with the weights laid out as checkpoints store them.

``weight`` is ``[out, in]`` (``[vocabulary, hidden]`` for a table), the layout of PyTorch and of safetensors files, so
that a tensor of a checkpoint is used as it was read: no transpose, hence no copy of a memory-mapped file.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

__all__ = ["Embedding", "Linear"]


class Linear(nnx.Module):
    """``y = x Wᵀ + b`` with ``weight`` ``[out, in]`` drawn from N(0, stddev²) and ``bias`` ``[out]`` (or none) at zero.

    The product is computed in ``dtype``; the parameters are kept in ``param_dtype``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        stddev: float = 0.02,
        dtype: str = "float32",
        param_dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        self.weight = _normal(rngs, (out_features, in_features), stddev, param_dtype)
        self.bias = nnx.Param(jnp.zeros(out_features, param_dtype)) if use_bias else None
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Apply the map to the last axis."""
        y = jnp.einsum("...i,oi->...o", x.astype(self.dtype), self.weight[...].astype(self.dtype))
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class Embedding(nnx.Module):
    """A table ``weight`` ``[vocabulary, hidden]`` of vectors, drawn from N(0, stddev²).

    An id outside ``[0, vocabulary)`` gives a vector of NaN rather than that of a neighbouring id.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        stddev: float = 0.02,
        dtype: str = "float32",
        param_dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        self.weight = _normal(rngs, (vocab_size, hidden_size), stddev, param_dtype)
        self.dtype = dtype

    def __call__(self, ids: Int[Array | np.ndarray, "*batch"]) -> Float[Array, "*batch hidden"]:
        """Look the ids up."""
        # Indexing counts negative ids from the end; one past the end is out of bounds like any other.
        ids = jnp.where(ids < 0, self.weight.shape[0], ids)
        return self.weight[...].at[ids].get(mode="fill", fill_value=jnp.nan).astype(self.dtype)


def _normal(rngs: nnx.Rngs, shape: tuple[int, int], stddev: float, dtype: str) -> nnx.Param:
    return nnx.Param(jax.nn.initializers.normal(stddev, dtype)(rngs.params(), shape))
