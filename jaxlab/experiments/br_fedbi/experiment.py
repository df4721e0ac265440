"""The run that measures the claims of the paper on BR-FedBi."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.data.images import load_images
from jaxlab.experiments.base import Experiment, Run
from jaxlab.experiments.br_fedbi import figures, hyper_cleaning, quadratic
from jaxlab.experiments.br_fedbi import hyper_representation as representation
from jaxlab.experiments.br_fedbi.claims import CLAIMS
from jaxlab.experiments.br_fedbi.config import PRESETS, Config
from jaxlab.experiments.br_fedbi.simulation import METHODS

__all__ = ["EXPERIMENT"]

_NNM, _MEDIAN = "nnm+trimmed_mean", "coordinate_median"
_COORDINATE_WISE = (_MEDIAN, "trimmed_mean")
_PROTECTED = ("br_fedbi_m", "br_fedbi_p")
# Step sizes of a method that are tried on all partitions for tuning.
_FINALISTS = 2
# Messages of a single-loop round over those of a round with sub-loops.
_EQUAL_MESSAGES = 3 / 8


class Entry(NamedTuple):
    """A method with an aggregator, tuned and judged by itself.

    Attributes:
      method, aggregator: names.
      skewed: whether clients differ much.
      share: of the rounds, at whose end accuracy counts.
    """

    method: str
    aggregator: str
    skewed: bool = False
    share: float = 1.0

    @property
    def label(self) -> str:
        """For the table."""
        rule = self.aggregator.replace("_", " ")
        suffix = ", skewed" * self.skewed + ", equal rounds" * (self.method == "bilantine" and self.share == 1.0)
        return f"{METHODS[self.method].label}, {rule}{suffix}"


def run(config: Config, run: Run) -> None:
    """Measure all claims."""
    # First, since data that are missing should not be found out after minutes.
    images = load_images(config.data)
    entries = _entries(config)
    # Seconds on two CPU cores, compile time apart from the rest, for the progress bar alone.
    of_quadratic = 6.0 + 1e-3 * config.quadratic_rounds * (config.floor_runs + 1)
    of_chunk = 3e-4 * config.rounds * len(config.attacks) * config.hidden / 32
    compiling = 7.0 * len({METHODS[name].program for name in config.methods})
    of_tuning = compiling + of_chunk * len(entries) * len(config.learning_rates)
    of_finals = of_chunk * len(entries) * min(_FINALISTS, len(config.learning_rates)) * (config.tuning_seeds - 1)
    of_judging = of_chunk * len(entries) * config.seeds
    sweeps = len(config.sweep) if _sweep_entry(config) in entries else 0
    of_cleaning = 4.0 + 1e-3 * config.cleaning_rounds * len(config.attacks) * 2
    run.plan(of_quadratic + of_tuning + of_finals + of_judging + of_chunk * sweeps + of_cleaning)

    paths, floors = _quadratic(config, run, of_quadratic)
    judged, sweep = _representation(config, run, images, entries, of_tuning, of_finals, of_judging, of_chunk * sweeps)
    weights, wrong, area = _cleaning(config, run, images, of_cleaning)

    curves = {(e.method, e.aggregator): 100 * judged[e] for e in entries if not e.skewed and _counts(e)}
    shown = next((rule for rule in ("trimmed_mean", _MEDIAN) if rule in config.aggregators), config.aggregators[-1])
    figures.against_messages(run, curves, config.attacks, rounds=config.rounds, aggregator=shown)
    final = {
        (e.method, e.aggregator): 100 * representation.at_messages(judged[e].mean(0), e.share)
        for e in entries
        if not e.skewed and _counts(e)
    }
    figures.heat_map(run, final, config.attacks, config.methods, config.aggregators)
    figures.claims(
        run,
        paths=paths,
        variances=quadratic.relative_variances(np.asarray(config.betas)),
        floors=floors,
        sweep=sweep,
        attacks=config.attacks,
        weights=weights,
        wrong=wrong,
        area=area,
    )


def _quadratic(config: Config, run: Run, cost: float) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    key = jax.random.fold_in(run.key, 0)
    rounds, f = config.quadratic_rounds, quadratic.BYZANTINE
    most = (quadratic.HONEST + f - 1) // 2
    # Whether clients are alike, index of the aggregator, attack, Byzantine clients.
    scenarios = {
        "no attack, mean": (False, 0, "none", f),
        "inner product, mean": (False, 0, "inner_product", f),
        "inner product, trimmed mean": (False, 1, "inner_product", f),
        "alike, inner product, trimmed mean": (True, 1, "inner_product", f),
        f"alike, {most} of 11 Byzantine, trimmed mean": (True, 2, "inner_product", most),
    }

    def path(problem: jax.Array, alike: bool, beta: float, noise: float, which: tuple, key: jax.Array) -> dict:
        rule, attack, byzantine = which
        with jax.enable_x64(True):
            indices = (jnp.asarray(i, jnp.int32) for i in (rule, quadratic.ATTACKS.index(attack), byzantine))
            scalars = jnp.asarray(beta, jnp.float64), jnp.asarray(noise, jnp.float64)
            found = quadratic.path(problem, jnp.asarray(alike), *scalars, *indices, key, rounds=rounds)
            return jax.tree.map(np.asarray, found)

    def noiseless() -> dict[str, dict]:
        return {
            name: path(key, alike, 0.0, 0.0, (rule, attack, byzantine), key)
            for name, (alike, rule, attack, byzantine) in scenarios.items()
        }

    def log(i: int, found: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"scenario": name, "error": found[name]["error"][-1]} for name in scenarios]

    found = run.stage("quadratic", noiseless, cost=cost / 2, log=log)
    runs = [(alike, beta, k) for alike in (True, False) for beta in config.betas for k in range(config.floor_runs)]

    def to_floor(carry: tuple, i: int) -> tuple[tuple, np.float64]:
        alike, beta, k = runs[i]
        problem, noise = jax.random.split(jax.random.fold_in(key, k))
        norms = path(problem, alike, beta, 1.0, (1, "alie", f), noise)["norm"]
        return carry, np.float64(quadratic.floor(norms))

    def log_floor(i: int, value: Any) -> dict[str, Any]:
        alike, beta, k = runs[i]
        return {"alike": alike, "beta": beta, "run": k, "floor": value}

    _, rest = run.loop("floors", to_floor, (), len(runs), cost=cost / 2, log=log_floor)
    # The median: where clients differ, a trimmed mean under attack may wander off for one problem of many.
    of_alike, of_different = np.median(rest.reshape(2, len(config.betas), -1), -1)
    floors = {"alike": of_alike, "different": of_different}
    errors = {name: found[name]["error"] for name in scenarios}
    no_attack, mean, heterogeneous, alike, at_most = (errors[name][-1] for name in scenarios)
    variances = quadratic.relative_variances(np.asarray(config.betas))
    run.measure("converges_without_attack", no_attack)
    run.measure("mean_aggregation_fails", mean)
    run.measure("exact_recovery_when_homogeneous", alike)
    run.measure("momentum_removes_variance_floor", np.polyfit(np.log(variances), np.log(floors["alike"]), 1)[0])
    refusals = quadratic.refuses_half(config.clients)
    run.measure("breakdown_at_half", at_most if all(refusals.values()) else np.inf)
    run.note(
        f"Quadratic: where clients differ, the trimmed mean under attack ends with an error of {heterogeneous:.2g}; "
        f"noise floors {', '.join(f'{v:.3g}' for v in floors['alike'])} where they are alike and "
        f"{', '.join(f'{v:.3g}' for v in floors['different'])} where they differ, "
        f"for beta {', '.join(f'{b:g}' for b in config.betas)}."
    )
    every = rounds // 40
    return {name: error[::every] for name, error in errors.items()}, floors


def _entries(config: Config) -> list[Entry]:
    shares = {name: (_EQUAL_MESSAGES, 1.0) if name == "bilantine" else (1.0,) for name in config.methods}
    found = [
        Entry(method, rule, share=share)
        for method in config.methods
        for rule in config.aggregators
        for share in shares[method]
    ]
    if "br_fedbi" in config.methods:
        found += [Entry("br_fedbi", rule, skewed=True) for rule in (_MEDIAN, _NNM) if rule in config.aggregators]
    return found


def _counts(entry: Entry) -> bool:
    """Whether an entry stands for its method where all methods have sent as many messages."""
    return entry.method != "bilantine" or entry.share < 1


def _training(entry: Entry) -> Entry:
    """The entry whose training it is read from, which at fewer rounds is the same."""
    return entry._replace(share=_EQUAL_MESSAGES if entry.method == "bilantine" else 1.0)


def _sweep_entry(config: Config) -> Entry:
    rule = _MEDIAN if _MEDIAN in config.aggregators else config.aggregators[0]
    return Entry("br_fedbi_m", rule)


def _representation(
    config: Config,
    run: Run,
    images: Any,
    entries: list[Entry],
    of_tuning: float,
    of_finals: float,
    of_judging: float,
    of_sweep: float,
) -> tuple[dict[Entry, np.ndarray], dict[int, np.ndarray]]:
    """Accuracies ``[seeds, attacks, blocks]`` of every tuned entry, and ``[attacks]`` for every number of liars."""
    setting = config.setting(images.n_classes)

    @functools.cache
    def dealt(skewed: bool, seed: int) -> representation.FederatedImages:
        gamma = config.skewed_gamma if skewed else config.gamma
        return representation.deal(
            images, clients=config.clients, gamma=gamma, held_out=config.held_out, seed=1000 * run.seed + seed
        )

    def trained(entry: Entry, rate: float, seed: int, byzantine: int) -> dict[str, Any]:
        method = METHODS[entry.method]
        return representation.train(
            dealt(entry.skewed, seed),
            jax.random.fold_in(jax.random.fold_in(run.key, 1), seed),
            jnp.float32(rate),
            jnp.float32(method.beta),
            jnp.int32(config.aggregators.index(entry.aggregator)),
            jnp.int32(byzantine),
            jnp.bool_(method.single_level),
            program=method.program,
            setting=setting,
        )

    tried: dict[tuple[Entry, float], list[np.ndarray]] = {}

    def tune(name: str, grid: list[tuple[Entry, float]], seed: int, cost: float) -> None:
        def log(i: int, found: dict) -> dict:
            return {"seed": seed} | _line(config, *grid[i], found["choosing"])

        def body(carry: tuple, i: int) -> tuple[tuple, dict]:
            return carry, trained(*grid[i], seed, config.byzantine)

        _, found = run.loop(name, body, (), len(grid), cost=cost, log=log)
        for job, curves in zip(grid, found["choosing"], strict=True):
            tried.setdefault(job, []).append(curves)

    def score(entry: Entry, rate: float, partitions: int | None = None) -> float:
        curves = np.stack(tried[_training(entry), rate][:partitions])
        return float(representation.worst(representation.at_messages(curves, entry.share), config.attacks).mean())

    def better(entry: Entry, rates: Sequence[float], most: int) -> list[float]:
        return sorted(rates, key=lambda rate: -score(entry, rate))[:most]

    tune("tune", [(e, r) for e in entries if _counts(e) for r in config.learning_rates], config.seeds, of_tuning)
    finalists = {entry: better(entry, config.learning_rates, _FINALISTS) for entry in entries}
    finals = list(dict.fromkeys((_training(entry), rate) for entry, rates in finalists.items() for rate in rates))
    for k in range(1, config.tuning_seeds):
        tune(f"finals_{k}", finals, config.seeds + k, of_finals / (config.tuning_seeds - 1))
    best = {entry: better(entry, rates, 1)[0] for entry, rates in finalists.items()}
    # On the first partition, on which all were tried.
    _note_equal_steps(config, run, lambda entry, rate: score(entry, rate, 1))
    jobs = [(entry, seed) for entry in entries for seed in range(config.seeds)]

    def judge(carry: tuple, i: int) -> tuple[tuple, dict]:
        entry, seed = jobs[i]
        return carry, trained(entry, best[entry], seed, config.byzantine)

    def log_judging(i: int, found: dict) -> dict:
        entry, seed = jobs[i]
        return {"seed": seed} | _line(config, entry, best[entry], found["judging"])

    _, found = run.loop("judge", judge, (), len(jobs), cost=of_judging, log=log_judging)
    judged = {entry: found["judging"][[i for i, (e, _) in enumerate(jobs) if e == entry]] for entry in entries}
    for entry in entries:
        own = [i for i, (e, _) in enumerate(jobs) if e == entry]
        _row(config, run, entry, judged[entry], best[entry], found["boundary"][own])
    _measure(config, run, judged)
    if found["convex"].min() < 1:
        run.note("In some rounds a client saw negative curvature: its lower problem is not strongly convex.")

    sweep: dict[int, np.ndarray] = {}
    swept = _sweep_entry(config)
    if swept in best:
        _, accuracy = run.loop(
            "sweep",
            lambda carry, i: (carry, trained(swept, best[swept], 0, config.sweep[i])),
            (),
            len(config.sweep),
            cost=of_sweep,
            log=lambda i, o: {"byzantine": config.sweep[i], **_line(config, swept, best[swept], o["judging"])},
        )
        sweep = dict(zip(config.sweep, 100 * accuracy["judging"][..., -1], strict=True))
    return judged, sweep


def _line(config: Config, entry: Entry, rate: float, accuracy: Any) -> dict[str, Any]:
    final = representation.at_messages(np.asarray(accuracy), entry.share)
    return {"method": entry.label, "learning_rate": rate, **representation.describe(config.attacks, final)}


def _row(config: Config, run: Run, entry: Entry, accuracy: np.ndarray, rate: float, boundary: np.ndarray) -> None:
    final = 100 * representation.at_messages(accuracy, entry.share)
    worst = representation.worst(final, config.attacks)
    each = dict(zip(config.attacks, final.mean(0), strict=True))
    messages = METHODS[entry.method].messages * int(entry.share * config.rounds)
    run.row(
        entry.label,
        messages=messages,
        learning_rate=rate,
        worst_mean=worst.mean(),
        worst_std=worst.std(),
        **each,
        **({} if METHODS[entry.method].single_level else {"on_boundary": boundary.mean()}),
    )
    if boundary.mean(0).max() > 0.5 and not METHODS[entry.method].single_level and entry.aggregator == _NNM:
        run.note(f"{entry.label}: z was projected in {boundary.mean(0).max():.0%} of the rounds under one attack.")


def _measure(config: Config, run: Run, judged: dict[Entry, np.ndarray]) -> None:
    worst = {
        entry: representation.worst(100 * representation.at_messages(accuracy, entry.share), config.attacks).mean()
        for entry, accuracy in judged.items()
    }
    lifts = [
        worst[Entry(method, rule)] - worst[Entry("br_fedbi", rule)]
        for rule in _COORDINATE_WISE
        for method in _PROTECTED
        if {Entry(method, rule), Entry("br_fedbi", rule)} <= worst.keys()
    ]
    leads = {
        (method, rule): worst[Entry(method, rule)] - worst[Entry("bilantine", rule, share=_EQUAL_MESSAGES)]
        for rule in config.aggregators
        for method in _PROTECTED
        if {Entry(method, rule), Entry("bilantine", rule, share=_EQUAL_MESSAGES)} <= worst.keys()
    }
    others = {key: lead for key, lead in leads.items() if key[1] not in ("mean", *_COORDINATE_WISE)}
    if others:
        listed = ", ".join(
            f"{lead:+.1f} ({METHODS[m].label}, {rule.replace('_', ' ')})" for (m, rule), lead in others.items()
        )
        run.note(f"Lead over the method with sub-loops at equal messages with other rules, points: {listed}.")
    skewed = {rule: worst.get(Entry("br_fedbi", rule, skewed=True)) for rule in (_NNM, _MEDIAN)}
    both = [value for value in skewed.values() if value is not None]
    for claim, values in (
        ("momentum_and_page_lift_the_worst_attack", lifts),
        ("beats_sub_loops_at_equal_messages", [v for key, v in leads.items() if key[1] in _COORDINATE_WISE]),
        ("nnm_helps_when_heterogeneous", [both[0] - both[1]] if len(both) == 2 else []),
    ):
        if values:
            run.measure(claim, min(values))
        else:
            run.skip(claim, "quick", "methods or aggregators that it compares were not asked for")


def _note_equal_steps(config: Config, run: Run, score: Callable[[Entry, float], float]) -> None:
    """What momentum and PAGE lift where nobody's step size is tuned."""
    compared = [
        (Entry(method, rule), Entry("br_fedbi", rule))
        for rule in _COORDINATE_WISE
        for method in _PROTECTED
        if {method, "br_fedbi"} <= set(config.methods) and rule in config.aggregators
    ]
    if compared:
        lifts = {
            rate: min(100 * (score(entry, rate) - score(plain, rate)) for entry, plain in compared)
            for rate in config.learning_rates
        }
        listed = ", ".join(f"{lift:+.1f} (at {rate:g})" for rate, lift in lifts.items())
        run.note(f"Least lift with one step size for all, on one partition, points: {listed}.")


