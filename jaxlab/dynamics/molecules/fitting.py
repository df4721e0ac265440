r"""Training of the LD-FPG autoencoder: the encoder with a linear head first, then, frozen, the decoder.

The encoder learns ``|W E_a(x) + b - x_a|^2`` and keeps no head; the decoder learns the mean squared error of the
coordinates from pooled latents. On a share of its batches the decoder may also learn the dihedrals: their mean squared
error, and the Jensen-Shannon divergence of their histograms.

Reference: Sengar et al., arXiv 2509.02196. Deviations:

1. Batches are drawn with replacement.
2. The histogram term has soft bins (von Mises kernels, 36 of them): hard counts, as in the paper's code, have no
   gradient.
3. Nearest neighbours are found once and stored (k integers an atom), not in every step.

Example::

    molecule = prepare_frames(frames)                                # aligned, with neighbours
    state = start_encoder(key, settings)
    state, losses = continue_encoder(state, molecule, key, settings, steps=1000)
    autoencoder = freeze_encoder(state, molecule, settings)
    z = encode(autoencoder, frames)
    state = start_decoder(key, autoencoder, settings)
    state, losses = continue_decoder(state, autoencoder, molecule, z, key, settings, steps=1000)
    autoencoder = freeze_decoder(autoencoder, state)
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, Real

from jaxlab.dynamics.latent.ensembles import jensen_shannon
from jaxlab.dynamics.latent.training import Loss, TrainingState, initial_state, train
from jaxlab.dynamics.molecules.alignment import align
from jaxlab.dynamics.molecules.autoencoder import (
    Autoencoder,
    AutoencoderSettings,
    decode_frames,
    embed_atoms,
    encode,
    init_decoder,
    init_encoder,
    pool_matrices,
)
from jaxlab.dynamics.molecules.geometry import dihedrals
from jaxlab.dynamics.molecules.graph import nearest_neighbors, neighbor_laplacian
from jaxlab.dynamics.reduced_rank import check_finite, real_array

__all__ = [
    "TrainingFrames",
    "continue_decoder",
    "continue_encoder",
    "fit_autoencoder",
    "freeze_decoder",
    "freeze_encoder",
    "prepare_frames",
    "start_decoder",
    "start_encoder",
]

_DEFAULTS = AutoencoderSettings()
_BINS, _CONCENTRATION = 36, 30.0


class TrainingFrames(NamedTuple):
    """Attributes:
    x: aligned frames.
    neighbors: their graphs.
    reference: what they are aligned to, centred.
    residues: number of the residue of each atom.
    """

    x: Float[Array, "frames n 3"]
    neighbors: Int[Array, "frames n k"]
    reference: Float[Array, "n 3"]
    residues: Int[np.ndarray, " n"]


def prepare_frames(
    frames: Real[Array | np.ndarray, "frames n 3"],
    *,
    residues: Sequence[int] | Int[np.ndarray, " n"] | None = None,
    settings: AutoencoderSettings = _DEFAULTS,
) -> TrainingFrames:
    """Align frames to the first one, and find their neighbours.

    Args:
      frames: training frames in angstrom.
      residues: number of the residue of each atom; ``None`` makes the molecule one residue.
      settings: for k.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: no frame, values that are not finite, fewer than k + 1 atoms, another number of residues.
    """
    x = real_array("frames", frames, "[frame, atom, 3]", batch=False)
    if len(x) == 0 or x.shape[2] != 3:
        raise ValueError(f"frames must be [frame, atom, 3] with at least one frame, got shape {x.shape}")
    check_finite("frames", x)
    number = np.zeros(x.shape[1], np.int32) if residues is None else np.asarray(residues)
    if number.shape != (x.shape[1],):
        raise ValueError(f"one residue for each of the {x.shape[1]} atoms is needed, got shape {number.shape}")
    reference = x[0] - x[0].mean(0)
    aligned = align(x, reference)
    return TrainingFrames(aligned, nearest_neighbors(aligned, settings.neighbors), reference, number)


def start_encoder(key: Key[Array, ""], settings: AutoencoderSettings = _DEFAULTS) -> TrainingState:
    """A fresh encoder."""
    params, statistics = init_encoder(key, settings)
    return initial_state(params, _adam(settings.encoder_learning_rate), statistics=statistics)


def continue_encoder(
    state: TrainingState,
    frames: TrainingFrames,
    key: Key[Array, ""],
    settings: AutoencoderSettings = _DEFAULTS,
    *,
    steps: int,
) -> tuple[TrainingState, Float[Array, " steps"]]:
    """Train the encoder for some steps; the loss is in square angstrom, summed over x, y, z and averaged over atoms."""
    return train(
        state,
        (frames.x, frames.neighbors),
        key,
        loss=_encoder_loss,
        optimizer=_adam(settings.encoder_learning_rate),
        steps=steps,
        batch_size=settings.batch_size,
    )


def freeze_encoder(
    state: TrainingState, frames: TrainingFrames, settings: AutoencoderSettings = _DEFAULTS
) -> Autoencoder:
    """An autoencoder that encodes, with a decoder still to come."""
    rows, columns = pool_matrices(settings, frames.residues)
    neighbors = nearest_neighbors(frames.reference, settings.neighbors)
    embedding = _embed(state.params, state.statistics, frames.reference, neighbors)
    return Autoencoder(
        encoder=state.params,
        encoder_statistics=state.statistics,
        decoder=None,
        decoder_statistics=None,
        reference=frames.reference,
        reference_embedding=embedding,
        rows=jnp.asarray(rows),
        columns=jnp.asarray(columns),
        neighbors=settings.neighbors,
    )


def start_decoder(
    key: Key[Array, ""], autoencoder: Autoencoder, settings: AutoencoderSettings = _DEFAULTS
) -> TrainingState:
    """A fresh decoder, whose last bias starts at the mean position of the atoms."""
    params, statistics = init_decoder(key, settings, autoencoder.width)
    return initial_state(params, _adam(settings.decoder_learning_rate), statistics=statistics)


def continue_decoder(
    state: TrainingState,
    autoencoder: Autoencoder,
    frames: TrainingFrames,
    z: Real[Array | np.ndarray, "frames d"],
    key: Key[Array, ""],
    settings: AutoencoderSettings = _DEFAULTS,
    *,
    steps: int,
    quadruples: Int[np.ndarray, "q 4"] | Sequence[Sequence[int]] | None = None,
) -> tuple[TrainingState, Float[Array, " steps"]]:
    """Train the decoder for some steps; the loss is in square angstrom.

    Args:
      state: of the training.
      autoencoder: with its encoder frozen.
      frames: of the training.
      z: their latents.
      key: of the batches.
      settings: of the training.
      steps: to make.
      quadruples: dihedrals to learn, where the settings give them a weight.

    Raises:
      ValueError: a weight for dihedrals without any, other latents than frames.
    """
    if len(z) != len(frames.x) or z.shape[1] != autoencoder.width:
        raise ValueError(f"latents must be {[len(frames.x), autoencoder.width]}, got {list(z.shape)}")
    weights = (settings.dihedral_weight, settings.histogram_weight, settings.dihedral_share)
    if any(weights[:2]) and quadruples is None:
        raise ValueError("a weight for dihedrals needs their quadruples of atoms")
    chosen = tuple(map(tuple, np.asarray(quadruples).tolist())) if any(weights[:2]) else ()
    # The embedding rides along as a statistic: it is the same for all batches.
    state = state._replace(statistics=(state.statistics, autoencoder.reference_embedding))
    state, losses = train(
        state,
        (jnp.asarray(z), frames.x),
        key,
        loss=_decoder_loss(chosen, weights),
        optimizer=_adam(settings.decoder_learning_rate),
        steps=steps,
        batch_size=settings.batch_size,
    )
    return state._replace(statistics=state.statistics[0]), losses


def freeze_decoder(autoencoder: Autoencoder, state: TrainingState) -> Autoencoder:
    """The autoencoder with its decoder."""
    return dataclasses.replace(autoencoder, decoder=state.params, decoder_statistics=state.statistics)


def fit_autoencoder(
    key: Key[Array, ""],
    frames: Real[Array | np.ndarray, "frames n 3"],
    settings: AutoencoderSettings = _DEFAULTS,
    *,
    residues: Sequence[int] | Int[np.ndarray, " n"] | None = None,
    encoder_steps: int = 3000,
    decoder_steps: int = 4000,
    quadruples: Int[np.ndarray, "q 4"] | Sequence[Sequence[int]] | None = None,
) -> Autoencoder:
    """Encoder and decoder in one call, each trained as one compiled program.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: as in `prepare_frames` and `continue_decoder`.
    """
    keys = jax.random.split(key, 4)
    molecule = prepare_frames(frames, residues=residues, settings=settings)
    state, _ = continue_encoder(start_encoder(keys[0], settings), molecule, keys[1], settings, steps=encoder_steps)
    autoencoder = freeze_encoder(state, molecule, settings)
    z = encode(autoencoder, molecule.x)
    state, _ = continue_decoder(
        start_decoder(keys[2], autoencoder, settings),
        autoencoder,
        molecule,
        z,
        keys[3],
        settings,
        steps=decoder_steps,
        quadruples=quadruples,
    )
    return freeze_decoder(autoencoder, state)


@jax.jit
def _embed(params: Any, statistics: Any, x: Array, neighbors: Array) -> Array:
    return embed_atoms(params, statistics, x, neighbor_laplacian(neighbors))[0]


@functools.cache
def _adam(learning_rate: float) -> optax.GradientTransformation:
    return optax.adam(learning_rate)


def _encoder_loss(params: Any, statistics: Any, batch: Any, _: Array) -> tuple[Array, Any]:
    x, neighbors = batch
    embedding, statistics = embed_atoms(params, statistics, x, neighbor_laplacian(neighbors), training=True)
    predicted = embedding @ params["head"]["kernel"] + params["head"]["bias"]
    return jnp.mean(jnp.sum((predicted - x) ** 2, axis=-1)), statistics


@functools.cache
def _decoder_loss(quadruples: tuple[tuple[int, ...], ...], weights: tuple[float, float, float]) -> Loss:
    angle_weight, histogram_weight, share = weights

    def loss(params: Any, carried: Any, batch: Any, key: Array) -> tuple[Array, Any]:
        statistics, reference_embedding = carried
        z, x = batch
        predicted, statistics = decode_frames(params, statistics, z, reference_embedding, training=True)
        value = jnp.mean(jnp.sum((predicted - x) ** 2, axis=-1))
        if quadruples:

            def of_dihedrals() -> Array:
                found, wanted = dihedrals(predicted, quadruples), dihedrals(x, quadruples)
                difference = jnp.arctan2(jnp.sin(found - wanted), jnp.cos(found - wanted))
                apart = jax.vmap(jensen_shannon, in_axes=1)(_soft_histogram(found), _soft_histogram(wanted))
                return angle_weight * jnp.mean(difference**2) + histogram_weight * jnp.mean(apart)

            value += jax.lax.cond(jax.random.uniform(key) < share, of_dihedrals, lambda: jnp.zeros(()))
        return value, (statistics, jax.lax.stop_gradient(reference_embedding))

    return loss


def _soft_histogram(angles: Float[Array, "frames q"]) -> Float[Array, "bins q"]:
    centres = (jnp.arange(_BINS) + 0.5) * (2 * jnp.pi / _BINS) - jnp.pi
    weights = jax.nn.softmax(_CONCENTRATION * jnp.cos(angles[..., None] - centres), axis=-1)
    return weights.sum(0).T
