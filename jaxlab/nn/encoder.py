"""What the encoders share: sizes, a stack of blocks run by ``lax.scan``, attention without a causal mask, the output.

The encoders are `jaxlab.nn.bert`, `jaxlab.nn.distilbert`, `jaxlab.nn.vit`, `jaxlab.nn.clip_vision` and
`jaxlab.nn.dinov2`. They keep these conventions:

* ``init(config, key)`` gives ``(apply_fn, params)`` and ``make_apply(config)`` gives ``apply_fn`` alone.
* ``params`` is a nested dict whose paths are the names in a Hugging Face checkpoint, with ``/`` for ``.`` and without
  the prefix (``bert.``, ``vit.``, ``vision_model.``) that a file has or lacks. Matrices are ``[out, in]``, the
  projection of patches is ``[out, channels, patch, patch]``. Blocks are stacked on a leading axis.
* ``apply_fn(params, inputs, *, block_mask=None, hidden_states=None)`` gives an `EncoderOutput`.
* ``block_mask`` holds a factor m in [0, 1] for each block: 1 runs it, 0 makes it the identity. In a block that
  normalises before its branches (ViT, CLIP, DINOv2) m scales both residual branches, as in the decoder. BERT and
  DistilBERT normalise after each addition, so that there is no branch whose removal leaves h as it was: m interpolates
  the whole block, ``h ← h + m · (Block(h) - h)``.
* ``hidden_states`` says which hidden states to give too, as `transformers` counts them: 0 is what enters the first
  block, i what block i - 1 gives, and ``num_layers`` (or -1) what the last one gives, before a final norm.

Precision: products in ``dtype``; softmax, norms and class logits in float32.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from jaxlab.nn.fields import check_types
from jaxlab.nn.linear import Linear
from jaxlab.nn.norm import LayerNorm
from jaxlab.nn.pure import check_block_mask, check_hidden_states

__all__ = ["ACTIVATIONS", "EncoderConfig", "EncoderOutput", "attend", "run_blocks", "split_over", "stack_blocks"]

# As `transformers` spells them in "hidden_act".
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes and switches that every encoder has.

    Attributes:
      hidden_size: width of the residual stream.
      intermediate_size: width of the feed-forward layer.
      num_layers: number of blocks.
      num_heads: attention heads of a block, a divisor of ``hidden_size``.
      hidden_act: activation of the feed-forward layer, one of `ACTIVATIONS`.
      norm_eps: ε of the norms.
      num_labels: classes of the head; None means no head.
      initializer_range: standard deviation of fresh weights.
      dtype: in which matrix products are computed: "float32", "bfloat16" or "float16".
      param_dtype: in which parameters are kept; the same choices.
      remat: recompute a block's activations in the backward pass instead of keeping them.

    Raises:
      ValueError: for a value of another type, a size below one, sizes that do not divide, an unknown activation or
        dtype, naming the value.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    hidden_act: str = "gelu"
    norm_eps: float = 1e-12
    num_labels: int | None = None
    initializer_range: float = 0.02
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: bool = False

    def __post_init__(self):
        check_types(self)
        self.check_at_least_one("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_labels")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads must divide hidden_size; got {self.num_heads} and {self.hidden_size}")
        self.check_activation("hidden_act")
        for name in ("norm_eps", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(f"{name} must be one of {', '.join(_DTYPES)}; got {getattr(self, name)!r}")

    def check_at_least_one(self, *names: str) -> None:
        """Raise ValueError if a size is below one; one that is None is not there."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")

    def check_activation(self, name: str) -> None:
        """Raise ValueError if the field is not the name of an activation."""
        if getattr(self, name) not in ACTIVATIONS:
            raise ValueError(f"{name} must be one of {', '.join(ACTIVATIONS)}; got {getattr(self, name)!r}")

    def linear(self, in_features: int, out_features: int, rngs: nnx.Rngs, *, use_bias: bool = True) -> Linear:
        """Make a linear map of these settings."""
        return Linear(
            in_features,
            out_features,
            use_bias=use_bias,
            stddev=self.initializer_range,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            rngs=rngs,
        )

    def norm(self) -> LayerNorm:
        """Make a norm of these settings."""
        return LayerNorm(self.hidden_size, eps=self.norm_eps, param_dtype=self.param_dtype)

    def parameter(self, rngs: nnx.Rngs, shape: tuple[int, ...]) -> nnx.Param:
        """Draw a parameter from N(0, ``initializer_range``²)."""
        return nnx.Param(jax.nn.initializers.normal(self.initializer_range, self.param_dtype)(rngs.params(), shape))


class EncoderOutput(NamedTuple):
    """What an encoder gives. Names and meaning are those of `transformers`.

    Attributes:
      last_hidden_state: ``[b, t, hidden]`` in the config's dtype.
      pooler_output: ``[b, hidden]``, one vector an input; None where the network has no pooler.
      hidden_states: ``[n, b, t, hidden]``, those that were asked for in that order; None if none were.
      logits: ``[b, num_labels]``, float32, of the classes; None without that head.
      image_embeds: ``[b, projection_dim]``, float32, CLIP's vector of an image; None without that head.
    """

    last_hidden_state: Float[Array, "b t d"]
    pooler_output: Float[Array, "b p"] | None = None
    hidden_states: Float[Array, "n b t d"] | None = None
    logits: Float[Array, "b labels"] | None = None
    image_embeds: Float[Array, "b e"] | None = None


_Block = TypeVar("_Block", bound=nnx.Module)


