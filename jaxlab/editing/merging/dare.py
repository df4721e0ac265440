"""DARE: drop numbers of the task vectors at random and rescale the rest (Yu et al. 2024, arXiv 2311.03099)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Key

from jaxlab.editing.merging.arithmetic import TaskArithmetic
from jaxlab.editing.merging.method import MergeMethod, check_range, of_each, widened
from jaxlab.editing.merging.ties import Ties, TiesStatistics

__all__ = ["Dare"]

_LEVELS = 2**16


@struct.dataclass
class Dare(MergeMethod):
    """Each number of τ_k is zero with probability ``drop``, else multiplied by ``1 / (1 - drop)``; then another method.

    The probability is a multiple of 2⁻¹⁶ (two draws from each 32 random bits), and the factor is that of the rounded
    probability, so that the expectation is τ_k exactly.

    Attributes:
      drop: the probability, a number or K of them in [0, 1).
      then: `TaskArithmetic`, or `Ties`, which trims each tensor by itself here (of density 1: elects only).
      rescale: "probability" as above; "l1": such that Σ|τ_k| of the tensor stays, as in mergekit; "none".

    Raises:
      ValueError: a probability outside [0, 1), an unknown rescale, no key.
    """

    drop: Any = 0.2
    then: MergeMethod = TaskArithmetic()
    rescale: str = struct.field(pytree_node=False, default="probability")

    def __post_init__(self) -> None:
        check_range("drop", self.drop, 0.0, 1.0)
        if any(isinstance(leaf, int | float) and leaf >= 1 for leaf in jax.tree.leaves(self.drop)):
            raise ValueError(f"drop must be below 1, got {self.drop}")
        if self.rescale not in ("probability", "l1", "none"):
            raise ValueError(f"rescale must be 'probability', 'l1' or 'none', got {self.rescale!r}")

    @property
    def needs_key(self) -> bool:
        return True

    @property
    def blockwise(self) -> bool:
        elects_only = isinstance(self.then, Ties) and self.then.election == "mergekit" and _is_one(self.then.density)
        return self.rescale != "l1" and (isinstance(self.then, TaskArithmetic) or elects_only)

    def coefficients(self, count: int) -> list[float]:
        return self.then.coefficients(count)

    def statistics_of(self, count: int) -> TiesStatistics | None:
        """What a tensor that comes in pieces is told: nothing is trimmed, and where a sum is zero plus is elected."""
        elects = self.blockwise and isinstance(self.then, Ties)
        return TiesStatistics(np.zeros(count, np.float32), 1) if elects else None

    def combine(
        self, vectors: Float[Array, "k ..."], *, key: Key[Array, ""] | None = None, statistics: Any = None
    ) -> Float[Array, "..."]:
        if key is None:
            raise ValueError("dare draws which numbers to drop: give a key")
        vectors = widened(vectors)
        levels = jnp.clip(jnp.round(of_each(self.drop, vectors) * _LEVELS), 0, _LEVELS - 1)
        thinned = self.thin(vectors, self.draw(key, vectors.shape, levels), levels / _LEVELS)
        return self.then.combine(thinned, statistics=statistics)

    @staticmethod
    def draw(key: Key[Array, ""], shape: tuple[int, ...], levels: Array) -> Bool[Array, "..."]:
        """Which numbers stay: those whose 16 random bits are not below ``levels``."""
        count = math.prod(shape)
        words = jax.random.bits(key, (-(-count // 2),), "uint32")
        bits = lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:count].reshape(shape)
        return bits >= levels.astype(jnp.uint16)

    def thin(self, vectors: Float[Array, "k ..."], mask: Bool[Array, "k ..."], drop: Any) -> Float[Array, "k ..."]:
        """The vectors where the mask is true, rescaled; ``drop`` broadcasts with them."""
        kept = jnp.where(mask, vectors, 0)
        if self.rescale == "probability":
            return kept / (1 - drop)
        if self.rescale == "none":
            return kept
        axes = tuple(range(1, vectors.ndim))
        before, after = (jnp.abs(of).sum(axes, keepdims=True) for of in (vectors, kept))
        tiny = (before < 1e-7) | (after < 1e-7)
        return kept * jnp.where(tiny, 1, before / jnp.where(tiny, 1, after))


def _is_one(density: Any) -> bool:
    return all(isinstance(value, int | float) and value == 1 for value in jax.tree.leaves(density))
