"""One training loop for all networks here: mini-batches drawn at random, scanned, resumable.

``loss(params, statistics, batch, key) -> (value, statistics)`` is minimised by an optax optimiser. `train` makes a
fixed number of steps as one compiled program, so a longer training is a host loop over calls of it, each with its own
key, and continues bit for bit from a stored state.

Example::

    state = initial_state(params, optimizer)
    state, losses = train(state, (x, y), key, loss=loss, optimizer=optimizer, steps=100, batch_size=64)
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax import lax
from jaxtyping import Array, Float, Key, PyTree

__all__ = ["Loss", "TrainingState", "initial_state", "train"]

Loss = Callable[[PyTree, PyTree, PyTree, Array], tuple[Array, PyTree]]


class TrainingState(NamedTuple):
    """Attributes:
    params: what is trained.
    statistics: what the loss carries along, such as running means of batch normalisation.
    optimizer_state: of the optimiser.
    """

    params: PyTree
    statistics: PyTree
    optimizer_state: PyTree


def initial_state(params: PyTree, optimizer: optax.GradientTransformation, *, statistics: PyTree = ()) -> TrainingState:
    """The state before the first step."""
    return TrainingState(params, statistics, optimizer.init(params))


@partial(jax.jit, static_argnames=("loss", "optimizer", "steps", "batch_size"))
def train(
    state: TrainingState,
    data: PyTree[Array],
    key: Key[Array, ""],
    *,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int,
) -> tuple[TrainingState, Float[Array, " steps"]]:
    """Make ``steps`` steps on batches that are drawn from the rows of ``data`` with replacement.

    Args:
      state: where to go on from.
      data: arrays with one leading axis.
      key: of the batches and of what the loss draws.
      loss: what is minimised; one compiled program a function, so build it once.
      optimizer: likewise.
      steps: a static number.
      batch_size: rows of a batch.

    Returns:
      The state after the last step, and the loss of each batch.

    Raises:
      ValueError: no row, no step, an empty batch.
    """
    rows = len(jax.tree.leaves(data)[0])
    for name, value in (("rows", rows), ("steps", steps), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} of a training must be at least 1, got {value}")
    of_batches, of_losses = jax.random.split(key)
    batches = jax.random.randint(of_batches, (steps * batch_size,), 0, rows).reshape(steps, batch_size)

    def step(state: TrainingState, inputs: tuple[Array, Array]) -> tuple[TrainingState, Array]:
        index, key = inputs
        batch = jax.tree.map(lambda leaf: leaf[index], data)
        (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(
            state.params, state.statistics, batch, key
        )
        updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.params)
        return TrainingState(optax.apply_updates(state.params, updates), statistics, optimizer_state), value

    state = TrainingState(*(jax.tree.map(jax.numpy.asarray, part) for part in state))
    return lax.scan(step, state, (batches, jax.random.split(of_losses, steps)))


def mean_in_chunks(function: Callable[[Any], Array], data: PyTree, *, chunk: int = 4096) -> Float[Array, ""]:
    """The mean over rows of ``function(rows) -> [rows]``, in chunks of rows."""
    rows = len(jax.tree.leaves(data)[0])
    total = sum(
        function(jax.tree.map(lambda leaf, i=i: leaf[i : i + chunk], data)).sum() for i in range(0, rows, chunk)
    )
    return jax.numpy.asarray(total / rows)


__all__ += ["mean_in_chunks"]
