"""The claims of the paper on GT-NSGDm, and the run that measures them."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxlab.experiments.base import Claim, Experiment, Run
from jaxlab.experiments.gt_nsgdm import bias, figures, language_model, rates, regression
from jaxlab.experiments.gt_nsgdm.methods import METHODS, select
from jaxlab.optim import noise, topology

__all__ = ["EXPERIMENT", "Config"]

_ALL_METHODS = tuple(METHODS)
_TOPOLOGIES = {
    "ring": topology.ring,
    "exponential": topology.directed_exponential,
    "complete": topology.complete,
}


@dataclass(frozen=True)
class Config:
    """Sizes of all parts."""

    bias_steps: int = 10_000
    """steps of the three-node example"""
    regression_methods: tuple[str, ...] = _ALL_METHODS
    """methods of the regression"""
    noises: tuple[str, ...] = ("gaussian", "student_t", "stable")
    """gradient noise of the regression: gaussian, student_t, stable"""
    regression_steps: int = 10_000
    """steps of the regression, a multiple of 100"""
    regression_step_sizes: int = 13
    """step sizes between 0.001 and 10 that a method is tuned on, at three values of its second hyperparameter"""
    regression_seeds: int = 5
    """fresh noise streams that a tuned method is judged on"""
    horizons: tuple[int, ...] = (256, 1024, 4096, 16_384, 65_536)
    """numbers of steps between which the rate is measured, multiples of 256"""
    networks: tuple[int, ...] = (2, 4, 8, 16, 32)
    """numbers of nodes between which the speed-up is measured"""
    speedup_steps: int = 4096
    """steps of the speed-up runs, a multiple of 256"""
    trials: int = 8
    """noise streams of the rate and speed-up runs"""
    lm_methods: tuple[str, ...] = _ALL_METHODS
    """methods of the language model"""
    topologies: tuple[str, ...] = ("ring", "exponential", "complete")
    """graphs of the language model: ring, exponential, complete; methods are tuned on the first"""
    topology_methods: tuple[str, ...] = ("gt_nsgdm",)
    """methods that train the language model on the other graphs too"""
    corpora: tuple[str, ...] = ("python-topics", "python-source")
    """texts, one after the other: a file, a folder of $JAXLAB_DATA, python-topics (reference manual), python-source
    (standard library), hf:OWNER/NAME[:COLUMN] or tfds:NAME[:FEATURE]"""
    corpus_split: str | None = None
    """split of the corpora, where they have several"""
    vocabulary: int = 512
    """words known to the language model"""
    sharding: Literal["contiguous", "iid"] = "contiguous"
    """contiguous parts of the text (nodes differ) or shuffled chunks (nodes are alike)"""
    leaky_attention: bool = False
    """let tokens see later ones, as the published script does; its losses of 0.25 nats come from there"""
    nodes: int = 8
    """nodes of the language model"""
    hidden: int = 32
    """width of the decoder"""
    layers: int = 1
    """blocks of the decoder"""
    heads: int = 4
    """attention heads"""
    context: int = 16
    """tokens a prediction can look at"""
    batch: int = 8
    """sequences per node and step"""
    lm_steps: int = 400
    """training steps"""
    lm_evaluations: int = 8
    """times the held-out loss is looked at, a divisor of lm_steps"""
    held_out_windows: int = 640
    """windows of held-out text, at most, to choose hyperparameters on, and as many to judge on"""
    lm_step_sizes: int = 6
    """step sizes over two and a half decades that a method is tuned on, at two values of its second hyperparameter"""
    lm_seeds: int = 3
    """fresh seeds that a tuned method is judged on; as many configurations are tuned at once"""
    tail_draws: int = 256
    """minibatches a node from which the tail of the gradient noise is estimated; 0 leaves that out"""
    devices: int = 1
    """devices over which the nodes of the language model are spread"""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == ():
                raise ValueError(f"{field.name} must not be empty")
            for number in value if isinstance(value, tuple) else (value,):
                least = 0 if field.name == "tail_draws" else 1
                if isinstance(number, int) and not isinstance(number, bool) and number < least:
                    raise ValueError(f"{field.name} must be at least {least}, got {number}")
        select(self.regression_methods)
        select((*self.lm_methods, *self.topology_methods))
        for name, values, known in (
            ("noises", self.noises, regression.NOISES),
            ("topologies", self.topologies, _TOPOLOGIES),
        ):
            if any(value not in known for value in values):
                raise ValueError(f"{name} must be some of {', '.join(known)}, got {', '.join(values)}")
        for name, value, unit in (
            ("regression_steps", self.regression_steps, 100),
            ("lm_steps", self.lm_steps, self.lm_evaluations),
            ("speedup_steps", self.speedup_steps, rates.BLOCK),
            *(("horizons", horizon, rates.BLOCK) for horizon in self.horizons),
        ):
            if value % unit:
                raise ValueError(f"{name} must be a multiple of {unit}, got {value}")
        for name, values in (("horizons", self.horizons), ("networks", self.networks)):
            if len(set(values)) < 2:
                raise ValueError(f"{name} needs at least two different values, got {values}")
        if self.nodes % self.devices:
            raise ValueError(f"devices must divide the {self.nodes} nodes, got {self.devices}")
        _ = self.language_model.decoder  # raises for sizes that do not fit

    @property
    def language_model(self) -> language_model.LanguageModelConfig:
        """The part on the language model."""
        return language_model.LanguageModelConfig(
            corpora=self.corpora,
            split=self.corpus_split,
            vocabulary=self.vocabulary,
            sharding=self.sharding,
            leaky_attention=self.leaky_attention,
            nodes=self.nodes,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            context=self.context,
            batch=self.batch,
            steps=self.lm_steps,
            evaluations=self.lm_evaluations,
            held_out_windows=self.held_out_windows,
            step_sizes=self.lm_step_sizes,
            seeds=self.lm_seeds,
            devices=self.devices,
        )


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


_CLAIMS = (
    Claim(
        "naive_normalisation_is_biased",
        "Normalising local gradients without tracking converges to a point that is not stationary: with centres "
        "0, 0, 9 the gradient norm there is 3.",
        ">",
        2.9,
    ),
    Claim(
        "tracking_removes_the_bias",
        "With gradient tracking the gradient norm at the end is at most the step size.",
        "<=",
        bias.STEP,
    ),
    Claim(
        "momentum_beats_skewed_noise",
        "Under skewed stable noise, the error without momentum is at least twice that of GT-NSGDm.",
        ">=",
        2.0,
    ),
    Claim(
        "wide_step_size_plateau",
        "Under stable noise, GT-NSGDm comes within twice its best error over more decades of step sizes than DSGD "
        "within twice its own (ratio of the widths).",
        ">",
        1.0,
    ),
    Claim(
        "bounded_motion",
        "Whatever the gradients, the average of the nodes moves by at most the step size a step, and the nodes stay "
        "within rho sqrt(n) / (1 - rho) step sizes of it (the larger ratio to its bound; 1 % for float32 rounding).",
        "<=",
        1.01,
    ),
    Claim(
        "rate_matches_theory",
        "With the tail index p = 1.5 known, the average gradient norm falls like T^(-(p-1)/(3p-2)) = T^-0.2.",
        "in",
        (-0.25, -0.12),
    ),
    Claim(
        "rate_matches_theory_without_tail_index",
        "Without knowing p, it falls like T^-0.167 at last, and T^-0.25 before.",
        "in",
        (-0.28, -0.14),
    ),
    Claim(
        "speedup_with_nodes",
        "More nodes end lower: the gradient norm on the largest network over that on the smallest, where the noise "
        "term alone would give the ratio of sizes to the power -1/3.",
        "<",
        0.75,
    ),
    Claim(
        "topology_independent",
        "Under stable noise, the ring (rho = 0.904) ends as low as the complete graph (ratio of the errors).",
        "<=",
        1.25,
    ),
    Claim(
        "language_model_loss",
        "GT-NSGDm reaches the lowest held-out loss of all methods (lowest other minus GT-NSGDm, nats per token).",
        ">",
        0.0,
    ),
    Claim(
        "language_model_loss_one_step_size",
        "GT-NSGDm reaches the lowest held-out loss of the methods that use one step size for all coordinates, that "
        "is all but GT-Adam (lowest other minus GT-NSGDm, nats per token).",
        ">",
        0.0,
    ),
    Claim(
        "language_model_tracking",
        "On shards that differ, tracking is worth at least 0.1 nats per token (NSGDm minus GT-NSGDm).",
        ">=",
        0.1,
    ),
)


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

    problem_key, noise_key, rate_key, model_key = jax.random.split(run.key, 4)
    with_bias = _bias(config, run, cost=2.0)
    sweeps = _regression(config, run, problem_key, noise_key, cost=cost_of_regression)
    norms = _rates(config, run, rate_key, cost=cost_of_rates)
    trained, tails = _language_model(config, run, model_key, cost=cost_of_training)
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
            max(max(sweep.final["motion"].max(), sweep.final["spread"].max() / radius) for sweep in tracked),
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
            lambda name=name: rates.norm_by_horizon(
                key, config.horizons, knows_tail=name == "known", trials=config.trials
            ),
            cost=share,
            log=lambda _, values, name=name: {"tail_index": name, "gradient_norm": values.mean(1)},
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
    config: Config, run: Run, key: Key[Array, ""], *, cost: float
) -> tuple[dict[str, Trained], dict[str, np.ndarray]]:
    sizes = config.language_model
    task = language_model.Task(sizes, language_model.load_corpus(sizes))
    tuning_key, final_key, tail_key = jax.random.split(key, 3)
    slots = config.lm_seeds
    # All configurations are tried with the same parameters and the same batches.
    tuning_keys = jnp.broadcast_to(tuning_key, (slots,))
    final_keys = jax.random.split(final_key, slots)
    graphs = {name: _TOPOLOGIES[name](config.nodes) for name in config.topologies}

    def tune(name: str) -> np.ndarray:
        grid = language_model.tuning_grid(METHODS[name], step_sizes=config.lm_step_sizes)
        padded = np.concatenate([grid, grid[: -len(grid) % slots]])

        def body(carry: tuple[()], index: int) -> tuple[tuple[()], Array]:
            some = padded[index * slots : (index + 1) * slots]
            params = task.train(METHODS[name], some, graphs[config.topologies[0]], tuning_keys)
            return carry, task.evaluate(params, split="validation").mean(1)

        batches = len(padded) // slots
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
    _judge_language_model(run, trained)
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


def _judge_language_model(run: Run, trained: Mapping[str, Trained]) -> None:
    final = {name: outcome.final.mean() for name, outcome in trained.items()}
    for claim, others in (
        ("language_model_loss", final.keys() - {"gt_nsgdm"}),
        ("language_model_loss_one_step_size", final.keys() - {"gt_nsgdm", "gt_adam"}),
        ("language_model_tracking", final.keys() & {"nsgdm"}),
    ):
        if "gt_nsgdm" in final and others:
            run.measure(claim, min(final[name] for name in others) - final["gt_nsgdm"])
        else:
            run.skip(claim, "cpu", "needs gt_nsgdm and the methods it is compared with")


def _columns(
    name: str, sweeps: Mapping[str, Mapping[str, regression.Sweep]], trained: Mapping[str, Trained]
) -> dict[str, Any]:
    """The table's numbers: regression error under each noise, then held-out loss and the disagreement between nodes."""
    numbers = {}
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
    corpus = language_model.Corpus(shards, windows, windows, 0.0)

    def one_stretch(corpus: language_model.Corpus, keys: Key[Array, " runs"]) -> Any:
        task = language_model.Task(dataclasses.replace(sizes, devices=1), corpus)
        rates_of_runs = jnp.ones((sizes.seeds, 2)) * 0.5
        matrix = jnp.asarray(topology.ring(sizes.nodes))
        progress = task.start(METHODS["gt_nsgdm"], rates_of_runs, keys)
        progress = task.stretch(METHODS["gt_nsgdm"], rates_of_runs, matrix, progress, 0)
        return progress, task.evaluate(progress.params, split="test")

    return jax.eval_shape(one_stretch, corpus, jax.eval_shape(lambda: jax.random.split(jax.random.key(0), sizes.seeds)))


