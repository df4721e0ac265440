"""Distance matrix of dynamical systems: jaxlab against a loop over POT's ``ot.sgot.sgot_metric`` on the same spectra.

    python benchmarks/dynamics_metric.py [--systems 200] [--rank 8] [--repeats 5] [--out FILE]

Both sides get the spectra of simulated oscillators and compute POT's metric for every unordered pair. The peer needs
POT (extra ``peers``) and runs on the CPU, jaxlab on the default device. Compile time is reported apart, a run is the
median of the repeats, and the largest disagreement of the two matrices says that the same work was done.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

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


def timed(function: Callable[[], jax.Array | np.ndarray]) -> tuple[float, np.ndarray]:
    """Seconds of one call, results on the host."""
    start = time.perf_counter()
    result = np.asarray(jax.block_until_ready(function()))
    return time.perf_counter() - start, result


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

    def ours() -> jax.Array:
        return spectral_grassmann_distance_matrix(systems, metric=metric)

    first, matrix = timed(ours)
    runs = [timed(ours)[0] for _ in range(options.repeats)]
    run = statistics.median(runs)
    peer, expected = timed(lambda: peer_matrix(systems))
    pairs = options.systems * (options.systems - 1) // 2
    result = {
        "benchmark": "dynamics_metric",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "systems": options.systems,
        "rank": options.rank,
        "pairs": pairs,
        "jaxlab_seconds": run,
        "jaxlab_seconds_all": runs,
        "jaxlab_compile_seconds": first - run,
        "pot_seconds": peer,
        "times_faster": peer / run,
        "times_faster_with_compile": peer / first,
        "largest_difference": float(np.abs(matrix - expected).max()),
    }

    table = Table(title=f"{pairs} pairs of systems, rank {options.rank}, on {result['device']}")
    for heading in ("", "compile s", "run s", "µs a pair"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("POT, Python loop", "", f"{peer:.3f}", f"{1e6 * peer / pairs:.1f}")
    table.add_row("jaxlab", f"{first - run:.2f}", f"{run:.4f}", f"{1e6 * run / pairs:.1f}")
    console = Console()
    console.print(table)
    console.print(
        f"{result['times_faster']:.0f} times faster ({result['times_faster_with_compile']:.0f} with compilation); "
        f"matrices differ by at most {result['largest_difference']:.1e}"
    )
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
