"""``jaxlab dynamics compare``: distances between the systems recorded in files.

Every series is one dynamical system. All are scaled by the mean and deviation of each channel over the whole collection
and seen through a delay window of the same duration, then compared by the spectral-Grassmann metric (arXiv 2509.24920).
"""

import argparse
import csv
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxlab import dynamics
from jaxlab.data.time_series import LabelledSeries, read_time_series
from jaxlab.dynamics import SpectralGrassmannMetric, Spectrum

__all__ = ["compare", "main"]

_MOST_SYSTEMS = 10_000
_OUTLIER = 20  # times the median growth rate


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
    if any(folder.exists() and not folder.is_dir() for folder in (options.out, *options.out.parents)):
        raise ValueError(f"--out {options.out}: a file is in the way of that folder")
    names, series, steps = _read(options.files, options.dt)
    distances, spectra = compare(
        series, steps, rank=options.rank, window=options.window, lags=options.lags, eta=options.eta, names=names
    )
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "distances.csv").open("w", newline="", encoding="utf-8") as file:
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
    names: Sequence[str] | None = None,
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Distance matrix of recorded systems, in double precision.

    Args:
      series: arrays ``[time, channel]`` of one number of channels.
      steps: sampling step of each.
      rank: rank of the operators.
      window: duration of the delay window; ``None`` spans ``lags`` samples of the slowest series.
      lags: samples in the window.
      eta: weight of the eigenvalues, counted in cycles; ``None`` is `eta_heuristic` of the slowest sampling rate.
      names: what errors call the series; ``None`` numbers them.

    Returns:
      The matrix, and frequency (cycles) and growth rate of every eigenvalue of each system, in 1 / unit of the steps.

    Raises:
      ValueError: fewer than two series, differing channels, a constant channel, values missing or too large, a window
        or rank that a series cannot fill or support; the message names the series.
    """
    names = [f"series {i}" for i in range(len(series))] if names is None else list(names)
    _check(names, series, steps, window, lags)
    slowest = max(steps)
    window = (lags - 1) * slowest if window is None else window
    grid = tuple(np.linspace(0.0, window, lags).tolist()) if lags > 1 else (0.0,)
    rows = np.concatenate(series)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = rows.mean(0), rows.std(0)
    if not np.all(np.isfinite(deviation)):
        raise ValueError("the values are too large for double precision: their squares overflow")
    with jax.enable_x64(True):
        parts: list[Spectrum] = []
        for step in dict.fromkeys(steps):
            group = [i for i, own in enumerate(steps) if own == step]
            lengths = np.array([len(series[i]) for i in group])
            padded = np.zeros((len(group), lengths.max(), rows.shape[1]))
            for k, i in enumerate(group):
                padded[k, : lengths[k]] = (series[i] - mean) / deviation
            spectra = _spectra([names[i] for i in group], padded, lengths, rank=rank, step=step, lags=grid)
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


def _spectra(
    names: Sequence[str],
    padded: np.ndarray,
    lengths: np.ndarray,
    *,
    rank: int,
    step: float,
    lags: tuple[float, ...],
) -> Spectrum:
    try:
        return dynamics.trajectory_spectrum(padded, rank, dt=step, lags=lags, lengths=lengths)
    except ValueError:
        # One series spoilt the batch: find the first that fails alone, to name it.
        for k, name in enumerate(names):
            try:
                one = slice(k, k + 1)
                dynamics.trajectory_spectrum(padded[one], rank, dt=step, lags=lags, lengths=lengths[one])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        raise


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
    found = [read_time_series(file) for file in files]
    series = [one for of_file in found for one in of_file.series]
    every = dt if len(dt) > 1 else list(dt) * len(files)
    steps = [step for step, of_file in zip(every, found, strict=True) for _ in of_file.series]
    return _unique_names(files, found), series, steps


def _unique_names(files: Sequence[Path], found: Sequence[LabelledSeries]) -> list[str]:
    """The stem of each file, its path where stems clash, a number where paths do; series of one file in brackets."""
    names = [file.stem for file in files]
    for fallback in (lambda k: str(files[k]), lambda k: f"{files[k]} ({k + 1})"):
        counts = Counter(names)
        names = [name if counts[name] == 1 else fallback(k) for k, name in enumerate(names)]
    return [
        f"{name}[{label}]" if len(of_file.series) > 1 else name
        for name, file, of_file in zip(names, files, found, strict=True)
        # Arrays of an .npz file have names of their own; classes and places in an array are no names.
        for label in (of_file.labels if file.suffix.lower() == ".npz" else range(len(of_file.series)))
    ]


def _check(
    names: Sequence[str], series: Sequence[np.ndarray], steps: Sequence[float], window: float | None, lags: int
) -> None:
    if not 2 <= len(series) <= _MOST_SYSTEMS:
        raise ValueError(f"between 2 and {_MOST_SYSTEMS} systems can be compared, got {len(series)}")
    channels = series[0].shape[1]
    for name, one in zip(names, series, strict=True):
        if one.shape[1] != channels:
            raise ValueError(
                f"all systems need the same channels, got {channels} in {names[0]} and {one.shape[1]} in {name}"
            )
        if not np.all(np.isfinite(one)):
            row, column = np.argwhere(~np.isfinite(one))[0]
            raise ValueError(f"{name}: a value is missing or not finite, the first in row {row}, channel {column}")
    for step in steps:
        if not 0 < step < math.inf:
            raise ValueError(f"sampling steps must be positive and finite, got {step}")
    if lags < 1:
        raise ValueError(f"the delay window needs at least one lag, got {lags}")
    longest = max(map(len, series))
    if lags > longest:
        raise ValueError(f"the delay window takes at most the {longest} samples of the longest series, got {lags} lags")
    if window is not None and not 0 < window < math.inf:
        raise ValueError(f"the duration of the delay window must be positive and finite, got {window}")
    rows = np.concatenate(series)
    constant = rows.min(0) == rows.max(0)
    if np.any(constant):
        raise ValueError(f"channel {int(np.argmax(constant))} is constant over all series")


def _plot(
    out: Path, names: Sequence[str], distances: np.ndarray, spectra: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    few = len(names) <= 30
    colors = colormaps["viridis"](np.linspace(0, 0.95, len(names)))
    with jax.enable_x64(True):
        points = np.asarray(dynamics.classical_scaling(jnp.asarray(distances)))
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(points[:, 0], points[:, 1], c=colors, s=20)
    for name, point in zip(names, points, strict=True) if few else ():
        axes.annotate(name, point, fontsize=7, parse_math=False)
    axes.set_title("classical scaling of the distances")
    axes.set_aspect("equal", "datalim")
    FigureCanvasAgg(figure).print_figure(out / "embedding.png", dpi=150)

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    for color, (frequency, growth) in zip(colors, spectra, strict=True):
        axes.plot(growth, frequency, "o", markersize=4, color=color)
    rates = np.abs(np.concatenate([growth for _, growth in spectra]))
    if rates.max() > _OUTLIER * np.median(rates) > 0:
        # One mode that dies at once would squeeze all others into a line.
        axes.set_xscale("symlog", linthresh=float(np.median(rates)))
    axes.set_xlabel("growth rate (1 / unit of --dt)")
    axes.set_ylabel("frequency (cycles / unit of --dt)")
    if few:
        # Given here and not as labels of the points: there a leading underscore would hide a name.
        entries = axes.legend(axes.lines, ["" for _ in names], fontsize=6)
        for entry, name in zip(entries.get_texts(), names, strict=True):
            entry.set_parse_math(False)
            entry.set_text(name)
    FigureCanvasAgg(figure).print_figure(out / "spectra.png", dpi=150)


def _print_nearest(names: Sequence[str], distances: np.ndarray) -> None:
    others = distances + np.diag(np.full(len(names), np.inf))
    table = Table(box=None, pad_edge=False)
    for heading in ("system", "nearest", "distance"):
        table.add_column(heading, justify="right" if heading == "distance" else "left")
    for k, name in enumerate(names):
        nearest = int(others[k].argmin())
        # As text: in a string square brackets would be markup.
        table.add_row(Text(name), Text(names[nearest]), f"{others[k, nearest]:.4g}")
    Console().print(table)
