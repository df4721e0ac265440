"""A check that a model's time and sign are those of `jaxlab.flow.velocity`.

The wrong orientation raises no error anywhere: reconstructions merely explode. Near the noise a model of
``noise - data`` correlates with it; one of the opposite time or sign does not.

Example::

    check_orientation(jax.random.key(0), velocity, images, condition)  # raises before anything is wasted
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from jaxlab.flow.arguments import prepare, time_of
from jaxlab.flow.noising import add_noise, noise_like
from jaxlab.flow.velocity import Velocity

__all__ = ["check_orientation", "orientation"]


def orientation(
    key: Key[Any, ""], velocity: Velocity, z0: PyTree, condition: PyTree = None, *, time: float = 0.9
) -> Float[Array, ""]:
    """Correlation of the velocity with ``noise - z_0`` at noisy samples, in [-1, 1]; near 1 for a trained model.

    Args:
      key: draws the noise.
      velocity: the model.
      z0: samples ``[B, ...]`` or a tree; a dozen will do.
      condition: passed to the model.
      time: where to look, close to 1; a static Python float.

    Raises:
      ValueError: ``time`` is not in (0, 1].
    """
    if not 0 < time <= 1:
        raise ValueError(f"time must be in (0, 1], close to the noise, got {time}")
    z0 = prepare(velocity, z0, condition)
    noise = noise_like(key, z0)
    t = time_of(z0, time)
    found = velocity(add_noise(z0, noise, t), t, condition)
    wanted = jax.tree.map(jnp.subtract, noise, z0)

    def product(a: Any, b: Any) -> Any:
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)))

    return product(found, wanted) / jnp.sqrt(product(found, found) * product(wanted, wanted))


def check_orientation(
    key: Key[Any, ""], velocity: Velocity, z0: PyTree, condition: PyTree = None, *, time: float = 0.9
) -> float:
    """The same number, outside jit.

    Raises:
      ValueError: the correlation is not positive.
    """
    correlation = float(orientation(key, velocity, z0, condition, time=time))
    if not correlation > 0:
        raise ValueError(
            "the velocity must point from data to noise with time 0 for data, but its correlation with noise - data "
            f"is {correlation:.2f} at time {time}; a model with time 0 for noise is wrapped in flip_time"
        )
    return correlation
