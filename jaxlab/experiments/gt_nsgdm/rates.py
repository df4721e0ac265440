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
from jaxtyping import Array, Float, Key

from jaxlab.optim import DenseMixer, gt_nsgdm, gt_nsgdm_hyperparameters, noise, topology

__all__ = ["BLOCK", "TAIL_INDEX", "THEORY_SLOPES", "log_slope", "norm_by_horizon", "norm_by_nodes"]

TAIL_INDEX = 1.5
BLOCK = 256  # horizons are multiples of it

# Exponents of the horizon in the paper's bound: -(p - 1) / (3p - 2) with p known, -(p - 1) / (2p) without.
THEORY_SLOPES = {
    "known": -(TAIL_INDEX - 1) / (3 * TAIL_INDEX - 2),
    "unknown": -(TAIL_INDEX - 1) / (2 * TAIL_INDEX),
}

_DIMENSION = 10
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
    """Gradient norm of every trial, averaged over all steps and over the last tenth."""
    hyperparameters = gt_nsgdm_hyperparameters(steps, tail_index=TAIL_INDEX if knows_tail else None)
    rate, beta = _STEP_FACTOR * hyperparameters.learning_rate, hyperparameters.beta
    optimizer = gt_nsgdm(rate, DenseMixer(matrix), beta)
    start = jnp.zeros((trials, *centres.shape))
    network = (start, jax.vmap(optimizer.init)(start))
    norms = []
    # Blocks of one size, so that one compiled program serves every horizon. The noise is drawn outside of it: random
    # bits inside a loop take XLA many seconds to compile on CPU.
    for block in range(steps // BLOCK):
        draws = _draw(jax.random.fold_in(key, block), (BLOCK, *start.shape))
        network, norm = _simulate(network, draws, centres, matrix, rate, beta)
        norms.append(norm)
    by_block = np.stack(norms)
    return by_block.mean(0), by_block[-max(1, len(by_block) // 10) :].mean(0)


@functools.partial(jax.jit, static_argnames="shape")
def _draw(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "steps trials n d"]:
    return noise.alpha_stable(key, shape, alpha=TAIL_INDEX, beta=0.5)


@jax.jit
def _simulate(
    network: Any,
    draws: Float[Array, "steps trials n d"],
    centres: Float[Array, "n d"],
    matrix: Float[Array, "n n"],
    learning_rate: Float[Array, ""] | float,
    beta: Float[Array, ""] | float,
) -> tuple[Any, Float[Array, " trials"]]:
    """One block of steps of every trial; the network at its end and the gradient norm averaged over it."""
    optimizer = gt_nsgdm(learning_rate, DenseMixer(matrix), beta)

    def slope_of_root(offset: Array) -> Array:
        return offset / jnp.sqrt(1.0 + offset**2)

    def one_trial(params: Float[Array, "n d"], state: Any, gradient_noise: Float[Array, "n d"]):
        average_gradient = slope_of_root(params[:, None] - centres).mean(1)
        updates, state = optimizer.update(slope_of_root(params - centres) + gradient_noise, state, params)
        return optax.apply_updates(params, updates), state, jnp.linalg.norm(average_gradient, axis=1).mean()

    def step(network: Any, gradient_noise: Float[Array, "trials n d"]):
        params, state = network
        params, state, norm = jax.vmap(one_trial)(params, state, gradient_noise)
        return (params, state), norm

    network, norms = jax.lax.scan(step, network, draws)
    return network, norms.mean(0)
