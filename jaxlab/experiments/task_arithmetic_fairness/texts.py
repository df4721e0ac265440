"""The paper's pipeline on texts: a sentence encoder whose upper blocks are fine-tuned, the lower ones computed once.

all-MiniLM-L6-v2 with the mean over tokens and a linear head. What leaves the frozen blocks is kept for every row; task
vectors are those of the upper blocks and of the head, which all models start with.

Deviation from the paper: the learning rate is constant, since groups end after different numbers of steps.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlab.editing import task_vectors
from jaxlab.editing.fairness import predict, subgroup_finetune
from jaxlab.experiments.task_arithmetic_fairness.people import People
from jaxlab.nn import lora
from jaxlab.nn.bert import BertConfig, _Block, make_apply, mean_pool
from jaxlab.nn.checkpoints import load
from jaxlab.nn.encoder import run_blocks, stack_blocks
from jaxlab.nn.linear import Linear
from jaxlab.nn.pure import pure_function

__all__ = [
    "TextTraining",
    "encode",
    "fresh_upper",
    "load_encoder",
    "score_of",
    "train_models",
    "upper_network",
]

_HEAD_DEVIATION = 0.02
_RANK, _ALPHA = 8, 16.0
DECAY = 0.01
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class TextTraining:
    """How long and how fast models are trained.

    Attributes:
      steps: of every fine-tuning.
      batch_size: of every fine-tuning.
      rates: learning rates of the blocks to choose from by validation accuracy; groups take the chosen one.
      lora_rates: the same of the adapters.
      head_rate: of the head.
    """

    steps: int
    batch_size: int
    rates: tuple[float, ...]
    lora_rates: tuple[float, ...]
    head_rate: float


class Upper(nnx.Module):
    """The last blocks of an encoder, the mean over tokens, and one logit."""

    def __init__(self, config: BertConfig, blocks: int, *, rngs: nnx.Rngs):
        self.layer = stack_blocks(lambda rngs: _Block(config, rngs=rngs), blocks, rngs)
        self.head = Linear(config.hidden_size, 1, use_bias=True, stddev=_HEAD_DEVIATION, rngs=rngs)
        self.blocks = blocks

    def __call__(self, inputs: dict[str, jax.Array]) -> jax.Array:
        """Logits ``[b]`` of ``hidden`` ``[b, t, d]`` and ``mask`` ``[b, t]``."""
        hidden = inputs["hidden"].astype(jnp.float32)
        last, _ = run_blocks(
            self.layer,
            hidden,
            inputs["mask"],
            num_layers=self.blocks,
            block_mask=None,
            hidden_states=None,
            remat=False,
        )
        return self.head(mean_pool(last, inputs["mask"]))[..., 0]


@functools.cache  # one function object a config: compiled programs are found by it
def upper_network(config: BertConfig, blocks: int) -> Any:
    """``apply_fn(params, inputs)`` of the last so many blocks."""
    return pure_function(lambda: Upper(config, blocks, rngs=nnx.Rngs(0)))


@functools.cache
def score_of(apply_fn: Any) -> Any:
    """Scores in [0, 1] in place of logits."""
    return functools.partial(_score, apply_fn)


def _score(apply_fn: Any, params: Any, inputs: Any) -> jax.Array:
    return jax.nn.sigmoid(apply_fn(params, inputs))


def fresh_upper(config: BertConfig, blocks: int, key: jax.Array) -> dict[str, Any]:
    """Parameters of `upper_network` without a checkpoint."""
    return nnx.to_pure_dict(nnx.state(Upper(config, blocks, rngs=nnx.Rngs(key))))


def load_encoder(name: str, blocks: int, key: jax.Array) -> tuple[Any, Any, dict[str, Any]]:
    """A BERT by its name, and θ₀: its last blocks with a fresh head.

    Raises:
      FileNotFoundError: it is not installed.
      ValueError: another kind of network, or one of fewer blocks.
    """
    model = load(name)
    config = model.config
    if not isinstance(config, BertConfig):
        raise ValueError(f"the text encoder must be a BERT, {name} is a {type(config).__name__}")
    if not 1 <= blocks <= config.num_layers:
        raise ValueError(f"text_blocks must be between 1 and the {config.num_layers} of {name}, got {blocks}")
    head = _HEAD_DEVIATION * jax.random.normal(key, (1, config.hidden_size))
    upper = jax.tree.map(lambda leaf: jnp.asarray(leaf)[-blocks:], model.params["encoder"]["layer"])
    return model, config, {"layer": upper, "head": {"weight": head, "bias": jnp.zeros(1)}}


def encode(model: Any, blocks: int, texts: Sequence[str], tokens: int) -> dict[str, jax.Array]:
    """What enters the last blocks, ``hidden`` ``[n, tokens, d]`` in bfloat16 and ``mask``; texts are cut."""
    config: BertConfig = model.config
    rows = -(-len(texts) // _ROWS_AT_ONCE) * _ROWS_AT_ONCE
    ids, mask = np.zeros((rows, tokens), np.int32), np.zeros((rows, tokens), bool)
    mask[:, 0] = True
    given, real = model.tokenizer.encode_batch(list(texts))
    width = min(tokens, given.shape[1])
    ids[: len(texts), :width], mask[: len(texts), :width] = given[:, :width], real[:, :width]
    lower = _lower(make_apply(config), config.num_layers - blocks)
    hidden = lower(model.params, jnp.asarray(ids), jnp.asarray(mask))
    return {"hidden": hidden[: len(texts)], "mask": jnp.asarray(mask[: len(texts)])}


def _lower(apply_fn: Any, place: int) -> Any:
    @jax.jit
    def lower(params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        # The last blocks are not run: their factor is 0 and what they would give is not asked for.
        def chunk(batch: Any) -> jax.Array:
            found = apply_fn(params, batch[0], padding_mask=batch[1], hidden_states=(place,))
            return found.hidden_states[0].astype(jnp.bfloat16)

        chunks = jax.tree.map(lambda a: a.reshape(-1, _ROWS_AT_ONCE, a.shape[1]), (ids, mask))
        found = jax.lax.map(chunk, chunks)
        return found.reshape(-1, *found.shape[2:])

    return lower


def train_models(
    apply_fn: Any, base: Any, inputs: tuple[Any, Any], people: People, key: jax.Array, settings: TextTraining
) -> dict[str, Any]:
    """Everything that starts from θ₀; ``inputs`` are those of the training and the validation part.

    Returns:
      ``base``, ``full``, ``lora`` (merged), ``vectors``, ``rate``, ``lora_rate``.
    """
    keys = jax.random.split(key, 3)
    y = jnp.asarray(people.train.labels, jnp.float32)
    everyone = jnp.ones((len(y), 1))
    finetune = functools.partial(_finetune, apply_fn=apply_fn, settings=settings)

    def first(stacked: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[0], stacked)

    def best(rates: Sequence[float], train: Any) -> tuple[float, Any]:
        found = [(rate, train(rate)) for rate in rates]
        if len(found) == 1:
            return found[0]
        right = [
            float(jnp.mean((predict(apply_fn, tree, inputs[1]) > 0) == people.validation.labels)) for _, tree in found
        ]
        return found[int(np.argmax(right))]

    rate, full = best(settings.rates, lambda r: first(finetune(base, inputs[0], y, everyone, keys[0], r)))
    adapters = lora.init(base, keys[1], target=["self/query", "self/value"], rank=_RANK, alpha=_ALPHA)

    def adapted(rate: float) -> Any:
        start = {"adapters": adapters, "head": base["head"]}
        trained = first(finetune(start, inputs[0], y, everyone, keys[0], rate, frozen=base))
        return lora.merge(base | {"head": trained["head"]}, trained["adapters"])

    lora_rate, low_rank = best(settings.lora_rates, adapted)
    tuned = finetune(base, inputs[0], y, jnp.asarray(people.train.membership), keys[2], rate)
    groups = [jax.tree.map(lambda leaf, g=g: leaf[g], tuned) for g in range(people.train.membership.shape[1])]
    return {
        "base": base,
        "full": full,
        "lora": low_rank,
        "vectors": task_vectors.task_vectors(base, groups),
        "rate": rate,
        "lora_rate": lora_rate,
    }


@functools.partial(jax.jit, static_argnames=("apply_fn", "settings"))
def _finetune(
    start: Any,
    inputs: Any,
    y: jax.Array,
    membership: jax.Array,
    key: jax.Array,
    rate: float | jax.Array,
    frozen: Any = None,
    *,
    apply_fn: Any,
    settings: TextTraining,
) -> Any:
    def loss(params: Any, batch: Any) -> jax.Array:
        if frozen is not None:
            params = lora.apply(frozen | {"head": params["head"]}, params["adapters"])
        return optax.sigmoid_binary_cross_entropy(apply_fn(params, batch["inputs"]), batch["y"])

    rates = {"body": rate, "head": settings.head_rate}
    kinds = {name: name if name == "head" else "body" for name in start}
    return subgroup_finetune(
        loss,
        start,
        {"inputs": inputs, "y": y},
        membership,
        optax.partition({name: optax.adamw(r, weight_decay=DECAY) for name, r in rates.items()}, kinds),
        key,
        steps=settings.steps,
        batch_size=settings.batch_size,
    ).params
