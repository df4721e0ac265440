"""The Vision Transformer (Dosovitskiy et al. 2020, arXiv 2010.11929).

An image is cut into patches, each mapped to a vector; a class token is put in front and position vectors are added.
Each block maps the hidden states h ``[b, 1 + patches, hidden]`` to ::

    h ← h + m · W_o Attention(LayerNorm(h))
    h ← h + m · W_2 gelu(W_1 LayerNorm(h))

with an optional mask m per block, and a norm follows the last. The pooler is ``tanh(W h₀)`` of the class token; the
classes are a linear map of h₀ itself (`ViTForImageClassification`). The conventions are those of `jaxlab.nn.encoder`;
images are ``[b, height, width, channels]`` (`jaxlab.nn.patches`).

Example::

    config = ViTConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, image_size=32, patch_size=8)
    apply_fn, params = init(config, jax.random.key(0))
    vectors = apply_fn(params, images).pooler_output                           # images [b, 32, 32, 3]
    larger = apply_fn(params, larger_images, interpolate_positions=True)       # [b, 64, 48, 3]
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key

from jaxlab.nn.encoder import ACTIVATIONS, EncoderOutput, attend, run_blocks, split_over, stack_blocks
from jaxlab.nn.linear import Linear
from jaxlab.nn.patches import PatchProjection, VisionConfig, resize_positions
from jaxlab.nn.pure import pure_function

__all__ = ["ViT", "ViTAttention", "ViTConfig", "init", "make_apply", "partition_specs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(VisionConfig):
    """Sizes and switches of a `ViT`. Defaults are those of ViT-B/16.

    Attributes:
      qkv_bias: biases on the query, key and value projections.
      pooler: with a pooler.
      pooler_output_size: width of the pooler; None means ``hidden_size``.
      pooler_act: its activation.

    The others are in `VisionConfig` and `EncoderConfig`.
    """

    qkv_bias: bool = True
    pooler: bool = True
    pooler_output_size: int | None = None
    pooler_act: str = "tanh"

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least_one("pooler_output_size")
        self.check_activation("pooler_act")


def init(config: ViTConfig, key: Key[Array, ""]) -> tuple[Callable[..., EncoderOutput], dict[str, Any]]:
    """Give a ViT as a pure function, and fresh parameters.

    Weights, class token and positions are drawn from N(0, ``initializer_range``²), norms start at one, biases at zero.

    Returns:
      ``apply_fn`` as made by `make_apply`, and its ``params``.
    """
    params = nnx.to_pure_dict(nnx.state(ViT(config, rngs=nnx.Rngs(key))))
    return make_apply(config), params


def make_apply(config: ViTConfig) -> Callable[..., EncoderOutput]:
    """Give a ViT as a pure function of its parameters.

    Returns:
      ``apply_fn(params, images, **options) -> EncoderOutput``, with the options of `ViT`. It raises ValueError, naming
      the parameter, when ``params`` belong to another config.
    """
    return pure_function(lambda: ViT(config, rngs=nnx.Rngs(0)))


def partition_specs(config: ViTConfig, mesh: Mesh, *, axis: str = "model") -> dict[str, Any]:
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
        rows={
            **dict.fromkeys(("attention/query", "attention/key", "attention/value"), heads),
            "intermediate/dense": features,
        },
        columns={"attention/output/dense": heads, "layer/output/dense": features},
    )


class ViT(nnx.Module):
    """The encoder with its heads; `init` gives it as a pure function.

    Args:
      config: sizes and switches.
      rngs: source of the keys of fresh weights.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = _Embeddings(config, rngs=rngs)
        self.encoder = _Encoder(config, rngs=rngs)
        self.layernorm = config.norm()
        width, labels = config.hidden_size, config.num_labels
        self.pooler = _Dense(config, width, config.pooler_output_size or width, rngs=rngs) if config.pooler else None
        self.classifier = None if labels is None else config.linear(width, labels, rngs)

    def __call__(
        self,
        images: Float[Array | np.ndarray, "b h w c"],
        *,
        interpolate_positions: bool = False,
        block_mask: Float[Array | np.ndarray, " layers"] | None = None,
        hidden_states: tuple[int, ...] | None = None,
    ) -> EncoderOutput:
        """Encode images.

        Args:
          images: normalised pixels.
          interpolate_positions: take images of any size that patches fill, with positions interpolated.
          block_mask: factor in [0, 1] on the residual branches of each block.
          hidden_states: which hidden states to give too; see `jaxlab.nn.encoder`.

        Raises:
          ValueError: for images of another size or number of channels, or a bad ``block_mask`` or ``hidden_states``.
        """
        hidden = self.embeddings(images, self.config.grid_of(images, any_size=interpolate_positions))
        last, states = run_blocks(
            self.encoder.layer,
            hidden,
            num_layers=self.config.num_layers,
            block_mask=block_mask,
            hidden_states=hidden_states,
            remat=self.config.remat,
        )
        last = self.layernorm(last)
        pooled = None
        if self.pooler is not None:
            pooled = ACTIVATIONS[self.config.pooler_act](self.pooler.dense(last[:, 0]))
        logits = None if self.classifier is None else self.classifier(last[:, 0]).astype(jnp.float32)
        return EncoderOutput(last_hidden_state=last, pooler_output=pooled, hidden_states=states, logits=logits)


