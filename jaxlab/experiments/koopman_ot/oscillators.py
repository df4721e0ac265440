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
    "barycenter",
    "rate_error",
    "reference",
    "sampling_distances",
    "shift_distances",
    "shift_values",
    "violation_of_axioms",
]

HERTZ = (1 / (2 * np.pi), 1 / (2 * np.pi))  # eigenvalues counted in cycles, the unit of the eta heuristic
REFERENCE_RATE = 200
SECONDS = 10.0
WINDOW = 0.25
NOISE = 1e-3
RANK = 4
LAGS = tuple(np.linspace(0.0, WINDOW, 51).tolist())

# Frequency (Hz) and decay (1/s) of the second oscillator, rotation (rad) of the channels, and how much of the second
# oscillator's sine is replaced by a square wave.
_STILL = {"frequency": 1.0, "decay": 0.05, "rotation": 0.0, "squareness": 0.0}

BARYCENTER_ENDS = ((1.0, 0.05), (1.6, 0.40))  # frequency and decay of the second oscillator of both ends
BARYCENTER_RATE = 100


def reference(key: Array, repeats: int) -> LowRankOperator:
    """Operators of the system that is not shifted, sampled at 200 Hz, one for each draw of the noise."""
    return _operators(key, _STILL, repeats=repeats, rate=REFERENCE_RATE)


def shift_values(count: int) -> dict[str, np.ndarray]:
    """What the second oscillator or the channels are shifted to, from the unshifted value on."""
    return {
        "frequency": np.linspace(1.0, 2.0, count),
        "decay": np.geomspace(0.05, 1.6, count),
        # Past pi/4 a rotation swaps the partners of the atoms and the distance falls again.
        "rotation": np.linspace(0.0, 0.75, count),
        "squareness": np.linspace(0.0, 1.0, count),
    }


def shift_distances(key: Array, still: LowRankOperator, shift: str, value: float) -> dict[str, np.ndarray]:
    """Distances of systems shifted to a value to the `reference`, method by method."""
    moved = _STILL | {shift: value}
    return _distances(still, _operators(key, moved, repeats=len(still.core), rate=REFERENCE_RATE), REFERENCE_RATE)


def sampling_distances(key: Array, still: LowRankOperator, rate: int) -> dict[str, np.ndarray]:
    """Distances of the system sampled at ``rate`` to the `reference`."""
    return _distances(still, _operators(key, _STILL, repeats=len(still.core), rate=rate), rate)


def barycenter(key: Array, fraction: float, steps: int) -> dict[str, np.ndarray]:
    """Frequency and decay of the faster oscillation in three means at ``fraction`` of the way between two systems.

    Also the objective of the Frechet mean and the least one that any mean could have, ``g (1 - g) d(A, B)^2``.
    """
    frequency, decay = np.array(BARYCENTER_ENDS).T
    operators = _operators(key, _STILL | {"frequency": frequency, "decay": decay}, repeats=2, rate=BARYCENTER_RATE)
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
    # One after the other: two regressions inside one jit can hang (`jaxlab.dynamics.reduced_rank`).
    spectra = [
        jax.block_until_ready(_autoregression_spectra(k, matrix, samples, longest=longest, repeats=repeats))
        for k, matrix in zip(jax.random.split(key), _autoregressions(), strict=True)
    ]
    return np.asarray(_mean_error(*spectra, *_autoregressions()))


def violation_of_axioms(key: Array, count: int) -> np.ndarray:
    """The worst asymmetry, self-distance or excess over the triangle inequality among random oscillators."""
    noise, values = jax.random.split(key)
    drawn = np.asarray(jax.random.uniform(values, (3 * count,))).reshape(3, count)
    parameters = _STILL | {
        "frequency": 0.7 + 2.3 * drawn[0],
        "decay": 0.05 + 0.95 * drawn[1],
        "rotation": 3 * drawn[2],
    }
    return np.asarray(_violation(_operators(noise, parameters, repeats=count, rate=REFERENCE_RATE)))


def _operators(key: Array, parameters: Mapping[str, float | np.ndarray], *, repeats: int, rate: int) -> LowRankOperator:
    # Arrays of one shape and type whatever the caller has, so that one compilation serves all.
    moving = {name: jnp.asarray(np.broadcast_to(np.asarray(parameters[name], float), repeats)) for name in _STILL}
    # Apart from the regression: XLA on the CPU would fuse the delay window into its matrix products, five times slower.
    x, y = _snapshots(key, moving, rate=rate)
    return dynamics.reduced_rank_regression(x, y, RANK)


