"""Linear maps and embedding tables with the weights laid out as checkpoints store them.

``weight`` is ``[out, in]`` (``[vocabulary, hidden]`` for a table), the layout of PyTorch and of safetensors files, so
that a tensor of a checkpoint is used as it was read: no transpose, hence no copy of a memory-mapped file.

In a tree of parameters a `LowRankSum` may stand for a matrix. `Linear` then multiplies by its factors one after the
other, without forming the sum; whatever else reads the matrix gets the sum.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Float, Int

__all__ = ["Embedding", "Linear", "LowRankSum"]


@struct.dataclass
class LowRankSum:
    """The matrix ``W + s B A``, kept as its terms; a leaf where a network expects a matrix.

    Leading axes, such as that of stacked blocks, are shared by all terms.

    Attributes:
      weight: W, ``[..., out, in]``; may itself be a `LowRankSum`.
      down: A, ``[..., rank, in]``.
      up: B, ``[..., out, rank]``.
      scale: s, ``[...]``.
    """

    # Not annotated as arrays: like any tree it may hold shapes, shardings or gradients.
    weight: Any
    down: Any
    up: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """Dtype of W."""
        return self.weight.dtype

    def __getitem__(self, index: Any) -> "LowRankSum":
        """Give the whole for ``[...]``, which is how a network reads a parameter."""
        if index is not Ellipsis:
            raise TypeError(f"a LowRankSum has no parts; got the index {index!r}")
        return self

    def astype(self, dtype: Any) -> Array:
        """Form the sum, in float32, and convert it."""
        scale = jnp.asarray(self.scale, jnp.float32)[..., None, None]
        up, down = self.up.astype(jnp.float32), self.down.astype(jnp.float32)
        product = jnp.einsum("...or,...ri->...oi", up, down, precision="highest")
        return (self.weight.astype(jnp.float32) + scale * product).astype(dtype)


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
        y = _product(x.astype(self.dtype), self.weight[...])
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


def _product(x: Array, weight: Any) -> Array:
    if isinstance(weight, LowRankSum):
        inner = jnp.einsum("...i,ri->...r", x, weight.down.astype(x.dtype))
        change = jnp.einsum("...r,or->...o", inner, weight.up.astype(x.dtype))
        return _product(x, weight.weight) + weight.scale.astype(x.dtype) * change
    return jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype))


def _normal(rngs: nnx.Rngs, shape: tuple[int, int], stddev: float, dtype: str) -> nnx.Param:
    return nnx.Param(jax.nn.initializers.normal(stddev, dtype)(rngs.params(), shape))
