"""``jaxlab dynamics compare``: distances between the systems recorded in files.

Every series is one dynamical system. All are scaled by the mean and deviation of each channel over the whole collection
and seen through a delay window of the same duration, then compared by the spectral-Grassmann metric (arXiv 2509.24920).
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxlab import dynamics
from jaxlab.data.time_series import read_time_series
from jaxlab.dynamics import SpectralGrassmannMetric, Spectrum

__all__ = ["compare", "main"]

_MOST_SYSTEMS = 10_000


def main(arguments: Sequence[str]) -> int:
    """Parse the words after ``jaxlab dynamics``, compare, write three files and print nearest neighbours.

    Raises:
      ValueError: bad input, one line.
    """
    parser = _parser()
    try:
        options = parser.parse_args(arguments or ["--help"])
    except SystemExit:  # the help was printed
        return 0
    names, series, steps = _read(options.files, options.dt)
    distances, spectra = compare(
        series, steps, rank=options.rank, window=options.window, lags=options.lags, eta=options.eta
    )
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "distances.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", *names])
        writer.writerows([name, *map(repr, row)] for name, row in zip(names, distances.tolist(), strict=True))
    _plot(options.out, names, distances, spectra)
    _print_nearest(names, distances)
    for name in ("distances.csv", "embedding.png", "spectra.png"):
        print(options.out / name)
    return 0


def compare(
    series: Sequence[np.ndarray],
    steps: Sequence[float],
    *,
    rank: int,
    window: float | None = None,
    lags: int = 8,
    eta: float | None = None,
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Distance matrix of recorded systems, in double precision.

    Args:
      series: arrays ``[time, channel]`` of one number of channels.
      steps: sampling step of each.
      rank: rank of the operators.
      window: duration of the delay window; ``None`` spans ``lags`` samples of the slowest series.
      lags: samples in the window.
      eta: weight of the eigenvalues, counted in cycles; ``None`` is `eta_heuristic` of the slowest sampling rate.

    Returns:
      The matrix, and frequency (cycles) and growth rate of every eigenvalue of each system, in 1 / unit of the steps.

    Raises:
      ValueError: fewer than two series, differing channels, a constant channel, values missing, a window or rank that
        the shortest series cannot fill.
    """
    _check(series, steps, lags)
    slowest = max(steps)
    window = (lags - 1) * slowest if window is None else window
    grid = tuple(np.linspace(0.0, window, lags).tolist()) if lags > 1 else (0.0,)
    rows = np.concatenate(series)
    mean, deviation = rows.mean(0), rows.std(0)
    with jax.enable_x64(True):
        parts: list[Spectrum] = []
        for step in dict.fromkeys(steps):
            group = [i for i, own in enumerate(steps) if own == step]
            lengths = np.array([len(series[i]) for i in group])
            padded = np.zeros((len(group), lengths.max(), rows.shape[1]))
            for k, i in enumerate(group):
                padded[k, : lengths[k]] = (series[i] - mean) / deviation
            spectra = dynamics.trajectory_spectrum(
                jnp.asarray(padded), rank, dt=step, lags=grid, lengths=jnp.asarray(lengths)
            )
            parts += [jax.tree.map(lambda leaf, k=k: leaf[k], spectra) for k in range(len(group))]
        order = np.argsort([i for step in dict.fromkeys(steps) for i, own in enumerate(steps) if own == step])
        systems = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(parts[k] for k in order))
        cycles = 1 / (2 * np.pi)
        metric = SpectralGrassmannMetric(
            eta=dynamics.eta_heuristic(1 / slowest) if eta is None else eta, eigenvalue_scale=(cycles, cycles)
        )
        distances = np.asarray(dynamics.spectral_grassmann_distance_matrix(systems, metric=metric))
        values = np.asarray(systems.eigenvalues)
    return distances, [(row.imag * cycles, row.real) for row in values]


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; see jaxlab dynamics compare --help")

    parser = Parser(prog="jaxlab dynamics", description="Compare dynamical systems recorded in files.")
    verbs = parser.add_subparsers(required=True, metavar="compare", parser_class=Parser)
    verb = verbs.add_parser("compare", help="distance matrix, embedding, spectra and nearest neighbours")
    verb.add_argument("files", nargs="+", type=Path, help=".npy, .npz, .csv or .ts, any number of systems in each")
    verb.add_argument("--dt", nargs="+", type=float, default=[1.0], help="sampling step, one or one a file (default 1)")
    verb.add_argument("--rank", type=int, default=8, help="rank of the operators (default 8)")
    verb.add_argument("--window", type=float, help="duration of the delay window (default: that of the lags)")
    verb.add_argument("--lags", type=int, default=8, help="samples in the delay window (default 8)")
    verb.add_argument("--eta", type=float, help="weight of the eigenvalues in [0, 1] (default: the paper's heuristic)")
    verb.add_argument("--out", type=Path, default=Path("comparison"), help="folder to write (default ./comparison)")
    return parser


