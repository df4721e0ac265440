"""DINOv2, with or without register tokens (Oquab et al. 2023, arXiv 2304.07193; Darcet et al. 2023, arXiv 2309.16588).

It is a ViT (`jaxlab.nn.vit`) whose branches are scaled, feature by feature, by learnt vectors λ (layer scale, Touvron
et al. 2021, arXiv 2103.17239) ::

    h ← h + m · λ₁ ⊙ W_o Attention(LayerNorm(h))
    h ← h + m · λ₂ ⊙ FeedForward(LayerNorm(h))

and whose feed-forward layer is an MLP or SwiGLU. Register tokens, which have no position, stand between the class
token and the patches; they give attention a place to store what belongs to no patch, and are thrown away.
``pooler_output`` is the class token after the final norm; the classes are a linear map of it beside the mean over the
patches (`Dinov2ForImageClassification`). Images of any size that patches fill are taken, with positions interpolated.
The conventions are those of `jaxlab.nn.encoder`; images are ``[b, height, width, channels]`` (`jaxlab.nn.patches`).

Example::

    config = Dinov2Config(
        hidden_size=32, intermediate_size=128, num_layers=2, num_heads=4, image_size=56, num_register_tokens=4
    )
    apply_fn, params = init(config, jax.random.key(0))
    output = apply_fn(params, images)                                          # images [b, 56, 56, 3]
    features = output.last_hidden_state[:, 1 + config.num_register_tokens :]   # [b, 16, 32], a vector a patch
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Key

from jaxlab.nn.encoder import ACTIVATIONS, EncoderOutput, run_blocks, split_over, stack_blocks
from jaxlab.nn.patches import PatchProjection, VisionConfig, resize_positions
from jaxlab.nn.pure import pure_function
from jaxlab.nn.vit import ViTAttention

__all__ = ["Dinov2", "Dinov2Config", "init", "make_apply", "partition_specs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dinov2Config(VisionConfig):
    """Sizes and switches of a `Dinov2`. Defaults are those of the paper's models.

    Attributes:
      num_register_tokens: register tokens; None is the network without them, whose checkpoints are a family of their
        own and whose positions are interpolated by another kernel.
      qkv_bias: biases on the query, key and value projections.
      layer_scale: where λ starts.
      mask_token: with a vector that may stand for patches that are hidden.
      swiglu: the feed-forward layer is SwiGLU, of two thirds of ``intermediate_size`` rounded up to a multiple of 8.

    The others are in `VisionConfig` and `EncoderConfig`.
    """

    image_size: int | tuple[int, int] = 518
    patch_size: int = 14
    norm_eps: float = 1e-6
    num_register_tokens: int | None = None
    qkv_bias: bool = True
    layer_scale: float = 1.0
    mask_token: bool = True
    swiglu: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.num_register_tokens is not None and self.num_register_tokens < 0:
            raise ValueError(f"num_register_tokens must not be negative; got {self.num_register_tokens}")

    @property
    def swiglu_size(self) -> int:
        """Width of the feed-forward layer if it is SwiGLU."""
        return (int(self.intermediate_size * 2 / 3) + 7) // 8 * 8


def init(config: Dinov2Config, key: Key[Array, ""]) -> tuple[Callable[..., EncoderOutput], dict[str, Any]]:
    """Give DINOv2 as a pure function, and fresh parameters.

    Weights, class token and positions are drawn from N(0, ``initializer_range``²), norms start at one, λ at
    ``layer_scale``, biases, mask token and registers at zero.

    Returns:
      ``apply_fn`` as made by `make_apply`, and its ``params``.
    """
    params = nnx.to_pure_dict(nnx.state(Dinov2(config, rngs=nnx.Rngs(key))))
    return make_apply(config), params


def make_apply(config: Dinov2Config) -> Callable[..., EncoderOutput]:
    """Give DINOv2 as a pure function of its parameters.

    Returns:
      ``apply_fn(params, images, **options) -> EncoderOutput``, with the options of `Dinov2`. It raises ValueError,
      naming the parameter, when ``params`` belong to another config.
    """
    return pure_function(lambda: Dinov2(config, rngs=nnx.Rngs(0)))


def partition_specs(config: Dinov2Config, mesh: Mesh, *, axis: str = "model") -> dict[str, Any]:
    """How to split parameters over a mesh axis for tensor parallelism; see `jaxlab.nn.encoder.split_over`.

    The joint matrix of SwiGLU is left whole, for splitting it would tear its halves apart.

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
        rows={**dict.fromkeys(("attention/query", "attention/key", "attention/value"), heads), "mlp/fc1": features},
        columns={"attention/output/dense": heads, "mlp/fc2": features},
    )


