r"""ABOM: an evolutionary search whose operators are learnt while it searches, with no training tasks.

Minimises ``f`` on a box from queries alone. A generation draws offspring from the operators of
`jaxlab.blackbox.operators`, evaluates them, keeps the best ``n`` of parents and offspring, and takes one gradient step
that pulls what the operators produce towards what survived:

.. math::
    O = \mathrm{reproduce}_\theta(P, \phi), \quad X = \mathrm{clip}(O), \quad
    E = \mathrm{best}_n(P \cup X), \quad \theta \leftarrow \theta - \eta\, \mathrm{step}(\nabla_\theta L(O, E)).

Either ask for candidates and tell their values, or give `minimize` a function that jax can trace and have the whole
search as one scan, which vmaps over keys, problems and settings and shards over devices. `minimize_host` drives a
function that jax cannot trace.

Three presets: `ABOM.released` (default) is the code the authors published, which reproduces their numbers;
`ABOM.paper` the equations of the paper, which do not; `ABOM.jaxlab` what was best over the BBOB functions here.

Elitism and a positive chance of every move make the best value converge to the minimum of a continuous function on a
compact box almost surely; that is asymptotic and gives no rate. There is no diversity control: without ``patience`` a
search can converge early and stay.

Reference: Wang et al., "Task-free Adaptive Meta Black-box Optimization", arXiv 2601.21475.

Deviations from the reference:

1. Paper and released code differ in ten points (see `ABOM`); each is a switch of its own.
2. ``loss="squared"`` is the squared Frobenius norm where the paper writes the norm: the root would make every gradient
   one of constant length.
3. The offspring's graph is built once a generation: the pull-back of the forward pass is applied to the loss's
   gradient after the evaluation.
4. Values that are not finite count as the worst and tie.

Example:
  >>> sphere = lambda x: jnp.sum((x - 2) ** 2)
  >>> found = minimize(sphere, ABOM(), -10 * jnp.ones(5), 10 * jnp.ones(5), jax.random.key(0), max_evaluations=4000)
  >>> bool(found.best_fitness < found.history.best_fitness[0] / 10)
  True
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Key, Real

from jaxlab.blackbox.operators import Parameters, draw_masks, initial_parameters, latin_hypercube, reproduce
from jaxlab.blackbox.settings import ABOM, Bound, check_settings, checked_box, is_concrete

__all__ = ["Info", "Result", "State", "advance", "ask", "init", "minimize", "minimize_host", "tell"]

_EPSILON = 1e-8


class State(flax.struct.PyTreeNode):
    """A search between two generations.

    Attributes:
      parameters: of the operators.
      optimizer_state: of the optax transformation, None where there is none.
      population: sorted by fitness, best first, in the coordinates of the box.
      fitness: of the population; not finite is stored as inf.
      best_solution: lowest so far, over restarts too.
      best_fitness: its value.
      key: random key of the whole search; generation ``t`` uses ``fold_in(key, t)``.
      generation: how many times values were told.
      unevaluated: the population is new and is what `ask` proposes.
      asked: `ask` was called and `tell` not yet.
      stalled: generations since the best value of this restart got better.
      lower: of the box.
      upper: of the box.
    """

    parameters: Parameters
    optimizer_state: Any
    population: Float[Array, "*batch n d"]
    fitness: Float[Array, "*batch n"]
    best_solution: Float[Array, "*batch d"]
    best_fitness: Float[Array, "*batch"]
    key: Key[Array, "*batch"]
    generation: Int[Array, "*batch"]
    unevaluated: Bool[Array, "*batch"]
    asked: Bool[Array, "*batch"]
    stalled: Int[Array, "*batch"]
    lower: Float[Array, "*batch d"]
    upper: Float[Array, "*batch d"]


class Info(NamedTuple):
    """What a generation did.

    Attributes:
      best_fitness: lowest so far; inf as long as no value was finite.
      mean_fitness: of the survivors.
      loss: of the operators; 0 where nothing was learnt.
      survivors: how many offspring made it.
      restarted: the next population is a new one.
    """

    best_fitness: Float[Array, "*batch"]
    mean_fitness: Float[Array, "*batch"]
    loss: Float[Array, "*batch"]
    survivors: Int[Array, "*batch"]
    restarted: Bool[Array, "*batch"]


class Result(NamedTuple):
    """A finished search.

    Attributes:
      best_solution: in the box.
      best_fitness: its value; inf if no value was finite.
      evaluations: how many points were evaluated.
      history: `Info` of every generation, on a leading axis.
      state: to go on from with `ask` and `tell`.
    """

    best_solution: Float[Array, "*batch d"]
    best_fitness: Float[Array, "*batch"]
    evaluations: int
    history: Info
    state: State


def init(
    settings: ABOM, lower: Bound, upper: Bound, key: Key[Array, ""], *, parameters: Parameters | None = None
) -> State:
    """A search that has not evaluated anything; the first `ask` proposes its initial population.

    Args:
      settings: of the search.
      lower: of the box, floating point; its dtype is the search's.
      upper: of the box.
      key: of the whole search.
      parameters: to start with in place of random ones, such as `jaxlab.blackbox.pretrain` makes; a restart draws new
        ones all the same.

    Raises:
      ValueError: settings out of range, a box that is empty, not finite or has no side, parameters for another number
        of variables or another structure.
    """
    check_settings(settings)
    lower, upper = checked_box(lower, upper)
    of_points, of_weights = jax.random.split(jax.random.fold_in(key, jnp.iinfo(jnp.uint32).max))
    population = _initial_population(settings, lower, upper, of_points)
    if parameters is None:
        parameters = initial_parameters(of_weights, len(lower), settings.structure, dtype=lower.dtype)
    else:
        _check_parameters(settings, parameters, len(lower))
    optimizer = _optimizer(settings)
    return State(
        parameters=parameters,
        optimizer_state=None if optimizer is None else optimizer.init(parameters),
        population=population,
        fitness=jnp.full(len(population), jnp.inf, lower.dtype),
        best_solution=population[0],
        best_fitness=jnp.asarray(jnp.inf, lower.dtype),
        key=key,
        generation=jnp.zeros((), jnp.int32),
        unevaluated=jnp.ones((), bool),
        asked=jnp.zeros((), bool),
        stalled=jnp.zeros((), jnp.int32),
        lower=lower,
        upper=upper,
    )


@jax.jit
def ask(settings: ABOM, state: State) -> tuple[Float[Array, "n d"], State]:
    """Candidates to evaluate, all of them in the box, and the state to tell their values to."""
    offspring, _ = _propose(settings, state)
    return _candidates(settings, state, offspring), state.replace(asked=jnp.ones((), bool))


def tell(
    settings: ABOM, state: State, candidates: Float[Array, "n d"], fitness: Real[Array, " m"] | Real[np.ndarray, " m"]
) -> tuple[State, Info]:
    """Learn from the values of the candidates and keep the best.

    Args:
      settings: of the search.
      state: from `ask`.
      candidates: from `ask`, possibly repaired.
      fitness: their values; what is not finite is the worst.

    Raises:
      ValueError: without a preceding `ask`, a fitness of another shape, or no finite value in the first population.
        Inside jit the last is told by ``info.best_fitness`` being inf.
    """
    expected = state.population.shape
    given = np.shape(candidates), np.shape(fitness)
    if given != (expected, expected[:1]):
        raise ValueError(f"tell needs candidates {expected} and fitness {expected[:1]}, got {given[0]} and {given[1]}")
    if is_concrete(state.asked) and not state.asked:
        raise ValueError("tell needs the state that ask returned; candidates of this one were never asked for")
    state, info = _tell(settings, state, candidates, jnp.asarray(fitness, candidates.dtype))
    _check_found(info.best_fitness)
    return state, info


def minimize(
    function: Callable[..., Array],
    settings: ABOM,
    lower: Bound,
    upper: Bound,
    key: Key[Array, ""],
    *,
    max_evaluations: int,
    data: Any = None,
    parameters: Parameters | None = None,
) -> Result:
    """The whole search as one compiled scan.

    Args:
      function: ``function(x)`` of one point, or ``function(data, x)`` where ``data`` is given; it is vmapped over the
        population. Compiled once for each function object, so give the same one again.
      settings: of the search.
      lower: of the box.
      upper: of the box.
      key: random key; vmap over keys for several seeds.
      max_evaluations: budget; ``max_evaluations // n`` generations are evaluated, the initial one included.
      data: what differs between problems of one kind, any pytree; vmap over it for several problems.
      parameters: to start with, see `init`.

    Raises:
      ValueError: as `init`, a budget below two populations, or (outside jit) no finite value at all.
    """
    generations = _generations(settings, max_evaluations)
    state = init(settings, lower, upper, key, parameters=parameters)
    state, history = advance(function, settings, state, data, generations=generations)
    _check_found(state.best_fitness)
    return Result(state.best_solution, state.best_fitness, generations * settings.population_size, history, state)


@partial(jax.jit, static_argnames=("function", "generations"))
def advance(
    function: Callable[..., Array], settings: ABOM, state: State, data: Any = None, *, generations: int
) -> tuple[State, Info]:
    """Some more generations of a search, as one compiled scan.

    Args:
      function: as in `minimize`.
      settings: of the search.
      state: from `init`, `tell`, an earlier call, or a `Result`.
      data: first argument of the function, or None.
      generations: how many.

    Returns:
      The state after them, and `Info` of each on a leading axis.
    """
    evaluate = jax.vmap(function if data is None else partial(function, data))

    def generation(state: State, _: None) -> tuple[State, Info]:
        offspring, pull_back = _propose(settings, state)
        candidates = _candidates(settings, state, offspring)
        fitness = evaluate(candidates)
        if fitness.shape != candidates.shape[:1]:
            raise ValueError(f"the function must return one number a point, got shape {fitness.shape[1:]}")
        fitness = fitness.astype(candidates.dtype)
        return _survive(settings, state, offspring, pull_back, candidates, fitness)

    return jax.lax.scan(generation, state, length=generations)


def minimize_host(
    function: Callable[[np.ndarray], Any],
    settings: ABOM,
    lower: Bound,
    upper: Bound,
    key: Key[Array, ""],
    *,
    max_evaluations: int,
    callback: Callable[[int, Mapping[str, float]], Any] | None = None,
) -> Result:
    """The same search for a function that jax cannot trace: a simulator, a script, another machine.

    Args:
      function: from candidates ``[n, d]`` (numpy) to their ``n`` values, so that it may evaluate them side by side.
      settings: of the search.
      lower: of the box.
      upper: of the box.
      key: random key.
      max_evaluations: budget.
      callback: ``callback(generation, info)`` after every generation; a true return value ends the search.

    Raises:
      ValueError: as `minimize`, or values of another shape.
    """
    state = init(settings, lower, upper, key)
    infos: list[Info] = []
    for generation in range(_generations(settings, max_evaluations)):
        candidates, state = ask(settings, state)
        values = np.asarray(function(np.asarray(candidates)), dtype=float)
        state, info = tell(settings, state, candidates, values)
        infos.append(jax.device_get(info))
        if callback is not None and callback(generation, {k: float(v) for k, v in infos[-1]._asdict().items()}):
            break
    history = Info(*(jnp.stack(column) for column in zip(*infos, strict=True)))
    evaluations = len(infos) * settings.population_size
    return Result(state.best_solution, state.best_fitness, evaluations, history, state)


@jax.jit
def _tell(settings: ABOM, state: State, candidates: Array, fitness: Array) -> tuple[State, Info]:
    offspring, pull_back = _propose(settings, state)
    return _survive(settings, state, offspring, pull_back, candidates, fitness)


def _propose(settings: ABOM, state: State) -> tuple[Array, Callable[[Array], Parameters]]:
    """Offspring in the operators' coordinates, and the pull-back of their gradient to the parameters."""
    structure = settings.structure
    population = to_operators(settings, state, state.population)
    size, dimension = population.shape
    masks = draw_masks(
        jax.random.fold_in(state.key, state.generation),
        size,
        dimension,
        structure.widths(dimension)[1],
        structure,
        crossover_dropout=settings.crossover_dropout,
        mutation_dropout=settings.mutation_dropout,
        dtype=population.dtype,
    )
    seen = feature(settings, state.fitness)
    offspring, pull_back = jax.vjp(lambda p: reproduce(p, population, seen, masks, structure), state.parameters)
    return offspring, lambda cotangent: pull_back(cotangent)[0]


