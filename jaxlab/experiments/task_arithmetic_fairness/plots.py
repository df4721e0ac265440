"""The pictures of the experiment."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxlab.experiments.base import Run
from jaxlab.experiments.task_arithmetic_fairness.evaluation import METRICS, SCALES

__all__ = ["frontier", "injections", "sweep"]

_SHOWN = {
    "accuracy": "accuracy",
    "demographic_parity": "demographic parity diff.",
    "equalized_odds": "equalized odds diff.",
}
_LINES = {"full": ("full fine-tuning", "C1", "--"), "lora": ("LoRA", "C2", ":")}


def sweep(run: Run, name: str, found: Mapping[str, np.ndarray], bands: np.ndarray) -> None:
    """Accuracy and both differences against λ, with bootstrap bands of the first repeat.

    ``found[PATH.test]`` is ``[repeat, λ, metric]``, ``bands`` ``[λ, panel, 2]``.
    """
    with run.figure(f"sweep-{name}", ncols=3, figsize=(11, 3.4)) as (figure, axes):
        for panel, (metric, label) in enumerate(_SHOWN.items()):
            axis, column = axes[panel], METRICS.index(metric)
            curves = found["task_arithmetic.test"][..., column]
            text = "one repeat" if len(curves) > 1 else None
            for repeat, curve in enumerate(curves):
                axis.plot(
                    SCALES,
                    curve,
                    color="C0",
                    alpha=0.4,
                    lw=1,
                    label=text if repeat == 0 else None,
                )
            axis.plot(SCALES, curves.mean(0), "o-", color="C0", ms=4, label="task arithmetic, mean")
            axis.fill_between(SCALES, *bands[:, panel].T, color="C0", alpha=0.15, lw=0, label="95 % band, first repeat")
            for path, (text, colour, style) in _LINES.items():
                values = found[f"{path}.test"][:, -1, column]
                axis.axhline(values.mean(), color=colour, ls=style, label=text)
                axis.axhspan(values.min(), values.max(), color=colour, alpha=0.1, lw=0)
            axis.set(xlabel="coefficient λ", title=label)
        axes[0].legend(fontsize=7, loc="lower right")
        figure.suptitle(name.replace(".", ", by "), fontsize=10)


def frontier(run: Run, found: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Accuracy against demographic parity difference of every grid point, first repeat, the diagonal on top."""
    with run.figure("frontier", ncols=len(found), figsize=(4.6 * len(found), 3.8), squeeze=False) as (_, axes):
        x, y = METRICS.index("demographic_parity"), METRICS.index("accuracy")
        for axis, (name, of_name) in zip(axes[0], found.items(), strict=True):
            if "grid.test" in of_name:
                grid = of_name["grid.test"][0]
                spread = of_name["grid.scales"][0].mean(1)
                points = axis.scatter(grid[:, x], grid[:, y], c=spread, cmap="viridis", s=10, alpha=0.6)
                axis.figure.colorbar(points, ax=axis, label="mean of the groups' λ")
            diagonal = of_name["task_arithmetic.test"][0]
            axis.plot(diagonal[:, x], diagonal[:, y], "k.-", lw=1, label="one λ for all")
            scaled = of_name["full.test"][0]
            axis.plot(scaled[:, x], scaled[:, y], "-", color="C1", lw=1, alpha=0.7, label="full fine-tuning, scaled")
            for path, (text, colour, _) in _LINES.items():
                end = of_name[f"{path}.test"][0][-1]
                axis.plot(end[x], end[y], "*", color=colour, ms=12, label=text)
            # An untrained head would squeeze all others into a corner.
            best = max(diagonal[:, y].max(), scaled[:, y].max())
            axis.set(ylim=(best - 0.12, best + 0.015))
            axis.set(xlabel="demographic parity difference", ylabel="accuracy", title=name.replace(".", ", by "))
            axis.legend(fontsize=7)


def injections(
    run: Run,
    found: Mapping[str, Mapping[str, np.ndarray]],
    groups: Mapping[str, Sequence[str]],
    scales: Mapping[str, np.ndarray],
) -> None:
    """What each group's vector does to full fine-tuning, mean of the repeats."""
    rows = ("demographic_parity", "equalized_odds")
    size = (4.2 * len(found), 6.0)
    with run.figure("injections", nrows=2, ncols=len(found), figsize=size, squeeze=False, sharex=True) as (_, axes):
        for column, (name, of_name) in enumerate(found.items()):
            for row, metric in enumerate(rows):
                axis = axes[row, column]
                for group, text in enumerate(groups[name]):
                    curves = of_name[f"inject.{group}.test"][..., METRICS.index(metric)]
                    at = scales[name]
                    axis.plot(at, curves.mean(0), "o-", ms=3, label=text)
                    if len(curves) > 1:
                        axis.fill_between(at, curves.min(0), curves.max(0), alpha=0.12, lw=0)
                axis.set(ylabel=_SHOWN[metric])
            axes[0, column].set(title=name.replace(".", ", by "))
            axes[1, column].set(xlabel="injected share λ of the group's vector")
            axes[0, column].legend(fontsize=7, title="vector of", title_fontsize=7)
