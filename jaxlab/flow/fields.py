"""Velocity fields known in closed form, to try a method on without training anything.

For data from a mixture of normal distributions N(x_k, s^2) with weights w_k and standard normal noise, on the path
``z_t = (1 - t) z_0 + t noise``, with ``V = (1 - t)^2 s^2 + t^2``::

    m = sum_k softmax_k(log w_k - |z - (1 - t) x_k|^2 / 2 V) x_k
    v = -m + (t - (1 - t) s^2) / V (z - (1 - t) m)

One component is a Gaussian, whose flow is ``z_1 = (z_0 - x) / s``. With the images of a data set as centres it is the
exact flow of their kernel density estimate; small s makes it stiff (its Lipschitz constant is about 1 / 2 s).

Example::

    velocity = mixture_velocity(images.reshape(len(images), -1), 0.1)
    noise = uni_invert(velocity, held_out, time_grids.uniform(20)).z
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float

__all__ = ["gaussian_velocity", "mixture_velocity"]


def mixture_velocity(centres: Float[Any, "k d"], deviation: Any) -> Partial:
    """The velocity of the mixture, for latents ``[B, d]``.

    Its condition is None for equal weights, or logarithms of weights ``[B, k]`` (minus infinity leaves a centre out).

    Args:
      centres: x_k.
      deviation: s > 0; may be traced.

    Raises:
      ValueError: centres that are no matrix, or a deviation that is not positive.
    """
    if np.ndim(centres) != 2 or not np.shape(centres)[0]:
        raise ValueError(f"centres must be [k, d] and at least one, got shape {np.shape(centres)}")
    if not isinstance(deviation, jax.core.Tracer) and not (np.ndim(deviation) == 0 and 0 < deviation < math.inf):
        raise ValueError(f"deviation must be a positive number, got {deviation}")
    return Partial(_mixture, jnp.asarray(centres), jnp.asarray(deviation))


def gaussian_velocity(mean: Float[Any, " d"], deviation: Any) -> Partial:
    """The velocity of one normal distribution, for latents ``[B, d]``; it takes no condition."""
    return mixture_velocity(jnp.asarray(mean)[None], deviation)


def _mixture(centres: Array, deviation: Array, z: Array, t: Array, condition: Any) -> Array:
    centres, deviation = centres.astype(z.dtype), deviation.astype(z.dtype)
    if z.shape[-1] != centres.shape[1]:
        raise ValueError(f"latents must have as many numbers as the centres, {centres.shape[1]}, got {list(z.shape)}")
    data = 1 - t
    variance = data**2 * deviation**2 + t**2
    # |z - (1 - t) x|^2 without |z|^2, which is common to all centres.
    distance = data**2 * jnp.square(centres).sum(-1) - 2 * data * jnp.matmul(z, centres.T, precision="highest")
    logits = -distance / (2 * variance)
    if condition is not None:
        logits = logits + condition
    mean = jnp.matmul(jax.nn.softmax(logits, axis=-1), centres, precision="highest")
    return -mean + (t - data * deviation**2) / variance * (z - data * mean)
