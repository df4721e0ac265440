r"""What a campaign came to: return, violation at every round, regret, and bands over seeds.

All take rewards and costs with rounds along the last axis, so that they work on the traces of `jax.vmap` as they are::

    violation(trace.reward, trace.cost, roi=1.8)  # V(t) = roi * cost so far - reward so far
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlab.bidding.l2fob import Scalar

__all__ = ["Band", "anytime_violation", "confidence_band", "regret", "return_on_investment", "stop_round", "violation"]

_SMALLEST = 1e-12


def return_on_investment(reward: Float[Array, "*b t"], cost: Float[Array, "*b t"]) -> Float[Array, "*b t"]:
    """Reward so far over cost so far, at every round; very large, not infinite, before anything is spent."""
    return jnp.cumsum(reward, axis=-1) / jnp.maximum(jnp.cumsum(cost, axis=-1), _SMALLEST)


def violation(reward: Float[Array, "*b t"], cost: Float[Array, "*b t"], *, roi: Scalar) -> Float[Array, "*b t"]:
    r"""How far the target is missed, :math:`V(t) = \gamma C_t - R_t`, at every round; negative where it is met."""
    return jnp.cumsum(roi * cost - reward, axis=-1)


def anytime_violation(reward: Float[Array, "*b t"], cost: Float[Array, "*b t"], *, roi: Scalar) -> Float[Array, "*b"]:
    """The largest violation at any round, at least 0."""
    return jnp.maximum(jnp.max(violation(reward, cost, roi=roi), axis=-1), 0)


def regret(reward: Float[Array, "*b t"], *, optimum: Scalar) -> Float[Array, "*b t"]:
    """How far the reward so far is below ``optimum`` a round (`jaxlab.bidding.Optimum.reward`), at every round."""
    rounds = jnp.arange(1, reward.shape[-1] + 1)
    return optimum * rounds - jnp.cumsum(reward, axis=-1)


def stop_round(alive: Bool[Array, "*b t"]) -> Int[Array, "*b"]:
    """How many rounds the campaign bid in."""
    return jnp.sum(alive, axis=-1)


class Band(NamedTuple):
    """Mean over seeds and the half-width of its 95 % band."""

    mean: Float[Array, "*b"]
    half_width: Float[Array, "*b"]


def confidence_band(values: Float[Array, "*seeds_b"]) -> Band:
    """Mean over the leading axis and 1.96 standard errors, as the paper's bands; 0 for a single seed."""
    seeds = values.shape[0]
    deviation = jnp.std(values, axis=0, ddof=1) if seeds > 1 else jnp.zeros(values.shape[1:])
    return Band(jnp.mean(values, axis=0), 1.96 * deviation / seeds**0.5)
