"""Points in the plane whose distances imitate a distance matrix: classical multidimensional scaling."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.dynamics.reduced_rank import check_finite, integer, is_concrete, real_array

__all__ = ["classical_scaling"]


def classical_scaling(distances: Float[Array, "n n"], dimension: int = 2) -> Float[Array, "n k"]:
    """Coordinates from the leading eigenvectors of the doubly centred squared distances (Torgerson 1952).

    Exact for Euclidean distances between points of at most that dimension. With fewer systems than axes the last
    coordinates are zero.

    Raises:
      TypeError: a dimension that is no integer, distances that are not real.
      ValueError: ``dimension < 1``, no square matrix, distances that are not finite or not symmetric.
    """
    if integer("dimension", dimension) < 1:
        raise ValueError(f"dimension must be at least 1, got {dimension}")
    distances = real_array("distances", distances, "[n, n]", batch=False)
    n = len(distances)
    if n == 0 or distances.shape[1] != n:
        raise ValueError(f"distances must be a square matrix, got shape {distances.shape}")
    check_finite("distances", distances)
    if is_concrete(distances) and not np.allclose(distances, distances.T, rtol=1e-4, atol=1e-4 * abs(distances).max()):
        raise ValueError("distances must be symmetric")
    centring = jnp.eye(n, dtype=distances.dtype) - 1 / n
    values, vectors = jnp.linalg.eigh(-0.5 * centring @ distances**2 @ centring)
    kept = min(dimension, n)
    coordinates = vectors[:, ::-1][:, :kept] * jnp.sqrt(jnp.maximum(values[::-1][:kept], 0))
    return jnp.pad(coordinates, ((0, 0), (0, dimension - kept)))
