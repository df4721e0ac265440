"""From what was measured to the table, the claims and the pictures."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlab.dynamics import molecules
from jaxlab.experiments.base import Run
from jaxlab.experiments.gldp import plots
from jaxlab.experiments.gldp.judging import METRICS, ROLLOUT_METRICS, Setting

__all__ = ["Choices", "report"]


@dataclass(frozen=True)
class Choices:
    """What validation frames chose.

    Attributes:
      rank: of Koopman.
      network: width and epochs.
      level: place of the noise level.
      sweep: divergences at all noise levels.
    """

    rank: int
    network: tuple[int, int]
    level: int
    sweep: dict[str, np.ndarray]


def report(
    setting: Setting,
    run: Run,
    recorded: dict[str, Any],
    found: dict[str, dict[str, np.ndarray]],
    independent: dict[str, dict[str, np.ndarray]],
    choices: Choices,
    search: dict[str, np.ndarray],
    spacing: float,
) -> None:
    config, slow = setting.config, recorded["kinetics"]
    sweep, chosen = choices.sweep, choices.level
    truth = float(slow["t1"])
    trained = [found[f"neural_{k}"] for k in range(config.seeds)]
    for name, rolled in found.items():
        run.row(name, **{metric: float(rolled[metric]) for metric in ROLLOUT_METRICS})
    values = {metric: np.array([one[metric] for one in trained], float) for metric in ROLLOUT_METRICS}
    run.row("neural_mean", **{metric: of_seeds.mean() for metric, of_seeds in values.items()})
    for name, ensemble in independent.items():
        run.row(name, **{metric: float(ensemble[metric]) for metric in METRICS})
    run.row("md_halves", jsd=recorded["halves"], t1=truth, decorrelation=float(slow["decorrelation"]))

    ratio = values["jsd"] / float(found["koopman"]["jsd"])
    run.measure("neural_beats_koopman_on_ensemble", ratio.mean())
    run.measure("koopman_damps", found["koopman"]["rmsf_ratio"])
    run.measure("langevin_needs_the_right_noise_level", sweep["all"][chosen] / sweep["all"][0])
    collapse = [
        float(found["koopman"]["jsd"] / found["koopman_small_noise"]["jsd"]),
        float(trained[0]["jsd"] / found["neural_small_noise"]["jsd"]),
    ]
    run.measure("calibrated_noise_prevents_collapse", max(collapse))
    finite = [float(found[name]["finite"]) for name in found if not name.endswith("small_noise")]
    run.measure("long_rollouts_stay_finite", min(finite))

    wins = int(np.sum(ratio < 1))
    phi, psi = (float(np.mean(values[f"jsd_{angle}"] / found["koopman"][f"jsd_{angle}"])) for angle in ("phi", "psi"))
    run.note(
        f"Network against Koopman over {config.seeds} trainings: {ratio.mean():.2f} ± {ratio.std():.2f} of the "
        f"divergence, lower in {wins}; {phi:.2f} for phi alone, {psi:.2f} for psi. Chosen on validation frames: "
        f"Koopman of rank {choices.rank} of {config.ranks}, a network {choices.network[0]} wide of {config.widths} "
        f"trained for {choices.network[1]} epochs of {config.epochs}, noise level {config.noise_levels[chosen]} of "
        f"{config.noise_levels}."
    )
    md_failure = molecules.failure_step(recorded["lddt"])
    run.note(
        "Failure is the first step with lDDT below 0.65 to the first frame; the simulation itself has it at "
        f"{md_failure} of {len(recorded['lddt'])} frames, since a turn of psi moves half of ten atoms. t1 and "
        f"decorrelation are in frames of {spacing:g} ps, {truth:.0f} and {float(slow['decorrelation']):.0f} in the "
        "simulation; Langevin's are on its own clock, and match with "
        f"{truth / float(found['langevin']['t1']):.3g} frames a step. Contacts do not count here: no residues are "
        "three apart."
    )
    if search and all(np.isfinite(search[name]).any() for name in ("koopman", "neural")):
        near = {name: int(np.nanargmin(np.abs(np.log(search[name] / truth)))) for name in ("koopman", "neural")}
        run.note(
            "One-step models are too fast: noise that is the same in all states lets barriers be crossed that the "
            "molecule does not cross. Longer steps mend it in part: nearest to the simulation are "
            + " and ".join(
                f"{name} at {config.skips[k] * spacing:g} ps with {search[name][k] / truth:.2f} of its t1"
                for name, k in near.items()
            )
            + "."
        )
    shown = {"koopman": found["koopman"], "neural": trained[0], "langevin": found["langevin"]}
    plots.free_energies(
        run,
        {"MD": recorded["metrics"]["counts"], "reconstruction": recorded["reconstruction"]["counts"]}
        | {name: rolled["counts"] for name, rolled in shown.items()},
    )
    plots.local_distances(
        run,
        {"MD": recorded["lddt"][:: max(1, len(recorded["lddt"]) // 256)]}
        | {name: rolled["lddt_curve"] for name, rolled in shown.items()},
        {"MD": len(recorded["lddt"])} | dict.fromkeys(shown, config.steps),
    )
    plots.correlations(
        run,
        {"MD": np.asarray(slow["correlation"])} | {name: rolled["correlation"] for name, rolled in shown.items()},
        setting.reference.lags * spacing,
    )
    plots.noise_levels(run, config.noise_levels, sweep["validation"], chosen, float(found["koopman"]["jsd"]))
    if search:
        lags = [spacing * skip for skip in (config.skip, *config.skips)]
        first = {"koopman": found["koopman"]["t1"], "neural": values["t1"].mean()}
        plots.relaxation(
            run,
            lags,
            {name: spacing * np.concatenate([[first[name]], search[name]]) for name in ("koopman", "neural")},
            spacing * truth,
        )
