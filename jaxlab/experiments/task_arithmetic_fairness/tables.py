"""The paper's pipeline on tables: one base network, its fine-tuned relatives, and everything evaluated at once.

The base is a network of three layers that was trained to undo noise (30 % of a row's entries come from another row),
with a fresh head. All models start from it: fine-tuned on everybody, with low-rank adapters, reweighed, and one for
each group.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlab.editing import task_vectors
from jaxlab.editing.fairness import predict, subgroup_finetune
from jaxlab.experiments.task_arithmetic_fairness.people import Split
from jaxlab.nn import lora
from jaxlab.nn.linear import Linear
from jaxlab.nn.pure import pure_function

__all__ = ["Training", "network", "reweighing", "score", "train_base", "train_models"]

_WIDTH = 128
_HEAD_DEVIATION = 0.02
_CORRUPTED = 0.3
_RANK, _ALPHA = 8, 16.0
_DECAY = 0.01
_BASE_RATE, _BASE_BATCH = 1e-3, 256


@dataclass(frozen=True)
class Training:
    """How long and how fast models are trained.

    Attributes:
      base_steps: of denoising.
      steps: of every fine-tuning.
      batch_size: of every fine-tuning.
      rates: learning rates of full fine-tuning to choose from by validation accuracy; groups take the chosen one.
      lora_rates: the same of the adapters.
    """

    base_steps: int
    steps: int
    batch_size: int
    rates: tuple[float, ...]
    lora_rates: tuple[float, ...]


class Network(nnx.Module):
    """Three layers with GELU and a head of one logit; a decoder for the base's training."""

    def __init__(self, features: int, *, rngs: nnx.Rngs):
        def layer(size: int) -> Linear:
            return Linear(size, _WIDTH, use_bias=True, stddev=float(np.sqrt(2 / size)), rngs=rngs)

        self.hidden0, self.hidden1, self.hidden2 = layer(features), layer(_WIDTH), layer(_WIDTH)
        self.decoder = Linear(_WIDTH, features, use_bias=True, stddev=_WIDTH**-0.5, rngs=rngs)
        self.head = Linear(_WIDTH, 1, use_bias=True, stddev=_HEAD_DEVIATION, rngs=rngs)

    def __call__(self, x: jax.Array, *, decode: bool = False) -> jax.Array:
        """Logits ``[b]``, or the features again."""
        for layer in (self.hidden0, self.hidden1, self.hidden2):
            x = jax.nn.gelu(layer(x))
        return self.decoder(x) if decode else self.head(x)[..., 0]


@functools.cache  # one function object a width: compiled programs are found by it
def network(features: int) -> Any:
    """``apply_fn(params, x)``, logits of rows of so many features."""
    return pure_function(lambda: Network(features, rngs=nnx.Rngs(0)))


def score(params: Any, inputs: jax.Array) -> jax.Array:
    """Scores in [0, 1]."""
    return jax.nn.sigmoid(network(inputs.shape[1])(params, inputs))


@functools.partial(jax.jit, static_argnames="steps")
def train_base(x: jax.Array, key: jax.Array, *, steps: int) -> Any:
    """Train a network to give back rows of which entries were replaced by those of other rows."""
    keys = jax.random.split(key, 4)
    params = nnx.to_pure_dict(nnx.state(Network(x.shape[1], rngs=nnx.Rngs(keys[0]))))
    rows = jax.random.randint(keys[1], (steps, 2, _BASE_BATCH), 0, x.shape[0])
    replaced = jax.random.bernoulli(keys[2], _CORRUPTED, (steps, _BASE_BATCH, x.shape[1]))
    optimizer = optax.flatten(optax.adam(_BASE_RATE))

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state = carry
        (ours, others), noise = batch

        def loss(params: Any) -> jax.Array:
            given = network(x.shape[1])(params, jnp.where(noise, x[others], x[ours]), decode=True)
            return jnp.mean((given - x[ours]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), (rows, replaced))
    return params


