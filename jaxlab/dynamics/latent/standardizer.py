r"""Latents to a common scale and back: per dimension, or whitened by principal components.

.. math::
    u = (z - \bar z)\, P, \qquad z = \bar z + u\, L,

with ``P = diag(1 / (sd + eps))`` and ``L`` its inverse (``mode="standard"``), or with the principal axes of the
standardised latents scaled to unit variance, those of too little variance left out (``mode="whiten"``). A score is
learnt on whitened latents: the step of overdamped dynamics must stay below twice the smallest variance, and after
whitening all of them are one.

Fit it on training frames only; a mean or a deviation of test frames would leak.

Reference: Sengar et al., arXiv 2509.02196 (standardisation; whitening is an addition, see
`jaxlab.dynamics.latent.langevin`).

Example:
  >>> standardizer = fit_standardizer(jnp.array([[0.0, 1.0], [2.0, 5.0]]))
  >>> standardizer.forward(jnp.array([2.0, 5.0])).round(3)
  Array([1., 1.], dtype=float32)
"""

import math
import warnings
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from jaxlab.dynamics.reduced_rank import check_finite, is_concrete, real_array

__all__ = ["Standardizer", "fit_standardizer"]


@flax.struct.dataclass
class Standardizer:
    """An affine map of latents and the way back.

    Attributes:
      mean: of the training latents.
      projection: from centred latents to standardised ones.
      lifting: from standardised ones to centred latents.
    """

    mean: Float[Array, " d"]
    projection: Float[Array, "d k"]
    lifting: Float[Array, "k d"]

    def forward(self, z: Float[Array | np.ndarray, "*batch d"]) -> Float[Array, "*batch k"]:
        """Standardise."""
        return (jnp.asarray(z) - self.mean) @ self.projection

    def inverse(self, u: Float[Array | np.ndarray, "*batch k"]) -> Float[Array, "*batch d"]:
        """Back to latents; exact where no direction was left out."""
        return jnp.asarray(u) @ self.lifting + self.mean


def fit_standardizer(
    z: Real[Array | np.ndarray, "t d"],
    *,
    mode: Literal["standard", "whiten"] = "standard",
    epsilon: float | int = 1e-6,
    minimum_variance: float | int = 1e-4,
) -> Standardizer:
    """Mean and scale of training latents.

    Args:
      z: training latents.
      mode: per dimension, or principal components.
      epsilon: added to each deviation; a dimension that never varies is mapped to zeros and a warning says so.
      minimum_variance: principal components of the standardised latents (mean variance 1) with less are left out; with
        ``mode="whiten"`` only, and not under `jit`, since the width depends on it.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: fewer than two frames, values that are not finite, an unknown mode, a negative epsilon or variance.
    """
    z = real_array("latents", z, "[time, latent]", batch=False)
    if len(z) < 2:
        raise ValueError(f"a standardizer needs at least 2 frames, got {len(z)}")
    if mode not in ("standard", "whiten"):
        raise ValueError(f"mode must be 'standard' or 'whiten', got {mode!r}")
    for name, value in (("epsilon", epsilon), ("minimum_variance", minimum_variance)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be >= 0 and finite, got {value}")
    check_finite("latents", z)
    mean, deviation, scale, inverse_scale, values, axes = _moments(z, epsilon)
    if is_concrete(deviation):
        still = np.flatnonzero(np.asarray(deviation <= 1e-6 * jnp.maximum(jnp.abs(mean), 1e-30)))
        if len(still):
            warnings.warn(
                f"{len(still)} of {z.shape[1]} latent dimensions do not vary, the first is {still[0]}", stacklevel=2
            )
    if mode == "standard":
        return Standardizer(mean=mean, projection=jnp.diag(1 / scale), lifting=jnp.diag(inverse_scale))
    kept = np.flatnonzero(np.asarray(values) >= max(minimum_variance, 1e-12))[::-1]
    if len(kept) == 0:
        raise ValueError(f"no principal component has a variance of {minimum_variance}; the latents do not vary")
    values, axes = values[kept], axes[:, kept]
    return Standardizer(
        mean=mean,
        projection=axes / jnp.sqrt(values) / scale[:, None],
        lifting=(axes * jnp.sqrt(values)).T * inverse_scale,
    )


@jax.jit
def _moments(z: Array, epsilon: float | int | Array) -> tuple[Array, ...]:
    mean, deviation = z.mean(0), z.std(0)
    # What rounding leaves of a constant dimension must not be blown up to unit variance.
    varies = deviation > 1e-6 * jnp.abs(mean)
    scale = jnp.where(varies, deviation + epsilon, jnp.inf)
    standardised = (z - mean) / scale
    values, axes = jnp.linalg.eigh(standardised.T @ standardised / len(z))
    return mean, deviation, scale, jnp.where(varies, scale, 0), values, axes
