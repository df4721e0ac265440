r"""Long surrogate trajectories: any propagator, scanned over steps and batched over replicas.

A propagator maps a state and standard normal numbers to the next state, ``z_{t+1} = step(z_t, xi_t)``. It is a pytree,
so that a compiled rollout serves all propagators of one structure. A replica that leaves the guarded region or is no
longer finite stops: its later states are NaN and its length says where, so that nothing of it reaches a histogram
unseen.

Steps are made in blocks. What does not hang on the state is done for a whole block at once, outside of the inner loop:
random numbers are drawn, multiplied by the factor of an `AdditivePropagator`, and the guard is looked at; a replica
that has stopped is computed to the end of its block and thrown away. The inner loop keeps the mean of a step and a sum.

Reference: Sengar et al., arXiv 2509.02196 (autoregressive rollout).

Example::

    propagator = fit_koopman(*snapshot_pairs(z))
    found = rollout(propagator, z[-1:], 10_000, key=jax.random.key(0))
    found.path, found.lengths                                            # [1, 10000, d], [1]
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, Key, Real

from jaxlab.dynamics.reduced_rank import check_finite, integer, real_array

__all__ = ["AdditivePropagator", "Propagator", "Rollout", "rollout"]

# Random numbers held at once: 1 MiB, which stays in the cache between the drawing and the step.
_NOISE_BUDGET = 1 << 18
_UNROLL = 4  # steps in one turn of the loop


@runtime_checkable
class Propagator(Protocol):
    """One step of a stochastic process in latent space; a pytree."""

    @property
    def draws(self) -> int:
        """Standard normal vectors that a step takes; a static number."""
        ...

    def step(self, z: Float[Array, "*batch d"], noise: Float[Array, "draws *batch d"]) -> Float[Array, "*batch d"]:
        """The next state."""
        ...


@runtime_checkable
class AdditivePropagator(Propagator, Protocol):
    """A propagator whose noise is scaled without looking at the state: ``step(z, xi) = advance(z, forcing(xi))``."""

    def forcing(self, noise: Float[Array, "*steps draws batch d"]) -> Float[Array, "*steps draws batch d"]:
        """What is added to the states, for many steps in one product."""
        ...

    def advance(self, z: Float[Array, "*batch d"], forcing: Float[Array, "draws *batch d"]) -> Float[Array, "*batch d"]:
        """The next state."""
        ...


@flax.struct.dataclass
class Rollout:
    """Trajectories of several replicas.

    Attributes:
      path: states after each step; NaN after a replica has stopped.
      lengths: steps before that; the number of steps for a replica that never stopped.
    """

    path: Float[Array, "replicas steps d"]
    lengths: Int[Array, " replicas"]

    def states(self) -> np.ndarray:
        """All states of all replicas that are valid, ``[n, d]``."""
        path = np.asarray(self.path)
        return path[np.arange(path.shape[1]) < np.asarray(self.lengths)[:, None]]


def rollout(
    propagator: Propagator,
    start: Real[Array | np.ndarray, "replicas d"],
    steps: int,
    *,
    key: Key[Array, ""],
    guard: float | int = math.inf,
    dtype: Any = None,
) -> Rollout:
    """Let replicas run for a number of steps.

    Args:
      propagator: what makes a step.
      start: initial states, not part of the path.
      steps: at least 1.
      key: of all random numbers; the first replica's path depends on the number of replicas.
      guard: a replica stops where the absolute value of a latent exceeds this, or is not finite.
      dtype: of the path, for instance ``jnp.bfloat16``; ``None`` is that of the states. Computations are in the latter.

    Raises:
      TypeError: values that are no real numbers, steps that are no integer.
      ValueError: no replica, no step, a start that is not finite, a guard that is not positive.
    """
    start = real_array("start", start, "[replica, latent]", batch=False)
    steps = integer("steps", steps)
    if steps < 1 or len(start) < 1:
        raise ValueError(f"a rollout needs at least one replica and one step, got {len(start)} and {steps}")
    if not guard > 0:
        raise ValueError(f"guard must be positive, got {guard}")
    check_finite("start", start)
    _check_width(propagator, start)
    # Blocks of one length, so that one compiled body serves all; what is too much of the last is cut off.
    blocks = -(-steps * propagator.draws * start.size // _NOISE_BUDGET)
    block = -(-steps // min(blocks, steps))
    path, lengths = _run(
        propagator, start, key, jnp.asarray(guard, start.dtype), steps=steps, block=block, dtype=dtype or start.dtype
    )
    return Rollout(path=path, lengths=lengths)


def _check_width(propagator: Propagator, start: Array) -> None:
    noise = jax.ShapeDtypeStruct((propagator.draws, *start.shape), start.dtype)
    try:
        found = jax.eval_shape(propagator.step, start, noise).shape
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"the propagator does not take states of {start.shape[1]} latents: {reason}") from error
    if found != start.shape:
        raise ValueError(f"the propagator must keep the shape of states {start.shape}, it gives {found}")


@partial(jax.jit, static_argnames=("steps", "block", "dtype"))
def _run(
    propagator: Propagator, start: Array, key: Array, guard: Array, *, steps: int, block: int, dtype: Any
) -> tuple[Array, Array]:
    def one(z: Array, forcing: Array) -> tuple[Array, Array]:
        new = advance(z, forcing)
        return new, new

    def some(carry: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        z, lengths = carry
        # Drawn flat: XLA on the CPU compiles random bits of arrays with a short last axis ten times slower.
        flat = _normal(jax.random.fold_in(key, i), block * propagator.draws * start.size, start.dtype)
        z, path = lax.scan(one, z, forcing(flat.reshape(block, propagator.draws, *start.shape)), unroll=_UNROLL)
        size = jnp.max(jnp.abs(path), axis=-1)
        within = (size <= guard) & (size < jnp.inf)  # NaN compares as false
        more = jnp.where(lengths == i * block, jnp.where(within.all(0), block, jnp.argmin(within, axis=0)), 0)
        lengths = lengths + more
        valid = jnp.arange(block)[:, None] < more
        # A replica that has stopped goes on from its start, so that no later block computes with what is not finite.
        z = jnp.where((lengths == (i + 1) * block)[:, None], z, start)
        return (z, lengths), jnp.where(valid[..., None], path, jnp.nan).astype(dtype)

    advance: Callable[..., Array] = propagator.step
    forcing: Callable[[Array], Array] = jnp.asarray
    if isinstance(propagator, AdditivePropagator):
        forcing, advance = propagator.forcing, propagator.advance
    blocks = -(-steps // block)
    carry = (start, jnp.zeros(len(start), jnp.int32))
    (_, lengths), path = lax.scan(some, carry, jnp.arange(blocks))
    return path.reshape(blocks * block, *start.shape)[:steps].swapaxes(0, 1), jnp.minimum(lengths, steps)


def _normal(key: Array, count: int, dtype: Any) -> Float[Array, " count"]:
    """Standard normal numbers, as `jax.random.normal` makes them of other bits.

    `jax.random.bits` runs the cipher once a number, so that a sharded array may be drawn in parts, and keeps half of
    its output; here both halves are kept, which is three times faster on a CPU and half of a linear rollout.
    """
    if dtype != jnp.float32:
        return jax.random.normal(key, (count,), dtype)
    words = threefry_2x32(jax.random.bits(key, (2,), jnp.uint32), lax.iota(jnp.uint32, count))
    # 23 bits as the mantissa of a number in [1, 2).
    unit = lax.bitcast_convert_type((words >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1
    low = np.nextafter(np.float32(-1), np.float32(0))
    return np.float32(math.sqrt(2)) * lax.erf_inv(jnp.maximum(low, (1 - low) * unit + low))
