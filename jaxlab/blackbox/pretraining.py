r"""Operators of ABOM trained on other problems before a search (ABOM-PT), for whoever has some.

Runs on source problems are recorded as transitions, and the operators fitted to them,

.. math::
    \min_\theta \sum_t \| P^{t+1} - \mathrm{reproduce}_\theta(P^t, \phi^t) \|^2,

with AdamW. The weights then start a search (``init(..., parameters=...)``), which goes on adapting them. They depend on
the number of variables and on the scale of the coordinates, so set ``coordinate_range`` where boxes differ.

Reference: Wang et al., "Task-free Adaptive Meta Black-box Optimization", arXiv 2601.21475 (learning rate 1e-3, batches
of 256).

Example:
  >>> sphere = lambda x: jnp.sum(x**2)
  >>> box = -5 * jnp.ones(4), 5 * jnp.ones(4)
  >>> runs = collect(sphere, ABOM(), *box, jax.random.key(0), max_evaluations=400)
  >>> parameters, losses = pretrain(runs, ABOM(), jax.random.key(1), steps=10)
  >>> losses.shape
  (10,)
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key

from jaxlab.blackbox.abom import State, ask, feature, init, tell, to_operators
from jaxlab.blackbox.operators import Parameters, draw_masks, initial_parameters, reproduce
from jaxlab.blackbox.settings import ABOM, Bound

__all__ = ["Transitions", "collect", "pretrain"]


class Transitions(NamedTuple):
    """What searches did, in the coordinates of the operators; concatenate those of several runs on the first axis.

    Attributes:
      population: before a generation, sorted.
      feature: what the selection saw of each row.
      successor: the survivors.
    """

    population: Float[Array, "*t n d"]
    feature: Float[Array, "*t n"]
    successor: Float[Array, "*t n d"]


def collect(
    function: Callable[..., Array],
    settings: ABOM,
    lower: Bound,
    upper: Bound,
    key: Key[Array, ""],
    *,
    max_evaluations: int,
    data: Any = None,
) -> Transitions:
    """Every generation of one search but the first, ``max_evaluations // n - 1`` transitions.

    Raises:
      ValueError: as `jaxlab.blackbox.init`, or a budget below two populations.
    """
    generations = max_evaluations // settings.population_size - 1
    if generations < 1:
        raise ValueError(
            f"max_evaluations must pay for two populations of {settings.population_size}, got {max_evaluations}"
        )
    return _collect(function, settings, init(settings, lower, upper, key), data, generations=generations)


def pretrain(
    transitions: Transitions,
    settings: ABOM,
    key: Key[Array, ""],
    *,
    steps: int,
    batch_size: int = 256,
    learning_rate: float = 1e-3,
    parameters: Parameters | None = None,
) -> tuple[Parameters, Float[Array, " steps"]]:
    """Fit operators to transitions.

    Args:
      transitions: from `collect`, all of one number of variables.
      settings: those of the search that will use the weights.
      key: random key of batches, dropout and initial weights.
      steps: of AdamW.
      batch_size: transitions a step.
      learning_rate: of AdamW.
      parameters: to start from.

    Returns:
      The weights, and the loss per transition before each step.

    Raises:
      ValueError: no step, an empty batch, or transitions of another population than the settings'.
    """
    count, size, dimension = transitions.population.shape
    if size != settings.population_size:
        raise ValueError(f"the transitions are of populations of {size}, the settings of {settings.population_size}")
    if steps < 1 or batch_size < 1 or count < 1:
        raise ValueError(f"at least one step, transition and batch entry, got {steps}, {count} and {batch_size}")
    of_weights, of_training = jax.random.split(key)
    if parameters is None:
        dtype = transitions.population.dtype
        parameters = initial_parameters(of_weights, dimension, settings.structure, dtype=dtype)
    return _pretrain(
        transitions, settings, of_training, parameters, learning_rate, steps=steps, batch_size=min(batch_size, count)
    )


@partial(jax.jit, static_argnames=("function", "generations"))
def _collect(
    function: Callable[..., Array], settings: ABOM, state: State, data: Any, *, generations: int
) -> Transitions:
    evaluate = jax.vmap(function if data is None else partial(function, data))

    def generation(state: State, _: None) -> tuple[State, Transitions]:
        candidates, asked = ask(settings, state)
        after = tell(settings, asked, candidates, evaluate(candidates))[0]
        before, successor = (to_operators(settings, state, points) for points in (state.population, after.population))
        return after, Transitions(before, feature(settings, state.fitness), successor)

    return jax.tree.map(lambda leaf: leaf[1:], jax.lax.scan(generation, state, length=generations + 1)[1])


@partial(jax.jit, static_argnames=("steps", "batch_size"))
def _pretrain(
    transitions: Transitions,
    settings: ABOM,
    key: Array,
    parameters: Parameters,
    learning_rate: Any,
    *,
    steps: int,
    batch_size: int,
) -> tuple[Parameters, Array]:
    count, size, dimension = transitions.population.shape
    structure = settings.structure
    optimizer = optax.adamw(learning_rate, weight_decay=settings.weight_decay)

    def loss(parameters: Parameters, batch: Transitions, keys: Array) -> Array:
        def of_one(one: Transitions, key: Array) -> Array:
            masks = draw_masks(
                key,
                size,
                dimension,
                structure.widths(dimension)[1],
                structure,
                crossover_dropout=settings.crossover_dropout,
                mutation_dropout=settings.mutation_dropout,
                dtype=one.population.dtype,
            )
            offspring = reproduce(parameters, one.population, one.feature, masks, structure)
            return jnp.sum((one.successor - offspring) ** 2)

        return jnp.mean(jax.vmap(of_one)(batch, keys))

    def step(carry: tuple[Parameters, Any], key: Array) -> tuple[tuple[Parameters, Any], Array]:
        parameters, state = carry
        of_batch, of_masks = jax.random.split(key)
        batch = jax.tree.map(lambda leaf: leaf[jax.random.randint(of_batch, (batch_size,), 0, count)], transitions)
        value, gradient = jax.value_and_grad(loss)(parameters, batch, jax.random.split(of_masks, batch_size))
        updates, state = optimizer.update(gradient, state, parameters)
        return (optax.apply_updates(parameters, updates), state), value

    (parameters, _), losses = jax.lax.scan(step, (parameters, optimizer.init(parameters)), jax.random.split(key, steps))
    return parameters, losses
