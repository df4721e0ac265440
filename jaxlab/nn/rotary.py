"""Rotary position embedding (RoPE; Su et al. 2021, arXiv 2104.09864) and its scalings to longer contexts.

At position p the pair of coordinates (i, i + d/2) of a head of size d is turned by the angle ``p · f_i`` with
``f_i = θ^(-2i/d)``. So the product of a query and a key depends on their positions only through the difference.
`RopeScaling` changes the frequencies f so that a model reads more than the L tokens it was trained on, s times as
many:

- ``linear`` (Chen et al. 2023, arXiv 2306.15595): ``f / s``.
- ``dynamic`` (NTK-aware; Peng et al. 2023, arXiv 2309.00071, section 3.1 and appendix B.2): for a sequence of
  n > L tokens ``θ ← θ (s n / L - (s - 1))^(d / (d - 2))``; shorter ones are read as in training.
- ``yarn`` (arXiv 2309.00071, section 3.2): pairs that turn more than ``beta_fast`` times in L tokens keep f, those
  that turn less than ``beta_slow`` times get ``f / s``, a ramp over i lies between; cosine and sine are multiplied
  by the attention factor, ``0.1 ln s + 1`` unless given.
- ``llama3`` (Llama Team 2024, arXiv 2407.21783, as released): f for wavelengths below ``L / high_freq_factor``,
  ``f / s`` for those above ``L / low_freq_factor``, a ramp over L / wavelength between them.

Deviations:

1. The paper pairs neighbours (2i, 2i + 1). Hugging Face checkpoints pair the *halves* of a head, (i, i + d/2), and so
   does this module. Files in the paper's order (llama2.c, GGUF of Llama models) need the rows of ``q_proj`` and
   ``k_proj`` reordered head by head: the even rows first, then the odd ones.
2. ``dynamic`` takes n, the largest position plus one, of every sequence for itself. `transformers` takes it over the
   batch, so that there a sequence's logits depend on its neighbours; of a single sequence both are the same.

Example::

    scaling = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=32_768)
    rotation = rotary_rotation(jnp.arange(t)[None], head_dim=64, theta=1e6, scaling=scaling)
    query, key = apply_rotary(query, rotation), apply_rotary(key, rotation)          # [b, t, heads, 64]
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxlab.nn.fields import check_types

__all__ = ["ROPE_TYPES", "RopeScaling", "Rotation", "apply_rotary", "rotary_angles", "rotary_rotation"]

ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the frequencies change for contexts longer than those of training; the fields of a Hugging Face config.

    Attributes:
      rope_type: "linear", "dynamic", "yarn" or "llama3".
      factor: s, how many times longer, at least 1.
      original_max_position_embeddings: L, tokens of a sequence in training. ``dynamic``, ``yarn`` and ``llama3`` need
        it; a `DecoderConfig` fills its ``max_position_embeddings`` in for None.
      low_freq_factor: wavelengths above L over this are interpolated (llama3; 1 as released).
      high_freq_factor: wavelengths below L over this are kept (llama3; 4 as released).
      attention_factor: factor on cosine and sine (yarn); None means ``0.1 ln s + 1``.
      beta_fast: turns in L tokens from which a frequency is kept (yarn; the paper's 32 for Llama).
      beta_slow: turns in L tokens below which it is divided by s (yarn; the paper's 1).
      mscale: with ``mscale_all_dim`` and without ``attention_factor``, the latter is
        ``(0.1 mscale ln s + 1) / (0.1 mscale_all_dim ln s + 1)`` (yarn).
      mscale_all_dim: see ``mscale``.
      truncate: round the ends of the ramp outwards to whole indices (yarn).

    Raises:
      ValueError: for an unknown ``rope_type``, listing the known ones, or a value out of its range, naming it.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        check_types(self)
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}; got {self.rope_type!r}")
        if self.factor < 1:
            raise ValueError(f"factor of a rope scaling must be at least 1; got {self.factor}")
        length = self.original_max_position_embeddings
        if length is not None and length < 1:
            raise ValueError(f"original_max_position_embeddings must be at least 1; got {length}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "low_freq_factor must be positive and below high_freq_factor; "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"beta_slow must be positive and at most beta_fast; got {self.beta_slow} and {self.beta_fast}"
            )
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise ValueError(f"attention_factor must be positive; got {self.attention_factor}")

    @property
    def rotation_scale(self) -> float:
        """The factor on cosine and sine."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        grown = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * grown + 1) / (self.mscale_all_dim * grown + 1)
        return grown + 1


