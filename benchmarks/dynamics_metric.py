"""Distance matrix of dynamical systems: jaxlab against a loop over POT's ``ot.sgot.sgot_metric`` on the same spectra.

    python benchmarks/dynamics_metric.py [--systems 200] [--rank 8] [--repeats 5] [--out FILE]

Both sides get the spectra of simulated oscillators and compute POT's metric for every unordered pair. The peer needs
POT (extra ``peers``) and runs on the CPU, jaxlab on the default device. Compile time is reported apart, a run is the
mean of the repeats, and the largest disagreement of the two matrices says that the same work was done.
"""

import argparse
from itertools import combinations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from harness import device_name, measure, print_table, write_json

from jaxlab.dynamics import SpectralGrassmannMetric, Spectrum, spectral_grassmann_distance_matrix, trajectory_spectrum


def simulated_systems(count: int, rank: int, seed: int) -> Spectrum:
    """Spectra of ``count`` noisy trajectories of 1,000 samples on six channels, each a mix of damped oscillations."""
    rng = np.random.default_rng(seed)
    t = np.arange(1000) * 0.01
    frequency, decay = rng.uniform(0.5, 5, (count, 4, 1)), rng.uniform(0.05, 0.5, (count, 4, 1))
    sources = np.exp(-decay * t) * np.sin(2 * np.pi * (frequency * t + rng.uniform(size=(count, 4, 1))))
    channels = rng.normal(size=(count, 6, 4)) @ sources + 1e-2 * rng.normal(size=(count, 6, 1000))
    return trajectory_spectrum(jnp.asarray(channels.swapaxes(1, 2)), rank, dt=0.01, lags=4)


def peer_matrix(systems: Spectrum) -> np.ndarray:
    """The loop a user of POT would write."""
    from ot.sgot import sgot_metric

    values, right, left = (np.asarray(leaf) for leaf in (systems.eigenvalues, systems.right, systems.left))
    matrix = np.zeros((len(values), len(values)))
    for i, j in combinations(range(len(values)), 2):
        distance = sgot_metric(values[i], right[i], left[i], values[j], right[j], left[j])
        matrix[i, j] = matrix[j, i] = distance
    return matrix


def main() -> None:
    """Run the comparison, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", type=int, default=200)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)

    systems = jax.block_until_ready(simulated_systems(options.systems, options.rank, options.seed))
    metric = SpectralGrassmannMetric.pot()

    ours, matrix = measure(lambda: spectral_grassmann_distance_matrix(systems, metric=metric), repeats=options.repeats)
    # The loop compiles nothing and takes many seconds: one measured run is enough.
    peer, expected = measure(lambda: peer_matrix(systems), repeats=1)
    pairs = options.systems * (options.systems - 1) // 2
    difference = float(np.abs(np.asarray(matrix) - expected).max())

    def cells(name: str, seconds: float, compile_seconds: str) -> tuple[str, ...]:
        return name, compile_seconds, f"{seconds:.4f}", f"{1e6 * seconds / pairs:.1f}"

    print_table(
        f"{pairs} pairs of systems, rank {options.rank}, on {device_name()}",
        ("", "compile s", "run s", "µs a pair"),
        [cells("POT, Python loop", peer.mean, ""), cells("jaxlab", ours.mean, f"{ours.compile:.2f}")],
    )
    print(
        f"{peer.mean / ours.mean:.0f} times faster ({peer.mean / ours.first:.0f} with compilation); "
        f"matrices differ by at most {difference:.1e}"
    )
    if options.out:
        write_json(
            options.out,
            "dynamics_metric",
            rows=[
                {"implementation": "POT", "seconds": peer.runs, "compile_seconds": 0.0, "times_faster": 1.0},
                {
                    "implementation": "jaxlab",
                    "seconds": ours.runs,
                    "compile_seconds": ours.compile,
                    "times_faster": peer.mean / ours.mean,
                },
            ],
            systems=options.systems,
            rank=options.rank,
            pairs=pairs,
            largest_difference=difference,
        )


if __name__ == "__main__":
    main()
