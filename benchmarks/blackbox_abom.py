"""ABOM on the BBOB functions: jaxlab against the same algorithm in a PyTorch loop, and against CMA-ES of evosax.

    python benchmarks/blackbox_abom.py [--functions 24] [--seeds 16] [--evaluations 20000] [--dimension 30] [--out FILE]

jaxlab runs all functions and seeds in one compiled program: the seeds vmapped, the functions one after the other. The
loop runs one search at a time; a slice of one of its searches is timed, on the cheapest function, and its time per
generation stands for the whole. One generation from the same weights, population and masks on both sides says that the
same work is done. CMA-ES is evosax's, scanned and vmapped in the same way. Peers need the extra ``peers``. Memory is
what the compiled program of one search of ``--large-dimension`` variables needs.
"""

import argparse
import resource
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Timing, device_name, measure, print_table, write_json
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlab.blackbox import ABOM, advance, ask, init, minimize, run_search, tell
from jaxlab.blackbox.operators import Parameters, draw_masks
from jaxlab.blackbox.problems import bbob

TOLERANCE = 1e-4
SETTINGS = ABOM.released()


def flat_parameters(parameters: Parameters) -> dict[str, np.ndarray]:
    """The weights under the names of the loop."""
    leaves = jax.tree.leaves_with_path(parameters)
    return {jax.tree_util.keystr(path, simple=True, separator="_"): np.asarray(leaf) for path, leaf in leaves}


def largest_difference(dimension: int) -> float:
    """Of the survivors and the weights after one generation in both, from one start and with the same masks.

    Raises:
      ValueError: if they differ by more than rounding.
    """
    import torch
    from torch_abom import TorchABOM

    instance = bbob.metabox_instances(dimension, (1,))[0]
    evaluate = jax.vmap(partial(bbob.excess, instance))
    state = init(SETTINGS, instance.lower, instance.upper, jax.random.key(1))
    candidates, state = ask(SETTINGS, state)
    state, _ = tell(SETTINGS, state, candidates, evaluate(candidates))
    masks = draw_masks(
        jax.random.fold_in(state.key, state.generation),
        SETTINGS.population_size,
        dimension,
        dimension,
        crossover_dropout=SETTINGS.crossover_dropout,
        mutation_dropout=SETTINGS.mutation_dropout,
    )
    loop = TorchABOM(flat_parameters(state.parameters), sphere_of(instance), half_width=100.0)
    population, _ = loop.generation(
        *(torch.tensor(np.asarray(part)) for part in (state.population, state.fitness)),
        tuple(torch.tensor(np.asarray(mask)) for mask in masks),
    )
    candidates, state = ask(SETTINGS, state)
    state, _ = tell(SETTINGS, state, candidates, evaluate(candidates))
    ours = flat_parameters(state.parameters)
    apart = [np.abs(np.asarray(state.population) - population.numpy()).max() / 100]
    # A step has the sign of its gradient. Where the attention is one-hot that of its weights is zero up to rounding, so
    # its sign is not the algorithm's; the perceptrons have one in all but a few entries.
    apart += [
        np.quantile(np.abs(ours[name] - theirs.detach().numpy()), 0.5, method="lower")
        for name, theirs in loop.parameters.items()
        if name.startswith(("crossover", "mutation"))
    ]
    if max(apart) > TOLERANCE:
        raise ValueError(f"one generation differs by {max(apart):.1e}, more than {TOLERANCE}: not the same work")
    return float(max(apart))


def sphere_of(instance: bbob.Instance) -> Callable[[Any], Any]:
    """The first BBOB function for torch."""
    import torch

    shift = torch.tensor(np.asarray(instance.x_opt))
    return lambda points: ((points - shift) ** 2).sum(1)


def program(method: str, dimension: int, evaluations: int) -> Callable[[bbob.Instance, jax.Array], jax.Array]:
    """From instances and keys to the errors ``[functions, seeds]``, in one compiled call."""

    def search(instance: bbob.Instance, key: jax.Array) -> jax.Array:
        box = instance.lower, instance.upper
        if method == "abom":
            return minimize(bbob.excess, SETTINGS, *box, key, max_evaluations=evaluations, data=instance).best_fitness
        from jaxlab.blackbox.evosax import cma_es

        return run_search(
            cma_es(dimension), bbob.excess, *box, key, max_evaluations=evaluations, data=instance
        ).best_fitness

    @jax.jit
    def run(instances: bbob.Instance, keys: jax.Array) -> jax.Array:
        return jax.lax.map(lambda instance: jax.vmap(partial(search, instance))(keys), instances)

    return run


