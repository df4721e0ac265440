"""How near an image is to another: peak signal-to-noise ratio, structural similarity, distance of structure.

Images are ``[B, H, W, C]``; every metric gives one number an image. ``data_range`` is the distance of the least from
the greatest value a pixel may have, 2 for images in [-1, 1].

Example::

    background = psnr(edited, images, mask=outside_the_edited_region)
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

__all__ = ["psnr", "ssim", "structure_distance"]

_WINDOW, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03


def psnr(
    x: Float[Array, "*shape"],
    y: Float[Array, "*shape"],
    *,
    mask: Shaped[Array | np.ndarray, "..."] | None = None,
    data_range: float = 2.0,
) -> Float[Array, " n"]:
    """``10 log10(data_range^2 / mean squared error)`` in decibels, infinite for equal images.

    Args:
      x: images.
      y: images.
      mask: weights in [0, 1] that broadcast to the images; errors are averaged over them. An image without any is NaN.
      data_range: see the module.

    Raises:
      ValueError: two shapes, or a range that is not positive.
    """
    _check_images(x, y, data_range)
    square = jnp.square(x.astype(jnp.float32) - y.astype(jnp.float32))
    axes = tuple(range(1, x.ndim))
    if mask is None:
        error = square.mean(axes)
    else:
        weight = jnp.broadcast_to(jnp.asarray(mask, square.dtype), square.shape)
        error = (weight * square).sum(axes) / weight.sum(axes)
    return 20 * math.log10(data_range) - 10 * jnp.log10(error)


def ssim(x: Float[Array, "b h w c"], y: Float[Array, "b h w c"], *, data_range: float = 2.0) -> Float[Array, " b"]:
    """Structural similarity (Wang et al. 2004): Gaussian window of 11 pixels, deviation 1.5, inside the border.

    Raises:
      ValueError: the images are smaller than the window or of two shapes, or a range that is not positive.
    """
    _check_images(x, y, data_range)
    if x.ndim != 4:
        raise ValueError(f"images must be [B, H, W, C], got {list(x.shape)}")
    height, width = x.shape[1:3]
    if min(height, width) < _WINDOW:
        raise ValueError(f"images must be at least {_WINDOW} pixels wide and high, got {height} x {width}")
    rows, columns = _smoother(height), _smoother(width)

    def smooth(image: Array) -> Array:
        return jnp.einsum("yh,xw,bhwc->byxc", rows, columns, image, precision="highest")

    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    mean_x, mean_y = smooth(x), smooth(y)
    var_x = smooth(x * x) - mean_x**2
    var_y = smooth(y * y) - mean_y**2
    covariance = smooth(x * y) - mean_x * mean_y
    c1, c2 = (_K1 * data_range) ** 2, (_K2 * data_range) ** 2
    likeness = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return (likeness / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean((1, 2, 3))


def structure_distance(feature_fn: Callable[[Any], Array], x: Any, y: Any) -> Float[Array, " b"]:
    """Mean squared difference of the self-similarities of two images (Tumanyan et al. 2022, arXiv 2201.00424).

    Args:
      feature_fn: a network's tokens, ``feature_fn(images) -> [B, tokens, features]``; the authors' are the keys of the
        last block of a DINO ViT.
      x: images.
      y: images.

    Raises:
      ValueError: the tokens of both are of two shapes.
    """

    def similarities(images: Any) -> Array:
        tokens = feature_fn(images).astype(jnp.float32)
        tokens = tokens / jnp.maximum(jnp.linalg.norm(tokens, axis=-1, keepdims=True), 1e-8)
        return jnp.einsum("bnd,bmd->bnm", tokens, tokens, precision=jax.lax.Precision.HIGHEST)

    of_x, of_y = similarities(x), similarities(y)
    if of_x.shape != of_y.shape:
        raise ValueError(f"tokens must be as many for both images, got similarities {of_x.shape} and {of_y.shape}")
    return jnp.square(of_x - of_y).mean((1, 2))


def _check_images(x: Any, y: Any, data_range: float) -> None:
    if x.shape != y.shape:
        raise ValueError(f"images must have one shape, got {list(x.shape)} and {list(y.shape)}")
    if not 0 < data_range < math.inf:
        raise ValueError(f"data_range must be positive and finite, got {data_range}")


def _smoother(size: int) -> np.ndarray:
    """The matrix ``[size - 10, size]`` that averages with the window along one axis."""
    offsets = np.arange(_WINDOW) - _WINDOW // 2
    window = np.exp(-(offsets**2) / (2 * _SIGMA**2))
    matrix = np.zeros((size - _WINDOW + 1, size))
    for row in range(len(matrix)):
        matrix[row, row : row + _WINDOW] = window / window.sum()
    return matrix.astype(np.float32)
