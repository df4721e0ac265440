"""ABOM: a black-box search that learns its operators while it searches: what the paper promises, measured.

Wang et al., arXiv 2601.21475. The 24 BBOB functions in MetaBox's instances, which the paper uses, and in COCO's; paths
of a drone over generated and real terrain; every search at the same number of evaluations. CMA-ES with a sane start is
in every table where evosax is installed. Functions with the optimum at the centre of the box (f9, f19 in MetaBox) are
shown and not counted where searches are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.blackbox import ABOM, advance, init, minimize, mutation_matrix, selection_matrix
from jaxlab.blackbox.problems import bbob, uav
from jaxlab.data import resolve
from jaxlab.experiments.abom import plots
from jaxlab.experiments.abom.claims import CLAIMS
from jaxlab.experiments.abom.methods import METHODS, POPULATION, VARIANTS, has_cma_es, histories
from jaxlab.experiments.base import Experiment, Run

__all__ = ["EXPERIMENT", "Config"]

CLASSICAL = ("random_search", "pso", "de")
SHOWN = (4, 6, 8, 9, 10, 14, 19, 23)
MAIN = ("abom", "abom_jaxlab", "abom_no_adaptation", "random_search", "pso", "de", "cma_es")
# Seconds relative to ABOM, for the progress bar.
_COST = {"random_search": 0.3, "pso": 0.4, "de": 0.5, "cma_es": 2.0, "abom_paper": 2.0}
_POINTS = 60

Histories = dict[str, np.ndarray]


@dataclass(frozen=True)
class Config:
    """Functions, terrains and searches."""

    dimension: int = 30
    """variables of the BBOB functions"""
    evaluations: int = 20000
    """evaluations of each search on a BBOB function"""
    seeds: int = 4
    """runs of each search on each problem"""
    functions: tuple[int, ...] = (4, 6, 8, 10, 14, 19)
    """BBOB functions in MetaBox's instances"""
    methods: tuple[str, ...] = (*MAIN, "abom_paper")
    """searches compared on them"""
    coco_functions: tuple[int, ...] = ()
    """BBOB functions in COCO's instances"""
    coco_methods: tuple[str, ...] = ("abom", "abom_jaxlab", "de", "cma_es")
    """searches compared on those"""
    ablations: tuple[str, ...] = ()
    """further variants of ABOM, compared on the first ablation functions"""
    ablation_functions: tuple[int, ...] = (6, 8, 14)
    """BBOB functions, some of functions, for the ablations"""
    terrains: int = 1
    """generated terrains; the drone's part is left out without any terrain"""
    real_terrains: int = 1
    """squares cut from the elevation model"""
    elevation: str = "uav_terrain"
    """folder with an elevation model as .npz"""
    map_size: int = 800
    """cells along a side of a terrain"""
    levels: int = 6
    """refinements of a generated terrain"""
    waypoints: int = 10
    """points of a path that are searched, three variables each"""
    threats: int = 15
    """cylinders to avoid"""
    uav_evaluations: int = 2500
    """evaluations of each search on a terrain"""
    uav_methods: tuple[str, ...] = ("abom", "abom_jaxlab", "abom_no_adaptation", "de", "cma_es")
    """searches compared on terrains"""
    invariance_evaluations: int = 2000
    """evaluations of the runs whose values are transformed, 0 leaves them out"""
    attention_evaluations: int = 0
    """evaluations of the run whose attention is drawn, 0 leaves it out"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in _MAY_BE_ZERO else 1
            if isinstance(value, int) and value < least:
                raise ValueError(f"{field.name} must be at least {least}, got {value}")
        if self.dimension < 2:
            raise ValueError(f"dimension must be at least 2, got {self.dimension}")
        for name in ("methods", "coco_methods", "uav_methods", "ablations"):
            unknown = sorted(set(getattr(self, name)) - set(METHODS))
            if unknown:
                raise ValueError(f"{name} must be some of {', '.join(METHODS)}, got {', '.join(unknown)}")
        for name in ("methods", "coco_methods", "uav_methods", "ablations", "functions", "coco_functions"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must differ, got {', '.join(map(str, values))}")
        for name in ("functions", "coco_functions", "ablation_functions"):
            unknown_functions = sorted(set(getattr(self, name)) - set(bbob.FUNCTIONS))
            if unknown_functions:
                raise ValueError(f"{name} must be numbers from 1 to 24, got {unknown_functions[0]}")
        if not self.functions or "abom" not in self.methods:
            raise ValueError("functions must not be empty and methods must hold abom, which the claims are about")
        if not {"abom", "abom_no_adaptation", "de"} <= set(self.uav_methods):
            raise ValueError(
                f"uav_methods must hold abom, abom_no_adaptation and de, got {', '.join(self.uav_methods)}"
            )
        for name in ("evaluations", "uav_evaluations", "invariance_evaluations", "attention_evaluations"):
            if 0 < getattr(self, name) < 4 * POPULATION:
                raise ValueError(f"{name} must be at least {4 * POPULATION}, got {getattr(self, name)}")


_MAY_BE_ZERO = ("terrains", "real_terrains", "threats", "invariance_evaluations", "attention_evaluations")


def run(config: Config, run: Run) -> None:
    """Measure every claim that the config has the methods for."""
    available = [method for method in METHODS if method != "cma_es" or has_cma_es()]
    if len(available) < len(METHODS):
        run.note("CMA-ES is left out: install evosax (extra 'peers').")
    chosen = {
        name: tuple(method for method in getattr(config, name) if method in available)
        for name in ("methods", "coco_methods", "uav_methods", "ablations")
    }
    terrains = _terrains(config, run)
    ablated = tuple(function for function in config.ablation_functions if function in config.functions)
    shares = {
        "metabox": len(config.functions) * _cost(chosen["methods"]) * config.evaluations,
        "coco": len(config.coco_functions) * _cost(chosen["coco_methods"]) * config.evaluations,
        "ablation": len(ablated) * _cost(chosen["ablations"]) * config.evaluations,
        "uav": len(terrains) * _cost(chosen["uav_methods"]) * config.uav_evaluations,
        "invariance": 3 * config.invariance_evaluations / config.seeds,
        "attention": config.attention_evaluations / config.seeds,
    }
    run.plan(sum(shares.values()))
    table: dict[str, dict[str, float]] = {method: {} for method in METHODS}

    instances = bbob.metabox_instances(config.dimension, config.functions)
    found = _compare_functions(config, run, "metabox", instances, config.functions, chosen["methods"])
    ablation = _compare_functions(
        config,
        run,
        "ablation",
        [instances[config.functions.index(function)] for function in ablated],
        ablated,
        chosen["ablations"],
    )
    coco = _compare_functions(
        config,
        run,
        "coco",
        [bbob.coco_instance(function, config.dimension, 1) for function in config.coco_functions],
        config.coco_functions,
        chosen["coco_methods"],
    )
    errors = {method: _final(history) for method, history in found.items()}
    coco_errors = {method: _final(history) for method, history in coco.items()}
    _fill(table, config.functions, errors, "metabox")
    _fill(table, ablated, {method: _final(history) for method, history in ablation.items()}, "")
    if coco:
        _fill(table, config.coco_functions, coco_errors, "coco")
    _judge_functions(config, run, errors, coco_errors)
    _count_signs(run, config.functions, errors, "MetaBox")
    _count_signs(run, config.coco_functions, coco_errors, "COCO")
    _compare_terrains(config, run, terrains, chosen["uav_methods"], table)
    _check_ranks(config, run, instances[0])
    _draw_attention(config, run, instances[0])
    for method, numbers in table.items():
        if numbers:
            run.row(method, **numbers)
    run.note(
        "Columns fK: median error of the BBOB function in MetaBox's instance; rank: mean rank of the median error over "
        "the functions; uav: geometric mean over terrains of the median cost, relative to ABOM. The middle of the box "
        "is next to the optimum of f9 and f19."
    )
    shown = [i for i, function in enumerate(config.functions) if function in SHOWN]
    if shown:
        plots.convergence(
            run,
            "functions",
            [f"f{config.functions[i]}" for i in shown],
            _evaluations(config.evaluations),
            {method: history[shown] for method, history in found.items()},
            label="error",
        )
    bars = {m: e[[config.functions.index(f) for f in ablated]] for m, e in errors.items() if m in VARIANTS}
    bars |= {method: _final(history) for method, history in ablation.items()}
    if ablated and len(bars) > 1:
        plots.ablation(run, ablated, bars)


def _cost(methods: Sequence[str]) -> float:
    return float(sum(_COST.get(method, 1.0) for method in methods))


def _final(history: np.ndarray) -> np.ndarray:
    """Median over seeds of the last values, one a problem."""
    return np.median(history[:, :, -1], axis=1)


def _evaluations(budget: int) -> np.ndarray:
    """Evaluations at which histories are kept, from the first population to the last."""
    generations = budget // POPULATION
    return POPULATION * np.unique(np.round(np.geomspace(1, generations, _POINTS)).astype(int))


def _compare(
    run: Run,
    part: str,
    methods: Sequence[str],
    titles: Sequence[Any],
    of_problem: Any,
    budget: int,
) -> Histories:
    """Histories of every method on every problem; ``of_problem(method, i)`` has those of one."""
    kept = _evaluations(budget) // POPULATION - 1
    found = {}
    for method in methods:

        def body(carry: tuple, i: int, method=method) -> tuple[tuple, jax.Array]:
            return carry, of_problem(method, i)[:, kept]

        def log(i: int, history: np.ndarray | jax.Array, method=method) -> dict:
            return {"method": method, "problem": titles[i], "median": float(np.median(history[:, -1]))}

        cost = len(titles) * _COST.get(method, 1.0) * budget
        _, found[method] = run.loop(f"{part}-{method}", body, (), len(titles), cost=cost, log=log)
    return found


def _compare_functions(
    config: Config,
    run: Run,
    part: str,
    instances: Sequence[bbob.Instance],
    functions: tuple[int, ...],
    methods: Sequence[str],
) -> Histories:
    if not functions:
        return {}
    keys = jax.random.split(run.key, config.seeds)
    function = bbob.excess_of(tuple(sorted(config.functions)) if part == "ablation" else tuple(sorted(functions)))

    def of_problem(method: str, i: int) -> jax.Array:
        instance = instances[i]
        return histories(method, function, instance, instance.lower, instance.upper, keys, config.evaluations)

    return _compare(run, part, methods, functions, of_problem, config.evaluations)


def _fill(
    table: dict[str, dict[str, float]], functions: Sequence[int], errors: Mapping[str, np.ndarray], part: str
) -> None:
    """Errors of the functions that are shown, and the mean rank over all of them."""
    if part:
        order = np.argsort(np.argsort(np.stack(list(errors.values())), axis=0, kind="stable"), axis=0) + 1
    for k, (method, of_functions) in enumerate(errors.items()):
        if part:
            table[method][f"{part}_rank"] = order[k].mean()
        if part != "coco":
            table[method] |= {
                f"f{function}": error
                for function, error in zip(functions, of_functions, strict=True)
                if function in SHOWN
            }


def _judge_functions(
    config: Config, run: Run, errors: Mapping[str, np.ndarray], coco_errors: Mapping[str, np.ndarray]
) -> None:
    def of(method: str, function: int) -> float:
        return errors[method][config.functions.index(function)]

    def skip(claim: str, needs: str) -> None:
        run.skip(claim, "cpu", f"this run has not all of {needs}")

    if "abom_no_adaptation" in errors and {6, 8} <= set(config.functions):
        gains = [of("abom_no_adaptation", function) / of("abom", function) for function in (6, 8)]
        run.measure("adaptation_matters", np.exp(np.mean(np.log(gains))))
    else:
        skip("adaptation_matters", "f6, f8 and abom_no_adaptation")
    counted = [i for i, function in enumerate(config.functions) if function not in bbob.CENTRE_SEEKING]
    if counted and set(CLASSICAL) <= errors.keys():
        signs = [_signs(errors[method][counted], errors["abom"][counted]) for method in CLASSICAL]
        share = min(worse / max(worse + better, 1) for worse, _, better in signs)
        run.measure("beats_classical_without_training", share)
        run.measure("wins_as_often_as_published", share)
    else:
        skip("beats_classical_without_training", ", ".join(CLASSICAL))
        skip("wins_as_often_as_published", ", ".join(CLASSICAL))
    if 6 in config.functions and (config.dimension, config.evaluations) == (30, 20000):
        run.measure("matches_the_published_error", of("abom", 6))
    else:
        skip("matches_the_published_error", "f6, 30 variables and 20000 evaluations")
    if 6 in config.functions and "abom_paper" in errors:
        run.measure("released_code_beats_the_equations", of("abom_paper", 6) / of("abom", 6))
    else:
        skip("released_code_beats_the_equations", "f6 and abom_paper")
    ratios = [
        np.log(np.maximum(of_suite["abom_jaxlab"][i], 1e-8) / np.maximum(of_suite["abom"][i], 1e-8))
        for of_suite, functions in ((errors, config.functions), (coco_errors, config.coco_functions))
        for i, function in enumerate(functions)
        if function % 2 == 0 and {"abom", "abom_jaxlab"} <= of_suite.keys()
    ]
    if ratios and coco_errors:
        run.measure("preset_beats_released", np.exp(np.mean(ratios)))
    else:
        skip("preset_beats_released", "both sets of instances, an even function, abom and abom_jaxlab")


def _count_signs(run: Run, functions: Sequence[int], errors: Mapping[str, np.ndarray], suite: str) -> None:
    """Note on how many functions each method has a higher and a lower median error than ABOM, as the paper counts."""
    counted = [i for i, function in enumerate(functions) if suite != "MetaBox" or function not in bbob.CENTRE_SEEKING]
    if not counted or "abom" not in errors:
        return
    signs = ", ".join(
        f"{method} {'/'.join(map(str, _signs(of_method[counted], errors['abom'][counted])))}"
        for method, of_method in errors.items()
        if method != "abom"
    )
    run.note(f"{suite}, {len(counted)} functions, worse/equal/better than ABOM: {signs}.")


def _signs(errors: np.ndarray, reference: np.ndarray) -> tuple[int, int, int]:
    """How often the errors are above, equal to and below the reference; a plateau that both reach counts as equal."""
    equal = np.isclose(errors, reference, rtol=1e-3, atol=1e-8)
    above = (errors > reference) & ~equal
    return int(above.sum()), int(equal.sum()), int((~above & ~equal).sum())


def _terrains(config: Config, run: Run) -> list[tuple[str, uav.Terrain]]:
    size = {"size": config.map_size, "threats": config.threats}
    seeds = [1000 * run.seed + i for i in range(max(config.terrains, config.real_terrains))]
    found = [
        (f"generated {seed}", uav.generated_terrain(seed, levels=config.levels, **size))
        for seed in seeds[: config.terrains]
    ]
    if config.real_terrains:
        try:
            elevation = _elevation(config.elevation)
        except (ValueError, FileNotFoundError) as error:
            run.note(f"No real terrain: {error}.")
        else:
            found += [
                (f"real {seed}", uav.real_terrain(elevation, seed, **size)) for seed in seeds[: config.real_terrains]
            ]
    return found


@lru_cache(maxsize=1)
def _elevation(name: str) -> np.ndarray:
    """In metres, from the first archive of the folder."""
    path = resolve(name, holding="*.npz")
    files = [path] if path.is_file() else sorted(path.glob("*.npz"))
    if not files:
        raise FileNotFoundError(f"{path} holds no .npz")
    with np.load(files[0]) as archive:
        if "elevation_cm" not in archive:
            raise ValueError(f"{files[0].name} has no array 'elevation_cm'")
        return archive["elevation_cm"] / 100


def _compare_terrains(
    config: Config,
    run: Run,
    terrains: Sequence[tuple[str, uav.Terrain]],
    methods: Sequence[str],
    table: dict[str, dict[str, float]],
) -> None:
    if not terrains or not {"abom", "abom_no_adaptation", "de"} <= set(methods):
        run.skip(
            "uav_beats_de_and_no_adaptation",
            "cpu",
            "this run has not all of a terrain, abom, abom_no_adaptation and de",
        )
        return
    keys = jax.random.split(jax.random.fold_in(run.key, 1), config.seeds)

    def of_problem(method: str, i: int) -> jax.Array:
        _, terrain = terrains[i]
        lower, upper = uav.bounds(terrain, config.waypoints)
        return histories(method, uav.cost, terrain, lower, upper, keys, config.uav_evaluations)

    titles = [title for title, _ in terrains]
    found = _compare(run, "uav", methods, titles, of_problem, config.uav_evaluations)
    costs = {method: _final(history) for method, history in found.items()}
    ratio = {method: np.exp(np.mean(np.log(cost / costs["abom"]))) for method, cost in costs.items()}
    for method in methods:
        table[method]["uav"] = ratio[method]
    run.measure("uav_beats_de_and_no_adaptation", max(1 / ratio["de"], 1 / ratio["abom_no_adaptation"]))
    shown = min(8, len(terrains))
    plots.convergence(
        run,
        "terrains",
        titles[:shown],
        _evaluations(config.uav_evaluations),
        {method: history[:shown] for method, history in found.items()},
        label="cost of the path",
    )


def _transformed(data: tuple[jax.Array, bbob.Instance], x: jax.Array) -> jax.Array:
    """The error, four times the error, or its cube: all keep every two different floating-point numbers apart."""
    error = bbob.excess(data[1], x)
    return jnp.stack([error, 4 * error, error**3])[data[0]]


@partial(jax.jit, static_argnums=0)
def _trajectory(
    evaluations: int, transform: jax.Array, instance: bbob.Instance, key: jax.Array
) -> dict[str, jax.Array]:
    found = minimize(
        _transformed,
        ABOM.released(),
        instance.lower,
        instance.upper,
        key,
        max_evaluations=evaluations,
        data=(transform, instance),
    )
    return {"population": found.state.population, "loss": found.history.loss}


def _check_ranks(config: Config, run: Run, instance: bbob.Instance) -> None:
    if not config.invariance_evaluations:
        run.skip("rank_invariance", "quick", "invariance_evaluations is 0")
        return
    key = jax.random.fold_in(run.key, 2)
    _, found = run.loop(
        "invariance",
        lambda carry, i: (carry, _trajectory(config.invariance_evaluations, jnp.asarray(i), instance, key)),
        (),
        3,
        cost=3 * config.invariance_evaluations / config.seeds,
    )
    changed = sum(int(np.sum(values[1:] != values[:1])) for values in found.values())
    run.measure("rank_invariance", changed)


def _draw_attention(config: Config, run: Run, instance: bbob.Instance) -> None:
    if not config.attention_evaluations:
        return
    settings = ABOM.released()
    half = config.attention_evaluations // POPULATION // 2
    start = init(settings, instance.lower, instance.upper, jax.random.fold_in(run.key, 3))
    order = jnp.argsort(jax.vmap(partial(bbob.excess, instance))(start.population))
    ranks = jnp.arange(POPULATION, dtype=start.population.dtype)

    def matrices(parameters: Any, population: jax.Array) -> dict[str, jax.Array]:
        return {
            "selection": selection_matrix(parameters, population, ranks),
            "mutation": mutation_matrix(parameters, population[:1])[0],
        }

    def body(state: Any, i: int) -> tuple[Any, dict[str, jax.Array]]:
        if i == 0:
            return state, matrices(state.parameters, state.population[order])
        state, _ = advance(bbob.excess, settings, state, instance, generations=half)
        return state, matrices(state.parameters, state.population)

    cost = config.attention_evaluations / config.seeds
    _, found = run.loop("attention", body, start, 3, cost=cost)
    plots.attention(run, [1, half, 2 * half], found["selection"], found["mutation"])


def _shapes(config: Config) -> list[Any]:
    def enlarged(leaf: jax.Array) -> jax.Array:
        return jnp.zeros(tuple(config.dimension if n == 2 else n for n in leaf.shape), leaf.dtype)

    def run_of(method: str) -> jax.Array:
        instance = jax.tree.map(enlarged, small)
        keys = jax.random.split(jax.random.key(0), config.seeds)
        return histories(method, bbob.excess, instance, instance.lower, instance.upper, keys, config.evaluations)

    small = bbob.coco_instance(1, 2)
    methods = [method for method in config.methods if method != "cma_es" or has_cma_es()]
    return [jax.eval_shape(partial(run_of, method)) for method in methods]


EXPERIMENT = Experiment(
    name="abom",
    summary="A black-box search that learns its operators while it searches.",
    claims=CLAIMS,
    presets={
        "smoke": Config(
            dimension=3,
            evaluations=200,
            seeds=2,
            functions=(6, 8),
            methods=("abom", "de"),
            terrains=0,
            real_terrains=0,
            invariance_evaluations=0,
        ),
        "quick": Config(),
        "cpu": Config(
            seeds=8,
            functions=bbob.FUNCTIONS,
            coco_functions=bbob.FUNCTIONS,
            ablations=("abom_elite", "abom_persistent", "abom_no_swap", "abom_raw"),
            terrains=3,
            real_terrains=3,
            uav_methods=MAIN,
            attention_evaluations=20000,
        ),
        "paper": Config(
            dimension=500,
            seeds=30,
            functions=bbob.FUNCTIONS,
            coco_functions=bbob.FUNCTIONS,
            ablations=("abom_elite", "abom_persistent", "abom_no_swap", "abom_raw"),
            terrains=56,
            real_terrains=8,
            map_size=900,
            levels=8,
            uav_methods=MAIN,
            attention_evaluations=20000,
        ),
    },
    run=run,
    shapes=_shapes,
)