def _candidates(settings: ABOM, state: State, offspring: Array) -> Array:
    in_box = jnp.clip(from_operators(settings, state, offspring), state.lower, state.upper)
    return jnp.where(state.unevaluated, state.population, in_box)


def _survive(
    settings: ABOM,
    state: State,
    offspring: Array,
    pull_back: Callable[[Array], Parameters],
    candidates: Array,
    fitness: Array,
) -> tuple[State, Info]:
    size = len(fitness)
    fitness = jnp.where(jnp.isfinite(fitness), fitness, jnp.inf)
    both = jnp.concatenate([state.fitness, fitness])
    # Stable, so that among equals the parents stay.
    order = jnp.argsort(both, stable=True)[:size]
    survivors, kept = jnp.concatenate([state.population, candidates])[order], both[order]

    parameters, optimizer_state, loss = state.parameters, state.optimizer_state, jnp.zeros((), fitness.dtype)
    if settings.adapt:
        elite = to_operators(settings, state, survivors)
        residual = offspring - (elite[:1] if settings.target == "best" else elite)
        loss, slope = _loss(settings, residual)
        learnt, learnt_state = _learn(settings, state, pull_back(slope))
        # Nothing was proposed by the operators where the population was new.
        learns = ~state.unevaluated
        parameters, optimizer_state = jax.tree.map(
            lambda new, old: jnp.where(learns, new, old), (learnt, learnt_state), (parameters, optimizer_state)
        )
        loss = jnp.where(learns, loss, 0)

    better = kept[0] < state.best_fitness
    progress = state.unevaluated | (kept[0] < state.fitness[0])
    state = state.replace(
        parameters=parameters,
        optimizer_state=optimizer_state,
        population=survivors,
        fitness=kept,
        best_solution=jnp.where(better, survivors[0], state.best_solution),
        best_fitness=jnp.where(better, kept[0], state.best_fitness),
        generation=state.generation + 1,
        unevaluated=jnp.zeros((), bool),
        asked=jnp.zeros((), bool),
        stalled=jnp.where(progress, 0, state.stalled + 1),
    )
    restarted = jnp.zeros((), bool)
    if settings.patience is not None:
        restarted = state.stalled >= settings.patience
        state = _restart(settings, state, restarted)
    info = Info(
        best_fitness=state.best_fitness,
        mean_fitness=jnp.mean(kept),
        loss=loss,
        survivors=jnp.sum(order >= size),
        restarted=restarted,
    )
    return state, info


