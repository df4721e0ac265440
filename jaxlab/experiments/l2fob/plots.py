"""The pictures of the experiment."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxlab.bidding import confidence_band
from jaxlab.experiments.base import Run
from jaxlab.experiments.l2fob.campaigns import POINTS, Sweep

__all__ = ["anytime", "growth", "settings", "step_sizes"]


def anytime(
    run: Run, shown: Mapping[str, tuple[Sweep, int]], *, tuning_seeds: int, rounds: int, roi: float, optimum: float
) -> None:
    """Reward, return and violation over the rounds, mean and 95 % band over seeds."""
    t = np.unique(np.linspace(0, rounds - 1, min(POINTS, rounds)).astype(int)) + 1
    with run.figure("anytime", ncols=3, figsize=(14, 3.8)) as (_, axes):
        for name, (found, step) in shown.items():
            for axis, curve in zip(axes, found.curves[:, step, tuning_seeds:], strict=True):
                mean, half = map(np.asarray, confidence_band(jnp.asarray(curve)))
                (line,) = axis.plot(t, mean, label=name, lw=1.6)
                axis.fill_between(t, mean - half, mean + half, color=line.get_color(), alpha=0.2, lw=0)
        axes[0].plot(t, optimum * t, "k--", lw=1, label="offline optimum (linear programme)")
        axes[1].axhline(roi, color="k", ls="--", lw=1)
        axes[2].axhline(0, color="k", ls="--", lw=1)
        axes[1].set_ylim(0, 1.6 * roi)
        axes[0].legend(fontsize=7)
        titles = ("reward so far", f"return so far (target {roi:g}, dashed)", "violation: target x spend - reward")
        for axis, title in zip(axes, titles, strict=True):
            axis.set(xlabel="round", title=title)


def step_sizes(run: Run, found: Mapping[str, Sweep], *, roi: float, optimum: float) -> None:
    """What the step size does to reward, return and violation."""
    with run.figure("step_sizes", ncols=3, figsize=(14, 3.8)) as (_, axes):
        for name, of_method in found.items():
            order = np.argsort(of_method.steps)
            steps = of_method.steps[order]
            for axis, values in zip(
                axes, (of_method.reward / optimum, of_method.roi, np.maximum(of_method.violation, 1e-2)), strict=True
            ):
                axis.plot(steps, values[order].mean(1), "o-", ms=3.5, label=name)
        axes[0].axhline(1, color="k", ls="--", lw=1)
        axes[1].axhline(roi, color="k", ls="--", lw=1)
        axes[2].set_yscale("log")
        for axis, title in zip(
            axes, ("reward / offline optimum", f"return at the end (target {roi:g})", "largest violation"), strict=True
        ):
            axis.set(xscale="log", xlabel="step size", title=title)
        axes[0].legend(fontsize=7)


def settings(run: Run, rows: Sequence[tuple[str, str, float, float]]) -> None:
    """Every method at its best step in every setting: share of the optimum, and of the target."""
    names = list(dict.fromkeys(setting for setting, *_ in rows))
    methods = list(dict.fromkeys(method for _, method, *_ in rows))
    with run.figure("settings", ncols=2, figsize=(12, 0.5 * len(names) + 2.6), sharey=True) as (figure, axes):
        for k, method in enumerate(methods):
            mine = [(names.index(s), reward, roi) for s, m, reward, roi in rows if m == method]
            offset = (k - (len(methods) - 1) / 2) * 0.7 / len(methods)
            for axis, column in zip(axes, (1, 2), strict=True):
                axis.plot([row[column] for row in mine], [row[0] + offset for row in mine], "o", ms=5, label=method)
        for axis, title in zip(axes, ("reward / offline optimum", "return / target"), strict=True):
            axis.axvline(1, color="k", ls="--", lw=1)
            axis.set(title=title)
            axis.set_xlim(left=0)
        axes[0].set_yticks(range(len(names)), names)
        axes[0].invert_yaxis()
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), fontsize=8)


def growth(run: Run, horizons: np.ndarray, violation: np.ndarray, slope: float) -> None:
    """The largest violation so far against the rounds, on logarithmic axes."""
    with run.figure("growth", figsize=(4.8, 3.6)) as (_, axes):
        mean, half = map(np.asarray, confidence_band(jnp.asarray(violation)))
        axes.errorbar(horizons, mean, yerr=half, fmt="o", ms=4, label="L2FOB, mean and 95 % band")
        axes.loglog(horizons, mean[0] * (horizons / horizons[0]) ** 0.5, "k--", lw=1, label="slope 1/2")
        axes.set(xlabel="rounds", ylabel="largest violation so far", title=f"slope {slope:.2f}")
        axes.legend(fontsize=8)
