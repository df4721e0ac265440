"""Searches to compare with, and the scan that runs any of them: random search, particle swarm, differential evolution.

A `Search` is three pure functions; `run_search` is its whole run as one scan, counterpart of
`jaxlab.blackbox.minimize`. `jaxlab.blackbox.evosax.search` makes a `Search` of any evosax algorithm, CMA-ES among
them. The defaults are those the paper compares with.

References: Kennedy & Eberhart (1995) and Shi & Eberhart (1998) for the swarm with falling inertia; Storn & Price (1997)
for DE/rand/1/bin; settings from Wang et al., arXiv 2601.21475.

Example:
  >>> sphere = lambda x: jnp.sum(x**2)
  >>> box = -5 * jnp.ones(4), 5 * jnp.ones(4)
  >>> found = run_search(differential_evolution(), sphere, *box, jax.random.key(0), max_evaluations=2000)
  >>> bool(found.best_fitness < 0.1)
  True
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxlab.blackbox.settings import Bound, checked_box

__all__ = ["Found", "Search", "differential_evolution", "particle_swarm", "random_search", "run_search"]


class Search(NamedTuple):
    """A population-based search.

    Attributes:
      population_size: candidates a generation.
      init: ``init(lower, upper, key, generations) -> state``.
      ask: ``ask(state) -> (candidates, state)``, candidates in the box.
      tell: ``tell(state, candidates, fitness) -> state``.
    """

    population_size: int
    init: Callable[[Array, Array, Array, int], Any]
    ask: Callable[[Any], tuple[Array, Any]]
    tell: Callable[[Any, Array, Array], Any]


class Found(NamedTuple):
    """A finished run.

    Attributes:
      best_solution: in the box.
      best_fitness: its value, inf if none was finite.
      history: the lowest value so far after each generation.
    """

    best_solution: Float[Array, "*batch d"]
    best_fitness: Float[Array, "*batch"]
    history: Float[Array, "*batch generations"]


@partial(jax.jit, static_argnames=("search", "function", "max_evaluations"))
def run_search(
    search: Search,
    function: Callable[..., Array],
    lower: Bound,
    upper: Bound,
    key: Key[Array, ""],
    *,
    max_evaluations: int,
    data: Any = None,
) -> Found:
    """Run a search as one compiled scan.

    Args:
      search: compiled once for each object, which the functions here return again for equal settings.
      function: ``function(x)`` of one point, or ``function(data, x)`` where ``data`` is given.
      lower: of the box.
      upper: of the box.
      key: random key.
      max_evaluations: budget; ``max_evaluations // population_size`` generations are run.
      data: what differs between problems of one kind.

    Raises:
      ValueError: a budget below one population, a box that is empty, not finite or has no side, a function of more
        than one number.
    """
    lower, upper = checked_box(lower, upper)
    generations = max_evaluations // search.population_size
    if generations < 1:
        raise ValueError(f"max_evaluations must pay for {search.population_size} candidates, got {max_evaluations}")
    evaluate = jax.vmap(function if data is None else partial(function, data))

    def generation(carry: tuple, _: None) -> tuple[tuple, Array]:
        state, best_solution, best_fitness = carry
        candidates, state = search.ask(state)
        fitness = evaluate(candidates)
        if fitness.shape != candidates.shape[:1]:
            raise ValueError(f"the function must return one number a point, got shape {fitness.shape[1:]}")
        fitness = jnp.where(jnp.isfinite(fitness), fitness, jnp.inf).astype(best_fitness.dtype)
        state = search.tell(state, candidates, fitness)
        first = jnp.argmin(fitness)
        better = fitness[first] < best_fitness
        best_solution = jnp.where(better, candidates[first], best_solution)
        best_fitness = jnp.where(better, fitness[first], best_fitness)
        return (state, best_solution, best_fitness), best_fitness

    start = (search.init(lower, upper, key, generations), lower, jnp.asarray(jnp.inf, lower.dtype))
    (_, best_solution, best_fitness), history = jax.lax.scan(generation, start, length=generations)
    return Found(best_solution, best_fitness, history)


@lru_cache
def random_search(population_size: int = 20) -> Search:
    """Uniform points in the box."""

    def init(lower: Array, upper: Array, key: Array, generations: int) -> tuple:
        return lower, upper, key, jnp.zeros((), jnp.int32)

    def ask(state: tuple) -> tuple[Array, tuple]:
        lower, upper, key, generation = state
        points = _uniform(jax.random.fold_in(key, generation), population_size, lower, upper)
        return points, (lower, upper, key, generation + 1)

    return Search(population_size, init, ask, lambda state, candidates, fitness: state)


class _Swarm(NamedTuple):
    lower: Array
    upper: Array
    key: Array
    generation: Array
    generations: Array
    position: Array
    velocity: Array
    best_position: Array
    best_fitness: Array


@lru_cache
def particle_swarm(
    population_size: int = 20,
    *,
    inertia: tuple[float, float] = (0.9, 0.4),
    cognitive: float = 2.0,
    social: float = 2.0,
    largest_velocity: float = 0.2,
) -> Search:
    """Particle swarm with global best and falling inertia.

    Args:
      population_size: number of particles.
      inertia: at the first and the last generation.
      cognitive: pull of a particle's own best.
      social: pull of the swarm's best.
      largest_velocity: bound of a step along each side, as a share of it.
    """

    def init(lower: Array, upper: Array, key: Array, generations: int) -> _Swarm:
        position = _uniform(jax.random.fold_in(key, 0), population_size, lower, upper)
        infinite = jnp.full(population_size, jnp.inf, lower.dtype)
        zero = jnp.zeros((), jnp.int32)
        return _Swarm(lower, upper, key, zero, jnp.asarray(generations), position, 0 * position, position, infinite)

    def ask(state: _Swarm) -> tuple[Array, _Swarm]:
        own, common = jax.random.uniform(
            jax.random.fold_in(state.key, state.generation + 1), (2, *state.position.shape), state.position.dtype
        )
        done = state.generation / jnp.maximum(state.generations - 1, 1)
        weight = (inertia[0] + (inertia[1] - inertia[0]) * done).astype(state.position.dtype)
        leader = state.best_position[jnp.argmin(state.best_fitness)]
        pull = cognitive * own * (state.best_position - state.position) + social * common * (leader - state.position)
        bound = largest_velocity * (state.upper - state.lower)
        velocity = jnp.clip(weight * state.velocity + pull, -bound, bound)
        position = jnp.clip(state.position + velocity, state.lower, state.upper)
        # The first generation is the initial swarm.
        started = state.generation > 0
        velocity = jnp.where(started, velocity, 0)
        position = jnp.where(started, position, state.position)
        return position, state._replace(position=position, velocity=velocity)

    def tell(state: _Swarm, candidates: Array, fitness: Array) -> _Swarm:
        better = fitness < state.best_fitness
        return state._replace(
            generation=state.generation + 1,
            best_position=jnp.where(better[:, None], candidates, state.best_position),
            best_fitness=jnp.where(better, fitness, state.best_fitness),
        )

    return Search(population_size, init, ask, tell)


class _Evolution(NamedTuple):
    lower: Array
    upper: Array
    key: Array
    generation: Array
    population: Array
    fitness: Array


@lru_cache
def differential_evolution(
    population_size: int = 20, *, differential_weight: float = 0.5, crossover_rate: float = 0.5
) -> Search:
    """DE/rand/1/bin, clipped to the box.

    Raises:
      ValueError: fewer than four members.
    """
    if population_size < 4:
        raise ValueError(f"differential evolution needs four members, got {population_size}")

    def init(lower: Array, upper: Array, key: Array, generations: int) -> _Evolution:
        population = _uniform(jax.random.fold_in(key, 0), population_size, lower, upper)
        infinite = jnp.full(population_size, jnp.inf, lower.dtype)
        return _Evolution(lower, upper, key, jnp.zeros((), jnp.int32), population, infinite)

    def ask(state: _Evolution) -> tuple[Array, _Evolution]:
        size, dimension = state.population.shape
        numbers = jax.random.uniform(jax.random.fold_in(state.key, state.generation + 1), (size, size + dimension + 1))
        # The three smallest of uniform numbers, oneself left out, are three different members at random.
        order = jnp.argsort(numbers[:, :size] + 2 * jnp.eye(size), axis=1)[:, :3]
        base, plus, minus = jnp.moveaxis(state.population[order], 1, 0)
        donor = base + differential_weight * (plus - minus)
        always = jnp.arange(dimension) == (numbers[:, -1:] * dimension).astype(int)
        crossed = (numbers[:, size:-1] < crossover_rate) | always
        trial = jnp.clip(jnp.where(crossed, donor, state.population), state.lower, state.upper)
        return jnp.where(state.generation > 0, trial, state.population), state

    def tell(state: _Evolution, candidates: Array, fitness: Array) -> _Evolution:
        better = fitness <= state.fitness
        return state._replace(
            generation=state.generation + 1,
            population=jnp.where(better[:, None], candidates, state.population),
            fitness=jnp.where(better, fitness, state.fitness),
        )

    return Search(population_size, init, ask, tell)


def _uniform(key: Array, size: int, lower: Array, upper: Array) -> Array:
    return lower + (upper - lower) * jax.random.uniform(key, (size, len(lower)), lower.dtype)