def _loss(settings: ABOM, residual: Array) -> tuple[Array, Array]:
    """Value of the loss and its gradient in the offspring."""
    if settings.loss == "squared":
        return jnp.sum(residual**2), 2 * residual
    return jnp.sum(optax.losses.huber_loss(residual)), jnp.clip(residual, -1, 1)


def _learn(settings: ABOM, state: State, gradient: Parameters) -> tuple[Parameters, Any]:
    share: Any = 1.0
    if settings.horizon is not None:
        share = (1 + jnp.cos(jnp.pi * jnp.minimum(state.generation / settings.horizon, 1))) / 2
    optimizer = _optimizer(settings)
    if optimizer is not None:
        updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.parameters)
        if settings.optimizer is None:
            updates = jax.tree.map(lambda update: (share * update).astype(update.dtype), updates)
        return optax.apply_updates(state.parameters, updates), optimizer_state
    rate = share * settings.learning_rate

    def first_step_of_adamw(weight: Array, slope: Array) -> Array:
        unit = slope / (jnp.abs(slope) + _EPSILON)
        return weight - (rate * (unit + settings.weight_decay * weight)).astype(weight.dtype)

    return jax.tree.map(first_step_of_adamw, state.parameters, gradient), None


def _optimizer(settings: ABOM) -> optax.GradientTransformation | None:
    if settings.optimizer is not None:
        return settings.optimizer
    if settings.fresh_optimizer or not settings.adapt:
        return None
    return optax.adamw(settings.learning_rate, weight_decay=settings.weight_decay)


