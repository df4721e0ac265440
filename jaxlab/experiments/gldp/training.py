"""The trainings as loops of a run: with progress, and resumed bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.dynamics import latent, molecules
from jaxlab.dynamics.latent import DiffusionSchedule, DiffusionSettings, NeuralSettings, NeuralState
from jaxlab.dynamics.molecules import Autoencoder, AutoencoderSettings, TrainingFrames
from jaxlab.experiments.base import Run

__all__ = ["train_autoencoder", "train_network", "train_score"]

_CHUNK = 250  # training steps in one call


def train_autoencoder(
    run: Run,
    frames: TrainingFrames,
    settings: AutoencoderSettings,
    *,
    encoder_steps: int,
    decoder_steps: int,
    keys: tuple[Any, Any],
    costs: tuple[float, float],
) -> Autoencoder:
    """Encoder, then decoder; keys and costs are of these two."""

    def encoder(carry: Any, i: int) -> tuple[Any, dict]:
        key = jax.random.fold_in(keys[0], i + 1)
        state, losses = molecules.continue_encoder(carry, frames, key, settings, steps=sizes[i])
        return state, {"loss": losses.mean()}

    sizes = _chunks(encoder_steps)
    start = molecules.start_encoder(jax.random.fold_in(keys[0], 0), settings)
    state, _ = run.loop("encoder", encoder, start, len(sizes), cost=costs[0], log=lambda i, o: {"part": "encoder", **o})
    autoencoder = molecules.freeze_encoder(jax.tree.map(jnp.asarray, state), frames, settings)
    z = molecules.encode(autoencoder, np.asarray(frames.x))

    def decoder(carry: Any, i: int) -> tuple[Any, dict]:
        key = jax.random.fold_in(keys[1], i + 1)
        state, losses = molecules.continue_decoder(carry, autoencoder, frames, z, key, settings, steps=counts[i])
        return state, {"loss": losses.mean()}

    counts = _chunks(decoder_steps)
    start = molecules.start_decoder(jax.random.fold_in(keys[1], 0), autoencoder, settings)
    state, _ = run.loop(
        "decoder", decoder, start, len(counts), cost=costs[1], log=lambda i, o: {"part": "decoder", **o}
    )
    return molecules.freeze_decoder(autoencoder, jax.tree.map(jnp.asarray, state))


def train_network(
    run: Run, name: str, pairs: Any, held_out: Any, settings: NeuralSettings, *, key: Any, cost: float
) -> NeuralState:
    """The autoregressive network, an epoch at a time."""

    def epoch(carry: Any, i: int) -> tuple[Any, dict]:
        return latent.continue_neural(carry, pairs, held_out, jax.random.fold_in(key, i + 1), settings)

    state, _ = run.loop(
        name,
        epoch,
        latent.start_neural(jax.random.fold_in(key, 0), pairs[0].shape[1], settings),
        settings.epochs,
        cost=cost,
        log=lambda i, o: {"part": name, **o},
    )
    return jax.tree.map(jnp.asarray, state)


def train_score(
    run: Run,
    u: np.ndarray,
    schedule: DiffusionSchedule,
    settings: DiffusionSettings,
    *,
    steps: int,
    key: Any,
    cost: float,
) -> Any:
    """The noise network; its parameters."""

    def body(carry: Any, i: int) -> tuple[Any, dict]:
        of_chunk = jax.random.fold_in(key, i + 1)
        state, losses = latent.continue_diffusion(carry, u, of_chunk, schedule, settings, steps=sizes[i])
        return state._replace(statistics=()), {"loss": losses.mean()}

    sizes = _chunks(steps)
    start = latent.start_diffusion(jax.random.fold_in(key, 0), u.shape[1], settings)
    state, _ = run.loop("score", body, start, len(sizes), cost=cost, log=lambda i, o: {"part": "score", **o})
    return jax.tree.map(jnp.asarray, state.params)


def _chunks(steps: int) -> list[int]:
    return [_CHUNK] * (steps // _CHUNK) + ([steps % _CHUNK] if steps % _CHUNK else [])