def _cleaning(config: Config, run: Run, images: Any, cost: float) -> tuple[np.ndarray, np.ndarray, float]:
    rules = ("mean", _NNM)
    names = tuple(
        name for name in config.attacks if name != "label_flip"
    )  # what validation labels are is not data here
    names = names if "none" in names else ("none", *names)
    data = hyper_cleaning.corrupt(
        images,
        examples=config.cleaning_examples,
        share=config.cleaning_wrong,
        clients=config.cleaning_clients,
        gamma=config.gamma,
        held_out=config.held_out,
        seed=run.seed,
    )
    wrong = np.asarray(data.wrong)

    def areas(weights: Any) -> dict[str, float]:
        each = [hyper_cleaning.area_under_curve(-of_attack, wrong) for of_attack in np.asarray(weights)]
        return dict(zip(names, each, strict=True))

    def log(i: int, found: dict) -> dict:
        return {"aggregator": rules[i], **areas(found["weights"])}

    _, found = run.loop(
        "cleaning",
        lambda carry, i: (
            carry,
            hyper_cleaning.clean(
                data,
                jax.random.fold_in(run.key, 2),
                jnp.int32(i),
                byzantine=config.cleaning_byzantine,
                aggregators=rules,
                attack_names=names,
                rounds=config.cleaning_rounds,
                classes=images.n_classes,
            ),
        ),
        (),
        len(rules),
        cost=cost,
        log=log,
    )
    by_rule = {rule: areas(weights) for rule, weights in zip(rules, found["weights"], strict=True)}
    attacked = {rule: min(area for name, area in each.items() if name != "none") for rule, each in by_rule.items()}
    run.measure("hyper_cleaning_finds_wrong_labels", by_rule[_NNM]["none"])
    run.measure("hyper_cleaning_survives_the_attack", attacked[_NNM] - attacked["mean"])
    for rule, each in by_rule.items():
        listed = ", ".join(f"{area:.3f} ({name.replace('_', ' ')})" for name, area in each.items())
        run.note(f"Hyper-cleaning, {rule.replace('_', ' ')}, area under the curve: {listed}.")
    shown = list(names).index(min((name for name in names if name != "none"), key=by_rule[_NNM].__getitem__))
    return found["weights"][1][shown], wrong, by_rule[_NNM][names[shown]]


def _shapes(config: Config) -> Any:
    classes, features = 10, 784
    each = (60_000 - config.held_out) // config.clients

    def build() -> Any:
        pair = (jnp.zeros((8, features)), jnp.zeros(8, jnp.int32))
        data = representation.FederatedImages(
            jnp.zeros((config.clients, each, features)), jnp.zeros((config.clients, each), jnp.int32), pair, pair
        )
        return representation.train(
            data,
            jax.random.key(0),
            jnp.float32(config.learning_rates[0]),
            jnp.float32(0.5),
            jnp.int32(0),
            jnp.int32(config.byzantine),
            jnp.bool_(False),
            program="page",
            setting=config.setting(classes),
        )

    return jax.eval_shape(build)


EXPERIMENT = Experiment(
    name="br-fedbi",
    summary="Federated bilevel optimisation in a single loop that liars cannot steer.",
    claims=CLAIMS,
    presets=PRESETS,
    run=run,
    shapes=_shapes,
)
