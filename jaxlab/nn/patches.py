"""Images as sequences of patches: sizes, the projection of patches, and position vectors for another grid.

Images are ``[b, height, width, channels]``, the order of JAX, already scaled and normalised as the checkpoint wants
them. They are cut into squares, row by row, each mapped to a vector (Dosovitskiy et al. 2020, arXiv 2010.11929). The
map is stored as the convolution that checkpoints hold, ``[out, channels, patch, patch]``.

Position vectors belong to the grid of patches a network was trained on. `resize_positions` interpolates them for
another one, bicubically, as the reference implementations do. They use two kernels (Keys 1981): a = -3/4 without
smoothing, with the border repeated; or a = -1/2, widened by the factor of reduction (antialiasing), with the weights
that fall inside rescaled to sum to one.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxlab.nn.encoder import EncoderConfig

__all__ = ["PatchProjection", "VisionConfig", "resize_positions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(EncoderConfig):
    """Sizes and switches that every encoder of images has.

    Attributes:
      image_size: height and width of the images in pixels, or one number for both.
      patch_size: side of a patch in pixels, a divisor of the image's sides.
      num_channels: channels of the images.

    The others are in `EncoderConfig`.
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int = 16
    num_channels: int = 3

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least_one("patch_size", "num_channels")
        if min(self.image_shape) < 1:
            raise ValueError(f"image_size must be at least 1; got {self.image_size}")
        if any(side % self.patch_size for side in self.image_shape):
            raise ValueError(f"patch_size must divide image_size; got {self.patch_size} and {self.image_size}")

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of the images."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image_shape[0] // self.patch_size, self.image_shape[1] // self.patch_size

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return self.grid[0] * self.grid[1]

    def grid_of(self, images: Float[Array | np.ndarray, "b h w c"], *, any_size: bool) -> tuple[int, int]:
        """Rows and columns of patches of a batch of images.

        Raises:
          ValueError: for another number of channels, sides that patches do not fill, or, unless ``any_size``, another
            size than the config's.
        """
        _, height, width, channels = images.shape
        if channels != self.num_channels:
            hint = " (images are [b, height, width, channels])" if images.shape[1] == self.num_channels else ""
            raise ValueError(f"images must have {self.num_channels} channels; got {channels}{hint}")
        if not any_size and (height, width) != self.image_shape:
            raise ValueError(f"images must be {self.image_shape[0]} x {self.image_shape[1]}; got {height} x {width}")
        if height % self.patch_size or width % self.patch_size or not height or not width:
            raise ValueError(
                f"height and width of images must be multiples of patch_size {self.patch_size}; got {height} x {width}"
            )
        return height // self.patch_size, width // self.patch_size


class PatchProjection(nnx.Module):
    """The linear map of each patch, ``[b, h, w, c]`` to ``[b, patches, hidden]``, held as a convolution's weight."""

    def __init__(self, config: VisionConfig, *, use_bias: bool, rngs: nnx.Rngs):
        side = config.patch_size
        self.weight = config.parameter(rngs, (config.hidden_size, config.num_channels, side, side))
        self.bias = nnx.Param(jnp.zeros(config.hidden_size, config.param_dtype)) if use_bias else None
        self.dtype = config.dtype

    def __call__(self, images: Float[Array | np.ndarray, "b h w c"]) -> Float[Array, "b patches d"]:
        """Cut and project images whose sides are multiples of a patch's."""
        batch, height, width, channels = images.shape
        side = self.weight.shape[-1]
        # Patches do not overlap, so that the convolution is one matrix product.
        cut = jnp.reshape(images, (batch, height // side, side, width // side, side, channels)).astype(self.dtype)
        out = jnp.einsum("bypxqc,dcpq->byxd", cut, self.weight[...].astype(self.dtype))
        if self.bias is not None:
            out = out + self.bias[...].astype(self.dtype)
        return jnp.reshape(out, (batch, out.shape[1] * out.shape[2], out.shape[-1]))


def resize_positions(
    positions: Float[Array, "patches d"], grid: tuple[int, int], new_grid: tuple[int, int], *, antialias: bool
) -> Float[Array, "new_patches d"]:
    """Interpolate position vectors from one grid of patches to another; the same grid leaves them as they are.

    The arithmetic is float32 and the dtype is kept.

    Args:
      positions: a vector for each patch, row by row.
      grid: rows and columns of ``positions``.
      new_grid: rows and columns wanted.
      antialias: which of the two kernels; see the module.
    """
    if grid == new_grid:
        return positions
    rows, columns = (_cubic_weights(old, new, antialias) for old, new in zip(grid, new_grid, strict=True))
    table = jnp.reshape(positions.astype(jnp.float32), (*grid, -1))
    out = jnp.einsum("yi,xj,ijd->yxd", rows, columns, table, precision="highest")
    return jnp.reshape(out, (-1, out.shape[-1])).astype(positions.dtype)


def _cubic_weights(old: int, new: int, antialias: bool) -> np.ndarray:
    """The matrix ``[new, old]`` of cubic interpolation along one axis; the ends of both axes coincide."""
    scale = old / new
    width = max(scale, 1.0) if antialias else 1.0
    centres = (np.arange(new) + 0.5) * scale - 0.5
    reach = int(np.ceil(2 * width)) + 1
    sources = np.floor(centres)[:, None] + np.arange(-reach, reach + 1)
    weights = _cubic(np.abs(sources - centres[:, None]) / width, -0.5 if antialias else -0.75)
    inside = (sources >= 0) & (sources < old)
    if antialias:
        weights = np.where(inside, weights, 0.0)
        weights /= weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((new, old))
    np.add.at(matrix, (np.arange(new)[:, None], np.clip(sources, 0, old - 1).astype(int)), weights)
    return matrix.astype(np.float32)


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * (x**3 - 5 * x**2 + 8 * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
