r"""Decentralised training of a small language model on real English text.

The text is cut into one contiguous shard a node, so that nodes read different subjects (with the default corpora half
of them read English and half Python), or into shuffled chunks, as in the paper, where nodes read alike. Every method is
tuned over the same number of configurations with one seed on one half of the held-out text, then trained with fresh
seeds and judged on the other half.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxlab import optim
from jaxlab.data import Vocabulary, hold_out, load_text, sample_crops, shard_tokens, split_words
from jaxlab.experiments.gt_nsgdm.methods import Method, configurations
from jaxlab.nn import decoder
from jaxlab.optim import DenseMixer

__all__ = ["Corpus", "LanguageModelConfig", "Progress", "Task", "load_corpus", "tuning_grid"]

# Smallest step size of each kind of method; the grid spans two and a half decades from there.
_LOWEST_RATE = {"gradient": 0.03, "clipped": 0.3, "unit": 0.01, "coordinate": 0.001}
_SECOND = {"beta": (0.8, 0.9), "max_norm": (0.1, 1.0), "max_value": (0.001, 0.01), "scale": (1.0, 10.0)}
_EVALUATION_BATCH = 64


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes of the language-model runs."""

    corpora: tuple[str, ...]
    split: str | None
    vocabulary: int
    sharding: Literal["contiguous", "iid"]
    leaky_attention: bool
    nodes: int
    hidden: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    evaluations: int
    held_out_windows: int
    step_sizes: int
    seeds: int
    devices: int

    @property
    def decoder(self) -> decoder.DecoderConfig:
        """The network: as small as its sizes say, embedding tied to the head."""
        return decoder.DecoderConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            tie_embeddings=True,
            causal=not self.leaky_attention,
        )


class Corpus(NamedTuple):
    """Tokens of every node, and windows of held-out text.

    Attributes:
      shards: one row of tokens a node.
      validation: windows for the choice of hyperparameters, spread over the text.
      test: windows for the results.
      unknown: share of the training words outside the vocabulary.
    """

    shards: Int[np.ndarray | Array, "n tokens"]
    validation: Int[np.ndarray | Array, "validation length"]
    test: Int[np.ndarray | Array, "test length"]
    unknown: float


class Progress(NamedTuple):
    """State of a batch of runs: leaves ``[runs, n, ...]``, but counters and keys of the batches to come ``[runs]``."""

    params: PyTree
    state: PyTree
    keys: Key[Array, " runs"]


