r"""The autoregressive network: a perceptron that predicts the next latent, with calibrated noise.

.. math::
    z_{t+1} = z_t + g_\theta(z_t) + F \xi_t, \qquad
    \theta = \arg\min \mathbb{E}\, |z_{t+s} - z_t - g_\theta(z_t)|^2 / d .

Two hidden layers of 512, dropout 0.1, AdamW at 1e-4 with weight decay 1e-2, batches of 128, up to 200 epochs, the
parameters of the best validation loss.

Reference: Sengar et al., arXiv 2509.02196. Deviations:

1. ``residual=True`` (predict the change) is the default; ``residual=False`` is the paper's ``z_{t+1} = g(z_t) +
   noise``. Only the former stayed finite over long rollouts with full noise.
2. Weight decay and the choice by validation loss follow the paper; its released code has neither.
3. Batches are drawn with replacement, and an epoch is as many of them as the training pairs fill.
4. ``clip`` keeps states in a box around the training range (1.2 of its half width where given); the paper has no guard.

Example::

    propagator = fit_neural(jax.random.key(0), *snapshot_pairs(train), held_out=snapshot_pairs(validation))
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key, PyTree, Real

from jaxlab.dynamics.latent.noise import NoiseKind, noise_factor
from jaxlab.dynamics.latent.perceptron import init_perceptron, perceptron
from jaxlab.dynamics.latent.snapshots import check_pairs
from jaxlab.dynamics.latent.training import Loss, TrainingState, initial_state, mean_in_chunks, train

__all__ = [
    "NeuralPropagator",
    "NeuralSettings",
    "NeuralState",
    "continue_neural",
    "finish_neural",
    "fit_neural",
    "start_neural",
]

Apply = Callable[[PyTree, Array, Array | None], Array]
Pairs = tuple[Real[Array | np.ndarray, "_ d"], Real[Array | np.ndarray, "_ d"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeuralSettings:
    """What is trained and how. Defaults are the paper's except ``residual``.

    Attributes:
      hidden_size: width of the hidden layers.
      hidden_layers: number of them.
      dropout: in [0, 1), after each hidden activation, in training only.
      residual: predict the change of the state and not the next state.
      learning_rate: of AdamW.
      weight_decay: of AdamW.
      batch_size: pairs of a batch.
      epochs: passes over the training pairs.
      decay_steps: steps over which the learning rate falls to zero along a cosine; 0 keeps it, as the paper does. The
        populations of a long rollout hang on a drift that is small against the noise, and at a constant rate that drift
        is still jittering when training stops.
    """

    hidden_size: int = 512
    hidden_layers: int = 2
    dropout: float = 0.1
    residual: bool = True
    learning_rate: float = 1e-4
    weight_decay: float = 1e-2
    batch_size: int = 128
    epochs: int = 200
    decay_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("hidden_layers", "decay_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if not (self.learning_rate > 0 and self.weight_decay >= 0):
            raise ValueError(
                f"learning_rate must be positive and weight_decay >= 0, got {self.learning_rate}, {self.weight_decay}"
            )


@flax.struct.dataclass
class NeuralPropagator:
    """A network with noise as a `Propagator`.

    Attributes:
      params: of the network.
      noise: the factor F.
      low: least value of each latent, minus infinity without a guard.
      high: largest.
      apply_fn: ``apply_fn(params, z, key)``; the key is None outside training. Compared by identity.
      residual: whether it gives the change.
    """

    params: PyTree
    noise: Float[Array, "d d"]
    low: Float[Array, " d"]
    high: Float[Array, " d"]
    apply_fn: Apply = flax.struct.field(pytree_node=False)
    residual: bool = flax.struct.field(pytree_node=False, default=True)

    @property
    def draws(self) -> int:
        """One."""
        return 1

    def mean(self, z: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """The step without its noise."""
        out = self.apply_fn(self.params, z, None)
        return z + out if self.residual else out

    def forcing(self, noise: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
        """``F xi``."""
        return noise @ self.noise.T

    def advance(self, z: Float[Array, "*batch d"], forcing: Float[Array, "1 *batch d"]) -> Float[Array, "*batch d"]:
        """The next state, from what is added to its mean."""
        return jnp.clip(self.mean(z) + forcing[0], self.low, self.high)

    def step(self, z: Float[Array, "*batch d"], noise: Float[Array, "1 *batch d"]) -> Float[Array, "*batch d"]:
        """The next state."""
        return self.advance(z, self.forcing(noise))


class NeuralState(NamedTuple):
    """A training that goes on.

    Attributes:
      training: parameters and optimiser.
      best_params: of the lowest validation loss so far.
      best_loss: that loss.
    """

    training: TrainingState
    best_params: PyTree
    best_loss: Float[Array, ""]


def start_neural(
    key: Key[Array, ""], width: int, settings: NeuralSettings = NeuralSettings(), *, params: PyTree = None
) -> NeuralState:
    """A fresh network for latents of a width, or the state of a training that starts from given ``params``."""
    if params is None:
        params = init_perceptron(key, [width, *[settings.hidden_size] * settings.hidden_layers, width])
        if settings.residual:
            # The first guess is to stay, not to jump at random.
            params[-1] = jax.tree.map(jnp.zeros_like, params[-1])
    return NeuralState(initial_state(params, _optimizer(settings)), params, jnp.asarray(jnp.inf))


def continue_neural(
    state: NeuralState,
    pairs: Pairs,
    held_out: Pairs,
    key: Key[Array, ""],
    settings: NeuralSettings = NeuralSettings(),
    *,
    steps: int | None = None,
    apply_fn: Apply | None = None,
) -> tuple[NeuralState, dict[str, Array]]:
    """Train for some steps, by default an epoch, then validate.

    Returns:
      The state, and the mean training loss and the validation loss.
    """
    apply_fn = apply_fn or _perceptron(settings.dropout)
    steps = steps or max(1, len(pairs[0]) // settings.batch_size)
    training, losses = train(
        state.training,
        tuple(pairs),
        key,
        loss=_one_step_loss(apply_fn, settings.residual),
        optimizer=_optimizer(settings),
        steps=steps,
        batch_size=settings.batch_size,
    )
    validation = one_step_error(apply_fn, training.params, held_out, residual=settings.residual)
    better = validation < state.best_loss
    best = jax.tree.map(lambda new, old: jnp.where(better, new, old), training.params, state.best_params)
    found = NeuralState(training, best, jnp.where(better, validation, state.best_loss))
    return found, {"loss": losses.mean(), "validation_loss": validation}


def finish_neural(
    state: NeuralState,
    pairs: Pairs,
    held_out: Pairs,
    settings: NeuralSettings = NeuralSettings(),
    *,
    noise: NoiseKind = "full",
    sigma: float | None = None,
    clip: float | int | None = None,
    apply_fn: Apply | None = None,
) -> NeuralPropagator:
    """The best network so far, with noise calibrated on held-out pairs.

    Args:
      state: of the training.
      pairs: of the training; their range is that of ``clip``.
      held_out: pairs for the calibration.
      settings: of the training.
      noise: kind of `noise_factor`.
      sigma: of ``noise="fixed"``.
      clip: keep states in a box of this multiple of the half width of the training range; ``None`` keeps none.
      apply_fn: the network, where it is the user's.

    Raises:
      ValueError: a clip that is not positive; no network with a finite validation loss.
    """
    if clip is not None and not 0 < clip < math.inf:
        raise ValueError(f"clip must be positive and finite, got {clip}")
    if not np.isfinite(state.best_loss):
        raise ValueError(f"no validation loss was finite, the best is {state.best_loss}; lower the learning rate")
    x, _ = check_pairs(*pairs)
    low, high = x.min(0), x.max(0)
    half = (high - low) / 2 * (math.inf if clip is None else clip)
    half = jnp.where(jnp.isnan(half), math.inf, half)  # infinity times a latent that never varies
    apply_fn = apply_fn or _perceptron(settings.dropout)
    still = NeuralPropagator(
        params=state.best_params,
        noise=jnp.zeros((x.shape[1], x.shape[1]), x.dtype),
        low=(low + high) / 2 - half,
        high=(low + high) / 2 + half,
        apply_fn=apply_fn,
        residual=settings.residual,
    )
    before, after = check_pairs(*held_out)
    return dataclasses.replace(still, noise=noise_factor(after - still.mean(before), kind=noise, sigma=sigma))


def fit_neural(
    key: Key[Array, ""],
    x: Real[Array | np.ndarray, "_ d"],
    y: Real[Array | np.ndarray, "_ d"],
    *,
    held_out: tuple[Real[Array | np.ndarray, "_ _"], Real[Array | np.ndarray, "_ _"]],
    settings: NeuralSettings = NeuralSettings(),
    params: PyTree = None,
    apply_fn: Apply | None = None,
    noise: NoiseKind = "full",
    sigma: float | None = None,
    clip: float | int | None = None,
) -> NeuralPropagator:
    """Train for all epochs and calibrate; `start_neural`, `continue_neural` and `finish_neural` in one call.

    Args:
      key: of weights, batches and dropout.
      x: states.
      y: states one step later.
      held_out: pairs for the choice of the parameters and the noise.
      settings: sizes and optimiser.
      params: of the user's network; with ``apply_fn``.
      apply_fn: ``apply_fn(params, z, key)``, a network of the user's own.
      noise: kind of `noise_factor`.
      sigma: of ``noise="fixed"``.
      clip: as in `finish_neural`.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: bad pairs or settings, a network without parameters or the reverse, a training that diverged.
    """
    if (params is None) != (apply_fn is None):
        raise ValueError("params and apply_fn go together: give both or neither")
    pairs, held_out = check_pairs(x, y), check_pairs(*held_out)
    if held_out[0].shape[1] != pairs[0].shape[1]:
        raise ValueError(
            f"held-out pairs must have the {pairs[0].shape[1]} latents of the others, got {held_out[0].shape[1]}"
        )
    of_weights, of_epochs = jax.random.split(key)
    state = start_neural(of_weights, pairs[0].shape[1], settings, params=params)
    for key in jax.random.split(of_epochs, settings.epochs):
        state, _ = continue_neural(state, pairs, held_out, key, settings, apply_fn=apply_fn)
    return finish_neural(state, pairs, held_out, settings, noise=noise, sigma=sigma, clip=clip, apply_fn=apply_fn)


def one_step_error(apply_fn: Apply, params: PyTree, pairs: Pairs, *, residual: bool) -> Float[Array, ""]:
    """Mean squared error of one step without noise, over pairs and latents."""
    return mean_in_chunks(functools.partial(_squared_error, params, apply_fn=apply_fn, residual=residual), tuple(pairs))


@functools.partial(jax.jit, static_argnames=("apply_fn", "residual"))
def _squared_error(
    params: PyTree, pairs: tuple[Array, Array], *, apply_fn: Apply, residual: bool
) -> Float[Array, " n"]:
    x, y = pairs
    out = apply_fn(params, x, None)
    return jnp.mean((y - (x + out if residual else out)) ** 2, axis=-1)


# Cached, so that equal settings share one compiled program.
@functools.cache
def _optimizer(settings: NeuralSettings) -> optax.GradientTransformation:
    rate: Any = settings.learning_rate
    if settings.decay_steps:
        rate = optax.cosine_decay_schedule(rate, settings.decay_steps)
    return optax.adamw(rate, weight_decay=settings.weight_decay)


@functools.cache
def _perceptron(dropout: float) -> Apply:
    return lambda params, z, key: perceptron(params, z, dropout=dropout, key=key)


@functools.cache
def _one_step_loss(apply_fn: Apply, residual: bool) -> Loss:
    def loss(params: PyTree, statistics: Any, batch: Any, key: Array) -> tuple[Array, Any]:
        x, y = batch
        out = apply_fn(params, x, key)
        return jnp.mean((y - (x + out if residual else out)) ** 2), statistics

    return loss


__all__ += ["one_step_error"]