def _restart(settings: ABOM, state: State, restarts: Array) -> State:
    fresh = init(settings, state.lower, state.upper, jax.random.fold_in(state.key, state.generation + (1 << 30)))

    def replaced(state: State) -> tuple[Any, ...]:
        return (
            state.parameters,
            state.optimizer_state,
            state.population,
            state.fitness,
            state.unevaluated,
            state.stalled,
        )

    chosen = jax.tree.map(lambda new, old: jnp.where(restarts, new, old), replaced(fresh), replaced(state))
    parameters, optimizer_state, population, fitness, unevaluated, stalled = chosen
    return state.replace(
        parameters=parameters,
        optimizer_state=optimizer_state,
        population=population,
        fitness=fitness,
        unevaluated=unevaluated,
        stalled=stalled,
    )


def feature(settings: ABOM, fitness: Array) -> Array:
    """What the selection sees of a sorted population's fitness."""
    if settings.fitness == "rank":
        return jnp.arange(len(fitness), dtype=fitness.dtype)
    # What is not finite, or so large that its square overflows, would make every weight of the attention NaN.
    largest = jnp.sqrt(jnp.finfo(fitness.dtype).max) * 1e-3
    finite = jnp.clip(fitness, -largest, largest)
    if settings.fitness == "raw":
        return finite
    return (finite - jnp.mean(finite)) / (jnp.std(finite) + jnp.finfo(fitness.dtype).tiny)


