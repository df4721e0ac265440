r"""Overdamped Langevin dynamics in latent space, driven by a score.

.. math::
    z \leftarrow z + T\,dt\, s(z) + \sqrt{2\,T\,dt}\; \xi

leaves the density whose score is ``s`` unchanged for every temperature T (``variant="paper"``). The released code
leaves T out of the drift (``variant="code"``), which makes it that density to the power ``1/T``. One step of the
propagator is ``stride`` of these; its clock is arbitrary, and only matching a relaxation time to a simulation gives it
a unit.

Reference: Sengar et al., arXiv 2509.02196. Deviations:

1. Latents are whitened (`fit_standardizer`), after which a ``dt`` of 1e-3 to 1e-2 is stable; the paper's latents are
   not and its ``dt`` is 1e-8 to 1e-10.
2. The noise level ``t*`` of a learnt score is chosen on validation frames; the paper stands near 0.

`langevin_solve` is the same process through diffrax, with any of its solvers; `LangevinPropagator` is what rollouts
scan, and takes the increments of the Brownian motion from outside.

Example:
  >>> propagator = langevin_propagator(lambda params, z: -z, None, dt=0.1)
  >>> found = rollout(propagator, jnp.zeros((8, 1)), 20_000, key=jax.random.key(0))
  >>> bool(abs(found.path.var() - 1 / (1 - 0.1 / 2)) < 0.02)
  True
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import diffrax
import flax.struct
import jax
import jax.numpy as jnp
import lineax
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Key, PyTree, Real

from jaxlab.dynamics.reduced_rank import check_finite, integer, real_array

__all__ = ["LangevinPropagator", "langevin_propagator", "langevin_solve"]

ScoreFunction = Callable[[PyTree, Array], Array]
Variant = Literal["paper", "code"]


@flax.struct.dataclass
class LangevinPropagator:
    """``stride`` steps of Euler-Maruyama as a `Propagator`; build it with `langevin_propagator`.

    Attributes:
      params: of the score.
      drift_scale: ``T dt``, or ``dt`` in the variant of the code.
      noise_scale: ``sqrt(2 T dt)``.
      clip: longest score vector, None for no limit.
      score_fn: ``score_fn(params, z)``. Compared by identity.
      stride: steps in one.
    """

    params: PyTree
    drift_scale: Float[Array, ""]
    noise_scale: Float[Array, ""]
    clip: Float[Array, ""] | None
    score_fn: ScoreFunction = flax.struct.field(pytree_node=False)
    stride: int = flax.struct.field(pytree_node=False, default=1)

    @property
    def draws(self) -> int:
        """The stride."""
        return self.stride

    def drift(self, z: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """The score, shortened to the clip, times its scale."""
        score = self.score_fn(self.params, z)
        if self.clip is None:
            return self.drift_scale * score
        # Squares of a wild score overflow; the largest entry does not.
        largest = jnp.maximum(jnp.max(jnp.abs(score), axis=-1, keepdims=True), jnp.finfo(z.dtype).tiny)
        length = largest * jnp.linalg.norm(score / largest, axis=-1, keepdims=True)
        return self.drift_scale * score * jnp.minimum(1, self.clip / length)

    def forcing(self, noise: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
        """``sqrt(2 T dt) xi``."""
        return self.noise_scale * noise

    def advance(self, z: Float[Array, "*batch d"], forcing: Float[Array, "s *batch d"]) -> Float[Array, "*batch d"]:
        """The state ``stride`` steps later, from what is added in each."""

        def one(z: Array, added: Array) -> tuple[Array, None]:
            return z + self.drift(z) + added, None

        return one(z, forcing[0])[0] if self.stride == 1 else lax.scan(one, z, forcing)[0]

    def step(self, z: Float[Array, "*batch d"], noise: Float[Array, "s *batch d"]) -> Float[Array, "*batch d"]:
        """The state ``stride`` steps later."""
        return self.advance(z, self.forcing(noise))


def langevin_propagator(
    score_fn: ScoreFunction,
    params: PyTree,
    *,
    dt: float | int,
    temperature: float | int = 1.0,
    stride: int = 1,
    variant: Variant = "paper",
    clip: float | int | None = None,
    smallest_variance: float | int | None = None,
) -> LangevinPropagator:
    """Langevin dynamics along a score.

    Args:
      score_fn: ``score_fn(params, z)``, the gradient of the log-density.
      params: its first argument.
      dt: step of the integrator.
      temperature: T.
      stride: steps of the integrator in one of the propagator.
      variant: whether T scales the drift too.
      clip: longest score vector; ``None`` for no limit.
      smallest_variance: of the latents along any direction, 1 where they are whitened; a warning is given where ``dt``
        exceeds half of it, since Euler-Maruyama is unstable from twice of it on.

    Raises:
      TypeError: a stride that is no integer.
      ValueError: ``dt``, temperature or clip that are not positive, a stride below 1, an unknown variant.
    """
    for name, value in (("dt", dt), ("temperature", temperature), ("clip", clip)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if (stride := integer("stride", stride)) < 1:
        raise ValueError(f"stride must be at least 1, got {stride}")
    if variant not in ("paper", "code"):
        raise ValueError(f"variant must be 'paper' or 'code', got {variant!r}")
    scale = dt * (temperature if variant == "paper" else 1.0)
    if smallest_variance is not None and scale > smallest_variance / 2:
        warnings.warn(
            f"a Langevin step of {scale:g} is more than half of the smallest latent variance {smallest_variance:g}: "
            "the stationary state is wrong, and from twice the variance on it diverges",
            stacklevel=2,
        )
    return LangevinPropagator(
        params=params,
        drift_scale=jnp.asarray(scale, jnp.float32),
        noise_scale=jnp.asarray(math.sqrt(2 * temperature * dt), jnp.float32),
        clip=None if clip is None else jnp.asarray(clip, jnp.float32),
        score_fn=score_fn,
        stride=stride,
    )


def langevin_solve(
    propagator: LangevinPropagator,
    start: Real[Array | np.ndarray, "replicas d"],
    steps: int,
    *,
    key: Key[Array, ""],
    solver: diffrax.AbstractSolver | None = None,
    brownian: diffrax.AbstractBrownianPath | None = None,
) -> Float[Array, "replicas steps d"]:
    """The same process solved by diffrax, states after every ``stride`` steps.

    Args:
      propagator: score, step and temperature.
      start: initial states.
      steps: states to save, at least 1.
      key: of the Brownian motion.
      solver: any solver for additive noise; ``None`` is ``diffrax.Euler()``, which is Euler-Maruyama.
      brownian: a path of shape ``[replicas * d]`` in place of one drawn from the key; its time is counted in steps.

    Raises:
      TypeError: values that are no real numbers, steps that are no integer.
      ValueError: no step, a start that is not finite.
    """
    start = real_array("start", start, "[replica, latent]", batch=False)
    if (steps := integer("steps", steps)) < 1:
        raise ValueError(f"at least one step is needed, got {steps}")
    check_finite("start", start)
    path = diffrax.UnsafeBrownianPath(shape=(start.size,), key=key) if brownian is None else brownian
    return _solve(propagator, start, path, steps=steps, solver=solver or diffrax.Euler())


@functools.partial(jax.jit, static_argnames=("steps", "solver"))
def _solve(
    propagator: LangevinPropagator,
    start: Array,
    path: diffrax.AbstractBrownianPath,
    *,
    steps: int,
    solver: diffrax.AbstractSolver,
) -> Array:
    # Time is counted in steps of the integrator, so that no sum of dt is rounded.
    def drift(_: Any, flat: Array, __: Any) -> Array:
        return propagator.drift(flat.reshape(start.shape)).ravel()

    def diffusion(_: Any, flat: Array, __: Any) -> lineax.DiagonalLinearOperator:
        return lineax.DiagonalLinearOperator(jnp.full_like(flat, propagator.noise_scale))

    total = steps * propagator.stride
    solution = diffrax.diffeqsolve(
        diffrax.MultiTerm(diffrax.ODETerm(drift), diffrax.ControlTerm(diffusion, path)),
        solver,
        t0=0,
        t1=total,
        dt0=1,
        y0=start.ravel(),
        saveat=diffrax.SaveAt(ts=jnp.arange(1, steps + 1) * propagator.stride),
        max_steps=total,
        adjoint=diffrax.DirectAdjoint(),
    )
    return solution.ys.reshape(steps, *start.shape).swapaxes(0, 1)
