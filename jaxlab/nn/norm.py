"""Normalisation layers, computed in float32 whatever the dtype of the activations."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

__all__ = ["LayerNorm", "RMSNorm"]


class LayerNorm(nnx.Module):
    """``y = w · (x - mean(x)) / √(var(x) + ε) + b`` over the last axis (Ba, Kiros & Hinton 2016, arXiv 1607.06450).

    The variance is that of the population. The statistics and the product are float32, and the variance is taken after
    the mean, for ``mean(x²) - mean(x)²`` cancels where the mean is far from zero.
    """

    def __init__(self, size: int, *, eps: float = 1e-5, param_dtype: str = "float32"):
        self.weight = nnx.Param(jnp.ones(size, param_dtype))
        self.bias = nnx.Param(jnp.zeros(size, param_dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """Normalise the last axis; the dtype of ``x`` is kept."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scale = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        weight, bias = self.weight[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (centred * scale * weight + bias).astype(x.dtype)


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
