"""Normalisation layers, computed in float32 whatever the dtype of the activations."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

__all__ = ["RMSNorm"]


class RMSNorm(nnx.Module):
    """``y = w · x / √(mean(x²) + ε)`` over the last axis (Zhang & Sennrich 2019, arXiv 1910.07467).

    The statistics and the product are float32: squares of bfloat16 activations lose the digits ``eps`` stands in.
    """

    def __init__(self, size: int, *, eps: float = 1e-6, param_dtype: str = "float32"):
        self.weight = nnx.Param(jnp.ones(size, param_dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """Normalise the last axis; the dtype of ``x`` is kept."""
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * scale * self.weight[...].astype(jnp.float32)).astype(x.dtype)
