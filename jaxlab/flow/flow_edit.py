"""FlowEdit: editing without inversion (Kulikov et al. 2024, arXiv 2412.08629).

The edit is the ODE of the difference of two velocities, at noisy versions of the sample and of the edit with the same
fresh noise. From the step ``n_max`` down::

    z_source = (1 - t_i) z_0 + t_i noise,   z_target = edit + z_source - z_0
    edit <- edit + (t_{i-1} - t_i) mean over draws of (v(z_target, target) - v(z_source, source))

The last ``n_min`` steps are ordinary sampling under the target condition from ``edit + z_source - z_0``. It takes
``2 (n_max - n_min) n_avg + n_min`` calls. The authors' settings: 50 steps, n_max 33, guidance 3.5 and 13.5 for Stable
Diffusion 3; 28 steps, n_max 24, guidance 1.5 and 5.5 for FLUX (wrap the model in `jaxlab.flow.guided`).

Example::

    edited = flow_edit(jax.random.key(0), velocity, images, time_grids.uniform(28), source=cat, target=dog, n_max=24)
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Key, PyTree

from jaxlab.flow.arguments import check_conditions, check_count, prepare
from jaxlab.flow.noising import add_noise, noise_like
from jaxlab.flow.solvers import move, sample, times_of
from jaxlab.flow.time_grids import check_grid
from jaxlab.flow.velocity import Velocity, halves, joined

__all__ = ["flow_edit"]


def flow_edit(
    key: Key[Any, ""],
    velocity: Velocity,
    z0: PyTree,
    grid: Float[Any, " n"],
    *,
    source: PyTree,
    target: PyTree,
    n_max: int,
    n_min: int = 0,
    n_avg: int = 1,
    target_velocity: Velocity | None = None,
    batched: bool = True,
) -> Any:
    """Edit samples.

    Args:
      key: draws the noise of every step.
      velocity: the model; see `jaxlab.flow.velocity`.
      z0: samples ``[B, ...]`` or a tree.
      grid: the time grid from 0 to 1.
      source: condition that the samples meet; leaves with leading size B.
      target: condition that they shall meet, of the same structure.
      n_max: steps next to the data to go through.
      n_min: the last steps, sampled in the ordinary way.
      n_avg: draws of noise a step.
      target_velocity: another model under the target condition, such as one of stronger guidance; takes two calls.
      batched: evaluate both conditions in one call of size 2B where there is one model.

    Raises:
      ValueError: sizes out of range; conditions that differ in structure or lack the leading size; a model whose output
        is not like the latents.
      TypeError: a size that is no static whole number; samples that are not floating point.
    """
    n_max = check_count("n_max", n_max, low=1, high=check_grid(grid), of=" on this time grid")
    n_min = check_count("n_min", n_min, low=0, high=n_max - 1, of=" below n_max")
    n_avg = check_count("n_avg", n_avg, low=1)
    together = target_velocity is None and batched
    check_conditions(z0, batched=together, source=source, target=target)
    origin = prepare(velocity, z0, source)
    prepare(target_velocity or velocity, z0, target)
    times = times_of(origin, grid, n_max)[::-1]
    keys = jax.random.split(key, (n_max - n_min, n_avg))
    last_key = jax.random.fold_in(key, n_max)

    def noisy(key: Any, t: Any) -> Any:
        return add_noise(origin, noise_like(key, origin), t)

    def shifted(edit: Any, z_source: Any) -> Any:
        return jax.tree.map(lambda edit, z, origin: edit + z - origin, edit, z_source, origin)

    def difference(edit: Any, t: Any, key: Any) -> Any:
        z_source = noisy(key, t)
        z_target = shifted(edit, z_source)
        if together:
            of_source, of_target = halves(velocity(joined(z_source, z_target), t, joined(source, target)))
        else:
            of_source = velocity(z_source, t, source)
            of_target = (target_velocity or velocity)(z_target, t, target)
        return jax.tree.map(jnp.subtract, of_target, of_source)

    def step(edit: Any, inputs: Any) -> Any:
        t_from, t_to, keys = inputs

        def draw(total: Any, key: Any) -> Any:
            return jax.tree.map(jnp.add, total, difference(edit, t_from, key)), None

        total, _ = jax.lax.scan(draw, jax.tree.map(jnp.zeros_like, edit), keys)
        return move(edit, (t_to - t_from) / n_avg, total), None

    count = n_max - n_min
    edit, _ = jax.lax.scan(step, origin, (times[:-1][:count], times[1:][:count], keys))
    if n_min == 0:
        return edit
    z = shifted(edit, noisy(last_key, times[count]))
    return sample(target_velocity or velocity, z, grid, target, steps=n_min)
