r"""Denoising diffusion on latents: the network behind the score, and samples without a time order.

Variance-preserving noising with betas from 5e-6 to 0.03 in 1400 steps and ``ab_t = prod (1 - beta)``,

.. math::
    z_t = \sqrt{ab_t}\, z_0 + \sqrt{1 - ab_t}\, \epsilon, \qquad
    \min_\theta \mathbb{E}\, |\epsilon - \epsilon_\theta(z_t, t/T)|^2, \qquad
    s(z) = -\epsilon_\theta(z, t^*/T) / \sqrt{1 - ab_{t^*}} .

``s`` is the score of latents noised to level ``t*``. At ``t* = 0``, where the paper stands, the denominator is 0.002
and what remains is the error of the network; `jaxlab.dynamics.latent.langevin` chooses ``t*`` on validation frames.

Reference: Sengar et al., arXiv 2509.02196; Ho et al., arXiv 2006.11239 (ancestral samples, which are LD-FPG itself).
Deviation: batches are drawn with replacement; the learning rate is 1e-4 and not 1e-5 (which needs the paper's 50 000
epochs).

Example::

    schedule = DiffusionSchedule.linear()
    state = start_diffusion(key, d, settings)
    state, losses = continue_diffusion(state, z, key, schedule, settings, steps=1000)
    samples = ancestral_samples(key, state.params, schedule, 512, d, settings)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree, Real

from jaxlab.dynamics.latent.perceptron import init_perceptron, perceptron
from jaxlab.dynamics.latent.training import Loss, TrainingState, initial_state, train
from jaxlab.dynamics.reduced_rank import check_finite, integer, real_array

__all__ = [
    "DiffusionSchedule",
    "DiffusionSettings",
    "ancestral_samples",
    "continue_diffusion",
    "denoising_score",
    "score_parameters",
    "start_diffusion",
]

NoiseNetwork = Callable[[PyTree, Array, Array], Array]


@flax.struct.dataclass
class DiffusionSchedule:
    """Attributes:
    betas: variance added in each step.
    """

    betas: Float[Array, " steps"]

    @classmethod
    def linear(cls, *, steps: int = 1400, first: float = 5e-6, last: float = 0.03) -> "DiffusionSchedule":
        """Betas from ``first`` to ``last``; defaults are the paper's.

        Raises:
          ValueError: no step, or betas that do not rise within (0, 1).
        """
        if steps < 1 or not 0 < first <= last < 1:
            raise ValueError(f"betas must rise within (0, 1) in at least 1 step, got {first} to {last} in {steps}")
        return cls(betas=jnp.linspace(first, last, steps))

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.betas)

    @property
    def signal(self) -> Float[Array, " steps"]:
        """``sqrt(ab_t)``."""
        return jnp.exp(0.5 * jnp.cumsum(jnp.log1p(-self.betas)))

    @property
    def noise(self) -> Float[Array, " steps"]:
        """``sqrt(1 - ab_t)``, without the cancellation of the difference at small t."""
        return jnp.sqrt(-jnp.expm1(jnp.cumsum(jnp.log1p(-self.betas))))

    def check_level(self, level: int) -> int:
        """A step of the schedule.

        Raises:
          TypeError: no integer.
          ValueError: out of the schedule.
        """
        level = integer("the noise level t*", level)
        if not 0 <= level < self.steps:
            raise ValueError(f"the noise level t* must be in [0, {self.steps - 1}], got {level}")
        return level


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffusionSettings:
    """The noise network and its training.

    Attributes:
      hidden_size: width; the paper's is 1024.
      hidden_layers: number of hidden layers.
      conservative: the network gives a scalar and its field is minus the gradient.
      learning_rate: of Adam.
      batch_size: latents of a batch.
    """

    hidden_size: int = 1024
    hidden_layers: int = 3
    conservative: bool = False
    learning_rate: float = 1e-4
    batch_size: int = 64

    def __post_init__(self) -> None:
        for name in ("hidden_size", "hidden_layers", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")


def start_diffusion(
    key: Key[Array, ""], width: int, settings: DiffusionSettings = DiffusionSettings()
) -> TrainingState:
    """A fresh noise network for latents of a width."""
    outputs = 1 if settings.conservative else width
    params = init_perceptron(key, [width + 1, *[settings.hidden_size] * settings.hidden_layers, outputs])
    return initial_state(params, _optimizer(settings))


def continue_diffusion(
    state: TrainingState,
    z: Real[Array | np.ndarray, "t d"],
    key: Key[Array, ""],
    schedule: DiffusionSchedule,
    settings: DiffusionSettings = DiffusionSettings(),
    *,
    steps: int,
) -> tuple[TrainingState, Float[Array, " steps"]]:
    """Train for some steps on latents; the state and the loss of each batch.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: no latent, values that are not finite, a network of another width, no step.
    """
    z = real_array("latents", z, "[time, latent]", batch=False)
    check_finite("latents", z)
    if (inputs := len(state.params[0]["kernel"]) - 1) != z.shape[1]:
        raise ValueError(f"the network is of {inputs} latents, got {z.shape[1]}")
    loss = _denoising_loss(settings.conservative)
    shared = jnp.stack([schedule.signal, schedule.noise])
    state = state._replace(statistics=shared)
    return train(state, z, key, loss=loss, optimizer=_optimizer(settings), steps=steps, batch_size=settings.batch_size)


def noise_network(settings: DiffusionSettings = DiffusionSettings()) -> NoiseNetwork:
    """``network(params, z, time)`` with time in [0, 1]; one object for equal settings."""
    return _network(settings.conservative)


def score_parameters(params: PyTree, schedule: DiffusionSchedule, level: int) -> PyTree:
    """What `denoising_score` takes: the network at a noise level ``t*``.

    Raises:
      TypeError: a level that is no integer.
      ValueError: a level out of the schedule.
    """
    level = schedule.check_level(level)
    return {"network": params, "time": jnp.asarray(level / schedule.steps), "noise": schedule.noise[level]}


def denoising_score(settings: DiffusionSettings = DiffusionSettings()) -> Callable[[PyTree, Array], Array]:
    """``score(score_parameters(...), z)``, the score of latents noised to a level."""
    return _score(settings.conservative)


def ancestral_samples(
    key: Key[Array, ""],
    params: PyTree,
    schedule: DiffusionSchedule,
    count: int,
    width: int,
    settings: DiffusionSettings = DiffusionSettings(),
) -> Float[Array, "count width"]:
    """Independent samples by reverse diffusion, all steps of the schedule.

    Raises:
      TypeError: a count that is no integer.
      ValueError: a count below 1, a network of another width.
    """
    if (count := integer("count", count)) < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if (inputs := len(params[0]["kernel"]) - 1) != width:
        raise ValueError(f"the network is of {inputs} latents, samples of {width} are wanted")
    return _ancestral(key, params, schedule, count=count, width=width, network=noise_network(settings))


@functools.partial(jax.jit, static_argnames=("count", "width", "network"))
def _ancestral(
    key: Array, params: PyTree, schedule: DiffusionSchedule, *, count: int, width: int, network: NoiseNetwork
) -> Array:
    of_start, of_steps = jax.random.split(key)

    def back(z: Array, inputs: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        step, beta, noise, key = inputs
        predicted = network(params, z, step / schedule.steps)
        mean = (z - beta / noise * predicted) / jnp.sqrt(1 - beta)
        fresh = jax.random.normal(key, (count * width,)).reshape(count, width)
        return mean + jnp.where(step > 0, jnp.sqrt(beta), 0) * fresh, None

    start = jax.random.normal(of_start, (count * width,)).reshape(count, width)
    steps: Int[Array, " t"] = jnp.arange(schedule.steps)
    inputs = (steps, schedule.betas, schedule.noise, jax.random.split(of_steps, schedule.steps))
    return lax.scan(back, start, jax.tree.map(lambda leaf: leaf[::-1], inputs))[0]


@functools.cache
def _optimizer(settings: DiffusionSettings) -> optax.GradientTransformation:
    return optax.adam(settings.learning_rate)


@functools.cache
def _network(conservative: bool) -> NoiseNetwork:
    def direct(params: PyTree, z: Array, time: Array) -> Array:
        times = jnp.broadcast_to(jnp.asarray(time, z.dtype), z.shape[:-1])
        return perceptron(params, jnp.concatenate([z, times[..., None]], axis=-1))

    def gradient(params: PyTree, z: Array, time: Array) -> Array:
        return -jax.grad(lambda z: direct(params, z, time).sum())(z)

    return gradient if conservative else direct


@functools.cache
def _score(conservative: bool) -> Callable[[PyTree, Array], Array]:
    network = _network(conservative)

    def score(params: PyTree, z: Array) -> Array:
        return -network(params["network"], z, params["time"]) / params["noise"]

    def at_one_time(params: PyTree, z: Array) -> Array:
        # The time is the same for all: its part of the first layer is a bias, which a loop over steps computes once.
        first, *rest = params["network"]
        bias = first["bias"] + params["time"].astype(z.dtype) * first["kernel"][-1]
        layers = [{"kernel": first["kernel"][:-1], "bias": bias}, *rest]
        return -perceptron(layers, z) / params["noise"]

    return score if conservative else at_one_time


@functools.cache
def _denoising_loss(conservative: bool) -> Loss:
    network = _network(conservative)

    def loss(params: PyTree, schedule: Any, z: Array, key: Array) -> tuple[Array, Any]:
        signal, noise = schedule
        of_level, of_noise = jax.random.split(key)
        level = jax.random.randint(of_level, (len(z),), 0, len(signal))
        drawn = jax.random.normal(of_noise, (z.size,)).reshape(z.shape)
        noised = signal[level, None] * z + noise[level, None] * drawn
        return jnp.mean((drawn - network(params, noised, level / len(signal))) ** 2), schedule

    return loss


__all__ += ["noise_network"]
