"""A small class-conditional diffusion transformer, the velocity field of a flow-matching model of images.

An image is cut into square patches, each a token. Every block normalises without weights, then shifts, scales and gates
by a linear map of the conditioning vector that starts at zero, so that a fresh block is the identity (adaLN-Zero;
Peebles & Xie 2022, arXiv 2212.09748)::

    c = MLP(sines of t) + sum_s table_s[label_s]
    h = patches W + positions + sum_s place_s * table_s[label_s]
    h = h + gate_1(c) * attention(norm(h) * (1 + scale_1(c)) + shift_1(c))
    h = h + gate_2(c) * mlp(norm(h) * (1 + scale_2(c)) + shift_2(c))

Several labels a picture are several slots, each with a table of its own; the last row of a table is the null label,
which training without the condition puts in place of a true one.

A call is `DiT.prepare`, all that depends on time and labels alone, and then `DiT.apply`: a caller that knows its times
ahead, as `jaxlab.flow` does, prepares them together.

Example::

    model = DiT(DiTConfig(image_shape=(8, 8, 1), patch_size=4, num_classes=(10,)), rngs=nnx.Rngs(0))
    velocity = model(jnp.zeros((2, 8, 8, 1)), jnp.full(2, 0.5), jnp.array([[3], [10]]))  # the second is unconditional

Deviations from the paper:

1. The output is a velocity alone, without a variance.
2. Position vectors are learnt rather than sines: the grids are small and of one size.
3. Labels enter a second time, added to the tokens with learnt weights ``place_s`` for every position, which start at
   one: a label that speaks of one part of the picture finds it sooner than by modulation alone, which is the same at
   all positions.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxlab.nn.linear import Embedding

__all__ = ["DiT", "DiTConfig", "load_dit", "save_dit"]

_ABOUT = "about"
_FREQUENCIES = 64  # sines and cosines of time each
_DTYPES = ("float32", "bfloat16", "float16")
_TIME_SCALE = 1000.0  # the paper's time counts the steps of a diffusion of this length


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Sizes of the network.

    Attributes:
      image_shape: height, width and channels.
      patch_size: side of a patch, a divisor of height and width.
      num_classes: classes of each label slot, the null label not counted.
      hidden_size: width of the tokens, a multiple of ``num_heads``.
      num_layers: number of blocks.
      num_heads: attention heads of a block.
      mlp_ratio: width of the feed-forward layer over ``hidden_size``.
      dtype: in which matrix products are computed; norms, softmax and the output are float32.

    Raises:
      ValueError: for a size below one or sizes that do not divide, naming the value.
    """

    image_shape: tuple[int, int, int]
    patch_size: int
    num_classes: tuple[int, ...]
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    mlp_ratio: int = 4
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("image_shape", "patch_size", "num_classes", "hidden_size", "num_layers", "num_heads", "mlp_ratio"):
            value = getattr(self, name)
            sizes = value if name in ("image_shape", "num_classes") else (value,)
            if not isinstance(sizes, tuple) or not all(isinstance(size, int | np.integer) for size in sizes):
                raise ValueError(f"{name} must be made of whole numbers; got {value!r}")
            if not sizes or min(sizes) < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if len(self.image_shape) != 3:
            raise ValueError(f"image_shape must be height, width and channels; got {self.image_shape}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}; got {self.dtype!r}")
        height, width, _ = self.image_shape
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(f"patch_size must divide height and width {height} x {width}; got {self.patch_size}")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads must divide hidden_size {self.hidden_size}; got {self.num_heads}")

    @property
    def num_patches(self) -> int:
        """Tokens of an image."""
        height, width, _ = self.image_shape
        return height * width // self.patch_size**2

    @property
    def null_labels(self) -> np.ndarray:
        """The null label of each slot, ``[slots]``."""
        return np.asarray(self.num_classes, np.int32)