def _read(files: Sequence[Path], dt: Sequence[float]) -> tuple[list[str], list[np.ndarray], list[float]]:
    if len(dt) not in (1, len(files)):
        raise ValueError(f"--dt takes one step or one for each of the {len(files)} files, got {len(dt)}")
    names, series, steps = [], [], []
    for file, step in zip(files, dt if len(dt) > 1 else list(dt) * len(files), strict=True):
        found = read_time_series(file)
        many = len(found.series) > 1
        names += [f"{file.stem}[{k}]" if many else file.stem for k in range(len(found.series))]
        series += found.series
        steps += [step] * len(found.series)
    return names, series, steps


def _check(series: Sequence[np.ndarray], steps: Sequence[float], lags: int) -> None:
    if not 2 <= len(series) <= _MOST_SYSTEMS:
        raise ValueError(f"between 2 and {_MOST_SYSTEMS} systems can be compared, got {len(series)}")
    channels = sorted({s.shape[1] for s in series})
    if len(channels) > 1:
        raise ValueError(f"all systems need the same channels, got series with {channels} of them")
    if not min(steps) > 0:
        raise ValueError(f"sampling steps must be positive, got {min(steps)}")
    if lags < 1:
        raise ValueError(f"the delay window needs at least one lag, got {lags}")
    rows = np.concatenate(series)
    if not np.all(np.isfinite(rows)):
        raise ValueError("the series have values that are missing or not finite")
    if not np.all(rows.std(0) > 0):
        raise ValueError(f"channel {int(np.argmin(rows.std(0)))} is constant over all series")


def _plot(
    out: Path, names: Sequence[str], distances: np.ndarray, spectra: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    few = len(names) <= 30
    with jax.enable_x64(True):
        points = np.asarray(dynamics.classical_scaling(jnp.asarray(distances)))
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(points[:, 0], points[:, 1], c=np.arange(len(names)), cmap="viridis", s=20)
    for name, point in zip(names, points, strict=True) if few else ():
        axes.annotate(name, point, fontsize=7)
    axes.set_title("classical scaling of the distances")
    axes.set_aspect("equal", "datalim")
    FigureCanvasAgg(figure).print_figure(out / "embedding.png", dpi=150)

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    for k, (name, (frequency, growth)) in enumerate(zip(names, spectra, strict=True)):
        axes.plot(growth, frequency, "o", markersize=4, color=f"C{k % 10}", label=name if few else None)
    axes.set_xlabel("growth rate")
    axes.set_ylabel("frequency (cycles)")
    if few:
        axes.legend(fontsize=6)
    FigureCanvasAgg(figure).print_figure(out / "spectra.png", dpi=150)


def _print_nearest(names: Sequence[str], distances: np.ndarray) -> None:
    others = distances + np.diag(np.full(len(names), np.inf))
    table = Table(box=None, pad_edge=False)
    for heading in ("system", "nearest", "distance"):
        table.add_column(heading, justify="right" if heading == "distance" else "left")
    for k, name in enumerate(names):
        nearest = int(others[k].argmin())
        table.add_row(name, names[nearest], f"{others[k, nearest]:.4g}")
    Console().print(table)
