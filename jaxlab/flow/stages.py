"""Velocities in two stages: what a model computes of time and condition alone, and the rest.

Networks of diffusion embed the time and the condition, and make of both the shifts, scales and gates of every block
(adaLN). None of that looks at the latents, and a time grid is known before the first step. A velocity of two stages::

    known = prepare(params, t, condition)      t is [B]
    v = apply(params, z, known)

lets `jaxlab.flow.uni_invert`, `jaxlab.flow.uni_edit` and Euler's rule prepare all times in one call ahead of their
loop. The weights of the first stage, a third of a diffusion transformer's, are then read once instead of at every step,
which is what the edit of a single image waits for. What is prepared takes memory for every time, so that with many or
large samples it is prepared step by step as in any other model; the result is the same up to rounding.

Example::

    velocity = staged(lambda w, t, c: jnp.tanh(t[:, None] * w + c), lambda w, z, known: w * z + known, weights)
    noise = uni_invert(velocity, images, time_grids.uniform(15), condition).z
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import PyTree

from jaxlab.flow.arguments import leading_size, time_of

__all__ = ["Static", "ahead", "staged", "with_known"]

# Half of a core's cache of the second level: tables beyond it cost more than they save. An edit by a network of 128
# units took 0.85 times as long with a table of 0.3 MiB, 0.92 with 0.6 and 1.05 with 5.
_MOST_BYTES = 2**20


@jax.tree_util.register_static
class Static:
    """A hashable value that is part of the program rather than of its data: a tree without leaves."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def staged(
    prepare: Callable[[Any, Any, Any], PyTree], apply: Callable[[Any, Any, PyTree], Any], params: PyTree = None
) -> Partial:
    """A velocity of two stages.

    Args:
      prepare: ``prepare(params, t, condition)``, of times ``[B]``; any tree. It is mapped over times by ``jax.vmap``.
      apply: ``apply(params, z, known)``, the velocity at latents z.
      params: the weights of both, a tree, which stay data under ``jax.jit``.

    Raises:
      TypeError: a stage is no function.
    """
    for name, stage in (("prepare", prepare), ("apply", apply)):
        if not callable(stage):
            raise TypeError(f"{name} must be a function, got {type(stage).__name__}")
    return Partial(_staged, Static(prepare), Static(apply), params)


def ahead(velocity: Any, z: PyTree, times: Any, condition: PyTree) -> PyTree:
    """What a velocity knows of times ``[n]`` before it sees latents, leaves ``[n, ...]``.

    None where the velocity is of one stage, or what it knows is too large to be kept.
    """
    if not (isinstance(velocity, Partial) and velocity.func is _staged):
        return None
    prepare, _, params = velocity.args
    batch = leading_size(z)

    def at(time: Any) -> Any:
        return prepare.value(params, jnp.broadcast_to(time, (batch,)), condition)

    leaves = jax.tree.leaves(jax.eval_shape(jax.vmap(at), times))
    if sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) > _MOST_BYTES:
        return None
    return jax.vmap(at)(times)


def with_known(velocity: Any, known: PyTree) -> Any:
    """The velocity at the time and condition of which this is known; with None the velocity itself."""
    if known is None:
        return velocity
    _, apply, params = velocity.args
    return lambda z, t, condition: apply.value(params, z, known)


def _staged(prepare: Static, apply: Static, params: Any, z: Any, t: Any, condition: Any) -> Any:
    times = jnp.broadcast_to(time_of(z, t), (leading_size(z),))
    return apply.value(params, z, prepare.value(params, times, condition))
