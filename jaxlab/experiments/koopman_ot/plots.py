"""The pictures of the experiment."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxlab.experiments.base import Run

__all__ = ["MEANS", "embeddings", "means", "rate", "shifts"]

MEANS = ("sgot", "hilbert_schmidt", "constrained_hilbert_schmidt")
_UNITS = {"frequency": "Hz", "decay": "1/s", "rotation": "rad", "squareness": "share of a square wave"}


def shifts(
    run: Run,
    values: Mapping[str, np.ndarray],
    curves: Mapping[str, Mapping[str, np.ndarray]],
    drift: Mapping[str, np.ndarray],
    rates: Sequence[int],
) -> None:
    """Distance against shift, one line a metric, each scaled by its distance at the doubled frequency."""
    with run.figure("shifts", ncols=5, figsize=(16, 3.2), sharey=True) as (_, axes):
        unit = {method: curve[-1] for method, curve in curves["frequency"].items()}
        for panel, (shift, curve) in zip(axes, curves.items(), strict=False):
            for method in unit:
                panel.plot(values[shift], curve[method] / unit[method], "o-", label=method, markersize=3)
            panel.set_xlabel(f"{shift} ({_UNITS[shift]})")
        for method in unit:
            axes[-1].plot(rates, drift[method].mean(1) / unit[method], "o-", label=method, markersize=3)
        axes[-1].set_xlabel("sampling rate (Hz)")
        axes[0].set_ylabel("distance / distance at 2 Hz")
        axes[0].set_ylim(-0.1, 4)
        axes[0].legend(fontsize=7)


def means(run: Run, fractions: Sequence[float], found: Mapping[str, np.ndarray], line: np.ndarray) -> None:
    """Frequency and decay of the means against the weight of the second system."""
    with run.figure("means", ncols=2, figsize=(8, 3.2)) as (_, axes):
        for j, (panel, label) in enumerate(zip(axes, ("frequency (Hz)", "decay (1/s)"), strict=True)):
            panel.plot([0, 1], found["ends"][0][:, j], "k--", linewidth=1, label="straight line")
            for method in MEANS:
                panel.plot(fractions, found[method][:, j], "o-", label=method)
            panel.set_xlabel("weight of the second system")
            panel.set_ylabel(label)
        axes[1].legend(fontsize=7)


def rate(run: Run, sizes: Sequence[int], errors: np.ndarray, slope: float) -> None:
    """Error against sample size."""
    with run.figure("rate", figsize=(4.5, 3.2)) as (_, axes):
        axes.loglog(sizes, errors, "o", label="measured")
        axes.loglog(sizes, errors.mean() * (np.array(sizes) / np.mean(sizes)) ** -0.5, "k--", label="slope -1/2")
        axes.set_xlabel("samples")
        axes.set_ylabel("mean error of the distance")
        axes.set_title(f"slope {slope:.3f}")
        axes.legend()


def embeddings(run: Run, found: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Each data set in the plane, one colour a class."""
    with run.figure("embedding", ncols=len(found), squeeze=False, figsize=(4.5 * len(found), 4)) as (_, axes):
        for panel, (name, (points, labels)) in zip(axes[0], found.items(), strict=True):
            panel.scatter(*points.T, c=labels, cmap="tab10", s=14)
            panel.set_title(name)
            panel.set_aspect("equal", "datalim")
