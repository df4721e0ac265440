"""Pairs of latents a fixed number of frames apart, and what every fit checks of them.

A trajectory ``z_0, z_1, ...`` gives the pairs ``(z_t, z_{t+s})`` for all t; several trajectories are cut apart, so that
no pair crosses from one into the next. One step of a propagator that is fitted on them is s frames.

Example:
  >>> x, y = snapshot_pairs(jnp.arange(4.0)[:, None], skip=2)
  >>> x[:, 0], y[:, 0]
  (Array([0., 1.], dtype=float32), Array([2., 3.], dtype=float32))
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from jaxlab.dynamics.reduced_rank import check_finite, integer, is_concrete, real_array

__all__ = ["check_pairs", "snapshot_pairs"]

Trajectories = Real[Array | np.ndarray, "t d"] | Sequence[Real[Array | np.ndarray, "_ d"]]


def snapshot_pairs(
    trajectories: Trajectories, *, skip: int = 1, name: str = "skip"
) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """All pairs of states ``skip`` frames apart.

    Args:
      trajectories: one trajectory ``[time, latent]``, or several of one width.
      skip: frames between the two states, at least 1.
      name: of the skip in messages.

    Returns:
      The earlier and the later states, row by row.

    Raises:
      TypeError: values that are no real numbers, a skip that is no integer.
      ValueError: no trajectory, differing widths, values that are not finite, a skip below 1 or that no trajectory is
        long enough for.
    """
    skip = integer(name, skip)
    several = list(trajectories) if isinstance(trajectories, Sequence) else [trajectories]
    if not several:
        raise ValueError("no trajectory was given")
    arrays = [real_array("a trajectory", one, "[time, latent]", batch=False) for one in several]
    widths = sorted({one.shape[1] for one in arrays})
    if len(widths) > 1:
        raise ValueError(f"trajectories must have one latent width, got {widths}")
    longest = max(map(len, arrays))
    if not 1 <= skip < longest:
        raise ValueError(
            f"{name} must be in [1, {longest - 1}] for trajectories of at most {longest} frames, got {skip}"
            if longest > 1
            else f"a pair needs a trajectory of at least 2 frames, the longest has {longest}"
        )
    for one in arrays:
        check_finite("a trajectory", one)
    before = [one[: max(len(one) - skip, 0)] for one in map(_host, arrays)]
    after = [one[skip:] for one in map(_host, arrays)]
    if is_concrete(arrays):
        return jnp.asarray(np.concatenate(before)), jnp.asarray(np.concatenate(after))
    return jnp.concatenate(before), jnp.concatenate(after)


def check_pairs(x: Array | np.ndarray, y: Array | np.ndarray) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """The pairs as arrays of at least float32.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: no pair, differing shapes, values that are not finite.
    """
    x, y = (real_array(name, values, "[pair, latent]", batch=False) for name, values in (("x", x), ("y", y)))
    if x.shape != y.shape or len(x) == 0:
        raise ValueError(f"x and y must hold the same number of snapshots and features, got {x.shape} and {y.shape}")
    check_finite("x", x)
    check_finite("y", y)
    return x, y


def _host(values: Array) -> Array | np.ndarray:
    """Values where there are any: slices of every length would each be compiled."""
    return np.asarray(values) if is_concrete(values) else values
