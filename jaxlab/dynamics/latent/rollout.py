r"""Long surrogate trajectories: any propagator, scanned over steps and batched over replicas.

A propagator maps a state and standard normal numbers to the next state, ``z_{t+1} = step(z_t, xi_t)``. It is a pytree,
so that a compiled rollout serves all propagators of one structure. All random numbers are drawn in blocks outside the
inner loop. A replica that leaves the guarded region or is no longer finite stops: its later states are NaN and its
length says where, so that nothing of it reaches a histogram unseen.

Reference: Sengar et al., arXiv 2509.02196 (autoregressive rollout).

Example::

    propagator = fit_koopman(*snapshot_pairs(z))
    found = rollout(propagator, z[-1:], 10_000, key=jax.random.key(0))
    found.path, found.lengths                                            # [1, 10000, d], [1]
"""

import math
from functools import partial
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key, Real

from jaxlab.dynamics.reduced_rank import check_finite, integer, real_array

__all__ = ["Propagator", "Rollout", "rollout"]

# Random numbers held at once.
_NOISE_BUDGET = 1 << 22


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
    block = min(steps, max(1, _NOISE_BUDGET // (propagator.draws * start.size)))
    path, lengths = _run(
        propagator, start, key, jnp.asarray(guard, start.dtype), steps=steps, block=block, dtype=dtype or start.dtype
    )
    return Rollout(path=path, lengths=lengths)


@partial(jax.jit, static_argnames=("steps", "block", "dtype"))
def _run(
    propagator: Propagator, start: Array, key: Array, guard: Array, *, steps: int, block: int, dtype: Any
) -> tuple[Array, Array]:
    def one(carry: tuple[Array, Array], noise: Array) -> tuple[tuple[Array, Array], Any]:
        z, running = carry
        new = propagator.step(z, noise)
        size = jnp.max(jnp.abs(new), axis=-1)  # NaN compares as false
        running = running & (size <= guard) & (size < jnp.inf)
        new = jnp.where(running[:, None], new, z)
        return (new, running), (jnp.where(running[:, None], new, jnp.nan).astype(dtype), running)

    def some(carry: tuple[Array, Array], i: Array, length: int) -> tuple[tuple[Array, Array], Any]:
        # Drawn flat: XLA on the CPU compiles random bits of arrays with a short last axis ten times slower.
        flat = jax.random.normal(jax.random.fold_in(key, i), (length * propagator.draws * start.size,), start.dtype)
        return lax.scan(one, carry, flat.reshape(length, propagator.draws, *start.shape))

    carry = (start, jnp.ones(len(start), bool))
    whole, rest = divmod(steps, block)
    carry, (path, running) = lax.scan(lambda c, i: some(c, i, block), carry, jnp.arange(whole))
    path, running = (leaf.reshape(whole * block, *leaf.shape[2:]) for leaf in (path, running))
    if rest:
        _, (tail, running_tail) = some(carry, jnp.asarray(whole), rest)
        path, running = jnp.concatenate([path, tail]), jnp.concatenate([running, running_tail])
    return path.swapaxes(0, 1), jnp.sum(running, axis=0)