def stack_blocks(make: Callable[[nnx.Rngs], _Block], num_layers: int, rngs: nnx.Rngs) -> _Block:
    """Make ``num_layers`` blocks, each with its own draw, as one whose parameters have a leading axis."""
    return nnx.split_rngs(splits=num_layers)(nnx.vmap(make))(rngs)


def run_blocks(
    blocks: nnx.Module,
    hidden: Float[Array, "b t d"],
    *inputs: Any,
    num_layers: int,
    block_mask: Float[Array | np.ndarray, " layers"] | None,
    hidden_states: tuple[int, ...] | None,
    remat: bool,
) -> tuple[Float[Array, "b t d"], Float[Array, "n b t d"] | None]:
    """Run stacked blocks one after another.

    Args:
      blocks: made by `stack_blocks`; called as ``block(hidden, mask, *inputs)``.
      hidden: what enters the first block.
      *inputs: what every block takes besides.
      num_layers: number of blocks.
      block_mask: factor of each block, handed to it as ``mask``; None for all of them means 1.
      hidden_states: which hidden states to give too; see the module.
      remat: recompute activations in the backward pass.

    Returns:
      What leaves the last block, and the hidden states asked for. Only these are kept.

    Raises:
      ValueError: if ``block_mask`` does not have one entry a block, or there is no hidden state of such a number.
    """
    check_block_mask(block_mask, num_layers)
    check_hidden_states(hidden_states)
    for place in hidden_states or ():
        if not -num_layers - 1 <= place <= num_layers:
            raise ValueError(f"hidden_states must be in -{num_layers + 1}..{num_layers}; got {place}")
    places = [place % (num_layers + 1) for place in hidden_states or ()]
    kept = sorted(set(places) - {0})
    # The row of the store for what leaves each block; one past the end is dropped.
    rows = np.full(num_layers, len(kept))
    rows[np.array(kept, int) - 1] = np.arange(len(kept))
    graph, layers = nnx.split(blocks)

    def run_block(params, hidden, mask):
        return nnx.merge(graph, params)(hidden, mask, *inputs)

    if remat:
        # In a scan the backward pass is another loop, so that nothing merges across it: no barriers are needed.
        run_block = jax.checkpoint(run_block, prevent_cse=False)

    def step(carry, block):
        hidden, store = carry
        params, mask, row = block
        hidden = run_block(params, hidden, mask)
        return (hidden, store.at[row].set(hidden, mode="drop") if kept else store), None

    store = jnp.repeat(hidden[None], len(kept), axis=0)
    (last, store), _ = lax.scan(step, (hidden, store), (layers, block_mask, rows))
    if hidden_states is None:
        return last, None
    if not places:
        return last, store
    return last, jnp.stack([hidden if place == 0 else store[kept.index(place)] for place in places])


def attend(
    query: Float[Array, "b t d"],
    key: Float[Array, "b t d"],
    value: Float[Array, "b t d"],
    *,
    num_heads: int,
    mask: Bool[Array, "b t"] | None = None,
) -> Float[Array, "b t d"]:
    """``softmax(q kᵀ / √(d / num_heads)) v`` of every head, heads side by side; every token sees those in ``mask``."""
    size = query.shape[2] // num_heads
    query, key, value = (jnp.reshape(x, (*x.shape[:2], num_heads, size)) for x in (query, key, value))
    mixed = jax.nn.dot_product_attention(query, key, value, mask=None if mask is None else mask[:, None, None])
    return jnp.reshape(mixed, (*mixed.shape[:2], num_heads * size))


def split_over(
    params: Mapping[str, Any],
    mesh: Mesh,
    axis: str,
    *,
    rows: Mapping[str, int],
    columns: Mapping[str, int],
) -> dict[str, Any]:
    """Say how the matrices of the blocks are spread over the devices of a mesh axis.

    Those that make heads and features are split by rows and those that take them in by columns, so that a branch needs
    one sum over the devices (Shoeybi et al. 2019, arXiv 1909.08053). What the axis does not divide evenly, and all
    else, is left whole on every device.

    Args:
      params: parameters or their shapes.
      mesh: the devices.
      axis: name of the mesh axis.
      rows: ends of the paths of maps to split by their outputs, with their biases, and into how many indivisible parts
        these fall.
      columns: the same of maps to split by their inputs; their biases are left whole.

    Returns:
      A `PartitionSpec` for each parameter, in the same tree.

    Raises:
      ValueError: if the mesh has no such axis, or not all are of the type by which XLA divides the work.
    """
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has no axis {axis!r}; its axes are {', '.join(map(str, mesh.shape))}")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            "the axes of the mesh must be AxisType.Auto, as jax.sharding.Mesh makes them and jax.make_mesh with "
            f"axis_types; got {', '.join(kind.name for kind in mesh.axis_types)}"
        )
    size = mesh.shape[axis]

    def spec(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        *parents, kind = (entry.key for entry in path)
        owner = "/" + "/".join(parents)
        if any(owner.endswith("/" + end) and parts % size == 0 for end, parts in rows.items()):
            split = -2 if kind == "weight" else -1
        elif kind == "weight" and any(
            owner.endswith("/" + end) and parts % size == 0 for end, parts in columns.items()
        ):
            split = -1
        else:
            return PartitionSpec()
        return PartitionSpec(*(axis if i == leaf.ndim + split else None for i in range(leaf.ndim)))

    return jax.tree.map_with_path(spec, params)


_DTYPES = ("float32", "bfloat16", "float16")
