"""The pictures of the experiment."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxlab.experiments.base import Run

__all__ = ["ablation", "attention", "convergence"]

# So that an exact optimum has a place on a logarithmic axis.
_FLOOR = 1e-8


def convergence(
    run: Run,
    name: str,
    titles: Sequence[str],
    evaluations: np.ndarray,
    found: Mapping[str, np.ndarray],
    *,
    label: str,
) -> None:
    """Median and quartiles over seeds against evaluations, a panel a problem; ``found[method]``: [problem, seed, t]."""
    columns = min(4, len(titles))
    rows = -(-len(titles) // columns)
    with run.figure(name, nrows=rows, ncols=columns, squeeze=False, figsize=(3.6 * columns, 2.7 * rows)) as (
        figure,
        axes,
    ):
        for panel, title, i in zip(axes.ravel(), titles, range(len(titles)), strict=False):
            for method, history in found.items():
                low, middle, high = np.quantile(np.maximum(history[i], _FLOOR), [0.25, 0.5, 0.75], axis=0)
                (line,) = panel.loglog(evaluations, middle, label=method, linewidth=1.4)
                panel.fill_between(evaluations, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            panel.set_title(title, fontsize=9)
        for panel in axes.ravel()[len(titles) :]:
            panel.set_axis_off()
        for panel in axes[:, 0]:
            panel.set_ylabel(label)
        for panel in axes[-1]:
            panel.set_xlabel("evaluations")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), fontsize=8)


def ablation(run: Run, functions: Sequence[int], medians: Mapping[str, np.ndarray]) -> None:
    """Median errors of the variants as bars; ``medians[variant]`` has one number a function."""
    with run.figure("ablation", figsize=(2 + 1.1 * len(functions), 3.4)) as (_, axes):
        width = 0.8 / len(medians)
        for k, (variant, errors) in enumerate(medians.items()):
            place = np.arange(len(functions)) + (k - (len(medians) - 1) / 2) * width
            axes.bar(place, np.maximum(errors, _FLOOR), width, label=variant)
        axes.set_yscale("log")
        axes.set_xticks(range(len(functions)), [f"f{function}" for function in functions])
        axes.set_ylabel("median error")
        axes.legend(fontsize=7)


def attention(run: Run, generations: Sequence[int], selection: np.ndarray, mutation: np.ndarray) -> None:
    """Selection matrix of the population and mutation matrix of its best row, early, midway and at the end."""
    with run.figure("attention", nrows=2, ncols=len(generations), figsize=(3 * len(generations), 5.6)) as (
        figure,
        axes,
    ):
        for j, generation in enumerate(generations):
            for row, matrices, title in ((0, selection, "selection"), (1, mutation, "mutation")):
                image = axes[row, j].imshow(matrices[j], vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
                axes[row, j].set_title(f"{title}, generation {generation}", fontsize=9)
        figure.colorbar(image, ax=axes, shrink=0.6)
