"""RF-Inversion: inversion and editing as controlled ODEs (Rout et al. 2024, arXiv 2410.10792).

On the way up the velocity is pulled towards the straight line to one fixed noise ``y_1``, on the way down towards that
to the sample ``z_0``, both as one writes them for a model of ``noise - data``::

    up    z <- z + h (v + gamma ((y_1 - z) / (1 - t) - v)),     t the left end of the step
    down  z <- z - h (v + eta_i ((z - z_0) / t - v)),           t the right end of the step

with ``eta_i = eta`` in the first ``stop`` share of the steps down and 0 after.

Deviations:

1. The last step up has ``1 - t = h`` and needs no cut-off: ``t`` is the left end of a step and stays below one.

Example::

    key = jax.random.key(0)
    noise = rf_inversion_invert(key, velocity, images, time_grids.uniform(28), null)
    edited = rf_inversion_edit(velocity, noise, images, time_grids.uniform(28), target)
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Key, PyTree

from jaxlab.flow.noising import noise_like
from jaxlab.flow.solvers import move
from jaxlab.flow.time_grids import check_grid
from jaxlab.flow.velocity import Velocity, prepare, time_of

__all__ = ["rf_inversion_edit", "rf_inversion_invert"]


def rf_inversion_invert(
    key: Key[Any, ""],
    velocity: Velocity,
    z0: PyTree,
    grid: Float[Any, " n"],
    condition: PyTree = None,
    *,
    gamma: Any = 0.5,
) -> Any:
    """Carry data to noise, N calls.

    Args:
      key: draws ``y_1``, one for each sample.
      velocity: the model; see `jaxlab.flow.velocity`.
      z0: data ``[B, ...]`` or a tree.
      grid: the time grid from 0 to 1.
      condition: passed to the model; the authors' is the null condition.
      gamma: 0 is Euler inversion, 1 the straight line to ``y_1``; the authors take 0.5.
    """
    check_grid(grid)
    z = prepare(velocity, z0, condition)
    times = time_of(z, jnp.asarray(grid))
    goal = noise_like(key, z)

    def step(z: Any, pair: Any) -> Any:
        t, t_to = pair
        v = velocity(z, t, condition)
        slope = jax.tree.map(lambda v, goal, z: v + gamma * ((goal - z) / (1 - t) - v), v, goal, z)
        return move(z, t_to - t, slope), None

    return jax.lax.scan(step, z, (times[:-1], times[1:]))[0]


def rf_inversion_edit(
    velocity: Velocity,
    z1: PyTree,
    z0: PyTree,
    grid: Float[Any, " n"],
    condition: PyTree = None,
    *,
    eta: Any = 0.9,
    stop: float = 0.25,
) -> Any:
    """Carry noise down, guided by the sample, N calls.

    Args:
      velocity: the model.
      z1: what `rf_inversion_invert` gave.
      z0: the sample.
      grid: the time grid from 0 to 1; the authors take 28 steps.
      condition: the target condition.
      eta: pull towards the sample; 0.9 to 1 for FLUX.
      stop: share of the steps that are pulled; 0.25 for FLUX. A static Python float in [0, 1].

    Raises:
      ValueError: ``stop`` is out of range; as in `jaxlab.flow.sample`.
    """
    steps = check_grid(grid)
    if not 0 <= stop <= 1:
        raise ValueError(f"stop must be in [0, 1], got {stop}")
    z, origin = prepare(velocity, z1, condition), prepare(velocity, z0, condition)
    times = time_of(z, jnp.asarray(grid)[::-1])
    pulled = jnp.arange(steps) < math.floor(stop * steps + 1e-6)

    def step(z: Any, inputs: Any) -> Any:
        t, t_to, pull = inputs
        weight = jnp.where(pull, jnp.asarray(eta, t.dtype), 0)
        v = velocity(z, t, condition)
        slope = jax.tree.map(lambda v, z, origin: v + weight * ((z - origin) / t - v), v, z, origin)
        return move(z, t_to - t, slope), None

    return jax.lax.scan(step, z, (times[:-1], times[1:], pulled))[0]
