"""Spectral-Grassmann optimal transport between dynamical systems: what the paper promises, measured.

Germain et al., arXiv 2509.24920. Simulated oscillators under shifts of frequency, decay, subspace and sampling rate;
means of two systems; the rate of the estimate; and two data sets of wearable-sensor and speech series, classified by
their nearest neighbour.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import dynamics
from jaxlab.data.time_series import has_uea
from jaxlab.experiments.base import Claim, Experiment, Run
from jaxlab.experiments.koopman_ot import oscillators, plots
from jaxlab.experiments.koopman_ot.classification import (
    METHODS,
    SAMPLING_RATES,
    Accuracies,
    accuracies,
    choose,
    load_data_set,
)

__all__ = ["EXPERIMENT", "Config"]

Part = Literal["shifts", "means", "rate", "classification"]
PARTS: tuple[Part, ...] = ("shifts", "means", "rate", "classification")
FRACTIONS = (0.25, 0.5, 0.75)
_COST_OF_DATA_SET = 15


@dataclass(frozen=True)
class Config:
    """Shifts, means, rate and classification."""

    parts: tuple[Part, ...] = PARTS
    """what to run"""
    shift_steps: int = 5
    """steps from the unshifted system to the most shifted one"""
    repeats: int = 3
    """noise draws of each shifted system"""
    rates: tuple[int, ...] = (100, 150, 250, 300)
    """sampling rates in Hz compared with 200 Hz"""
    mean_steps: int = 100
    """gradient steps of each mean"""
    samples: tuple[int, ...] = (200, 400, 800, 1600, 3200, 6400, 12800)
    """sample sizes of the rate"""
    rate_repeats: int = 64
    """process pairs at each sample size"""
    systems: int = 12
    """systems on which the axioms are checked"""
    data_sets: tuple[str, ...] = ("BasicMotions", "JapaneseVowels")
    """names of UEA data sets, or folders NAME with NAME_TRAIN.ts and NAME_TEST.ts"""
    cases: int = 0
    """series taken from each data set at random, 0 for all"""
    windows: tuple[int, ...] = (8, 2)
    """delay window of each data set, in samples"""
    ranks: tuple[int, ...] = (2, 4)
    """ranks chosen from, the same for all metrics; those that the shortest series cannot support are left out"""
    regularization: float = 1e-4
    """ridge of the estimator"""
    sweep_windows: tuple[int, ...] = ()
    """further windows to report, where they fit the shortest series"""
    sweep_regularizations: tuple[float, ...] = ()
    """further ridges to report"""

    def __post_init__(self) -> None:
        if not set(self.parts) & set(PARTS):
            raise ValueError(f"parts must name some of {', '.join(PARTS)}, got {self.parts}")
        if not self.data_sets or len(self.windows) != len(self.data_sets):
            raise ValueError(f"one window for each data set is needed, got {self.windows} for {self.data_sets}")
        for name in ("shift_steps", "repeats", "mean_steps", "rate_repeats", "systems"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(self.samples) < 2 or min(self.samples) < 10:
            raise ValueError(f"samples must hold two sizes of at least 10, got {self.samples}")


CLAIMS = (
    Claim(
        "monotone_under_shifts",
        "The distance grows at every step of a shift in frequency, decay or subspace (smallest step as a share of "
        "the whole rise).",
        ">",
        0.0,
    ),
    Claim(
        "sampling_rate_invariant",
        "The spectra of one system sampled at 100 to 300 Hz coincide (transport distance of the eigenvalues in Hz).",
        "<",
        1e-3,
    ),
    Claim(
        "classifies_better_than_operator_norms",
        "Nearest-neighbour accuracy exceeds that of Hilbert-Schmidt and operator norm on every data set (least lead).",
        ">",
        0.0,
    ),
    Claim(
        "barycentre_interpolates",
        "The mean's frequency and decay move on the straight line between two systems, where the Hilbert-Schmidt mean "
        "over-damps (deviation as a share of the latter's).",
        "<",
        0.2,
    ),
    Claim(
        "finite_sample_rate",
        "The error of the estimated distance falls as the square root of the sample size (log-log slope).",
        "in",
        (-0.6, -0.4),
    ),
    Claim("is_a_metric", "Symmetry, identity and triangle inequality hold (worst violation).", "<", 1e-7),
)


def run(config: Config, run: Run) -> None:
    """Measure every claim, in double precision."""
    absent = [name for name in config.data_sets if name in SAMPLING_RATES and not has_uea(name)]
    parts = {
        "shifts": (
            _shifts,
            4 * (config.shift_steps + 1) + 2 + len(config.rates),
            ("monotone_under_shifts", "sampling_rate_invariant", "is_a_metric"),
        ),
        "means": (_means, 3 * len(FRACTIONS), ("barycentre_interpolates",)),
        "rate": (_rate, len(config.samples), ("finite_sample_rate",)),
        "classification": (
            _classification,
            _COST_OF_DATA_SET * len(config.data_sets),
            ("classifies_better_than_operator_norms",),
        ),
    }
    reasons = {part: "this part was not asked for" for part in parts if part not in config.parts}
    if absent:
        reasons |= {"classification": f"not found: {', '.join(absent)}; install aeon, which bundles them"}
    run.plan(sum(cost for part, (_, cost, _) in parts.items() if part not in reasons))
    table: dict[str, dict[str, float]] = {method: {} for method in METHODS}
    with jax.enable_x64(True):
        for part, (measure, _, claims) in parts.items():
            if part not in reasons:
                measure(config, run, table)
                continue
            for claim in claims:
                run.skip(claim, "cpu", reasons[part])
    for method, numbers in table.items():
        if numbers:
            run.row(method, **numbers)


def _shifts(config: Config, run: Run, table: dict[str, dict[str, float]]) -> None:
    values = oscillators.shift_values(config.shift_steps + 1)
    grid = [(shift, float(value)) for shift, of_shift in values.items() for value in of_shift]
    key = jax.random.fold_in(run.key, 0)
    still = oscillators.reference(jax.random.fold_in(key, 0), config.repeats)

    def at(carry: tuple, i: int) -> tuple[tuple, dict]:
        shift, value = grid[i]
        # One draw of the noise along a shift, so that its steps are not those of the noise.
        return carry, oscillators.shift_distances(jax.random.fold_in(key, 1), still, shift, value)

    def log(i: int, found: dict) -> dict:
        shift, value = grid[i]
        return {"shift": shift, "value": value, **{m: found[m].mean() for m in METHODS}}

    _, found = run.loop("shifts", at, (), len(grid), cost=len(grid), log=log)
    curves = {shift: {m: found[m][[s == shift for s, _ in grid]].mean(1) for m in METHODS} for shift in values}

    def resample(carry: tuple, i: int) -> tuple[tuple, dict]:
        return carry, oscillators.sampling_distances(jax.random.fold_in(key, 1000 + i), still, config.rates[i])

    _, drift = run.loop(
        "sampling",
        resample,
        (),
        len(config.rates),
        cost=len(config.rates),
        log=lambda i, d: {"rate": config.rates[i], **{m: d[m].mean() for m in METHODS}},
    )
    for method in METHODS:
        for shift in curves:
            steps = np.diff(curves[shift][method])
            table[method][f"{shift}_step"] = steps.min() / np.ptp(curves[shift][method])
        table[method]["sampling_drift"] = drift[method].mean(1).max() / curves["frequency"][method][-1]
    run.measure(
        "monotone_under_shifts",
        min(table["sgot"][f"{shift}_step"] for shift in curves if shift != "squareness"),
    )
    run.measure("sampling_rate_invariant", drift["sot"].max())
    run.note(
        "Columns *_step: smallest step along the shift as a share of its rise, negative where the distance falls; "
        "squareness turns the sine of one oscillator into a square wave and is reported, not claimed. "
        "sampling_drift: largest distance of one system to itself at another sampling rate, as a share of the distance "
        "that doubling the frequency makes."
    )
    worst = run.stage(
        "axioms",
        lambda: oscillators.violation_of_axioms(jax.random.fold_in(run.key, 1), config.systems),
        cost=2,
    )
    run.measure("is_a_metric", worst)
    plots.shifts(run, values, curves, drift, config.rates)


def _means(config: Config, run: Run, table: dict[str, dict[str, float]]) -> None:
    key = jax.random.fold_in(run.key, 2)
    _, found = run.loop(
        "means",
        lambda carry, i: (carry, oscillators.barycenter(key, FRACTIONS[i], config.mean_steps)),
        (),
        len(FRACTIONS),
        cost=3 * len(FRACTIONS),
        log=lambda i, o: {
            "fraction": FRACTIONS[i],
            "objective": o["objective"],
            "bound": o["bound"],
            **{f"{m}_{what}": o[m][j] for m in plots.MEANS for j, what in enumerate(("frequency", "decay"))},
        },
    )
    first, last = found["ends"][0]
    line = first + np.array(FRACTIONS)[:, None] * (last - first)
    deviation = {m: np.abs((found[m] - line) / (last - first)).max() for m in plots.MEANS}
    run.measure("barycentre_interpolates", deviation["sgot"] / deviation["hilbert_schmidt"])
    for method in ("sgot", "hilbert_schmidt"):
        table[method]["mean_deviation"] = deviation[method]
    run.note(
        "mean_deviation: largest distance of frequency or decay from the straight line, as a share of the gap; "
        f"{deviation['constrained_hilbert_schmidt']:.3g} for the Hilbert-Schmidt mean with constrained spectrum. The "
        f"Frechet mean's objective is at most {(found['objective'] / found['bound']).max():.4g} times its lower bound."
    )
    plots.means(run, FRACTIONS, found, line)


def _rate(config: Config, run: Run, table: dict[str, dict[str, float]]) -> None:
    key = jax.random.fold_in(run.key, 3)
    sizes = config.samples
    _, errors = run.loop(
        "rate",
        lambda carry, i: (
            carry,
            oscillators.rate_error(jax.random.fold_in(key, i), sizes[i], max(sizes), config.rate_repeats),
        ),
        (),
        len(sizes),
        cost=len(sizes),
        log=lambda i, error: {"samples": sizes[i], "error": error},
    )
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    run.measure("finite_sample_rate", slope)
    table["sgot"]["error"] = errors[-1]
    plots.rate(run, sizes, errors, slope)


def _settings(config: Config, index: int) -> list[tuple[int, float]]:
    """Window and ridge of the claim, then those of the sweep."""
    windows = (config.windows[index], *config.sweep_windows)
    ridges = (config.regularization, *config.sweep_regularizations)
    return list(dict.fromkeys((window, ridge) for window in windows for ridge in ridges))


def _classification(config: Config, run: Run, table: dict[str, dict[str, float]]) -> None:
    leads, embeddings = [], {}
    for index, name in enumerate(config.data_sets):
        data = load_data_set(name, config.cases, run.seed)
        settings = _settings(config, index)
        grid = [
            (window, ridge, rank)
            for window, ridge in settings
            for rank in config.ranks
            if rank <= data.largest_rank(window)
        ]
        if {(window, ridge) for window, ridge, _ in grid} != set(settings):
            raise ValueError(
                f"{name}: no rank of {config.ranks} fits a window of {max(settings)[0]}; the shortest series has "
                f"{data.lengths.min()} samples"
            )

        def body(carry: tuple, i: int, data=data, grid=grid) -> tuple[tuple, dict]:
            window, ridge, rank = grid[i]
            return carry, accuracies(data, window=window, rank=rank, regularization=ridge)._asdict()

        def log(i: int, found: dict, grid=grid) -> dict:
            window, ridge, rank = grid[i]
            scores = {m: found["outer"][j].mean(0).max() for j, m in enumerate(METHODS)}
            return {"window": window, "regularization": ridge, "rank": rank, **scores}

        _, found = run.loop(f"classify-{Path(name).name}", body, (), len(grid), cost=_COST_OF_DATA_SET, log=log)
        scores = Accuracies(**found)
        for k, (window, ridge) in enumerate(settings):
            block = [i for i, setting in enumerate(grid) if setting[:2] == (window, ridge)]
            accuracy = choose(scores.inner[block], scores.outer[block])
            means = dict(zip(METHODS, accuracy.mean(1), strict=True))
            if k == 0:
                leads.append(means["sgot"] - max(means["hilbert_schmidt"], means["operator_norm"]))
                for method, of_folds in zip(METHODS, accuracy, strict=True):
                    table[method] |= {f"{name}_mean": of_folds.mean(), f"{name}_std": of_folds.std()}
                embeddings[name] = scores.embedding[block][-1], data.labels
            else:
                listed = ", ".join(f"{method} {mean:.3f}" for method, mean in means.items())
                run.note(f"{name}, window {window}, ridge {ridge:g}: {listed}.")
    run.measure("classifies_better_than_operator_norms", min(leads))
    plots.embeddings(run, embeddings)


def _shapes(config: Config) -> jax.ShapeDtypeStruct:
    series = jax.ShapeDtypeStruct((config.cases or 100, 1000, 6), jnp.float32)
    rank, window = max(config.ranks), max(config.windows)
    return jax.eval_shape(lambda x: dynamics.trajectory_spectrum(x, rank, lags=window).eigenvalues, series)


EXPERIMENT = Experiment(
    name="koopman-ot",
    summary="A Wasserstein metric between dynamical systems from their Koopman spectra.",
    claims=CLAIMS,
    presets={
        "smoke": Config(
            shift_steps=1,
            repeats=2,
            rates=(100,),
            mean_steps=2,
            samples=(50, 100),
            rate_repeats=2,
            systems=2,
            parts=("shifts", "rate"),
        ),
        "quick": Config(cases=150),
        "cpu": Config(
            repeats=10,
            mean_steps=200,
            rate_repeats=128,
            systems=20,
            ranks=(2, 4, 8),
            sweep_windows=(1, 4),
            sweep_regularizations=(1e-2,),
        ),
        "paper": Config(
            repeats=10,
            mean_steps=200,
            rate_repeats=128,
            systems=50,
            data_sets=("BasicMotions", "JapaneseVowels", "ERing", "Epilepsy", "NATOPS", "FingerMovements"),
            windows=(8, 2, 8, 8, 8, 8),
            ranks=(2, 4, 8, 12, 16),
            sweep_regularizations=(1e-6, 1e-2),
        ),
    },
    run=run,
    shapes=_shapes,
)
