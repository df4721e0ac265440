r"""Convergence rate and node speed-up on heterogeneous smooth losses under stable noise.

:math:`f_i(x) = \sum_j \sqrt{1 + (x_j - a_{ij})^2}` with normal centres ``a``: smooth, heterogeneous, and with gradients
that do not vanish far away. The noise of every gradient coordinate is stable with index 1.5, so that moments below 1.5
are finite. The measure is the paper's, the average over nodes and steps of :math:`\lVert \nabla f(x_i[t]) \rVert`, with
``f`` the average loss.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from jaxlab.optim import DenseMixer, gt_nsgdm, gt_nsgdm_hyperparameters, noise, topology

__all__ = ["TAIL_INDEX", "THEORY_SLOPES", "log_slope", "norm_by_horizon", "norm_by_nodes"]

TAIL_INDEX = 1.5

# Exponents of the horizon in the paper's bound: -(p - 1) / (3p - 2) with p known, -(p - 1) / (2p) without.
THEORY_SLOPES = {
    "known": -(TAIL_INDEX - 1) / (3 * TAIL_INDEX - 2),
    "unknown": -(TAIL_INDEX - 1) / (2 * TAIL_INDEX),
}

_DIMENSION = 10
_BLOCK = 64  # steps whose noise is drawn at once
_STEP_FACTOR = 2.0  # times the step size of gt_nsgdm_hyperparameters, for every horizon and number of nodes


def norm_by_horizon(
    key: Key[Array, ""], horizons: Sequence[int], *, knows_tail: bool, trials: int
) -> Float[np.ndarray, "horizons trials"]:
    """Average gradient norm over runs of each horizon, step size and momentum set for it; ring of 8 nodes."""
    centre_key, noise_key = jax.random.split(key)
    centres = 3.0 * jax.random.normal(centre_key, (8, _DIMENSION))
    matrix = jnp.asarray(topology.ring(8), jnp.float32)
    norms = [_norms(noise_key, centres, matrix, steps, knows_tail=knows_tail, trials=trials)[0] for steps in horizons]
    return np.stack(norms)


def norm_by_nodes(
    key: Key[Array, ""], nodes: Sequence[int], *, steps: int, trials: int
) -> Float[np.ndarray, "networks trials"]:
    """Gradient norm over the last tenth of the run on complete graphs of growing size."""
    centre_key, noise_key = jax.random.split(key)
    norms = []
    for n in nodes:
        centres = jax.random.normal(centre_key, (n, _DIMENSION))
        matrix = jnp.asarray(topology.complete(n), jnp.float32)
        norms.append(_norms(noise_key, centres, matrix, steps, knows_tail=True, trials=trials)[1])
    return np.stack(norms)


def log_slope(x: Sequence[int], y: Float[np.ndarray, " m"]) -> float:
    """Slope of the least-squares line through the points on logarithmic axes."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _norms(
    key: Key[Array, ""], centres: Array, matrix: Array, steps: int, *, knows_tail: bool, trials: int
) -> tuple[np.ndarray, np.ndarray]:
    if steps % _BLOCK:
        raise ValueError(f"a horizon must be a multiple of {_BLOCK} steps, got {steps}")
    rate, beta = gt_nsgdm_hyperparameters(steps, tail_index=TAIL_INDEX if knows_tail else None)
    norms = _simulate(jax.random.split(key, trials), centres, matrix, steps // _BLOCK, _STEP_FACTOR * rate, beta)
    return np.asarray(norms[0]), np.asarray(norms[1])


@jax.jit
def _simulate(
    keys: Key[Array, " trials"],
    centres: Float[Array, "n d"],
    matrix: Float[Array, "n n"],
    blocks: Int[Array, ""] | int,
    learning_rate: Float[Array, ""] | float,
    beta: Float[Array, ""] | float,
) -> tuple[Float[Array, " trials"], Float[Array, " trials"]]:
    """Gradient norm averaged over all blocks and over the last tenth of them.

    The number of blocks is an argument, not a shape: one compiled program serves every horizon.
    """
    optimizer = gt_nsgdm(learning_rate, DenseMixer(matrix), beta)
    draw = functools.partial(noise.alpha_stable, alpha=TAIL_INDEX, beta=0.5)

    def slope_of_root(offset: Array) -> Array:
        return offset / jnp.sqrt(1.0 + offset**2)

    def step(carry: Any, gradient_noise: Float[Array, "n d"]):
        params, state = carry
        average_gradient = slope_of_root(params[:, None] - centres).mean(1)
        updates, state = optimizer.update(slope_of_root(params - centres) + gradient_noise, state, params)
        return (optax.apply_updates(params, updates), state), jnp.linalg.norm(average_gradient, axis=1).mean()

    def one_trial(key: Key[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
        def block(index: Int[Array, ""], carry: Any):
            network, total, tail = carry
            network, norms = jax.lax.scan(step, network, draw(jax.random.fold_in(key, index), (_BLOCK, *centres.shape)))
            return network, total + norms.mean(), tail + jnp.where(index >= first_of_tail, norms.mean(), 0.0)

        first_of_tail = blocks - jnp.maximum(1, blocks // 10)
        start = jnp.zeros_like(centres)
        network = (start, optimizer.init(start))
        _, total, tail = jax.lax.fori_loop(0, blocks, block, (network, jnp.zeros(()), jnp.zeros(())))
        return total / blocks, tail / (blocks - first_of_tail)

    return jax.vmap(one_trial)(keys)
