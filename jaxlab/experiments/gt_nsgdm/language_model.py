r"""Decentralised training of a small language model on real English text.

The text is cut into one contiguous shard a node, so that nodes read different subjects; or into shuffled chunks, as in
the paper, where nodes read alike. Every method is tuned over the same number of configurations with one seed on one
half of the held-out text, then trained with fresh seeds and judged on the other half.
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
_GRID_POINTS = 6
_EVALUATION_BATCH = 64


@dataclass(frozen=True)
class LanguageModelConfig:
    """Sizes of the language-model runs."""

    corpus: str
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
      validation: windows for the choice of hyperparameters.
      test: windows for the results.
      unknown: share of the training words outside the vocabulary.
    """

    shards: Int[np.ndarray, "n tokens"]
    validation: Int[np.ndarray, "windows length"]
    test: Int[np.ndarray, "windows length"]
    unknown: float


class Progress(NamedTuple):
    """State of a batch of runs: leaves ``[runs, n, ...]``, but counters and keys ``[runs]``."""

    params: PyTree
    state: PyTree
    keys: Key[Array, " runs"]


def load_corpus(config: LanguageModelConfig) -> Corpus:
    """Read, tokenise, hold out and shard the text.

    Raises:
      ValueError, OSError: if the corpus is missing, empty or too short, see :mod:`jaxlab.data`.
    """
    words = np.asarray(split_words(load_text(config.corpus, split=config.split)))
    train, held_out = hold_out(np.arange(len(words)))
    vocabulary = Vocabulary.build(words[train].tolist(), config.vocabulary)
    tokens = vocabulary.encode(words[train].tolist())
    blocks = vocabulary.encode(words[held_out.ravel()].tolist()).reshape(held_out.shape)
    length = config.context + 1
    if len(blocks) < 2 or blocks.shape[1] < length:
        raise ValueError(
            f"corpus {config.corpus!r} has {len(words)} words, too few to hold out two blocks of at least {length} "
            "tokens"
        )

    def windows(some_blocks: np.ndarray) -> np.ndarray:
        return some_blocks[:, : blocks.shape[1] // length * length].reshape(-1, length)

    shards = shard_tokens(tokens, config.nodes, mode=config.sharding)
    return Corpus(shards, windows(blocks[::2]), windows(blocks[1::2]), float((tokens == 0).mean()))


def tuning_grid(method: Method) -> Float[np.ndarray, "configurations 2"]:
    """Rows (learning rate, second hyperparameter): twelve for every method."""
    low = _LOWEST_RATE[method.scale]
    return configurations(method, low=low, high=low * 10**2.5, points=_GRID_POINTS, second=_SECOND)


class Task:
    """The corpus on the devices, and compiled functions that train on it.

    A batch of runs, each with its own hyperparameters and key, is trained at once; with ``devices`` above one their
    nodes are spread over that many devices.
    """

    def __init__(self, config: LanguageModelConfig, corpus: Corpus) -> None:
        self.config = config
        self._sharding = None
        if config.devices > len(jax.devices()):
            raise ValueError(f"{config.devices} devices are wanted, there are {len(jax.devices())}")
        if config.devices > 1:
            mesh = Mesh(np.asarray(jax.devices()[: config.devices]), ("node",))
            self._sharding = NamedSharding(mesh, PartitionSpec(None, "node"))
        self.corpus = jax.tree.map(jnp.asarray, corpus)
        self._apply = decoder.make_apply(config.decoder)

    def start(
        self, method: Method, hyperparameters: Float[np.ndarray, "runs 2"], keys: Key[Array, " runs"]
    ) -> Progress:
        """Fresh parameters, the same on every node of a run, and the optimiser's state."""
        params, train_keys = self._fresh_params(keys)

        def init_state(rates: Float[Array, " 2"], params: PyTree) -> PyTree:
            return method.make(rates[0], rates[1], optim.MeanMixer(self.config.nodes)).init(params)

        state = jax.vmap(init_state)(jnp.asarray(hyperparameters, jnp.float32), params)
        return Progress(*jax.tree.map(self._spread, (params, state)), train_keys)

    @functools.partial(jax.jit, static_argnames=("self", "method", "steps"))
    def advance(
        self,
        method: Method,
        hyperparameters: Float[Array, "runs 2"],
        mixing_matrix: Float[Array, "n n"],
        progress: Progress,
        first_step: Int[Array, ""] | int,
        *,
        steps: int,
    ) -> tuple[Progress, Float[Array, " runs"]]:
        """Train for some steps; the mean training loss over them comes along."""

        def one_run(rates: Float[Array, " 2"], progress: Progress):
            optimizer = method.make(rates[0], rates[1], DenseMixer(mixing_matrix))

            def step(carry: Any, index: Int[Array, ""]):
                params, state = carry
                losses, grads = self._losses_and_grads(params, jax.random.fold_in(progress.keys, index))
                updates, state = optimizer.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), losses.mean()

            carry, losses = jax.lax.scan(step, (progress.params, progress.state), first_step + jnp.arange(steps))
            return Progress(*carry, progress.keys), losses.mean()

        return jax.vmap(one_run)(hyperparameters, progress)

    @functools.partial(jax.jit, static_argnames=("self", "split"))
    def evaluate(self, params: PyTree, *, split: Literal["validation", "test"]) -> Float[Array, "runs n"]:
        """Mean loss in nats per token of every node's model on held-out text."""
        windows = getattr(self.corpus, split)

        def one_node(p: PyTree) -> Float[Array, ""]:
            losses = jax.lax.map(
                lambda window: decoder.next_token_loss(self._apply(p, window[None]), window[None]),
                windows,
                batch_size=_EVALUATION_BATCH,
            )
            return losses.mean()

        return jax.lax.map(jax.vmap(one_node), params)

    def train(
        self,
        method: Method,
        hyperparameters: Float[np.ndarray, "runs 2"],
        keys: Key[Array, " runs"],
        matrix: np.ndarray,
    ) -> Progress:
        """All steps of a batch of runs."""
        progress = self.start(method, hyperparameters, keys)
        for index in range(self.config.evaluations):
            progress, _ = self.stretch(method, hyperparameters, matrix, progress, index)
        return progress

    def stretch(
        self, method: Method, hyperparameters: np.ndarray, matrix: np.ndarray, progress: Progress, index: int
    ) -> tuple[Progress, Float[Array, " runs"]]:
        """The steps between evaluation ``index`` and the next."""
        steps = self.config.steps // self.config.evaluations
        return self.advance(
            method,
            jnp.asarray(hyperparameters, jnp.float32),
            jnp.asarray(matrix, jnp.float32),
            progress,
            index * steps,
            steps=steps,
        )

    @functools.partial(jax.jit, static_argnames=("self", "draws"))
    def gradient_deviations(self, params: PyTree, key: Key[Array, ""], *, draws: int) -> Float[Array, " draws_n"]:
        r"""Norms :math:`\lVert g - \bar g \rVert` of minibatch gradients around their node's mean gradient."""

        def grads(k: Key[Array, ""]) -> PyTree:
            return self._losses_and_grads(params, k)[1]

        samples = jax.lax.map(grads, jax.random.split(key, draws))
        centred = jax.tree.map(lambda g: (g - g.mean(0)).reshape(-1, *g.shape[2:]), samples)
        return optim.per_node_norm(centred)

    @functools.partial(jax.jit, static_argnames="self")
    def _fresh_params(self, keys: Key[Array, " runs"]) -> tuple[PyTree, Key[Array, " runs"]]:
        def one_run(key: Key[Array, ""]) -> tuple[PyTree, Key[Array, ""]]:
            init_key, train_key = jax.random.split(key)
            return optim.replicate(decoder.init(self.config.decoder, init_key)[1], self.config.nodes), train_key

        return jax.vmap(one_run)(keys)

    def _losses_and_grads(self, params: PyTree, key: Key[Array, ""]) -> tuple[Float[Array, " n"], PyTree]:
        batch = sample_crops(key, self.corpus.shards, self.config.batch, self.config.context)

        def loss(p: PyTree, tokens: Int[Array, "b t"]) -> Float[Array, ""]:
            return decoder.next_token_loss(self._apply(p, tokens), tokens)

        return jax.vmap(jax.value_and_grad(loss))(params, batch)

    def _spread(self, leaf: Array) -> Array:
        has_nodes = leaf.ndim > 1 and leaf.shape[1] == self.config.nodes
        return jax.device_put(leaf, self._sharding) if self._sharding is not None and has_nodes else leaf
