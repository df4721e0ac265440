"""Between ABOM and evosax: any evosax algorithm as a `Search` here, and ABOM as an evosax algorithm there.

`search` runs an evosax algorithm on a box, mapped to the unit cube, in the same scan as the other searches; `cma_es` is
CMA-ES with a sane start: the middle of the box and 0.3 of its sides. `strategy` wraps ABOM so that a loop written for
evosax runs it::

    algorithm = strategy(ABOM(), lower, upper)
    state = algorithm.init(key, population, fitness, algorithm.default_params)
    candidates, state = algorithm.ask(key, state, algorithm.default_params)
    state, metrics = algorithm.tell(key, candidates, fitness, state, algorithm.default_params)

evosax (extra ``peers``) is imported when a function here is called.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlab.blackbox import abom
from jaxlab.blackbox.baselines import Search
from jaxlab.blackbox.settings import ABOM

__all__ = ["cma_es", "search", "strategy"]


class _Evosax(NamedTuple):
    lower: Array
    upper: Array
    key: Array
    generation: Array
    initial: Array
    inner: Any


def search(algorithm: Any, parameters: Any = None) -> Search:
    """An evosax algorithm as a `Search`.

    One with a distribution starts from the middle of the box, one with a population from uniform points, which are its
    first generation. Candidates are clipped to the box, and the algorithm is told the clipped points.

    Args:
      algorithm: an instance, such as ``evosax.algorithms.CMA_ES(20, jnp.zeros(dimension))``; it searches the unit cube.
      parameters: evosax's, ``algorithm.default_params`` if None.

    Raises:
      TypeError: what is no algorithm of evosax.
    """
    from evosax.algorithms.base import EvolutionaryAlgorithm
    from evosax.algorithms.distribution_based.base import DistributionBasedAlgorithm

    if not isinstance(algorithm, EvolutionaryAlgorithm):
        raise TypeError(f"an algorithm of evosax is needed, got {type(algorithm).__name__}")
    parameters = algorithm.default_params if parameters is None else parameters
    has_distribution = isinstance(algorithm, DistributionBasedAlgorithm)
    size, dimension = algorithm.population_size, algorithm.num_dims

    def init(lower: Array, upper: Array, key: Array, generations: int) -> _Evosax:
        if has_distribution:
            initial = jnp.full((size, dimension), 0.5, lower.dtype)
            inner = algorithm.init(key, initial[0], parameters)
        else:
            initial = jax.random.uniform(
                jax.random.fold_in(key, jnp.iinfo(jnp.uint32).max), (size, dimension), lower.dtype
            )
            inner = algorithm.init(key, initial, jnp.full(size, jnp.inf, lower.dtype), parameters)
        return _Evosax(lower, upper, key, jnp.zeros((), jnp.int32), initial, inner)

    def ask(state: _Evosax) -> tuple[Array, _Evosax]:
        key = jax.random.fold_in(state.key, state.generation)
        points, inner = algorithm.ask(key, state.inner, parameters)
        if not has_distribution:
            points = jnp.where(state.generation > 0, points, state.initial)
        candidates = state.lower + jnp.clip(points, 0, 1) * (state.upper - state.lower)
        return candidates, state._replace(inner=inner)

    def tell(state: _Evosax, candidates: Array, fitness: Array) -> _Evosax:
        points = (candidates - state.lower) / (state.upper - state.lower)
        inner, _ = algorithm.tell(state.key, points, fitness, state.inner, parameters)
        if not has_distribution:
            started = algorithm.init(state.key, points, fitness, parameters)
            first = state.generation == 0
            inner = jax.tree.map(lambda new, old: jnp.where(first, new, old).astype(old.dtype), started, inner)
        return state._replace(inner=inner, generation=state.generation + 1)

    return Search(size, init, ask, tell)


@lru_cache
def cma_es(dimension: int, population_size: int = 20) -> Search:
    """CMA-ES of evosax from the middle of the box with a standard deviation of 0.3 of its sides."""
    from evosax.algorithms import CMA_ES

    # Computed at once, also where this is called while jax traces: the search outlives the trace.
    with jax.ensure_compile_time_eval():
        algorithm = CMA_ES(population_size, jnp.zeros(dimension))
        return search(algorithm, algorithm.default_params.replace(std_init=jnp.asarray(0.3)))


def strategy(settings: ABOM, lower: Float[Array, " d"], upper: Float[Array, " d"]) -> Any:
    """ABOM as an ``evosax.algorithms`` object with ``init``, ``ask``, ``tell`` and ``default_params``.

    Its ``init`` takes evosax's initial population and fitness, so that nothing is evaluated twice. ``state.search`` is
    the `State` of the search.
    """
    from evosax.algorithms.population_based import base
    from flax import struct

    @struct.dataclass
    class EvosaxState(base.State):
        best_solution: Any
        best_fitness: Any
        generation_counter: Any
        population: Any
        fitness: Any
        search: abom.State

    @struct.dataclass
    class EvosaxParams(base.Params):
        pass

    class ABOMStrategy(base.PopulationBasedAlgorithm):
        """ABOM behind evosax's interface."""

        @property
        def _default_params(self) -> Any:
            return EvosaxParams()

        def _init(self, key: Array, params: Any) -> Any:
            started = abom.init(settings, lower, upper, key)
            return EvosaxState(
                population=started.population,
                fitness=started.fitness,
                best_solution=started.best_solution,
                best_fitness=started.best_fitness,
                generation_counter=0,
                search=started,
            )

        def init(self, key: Array, population: Any, fitness: Array, params: Any) -> Any:
            state = super().init(key, population, fitness, params)
            _, asked = abom.ask(settings, state.search)
            flat = jax.vmap(self._ravel_solution)(population)
            told, _ = abom.tell(settings, asked, flat, fitness)
            return state.replace(search=told, population=told.population, fitness=told.fitness)

        def _ask(self, key: Array, state: Any, params: Any) -> tuple[Array, Any]:
            candidates, asked = abom.ask(settings, state.search.replace(key=key))
            return candidates, state.replace(search=asked)

        def _tell(self, key: Array, population: Array, fitness: Array, state: Any, params: Any) -> Any:
            told, _ = abom.tell(settings, state.search, population, fitness)
            return state.replace(search=told, population=told.population, fitness=told.fitness)

    return ABOMStrategy(settings.population_size, jnp.zeros_like(lower))
