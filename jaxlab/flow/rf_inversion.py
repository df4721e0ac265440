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

from jaxlab.flow.arguments import check_like, check_weight, per_sample, prepare
from jaxlab.flow.noising import noise_like
from jaxlab.flow.solvers import move, times_of
from jaxlab.flow.time_grids import check_grid
from jaxlab.flow.velocity import Velocity

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
      gamma: 0 is Euler inversion, 1 the straight line to ``y_1``; the authors take 0.5. A number in [0, 1], or one a
        sample; may be traced, and is then NaN outside.

    Raises:
      ValueError: ``gamma`` is out of range; as in `jaxlab.flow.invert`.
    """
    steps = check_grid(grid)
    weight = check_weight("gamma", gamma, z0, high=1.0)
    z = prepare(velocity, z0, condition)
    times = times_of(z, grid, steps)
    goal = noise_like(key, z)

    def step(z: Any, pair: Any) -> Any:
        t, t_to = pair

        def pulled(v: Any, goal: Any, z: Any) -> Any:
            return v + per_sample(weight, z) * ((goal - z) / (1 - t).astype(z.dtype) - v)

        return move(z, t_to - t, jax.tree.map(pulled, velocity(z, t, condition), goal, z)), None

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
      eta: pull towards the sample; 0.9 to 1 for FLUX. A number in [0, 1], or one a sample; may be traced, and is then
        NaN outside.
      stop: share of the steps that are pulled; 0.25 for FLUX. A static Python float in [0, 1].

    Raises:
      ValueError: ``eta`` or ``stop`` is out of range, ``z0`` is not like ``z1``; as in `jaxlab.flow.sample`.
      TypeError: ``stop`` is traced.
    """
    steps = check_grid(grid)
    if isinstance(stop, jax.core.Tracer):
        raise TypeError("stop must be a static Python float, for it sets the number of steps; it is traced")
    if not 0 <= stop <= 1:
        raise ValueError(f"stop must be in [0, 1], got {stop}")
    weight = check_weight("eta", eta, z1, high=1.0)
    z, origin = prepare(velocity, z1, condition), prepare(velocity, z0)
    check_like("z0", origin, z)
    times = times_of(z, grid, steps)[::-1]
    pulled = jnp.arange(steps) < math.floor(stop * steps + 1e-6)

    def step(z: Any, inputs: Any) -> Any:
        t, t_to, pull = inputs

        def guided(v: Any, z: Any, origin: Any) -> Any:
            return v + per_sample(jnp.where(pull, weight, 0), z) * ((z - origin) / t.astype(z.dtype) - v)

        return move(z, t_to - t, jax.tree.map(guided, velocity(z, t, condition), z, origin)), None

    return jax.lax.scan(step, z, (times[:-1], times[1:], pulled))[0]
