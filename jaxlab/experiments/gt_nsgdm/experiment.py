"""The run that measures the claims of the paper on GT-NSGDm."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxlab.experiments.base import Experiment, Run
from jaxlab.experiments.gt_nsgdm import bias, figures, language_model, rates, regression
from jaxlab.experiments.gt_nsgdm.claims import CLAIMS
from jaxlab.experiments.gt_nsgdm.config import PRESETS, TOPOLOGIES, Config
from jaxlab.experiments.gt_nsgdm.methods import METHODS, select
from jaxlab.optim import noise, topology

__all__ = ["EXPERIMENT"]

# Before, the losses of all methods fall alike and their order depends on the seed.
_STEPS_TO_TELL_APART = 300


class Trained(NamedTuple):
    """A tuned and trained language model.

    Attributes:
      best: learning rate and second hyperparameter.
      losses: held-out loss, ``[evaluations, runs, n]``.
      params: of every run and node.
    """

    best: np.ndarray
    losses: np.ndarray
    params: Any

    @property
    def final(self) -> np.ndarray:
        """Loss at the end, ``[runs, n]``."""
        return self.losses[-1]


def run(config: Config, run: Run) -> None:
    """Measure all claims."""
    # Seconds of each part on two CPU cores, compile time included, for the progress bar alone.
    regressions = len(config.noises) * len(config.regression_methods)
    cost_of_regression = 1.0 + 2.5e-4 * config.regression_steps
    cost_of_rates = 5.0 + 1e-4 * sum(config.horizons) + 1.0 * len(config.networks)
    cost_of_training = 4.0 + 0.04 * config.lm_steps
    has_stable = "stable" in config.noises and "gt_nsgdm" in config.regression_methods
    further_graphs = len({*config.topology_methods} & {*config.lm_methods}) * (len(config.topologies) - 1)
    trainings = len(config.lm_methods) + 0.25 * further_graphs
    with_tails = 4.0 * bool(config.tail_draws and "gt_nsgdm" in config.lm_methods)
    run.plan(
        2.0
        + cost_of_regression * (regressions + 0.2 * has_stable)
        + cost_of_rates
        + cost_of_training * trainings
        + with_tails
    )

    # First, since a corpus that is missing should not be found out after minutes.
    sizes = config.language_model
    task = language_model.Task(sizes, language_model.load_corpus(sizes))
    problem_key, noise_key, rate_key, model_key = jax.random.split(run.key, 4)
    with_bias = _bias(config, run, cost=2.0)
    sweeps = _regression(config, run, problem_key, noise_key, cost=cost_of_regression)
    norms = _rates(config, run, rate_key, cost=cost_of_rates)
    trained, tails = _language_model(config, run, task, model_key, cost=cost_of_training)
    for name in [name for name in METHODS if name in trained or any(name in of_kind for of_kind in sweeps.values())]:
        run.row(name, **_columns(name, sweeps, trained))
    for name in [name for name in trained if name not in METHODS]:
        run.row(name, **_columns(name, sweeps, trained))
    figures.claims(run, with_bias, sweeps, norms, horizons=config.horizons, networks=config.networks)
    losses = {name: outcome.losses for name, outcome in trained.items()}
    figures.language_model(run, losses, tails, steps=config.lm_steps)


def _bias(config: Config, run: Run, *, cost: float) -> dict[str, np.ndarray]:
    start = float(jax.random.uniform(jax.random.fold_in(run.key, 99), minval=4.0, maxval=6.0))
    paths = run.stage("bias", lambda: dict(bias.trajectories(start, steps=config.bias_steps)), cost=cost)
    error = {name: abs(float(path[-1]) - bias.MINIMISER) for name, path in paths.items()}
    run.measure("naive_normalisation_is_biased", min(error["nsgd"], error["nsgdm"]))
    run.measure("tracking_removes_the_bias", error["gt_nsgdm"])
    run.note(f"Three nodes with centres 0, 0, 9, gradient norm at the end: {_listing(error)}.")
    return paths


def _regression(
    config: Config, run: Run, problem_key: Key[Array, ""], noise_key: Key[Array, ""], *, cost: float
) -> dict[str, dict[str, regression.Sweep]]:
    problem = regression.make_problem(problem_key)

    @functools.lru_cache(maxsize=1)  # the draws of one kind serve all methods, and are large
    def draws(kind: str) -> tuple[Array, Array]:
        drawn = regression.draw_noise(
            jax.random.fold_in(noise_key, list(regression.NOISES).index(kind)),
            kind,
            runs=1 + config.regression_seeds,
            steps=config.regression_steps,
        )
        return drawn[:, :1], drawn[:, 1:]

    def tuned(kind: str, name: str) -> regression.Sweep:
        stored = run.stage(
            f"regression_{kind}_{name}",
            lambda: dataclasses.asdict(
                regression.tune(METHODS[name], problem, *draws(kind), step_sizes=config.regression_step_sizes)
            ),
            cost=cost,
            log=lambda _, sweep: {
                "noise": kind,
                "method": name,
                "best": sweep["best"],
                "final": sweep["final"]["error"],
            },
        )
        return regression.Sweep(**stored)

    sweeps = {kind: {name: tuned(kind, name) for name in select(config.regression_methods)} for kind in config.noises}
    stable = sweeps.get("stable", {})
    needs = "needs {} under stable noise"
    if {"gt_nsgd", "gt_nsgdm"} <= stable.keys():
        run.measure("momentum_beats_skewed_noise", stable["gt_nsgd"].errors.mean() / stable["gt_nsgdm"].errors.mean())
    else:
        run.skip("momentum_beats_skewed_noise", "cpu", needs.format("gt_nsgd and gt_nsgdm"))
    if {"dsgd", "gt_nsgdm"} <= stable.keys():
        widths = {name: sweep.plateau() for name, sweep in stable.items()}
        run.measure("wide_step_size_plateau", widths["gt_nsgdm"] / widths["dsgd"])
        run.note(f"Stable noise, decades of step sizes within twice the method's best error: {_listing(widths)}.")
    else:
        run.skip("wide_step_size_plateau", "cpu", needs.format("dsgd and gt_nsgdm"))

    tracked = [of_kind["gt_nsgdm"] for of_kind in sweeps.values() if "gt_nsgdm" in of_kind]
    if tracked:
        rho = topology.spectral_norm(regression.RING)
        radius = rho * regression.N_NODES**0.5 / (1.0 - rho)
        run.measure(
            "bounded_motion",
            np.max([(sweep.final["motion"].max(), sweep.final["spread"].max() / radius) for sweep in tracked]),
        )
    else:
        run.skip("bounded_motion", "cpu", "needs gt_nsgdm")
    if "gt_nsgdm" in stable:
        complete = run.stage(
            "regression_complete_graph",
            lambda: regression.run_tuned(
                METHODS["gt_nsgdm"],
                problem,
                stable["gt_nsgdm"].best,
                draws("stable")[1],
                mixing_matrix=topology.complete(regression.N_NODES),
            ),
            cost=0.2 * cost,
        )
        run.measure(
            "topology_independent", stable["gt_nsgdm"].errors.mean() / regression.last_tenth(complete["error"]).mean()
        )
    else:
        run.skip("topology_independent", "cpu", needs.format("gt_nsgdm"))
    return sweeps


def _rates(config: Config, run: Run, key: Key[Array, ""], *, cost: float) -> dict[str, np.ndarray]:
    share = cost / 3.0
    norms = {
        name: run.stage(
            f"rate_tail_index_{name}",
            functools.partial(
                rates.norm_by_horizon, key, config.horizons, knows_tail=name == "known", trials=config.trials
            ),
            cost=share,
            log=lambda _, values: {"gradient_norm": values.mean(1)},
        )
        for name in rates.THEORY_SLOPES
    }
    norms["networks"] = run.stage(
        "speedup",
        lambda: rates.norm_by_nodes(key, config.networks, steps=config.speedup_steps, trials=config.trials),
        cost=share,
        log=lambda _, values: {"gradient_norm": values.mean(1)},
    )
    run.measure("rate_matches_theory", rates.log_slope(config.horizons, norms["known"].mean(1)))
    run.measure("rate_matches_theory_without_tail_index", rates.log_slope(config.horizons, norms["unknown"].mean(1)))
    by_nodes = norms["networks"].mean(1)
    run.measure("speedup_with_nodes", by_nodes[-1] / by_nodes[0])
    return norms


def _language_model(
    config: Config, run: Run, task: language_model.Task, key: Key[Array, ""], *, cost: float
) -> tuple[dict[str, Trained], dict[str, np.ndarray]]:
    tuning_key, final_key, tail_key = jax.random.split(key, 3)
    slots = config.lm_seeds
    # All configurations are tried with the same parameters and the same batches.
    tuning_keys = jnp.broadcast_to(tuning_key, (slots,))
    final_keys = jax.random.split(final_key, slots)
    graphs = {name: TOPOLOGIES[name](config.nodes) for name in config.topologies}

    def tune(name: str) -> np.ndarray:
        grid = language_model.tuning_grid(METHODS[name], step_sizes=config.lm_step_sizes)
        batches = math.ceil(len(grid) / slots)
        padded = np.resize(grid, (batches * slots, 2))

        def body(carry: tuple[()], index: int) -> tuple[tuple[()], Array]:
            some = padded[index * slots : (index + 1) * slots]
            params = task.train(METHODS[name], some, graphs[config.topologies[0]], tuning_keys)
            return carry, task.evaluate(params, split="validation").mean(1)

        _, losses = run.loop(
            f"tune_{name}", body, (), batches, cost=0.75 * cost, log=lambda i, loss: {"method": name, "loss": loss}
        )
        losses = np.nan_to_num(losses.ravel()[: len(grid)], nan=np.inf)
        best = grid[losses.argmin()]
        if best[0] in (grid[0, 0], grid[-1, 0]):
            run.note(f"Language model: the best step size of {name}, {best[0]:.3g}, is at the edge of its grid.")
        return best

    def train(name: str, best: np.ndarray, graph: str) -> Trained:
        rates_of_runs = np.tile(best, (slots, 1))

        def body(progress: language_model.Progress, index: int):
            progress = task.stretch(METHODS[name], rates_of_runs, graphs[graph], progress, index)
            return progress, task.evaluate(progress.params, split="test")

        start = task.start(METHODS[name], rates_of_runs, final_keys)
        steps = config.lm_steps // config.lm_evaluations
        progress, losses = run.loop(
            f"train_{name}_{graph}",
            body,
            start,
            config.lm_evaluations,
            cost=0.25 * cost,
            log=lambda i, loss: {"method": name, "graph": graph, "step": (i + 1) * steps, "loss": loss.mean(1)},
        )
        return Trained(best, losses, progress.params)

    trained = {}
    for name in select(config.lm_methods):
        trained[name] = train(name, tune(name), config.topologies[0])
    on_other_graphs = {
        f"{name} ({graph})": train(name, trained[name].best, graph)
        for name in select(config.topology_methods)
        if name in trained
        for graph in config.topologies[1:]
    }
    _judge_language_model(config, run, trained)
    tails = {}
    if config.tail_draws and "gt_nsgdm" in trained:
        best = np.tile(trained["gt_nsgdm"].best, (slots, 1))
        start = task.start(METHODS["gt_nsgdm"], best, final_keys).params
        tails = {
            when: run.stage(
                f"gradient_noise_{when}",
                functools.partial(
                    task.gradient_deviations,
                    jax.tree.map(lambda leaf: leaf[0], params),
                    tail_key,
                    draws=config.tail_draws,
                ),
                cost=2.0,
            )
            for when, params in (("start", start), ("end", trained["gt_nsgdm"].params))
        }
        tops = {when: max(1, len(norms) // 20) for when, norms in tails.items()}
        index = {when: noise.hill_estimator(jnp.asarray(norms), top=tops[when]) for when, norms in tails.items()}
        run.note(
            "Language model, tail index of the gradient noise, Hill's estimate from the largest 5 % (below 2: no "
            f"finite variance): {_listing(index)}."
        )
    return trained | on_other_graphs, tails


def _judge_language_model(config: Config, run: Run, trained: Mapping[str, Trained]) -> None:
    final = {name: outcome.final.mean() for name, outcome in trained.items()}
    for claim, others in (
        ("language_model_loss", final.keys() - {"gt_nsgdm"}),
        ("language_model_loss_one_step_size", final.keys() - {"gt_nsgdm", "gt_adam"}),
        ("language_model_tracking", final.keys() & {"nsgdm"}),
    ):
        if config.lm_steps < _STEPS_TO_TELL_APART:
            run.skip(claim, "cpu", f"needs {_STEPS_TO_TELL_APART} training steps, here are {config.lm_steps}")
        elif "gt_nsgdm" in final and others:
            # A method that diverged on a fresh seed has no loss, which is higher than any.
            lowest = np.nan_to_num([final[name] for name in others], nan=np.inf).min()
            run.measure(claim, lowest - final["gt_nsgdm"])
        else:
            run.skip(claim, "cpu", "needs gt_nsgdm and the methods it is compared with")


def _columns(
    name: str, sweeps: Mapping[str, Mapping[str, regression.Sweep]], trained: Mapping[str, Trained]
) -> dict[str, Any]:
    """The table's numbers: regression error under each noise, then held-out loss and the disagreement between nodes."""
    numbers: dict[str, Any] = {}
    for kind, of_kind in sweeps.items():
        if name in of_kind:
            numbers |= {f"{kind}_mean": of_kind[name].errors.mean(), f"{kind}_std": of_kind[name].errors.std()}
    if name in trained:
        loss = trained[name].final
        numbers |= {"lm_loss_mean": loss.mean(), "lm_loss_std": loss.mean(1).std(), "lm_spread": np.ptp(loss, 1).mean()}
    return numbers


