r"""Dihedral angles with the sign of IUPAC: looking along the middle bond, clockwise is positive.

With bonds ``b1, b2, b3`` between four atoms, normals ``n1 = b1 x b2`` and ``n2 = b2 x b3``,

.. math::
    \phi = \mathrm{atan2}\big(|b_2|\, b_1 \cdot n_2,\; n_1 \cdot n_2\big) .

Atoms that coincide or lie on one line have no dihedral; they give 0 and no gradient; coordinates that are not finite
give NaN. Within some hundredths of an
angstrom they count as such: the gradient of the angle grows without bound towards them.

Example:
  >>> x = jnp.array([[1.0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 1, 1]])
  >>> dihedrals(x, [[0, 1, 2, 3]]).round(4)
  Array([1.5708], dtype=float32)
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = ["dihedrals", "periodic_features"]

_DEGENERATE = 1e-12  # of the eighth power of a length: bonds of 1.5 A have 25


def dihedrals(
    x: Float[Array | np.ndarray, "*frames n 3"],
    quadruples: Int[Array | np.ndarray, "q _"] | Sequence[Sequence[int]],
) -> Float[Array, "*frames q"]:
    """Angles in (-pi, pi] of quadruples of atoms.

    Raises:
      TypeError: atoms that are no integers.
      ValueError: not four atoms, or an atom that does not exist.
    """
    index = np.asarray(quadruples)
    if index.size and not np.issubdtype(index.dtype, np.integer):
        raise TypeError(f"atoms are numbered by integers, got {index.dtype}")
    if index.ndim != 2 or index.shape[1] != 4:
        raise ValueError(f"a dihedral takes four atoms, got indices of shape {index.shape}")
    if index.size and not (index.min() >= 0 and index.max() < np.shape(x)[-2]):
        raise ValueError(f"atoms are numbered from 0 to {np.shape(x)[-2] - 1}, got {index.min()} to {index.max()}")
    return _dihedrals(jnp.asarray(x), jnp.asarray(index))


@jax.jit
def _dihedrals(x: Array, index: Array) -> Array:
    a, b, c, d = (x[..., index[:, k], :] for k in range(4))
    first, middle, last = b - a, c - b, d - c
    normal, other = jnp.cross(first, middle), jnp.cross(middle, last)
    length = jnp.sqrt(jnp.maximum(jnp.sum(middle**2, -1), 1e-30))
    sine, cosine = length * jnp.sum(first * other, -1), jnp.sum(normal * other, -1)
    size = sine**2 + cosine**2
    defined = size > _DEGENERATE
    # atan2 at the origin has no gradient.
    angle = jnp.where(defined, jnp.arctan2(jnp.where(defined, sine, 0), jnp.where(defined, cosine, 1)), 0)
    return jnp.where(jnp.isfinite(size), angle, jnp.nan)


@jax.jit
def periodic_features(angles: Float[Array | np.ndarray, "*frames q"]) -> Float[Array, "*frames 2*q"]:
    """Cosines, then sines: features without a jump."""
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
