"""One-step rules that carry latents along a velocity field, from data to noise and back.

A rule is a slope: it moves ``z`` by ``(t_to - t_from) S``, ``t_to`` on either side of ``t_from``::

    euler         S = v(z, t_from)
    time_shifted  S = v(z, t_to)
    heun          S = (v(z, t_from) + v(z + (t_to - t_from) v(z, t_from), t_to)) / 2
    rf_solver     S = v(z + d v(z, t_from), t_from + d),  d = (t_to - t_from) / 2

and FireFlow takes the slope of ``rf_solver`` with the last slope p in place of ``v(z, t_from)``, one call a step::

    fireflow      p = v(z + d p, t_from + d)

``time_shifted`` is an ablation for inversion: walking down with it is not a sampler anyone trains for.

References: RF-Solver (Wang et al. 2024, arXiv 2411.04746), FireFlow (Deng et al. 2024, arXiv 2412.07517), the ablation
from UniEdit-Flow (arXiv 2504.13109).

Deviations:

1. RF-Solver is written as the explicit midpoint rule, which its second-order Taylor step is equal to. The sharing of
   attention features that its editing adds depends on the network and is left out.

Which to take: on a smooth field the round trip of a second-order pair is third order, and FireFlow is the most accurate
per call. `jaxlab.flow.uni_invert` inverts the *Euler sampler* and gets ahead where the field is stiff (a thin data
manifold, few steps, inputs off the manifold). Its noise is the sampler's, not the ODE's, from which it is away by O(h):
where the noise itself is the product, take a rule of second order.

Example::

    noise = invert(velocity, z0, time_grids.uniform(30), condition, method="heun")
    again = sample(velocity, noise, time_grids.uniform(30), condition, method="heun")
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxlab.flow.arguments import check_count, prepare, time_of
from jaxlab.flow.stages import ahead, with_known
from jaxlab.flow.time_grids import check_grid, points
from jaxlab.flow.velocity import Velocity

__all__ = [
    "SLOPES",
    "Slope",
    "calls",
    "euler_slope",
    "heun_slope",
    "invert",
    "midpoint_slope",
    "sample",
    "time_shifted_slope",
]

Slope = Callable[[Velocity, Any, Any, Any, Any], Any]


def euler_slope(velocity: Velocity, z: PyTree, t_from: Any, t_to: Any, condition: PyTree) -> PyTree:
    """The velocity where the step starts."""
    return velocity(z, t_from, condition)


def time_shifted_slope(velocity: Velocity, z: PyTree, t_from: Any, t_to: Any, condition: PyTree) -> PyTree:
    """The velocity of the place where the step starts at the time where it ends."""
    return velocity(z, t_to, condition)


def heun_slope(velocity: Velocity, z: PyTree, t_from: Any, t_to: Any, condition: PyTree) -> PyTree:
    """Mean of the velocities at both ends of an Euler step (explicit trapezoidal rule)."""
    first = velocity(z, t_from, condition)
    second = velocity(move(z, t_to - t_from, first), t_to, condition)
    return jax.tree.map(lambda a, b: (a + b) / 2, first, second)


def midpoint_slope(velocity: Velocity, z: PyTree, t_from: Any, t_to: Any, condition: PyTree) -> PyTree:
    """The velocity in the middle of an Euler step; RF-Solver's rule."""
    half = (t_to - t_from) / 2
    return velocity(move(z, half, velocity(z, t_from, condition)), t_from + half, condition)


SLOPES: Mapping[str, Slope] = {
    "euler": euler_slope,
    "time_shifted": time_shifted_slope,
    "heun": heun_slope,
    "rf_solver": midpoint_slope,
}


def invert(
    velocity: Velocity,
    z0: PyTree,
    grid: Float[Any, " n"],
    condition: PyTree = None,
    *,
    method: str = "euler",
    steps: int | None = None,
    return_trajectory: bool = False,
) -> Any:
    """Carry data towards noise.

    Args:
      velocity: the model; see `jaxlab.flow.velocity`.
      z0: data ``[B, ...]`` or a tree; computed and returned in float32 at least.
      grid: the time grid ``[N + 1]``, from 0 to 1.
      condition: passed to the model.
      method: "euler", "time_shifted", "heun", "rf_solver" or "fireflow"; see the module.
      steps: stop after this many of the N steps; all by default.
      return_trajectory: give ``(latents, trajectory)`` instead, the latter ``[steps, ...]`` after every step.

    Returns:
      Latents at ``grid[steps]``.

    Raises:
      ValueError: bad grid, method or number of steps, or a model whose output is not like the latents.
      TypeError: ``z0`` is not floating point.
    """
    count = check_grid(grid, steps=steps)
    return _walk(velocity, z0, grid, count, 1, condition, method, return_trajectory)


def sample(
    velocity: Velocity,
    z: PyTree,
    grid: Float[Any, " n"],
    condition: PyTree = None,
    *,
    method: str = "euler",
    steps: int | None = None,
    return_trajectory: bool = False,
) -> Any:
    """Carry latents at ``grid[steps]``, by default noise, down to data. Arguments and errors are those of `invert`."""
    count = check_grid(grid, steps=steps)
    return _walk(velocity, z, grid, count, -1, condition, method, return_trajectory)


def calls(method: str, steps: int) -> int:
    """How often a rule calls the model on the way in one direction."""
    _check_method(method)
    steps = check_count("steps", steps, low=0)
    return {"heun": 2 * steps, "rf_solver": 2 * steps, "fireflow": steps + 1}.get(method, steps)


def move(z: PyTree, step: Any, slope: PyTree) -> PyTree:
    """``z + step * slope``, leaf by leaf."""
    return jax.tree.map(lambda a, b: a + jnp.asarray(step, a.dtype) * b, z, slope)


def times_of(z: PyTree, grid: Any, steps: int) -> Array:
    """The points of a grid next to the data, in the dtype of the latents; see `jaxlab.flow.time_grids.points`."""
    return points(grid, steps, time_of(z, 0).dtype)


def _walk(
    velocity: Velocity,
    z: PyTree,
    grid: Any,
    count: int,
    direction: int,
    condition: PyTree,
    method: str,
    return_trajectory: bool,
) -> Any:
    _check_method(method)
    z = prepare(velocity, z, condition)
    times = times_of(z, grid, count)[::direction]
    pairs = (times[:-1], times[1:])

    def record(z: Any) -> Any:
        return z if return_trajectory else None

    if method == "fireflow":

        def reuse(carry: Any, pair: Any) -> Any:
            z, slope = carry
            half = (pair[1] - pair[0]) / 2
            slope = velocity(move(z, half, slope), pair[0] + half, condition)
            z = move(z, pair[1] - pair[0], slope)
            return (z, slope), record(z)

        (z, _), trajectory = jax.lax.scan(reuse, (z, velocity(z, times[0], condition)), pairs)
    else:
        slope_of = SLOPES[method]
        known = ahead(velocity, z, times[:-1], condition) if method == "euler" else None

        def step(z: Any, inputs: Any) -> Any:
            t_from, t_to, known = inputs
            z = move(z, t_to - t_from, slope_of(with_known(velocity, known), z, t_from, t_to, condition))
            return z, record(z)

        z, trajectory = jax.lax.scan(step, z, (*pairs, known))
    return (z, trajectory) if return_trajectory else z


def _check_method(method: str) -> None:
    if not isinstance(method, str) or (method != "fireflow" and method not in SLOPES):
        raise ValueError(f"method must be one of {', '.join([*SLOPES, 'fireflow'])}, got {method!r}")
