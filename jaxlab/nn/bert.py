"""BERT, and sentence embeddings from it.

The encoder is that of Devlin et al. 2018 (arXiv 1810.04805), the embeddings are those of Reimers & Gurevych 2019 (arXiv
1908.10084). Word, position and segment vectors are added and normalised. Each block maps the hidden states h
``[b, t, hidden]`` to ::

    h ← LayerNorm(h + W_o Attention(h))
    h ← LayerNorm(h + W_2 gelu(W_1 h))

so that the norms come after the additions. Tokens whose ``padding_mask`` is 0 are seen by none. The pooler is
``tanh(W h₀)`` of the first token, and the classes are a linear map of it (`BertForSequenceClassification`).

A sentence embedding, as of all-MiniLM-L6-v2, is the mean of the last hidden states over the real tokens, divided by its
length. The conventions are those of `jaxlab.nn.encoder`.

Example::

    config = BertConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4)
    apply_fn, params = init(config, jax.random.key(0))
    output = apply_fn(params, tokens, padding_mask=mask)                        # tokens and mask [b, t]
    embeddings = sentence_embedding(output.last_hidden_state, mask)             # [b, 32]
    cosines = embeddings @ embeddings.T
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key

from jaxlab.nn.encoder import (
    ACTIVATIONS,
    EncoderConfig,
    EncoderOutput,
    attend,
    run_blocks,
    split_over,
    stack_blocks,
)
from jaxlab.nn.linear import Embedding
from jaxlab.nn.pure import check_tokens, pure_function

__all__ = ["Bert", "BertConfig", "init", "make_apply", "mean_pool", "partition_specs", "sentence_embedding"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig):
    """Sizes and switches of a `Bert`. Defaults are those of the paper's models.

    Attributes:
      vocab_size: number of token ids.
      max_position_embeddings: longest sequence.
      type_vocab_size: number of segments.
      pooler: with a pooler; the classes need one.

    The others are in `EncoderConfig`.
    """

    vocab_size: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    pooler: bool = True

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least_one("vocab_size", "max_position_embeddings", "type_vocab_size")
        if self.num_labels is not None and not self.pooler:
            raise ValueError("num_labels needs pooler=True")


def init(config: BertConfig, key: Key[Array, ""]) -> tuple[Callable[..., EncoderOutput], dict[str, Any]]:
    """Give BERT as a pure function, and fresh parameters.

    Weights are drawn from N(0, ``initializer_range``²), norms start at one and biases at zero.

    Returns:
      ``apply_fn`` as made by `make_apply`, and its ``params``.
    """
    params = nnx.to_pure_dict(nnx.state(Bert(config, rngs=nnx.Rngs(key))))
    return make_apply(config), params


def make_apply(config: BertConfig) -> Callable[..., EncoderOutput]:
    """Give BERT as a pure function of its parameters.

    Returns:
      ``apply_fn(params, tokens, **options) -> EncoderOutput``, with the options of `Bert`. It raises ValueError, naming
      the parameter, when ``params`` belong to another config.
    """
    return pure_function(lambda: Bert(config, rngs=nnx.Rngs(0)))


def partition_specs(config: BertConfig, mesh: Mesh, *, axis: str = "model") -> dict[str, Any]:
    """How to split parameters over a mesh axis for tensor parallelism; see `jaxlab.nn.encoder.split_over`.

    Args:
      config: of the network.
      mesh: the devices.
      axis: name of the mesh axis.

    Returns:
      The tree of the parameters with a ``PartitionSpec`` in place of each.

    Raises:
      ValueError: if the mesh has no such axis, or not all are ``AxisType.Auto``.
    """
    heads, features = config.num_heads, config.intermediate_size
    return split_over(
        jax.eval_shape(lambda: init(config, jax.random.key(0))[1]),
        mesh,
        axis,
        rows={**dict.fromkeys(("self/query", "self/key", "self/value"), heads), "intermediate/dense": features},
        columns={"attention/output/dense": heads, "layer/output/dense": features},
    )


def mean_pool(
    hidden: Float[Array, "b t d"], padding_mask: Int[Array | np.ndarray, "b t"] | Bool[Array | np.ndarray, "b t"]
) -> Float[Array, "b d"]:
    """Mean of the hidden states over the tokens whose mask is not 0; float32.

    A row without any token has no mean: it is NaN, and passes no gradient back.
    """
    weights = jnp.asarray(padding_mask != 0, jnp.float32)
    total = jnp.sum(weights, axis=1, keepdims=True)
    # Padding may hold anything, even NaN, which a weight of 0 would not remove.
    real = jnp.where(weights[..., None] > 0, hidden.astype(jnp.float32), 0.0)
    return jnp.where(total > 0, jnp.sum(real, axis=1) / jnp.maximum(total, 1.0), jnp.nan)


def sentence_embedding(
    hidden: Float[Array, "b t d"], padding_mask: Int[Array | np.ndarray, "b t"] | Bool[Array | np.ndarray, "b t"]
) -> Float[Array, "b d"]:
    """`mean_pool` divided by its length, so that inner products are cosines; float32, NaN for a row without tokens."""
    mean = mean_pool(hidden, padding_mask)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


class Bert(nnx.Module):
    """The encoder with its heads; `init` gives it as a pure function.

    Args:
      config: sizes and switches.
      rngs: source of the keys of fresh weights.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = _Embeddings(config, rngs=rngs)
        self.encoder = _Encoder(config, rngs=rngs)
        self.pooler = _Pooler(config, rngs=rngs) if config.pooler else None
        labels = config.num_labels
        self.classifier = None if labels is None else config.linear(config.hidden_size, labels, rngs)

    def __call__(
        self,
        tokens: Int[Array | np.ndarray, "b t"],
        *,
        padding_mask: Int[Array | np.ndarray, "b t"] | Bool[Array | np.ndarray, "b t"] | None = None,
        token_types: Int[Array | np.ndarray, "b t"] | None = None,
        block_mask: Float[Array | np.ndarray, " layers"] | None = None,
        hidden_states: tuple[int, ...] | None = None,
    ) -> EncoderOutput:
        """Encode sequences.

        Args:
          tokens: token ids; one outside the vocabulary, padding or not, makes its sequence NaN.
          padding_mask: True or 1 for real tokens, as a tokenizer's attention mask; None means all of them. A row of
            nothing but padding gives finite values without a meaning (and NaN in `mean_pool`).
          token_types: segment of each token; None means 0.
          block_mask: factor in [0, 1] of each block; see `jaxlab.nn.encoder`.
          hidden_states: which hidden states to give too; see `jaxlab.nn.encoder`.

        Raises:
          ValueError: if the sequences are longer than ``max_position_embeddings``, or for a bad ``block_mask`` or
            ``hidden_states``.
        """
        check_tokens(tokens, padding_mask=padding_mask, token_types=token_types)
        hidden = self.embeddings(tokens, token_types)
        mask = None if padding_mask is None else jnp.asarray(padding_mask) != 0
        last, states = run_blocks(
            self.encoder.layer,
            hidden,
            mask,
            num_layers=self.config.num_layers,
            block_mask=block_mask,
            hidden_states=hidden_states,
            remat=self.config.remat,
        )
        pooled = None if self.pooler is None else self.pooler(last)
        logits = None
        if self.classifier is not None and pooled is not None:
            logits = self.classifier(pooled).astype(jnp.float32)
        return EncoderOutput(last_hidden_state=last, pooler_output=pooled, hidden_states=states, logits=logits)


