r"""LD-FPG: a graph encoder of all-atom frames, pooling to one latent vector, and a decoder of each atom.

An aligned frame becomes an embedding of each atom by four Chebyshev convolutions on its own nearest-neighbour graph,

.. math::
    x_1 = BN(\mathrm{leaky}(\mathrm{Cheb}\, x)), \; x_2 = BN(\mathrm{leaky}(\mathrm{Cheb}\, x_1)), \;
    x_3 = BN(\mathrm{relu}(\mathrm{Cheb}\, x_2)), \; E_a = x_4 / |x_4|, \; x_4 = \mathrm{Cheb}\, x_3,

the embedding is pooled to ``z`` (`jaxlab.dynamics.molecules.pooling`), and a perceptron with batch normalisation maps
``[E_a(\text{reference}), z]`` to the coordinates of atom a. Both use the running statistics of their training outside
of it, so that a frame decodes alone as it does within a rollout.

Reference: Sengar et al., arXiv 2509.02196, and LD-FPG, "Generative Modeling of Full-Atom Protein Conformations using
Latent Diffusion on Graph Embeddings" (NeurIPS 2025). Deviations:

1. Frames are centred, for the reference is.
2. The first layer of the decoder multiplies the reference once and the latent once, not their concatenation for every
   atom of every frame: the same numbers.
3. An atom whose last features are all zero embeds to zero and not to NaN.

Training is `jaxlab.dynamics.molecules.fitting`.

Example::

    autoencoder = fit_autoencoder(key, frames, settings)
    z = encode(autoencoder, frames)                                  # [frames, H * W], numpy
    x = decode(autoencoder, z)                                       # [frames, atoms, 3], numpy
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree, Real

from jaxlab.dynamics.latent.perceptron import init_perceptron
from jaxlab.dynamics.molecules.alignment import align
from jaxlab.dynamics.molecules.chebyshev import chebyshev_convolution, init_chebyshev
from jaxlab.dynamics.molecules.graph import Laplacian, nearest_neighbors, neighbor_laplacian
from jaxlab.dynamics.molecules.pooling import adaptive_pool_matrix, residue_pool_matrix
from jaxlab.dynamics.reduced_rank import check_finite, real_array

__all__ = [
    "Autoencoder",
    "AutoencoderSettings",
    "decode",
    "decode_frames",
    "embed_atoms",
    "encode",
    "encode_frames",
    "init_decoder",
    "init_encoder",
    "pool_matrices",
]

_EPSILON, _MOMENTUM = 1e-5, 0.1
# Rows of frames x atoms worked on at once outside training: 2^17 rows of 128 floats are 64 MiB a layer.
_ROW_BUDGET = 1 << 17


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoencoderSettings:
    """Sizes and training. Defaults are the paper's.

    Attributes:
      hidden_size: channels h of the embedding.
      order: of the Chebyshev polynomials.
      neighbors: k of the graph.
      pooled: H and W; with ``pooling="residue"`` H rows for each residue.
      pooling: of the whole embedding, or of each residue.
      decoder_layers: linear layers of the decoder.
      decoder_width: of its hidden layers.
      encoder_learning_rate: of Adam.
      decoder_learning_rate: of Adam.
      batch_size: frames of a batch.
      dihedral_weight: of the mean squared error of dihedrals, on a share of the batches; 0 for none.
      histogram_weight: of the divergence of their histograms, likewise.
      dihedral_share: that share.
    """

    hidden_size: int = 8
    order: int = 4
    neighbors: int = 4
    pooled: tuple[int, int] = (50, 2)
    pooling: Literal["blind", "residue"] = "blind"
    decoder_layers: int = 12
    decoder_width: int = 128
    encoder_learning_rate: float = 1e-4
    decoder_learning_rate: float = 3e-4
    batch_size: int = 16
    dihedral_weight: float = 0.0
    histogram_weight: float = 0.0
    dihedral_share: float = 0.1

    def __post_init__(self) -> None:
        for name in ("hidden_size", "order", "neighbors", "decoder_layers", "decoder_width", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(self.pooled) != 2 or min(self.pooled) < 1:
            raise ValueError(f"pooled must be two sizes of at least 1, got {self.pooled}")
        if self.pooling not in ("blind", "residue"):
            raise ValueError(f"pooling must be 'blind' or 'residue', got {self.pooling!r}")
        for name in ("encoder_learning_rate", "decoder_learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not (self.dihedral_weight >= 0 and self.histogram_weight >= 0 and 0 < self.dihedral_share <= 1):
            raise ValueError("weights of the dihedral loss must be >= 0 and its share in (0, 1]")


@flax.struct.dataclass
class Autoencoder:
    """A trained encoder and decoder of one molecule.

    Attributes:
      encoder: parameters.
      encoder_statistics: running means and variances.
      decoder: parameters.
      decoder_statistics: running means and variances.
      reference: the frame that all are aligned to, centred.
      reference_embedding: its embedding.
      rows: the pooling matrix P_H.
      columns: the pooling matrix P_W.
      neighbors: k of the graph.
    """

    encoder: PyTree
    encoder_statistics: PyTree
    decoder: PyTree
    decoder_statistics: PyTree
    reference: Float[Array, "n 3"]
    reference_embedding: Float[Array, "n h"]
    rows: Float[Array, "p n"]
    columns: Float[Array, "w h"]
    neighbors: int = flax.struct.field(pytree_node=False, default=4)

    @property
    def width(self) -> int:
        """Length of a latent."""
        return self.rows.shape[0] * self.columns.shape[0]


def pool_matrices(
    settings: AutoencoderSettings, residues: Int[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, "p n"], Float[np.ndarray, "w h"]]:
    """``P_H`` and ``P_W`` for a molecule with these residues, one an atom."""
    height, width = settings.pooled
    blind = settings.pooling == "blind"
    rows = adaptive_pool_matrix(len(residues), height) if blind else residue_pool_matrix(residues, height)
    return rows, adaptive_pool_matrix(settings.hidden_size, width)


@functools.partial(jax.jit, static_argnames="settings")
def init_encoder(key: Key[Array, ""], settings: AutoencoderSettings) -> tuple[PyTree, PyTree]:
    """Fresh parameters, the linear head of the pre-training among them, and statistics."""
    h = settings.hidden_size
    keys = jax.random.split(key, 5)
    widths = [3, h, h, h, h]
    params = {
        "convolutions": [
            init_chebyshev(keys[k], widths[k], widths[k + 1], order=settings.order) for k in range(len(widths) - 1)
        ],
        "norms": [_norm(h) for _ in range(3)],
        "head": init_perceptron(keys[4], [h, 3])[0],
    }
    return params, [_statistics(h) for _ in range(3)]


@functools.partial(jax.jit, static_argnames=("settings", "latent_width"))
def init_decoder(key: Key[Array, ""], settings: AutoencoderSettings, latent_width: int) -> tuple[PyTree, PyTree]:
    """Fresh parameters and statistics."""
    hidden = [settings.decoder_width] * (settings.decoder_layers - 1)
    layers = init_perceptron(key, [settings.hidden_size + latent_width, *hidden, 3])
    return {"layers": layers, "norms": [_norm(w) for w in hidden]}, [_statistics(w) for w in hidden]


def embed_atoms(
    params: PyTree,
    statistics: PyTree,
    x: Float[Array, "*frames n 3"],
    laplacian: Laplacian,
    *,
    training: bool = False,
) -> tuple[Float[Array, "*frames n h"], PyTree]:
    """Embeddings of unit length, and the statistics, updated in training."""
    activations: tuple[Callable[[Array], Array], ...] = (_leaky, _leaky, jax.nn.relu)
    updated = []
    for convolution, norm, running, activation in zip(
        params["convolutions"], params["norms"], statistics, activations, strict=False
    ):
        x = activation(chebyshev_convolution(convolution, x, laplacian))
        x, running = _batch_norm(norm, running, x, training)
        updated.append(running)
    x = chebyshev_convolution(params["convolutions"][-1], x, laplacian)
    squared = jnp.sum(x**2, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(squared, 1e-24)), updated


def decode_frames(
    params: PyTree,
    statistics: PyTree,
    z: Float[Array, "*frames d"],
    reference_embedding: Float[Array, "n h"],
    *,
    training: bool = False,
) -> tuple[Float[Array, "*frames n 3"], PyTree]:
    """Coordinates of all atoms, and the statistics, updated in training."""
    first, *rest = params["layers"]
    channels = reference_embedding.shape[1]
    of_atoms = reference_embedding @ first["kernel"][:channels]
    of_frames = z @ first["kernel"][channels:]
    x = of_atoms + of_frames[..., None, :] + first["bias"]
    updated = []
    for layer, norm, running in zip(rest, params["norms"], statistics, strict=True):
        x, running = _batch_norm(norm, running, x, training)
        updated.append(running)
        x = jax.nn.relu(x) @ layer["kernel"] + layer["bias"]
    return x, updated


@jax.jit
def encode_frames(
    autoencoder: Autoencoder, x: Float[Array, "frames n 3"], neighbors: Int[Array, "frames n k"]
) -> Float[Array, "frames d"]:
    """Latents of aligned frames with their graphs, all at once; `encode` works in chunks."""
    embedding, _ = embed_atoms(autoencoder.encoder, autoencoder.encoder_statistics, x, neighbor_laplacian(neighbors))
    return pool(embedding, autoencoder.rows, autoencoder.columns)


def pool(
    embedding: Float[Array, "*frames n h"], rows: Float[Array, "p n"], columns: Float[Array, "w h"]
) -> Float[Array, "*frames d"]:
    """``vec(P_H E P_W^T)``."""
    pooled = rows @ (embedding @ columns.T)
    return pooled.reshape(*pooled.shape[:-2], -1)


def encode(
    autoencoder: Autoencoder, x: Real[Array | np.ndarray, "frames n 3"], *, chunk: int | None = None
) -> Float[np.ndarray, "frames d"]:
    """Align and encode frames, in chunks of a few.

    Args:
      autoencoder: of the molecule.
      x: coordinates in angstrom.
      chunk: frames at once; ``None`` takes as many as fill 64 MiB a layer.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: another number of atoms, values that are not finite, a chunk below 1.
    """
    atoms = len(autoencoder.reference)
    if np.ndim(x) != 3 or np.shape(x)[1:] != (atoms, 3):
        raise ValueError(f"frames must be [frame, {atoms} atoms, 3], as the autoencoder's, got shape {np.shape(x)}")
    return _in_chunks(_align_and_encode, autoencoder, x, chunk, name="frames")


def decode(
    autoencoder: Autoencoder, z: Real[Array | np.ndarray, "frames d"], *, chunk: int | None = None
) -> Float[np.ndarray, "frames n 3"]:
    """Coordinates of latents, in chunks of frames.

    Memory is that of the coordinates and of one chunk, whatever the number of frames: three layers of ``chunk * atoms``
    rows at most.

    Args:
      autoencoder: of the molecule.
      z: latents.
      chunk: frames at once; ``None`` takes as many as fill 64 MiB a layer of 128.

    Raises:
      TypeError: values that are no real numbers.
      ValueError: latents of another width than H x W, values that are not finite, a chunk below 1.
    """
    if np.ndim(z) != 2 or np.shape(z)[1] != autoencoder.width:
        raise ValueError(f"latents must be [frame, {autoencoder.width}], as the pooling gives, got {np.shape(z)}")
    return _in_chunks(_decode, autoencoder, z, chunk, name="latents")


def _in_chunks(
    function: Callable[[Autoencoder, Array], Array],
    autoencoder: Autoencoder,
    values: Any,
    chunk: int | None,
    *,
    name: str,
) -> np.ndarray:
    atoms = len(autoencoder.reference)
    chunk = max(1, _ROW_BUDGET // atoms) if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if len(values) == 0:
        raise ValueError("there is no frame")
    chunk = min(chunk, len(values))
    out: np.ndarray | None = None
    for start in range(0, len(values), chunk):
        part = np.asarray(values[start : start + chunk])
        # The last chunk is filled up, so that one compiled program serves all.
        padded = real_array(name, np.concatenate([part, np.repeat(part[-1:], chunk - len(part), axis=0)]), "[frame, -]")
        if not np.all(np.isfinite(padded)):
            check_finite(f"{name} from {start} on", jnp.asarray(part))
        found = np.asarray(function(autoencoder, padded))[: len(part)]
        # Filled in place: a list of all chunks and their concatenation would hold the trajectory twice.
        out = np.empty((len(values), *found.shape[1:]), found.dtype) if out is None else out
        out[start : start + len(part)] = found
    assert out is not None
    return out


def _align_and_encode(autoencoder: Autoencoder, x: Array) -> Array:
    x = align(x, autoencoder.reference)
    return encode_frames(autoencoder, x, nearest_neighbors(x, autoencoder.neighbors))


@jax.jit
def _decode(autoencoder: Autoencoder, z: Array) -> Array:
    return decode_frames(autoencoder.decoder, autoencoder.decoder_statistics, z, autoencoder.reference_embedding)[0]


_leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.01)


def _norm(width: int) -> dict[str, Array]:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _statistics(width: int) -> dict[str, Array]:
    return {"mean": jnp.zeros(width), "variance": jnp.ones(width)}


def _batch_norm(norm: PyTree, running: PyTree, x: Array, training: bool) -> tuple[Array, PyTree]:
    if training:
        axes = tuple(range(x.ndim - 1))
        mean, variance = x.mean(axes), x.var(axes)
        count = x.size // x.shape[-1]
        unbiased = variance * count / max(count - 1, 1)
        new = {"mean": mean, "variance": unbiased}
        running = jax.tree.map(
            lambda old, now: (1 - _MOMENTUM) * old + _MOMENTUM * jax.lax.stop_gradient(now), running, new
        )
    else:
        mean, variance = running["mean"], running["variance"]
    return (x - mean) * (jax.lax.rsqrt(variance + _EPSILON) * norm["scale"]) + norm["bias"], running


__all__ += ["pool"]
