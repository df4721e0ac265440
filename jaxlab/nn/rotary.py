"""Rotary position embedding (RoPE; Su et al. 2021, arXiv 2104.09864).

At position p the pair of coordinates (i, i + d/2) of a head of size d is turned by the angle ``p · θ^(-2i/d)``. So the
product of a query and a key depends on their positions only through the difference.

Deviation: the paper pairs neighbours (2i, 2i + 1). Hugging Face checkpoints pair the *halves* of a head, (i, i + d/2),
and so does this module. Files in the paper's order (llama2.c, GGUF of Llama models) need the rows of ``q_proj`` and
``k_proj`` reordered head by head: the even rows first, then the odd ones.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = ["apply_rotary", "rotary_angles"]


def rotary_angles(
    positions: Int[Array | np.ndarray, "*batch t"], *, head_dim: int, theta: float = 10_000.0
) -> Float[Array, "*batch t half"]:
    """Angles in radians, float32, by which each pair of coordinates is turned at each position.

    Args:
      positions: token positions, any integers.
      head_dim: size d of a head, even; ``half`` is d / 2.
      theta: base θ of the frequencies (10,000 in the paper).
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return jnp.asarray(positions, jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)


def apply_rotary(
    x: Float[Array, "*batch t heads d"], angles: Float[Array, "*#batch t half"]
) -> Float[Array, "*batch t heads d"]:
    """Turn every head of ``x`` by the angles of its position, in float32; the dtype of ``x`` is kept."""
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
