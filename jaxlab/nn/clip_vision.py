"""The image side of CLIP (Radford et al. 2021, arXiv 2103.00020).

It is a ViT (`jaxlab.nn.vit`) with a norm before the first block, ``x σ(1.702 x)`` for GELU, and no bias in the
projection of patches. The norm after the last block is applied to the class token alone, which gives ``pooler_output``;
a linear map of that, without bias, gives ``image_embeds`` in the space shared with texts
(`CLIPVisionModelWithProjection`). The conventions are those of `jaxlab.nn.encoder`; images are
``[b, height, width, channels]`` (`jaxlab.nn.patches`).

``pre_layrnorm`` is spelt as in the checkpoints.

Example::

    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, image_size=32, patch_size=8, projection_dim=16
    )
    apply_fn, params = init(config, jax.random.key(0))
    embeds = apply_fn(params, images).image_embeds                             # images [b, 32, 32, 3]
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
from jaxlab.nn.linear import Embedding
from jaxlab.nn.patches import PatchProjection, VisionConfig, resize_positions
from jaxlab.nn.pure import pure_function

__all__ = ["CLIPVision", "CLIPVisionConfig", "init", "make_apply", "partition_specs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPVisionConfig(VisionConfig):
    """Sizes and switches of a `CLIPVision`. Defaults are those of CLIP ViT-B/32.

    Attributes:
      projection_dim: width of the space shared with texts; None means no projection.

    The others are in `VisionConfig` and `EncoderConfig`; there is no head for ``num_labels``.
    """

    patch_size: int = 32
    hidden_act: str = "quick_gelu"
    norm_eps: float = 1e-5
    projection_dim: int | None = None

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least_one("projection_dim")
        if self.num_labels is not None:
            raise ValueError(f"the image side of CLIP has no classes: num_labels must be None; got {self.num_labels}")


def init(config: CLIPVisionConfig, key: Key[Array, ""]) -> tuple[Callable[..., EncoderOutput], dict[str, Any]]:
    """Give the image side of CLIP as a pure function, and fresh parameters.

    Weights, class token and positions are drawn from N(0, ``initializer_range``²), norms start at one, biases at zero.

    Returns:
      ``apply_fn`` as made by `make_apply`, and its ``params``.
    """
    params = nnx.to_pure_dict(nnx.state(CLIPVision(config, rngs=nnx.Rngs(key))))
    return make_apply(config), params


def make_apply(config: CLIPVisionConfig) -> Callable[..., EncoderOutput]:
    """Give the image side of CLIP as a pure function of its parameters.

    Returns:
      ``apply_fn(params, images, **options) -> EncoderOutput``, with the options of `CLIPVision`. It raises ValueError,
      naming the parameter, when ``params`` belong to another config.
    """
    return pure_function(lambda: CLIPVision(config, rngs=nnx.Rngs(0)))


def partition_specs(config: CLIPVisionConfig, mesh: Mesh, *, axis: str = "model") -> dict[str, Any]:
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
        rows={**dict.fromkeys(("q_proj", "k_proj", "v_proj"), heads), "mlp/fc1": features},
        columns={"out_proj": heads, "mlp/fc2": features},
    )


class CLIPVision(nnx.Module):
    """The encoder with its projection; `init` gives it as a pure function.

    Args:
      config: sizes and switches.
      rngs: source of the keys of fresh weights.
    """

    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = _Embeddings(config, rngs=rngs)
        self.pre_layrnorm = config.norm()
        self.encoder = _Encoder(config, rngs=rngs)
        self.post_layernorm = config.norm()
        size = config.projection_dim
        self.visual_projection = None if size is None else config.linear(config.hidden_size, size, rngs, use_bias=False)

    def __call__(
        self,
        images: Float[Array | np.ndarray, "b h w c"],
        *,
        interpolate_positions: bool = False,
        block_mask: Float[Array | np.ndarray, " layers"] | None = None,
        hidden_states: tuple[int, ...] | None = None,
    ) -> EncoderOutput:
        """Encode images; the arguments are those of `jaxlab.nn.vit.ViT`.

        Raises:
          ValueError: for images of another size or number of channels, or a bad ``block_mask`` or ``hidden_states``.
        """
        hidden = self.embeddings(images, self.config.grid_of(images, any_size=interpolate_positions))
        last, states = run_blocks(
            self.encoder.layers,
            self.pre_layrnorm(hidden),
            num_layers=self.config.num_layers,
            block_mask=block_mask,
            hidden_states=hidden_states,
            remat=self.config.remat,
        )
        pooled = self.post_layernorm(last[:, 0])
        embeds = None if self.visual_projection is None else self.visual_projection(pooled).astype(jnp.float32)
        return EncoderOutput(last_hidden_state=last, pooler_output=pooled, hidden_states=states, image_embeds=embeds)


class _Embeddings(nnx.Module):
    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.grid, self.dtype = config.grid, config.dtype
        self.class_embedding = config.parameter(rngs, (config.hidden_size,))
        self.patch_embedding = PatchProjection(config, use_bias=False, rngs=rngs)
        self.position_embedding = Embedding(
            1 + config.num_patches,
            config.hidden_size,
            stddev=config.initializer_range,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            rngs=rngs,
        )

    def __call__(self, images, grid):
        patches = self.patch_embedding(images)
        positions = self.position_embedding.weight[...]
        first = (self.class_embedding[...] + positions[:1]).astype(self.dtype)
        rest = patches + resize_positions(positions[1:], self.grid, grid, antialias=False).astype(self.dtype)
        return jnp.concatenate([jnp.broadcast_to(first, (len(images), *first.shape)), rest], axis=1)


class _Encoder(nnx.Module):
    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.layers = stack_blocks(lambda rngs: _Block(config, rngs=rngs), config.num_layers, rngs)


class _Block(nnx.Module):
    """Attention, then the feed-forward layer, each on a residual branch after a norm."""

    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.layer_norm1 = config.norm()
        self.self_attn = _Attention(config, rngs=rngs)
        self.layer_norm2 = config.norm()
        self.mlp = _FeedForward(config, rngs=rngs)

    def __call__(self, hidden, mask):
        scale = 1 if mask is None else mask.astype(hidden.dtype)
        hidden = hidden + scale * self.self_attn(self.layer_norm1(hidden))
        return hidden + scale * self.mlp(self.layer_norm2(hidden))


class _Attention(nnx.Module):
    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.q_proj = config.linear(config.hidden_size, config.hidden_size, rngs)
        self.k_proj = config.linear(config.hidden_size, config.hidden_size, rngs)
        self.v_proj = config.linear(config.hidden_size, config.hidden_size, rngs)
        self.out_proj = config.linear(config.hidden_size, config.hidden_size, rngs)
        self.num_heads = config.num_heads

    def __call__(self, x):
        return self.out_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), num_heads=self.num_heads))


class _FeedForward(nnx.Module):
    def __init__(self, config: CLIPVisionConfig, *, rngs: nnx.Rngs):
        self.fc1 = config.linear(config.hidden_size, config.intermediate_size, rngs)
        self.fc2 = config.linear(config.intermediate_size, config.hidden_size, rngs)
        self.activation = config.hidden_act

    def __call__(self, x):
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))
