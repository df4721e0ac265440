"""Surrogate dynamics of any latent time series: three propagators, calibrated noise, rollouts, and how to judge them.

Sengar et al., arXiv 2509.02196, without the protein part (`jaxlab.dynamics.molecules`)::

    standardizer = fit_standardizer(z[:8000])
    u = standardizer.forward(z)
    train, held_out = snapshot_pairs(u[:7000]), snapshot_pairs(u[7000:8000])
    koopman = stabilize(fit_koopman(*train, rank=20, held_out=held_out))
    neural = fit_neural(jax.random.key(0), *train, held_out=held_out)
    found = rollout(neural, u[8000:8064], 10_000, key=jax.random.key(1))
    latents = standardizer.inverse(found.path)
"""

from jaxlab.dynamics.latent.controls import gaussian_samples, halves, shuffled
from jaxlab.dynamics.latent.diffusion import (
    DiffusionSchedule,
    DiffusionSettings,
    ancestral_samples,
    continue_diffusion,
    denoising_score,
    noise_network,
    score_parameters,
    start_diffusion,
)
from jaxlab.dynamics.latent.ensembles import (
    coordinate_divergence,
    histogram_divergence,
    histogram_divergence_2d,
    jensen_shannon,
)
from jaxlab.dynamics.latent.kinetics import TICA, autocorrelation, decorrelation_time, tica
from jaxlab.dynamics.latent.koopman import (
    KoopmanPropagator,
    dynamic_mode_decomposition,
    dynamic_modes,
    fit_koopman,
    relaxation_times,
    stabilize,
    stationary_covariance,
)
from jaxlab.dynamics.latent.langevin import LangevinPropagator, langevin_propagator, langevin_solve
from jaxlab.dynamics.latent.neural import (
    NeuralPropagator,
    NeuralSettings,
    NeuralState,
    continue_neural,
    finish_neural,
    fit_neural,
    one_step_error,
    start_neural,
)
from jaxlab.dynamics.latent.noise import noise_factor
from jaxlab.dynamics.latent.rollout import AdditivePropagator, Propagator, Rollout, rollout
from jaxlab.dynamics.latent.snapshots import snapshot_pairs
from jaxlab.dynamics.latent.standardizer import Standardizer, fit_standardizer
from jaxlab.dynamics.latent.training import TrainingState, train

__all__ = [
    "TICA",
    "AdditivePropagator",
    "DiffusionSchedule",
    "DiffusionSettings",
    "KoopmanPropagator",
    "LangevinPropagator",
    "NeuralPropagator",
    "NeuralSettings",
    "NeuralState",
    "Propagator",
    "Rollout",
    "Standardizer",
    "TrainingState",
    "ancestral_samples",
    "autocorrelation",
    "continue_diffusion",
    "continue_neural",
    "coordinate_divergence",
    "decorrelation_time",
    "denoising_score",
    "dynamic_mode_decomposition",
    "dynamic_modes",
    "finish_neural",
    "fit_koopman",
    "fit_neural",
    "fit_standardizer",
    "gaussian_samples",
    "halves",
    "histogram_divergence",
    "histogram_divergence_2d",
    "jensen_shannon",
    "langevin_propagator",
    "langevin_solve",
    "noise_factor",
    "noise_network",
    "one_step_error",
    "relaxation_times",
    "rollout",
    "score_parameters",
    "shuffled",
    "snapshot_pairs",
    "stabilize",
    "start_diffusion",
    "start_neural",
    "stationary_covariance",
    "tica",
    "train",
]