def large_search(dimension: int) -> tuple[float, float]:
    """Mebibytes of the compiled program of one search, and of the whole process after some generations of it."""
    instance = bbob.metabox_instances(dimension, (6,))[0]
    state = init(SETTINGS, instance.lower, instance.upper, jax.random.key(0))
    leaves, structure = jax.tree.flatten((state, instance))

    @jax.jit
    def generations(leaves: list[jax.Array]) -> list[jax.Array]:
        state, instance = jax.tree.unflatten(structure, leaves)
        return jax.tree.leaves(advance(bbob.excess, SETTINGS, state, instance, generations=10)[0])

    compiled = generations.lower(leaves).compile()
    jax.block_until_ready(compiled(leaves))
    needs = compiled.memory_analysis()
    program = needs.temp_size_in_bytes + needs.argument_size_in_bytes + needs.output_size_in_bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return program / 2**20, peak / 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--evaluations", type=int, default=20000)
    parser.add_argument("--dimension", type=int, default=30)
    parser.add_argument("--large-dimension", type=int, default=500)
    parser.add_argument("--peer-generations", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    for name in ("functions", "seeds", "peer_generations", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")

    megabytes, peak = large_search(options.large_dimension)
    instances = bbob.metabox_instances(options.dimension, bbob.FUNCTIONS[: options.functions])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *instances)
    keys = jax.random.split(jax.random.key(0), options.seeds)
    generations = options.evaluations // SETTINGS.population_size
    total = options.functions * options.seeds * generations
    rows: list[dict[str, Any]] = []

    def add(implementation: str, timing: Timing, generations: int, devices: int = 1) -> None:
        mean, spread = timing.rate(generations)
        rows.append(
            {
                "implementation": implementation,
                "devices": devices,
                "compile_seconds": timing.compile,
                "generations_per_second": mean,
                "generations_per_second_std": spread,
                "microseconds_a_generation": 1e6 / mean,
            }
        )

    difference = None
    try:
        difference = largest_difference(options.dimension)
        add("torch, loop", _time_torch(instances[0], options), options.peer_generations)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("torch is not installed (extra 'peers'): only jaxlab is measured")
    try:
        cma = program("cma_es", options.dimension, options.evaluations)
        timing, _ = measure(lambda: cma(stacked, keys), repeats=options.repeats)
        add("evosax, CMA-ES", timing, total)
    except ModuleNotFoundError as error:
        if error.name != "evosax":
            raise
        print("evosax is not installed (extra 'peers'): CMA-ES is not measured")
    ours = program("abom", options.dimension, options.evaluations)
    timing, _ = measure(lambda: ours(stacked, keys), repeats=options.repeats)
    add("jaxlab", timing, total)
    devices = len(jax.devices())
    if devices > 1 and options.seeds % devices == 0:
        spread = jax.device_put(keys, NamedSharding(Mesh(np.asarray(jax.devices()), ("run",)), PartitionSpec("run")))
        timing, _ = measure(lambda: ours(stacked, spread), repeats=options.repeats)
        add("jaxlab", timing, total, devices)
    _print(rows, options, total)
    print(f"{options.large_dimension} variables: the program needs {megabytes:.0f} MiB, the process {peak:.0f} MiB")
    if difference is not None:
        print(f"one generation on both sides from one start differs by {difference:.1e}")
    if options.out:
        write_json(
            options.out,
            "blackbox_abom",
            rows=rows,
            functions=options.functions,
            seeds=options.seeds,
            evaluations=options.evaluations,
            dimension=options.dimension,
            large_dimension=options.large_dimension,
            large_program_mebibytes=megabytes,
            large_process_mebibytes=peak,
            difference=difference,
            tolerance=TOLERANCE,
        )


def _time_torch(instance: bbob.Instance, options: argparse.Namespace) -> Timing:
    import torch
    from torch_abom import TorchABOM

    state = init(SETTINGS, instance.lower, instance.upper, jax.random.key(0))
    weights, population = flat_parameters(state.parameters), torch.tensor(np.asarray(state.population))
    function = sphere_of(instance)

    def work() -> float:
        return float(TorchABOM(weights, function, half_width=100.0).run(population, options.peer_generations))

    timing, _ = measure(work, repeats=options.repeats)
    return timing


def _print(rows: Sequence[dict[str, Any]], options: argparse.Namespace, total: int) -> None:
    first = rows[0]["generations_per_second"]
    print_table(
        f"{options.functions} functions x {options.seeds} seeds x {options.evaluations} evaluations, "
        f"{options.dimension} variables, on {device_name()}",
        ("", "devices", "compile s", "µs a generation", "all s", "x first"),
        [
            (
                row["implementation"],
                str(row["devices"]),
                f"{row['compile_seconds']:.1f}",
                f"{row['microseconds_a_generation']:.1f}",
                f"{total / row['generations_per_second']:.1f}",
                f"{row['generations_per_second'] / first:.1f}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
