"""What a propagator has to beat: ensembles without dynamics, dynamics without memory, and the noise floor.

Independent samples of a diffusion model (LD-FPG itself) are `jaxlab.dynamics.latent.diffusion.ancestral_samples`.

Reference: the controls of Sengar et al., arXiv 2509.02196, and those that any generative model of trajectories needs.

Example:
  >>> first, second = halves(jnp.arange(5))
  >>> first, second
  (Array([0, 1], dtype=int32), Array([2, 3, 4], dtype=int32))
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Real, Shaped

from jaxlab.dynamics.latent.noise import noise_factor
from jaxlab.dynamics.reduced_rank import integer, real_array

__all__ = ["gaussian_samples", "halves", "shuffled"]


def gaussian_samples(key: Key[Array, ""], z: Real[Array | np.ndarray, "t d"], count: int) -> Float[Array, "count d"]:
    """Independent samples of the Gaussian with the mean and covariance of the latents.

    Raises:
      TypeError: values that are no real numbers, a count that is no integer.
      ValueError: fewer than two latents, values that are not finite, a count below 1.
    """
    z = real_array("latents", z, "[time, latent]", batch=False)
    if (count := integer("count", count)) < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if len(z) < 2:
        raise ValueError(f"a covariance needs at least 2 latents, got {len(z)}")
    noise = jax.random.normal(key, (count * z.shape[1],), z.dtype).reshape(count, z.shape[1])
    return z.mean(0) + noise @ noise_factor(z).T


def shuffled(key: Key[Array, ""], trajectory: Shaped[Array | np.ndarray, "t ..."]) -> Shaped[Array, "t ..."]:
    """The frames in random order: the exact ensemble, and no dynamics."""
    return jax.random.permutation(key, jnp.asarray(trajectory), axis=0)


def halves(
    trajectory: Shaped[Array | np.ndarray, "t ..."],
) -> tuple[Shaped[Array | np.ndarray, "a ..."], Shaped[Array | np.ndarray, "b ..."]]:
    """The two halves in time, whose divergence is what finite length alone makes.

    Raises:
      ValueError: fewer than two frames.
    """
    if len(trajectory) < 2:
        raise ValueError(f"two halves need at least 2 frames, got {len(trajectory)}")
    middle = len(trajectory) // 2
    return trajectory[:middle], trajectory[middle:]