@partial(jax.jit, static_argnames="rate")
def _snapshots(key: Array, moving: dict[str, Array], *, rate: int) -> tuple[Array, Array]:
    trajectories = _oscillators(**{name: values[:, None] for name, values in moving.items()}, rate=rate)
    # Drawn flat: XLA compiles random bits of an array with a short last axis ten times slower on the CPU.
    noise = jax.random.normal(key, (trajectories.size,)).reshape(trajectories.shape)
    embedded = dynamics.delay_embedding(trajectories + NOISE * noise, LAGS, dt=1 / rate)
    return embedded[:, :-1], embedded[:, 1:]


def _oscillators(
    *, frequency: Array, decay: Array, rotation: Array, squareness: Array, rate: int
) -> Float[Array, "repeats t 2"]:
    t = jnp.arange(int(SECONDS * rate)) / rate
    slow = jnp.exp(-0.05 * t) * jnp.sin(2 * jnp.pi * 0.5 * t)
    wave = jnp.sin(2 * jnp.pi * frequency * t)
    fast = jnp.exp(-decay * t) * ((1 - squareness) * wave + squareness * jnp.sign(wave))
    cosine, sine = jnp.cos(rotation), jnp.sin(rotation)
    return jnp.stack([cosine * slow - sine * fast, sine * slow + cosine * fast], axis=-1)


def _distances(a: LowRankOperator, b: LowRankOperator, rate: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(values) for name, values in _compare(a, b, rate).items()}


@jax.jit
def _compare(a: LowRankOperator, b: LowRankOperator, rate: int | Array) -> dict[str, Array]:
    """From operators at 200 Hz to those at ``rate``."""
    steps = jnp.stack([jnp.asarray(1 / REFERENCE_RATE), 1 / rate])[:, None]
    both = jax.tree.map(lambda *factors: jnp.stack(factors), a, b)
    stacked = dynamics.generator_spectrum(both, dt=steps)
    spectra = [jax.tree.map(lambda leaf, k=k: leaf[k], stacked) for k in range(2)]
    multipliers = jnp.exp(stacked.eigenvalues * steps[..., None])

    def distances(eta: Array) -> Array:
        metric = SpectralGrassmannMetric(eta=eta, eigenvalue_scale=HERTZ)
        return jax.vmap(partial(dynamics.spectral_grassmann_distance, metric=metric))(*spectra)

    etas = jnp.array([dynamics.eta_heuristic(REFERENCE_RATE), 1.0, 0.0])
    return dict(zip(("sgot", "sot", "got"), jax.lax.map(distances, etas), strict=True)) | {
        "hilbert_schmidt": jax.vmap(dynamics.hilbert_schmidt_distance)(a, b),
        "operator_norm": jax.vmap(dynamics.operator_norm_distance)(a, b),
        "martin": jax.vmap(dynamics.martin_distance)(*multipliers),
    }


@jax.jit
def _violation(operators: LowRankOperator) -> Array:
    systems = dynamics.generator_spectrum(operators, dt=1 / REFERENCE_RATE)
    metric = SpectralGrassmannMetric(eta=dynamics.eta_heuristic(REFERENCE_RATE), eigenvalue_scale=HERTZ)
    d = dynamics.spectral_grassmann_distance_matrix(systems, systems, metric)
    excess = d[:, None, :] - d[:, :, None] - d[None, :, :]  # d(i, k) - d(i, j) - d(j, k)
    return jnp.max(jnp.array([jnp.abs(d - d.T).max(), jnp.diag(d).max(), excess.max()]))


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


@partial(jax.jit, static_argnames=("longest", "repeats"))
def _autoregression_spectra(key: Array, matrix: Array, samples: int | Array, *, longest: int, repeats: int) -> Spectrum:
    def step(state: Array, noise: Array) -> tuple[Array, Array]:
        state = state @ matrix + noise
        return state, state

    noise = jax.random.normal(key, (longest * repeats * 4,)).reshape(longest, repeats, 4)
    path = jax.lax.scan(step, jnp.zeros((repeats, 4)), noise)[1]
    lengths = jnp.full(repeats, samples)
    return dynamics.trajectory_spectrum(path.swapaxes(0, 1), 4, regularization=0.0, lengths=lengths)


@jax.jit
def _mean_error(first: Spectrum, second: Spectrum, *matrices: Array) -> Array:
    """Of the estimated distances, where the true systems are one more pair of the batch."""
    truth = dynamics.generator_spectrum(jnp.stack(matrices))
    pairs = [
        jax.tree.map(lambda found, true, k=k: jnp.concatenate([found, true[k][None]]), spectra, truth)
        for k, spectra in enumerate((first, second))
    ]
    distances = jax.vmap(dynamics.spectral_grassmann_distance)(*pairs)
    return jnp.mean(jnp.abs(distances[:-1] - distances[-1]))
