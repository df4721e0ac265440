"""The plots of the experiment on GT-NSGDm."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlab.experiments.base import Run
from jaxlab.experiments.gt_nsgdm import bias, rates
from jaxlab.experiments.gt_nsgdm.methods import METHODS
from jaxlab.experiments.gt_nsgdm.regression import Sweep

__all__ = ["claims", "language_model"]

# One colour a method in every panel; the method of the paper in black, those without tracking in warm tones.
_COLOURS = dict(
    zip(
        METHODS,
        (
            "#4477aa",
            "#66ccee",
            "#228833",
            "#99bb55",
            "#bbaa33",
            "#bbbbbb",
            "#aa3377",
            "#332288",
            "#ddaa77",
            "#ee6677",
            "#888888",
            "#000000",
        ),
        strict=True,
    )
)

_LINES = {"": "-", "(ring)": "-", "(exponential)": ":", "(complete)": "--"}


def claims(
    run: Run,
    paths: Mapping[str, np.ndarray],
    sweeps: Mapping[str, Mapping[str, Sweep]],
    norms: Mapping[str, np.ndarray],
    *,
    horizons: Sequence[int],
    networks: Sequence[int],
) -> None:
    """Bias, plateau of step sizes, motion, rate and node speed-up, a panel each."""
    with run.figure("claims", nrows=2, ncols=3, figsize=(13, 7.5)) as (_, axes):
        _bias(axes[0, 0], paths)
        kind = "stable" if "stable" in sweeps else next(iter(sweeps))
        _plateau(axes[0, 1], sweeps[kind], kind)
        _motion(axes[0, 2], sweeps[kind], kind)
        _rate(axes[1, 0], norms, horizons)
        _speedup(axes[1, 1], norms["networks"].mean(1), networks)
        _errors(axes[1, 2], sweeps)


def language_model(run: Run, losses: Mapping[str, np.ndarray], tails: Mapping[str, np.ndarray], *, steps: int) -> None:
    """Held-out loss over training, and the tail of the gradient noise.

    Args:
      run: the run.
      losses: ``[evaluations, runs, n]`` of every method.
      tails: norms of the gradient noise at the start and at the end of training.
      steps: training steps in all.
    """
    with run.figure("language_model", ncols=2, figsize=(12, 4.5)) as (_, (left, right)):
        for name, loss in losses.items():
            at = steps * np.arange(1, len(loss) + 1) / len(loss)
            mean = loss.mean((1, 2))
            method, _, graph = name.partition(" ")
            left.plot(at, mean, **_style(method, label=name), linestyle=_LINES[graph])
            left.fill_between(at, loss.mean(2).min(1), loss.mean(2).max(1), color=_COLOURS[method], alpha=0.15, lw=0)
        left.set(xlabel="step", ylabel="held-out loss (nats per token)", title="Each method tuned alike; band: seeds")
        # A method that stays where it started would flatten all others.
        finite = [loss.mean((1, 2)) for loss in losses.values() if np.isfinite(loss).all()]
        if finite:
            left.set_ylim(min(map(np.min, finite)) - 0.1, np.median([curve.max() for curve in finite]) + 0.5)
        left.legend(fontsize=7, ncols=2)
        for when, values in tails.items():
            norms = np.sort(values / np.median(values))[::-1]
            right.loglog(norms, np.arange(1, len(norms) + 1) / len(norms), label=f"at the {when} of training")
        right.set(xlabel="gradient noise / its median", ylabel="share above", title="Tail of the gradient noise")
        if tails:
            right.legend(fontsize=8)
        else:
            right.set_visible(False)


def _bias(axes: Any, paths: Mapping[str, np.ndarray]) -> None:
    for name, path in paths.items():
        axes.plot(np.arange(1, len(path) + 1) * bias.EVERY, path, **_style(name))
    axes.axhline(bias.MINIMISER, color="grey", lw=0.8, ls="--")
    axes.set(xlabel="step", ylabel="average of the nodes", title="Three nodes, centres 0, 0, 9: minimiser 3")
    axes.legend(fontsize=7)


def _plateau(axes: Any, sweep: Mapping[str, Sweep], kind: str) -> None:
    for name, tuned in sweep.items():
        step_sizes, errors = tuned.curve()
        axes.loglog(step_sizes, errors, **_style(name))
    lowest = min(tuned.errors.mean() for tuned in sweep.values())
    axes.set(xlabel="step size", ylabel="error", ylim=(lowest / 2, lowest * 50), title=f"Regression, {kind} noise")
    axes.legend(fontsize=7)


def _motion(axes: Any, sweep: Mapping[str, Sweep], kind: str) -> None:
    for name, tuned in sweep.items():
        motion = np.sort(tuned.final["motion"].ravel())[::-1]
        axes.loglog(motion, np.arange(1, len(motion) + 1) / len(motion), **_style(name))
    axes.axvline(1.0, color="grey", lw=0.8, ls="--")
    axes.set(
        xlabel="largest of 100 moves of the average / step size",
        ylabel="share above",
        title=f"Regression, {kind} noise: motion",
    )
    axes.legend(fontsize=7)


def _rate(axes: Any, norms: Mapping[str, np.ndarray], horizons: Sequence[int]) -> None:
    for (name, theory), colour in zip(rates.THEORY_SLOPES.items(), ("#000000", "#4477aa"), strict=True):
        measured = norms[name].mean(1)
        axes.errorbar(
            horizons,
            measured,
            yerr=norms[name].std(1),
            color=colour,
            marker="o",
            label=f"p {name}: slope {rates.log_slope(horizons, measured):.3f}",
        )
        line = measured[0] * (np.asarray(horizons) / horizons[0]) ** theory
        axes.plot(horizons, line, color=colour, lw=0.8, ls="--", label=f"theory {theory:.3f}")
    axes.set(xscale="log", yscale="log", xlabel="steps T", ylabel="average gradient norm")
    axes.set_title("Rate, p = 1.5, ring of 8")
    _label_ticks(axes, horizons)
    axes.legend(fontsize=7)


def _speedup(axes: Any, norms: np.ndarray, networks: Sequence[int]) -> None:
    axes.loglog(networks, norms, color="#000000", marker="o", label="GT-NSGDm")
    line = norms[0] * (np.asarray(networks) / networks[0]) ** (1.0 / rates.TAIL_INDEX - 1.0)
    axes.plot(networks, line, color="grey", lw=0.8, ls="--", label="noise term alone, n^(-1/3)")
    axes.set(xlabel="nodes", ylabel="gradient norm at the end", title="Node speed-up, complete graph")
    _label_ticks(axes, networks)
    axes.legend(fontsize=7)


def _errors(axes: Any, sweeps: Mapping[str, Mapping[str, Sweep]]) -> None:
    names = list(next(iter(sweeps.values())))
    height = 0.8 / len(sweeps)
    for row, (kind, sweep) in enumerate(sweeps.items()):
        at = np.arange(len(names)) + row * height
        errors = [sweep[name].errors for name in names]
        axes.barh(at, [e.mean() for e in errors], height, xerr=[e.std() for e in errors], label=kind, alpha=0.8)
    axes.set_yticks(np.arange(len(names)) + 0.4 - height / 2, labels=names, fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="error, tuned, fresh noise", title="Regression")
    axes.legend(fontsize=7)


def _label_ticks(axes: Any, values: Sequence[int]) -> None:
    """Label a logarithmic axis at these values only."""
    axes.set_xticks(values, labels=[str(value) for value in values])
    axes.set_xticks([], minor=True)


def _style(method: str, label: str | None = None) -> dict[str, Any]:
    return {"color": _COLOURS[method], "lw": 2.2 if method == "gt_nsgdm" else 1.2, "label": label or method}
