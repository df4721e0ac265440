"""Time grids ``0 = t_0 < t_1 < ... < t_N = 1`` from data to noise.

They are NumPy arrays in float64: constants of a program, known when it is traced, and exact at both ends. Inversion and
sampling take the same grid; samplers walk down it.

Example::

    grid = time_grids.shifted(15)  # Stable Diffusion 3
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.flow.arguments import check_count

__all__ = ["flux", "shifted", "uniform"]

# Logarithmic shift of FLUX.1-dev, linear in the number of tokens through these two points.
_FLUX_POINTS = ((256, 0.5), (4096, 1.15))
# Of a shift: beyond it neighbouring times are one float32.
_GREATEST_EXPONENT = 12.0


def uniform(steps: int) -> np.ndarray:
    """``t_i = i / steps``, ``[steps + 1]``; ValueError where there is no step."""
    steps = check_count("steps of a time grid", steps, low=1)
    return np.linspace(0.0, 1.0, steps + 1)


def shifted(steps: int, *, shift: float = 3.0) -> np.ndarray:
    """``t' = s t / (1 + (s - 1) t)`` of a uniform grid; ``s > 1`` puts more steps near the noise.

    Args:
      steps: N.
      shift: s > 0; 3 is Stable Diffusion 3's.

    Raises:
      ValueError: ``steps`` or ``shift`` is out of range.
    """
    if not 0 < shift < math.inf:
        raise ValueError(f"shift must be positive and finite, got {shift}")
    t = uniform(steps)
    return shift * t / (1 + (shift - 1) * t)


def flux(steps: int, sequence_length: int) -> np.ndarray:
    """``t' = e^m / (e^m + 1/t - 1)``, that is `shifted` by ``e^m``, with m linear in the number of tokens of an image.

    Args:
      steps: N.
      sequence_length: tokens of the image; 256 gives m = 0.5 and 4096 gives 1.15.
    """
    sequence_length = check_count("sequence_length", sequence_length, low=1)
    (short, low), (long, high) = _FLUX_POINTS
    exponent = low + (high - low) * (sequence_length - short) / (long - short)
    if exponent > _GREATEST_EXPONENT:
        raise ValueError(f"sequence_length must leave steps next to the data, got {sequence_length}")
    return shifted(steps, shift=math.exp(exponent))


def check_grid(grid: Any, *, steps: int | None = None) -> int:
    """The number of steps to take, after a check of the grid as far as its values are known.

    Args:
      grid: ``[N + 1]``.
      steps: how many of the N steps next to the data; all by default.

    Raises:
      ValueError: the grid is not one, or has fewer steps than that.
      TypeError: ``steps`` is no static whole number.
    """
    if np.ndim(grid) != 1 or np.shape(grid)[0] < 2:
        raise ValueError(f"time grid must increase strictly from 0 to 1 in one dimension, got shape {np.shape(grid)}")
    if np.iscomplexobj(grid):
        raise ValueError(f"time grid must be made of real numbers, got {jnp.result_type(grid)}")
    if not isinstance(grid, jax.core.Tracer):
        values = np.asarray(grid, np.float64)
        if values[0] != 0 or values[-1] != 1 or not np.all(np.diff(values) > 0):
            raise ValueError(
                f"time grid must increase strictly from 0 to 1, got {np.array2string(values, threshold=8)}"
            )
    total = np.shape(grid)[0] - 1
    return total if steps is None else check_count("steps", steps, low=1, high=total, of=" on this time grid")


def points(grid: Any, steps: int, dtype: Any) -> Float[Array, " n"]:
    """The points ``[steps + 1]`` next to the data in the dtype of the latents; NaN for a traced grid that is not one.

    Raises:
      ValueError: rounded to ``dtype`` the grid no longer increases.
    """
    if isinstance(grid, jax.core.Tracer):
        times = grid.astype(dtype)
        known = (times[0] == 0) & (times[-1] == 1) & jnp.all(jnp.diff(times) > 0)
        return jnp.where(known, times, jnp.nan)[: steps + 1]
    rounded = np.asarray(grid, np.float64).astype(dtype)
    if not np.all(np.diff(rounded) > 0):
        where = int(np.argmin(np.diff(rounded)))
        low, high = (float(np.asarray(grid)[i]) for i in (where, where + 1))
        raise ValueError(f"time grid must increase strictly in the {dtype} of the latents, got {low!r} and {high!r}")
    return jnp.asarray(rounded[: steps + 1])