class DiT(nnx.Module):
    """The network; see the module and `DiTConfig`."""

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        size, channels = config.hidden_size, config.image_shape[2]
        self.config = config
        self.patch = _linear(config, config.patch_size**2 * channels, size, rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.num_patches, size)))
        self.time_in = _linear(config, 2 * _FREQUENCIES, size, rngs)
        self.time_out = _linear(config, size, size, rngs)
        self.labels = nnx.List(
            [Embedding(n + 1, size, stddev=1.0, dtype=config.dtype, rngs=rngs) for n in config.num_classes]
        )

        self.places = nnx.Param(jnp.ones((len(config.num_classes), config.num_patches, size)))

        self.blocks = nnx.List([_Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.modulation = _zero_linear(config, size, 2 * size, rngs)
        self.head = _zero_linear(config, size, config.patch_size**2 * channels, rngs)

    def __call__(
        self, z: Float[Array, "b h w c"], t: Float[Array, " b"], labels: Int[Array | np.ndarray, "b slots"]
    ) -> Float[Array, "b h w c"]:
        """Velocity at ``z``, in the dtype of ``z``.

        Args:
          z: noisy images.
          t: time of each, 0 for data and 1 for noise.
          labels: one id a slot; ``num_classes`` of the slot is the null label, an id outside gives NaN.

        Raises:
          ValueError: the images or the number of slots are not those of the config, or there is not one time and one
            row of labels for each image.
          TypeError: the labels are no whole numbers.
        """
        if t.shape != z.shape[:1] or len(labels) != len(z):
            raise ValueError(f"{len(z)} images need as many times and labels; got shapes {t.shape} and {labels.shape}")
        self._check_images(z)
        return self.apply(z, self.prepare(t, labels))

    def prepare(self, t: Float[Array, " b"], labels: Int[Array | np.ndarray, "b slots"]) -> tuple[Any, ...]:
        """What of a call does not look at the images: what labels add to tokens, and the modulation of every block.

        Args:
          t: as of a call.
          labels: as of a call.

        Returns:
          The argument ``known`` of `apply`, leaves with leading size b.

        Raises:
          ValueError: another number of slots.
          TypeError: the labels are no whole numbers.
        """
        config = self.config
        if labels.shape[1:] != (len(config.num_classes),):
            raise ValueError(f"labels need {len(config.num_classes)} slots; got shape {labels.shape}")
        if not jnp.issubdtype(labels.dtype, jnp.integer):
            raise TypeError(f"labels must be whole numbers; got {labels.dtype}")
        condition = self.time_out(jax.nn.silu(self.time_in(_sines(t))))
        added = self.positions[...].astype(config.dtype)
        for slot, table in enumerate(self.labels):
            label = table(labels[:, slot])
            condition = condition + label
            added = added + self.places[slot].astype(config.dtype) * label[:, None]
        condition = jax.nn.silu(condition)
        return added, [block.modulation(condition) for block in self.blocks], self.modulation(condition)

    def apply(self, z: Float[Array, "b h w c"], known: tuple[Any, ...]) -> Float[Array, "b h w c"]:
        """Velocity at ``z`` for the times and labels of which ``known`` is what `prepare` gave."""
        config = self.config
        self._check_images(z)
        added, of_blocks, of_head = known
        batch = z.shape[0]
        side, (height, width, channels) = config.patch_size, config.image_shape
        rows, columns = height // side, width // side
        patches = z.reshape(batch, rows, side, columns, side, channels).transpose(0, 1, 3, 2, 4, 5)
        hidden = self.patch(patches.reshape(batch, rows * columns, side * side * channels)) + added
        # No scan: it would copy the weights of every block out of a stack at every call, a third of the time of an
        # edit of one image on CPU. Three blocks compile as fast as a scan does, and train faster by an eighth.
        for block, modulation in zip(self.blocks, of_blocks, strict=True):
            hidden = block(hidden, modulation)
        shift, scale = jnp.split(of_head[:, None], 2, axis=-1)
        out = self.head(_modulate(hidden, shift, scale)).astype(z.dtype)
        out = out.reshape(batch, rows, columns, side, side, channels).transpose(0, 1, 3, 2, 4, 5)
        return out.reshape(z.shape)

    def _check_images(self, z: Array) -> None:
        if z.shape[1:] != self.config.image_shape:
            raise ValueError(f"images must be {self.config.image_shape} each; got {z.shape[1:]}")


def save_dit(path: Path, model: DiT, class_names: Sequence[Sequence[str]]) -> None:
    """Write a network to one .npz file.

    Args:
      path: the file.
      model: the network.
      class_names: names of the classes of every slot.

    Raises:
      ValueError: names that are not those of the config's classes in number.
    """
    sizes = tuple(len(names) for names in class_names)
    if sizes != model.config.num_classes:
        raise ValueError(f"class_names must name {model.config.num_classes} classes a slot, got {sizes}")
    leaves = jax.tree.leaves_with_path(nnx.state(model))
    contents: dict[str, Any] = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves
    }
    about = {"config": dataclasses.asdict(model.config), "class_names": [list(names) for names in class_names]}
    with path.open("wb") as file:
        np.savez(file, **(contents | {_ABOUT: np.array(json.dumps(about))}))


def load_dit(path: Path) -> tuple[DiT, tuple[tuple[str, ...], ...]]:
    """Read what `save_dit` wrote: the network and the names of the classes of every slot.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(str(arrays[_ABOUT]))
            fields: dict[str, Any] = {
                name: tuple(v) if isinstance(v, list) else v for name, v in about["config"].items()
            }
            graph, state = nnx.split(nnx.eval_shape(lambda: DiT(DiTConfig(**fields), rngs=nnx.Rngs(0))))
            names = [
                jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(state)
            ]
            leaves = [jnp.asarray(arrays[name]) for name in names]
            for name, leaf, wanted in zip(names, leaves, jax.tree.leaves(state), strict=True):
                if leaf.shape != wanted.shape or leaf.dtype != wanted.dtype:
                    raise ValueError(
                        f"{name} is {leaf.dtype}{list(leaf.shape)}, not {wanted.dtype}{list(wanted.shape)}"
                    )
                if not np.all(np.isfinite(leaf)):
                    raise ValueError(f"{name} is not finite")
            class_names = tuple(tuple(map(str, names)) for names in about["class_names"])
            if tuple(map(len, class_names)) != fields["num_classes"]:
                raise ValueError(f"its class names are not {fields['num_classes']} in number")
    except OSError:
        raise
    # What a damaged file raises depends on where: zipfile, zlib, json and numpy have errors of their own.
    except Exception as error:
        raise ValueError(
            f"{path} is not a network that save_dit wrote ({' '.join(str(error).split())[:100]})"
        ) from error
    model = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))
    return model, class_names


class _Block(nnx.Module):
    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        size = config.hidden_size
        self.heads = config.num_heads
        self.modulation = _zero_linear(config, size, 6 * size, rngs)
        self.query_key_value = _linear(config, size, 3 * size, rngs)
        self.attention_out = _linear(config, size, size, rngs)
        self.mlp_in = _linear(config, size, config.mlp_ratio * size, rngs)
        self.mlp_out = _linear(config, config.mlp_ratio * size, size, rngs)

    def __call__(self, hidden: Float[Array, "b n d"], modulation: Float[Array, "b d6"]) -> Float[Array, "b n d"]:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(modulation[:, None], 6, axis=-1)
        mixed = self.query_key_value(_modulate(hidden, shift_1, scale_1))
        batch, tokens, size = hidden.shape
        query, key, value = jnp.moveaxis(mixed.reshape(batch, tokens, 3, self.heads, size // self.heads), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / math.sqrt(size // self.heads)
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(hidden.shape)
        hidden = hidden + gate_1 * self.attention_out(attended)
        inner = jax.nn.gelu(self.mlp_in(_modulate(hidden, shift_2, scale_2)), approximate=True)
        return hidden + gate_2 * self.mlp_out(inner)


def _modulate(hidden: Array, shift: Array, scale: Array) -> Array:
    """Normalise the last axis in float32, then scale and shift."""
    wide = hidden.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return wide.astype(hidden.dtype) * (1 + scale) + shift


def _sines(t: Array) -> Array:
    """Sines and cosines of time at frequencies from 1 down to 1e-4 a step."""
    frequencies = jnp.exp(-math.log(10_000.0) * jnp.arange(_FREQUENCIES) / _FREQUENCIES)
    angles = _TIME_SCALE * t.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def _linear(config: DiTConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    # Weights [in, out]: XLA's products on CPU read the layout of `jaxlab.nn.Linear` at two thirds of the speed where
    # there are few rows, as in the edit of one image.
    draw = nnx.initializers.normal(inputs**-0.5)
    return nnx.Linear(inputs, outputs, kernel_init=draw, dtype=config.dtype, rngs=rngs)


def _zero_linear(config: DiTConfig, inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, kernel_init=nnx.initializers.zeros_init(), dtype=config.dtype, rngs=rngs)
