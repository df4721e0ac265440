r"""Heavy-tailed random numbers and gradients disturbed by them.

A centred :math:`\alpha`-stable variable has finite moments of order below :math:`\alpha` only (variance for
:math:`\alpha = 2` alone); ``beta`` in [-1, 1] is its skewness. Student's t with ``nu`` degrees of freedom has finite
moments of order below ``nu``.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from jaxlab.optim.mixing import Mixer, local_nodes

__all__ = ["GradientNoiseState", "add_gradient_noise", "alpha_stable", "hill_estimator"]

Sampler = Callable[[Key[Array, ""], tuple[int, ...]], Float[Array, "..."]]


class GradientNoiseState(NamedTuple):
    """State of :func:`add_gradient_noise`: the key it started with and the steps so far."""

    key: Key[Array, ""]
    count: Int[Array, ""]


def alpha_stable(
    key: Key[Array, ""], shape: tuple[int, ...] = (), *, alpha: float, beta: float = 0.0, scale: float = 1.0
) -> Float[Array, "*shape"]:
    r"""Draw from the stable law :math:`S_\alpha(\text{scale}, \beta, 0)` in Nolan's S1 parametrisation.

    By the method of Chambers, Mallows and Stuck (1976) as corrected by Weron (1996). With ``alpha`` = 2 it is the
    normal law of variance ``2 scale**2``; with ``alpha`` = 1 and ``beta`` = 0 the Cauchy law; for ``alpha`` > 1 the
    mean is 0.

    Args:
      key: random key.
      shape: shape of the draws.
      alpha: stability in (0, 2].
      beta: skewness in [-1, 1].
      scale: positive.

    Raises:
      ValueError: for a value outside these ranges.
    """
    if not 0.0 < alpha <= 2.0:
        raise ValueError(f"alpha must be in (0, 2], got {alpha}")
    if not -1.0 <= beta <= 1.0:
        raise ValueError(f"beta must be in [-1, 1], got {beta}")
    if not scale > 0.0:
        raise ValueError(f"scale must be positive, got {scale}")
    angle_key, radius_key = jax.random.split(key)
    # Open at both ends: the tangent at pi/2 is infinite.
    angle = jax.random.uniform(angle_key, shape, minval=-jnp.pi / 2 * (1 - 1e-6), maxval=jnp.pi / 2 * (1 - 1e-6))
    radius = jax.random.exponential(radius_key, shape)
    if alpha == 1.0:
        tilted = jnp.pi / 2 + beta * angle
        skewed = beta * jnp.log(jnp.pi / 2 * radius * jnp.cos(angle) / tilted)
        # Under S1 a scaled variable with alpha = 1 is also shifted.
        shift = 2 / jnp.pi * beta * scale * jnp.log(scale)
        return scale * 2 / jnp.pi * (tilted * jnp.tan(angle) - skewed) + shift
    skew = beta * jnp.tan(jnp.pi * alpha / 2)
    offset = jnp.arctan(skew) / alpha
    shifted = alpha * (angle + offset)
    tail = (jnp.cos(angle - shifted) / radius) ** ((1 - alpha) / alpha)
    return scale * (1 + skew**2) ** (0.5 / alpha) * jnp.sin(shifted) / jnp.cos(angle) ** (1 / alpha) * tail


def add_gradient_noise(key: Key[Array, ""], sampler: Sampler, mixer: Mixer) -> optax.GradientTransformation:
    """Add ``sampler(key, shape)`` to every node's gradient, independently for each node, leaf and step.

    First link of a chain, for experiments on noise. A node draws the same numbers on the stacked and on the sharded
    backend, because its key is folded from its index in the network (``mixer`` says which nodes are local).
    """

    def init(params: optax.Params) -> GradientNoiseState:
        del params
        return GradientNoiseState(key, jnp.zeros([], jnp.int32))

    def update(updates, state, params=None):
        del params
        leaves, structure = jax.tree.flatten(updates)
        step_key = jax.random.fold_in(state.key, state.count)
        nodes = local_nodes(leaves[0].shape[0], mixer.axis_name)

        def draw(node: Int[Array, ""]) -> list[Array]:
            keys = jax.random.split(jax.random.fold_in(step_key, node), len(leaves))
            return [sampler(k, leaf.shape[1:]) for k, leaf in zip(keys, leaves, strict=True)]

        noisy = [leaf + noise.astype(leaf.dtype) for leaf, noise in zip(leaves, jax.vmap(draw)(nodes), strict=True)]
        return jax.tree.unflatten(structure, noisy), GradientNoiseState(state.key, optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def hill_estimator(samples: Float[Array, " m"], *, top: int) -> Float[Array, ""]:
    r"""Hill's estimate of the tail index from the ``top`` largest of positive samples.

    :math:`1 / \hat\alpha = \frac1k \sum_{i=1}^{k} \log (x_{(i)} / x_{(k+1)})` with ``k = top``. Below 2, the variance
    looks infinite.

    Raises:
      ValueError: unless ``1 <= top < m``.
    """
    if not 1 <= top < samples.shape[0]:
        raise ValueError(f"top must be between 1 and {samples.shape[0] - 1} for {samples.shape[0]} samples, got {top}")
    largest = jnp.log(jax.lax.top_k(samples, top + 1)[0])
    return 1.0 / (largest[:-1] - largest[-1]).mean()