class Rotation(NamedTuple):
    """Cosine and sine, float32, of the angle of each pair at each position, times the attention factor."""

    cos: Float[Array, "*batch t half"]
    sin: Float[Array, "*batch t half"]


def rotary_angles(
    positions: Int[Array | np.ndarray, "*batch t"],
    *,
    head_dim: int,
    theta: float = 10_000.0,
    scaling: RopeScaling | None = None,
) -> Float[Array, "*batch t half"]:
    """Angles in radians, float32, by which each pair of coordinates is turned at each position.

    Args:
      positions: token positions, any integers.
      head_dim: size d of a head, even; ``half`` is d / 2.
      theta: base θ of the frequencies (10,000 in the paper).
      scaling: change of the frequencies; None means none.

    Raises:
      ValueError: if ``scaling`` needs the length of training and has none, is dynamic with ``head_dim`` 2, or is yarn
        with a ``theta`` of at most 1, for which no frequency is slower than another.
    """
    return jnp.asarray(positions, jnp.float32)[..., None] * _frequencies(positions, head_dim, theta, scaling)


def rotary_rotation(
    positions: Int[Array | np.ndarray, "*batch t"],
    *,
    head_dim: int,
    theta: float = 10_000.0,
    scaling: RopeScaling | None = None,
) -> Rotation:
    """Cosine and sine of `rotary_angles`, which see, times the attention factor of ``scaling``."""
    angles = rotary_angles(positions, head_dim=head_dim, theta=theta, scaling=scaling)
    scale = 1.0 if scaling is None else scaling.rotation_scale
    return Rotation(_computed_once(scale * jnp.cos(angles)), _computed_once(scale * jnp.sin(angles)))


def apply_rotary(x: Float[Array, "*batch t heads d"], rotation: Rotation) -> Float[Array, "*batch t heads d"]:
    """Turn every head of ``x`` at its position, in float32; the dtype of ``x`` is kept."""
    cos, sin = rotation.cos[..., None, :], rotation.sin[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _computed_once(x: Float[Array, "*batch t half"]) -> Float[Array, "*batch t half"]:
    # XLA takes a cosine for so cheap that it computes it anew for every head of every block, a twentieth of the time to
    # read a prompt on a CPU. It does not fuse a gather into what reads it, not even this one, which changes nothing.
    return jnp.take(x, jnp.arange(x.shape[-2]), axis=-2, mode="clip")


def _frequencies(
    positions: Int[Array | np.ndarray, "*batch t"], head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float[Array, "*frequencies half"]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = theta**-exponents
    if scaling is None:
        return jnp.asarray(frequencies, jnp.float32)
    if scaling.rope_type == "linear":
        return jnp.asarray(frequencies / scaling.factor, jnp.float32)
    length = scaling.original_max_position_embeddings
    if length is None:
        raise ValueError(f"the rope scaling {scaling.rope_type} needs original_max_position_embeddings; got None")
    if scaling.rope_type == "dynamic":
        if head_dim == 2:
            raise ValueError("the rope scaling dynamic needs a head_dim above 2; got 2")
        tokens = jnp.maximum(jnp.max(positions, axis=-1)[..., None, None] + 1, length).astype(jnp.float32)
        stretch = scaling.factor * tokens / length - (scaling.factor - 1)
        # θ^(-2i/d) and the stretch's share of it apart: their product would lose θ's digits in float32.
        return jnp.asarray(frequencies, jnp.float32) * stretch ** jnp.asarray(
            -exponents * head_dim / (head_dim - 2), jnp.float32
        )
    if scaling.rope_type == "yarn" and not theta > 1:
        raise ValueError(f"the rope scaling yarn needs a theta above 1; got {theta}")
    kept = (_yarn_kept if scaling.rope_type == "yarn" else _llama3_kept)(frequencies, length, head_dim, theta, scaling)
    return jnp.asarray(kept * frequencies + (1 - kept) * frequencies / scaling.factor, jnp.float32)


def _yarn_kept(frequencies: np.ndarray, length: int, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Share of each frequency that is not interpolated: a ramp from the index of beta_fast to that of beta_slow."""

    def index_of(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # Equal ends make a step, not 0 / 0.
    width = last - first if last != first else 1e-3
    return 1 - np.clip((np.arange(len(frequencies)) - first) / width, 0, 1)


def _llama3_kept(frequencies: np.ndarray, length: int, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    turns = length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((turns - low) / (high - low), 0, 1)
