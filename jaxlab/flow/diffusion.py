"""Diffusion models as flows, so that DDIM is an Euler sampler and Uni-Inv and Uni-Edit take them as they are.

With ``x_t = a_t x_0 + s_t noise``, ``a_t^2 + s_t^2 = 1``, put ``y = x / a`` and ``sigma = s / a``. DDIM without noise
(Song et al. 2021, arXiv 2010.02502) is then Euler's rule for ``dy/d sigma = epsilon(a y, t)``. Time is
``sigma / sigma_max`` here, from 0 for data to 1, so that

    velocity(y, time) = sigma_max epsilon(a y, t(sigma))

and the grids start at a = 1, as the authors of UniEdit-Flow (arXiv 2504.13109) do. A model that predicts
``v = a noise - s x_0`` gives ``epsilon = a v + s x``.

The path is ``y = x_0 + sigma noise`` and not the straight line of a flow-matching model: the samplers, Uni-Inv,
Uni-Edit, delayed injection and guidance apply; SDEdit, RF-Inversion and FlowEdit, which mix data and noise themselves,
do not.

A model of another precision is wrapped in `jaxlab.flow.in_dtype` *inside*: around the whole it would round the time,
and with it the timestep that a model looks up.

Example::

    flow = ddim_as_flow(predict_noise, alpha_bar, timesteps=np.arange(20, 1000, 20))
    result = uni_edit(flow.velocity, images, flow.grid, source=a, target=b, inversion=null)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

from jaxlab.flow.arguments import time_of
from jaxlab.flow.velocity import as_partial

__all__ = ["DiffusionFlow", "ddim_as_flow"]

_WHOLE = 1e-2


class DiffusionFlow(NamedTuple):
    """A diffusion model in the form of `jaxlab.flow.velocity`.

    Attributes:
      velocity: of ``y = x / a``.
      grid: the time grid ``[N + 1]`` of the chosen timesteps, from 0 (data) to 1.
      alpha: a at every point of the grid, ``[N + 1]``; ``y = x / alpha`` and ``x = alpha y``.
      sigma_max: sigma at the last point.
    """

    velocity: Partial
    grid: np.ndarray
    alpha: np.ndarray
    sigma_max: float


def ddim_as_flow(
    predict: Callable[[Any, Any, Any], Any],
    alpha_bar: Float[np.ndarray | Array, " train"],
    timesteps: Int[np.ndarray, " n"],
    *,
    prediction: str = "epsilon",
) -> DiffusionFlow:
    """Turn a noise or v predictor into a velocity and the grid of a DDIM sampler.

    Args:
      predict: ``predict(x, timestep, condition)`` with a scalar timestep, a float in the dtype of ``x``; it is
        fractional only if the velocity is called between the points of the grid.
      alpha_bar: ``a_t^2`` of every training timestep, decreasing within (0, 1).
      timesteps: those the sampler visits, ascending; the point with a = 1 is added in front, and there the model is
        asked at timestep 0.
      prediction: what ``predict`` gives.

    Raises:
      ValueError: ``alpha_bar`` does not decrease within (0, 1), timesteps are no whole numbers that ascend within its
        range, or an unknown prediction.
    """
    table = np.asarray(alpha_bar, np.float64)
    steps = np.asarray(timesteps)
    if table.ndim != 1 or not table.size:
        raise ValueError(f"alpha_bar must be the numbers of one schedule, got shape {table.shape}")
    if steps.ndim != 1 or (steps.size and not np.issubdtype(steps.dtype, np.integer)):
        raise ValueError(f"timesteps must be whole numbers in one dimension, got {steps.dtype}{list(steps.shape)}")
    if not (np.all(np.diff(table) < 0) and table[-1] > 0 and table[0] < 1):
        raise ValueError(f"alpha_bar must decrease within (0, 1), got {np.array2string(table, threshold=6)}")
    if not (steps.size and steps[0] >= 0 and steps[-1] < table.size and np.all(np.diff(steps) > 0)):
        raise ValueError(
            f"timesteps must ascend within [0, {table.size - 1}], got {np.array2string(steps, threshold=6)}"
        )
    if prediction not in ("epsilon", "v"):
        raise ValueError(f"prediction must be 'epsilon' or 'v', got {prediction!r}")
    sigmas = np.sqrt(1 / table - 1)
    sigma_max = float(sigmas[steps[-1]])
    tables = (np.concatenate([[0.0], sigmas]), np.concatenate([[0.0], np.arange(table.size)]), np.float64(sigma_max))
    velocity = Partial(_of_noise if prediction == "epsilon" else _of_v, as_partial(predict), tables)
    return DiffusionFlow(
        velocity,
        np.concatenate([[0.0], sigmas[steps] / sigma_max]),
        np.concatenate([[1.0], np.sqrt(table[steps])]),
        sigma_max,
    )


def _point(tables: tuple, time: Array) -> tuple[Array, Array, Array]:
    """Alpha, sigma and timestep at a time."""
    sigmas, timesteps, sigma_max = (jnp.asarray(table, time.dtype) for table in tables)
    sigma = time * sigma_max
    timestep = jnp.interp(sigma, sigmas, timesteps)
    # A model that looks its timestep up would truncate 58.9999.
    whole = jnp.round(timestep)
    return jax.lax.rsqrt(1 + sigma**2), sigma, jnp.where(jnp.abs(timestep - whole) < _WHOLE, whole, timestep)


def _of_noise(predict: Callable, tables: tuple, y: Any, time: Any, condition: Any) -> Any:
    alpha, _, timestep = _point(tables, time_of(y, time))
    noise = predict(jax.tree.map(lambda leaf: alpha * leaf, y), timestep, condition)
    return jax.tree.map(lambda leaf: jnp.asarray(tables[2], leaf.dtype) * leaf, noise)


def _of_v(predict: Callable, tables: tuple, y: Any, time: Any, condition: Any) -> Any:
    alpha, sigma, timestep = _point(tables, time_of(y, time))
    x = jax.tree.map(lambda leaf: alpha * leaf, y)
    predicted = predict(x, timestep, condition)
    # s = sigma a
    noise = jax.tree.map(lambda v, leaf: alpha * (v + sigma * leaf), predicted, x)
    return jax.tree.map(lambda leaf: jnp.asarray(tables[2], leaf.dtype) * leaf, noise)