def _listing(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {float(value):.3g}" for name, value in values.items())


def _shapes(config: Config) -> Any:
    """The language model's runs of GT-NSGDm, one training step included, as shapes."""
    sizes = config.language_model
    windows = jax.ShapeDtypeStruct((2, sizes.context + 1), jnp.int32)
    shards = jax.ShapeDtypeStruct((sizes.nodes, sizes.context * 4), jnp.int32)

    def one_stretch(shards: Array, windows: Array, keys: Key[Array, " runs"]) -> Any:
        corpus = language_model.Corpus(shards, windows, windows, 0.0)
        task = language_model.Task(dataclasses.replace(sizes, devices=1), corpus)
        rates_of_runs = jnp.ones((sizes.seeds, 2)) * 0.5
        matrix = jnp.asarray(topology.ring(sizes.nodes))
        progress = task.start(METHODS["gt_nsgdm"], rates_of_runs, keys)
        progress = task.stretch(METHODS["gt_nsgdm"], rates_of_runs, matrix, progress, 0)
        return progress, task.evaluate(progress.params, split="test")

    return jax.eval_shape(
        one_stretch, shards, windows, jax.eval_shape(lambda: jax.random.split(jax.random.key(0), sizes.seeds))
    )


EXPERIMENT = Experiment(
    name="gt-nsgdm",
    summary="Decentralised training under heavy-tailed noise: normalised, tracked momentum.",
    claims=CLAIMS,
    presets=PRESETS,
    run=run,
    shapes=_shapes,
)
