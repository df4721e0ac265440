"""The plots of the experiment: perplexity over depth, surrogates on masks they had not seen, contributions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlab.experiments.base import Run

__all__ = ["contributions", "perplexities", "surrogates"]

OURS = ("contribution_mlp", "contribution_pairwise", "contribution_verified", "search_verified")


def perplexities(run: Run, depths: Sequence[int], found: Mapping[str, np.ndarray], whole: float) -> None:
    """Perplexity of every method at every depth, logarithmic."""
    with run.figure("perplexity", figsize=(7.5, 4.8)) as (_, axes):
        axes.axhline(whole, color="k", lw=0.8, ls=":", label="whole model")
        for method, values in found.items():
            ours = method in OURS
            axes.plot(
                depths,
                values,
                marker="o" if ours else ".",
                lw=2 if ours else 1,
                ls="-" if ours else "--",
                label=method.replace("_", " "),
            )
        axes.set(xlabel="blocks removed", ylabel="perplexity", yscale="log", xticks=list(depths))
        axes.legend(fontsize=8, ncols=2)


def surrogates(run: Run, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Predicted against true values of held-out masks, coloured by the number of blocks kept."""
    with run.figure("surrogates", ncols=len(found), squeeze=False, figsize=(5 * len(found), 4.2)) as (figure, axes):
        for panel, (kind, one) in zip(axes[0], found.items(), strict=True):
            points = panel.scatter(one["truth"], one["predicted"], c=one["sizes"], s=9, cmap="viridis")
            panel.axline((float(one["truth"].mean()),) * 2, slope=1, color="k", lw=0.8)
            panel.set(xlabel=f"true {one['target']}", ylabel="predicted, held out")
            panel.set_title(
                f"{kind}: R² {one['quality'][0]:.3f}, rank correlation {one['quality'][2]:.3f}", fontsize=10
            )
            figure.colorbar(points, ax=panel, label="blocks kept")


def contributions(run: Run, found: Mapping[str, Mapping[str, Any]], alone: np.ndarray) -> None:
    """Contribution of each block by depth with 95 % intervals, beside what its removal alone costs."""
    with run.figure("contributions", nrows=len(found) + 1, squeeze=False, figsize=(8, 2.3 * (len(found) + 1))) as (
        _,
        axes,
    ):
        places = np.arange(len(alone))
        for (panel,), (kind, one) in zip(axes, found.items(), strict=False):
            panel.bar(places, one["mean"], yerr=1.96 * one["error"], error_kw={"lw": 1})
            panel.set(ylabel=f"{kind}\n({one['target']})")
        panel = axes[-1][0]
        panel.bar(places, alone, color="tab:gray")
        panel.set(xlabel="block", ylabel="alone\n(nats)")
