"""Uni-Inv: the noise that a deterministic sampler maps back to a given sample.

One Euler step of a sampler goes ``z_{i-1} = z_i - h_i v(z_i, t_i)``. Its exact inverse is implicit in ``z_i``; Uni-Inv
solves it by one fixed-point iteration, warm-started by the velocity of the step before (Jiao et al. 2025, arXiv
2504.13109, algorithm 1)::

    v = velocity(z_0, t_0)                     # or 0 with zero_init, one call less
    for i = 1 ... M:
        v = velocity(z_{i-1} + h_i v, t_i)     # the velocity where the sampler will come from
        z_i = z_{i-1} + h_i v

It takes M + 1 calls. The local error of the round trip is O(h^3) (proposition 4.1 there).

The same for any one-step rule S of `jaxlab.flow.solvers`: the second line becomes ``S(z_{i-1} + h_i v, t_i, t_{i-1})``,
and any number K of iterations a step: K M + 1 slopes. The round trip is then of global order K + 1 for Euler
(measured), and in the limit it is exact where h times the Lipschitz constant stays below one.

Deviations:

1. K above one, and slopes other than Euler's (the paper has a table of "Ours (Heun)" and no algorithm): the warm start
   is the slope of the first step upwards, ``S(z_0, t_0, t_1)``, which for Euler is the paper's.

The latents are only valid with the same grid, the same rule and the same condition on the way down, and guidance above
one spoils them.

Example::

    result = uni_invert(velocity, images, time_grids.uniform(30), null)
    again = sample(velocity, result.z, time_grids.uniform(30), null)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, PyTree

from jaxlab.flow.arguments import check_count, prepare
from jaxlab.flow.solvers import Slope, euler_slope, move, times_of
from jaxlab.flow.stages import ahead, with_known
from jaxlab.flow.time_grids import check_grid
from jaxlab.flow.velocity import Velocity

__all__ = ["Inversion", "uni_invert"]


class Inversion(NamedTuple):
    """What `uni_invert` found.

    Attributes:
      z: latents at the last time, float32 or wider.
      last_slope: the slope of the last step.
      trajectory: latents after every step, ``[M, B, ...]``, or None.
    """

    z: Any
    last_slope: Any
    trajectory: Any


def uni_invert(
    velocity: Velocity,
    z0: PyTree,
    grid: Float[Any, " n"],
    condition: PyTree = None,
    *,
    steps: int | None = None,
    corrections: int = 1,
    zero_init: bool = False,
    slope: Slope = euler_slope,
    return_trajectory: bool = False,
) -> Inversion:
    """Invert the sampler that goes down the grid by ``slope``.

    Pure; jit it with ``steps``, ``corrections``, ``zero_init``, ``slope`` and ``return_trajectory`` static.

    Args:
      velocity: the model; see `jaxlab.flow.velocity`.
      z0: data ``[B, ...]`` or a tree of such; half precision is computed and returned in float32.
      grid: the time grid ``[N + 1]`` of the sampler, from 0 to 1.
      condition: passed to the model; the paper inverts under the null condition.
      steps: M, how many of the N steps to go; all by default.
      corrections: K fixed-point iterations a step; 1 is the paper's.
      zero_init: start from slope 0 instead of a call at the data.
      slope: the sampler's rule, one of `jaxlab.flow.solvers`.
      return_trajectory: keep the latents after every step.

    Raises:
      ValueError: bad grid, ``steps`` or ``corrections``; a model whose output is not like the latents.
      TypeError: ``z0`` is not floating point; ``steps`` or ``corrections`` is no static whole number.
    """
    count = check_grid(grid, steps=steps)
    corrections = check_count("corrections", corrections, low=1)
    z = prepare(velocity, z0, condition)
    times = times_of(z, grid, count)
    # Of Euler's rule alone it is known where it looks.
    visited = times[1:] if zero_init else times
    known = ahead(velocity, z, visited, condition) if slope is euler_slope else None
    if zero_init:
        start = jax.tree.map(jnp.zeros_like, z)
    else:
        first, known = jax.tree.map(lambda leaf: leaf[0], known), jax.tree.map(lambda leaf: leaf[1:], known)
        start = slope(with_known(velocity, first), z, times[0], times[1], condition)

    def step(carry: Any, inputs: Any) -> Any:
        z, found = carry
        t_low, t_high, known = inputs
        at = with_known(velocity, known)

        def correct(found: Any, _: Any) -> Any:
            return slope(at, move(z, t_high - t_low, found), t_high, t_low, condition), None

        # A loop of length one would only stand in the way of the compiler.
        found = correct(found, None)[0] if corrections == 1 else jax.lax.scan(correct, found, length=corrections)[0]
        z = move(z, t_high - t_low, found)
        return (z, found), z if return_trajectory else None

    (z, last), trajectory = jax.lax.scan(step, (z, start), (times[:-1], times[1:], known))
    return Inversion(z, last, trajectory)