class _Embeddings(nnx.Module):
    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        def table(size):
            return Embedding(
                size,
                config.hidden_size,
                stddev=config.initializer_range,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )

        self.word_embeddings = table(config.vocab_size)
        self.position_embeddings = table(config.max_position_embeddings)
        self.token_type_embeddings = table(config.type_vocab_size)
        self.LayerNorm = config.norm()

    def __call__(self, tokens, token_types):
        length, longest = tokens.shape[1], self.position_embeddings.weight.shape[0]
        if length > longest:
            raise ValueError(f"sequences must have at most max_position_embeddings = {longest} tokens; got {length}")
        types = jnp.zeros_like(tokens) if token_types is None else token_types
        positions = self.position_embeddings(jnp.arange(length))
        return self.LayerNorm(self.word_embeddings(tokens) + self.token_type_embeddings(types) + positions)


class _Encoder(nnx.Module):
    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.layer = stack_blocks(lambda rngs: _Block(config, rngs=rngs), config.num_layers, rngs)


class _Block(nnx.Module):
    """Attention, then the feed-forward layer, each followed by a norm of its sum with the input."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.attention = _Attention(config, rngs=rngs)
        self.intermediate = _Dense(config, config.hidden_size, config.intermediate_size, rngs=rngs)
        self.output = _Output(config, config.intermediate_size, rngs=rngs)
        self.activation = config.hidden_act

    def __call__(self, hidden, mask, padding_mask):
        attended = self.attention(hidden, padding_mask)
        out = self.output(ACTIVATIONS[self.activation](self.intermediate.dense(attended)), attended)
        return out if mask is None else hidden + mask.astype(hidden.dtype) * (out - hidden)


class _Attention(nnx.Module):
    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.self = _SelfAttention(config, rngs=rngs)
        self.output = _Output(config, config.hidden_size, rngs=rngs)

    def __call__(self, hidden, padding_mask):
        return self.output(self.self(hidden, padding_mask), hidden)


class _SelfAttention(nnx.Module):
    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.query = config.linear(config.hidden_size, config.hidden_size, rngs)
        self.key = config.linear(config.hidden_size, config.hidden_size, rngs)
        self.value = config.linear(config.hidden_size, config.hidden_size, rngs)
        self.num_heads = config.num_heads

    def __call__(self, hidden, padding_mask):
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        return attend(query, key, value, num_heads=self.num_heads, mask=padding_mask)


class _Output(nnx.Module):
    """``LayerNorm(W x + residual)``."""

    def __init__(self, config: BertConfig, in_features: int, *, rngs: nnx.Rngs):
        self.dense = config.linear(in_features, config.hidden_size, rngs)
        self.LayerNorm = config.norm()

    def __call__(self, x, residual):
        return self.LayerNorm(self.dense(x) + residual)


class _Dense(nnx.Module):
    """A linear map under the name ``dense``."""

    def __init__(self, config: BertConfig, in_features: int, out_features: int, *, rngs: nnx.Rngs):
        self.dense = config.linear(in_features, out_features, rngs)


class _Pooler(nnx.Module):
    """``tanh(W h₀)`` of the first token."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.dense = config.linear(config.hidden_size, config.hidden_size, rngs)

    def __call__(self, hidden):
        return jnp.tanh(self.dense(hidden[:, 0]))
