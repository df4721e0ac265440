"""Points in the plane whose distances imitate a distance matrix: classical multidimensional scaling."""

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["classical_scaling"]


def classical_scaling(distances: Float[Array, "n n"], dimension: int = 2) -> Float[Array, "n k"]:
    """Coordinates from the leading eigenvectors of the doubly centred squared distances (Torgerson 1952).

    Exact for Euclidean distances between points of at most that dimension. With fewer systems than axes the last
    coordinates are zero.

    Raises:
      ValueError: ``dimension < 1``.
    """
    if dimension < 1:
        raise ValueError(f"dimension must be at least 1, got {dimension}")
    n = len(distances)
    centring = jnp.eye(n) - 1 / n
    values, vectors = jnp.linalg.eigh(-0.5 * centring @ distances**2 @ centring)
    kept = min(dimension, n)
    coordinates = vectors[:, ::-1][:, :kept] * jnp.sqrt(jnp.maximum(values[::-1][:kept], 0))
    return jnp.pad(coordinates, ((0, 0), (0, dimension - kept)))
