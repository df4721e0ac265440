"""DistilBERT: BERT without segments and pooler, under names of its own (Sanh et al. 2019, arXiv 1910.01108).

The equations are those of `jaxlab.nn.bert`. The classes are ``W_2 relu(W_1 h₀)`` of the first token
(`DistilBertForSequenceClassification`). For sentence embeddings use `jaxlab.nn.bert.mean_pool` and
`jaxlab.nn.bert.sentence_embedding`. The conventions are those of `jaxlab.nn.encoder`.

Example::

    config = DistilBertConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4)
    apply_fn, params = init(dataclasses.replace(config, num_labels=2), jax.random.key(0))
    logits = apply_fn(params, tokens, padding_mask=mask).logits              # tokens and mask [b, t]
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

__all__ = ["DistilBert", "DistilBertConfig", "init", "make_apply", "partition_specs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistilBertConfig(EncoderConfig):
    """Sizes and switches of a `DistilBert`. Defaults are those of the paper's model.

    Attributes:
      vocab_size: number of token ids.
      max_position_embeddings: longest sequence.

    The others are in `EncoderConfig`; checkpoints have 1e-12 for ``norm_eps``, always.
    """

    vocab_size: int
    max_position_embeddings: int = 512

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least_one("vocab_size", "max_position_embeddings")


def init(config: DistilBertConfig, key: Key[Array, ""]) -> tuple[Callable[..., EncoderOutput], dict[str, Any]]:
    """Give DistilBERT as a pure function, and fresh parameters.

    Weights are drawn from N(0, ``initializer_range``²), norms start at one and biases at zero.

    Returns:
      ``apply_fn`` as made by `make_apply`, and its ``params``.
    """
    params = nnx.to_pure_dict(nnx.state(DistilBert(config, rngs=nnx.Rngs(key))))
    return make_apply(config), params


def make_apply(config: DistilBertConfig) -> Callable[..., EncoderOutput]:
    """Give DistilBERT as a pure function of its parameters.

    Returns:
      ``apply_fn(params, tokens, **options) -> EncoderOutput``, with the options of `DistilBert`. It raises ValueError,
      naming the parameter, when ``params`` belong to another config.
    """
    return pure_function(lambda: DistilBert(config, rngs=nnx.Rngs(0)))


def partition_specs(config: DistilBertConfig, mesh: Mesh, *, axis: str = "model") -> dict[str, Any]:
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
        rows={**dict.fromkeys(("q_lin", "k_lin", "v_lin"), heads), "ffn/lin1": features},
        columns={"out_lin": heads, "ffn/lin2": features},
    )


class DistilBert(nnx.Module):
    """The encoder with its head; `init` gives it as a pure function.

    Args:
      config: sizes and switches.
      rngs: source of the keys of fresh weights.
    """

    def __init__(self, config: DistilBertConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = _Embeddings(config, rngs=rngs)
        self.transformer = _Transformer(config, rngs=rngs)
        width, labels = config.hidden_size, config.num_labels
        self.pre_classifier = None if labels is None else config.linear(width, width, rngs)
        self.classifier = None if labels is None else config.linear(width, labels, rngs)

    def __call__(
        self,
        tokens: Int[Array | np.ndarray, "b t"],
        *,
        padding_mask: Int[Array | np.ndarray, "b t"] | Bool[Array | np.ndarray, "b t"] | None = None,
        block_mask: Float[Array | np.ndarray, " layers"] | None = None,
        hidden_states: tuple[int, ...] | None = None,
    ) -> EncoderOutput:
        """Encode sequences; the arguments are those of `jaxlab.nn.bert.Bert`.

        Raises:
          ValueError: if the sequences are longer than ``max_position_embeddings``, or for a bad ``block_mask`` or
            ``hidden_states``.
        """
        check_tokens(tokens, padding_mask=padding_mask)
        hidden = self.embeddings(tokens)
        mask = None if padding_mask is None else jnp.asarray(padding_mask) != 0
        last, states = run_blocks(
            self.transformer.layer,
            hidden,
            mask,
            num_layers=self.config.num_layers,
            block_mask=block_mask,
            hidden_states=hidden_states,
            remat=self.config.remat,
        )
        logits = None
        if self.pre_classifier is not None and self.classifier is not None:
            logits = self.classifier(jax.nn.relu(self.pre_classifier(last[:, 0]))).astype(jnp.float32)
        return EncoderOutput(last_hidden_state=last, hidden_states=states, logits=logits)


class _Embeddings(nnx.Module):
    def __init__(self, config: DistilBertConfig, *, rngs: nnx.Rngs):
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
        self.LayerNorm = config.norm()

    def __call__(self, tokens):
        length, longest = tokens.shape[1], self.position_embeddings.weight.shape[0]
        if length > longest:
            raise ValueError(f"sequences must have at most max_position_embeddings = {longest} tokens; got {length}")
        return self.LayerNorm(self.word_embeddings(tokens) + self.position_embeddings(jnp.arange(length)))


class _Transformer(nnx.Module):
    def __init__(self, config: DistilBertConfig, *, rngs: nnx.Rngs):
        self.layer = stack_blocks(lambda rngs: _Block(config, rngs=rngs), config.num_layers, rngs)


class _Block(nnx.Module):
    """Attention, then the feed-forward layer, each followed by a norm of its sum with the input."""

    def __init__(self, config: DistilBertConfig, *, rngs: nnx.Rngs):
        self.attention = _Attention(config, rngs=rngs)
        self.sa_layer_norm = config.norm()
        self.ffn = _FeedForward(config, rngs=rngs)
        self.output_layer_norm = config.norm()

    def __call__(self, hidden, mask, padding_mask):
        attended = self.sa_layer_norm(self.attention(hidden, padding_mask) + hidden)
        out = self.output_layer_norm(self.ffn(attended) + attended)
        return out if mask is None else hidden + mask.astype(hidden.dtype) * (out - hidden)


class _Attention(nnx.Module):
    def __init__(self, config: DistilBertConfig, *, rngs: nnx.Rngs):
        self.q_lin = config.linear(config.hidden_size, config.hidden_size, rngs)
        self.k_lin = config.linear(config.hidden_size, config.hidden_size, rngs)
        self.v_lin = config.linear(config.hidden_size, config.hidden_size, rngs)
        self.out_lin = config.linear(config.hidden_size, config.hidden_size, rngs)
        self.num_heads = config.num_heads

    def __call__(self, hidden, padding_mask):
        query, key, value = self.q_lin(hidden), self.k_lin(hidden), self.v_lin(hidden)
        return self.out_lin(attend(query, key, value, num_heads=self.num_heads, mask=padding_mask))


class _FeedForward(nnx.Module):
    def __init__(self, config: DistilBertConfig, *, rngs: nnx.Rngs):
        self.lin1 = config.linear(config.hidden_size, config.intermediate_size, rngs)
        self.lin2 = config.linear(config.intermediate_size, config.hidden_size, rngs)
        self.activation = config.hidden_act

    def __call__(self, x):
        return self.lin2(ACTIVATIONS[self.activation](self.lin1(x)))
