"""Simulated systems with known spectra: shifts of an oscillator, means of two, and the rate of the estimate.

Two damped oscillators, one a channel, are sampled with a little noise and seen through a delay window of a quarter of a
second on a fixed grid of lags, so that all sampling rates share one feature space.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab import dynamics
from jaxlab.dynamics import LowRankOperator, SpectralGrassmannMetric, Spectrum

__all__ = [
    "BARYCENTER_ENDS",
    "SHIFTS",
    "barycenter",
    "rate_error",
    "sampling_distances",
    "shift_distances",
    "violation_of_axioms",
]

HERTZ = (1 / (2 * np.pi), 1 / (2 * np.pi))  # eigenvalues counted in cycles, the unit of the eta heuristic
REFERENCE_RATE = 200
SECONDS = 10.0
WINDOW = 0.25
NOISE = 1e-3
RANK = 4
LAGS = tuple(np.linspace(0.0, WINDOW, 51).tolist())

# Frequency (Hz) and decay (1/s) of the second oscillator, rotation (rad) of the channels. Past pi/4 a rotation swaps
# the partners of the atoms and the distance falls again, so it stops before.
_STILL = {"frequency": 1.0, "decay": 0.05, "rotation": 0.0}
SHIFTS = {
    "frequency": np.linspace(1.0, 2.0, 6),
    "decay": 0.05 * 2.0 ** np.arange(6),
    "rotation": np.linspace(0.0, 0.75, 6),
}

BARYCENTER_ENDS = ((1.0, 0.05), (1.6, 0.40))  # frequency and decay of the second oscillator of both ends
BARYCENTER_RATE = 100

_paired_distances = jax.jit(jax.vmap(dynamics.spectral_grassmann_distance))


def shift_distances(key: Array, shift: str, repeats: int, i: int) -> dict[str, np.ndarray]:
    """Distances of shifted systems to the unshifted one at the ``i``-th value of a shift, method by method."""
    return _distances(key, _STILL | {shift: float(SHIFTS[shift][i])}, repeats=repeats, rate=REFERENCE_RATE)


def sampling_distances(key: Array, rate: int, repeats: int) -> dict[str, np.ndarray]:
    """Distances of one system sampled at ``rate`` to itself sampled at 200 Hz."""
    return _distances(key, _STILL, repeats=repeats, rate=rate)


def barycenter(key: Array, fraction: float, steps: int) -> dict[str, np.ndarray]:
    """Frequency and decay of the faster oscillation in three means at ``fraction`` of the way between two systems.

    Also the objective of the Frechet mean and the least one that any mean could have, ``g (1 - g) d(A, B)^2``.
    """
    frequency, decay = jnp.array(BARYCENTER_ENDS).T
    operators = _operators(
        key, {"frequency": frequency, "decay": decay, "rotation": 0.0}, repeats=2, rate=BARYCENTER_RATE
    )
    dt = 1 / BARYCENTER_RATE
    systems = dynamics.generator_spectrum(operators, dt=dt)
    first, second = (jax.tree.map(lambda leaf, k=k: leaf[k], systems) for k in range(2))
    matrices = operators.matrix
    weights = jnp.array([1 - fraction, fraction])
    metric = SpectralGrassmannMetric(eta=0.5, eigenvalue_scale=HERTZ)
    mean, info = dynamics.frechet_mean(systems, weights, metric, steps=steps)
    average = dynamics.generator_spectrum(dynamics.hilbert_schmidt_mean(matrices, weights), dt=dt, rank=RANK)
    constrained, _ = dynamics.constrained_hilbert_schmidt_mean(
        matrices, weights, initial=dynamics.interpolate(first, second, fraction, metric), dt=dt, steps=steps
    )
    distance = dynamics.spectral_grassmann_distance(first, second, metric)
    return {
        "ends": np.stack([_fastest(first), _fastest(second)]),
        "sgot": _fastest(mean),
        "hilbert_schmidt": _fastest(average),
        "constrained_hilbert_schmidt": _fastest(constrained),
        "objective": np.asarray(info.objective[info.best_step]),
        "bound": np.asarray(fraction * (1 - fraction) * distance**2),
    }


def rate_error(key: Array, samples: int, longest: int, repeats: int) -> np.ndarray:
    """Mean error of the estimated distance of two VAR(1) processes in R^4 from ``samples`` samples each."""
    systems = _autoregressions()
    first, second = (dynamics.generator_spectrum(matrix) for matrix in systems)
    truth = dynamics.spectral_grassmann_distance(first, second)
    spectra = [
        dynamics.trajectory_spectrum(
            _simulate_autoregression(k, matrix, longest, repeats),
            4,
            regularization=0.0,
            lengths=jnp.full(repeats, samples),
        )
        for k, matrix in zip(jax.random.split(key), systems, strict=True)
    ]
    return np.asarray(jnp.mean(jnp.abs(_paired_distances(*spectra) - truth)))


def violation_of_axioms(key: Array, count: int) -> np.ndarray:
    """The worst asymmetry, self-distance or excess over the triangle inequality among random oscillators."""
    noise, values = jax.random.split(key)
    lowest, highest = jnp.array([0.7, 0.05, 0.0]), jnp.array([3.0, 1.0, 3.0])
    drawn = jax.random.uniform(values, (count, 3), minval=lowest, maxval=highest).T
    parameters = dict(zip(_STILL, drawn, strict=True))
    operators = _operators(noise, parameters, repeats=count, rate=REFERENCE_RATE)
    systems = dynamics.generator_spectrum(operators, dt=1 / REFERENCE_RATE)
    metric = SpectralGrassmannMetric(eta=dynamics.eta_heuristic(REFERENCE_RATE), eigenvalue_scale=HERTZ)
    d = dynamics.spectral_grassmann_distance_matrix(systems, systems, metric)
    excess = d[:, None, :] - d[:, :, None] - d[None, :, :]  # d(i, k) - d(i, j) - d(j, k)
    return np.asarray(jnp.max(jnp.array([jnp.abs(d - d.T).max(), jnp.diag(d).max(), excess.max()])))


@partial(jax.jit, static_argnames=("repeats", "rate"))
def _operators(key: Array, parameters: Mapping[str, float | Array], *, repeats: int, rate: int) -> LowRankOperator:
    moving = [jnp.broadcast_to(parameters[name], (repeats,)) for name in _STILL]
    trajectories = jax.vmap(partial(_oscillators, rate=rate))(jax.random.split(key, repeats), *moving)
    return dynamics.trajectory_operator(trajectories, RANK, dt=1 / rate, lags=LAGS)


def _oscillators(key: Array, frequency: Array, decay: Array, rotation: Array, *, rate: int) -> Float[Array, "t 2"]:
    t = jnp.arange(int(SECONDS * rate)) / rate
    slow = jnp.exp(-0.05 * t) * jnp.sin(2 * jnp.pi * 0.5 * t)
    fast = jnp.exp(-decay * t) * jnp.sin(2 * jnp.pi * frequency * t)
    cosine, sine = jnp.cos(rotation), jnp.sin(rotation)
    channels = jnp.stack([cosine * slow - sine * fast, sine * slow + cosine * fast], axis=1)
    return channels + NOISE * jax.random.normal(key, channels.shape)


def _distances(
    key: Array, parameters: Mapping[str, float | Array], *, repeats: int, rate: int
) -> dict[str, np.ndarray]:
    """From systems that are still and sampled at 200 Hz to moved ones sampled at ``rate``."""
    reference, moved = jax.random.split(key)
    # One after the other: two regressions inside one jit can deadlock XLA's CPU thread pool (seen with jaxlib 0.10.2).
    a = jax.block_until_ready(_operators(reference, _STILL, repeats=repeats, rate=REFERENCE_RATE))
    b = jax.block_until_ready(_operators(moved, parameters, repeats=repeats, rate=rate))
    return {name: np.asarray(values) for name, values in _compare(a, b, rate).items()}


@jax.jit
def _compare(a: LowRankOperator, b: LowRankOperator, rate: int | Array) -> dict[str, Array]:
    steps = 1 / REFERENCE_RATE, 1 / rate
    spectra = [dynamics.generator_spectrum(o, dt=dt) for o, dt in zip((a, b), steps, strict=True)]
    multipliers = [jnp.exp(s.eigenvalues * dt) for s, dt in zip(spectra, steps, strict=True)]

    def distances(eta: Array) -> Array:
        metric = SpectralGrassmannMetric(eta=eta, eigenvalue_scale=HERTZ)
        return jax.vmap(partial(dynamics.spectral_grassmann_distance, metric=metric))(*spectra)

    etas = jnp.array([dynamics.eta_heuristic(REFERENCE_RATE), 1.0, 0.0])
    return dict(zip(("sgot", "sot", "got"), jax.lax.map(distances, etas), strict=True)) | {
        "hilbert_schmidt": jax.vmap(dynamics.hilbert_schmidt_distance)(a, b),
        "operator_norm": jax.vmap(dynamics.operator_norm_distance)(a, b),
        "martin": jax.vmap(dynamics.martin_distance)(*multipliers),
    }


def _fastest(spectrum: Spectrum) -> np.ndarray:
    """Frequency in Hz and decay in 1/s."""
    value = spectrum.eigenvalues[jnp.argmax(spectrum.eigenvalues.imag)]
    return np.array([float(value.imag) / (2 * np.pi), -float(value.real)])


def _autoregressions() -> list[Float[Array, "4 4"]]:
    """Two stable processes with well separated eigenvalues in a skew basis."""
    found = []
    for seed, (modulus, angle, first, second) in enumerate([(0.9, 0.6, 0.7, -0.5), (0.8, 1.2, 0.6, -0.3)]):
        block = np.diag([0.0, 0.0, first, second])
        block[:2, :2] = modulus * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        basis = np.eye(4) + 0.2 * np.random.default_rng(seed).normal(size=(4, 4))
        found.append(jnp.asarray(basis @ block @ np.linalg.inv(basis)))
    return found


@partial(jax.jit, static_argnames=("steps", "repeats"))
def _simulate_autoregression(key: Array, matrix: Array, steps: int, repeats: int) -> Float[Array, "repeats steps 4"]:
    def step(state: Array, key: Array) -> tuple[Array, Array]:
        state = state @ matrix + jax.random.normal(key, state.shape)
        return state, state

    path = jax.lax.scan(step, jnp.zeros((repeats, 4)), jax.random.split(key, steps))[1]
    return path.swapaxes(0, 1)
