"""The plots of the experiment on BR-FedBi."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxlab.experiments.base import Run
from jaxlab.experiments.br_fedbi.simulation import METHODS

__all__ = ["against_messages", "claims", "heat_map"]

# One colour a method; single-level ones dashed, the method with sub-loops in grey.
_STYLES: Mapping[str, dict[str, Any]] = {
    "br_fedbi": {"color": "#4477aa"},
    "br_fedbi_m": {"color": "#000000"},
    "br_fedbi_p": {"color": "#ee6677"},
    "bilantine": {"color": "#999999"},
    "sgd": {"color": "#66ccee", "linestyle": "--"},
    "sgd_m": {"color": "#228833", "linestyle": "--"},
}


def against_messages(
    run: Run, curves: Mapping[tuple[str, str], np.ndarray], attacks: Sequence[str], *, rounds: int, aggregator: str
) -> None:
    """Accuracy against the messages of a client, a panel an attack.

    Args:
      run: the run.
      curves: ``[seeds, attacks, blocks]`` in percent, by method and aggregator.
      attacks: names.
      rounds: in all.
      aggregator: of the curves that are drawn.
    """
    columns = min(len(attacks), 4)
    rows = -(-len(attacks) // columns)
    with run.figure(
        "attacks",
        nrows=rows,
        ncols=columns,
        figsize=(max(3.3 * columns, 5), 3.1 * rows + 0.6),
        squeeze=False,
        sharey=True,
    ) as (figure, axes):
        for k, (attack, panel) in enumerate(zip(attacks, axes.ravel(), strict=False)):
            for (method, rule), accuracy in curves.items():
                if rule != aggregator:
                    continue
                messages = METHODS[method].messages * rounds * np.arange(1, accuracy.shape[2] + 1) / accuracy.shape[2]
                panel.plot(messages, accuracy[:, k].mean(0), label=METHODS[method].label, **_STYLES[method])
                panel.fill_between(
                    messages,
                    accuracy[:, k].min(0),
                    accuracy[:, k].max(0),
                    color=_STYLES[method]["color"],
                    alpha=0.15,
                    lw=0,
                )
            panel.axvline(3 * rounds, color="grey", lw=0.6, ls=":")
            panel.set(title=attack.replace("_", " "), xlim=(0, 3.6 * rounds), ylim=(0, 100))
        for panel in axes.ravel()[len(attacks) :]:
            panel.set_visible(False)
        for panel in axes[:, 0]:
            panel.set_ylabel("accuracy (%)")
        for panel in axes[-1]:
            panel.set_xlabel("messages of a client")
        axes[0, 0].legend(fontsize=7, loc="lower right")
        figure.suptitle(f"Hyper-representation, {aggregator.replace('_', ' ')}; step sizes tuned alike", fontsize=10)


def heat_map(
    run: Run,
    final: Mapping[tuple[str, str], np.ndarray],
    attacks: Sequence[str],
    methods: Sequence[str],
    aggregators: Sequence[str],
) -> None:
    """Accuracy at equal messages, attack by aggregator, a panel a method; ``final`` is ``[attacks]`` in percent."""
    columns = min(len(methods), 3)
    rows = -(-len(methods) // columns)
    size = max(2.4 + 0.62 * len(attacks) * columns, 5), max((1.4 + 0.42 * len(aggregators)) * rows, 2.6)
    with run.figure("heat_map", nrows=rows, ncols=columns, figsize=size, squeeze=False) as (figure, axes):
        image = None
        for panel, method in zip(axes.ravel(), methods, strict=False):
            values = np.stack([final[method, rule] for rule in aggregators])
            image = panel.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
            for (row, column), value in np.ndenumerate(values):
                colour = "black" if value > 60 else "white"
                panel.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=colour)
            panel.set_xticks(range(len(attacks)), [name.replace("_", " ") for name in attacks], rotation=60, fontsize=7)
            first = panel in axes[:, 0]
            labels = [name.replace("_", " ") if first else "" for name in aggregators]
            panel.set_yticks(range(len(aggregators)), labels, fontsize=7)
            panel.set_title(METHODS[method].label, fontsize=9)
        for panel in axes.ravel()[len(methods) :]:
            panel.set_visible(False)
        figure.colorbar(image, ax=axes.ravel().tolist(), label="accuracy (%) at equal messages")


def claims(
    run: Run,
    *,
    paths: Mapping[str, np.ndarray],
    variances: np.ndarray,
    floors: Mapping[str, np.ndarray],
    sweep: Mapping[int, np.ndarray],
    attacks: Sequence[str],
    weights: np.ndarray,
    wrong: np.ndarray,
    area: float,
) -> None:
    """Quadratic, noise floor, share of Byzantine clients, and learned weights, a panel each."""
    with run.figure("claims", nrows=2, ncols=2, figsize=(10.5, 7.5)) as (_, axes):
        quadratic, floor, share, cleaning = axes.ravel()
        # Some coincide: dashes let the one below show.
        for (name, error), style in zip(paths.items(), ("-", "-", "-", "--", ":"), strict=True):
            # What overflows leaves the plot.
            shown = np.where(error < 1e12, error, np.nan)
            quadratic.semilogy(np.linspace(0, 1, len(error)), shown, style, label=name)
        quadratic.set(xlabel="share of the rounds", ylabel="largest error of x, y, z", title="Quadratic")
        quadratic.legend(fontsize=7)
        for (name, values), colour in zip(floors.items(), ("#000000", "#4477aa"), strict=True):
            floor.loglog(variances, values, marker="o", color=colour, label=name)
        theory = floors["alike"][0] * np.sqrt(variances / variances[0])
        floor.loglog(variances, theory, color="grey", ls="--", lw=0.8, label="slope 1/2")
        floor.set(xlabel=r"$(1 - \beta) / (1 + \beta)$", ylabel="hypergradient norm", title="Noise floor under ALIE")
        floor.legend(fontsize=7)
        counts = sorted(sweep)
        for k, attack in enumerate(attacks):
            share.plot(counts, [sweep[f][k] for f in counts], marker="o", ms=3, label=attack.replace("_", " "))
        share.set(
            xlabel="Byzantine clients", ylabel="accuracy (%)", ylim=(0, 100), title="BR-FedBiM, coordinate median"
        )
        share.legend(fontsize=7, loc="lower left")
        bins = np.linspace(0, 1, 31)
        cleaning.hist(weights[~wrong], bins, alpha=0.7, color="#4477aa", label="right label")
        cleaning.hist(weights[wrong], bins, alpha=0.7, color="#ee6677", label="wrong label")
        cleaning.set(xlabel="learned weight", ylabel="images", title=f"Hyper-cleaning, area under the curve {area:.3f}")
        cleaning.legend(fontsize=7)
