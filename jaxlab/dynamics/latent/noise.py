r"""The noise of a rollout, calibrated to what a propagator's mean leaves unexplained.

A rollout adds ``eta_t = F xi_t`` with standard normal ``xi`` to each step. The factor comes from the one-step residuals
``e = z_{t+s} - f(z_t)`` on frames that the fit has not seen:

* ``iso``: ``F F^T`` is the mean variance times the identity,
* ``diag``: the variance of each dimension,
* ``full``: ``F`` is the Cholesky factor of the covariance plus ``1e-9`` times the identity,
* ``fixed``: a given standard deviation (the released code of the paper: 1e-4, 1e-3, 1e-2).

Reference: Sengar et al., arXiv 2509.02196, which matches the variance of the residual. Deviation: ``full`` is the
default, since latents of one molecule are strongly correlated and equal noise on all of them excites directions that
the molecule does not move in; much smaller noise lets every propagator collapse onto one state.

Example:
  >>> residuals = jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
  >>> noise_factor(residuals, kind="diag").round(2)
  Array([[0.71, 0.  ],
         [0.  , 1.41]], dtype=float32)
"""

import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from jaxlab.dynamics.reduced_rank import check_finite, real_array

__all__ = ["NoiseKind", "noise_factor"]

NoiseKind = Literal["iso", "diag", "full", "fixed"]


def noise_factor(
    residuals: Real[Array | np.ndarray, "n d"], *, kind: NoiseKind = "full", sigma: float | int | None = None
) -> Float[Array, "d d"]:
    """The matrix ``F`` that turns standard normal numbers into the noise of a step.

    Args:
      residuals: of one step, on frames that were not used to fit.
      kind: what of their covariance is kept.
      sigma: the standard deviation, with ``kind="fixed"`` only.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: fewer than two residuals, values that are not finite, an unknown kind, a sigma that is missing,
        negative or out of place.
    """
    residuals = real_array("residuals", residuals, "[pair, latent]", batch=False)
    width = residuals.shape[1]
    if kind not in ("iso", "diag", "full", "fixed"):
        raise ValueError(f"kind must be 'iso', 'diag', 'full' or 'fixed', got {kind!r}")
    if (sigma is not None) != (kind == "fixed"):
        raise ValueError(f"sigma goes with kind 'fixed' and nothing else, got kind {kind!r} and sigma {sigma}")
    if sigma is not None:
        if not 0 <= sigma < math.inf:
            raise ValueError(f"sigma must be >= 0 and finite, got {sigma}")
        return sigma * jnp.eye(width, dtype=residuals.dtype)
    if len(residuals) < 2:
        raise ValueError(f"noise is calibrated on at least 2 residuals, got {len(residuals)}")
    check_finite("residuals", residuals)
    return _factor(residuals, kind=kind)


@partial(jax.jit, static_argnames="kind")
def _factor(residuals: Array, *, kind: NoiseKind) -> Array:
    centred = residuals - residuals.mean(0)
    variance = jnp.mean(centred**2, axis=0)
    width = residuals.shape[1]
    if kind == "iso":
        return jnp.sqrt(variance.mean()) * jnp.eye(width, dtype=residuals.dtype)
    if kind == "diag":
        return jnp.diag(jnp.sqrt(variance))
    covariance = centred.T @ centred / len(residuals) + 1e-9 * jnp.eye(width, dtype=residuals.dtype)
    factor = jnp.linalg.cholesky(covariance)
    values, vectors = jnp.linalg.eigh(covariance)
    # By the eigenvalues where rounding makes the covariance indefinite: fewer residuals than dimensions are allowed.
    return jnp.where(jnp.all(jnp.isfinite(factor)), factor, vectors * jnp.sqrt(jnp.maximum(values, 0)))