EXPERIMENT = Experiment(
    name="gt-nsgdm",
    summary="decentralised training under heavy-tailed gradient noise: normalisation, momentum and gradient tracking",
    claims=_CLAIMS,
    presets={
        "smoke": Config(
            bias_steps=100,
            regression_methods=("gt_nsgdm",),
            noises=("stable",),
            regression_steps=200,
            regression_step_sizes=3,
            regression_seeds=2,
            horizons=(256, 512),
            networks=(2, 8),
            speedup_steps=256,
            trials=2,
            lm_methods=("gt_nsgdm",),
            topologies=("ring",),
            vocabulary=32,
            hidden=16,
            heads=2,
            context=8,
            batch=2,
            lm_steps=4,
            lm_evaluations=2,
            held_out_windows=16,
            lm_step_sizes=2,
            lm_seeds=4,
            tail_draws=0,
        ),
        "quick": Config(
            regression_methods=("dsgd", "dsgd_gclip", "gt_nsgd", "gt_nsgdm"),
            noises=("stable",),
            regression_step_sizes=9,
            horizons=(256, 1024, 4096),
            networks=(2, 32),
            lm_methods=("dsgd_gclip", "nsgdm", "gt_nsgdm"),
            topologies=("ring",),
            lm_steps=100,
            lm_evaluations=2,
            held_out_windows=256,
            lm_step_sizes=4,
            lm_seeds=4,
            tail_draws=64,
        ),
        "cpu": Config(),
        "paper": Config(
            corpora=("hf:bentrevett/multi30k:en",),
            sharding="iid",
            topology_methods=_ALL_METHODS,
            vocabulary=10_000,
            hidden=128,
            layers=2,
            context=64,
            batch=64,
            lm_steps=1200,
            lm_evaluations=12,
            lm_seeds=5,
            devices=8,
        ),
    },
    run=run,
    shapes=_shapes,
)