def to_operators(settings: ABOM, state: State, points: Array) -> Array:
    """Points of the box in the coordinates that the operators see."""
    if settings.coordinate_range is None:
        return points
    centre, half = (state.upper + state.lower) / 2, (state.upper - state.lower) / 2
    return (points - centre) / half * jnp.asarray(settings.coordinate_range, points.dtype)


def from_operators(settings: ABOM, state: State, points: Array) -> Array:
    """The inverse of `to_operators`."""
    if settings.coordinate_range is None:
        return points
    centre, half = (state.upper + state.lower) / 2, (state.upper - state.lower) / 2
    return centre + half * points / jnp.asarray(settings.coordinate_range, points.dtype)


def _initial_population(settings: ABOM, lower: Array, upper: Array, key: Array) -> Array:
    size, dimension = settings.population_size, len(lower)
    if settings.initial == "uniform":
        unit = jax.random.uniform(key, (size, dimension), lower.dtype)
    else:
        unit = latin_hypercube(key, size, dimension, dtype=lower.dtype)
    return jnp.clip(lower + (upper - lower) * unit, lower, upper)


def _generations(settings: ABOM, max_evaluations: int) -> int:
    if max_evaluations < 2 * settings.population_size:
        raise ValueError(
            f"max_evaluations must pay for two populations of {settings.population_size}, got {max_evaluations}"
        )
    return max_evaluations // settings.population_size


def _check_parameters(settings: ABOM, parameters: Parameters, dimension: int) -> None:
    expected = jax.eval_shape(
        lambda: jax.tree.leaves(initial_parameters(jax.random.key(0), dimension, settings.structure))
    )
    wanted, given = ([leaf.shape for leaf in leaves] for leaves in (expected, jax.tree.leaves(parameters)))
    if wanted != given:
        raise ValueError(f"{dimension} variables and this structure need parameters of shapes {wanted}, got {given}")


def _check_found(best_fitness: Any) -> None:
    if is_concrete(best_fitness) and not np.all(np.isfinite(np.asarray(best_fitness))):
        raise ValueError("none of the values is finite; the search has nothing to go by")
