"""A class-conditional rectified flow on pairs of pictures, trained in chunks that a run can resume.

Time is logit-normal, each class is replaced by the null label one time in ten, and the parameters used are an
exponential moving average.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from jaxlab.experiments.uniedit.data import Pictures
from jaxlab.nn.dit import DiT, DiTConfig

__all__ = ["Trainer", "make_trainer"]

_WARM_UP = 50
_NULL_SHARE = 0.1


class Trainer(NamedTuple):
    """A training, chunk by chunk.

    Attributes:
      init: ``init(key) -> carry``: parameters, their average, the optimiser's state, and the key of the batches.
      chunk: ``chunk(carry, i) -> (carry, loss of every step)``.
      parameters: ``parameters(carry)``, the average.
      model: ``model(parameters)``, the module.
    """

    init: Any
    chunk: Any
    parameters: Any
    model: Any


def make_trainer(
    config: DiTConfig, pictures: Pictures, *, steps: int, steps_a_chunk: int, batch: int, learning_rate: float
) -> Trainer:
    """Prepare a training of ``steps`` steps.

    Args:
      config: sizes of the network; its image is a pair.
      pictures: where both halves are drawn from.
      steps: in all; the learning rate falls along a cosine after a short rise.
      steps_a_chunk: steps of one compiled loop.
      batch: pairs a step.
      learning_rate: the highest one, of Adam.
    """
    images, labels = jnp.asarray(pictures.train), jnp.asarray(pictures.train_labels)
    null = jnp.asarray(config.null_labels)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, min(_WARM_UP, steps // 2), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99))
    # The average forgets over a fortieth of the training.
    decay = 1 - min(1.0, 40 / steps)

    def unflatten(leaves: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    @jax.jit
    def init(key: Array) -> Any:
        init_key, batch_key = jax.random.split(key)
        leaves = jax.tree.leaves(nnx.state(DiT(config, rngs=nnx.Rngs(init_key))))
        return {"leaves": leaves, "average": leaves, "optimizer": optimizer.init(leaves), "key": batch_key}

    def loss_of(leaves: Any, example: Any) -> Array:
        data, noise, t, condition = example
        time = t[:, None, None, None]
        found = nnx.merge(graph, unflatten(leaves))((1 - time) * data + time * noise, t, condition)
        return jnp.square(found - (noise - data)).mean()

    @jax.jit
    def compiled(carry: Any, i: Array) -> Any:
        keys = jax.random.split(jax.random.fold_in(carry["key"], i), 4)
        shape = (steps_a_chunk, batch)
        drawn = {
            "index": jax.random.randint(keys[0], (*shape, 2), 0, len(images)),
            "noise": jax.random.normal(keys[1], (*shape, *config.image_shape)),
            "time": jax.nn.sigmoid(jax.random.normal(keys[2], shape)),
            "drop": jax.random.bernoulli(keys[3], _NULL_SHARE, (*shape, 2)),
        }

        def step(state: Any, drawn: Any) -> Any:
            leaves, average, optimizer_state = state
            index = drawn["index"]
            data = jnp.concatenate([images[index[:, 0]], images[index[:, 1]]], axis=2)
            condition = jnp.where(drawn["drop"], null, labels[index])
            loss, grads = jax.value_and_grad(loss_of)(leaves, (data, drawn["noise"], drawn["time"], condition))
            updates, optimizer_state = optimizer.update(grads, optimizer_state, leaves)
            leaves = optax.apply_updates(leaves, updates)
            average = optax.incremental_update(leaves, average, 1 - decay)
            return (leaves, average, optimizer_state), loss

        state = carry["leaves"], carry["average"], carry["optimizer"]
        (leaves, average, optimizer_state), losses = jax.lax.scan(step, state, drawn)
        return carry | {"leaves": leaves, "average": average, "optimizer": optimizer_state}, losses

    return Trainer(
        init,
        lambda carry, i: compiled(carry, jnp.asarray(i)),
        lambda carry: carry["average"],
        lambda leaves: nnx.merge(graph, unflatten([jnp.asarray(leaf) for leaf in leaves])),
    )
