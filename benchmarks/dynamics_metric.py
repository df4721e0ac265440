"""Distance matrix of dynamical systems: jaxlab against a loop over POT's ``ot.sgot.sgot_metric`` on the same spectra.

    python benchmarks/dynamics_metric.py [--systems 200] [--rank 8] [--repeats 5] [--seed 0] [--out FILE]

Both sides get the spectra of simulated oscillators and compute POT's metric for every unordered pair. The peer needs
POT (extra ``peers``; without it jaxlab is measured alone) and runs on the CPU, jaxlab on the default device. Compile
time is reported apart, a run is the mean of the repeats. The same work is done: the two matrices agree to 1e-10, or the
script stops with an error.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import device_name, measure, print_table, write_json

from jaxlab.dynamics import SpectralGrassmannMetric, Spectrum, spectral_grassmann_distance_matrix, trajectory_spectrum

# Distances of order one in double precision: rounding is near 1e-15, another weight, exponent or root shows at once.
TOLERANCE = 1e-10


def simulated_systems(count: int, rank: int, seed: int) -> Spectrum:
    """Spectra of ``count`` noisy trajectories of 1,000 samples on six channels, each a mix of damped oscillations."""
    rng = np.random.default_rng(seed)
    t = np.arange(1000) * 0.01
    frequency, decay = rng.uniform(0.5, 5, (count, 4, 1)), rng.uniform(0.05, 0.5, (count, 4, 1))
    sources = np.exp(-decay * t) * np.sin(2 * np.pi * (frequency * t + rng.uniform(size=(count, 4, 1))))
    channels = rng.normal(size=(count, 6, 4)) @ sources + 1e-2 * rng.normal(size=(count, 6, 1000))
    return trajectory_spectrum(jnp.asarray(channels.swapaxes(1, 2)), rank, dt=0.01, lags=4)


def pot_distance() -> Callable[..., float] | None:
    """POT's distance of two systems, or ``None`` after saying that it is not installed."""
    try:
        from ot.sgot import sgot_metric
    except ModuleNotFoundError as error:
        if error.name not in ("ot", "ot.sgot"):
            raise
        print("POT 0.9.7 or newer is not installed (extra 'peers'): only jaxlab is measured")
        return None
    return sgot_metric


def peer_matrix(distance: Callable[..., float], systems: Spectrum) -> np.ndarray:
    """The loop a user of POT would write."""
    values, right, left = (np.asarray(leaf) for leaf in (systems.eigenvalues, systems.right, systems.left))
    matrix = np.zeros((len(values), len(values)))
    for i, j in combinations(range(len(values)), 2):
        matrix[i, j] = distance(values[i], right[i], left[i], values[j], right[j], left[j])
        matrix[j, i] = matrix[i, j]
    return matrix


def check_same_work(matrix: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of two distance matrices; stops the script if they differ by more than the tolerance."""
    difference = float(np.abs(np.asarray(matrix) - expected).max())
    if not difference <= TOLERANCE:
        raise SystemExit(f"the matrices of jaxlab and POT differ by {difference:.1e}, more than {TOLERANCE:.0e}")
    return difference


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison, print a table, write the JSON file."""
    options = parse_options(arguments)
    with jax.enable_x64(True):
        compare(options)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; numbers that make no sense end the script with one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--systems", type=int, default=200)
    parser.add_argument("--rank", type=int, default=8, help="1 to 24, four lags of six channels")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    for name, least, most in (
        ("systems", 2, math.inf),
        ("rank", 1, 24),
        ("repeats", 1, math.inf),
        ("seed", 0, math.inf),
    ):
        value = getattr(options, name)
        if not least <= value <= most:
            parser.error(
                f"--{name} must be {f'at least {least}' if most == math.inf else f'in [{least}, {most}]'}, got {value}"
            )
    return options


def compare(options: argparse.Namespace) -> None:
    """Time both sides on the same spectra, in double precision."""
    systems = jax.block_until_ready(simulated_systems(options.systems, options.rank, options.seed))
    metric = SpectralGrassmannMetric.pot()
    pairs = options.systems * (options.systems - 1) // 2

    ours, matrix = measure(lambda: spectral_grassmann_distance_matrix(systems, metric=metric), repeats=options.repeats)
    rows: list[dict[str, Any]] = [
        {"implementation": "jaxlab", "seconds": ours.runs, "compile_seconds": ours.compile},
    ]
    checked: dict[str, float] = {}
    said = ""
    distance = pot_distance()
    if distance is not None:
        # The loop compiles nothing and takes many seconds: one measured run is enough.
        peer, expected = measure(lambda: peer_matrix(distance, systems), repeats=1)
        checked = {"largest_difference": check_same_work(np.asarray(matrix), expected)}
        rows[0]["times_faster"] = peer.mean / ours.mean
        rows.insert(0, {"implementation": "POT", "seconds": peer.runs, "compile_seconds": 0.0, "times_faster": 1.0})
        said = (
            f"{peer.mean / ours.mean:.0f} times faster ({peer.mean / ours.first:.2g} with compilation); "
            f"matrices differ by at most {checked['largest_difference']:.1e}"
        )

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        seconds = statistics.mean(row["seconds"])
        compiled = f"{row['compile_seconds']:.2f}" if row["compile_seconds"] else ""
        return row["implementation"], compiled, f"{seconds:.4f}", f"{1e6 * seconds / pairs:.1f}"

    print_table(
        f"{pairs} pairs of systems, rank {options.rank}, on {device_name()}",
        ("", "compile s", "run s", "µs a pair"),
        [cells(row) for row in rows],
    )
    if said:
        print(said)
    if options.out:
        write_json(
            options.out,
            "dynamics_metric",
            rows=rows,
            systems=options.systems,
            rank=options.rank,
            pairs=pairs,
            tolerance=TOLERANCE,
            **checked,
        )


if __name__ == "__main__":
    main()
