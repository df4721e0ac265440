"""Editing by going part of the way to noise and down again under the target condition.

`sdedit` goes up by adding noise (Meng et al. 2022, arXiv 2108.01073), `delayed_injection` by an inversion, so that it
knows where it came from; at a delay rate of one the latter is the direct use of the target condition. Both are what
`jaxlab.flow.uni_edit` is to be measured against.

Example::

    rough = sdedit(jax.random.key(0), velocity, images, time_grids.uniform(15), target, delay_rate=0.6)
    weak = delayed_injection(velocity, images, time_grids.uniform(15), target=target, inversion=null)
"""

from typing import Any

import jax
from jaxtyping import Float, Key, PyTree

from jaxlab.flow.arguments import prepare
from jaxlab.flow.solvers import invert, sample, times_of
from jaxlab.flow.uni_edit import delayed_steps
from jaxlab.flow.uni_inv import uni_invert
from jaxlab.flow.velocity import Velocity

__all__ = ["add_noise", "delayed_injection", "noise_like", "sdedit"]


def sdedit(
    key: Key[Any, ""],
    velocity: Velocity,
    z0: PyTree,
    grid: Float[Any, " n"],
    target: PyTree,
    *,
    delay_rate: float = 0.6,
    method: str = "euler",
) -> Any:
    """Add noise up to ``t_M``, ``z = (1 - t_M) z_0 + t_M noise``, and sample down; M calls by Euler's rule.

    Args:
      key: draws the noise.
      velocity: the model; see `jaxlab.flow.velocity`.
      z0: samples ``[B, ...]`` or a tree.
      grid: the time grid from 0 to 1.
      target: condition on the way down.
      delay_rate: share of the steps to go through; as in `jaxlab.flow.uni_edit`.
      method: rule of the sampler.
    """
    steps = delayed_steps(grid, delay_rate)
    z = prepare(velocity, z0, target)
    z = add_noise(z, noise_like(key, z), times_of(z, grid, steps)[-1])
    return sample(velocity, z, grid, target, steps=steps, method=method)


def delayed_injection(
    velocity: Velocity,
    z0: PyTree,
    grid: Float[Any, " n"],
    *,
    target: PyTree,
    inversion: PyTree,
    delay_rate: float = 0.6,
    uni_inv: bool = True,
) -> Any:
    """Invert up to ``t_M`` and sample down by Euler's rule, 2 M + 1 calls.

    Args:
      velocity: the model.
      z0: samples ``[B, ...]`` or a tree.
      grid: the time grid from 0 to 1.
      target: condition on the way down.
      inversion: condition on the way up.
      delay_rate: share of the steps to go through; 1 injects the target from pure noise on.
      uni_inv: invert by Uni-Inv; otherwise by Euler's rule, one call less.
    """
    steps = delayed_steps(grid, delay_rate)
    if uni_inv:
        z = uni_invert(velocity, z0, grid, inversion, steps=steps).z
    else:
        z = invert(velocity, z0, grid, inversion, steps=steps)
    return sample(velocity, z, grid, target, steps=steps)


def add_noise(z: PyTree, noise: PyTree, t: Any) -> PyTree:
    """``(1 - t) z + t noise``, leaf by leaf."""

    def mix(leaf: Any, noise: Any) -> Any:
        share = t.astype(leaf.dtype)
        return (1 - share) * leaf + share * noise

    return jax.tree.map(mix, z, noise)


def noise_like(key: Key[Any, ""], z: PyTree) -> PyTree:
    """Standard normal noise in the shape of the latents, independent from leaf to leaf."""
    leaves, structure = jax.tree.flatten(z)
    keys = jax.random.split(key, len(leaves))
    drawn = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)