class ViTAttention(nnx.Module):
    """Self-attention under the names of ViT and DINOv2: ``attention/{query, key, value}`` and ``output/dense``."""

    def __init__(self, config: VisionConfig, *, qkv_bias: bool, rngs: nnx.Rngs):
        self.attention = _Projections(config, qkv_bias=qkv_bias, rngs=rngs)
        self.output = _Dense(config, config.hidden_size, config.hidden_size, rngs=rngs)
        self.num_heads = config.num_heads

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Mix the tokens."""
        projections = self.attention
        query, key, value = projections.query(x), projections.key(x), projections.value(x)
        return self.output.dense(attend(query, key, value, num_heads=self.num_heads))


class _Projections(nnx.Module):
    def __init__(self, config: VisionConfig, *, qkv_bias: bool, rngs: nnx.Rngs):
        def projection() -> Linear:
            return config.linear(config.hidden_size, config.hidden_size, rngs, use_bias=qkv_bias)

        self.query, self.key, self.value = projection(), projection(), projection()


class _Dense(nnx.Module):
    """A linear map under the name ``dense``."""

    def __init__(self, config: VisionConfig, in_features: int, out_features: int, *, rngs: nnx.Rngs):
        self.dense = config.linear(in_features, out_features, rngs)


class _Embeddings(nnx.Module):
    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.grid, self.dtype = config.grid, config.dtype
        self.cls_token = config.parameter(rngs, (1, 1, config.hidden_size))
        self.patch_embeddings = _PatchEmbeddings(config, rngs=rngs)
        self.position_embeddings = config.parameter(rngs, (1, 1 + config.num_patches, config.hidden_size))

    def __call__(self, images, grid):
        patches = self.patch_embeddings.projection(images)
        positions = self.position_embeddings[...][0]
        first = (self.cls_token[...][0] + positions[:1]).astype(self.dtype)
        rest = patches + resize_positions(positions[1:], self.grid, grid, antialias=False).astype(self.dtype)
        return jnp.concatenate([jnp.broadcast_to(first, (len(images), *first.shape)), rest], axis=1)


class _PatchEmbeddings(nnx.Module):
    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.projection = PatchProjection(config, use_bias=True, rngs=rngs)


class _Encoder(nnx.Module):
    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.layer = stack_blocks(lambda rngs: _Block(config, rngs=rngs), config.num_layers, rngs)


class _Block(nnx.Module):
    """Attention, then the feed-forward layer, each on a residual branch after a norm."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.layernorm_before = config.norm()
        self.attention = ViTAttention(config, qkv_bias=config.qkv_bias, rngs=rngs)
        self.layernorm_after = config.norm()
        self.intermediate = _Dense(config, config.hidden_size, config.intermediate_size, rngs=rngs)
        self.output = _Dense(config, config.intermediate_size, config.hidden_size, rngs=rngs)
        self.activation = config.hidden_act

    def __call__(self, hidden, mask):
        scale = 1 if mask is None else mask.astype(hidden.dtype)
        hidden = hidden + scale * self.attention(self.layernorm_before(hidden))
        features = ACTIVATIONS[self.activation](self.intermediate.dense(self.layernorm_after(hidden)))
        return hidden + scale * self.output.dense(features)
