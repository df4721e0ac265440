"""The pictures of the experiment."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxlab.experiments.base import Run

__all__ = ["correlations", "free_energies", "local_distances", "noise_levels", "relaxation"]


def free_energies(run: Run, counts: Mapping[str, np.ndarray]) -> None:
    """``-ln p`` of (phi, psi), one panel an ensemble."""
    with run.figure("free_energy", ncols=len(counts), figsize=(2.6 * len(counts) + 0.6, 3), sharey=True) as (
        figure,
        axes,
    ):
        for panel, (name, histogram) in zip(axes, counts.items(), strict=True):
            with np.errstate(divide="ignore"):
                energy = -np.log(histogram.T / histogram.sum())
            energy -= energy[np.isfinite(energy)].min()
            image = panel.imshow(
                np.where(np.isfinite(energy), energy, np.nan),
                origin="lower",
                extent=(-180, 180, -180, 180),
                vmin=0,
                vmax=7,
                cmap="viridis",
            )
            panel.set_title(name)
            panel.set_xlabel("phi (degrees)")
            panel.set_xticks((-180, 0, 180))
        axes[0].set_ylabel("psi (degrees)")
        axes[0].set_yticks((-180, 0, 180))
        figure.colorbar(image, ax=axes, label="free energy (kT)")


def local_distances(run: Run, curves: Mapping[str, np.ndarray], steps: Mapping[str, int]) -> None:
    """LDDT to the first frame against the step."""
    with run.figure("lddt", figsize=(6, 3.4)) as (_, axes):
        for name, curve in curves.items():
            curve = curve[np.isfinite(curve)]
            axes.plot(np.linspace(0, steps[name], len(curve)), curve, label=name, linewidth=0.8, alpha=0.8)
        axes.axhline(0.65, color="black", linestyle="--", linewidth=1, label="failure")
        axes.set_xlabel("step")
        axes.set_ylabel("lDDT to the first frame")
        axes.legend(fontsize=7, loc="lower right")


def correlations(run: Run, curves: Mapping[str, np.ndarray], span: float) -> None:
    """Autocorrelation of the slowest independent component."""
    with run.figure("autocorrelation", figsize=(5.5, 3.4)) as (_, axes):
        for name, curve in curves.items():
            axes.plot(np.linspace(0, span, len(curve)), curve, label=name, linewidth=2.5 if name == "MD" else 1.2)
        axes.axhline(np.exp(-1), color="black", linestyle="--", linewidth=1)
        axes.set_xlabel("lag (ps; Langevin on its own clock)")
        axes.set_ylabel("autocorrelation of TIC 1")
        axes.legend(fontsize=7)


def noise_levels(run: Run, levels: Sequence[float], validation: np.ndarray, chosen: int, koopman: float) -> None:
    """Divergence against the noise level of the score."""
    with run.figure("noise_level", figsize=(5, 3.4)) as (_, axes):
        axes.semilogx(levels, validation, "o-", label="Langevin, validation frames")
        axes.plot(levels[chosen], validation[chosen], "o", markersize=12, markerfacecolor="none", color="black")
        axes.axhline(koopman, color="C1", linestyle="--", label="Koopman, all frames")
        axes.set_xlabel("noise level of the score")
        axes.set_ylabel("JSD of (phi, psi)")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)


def relaxation(run: Run, lags: Sequence[float], times: Mapping[str, np.ndarray], truth: float) -> None:
    """Slowest time of the rollouts against the time that one step spans."""
    with run.figure("relaxation", figsize=(5, 3.4)) as (_, axes):
        for name, values in times.items():
            axes.loglog(lags, values, "o-", label=name)
        axes.axhline(truth, color="black", linestyle="--", linewidth=1, label="MD")
        axes.set_xlabel("time of one step (ps)")
        axes.set_ylabel("slowest time t1 (ps)")
        axes.legend(fontsize=8)