def train_models(train: Split, validation: Split, key: jax.Array, settings: Training) -> dict[str, Any]:
    """Everything that starts from the base.

    Returns:
      ``base``, ``full``, ``lora`` (merged), ``reweighed``: trees; ``vectors``: Δ of every group; ``rate`` and
      ``lora_rate``: what was chosen.
    """
    keys = jax.random.split(key, 4)
    x, y = jnp.asarray(train.inputs), jnp.asarray(train.labels, jnp.float32)
    base = train_base(x, keys[0], steps=settings.base_steps)
    everyone = jnp.ones((len(y), 1))
    # The reconstruction is over: what is left of the tree is the classifier.
    options = {"steps": settings.steps, "batch_size": settings.batch_size}
    ones = jnp.ones(len(y))
    choices = [(r, _finetune(base, x, y, everyone, ones, keys[1], r, **options)) for r in settings.rates]
    rate, full = _best(choices, validation, lambda stacked: _first(stacked))
    pairs = [(r, _finetune_lora(base, x, y, keys[1], keys[2], r, **options)) for r in settings.lora_rates]
    lora_rate, adapted = _best(pairs, validation, lambda tree: tree)
    weights = jnp.asarray(reweighing(train.labels, train.membership))
    reweighed = _first(_finetune(base, x, y, everyone, weights, keys[1], rate, **options))
    tuned = _finetune(base, x, y, jnp.asarray(train.membership), ones, keys[3], rate, **options)
    groups = [jax.tree.map(lambda leaf, g=g: leaf[g], tuned) for g in range(train.membership.shape[1])]
    vectors = task_vectors.task_vectors(base, groups, exclude=("decoder",))
    return {
        "base": base,
        "full": full,
        "lora": adapted,
        "reweighed": reweighed,
        "vectors": vectors,
        "rate": rate,
        "lora_rate": lora_rate,
    }


def reweighing(labels: np.ndarray, membership: np.ndarray) -> np.ndarray:
    """Weights ``P(g) P(y) / P(g, y)`` (Kamiran and Calders 2012) of rows that are each in one group; 1 in none."""
    weights = np.ones(len(labels), np.float32)
    for group in membership.T == 1:
        for label in (0, 1):
            here = group & (labels == label)
            if here.any():
                weights[here] = group.mean() * (labels == label).mean() / here.mean()
    return weights


@functools.partial(jax.jit, static_argnames=("steps", "batch_size"))
def _finetune(
    base: Any,
    x: jax.Array,
    y: jax.Array,
    membership: jax.Array,
    weights: jax.Array,
    key: jax.Array,
    rate: float | jax.Array,
    *,
    steps: int,
    batch_size: int,
) -> Any:
    """The tree of every group, stacked."""
    classifier = {name: part for name, part in base.items() if name != "decoder"}

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = network(x.shape[1])(params | {"decoder": base["decoder"]}, batch["x"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["y"])

    found = subgroup_finetune(
        loss,
        classifier,
        {"x": x, "y": y},
        membership,
        optax.flatten(optax.adamw(rate, weight_decay=_DECAY)),  # one leaf compiles faster
        key,
        steps=steps,
        batch_size=batch_size,
        weights=weights,
    )
    count = membership.shape[1]
    decoder = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), base["decoder"])
    return found.params | {"decoder": decoder}


@functools.partial(jax.jit, static_argnames=("steps", "batch_size"))
def _finetune_lora(
    base: Any,
    x: jax.Array,
    y: jax.Array,
    key: jax.Array,
    adapter_key: jax.Array,
    rate: float | jax.Array,
    *,
    steps: int,
    batch_size: int,
) -> Any:
    """Adapters on every matrix of the encoder and a dense head, merged into one tree."""
    adapters = lora.init(base, adapter_key, target=["hidden?"], rank=_RANK, alpha=_ALPHA)

    def loss(trained: Any, batch: Any) -> jax.Array:
        params = lora.apply(base | {"head": trained["head"]}, trained["adapters"])
        return optax.sigmoid_binary_cross_entropy(network(x.shape[1])(params, batch["x"]), batch["y"])

    found = subgroup_finetune(
        loss,
        {"adapters": adapters, "head": base["head"]},
        {"x": x, "y": y},
        jnp.ones((x.shape[0], 1)),
        optax.flatten(optax.adamw(rate, weight_decay=_DECAY)),  # one leaf compiles faster
        key,
        steps=steps,
        batch_size=batch_size,
    )
    trained = _first(found.params)
    return lora.merge(base | {"head": trained["head"]}, trained["adapters"])


def _first(stacked: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], stacked)


def _best(choices: list[tuple[float, Any]], validation: Split, tree_of: Any) -> tuple[float, Any]:
    """The learning rate of the highest validation accuracy and its model; of equals, the first."""
    found = [(rate, tree_of(stacked)) for rate, stacked in choices]
    inputs = jnp.asarray(validation.inputs)
    right = [
        float(jnp.mean((predict(network(inputs.shape[1]), tree, inputs) > 0) == validation.labels)) for _, tree in found
    ]
    return found[int(np.argmax(right))]
