"""Dynamical systems: Koopman operators learnt from trajectories, and an optimal-transport metric between them.

Surrogate dynamics of latent time series are in `jaxlab.dynamics.latent`, all-atom molecules in
`jaxlab.dynamics.molecules`.
"""

from jaxlab.dynamics.barycenter import (
    MeanInfo,
    constrained_hilbert_schmidt_mean,
    frechet_mean,
    interpolate,
    matched_mean,
)
from jaxlab.dynamics.ground_cost import GrassmannDistance, SpectralGrassmannMetric, ground_cost, similarity, unit_norm
from jaxlab.dynamics.operator_distances import (
    hilbert_schmidt_distance,
    hilbert_schmidt_mean,
    martin_distance,
    operator_norm_distance,
)
from jaxlab.dynamics.reduced_rank import (
    GaussianKernel,
    KernelOperator,
    LowRankOperator,
    delay_embedding,
    kernel_reduced_rank_regression,
    linear_kernel,
    reduced_rank_regression,
)
from jaxlab.dynamics.scaling import classical_scaling
from jaxlab.dynamics.spectral_grassmann import (
    Solver,
    eta_heuristic,
    pairwise_distances,
    spectral_grassmann_distance,
    spectral_grassmann_distance_matrix,
    spectral_grassmann_transport,
)
from jaxlab.dynamics.spectrum import (
    KernelSpectrum,
    Spectrum,
    biorthogonalize,
    eigenvector_condition,
    generator_spectrum,
    landmark_coordinates,
    to_operator,
    trajectory_operator,
    trajectory_spectrum,
)
from jaxlab.dynamics.transport import Transport, exact_transport, sinkhorn_transport

__all__ = [
    "GaussianKernel",
    "GrassmannDistance",
    "KernelOperator",
    "KernelSpectrum",
    "LowRankOperator",
    "MeanInfo",
    "Solver",
    "SpectralGrassmannMetric",
    "Spectrum",
    "Transport",
    "biorthogonalize",
    "classical_scaling",
    "constrained_hilbert_schmidt_mean",
    "delay_embedding",
    "eigenvector_condition",
    "eta_heuristic",
    "exact_transport",
    "frechet_mean",
    "generator_spectrum",
    "ground_cost",
    "hilbert_schmidt_distance",
    "hilbert_schmidt_mean",
    "interpolate",
    "kernel_reduced_rank_regression",
    "landmark_coordinates",
    "linear_kernel",
    "martin_distance",
    "matched_mean",
    "operator_norm_distance",
    "pairwise_distances",
    "reduced_rank_regression",
    "similarity",
    "sinkhorn_transport",
    "spectral_grassmann_distance",
    "spectral_grassmann_distance_matrix",
    "spectral_grassmann_transport",
    "to_operator",
    "trajectory_operator",
    "trajectory_spectrum",
    "unit_norm",
]
