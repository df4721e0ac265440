"""The searches that are compared, every one at the same number of evaluations and with populations of twenty."""

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxlab.blackbox import (
    ABOM,
    Search,
    Structure,
    differential_evolution,
    minimize,
    particle_swarm,
    random_search,
    run_search,
)
from jaxlab.blackbox import evosax as evosax_searches

__all__ = ["BASELINES", "METHODS", "VARIANTS", "has_cma_es", "histories"]

POPULATION = 20

VARIANTS: Mapping[str, Callable[[int], ABOM]] = {
    "abom": lambda evaluations: ABOM.released(),
    "abom_no_adaptation": lambda evaluations: ABOM.released(adapt=False),
    "abom_paper": lambda evaluations: ABOM.paper(),
    "abom_jaxlab": ABOM.jaxlab,
    "abom_elite": lambda evaluations: ABOM.released(target="elite"),
    "abom_persistent": lambda evaluations: ABOM.released(fresh_optimizer=False),
    "abom_no_swap": lambda evaluations: ABOM.released(structure=Structure(swap=False)),
    "abom_raw": lambda evaluations: ABOM.released(fitness="raw"),
}
"""ABOM as published, as written, as tuned here, and one switch at a time, for a budget."""

BASELINES: Mapping[str, Callable[[int], Search]] = {
    "random_search": lambda dimension: random_search(POPULATION),
    "pso": lambda dimension: particle_swarm(POPULATION),
    "de": lambda dimension: differential_evolution(POPULATION),
    "cma_es": lambda dimension: evosax_searches.cma_es(dimension, POPULATION),
}
"""What the paper compares with, at its settings; CMA-ES starts from the middle of the box."""

METHODS = (*VARIANTS, *BASELINES)


def has_cma_es() -> bool:
    """Whether evosax, which CMA-ES comes from, is installed."""
    return importlib.util.find_spec("evosax") is not None


def histories(
    method: str,
    function: Callable[[Any, Array], Array],
    data: Any,
    lower: Float[Array, " d"],
    upper: Float[Array, " d"],
    keys: Key[Array, " seeds"],
    evaluations: int,
) -> Float[Array, "seeds generations"]:
    """Lowest value so far after every generation, one row a seed.

    Compiled once for a method, a function and a size, so that the problems of one kind, which differ in ``data``, share
    a program.
    """
    return _histories(method, function, evaluations, data, lower, upper, keys)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _histories(
    method: str, function: Any, evaluations: int, data: Any, lower: Array, upper: Array, keys: Array
) -> Array:
    def of_seed(key: Array) -> Array:
        if method in VARIANTS:
            found = minimize(
                function, VARIANTS[method](evaluations), lower, upper, key, max_evaluations=evaluations, data=data
            )
            return found.history.best_fitness
        search = BASELINES[method](len(lower))
        return run_search(search, function, lower, upper, key, max_evaluations=evaluations, data=data).history

    return jnp.asarray(jax.vmap(of_seed)(keys))