class Dinov2(nnx.Module):
    """The encoder with its head; `init` gives it as a pure function.

    Args:
      config: sizes and switches.
      rngs: source of the keys of fresh weights.
    """

    def __init__(self, config: Dinov2Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = _Embeddings(config, rngs=rngs)
        self.encoder = _Encoder(config, rngs=rngs)
        self.layernorm = config.norm()
        labels = config.num_labels
        self.classifier = None if labels is None else config.linear(2 * config.hidden_size, labels, rngs)

    def __call__(
        self,
        images: Float[Array | np.ndarray, "b h w c"],
        *,
        patch_mask: Bool[Array | np.ndarray, "b patches"] | None = None,
        block_mask: Float[Array | np.ndarray, " layers"] | None = None,
        hidden_states: tuple[int, ...] | None = None,
    ) -> EncoderOutput:
        """Encode images.

        Args:
          images: normalised pixels, of any size that patches fill.
          patch_mask: True for patches, row by row, to be replaced by the mask token.
          block_mask: factor in [0, 1] on the residual branches of each block.
          hidden_states: which hidden states to give too; see `jaxlab.nn.encoder`.

        Raises:
          ValueError: for images that patches do not fill or with another number of channels, a ``patch_mask`` of
            another shape or without a mask token, or a bad ``block_mask`` or ``hidden_states``.
        """
        grid = self.config.grid_of(images, any_size=True)
        hidden = self.embeddings(images, grid, patch_mask)
        last, states = run_blocks(
            self.encoder.layer,
            hidden,
            num_layers=self.config.num_layers,
            block_mask=block_mask,
            hidden_states=hidden_states,
            remat=self.config.remat,
        )
        last = self.layernorm(last)
        logits = None
        if self.classifier is not None:
            patches = last[:, 1 + (self.config.num_register_tokens or 0) :]
            mean = jnp.mean(patches.astype(jnp.float32), axis=1).astype(last.dtype)
            logits = self.classifier(jnp.concatenate([last[:, 0], mean], axis=1)).astype(jnp.float32)
        return EncoderOutput(last_hidden_state=last, pooler_output=last[:, 0], hidden_states=states, logits=logits)


class _Embeddings(nnx.Module):
    def __init__(self, config: Dinov2Config, *, rngs: nnx.Rngs):
        width, registers = config.hidden_size, config.num_register_tokens
        self.grid, self.dtype, self.antialias = config.grid, config.dtype, registers is not None
        self.cls_token = config.parameter(rngs, (1, 1, width))
        self.mask_token = nnx.Param(jnp.zeros((1, width), config.param_dtype)) if config.mask_token else None
        self.patch_embeddings = _PatchEmbeddings(config, rngs=rngs)
        self.position_embeddings = config.parameter(rngs, (1, 1 + config.num_patches, width))
        self.register_tokens = (
            None if registers is None else nnx.Param(jnp.zeros((1, registers, width), config.param_dtype))
        )

    def __call__(self, images, grid, patch_mask):
        patches = self.patch_embeddings.projection(images)
        if patch_mask is not None:
            if self.mask_token is None:
                raise ValueError("patch_mask needs a network with mask_token=True")
            if patch_mask.shape != patches.shape[:2]:
                raise ValueError(f"patch_mask must have shape {patches.shape[:2]}; got {patch_mask.shape}")
            patches = jnp.where(patch_mask[..., None], self.mask_token[...].astype(self.dtype), patches)
        positions = self.position_embeddings[...][0]
        first = (self.cls_token[...][0] + positions[:1]).astype(self.dtype)
        if self.register_tokens is not None:
            first = jnp.concatenate([first, self.register_tokens[...][0].astype(self.dtype)])
        rest = patches + resize_positions(positions[1:], self.grid, grid, antialias=self.antialias).astype(self.dtype)
        return jnp.concatenate([jnp.broadcast_to(first, (len(images), *first.shape)), rest], axis=1)


class _PatchEmbeddings(nnx.Module):
    def __init__(self, config: Dinov2Config, *, rngs: nnx.Rngs):
        self.projection = PatchProjection(config, use_bias=True, rngs=rngs)


class _Encoder(nnx.Module):
    def __init__(self, config: Dinov2Config, *, rngs: nnx.Rngs):
        self.layer = stack_blocks(lambda rngs: _Block(config, rngs=rngs), config.num_layers, rngs)


class _Block(nnx.Module):
    """Attention, then the feed-forward layer, each scaled and on a residual branch after a norm."""

    def __init__(self, config: Dinov2Config, *, rngs: nnx.Rngs):
        self.norm1 = config.norm()
        self.attention = ViTAttention(config, qkv_bias=config.qkv_bias, rngs=rngs)
        self.layer_scale1 = _LayerScale(config)
        self.norm2 = config.norm()
        self.mlp = (_SwiGLU if config.swiglu else _FeedForward)(config, rngs=rngs)
        self.layer_scale2 = _LayerScale(config)

    def __call__(self, hidden, mask):
        scale = 1 if mask is None else mask.astype(hidden.dtype)
        hidden = hidden + scale * self.layer_scale1(self.attention(self.norm1(hidden)))
        return hidden + scale * self.layer_scale2(self.mlp(self.norm2(hidden)))


class _LayerScale(nnx.Module):
    def __init__(self, config: Dinov2Config):
        self.lambda1 = nnx.Param(jnp.full(config.hidden_size, config.layer_scale, config.param_dtype))

    def __call__(self, x):
        return x * self.lambda1[...].astype(x.dtype)


class _FeedForward(nnx.Module):
    def __init__(self, config: Dinov2Config, *, rngs: nnx.Rngs):
        self.fc1 = config.linear(config.hidden_size, config.intermediate_size, rngs)
        self.fc2 = config.linear(config.intermediate_size, config.hidden_size, rngs)
        self.activation = config.hidden_act

    def __call__(self, x):
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))


class _SwiGLU(nnx.Module):
    """``W_out (silu(a) ⊙ c)`` with a and c the halves of ``W_in x``."""

    def __init__(self, config: Dinov2Config, *, rngs: nnx.Rngs):
        self.weights_in = config.linear(config.hidden_size, 2 * config.swiglu_size, rngs)
        self.weights_out = config.linear(config.swiglu_size, config.hidden_size, rngs)

    def __call__(self, x):
        gate, up = jnp.split(self.weights_in(x), 2, axis=-1)
        return self.weights_out(jax.nn.silu(gate) * up)
