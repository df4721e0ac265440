r"""Superposition of molecular frames: the rigid motion of least squares (Kabsch).

.. math::
    \min_{R \in SO(3)} \sum_a |R\,(x_a - \bar x) - (y_a - \bar y)|^2, \qquad H = \sum_a (x_a - \bar x)(y_a - \bar
    y)^\top = U S V^\top, \qquad R = V \,\mathrm{diag}(1, 1, \det V U^\top)\, U^\top .

The last sign keeps the motion proper: a mirror image is never superposed by reflection.

Reference: Kabsch, Acta Cryst. A 34, 827 (1978).

Example:
  >>> x = jnp.eye(3)
  >>> bool(jnp.allclose(align(x[:, [1, 2, 0]][None] + 5, x), x, atol=1e-5))
  True
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from jaxlab.dynamics.reduced_rank import check_finite, real_array

__all__ = ["align", "root_mean_square_deviation"]


def align(
    x: Real[Array | np.ndarray, "*frames n 3"], reference: Real[Array | np.ndarray, "_ 3"]
) -> Float[Array, "*frames n 3"]:
    """Move every frame onto the reference by a rotation and a translation.

    Args:
      x: coordinates.
      reference: coordinates of the same atoms.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: another number of atoms, not three coordinates, values that are not finite.
    """
    x = real_array("coordinates", x, "[atom, 3]")
    reference = real_array("the reference", reference, "[atom, 3]", batch=False)
    if x.shape[-2:] != reference.shape or reference.shape[1] != 3:
        raise ValueError(f"frames and reference must hold the same atoms, got {x.shape[-2:]} and {reference.shape}")
    check_finite("coordinates", x)
    check_finite("the reference", reference)
    return _align(x, reference.astype(x.dtype))


@jax.jit
def root_mean_square_deviation(
    x: Float[Array | np.ndarray, "*#frames n 3"], y: Float[Array | np.ndarray, "*#frames _ 3"]
) -> Float[Array, "..."]:
    """Root of the mean over atoms of the squared distances, without superposition, in the unit of the coordinates.

    Raises:
      ValueError: frames of different atoms.
    """
    if np.shape(x)[-2:] != np.shape(y)[-2:]:
        raise ValueError(f"frames must hold the same atoms, got {np.shape(x)[-2:]} and {np.shape(y)[-2:]}")
    return jnp.sqrt(jnp.mean(jnp.sum((jnp.asarray(x) - y) ** 2, axis=-1), axis=-1))


@jax.jit
def _align(x: Array, reference: Array) -> Array:
    goal = reference.mean(0)
    centred = x - x.mean(-2, keepdims=True)
    u, _, vt = jnp.linalg.svd(centred.mT @ (reference - goal))
    # Rows: x_a R^T with R^T = U diag(1, 1, d) V^T.
    sign = jnp.sign(jnp.linalg.det(u) * jnp.linalg.det(vt))
    flip = jnp.stack([jnp.ones_like(sign), jnp.ones_like(sign), jnp.where(sign < 0, -1.0, 1.0)], axis=-1)
    return centred @ ((u * flip[..., None, :]) @ vt) + goal