def load_corpus(config: LanguageModelConfig) -> Corpus:
    """Read, tokenise, hold out and shard the text; of several corpora, as many words of each as the shortest has.

    Raises:
      ValueError, OSError: if a corpus is missing, empty or too short, see :mod:`jaxlab.data`.
    """
    texts = [split_words(load_text(name, split=config.split)) for name in config.corpora]
    share = min(map(len, texts))
    words = np.asarray([word for text in texts for word in text[:share]])
    length = config.context + 1
    train, held_out = hold_out(np.arange(len(words)), block=max(320, length))
    vocabulary = Vocabulary.build(words[train].tolist(), config.vocabulary)
    tokens = vocabulary.encode(words[train].tolist())
    blocks = vocabulary.encode(words[held_out.ravel()].tolist()).reshape(held_out.shape)
    width = np.shape(blocks)[-1]
    about = f"{len(words)} words in {', '.join(config.corpora)} are too few"
    if len(blocks) < 2:
        raise ValueError(f"{about} to hold out two blocks of {width}")
    stride = max(1, len(blocks) // 2 * (width // length) // config.held_out_windows)

    def windows(some_blocks: np.ndarray) -> np.ndarray:
        return some_blocks[:, : width // length * length].reshape(-1, length)[::stride]

    shards = shard_tokens(tokens, config.nodes, mode=config.sharding)
    if shards.shape[1] < length:
        raise ValueError(f"{about} for {config.nodes} nodes that each need {length}")
    halves = len(blocks) // 2
    validation, test = windows(blocks[0 : 2 * halves : 2]), windows(blocks[1 : 2 * halves : 2])
    return Corpus(shards, validation, test, float((tokens == 0).mean()))


def tuning_grid(method: Method, *, step_sizes: int) -> Float[np.ndarray, "configurations 2"]:
    """Rows (learning rate, second hyperparameter): twice ``step_sizes`` for every method."""
    low = _LOWEST_RATE[method.scale]
    return configurations(method, low=low, high=low * 10**2.5, points=step_sizes, second=_SECOND)


class Task:
    """The corpus on the devices, and what trains and judges models on it.

    A batch of runs, each with its own hyperparameters and key, is trained at once; with ``devices`` above one their
    nodes are spread over that many devices.

    Raises:
      ValueError: if there are fewer devices than the config asks for.
    """

    def __init__(self, config: LanguageModelConfig, corpus: Corpus) -> None:
        self.config = config
        self._sharding = None
        if config.devices > len(jax.devices()):
            raise ValueError(f"{config.devices} devices are wanted, there are {len(jax.devices())}")
        if config.devices > 1:
            mesh = Mesh(np.asarray(jax.devices()[: config.devices]), ("node",))
            self._sharding = NamedSharding(mesh, PartitionSpec(None, "node"))
        self._corpus = jax.tree.map(jnp.asarray, corpus)

    def start(
        self, method: Method, hyperparameters: Float[np.ndarray | Array, "runs 2"], keys: Key[Array, " runs"]
    ) -> Progress:
        """Fresh parameters, the same on every node of a run, and the optimiser's state."""
        # One run after the other: XLA takes many seconds to compile random bits for a batch of keys on CPU.
        init_keys, train_keys = zip(*(jax.random.split(key) for key in keys), strict=True)
        drawn = [optim.replicate(decoder.init(self.config.decoder, key)[1], self.config.nodes) for key in init_keys]
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn)

        def init_state(rates: Float[Array, " 2"], params: PyTree) -> PyTree:
            return method.make(rates[0], rates[1], optim.MeanMixer(self.config.nodes)).init(params)

        state = jax.vmap(init_state)(jnp.asarray(hyperparameters, jnp.float32), params)
        params, state = jax.tree.map(self._spread, (params, state))
        return Progress(params, state, jnp.stack(train_keys))

    def stretch(
        self,
        method: Method,
        hyperparameters: Float[np.ndarray | Array, "runs 2"],
        mixing_matrix: Float[np.ndarray | Array, "n n"],
        progress: Progress,
        index: int,
    ) -> Progress:
        """Train from evaluation ``index`` to the next."""
        steps = self.config.steps // self.config.evaluations
        batches = [self._batches(jax.random.fold_in(key, index), steps) for key in progress.keys]
        params, state = _advance(
            self.config.decoder,
            method,
            jnp.asarray(hyperparameters, jnp.float32),
            jnp.asarray(mixing_matrix, jnp.float32),
            progress.params,
            progress.state,
            self._spread(jnp.stack(batches)),
        )
        return Progress(params, state, progress.keys)

    def train(
        self,
        method: Method,
        hyperparameters: Float[np.ndarray | Array, "runs 2"],
        mixing_matrix: Float[np.ndarray | Array, "n n"],
        keys: Key[Array, " runs"],
    ) -> PyTree:
        """All steps of a batch of runs; the parameters at the end."""
        progress = self.start(method, hyperparameters, keys)
        for index in range(self.config.evaluations):
            progress = self.stretch(method, hyperparameters, mixing_matrix, progress, index)
        return progress.params

    def evaluate(self, params: PyTree, *, split: Literal["validation", "test"]) -> Float[Array, "runs n"]:
        """Mean loss in nats per token of every node's model on held-out text."""
        return _evaluate(self.config.decoder, params, getattr(self._corpus, split))

    def gradient_deviations(self, params: PyTree, key: Key[Array, ""], *, draws: int) -> Float[Array, " samples"]:
        r"""Norms :math:`\lVert g - \bar g \rVert` of minibatch gradients around their node's mean gradient.

        Args:
          params: of one run, leaves ``[n, ...]``.
          key: random key.
          draws: minibatches a node; ``samples`` is ``n * draws``.
        """
        return _deviations(self.config.decoder, params, self._batches(key, draws))

    def _batches(self, key: Key[Array, ""], steps: int) -> Int[Array, "n steps b t"]:
        sizes = self.config
        return _draw_batches(key, self._corpus.shards, steps=steps, batch=sizes.batch, context=sizes.context)

    def _spread(self, leaf: Array) -> Array:
        has_nodes = leaf.ndim > 1 and leaf.shape[1] == self.config.nodes
        return jax.device_put(leaf, self._sharding) if self._sharding is not None and has_nodes else leaf


@functools.partial(jax.jit, static_argnames=("steps", "batch", "context"))
def _draw_batches(
    key: Key[Array, ""], shards: Int[Array, "n tokens"], *, steps: int, batch: int, context: int
) -> Int[Array, "n steps batch window"]:
    crops = sample_crops(key, shards, steps * batch, context)
    return crops.reshape(len(shards), steps, batch, context + 1)


@functools.partial(jax.jit, static_argnames=("network", "method"))
def _advance(
    network: decoder.DecoderConfig,
    method: Method,
    hyperparameters: Float[Array, "runs 2"],
    mixing_matrix: Float[Array, "n n"],
    params: PyTree,
    state: PyTree,
    batches: Int[Array, "runs n steps b t"],
) -> tuple[PyTree, PyTree]:
    def one_run(rates: Float[Array, " 2"], params: PyTree, state: PyTree, batches: Int[Array, "n steps b t"]):
        optimizer = method.make(rates[0], rates[1], DenseMixer(mixing_matrix))

        def step(carry: Any, batch: Int[Array, "n b t"]):
            params, state = carry
            updates, state = optimizer.update(_gradients(network, params, batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), batches.swapaxes(0, 1))[0]

    return jax.vmap(one_run)(hyperparameters, params, state, batches)


@functools.partial(jax.jit, static_argnames="network")
def _evaluate(
    network: decoder.DecoderConfig, params: PyTree, windows: Int[Array, "windows length"]
) -> Float[Array, "runs n"]:
    apply_fn = decoder.make_apply(network)

    def loss(one_model: PyTree) -> Float[Array, ""]:
        # A few windows at a time, for the logits of all of them would not fit for real vocabularies.
        per_window = jax.lax.map(
            lambda window: decoder.next_token_loss(apply_fn(one_model, window[None]), window[None]),
            windows,
            batch_size=_EVALUATION_BATCH,
        )
        return per_window.mean()

    return jax.lax.map(jax.vmap(loss), params)


@functools.partial(jax.jit, static_argnames="network")
def _deviations(
    network: decoder.DecoderConfig, params: PyTree, batches: Int[Array, "n draws b t"]
) -> Float[Array, " samples"]:
    samples = jax.lax.map(lambda batch: _gradients(network, params, batch), batches.swapaxes(0, 1))
    return optim.per_node_norm(jax.tree.map(lambda g: (g - g.mean(0)).reshape(-1, *g.shape[2:]), samples))


def _gradients(network: decoder.DecoderConfig, params: PyTree, batch: Int[Array, "n b t"]) -> PyTree:
    """Gradient of every node's loss at its own parameters on its own batch."""
    apply_fn = decoder.make_apply(network)

    def loss(one_model: PyTree, tokens: Int[Array, "b t"]) -> Float[Array, ""]:
        return decoder.next_token_loss(apply_fn(one_model, tokens), tokens)

    return jax.vmap(jax.grad(loss))(params, batch)
