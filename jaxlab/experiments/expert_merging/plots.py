"""The pictures of the experiment."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlab.editing.expert_merging import Coefficients
from jaxlab.experiments.base import Run

if TYPE_CHECKING:
    from jaxlab.experiments.expert_merging import Config

__all__ = ["coefficients", "retained", "sensitivity"]

_SHOWN = (
    "weight_average",
    "ties",
    "dare",
    "task_arithmetic",
    "iso_c",
    "tsv",
    "wudi_low_rank",
    "wudi",
    "wudi_closed_form",
    "adamerging_plus_plus",
    "adamerging",
    "no_logits",
    "no_hidden_states",
    "expert_merging",
    "plus_plus",
)
_OURS = ("expert_merging", "plus_plus")


def retained(run: Run, domains: Sequence[str], shares: Mapping[str, np.ndarray]) -> None:
    """Share of each expert's gain that is retained, by domain and in the mean, with the spread over repeats."""
    shown = [name for name in _SHOWN if name in shares]
    with run.figure("retained", ncols=len(domains) + 1, sharey=True, figsize=(3 + 2 * len(domains), 5)) as (_, axes):
        panels = {"mean": lambda s: s.mean(1)} | {d: (lambda s, k=k: s[:, k]) for k, d in enumerate(domains)}
        for axis, (title, of) in zip(axes, panels.items(), strict=True):
            values = [of(shares[name]) for name in shown]
            colours = ["C1" if name in _OURS else "C2" if name.startswith("no_") else "C0" for name in shown]
            axis.barh(
                [name.replace("_", " ").replace(" plus plus", "++").replace("plus plus", "++") for name in shown],
                [value.mean() for value in values],
                xerr=[value.std() for value in values],
                color=colours,
                error_kw={"lw": 1},
            )
            axis.axvline(0, color="k", lw=0.8)
            axis.axvline(1, color="k", lw=0.8, ls=":")
            # A method that falls far below the base would squeeze all others.
            lowest = min(0.0, *(value.mean() for value in values))
            axis.set(title=title, xlabel="retained", xlim=(max(-1.0, 1.1 * lowest), 1.05))
            axis.grid(axis="x", alpha=0.3)


def sensitivity(run: Run, config: "Config", shares: Mapping[str, np.ndarray]) -> None:
    """What γ and the number of inputs do; every line a repeat."""
    with run.figure("sensitivity", ncols=2, figsize=(9, 3.6), sharey=True) as (_, axes):
        ours = shares["expert_merging"]
        gammas = sorted([(gamma, shares[f"gamma_{gamma:g}"]) for gamma in config.gammas] + [(config.gamma, ours)])
        counts = sorted([(n, shares[f"inputs_{n}"]) for n in config.input_counts] + [(config.inputs, ours)])
        for axis, points, label in ((axes[0], gammas, "γ"), (axes[1], counts, "inputs an expert")):
            places = np.arange(len(points))
            values = np.stack([share.mean(1) for _, share in points])
            axis.plot(places, values, color="C1", alpha=0.35, lw=1)
            axis.plot(places, values.mean(1), "o-", color="C1", label="Expert Merging")
            axis.set(xlabel=label, xticks=places, xticklabels=[f"{at:g}" for at, _ in points])
            for name, style in (("task_arithmetic", "--"), ("adamerging", ":")):
                axis.axhline(shares[name].mean(), color="k", lw=1, ls=style, label=f"{name.replace('_', ' ')}, best")
            axis.grid(alpha=0.3)
        axes[0].set(ylabel="retained")
        axes[0].legend(fontsize=8)


def coefficients(run: Run, domains: Sequence[str], shown: Coefficients, importance: Mapping[str, Any]) -> None:
    """Coefficients of the first repeat, tensor by expert, beside the importance of each tensor."""
    named = shown.by_name()
    names = [name for leaf in shown.layout.leaves for name in leaf.names]
    labels = [re.sub("^model/layers/|^layers/|self_attn/|mlp/|_proj|/weight$", "", name) for name in names]
    table = np.array([[pieces[0] for pieces in named[name]] for name in names])
    mass = np.concatenate([np.asarray(importance[leaf.path]).reshape(-1) for leaf in shown.layout.leaves])
    order = np.argsort(labels)
    with run.figure("coefficients", ncols=2, figsize=(9, 2 + 0.24 * len(names)), sharey=True) as (figure, axes):
        bound = max(float(np.abs(table).max()), 1e-6)
        picture = axes[0].imshow(table[order], aspect="auto", cmap="RdBu_r", vmin=-bound, vmax=bound)
        axes[0].set(xticks=range(len(domains)), xticklabels=domains, title="coefficient")
        axes[0].set_yticks(range(len(names)), [labels[i] for i in order], fontsize=8)
        figure.colorbar(picture, ax=axes[0])
        axes[1].barh(range(len(names)), mass[order], color="C0")
        axes[1].set(title="importance", xlabel="share")
