"""All-atom molecular frames: alignment, graphs, the LD-FPG autoencoder, and what trajectories are judged by.

Sengar et al., arXiv 2509.02196. Latents of the autoencoder are propagated by `jaxlab.dynamics.latent`::

    trajectory = read_trajectory("top.pdb", "md.dcd")
    autoencoder = fit_autoencoder(jax.random.key(0), trajectory.frames, settings, residues=trajectory.residues)
    z = encode(autoencoder, trajectory.frames)
    ...
    write_trajectory("rollout.dcd", trajectory, decode(autoencoder, rolled))
"""

from jaxlab.dynamics.molecules.alignment import align, root_mean_square_deviation
from jaxlab.dynamics.molecules.autoencoder import Autoencoder, AutoencoderSettings, decode, encode
from jaxlab.dynamics.molecules.chebyshev import chebyshev_convolution, init_chebyshev
from jaxlab.dynamics.molecules.fitting import (
    TrainingFrames,
    continue_decoder,
    continue_encoder,
    fit_autoencoder,
    freeze_decoder,
    freeze_encoder,
    prepare_frames,
    start_decoder,
    start_encoder,
)
from jaxlab.dynamics.molecules.geometry import dihedrals, periodic_features
from jaxlab.dynamics.molecules.graph import graph_laplacian, nearest_neighbors, neighbor_laplacian, to_jraph
from jaxlab.dynamics.molecules.pooling import adaptive_pool_matrix, residue_pool_matrix
from jaxlab.dynamics.molecules.structure import (
    contact_correlation,
    contact_frequencies,
    failure_step,
    lddt,
    root_mean_square_fluctuation,
)
from jaxlab.dynamics.molecules.trajectories import Trajectory, read_trajectory, trajectory_of, write_trajectory

__all__ = [
    "Autoencoder",
    "AutoencoderSettings",
    "TrainingFrames",
    "Trajectory",
    "adaptive_pool_matrix",
    "align",
    "chebyshev_convolution",
    "contact_correlation",
    "contact_frequencies",
    "continue_decoder",
    "continue_encoder",
    "decode",
    "dihedrals",
    "encode",
    "failure_step",
    "fit_autoencoder",
    "freeze_decoder",
    "freeze_encoder",
    "graph_laplacian",
    "init_chebyshev",
    "lddt",
    "nearest_neighbors",
    "neighbor_laplacian",
    "periodic_features",
    "prepare_frames",
    "read_trajectory",
    "residue_pool_matrix",
    "root_mean_square_deviation",
    "root_mean_square_fluctuation",
    "start_decoder",
    "start_encoder",
    "to_jraph",
    "trajectory_of",
    "write_trajectory",
]
