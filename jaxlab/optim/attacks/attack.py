"""The interface of all attacks, and what attackers know."""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Key, PyTree

from jaxlab.optim.aggregation.geometry import wide_dtype
from jaxlab.optim.aggregation.layout import layout_of

__all__ = ["Attack", "Byzantine", "Honest", "ScaledAttack", "byzantine_mask", "flip_labels", "honest_of", "per_worker"]

Byzantine = int | np.ndarray | Bool[Array, " n"]


class Honest(NamedTuple):
    """What attackers know: all messages, and which are honest.

    Attributes:
      leaves: ``[local workers, ...]`` each.
      mask: ``[local workers]``, True for honest ones.
      workers: ``[local workers]``, their indices in the whole network.
      count: honest workers in the whole network.
      n_workers: workers in the whole network.
      axis_name: mesh axis that carries the workers, or None.
    """

    leaves: list[Array]
    mask: Bool[Array, " m"]
    workers: Int[Array, " m"]
    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count is not missed
    n_workers: int
    axis_name: str | None

    def sum_over(self, rows: Array, mask: Bool[Array, " m"]) -> Array:
        """Sum of the masked rows of all workers; others may hold anything."""
        rows = jnp.where(per_worker(mask, rows), rows, 0)
        # A product with ones: a reduction over the leading axis is slow on CPUs.
        total = jnp.tensordot(jnp.ones(len(rows), rows.dtype), rows, axes=1, precision=lax.Precision.HIGHEST)
        return total if self.axis_name is None else lax.psum(total, self.axis_name)

    def mean(self) -> list[Array]:
        """Of the honest messages, in float32 or wider."""
        return [self.sum_over(leaf.astype(wide_dtype([leaf])), self.mask) / self.count for leaf in self.leaves]

    def deviation(self, mean: list[Array]) -> list[Array]:
        """Standard deviation of the honest messages, with ``count - 1`` in the denominator."""
        squares = [jnp.square(leaf.astype(m.dtype) - m) for leaf, m in zip(self.leaves, mean, strict=True)]
        return [jnp.sqrt(self.sum_over(square, self.mask) / (self.count - 1)) for square in squares]

    def row(self, worker: Any) -> list[Array]:
        """The message of one worker."""
        return [self.sum_over(leaf, self.workers == worker) for leaf in self.leaves]


class Attack(abc.ABC):
    """What Byzantine workers send. Not callable on purpose, like a mixer."""

    @property
    def stochastic(self) -> bool:
        """Whether `apply` needs a key."""
        return False

    def apply(
        self,
        stacked: PyTree,
        byzantine: Byzantine,
        *,
        key: Key[Array, ""] | None = None,
        axis_name: str | None = None,
    ) -> PyTree:
        """The messages with those of the Byzantine workers replaced.

        Args:
          stacked: leaves ``[workers, ...]``, real and floating, as every worker would send them honestly; inside
            ``jax.shard_map`` with ``axis_name`` this device's workers.
          byzantine: how many, the last ones; or a mask over all workers, which may be traced.
          key: for a stochastic attack.
          axis_name: mesh axis that carries the workers.

        Raises:
          ValueError: if there are more Byzantine workers than workers, the mask has another length, honest workers
            are too few for the attack, a leaf has another leading axis than the others, there are no leaves, a
            stochastic attack gets no key.
          TypeError: if a leaf is not real and floating.
        """
        honest = honest_of(stacked, byzantine, axis_name=axis_name)
        if isinstance(byzantine, int | np.integer | np.ndarray):
            self._check_honest(honest.n_workers - int(np.sum(byzantine_mask(byzantine, honest.n_workers))))
        if self.stochastic and key is None:
            raise ValueError(f"{type(self).__name__} draws at random: call it with key=jax.random.key(...)")
        crafted = self._craft(honest, key)
        written = [
            jnp.where(per_worker(honest.mask, leaf), leaf, message.astype(leaf.dtype))
            for leaf, message in zip(honest.leaves, crafted, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(stacked), written)

    def _check_honest(self, count: int) -> None:
        if count < 1:
            raise ValueError("an attack needs at least 1 honest worker to look at, got none")

    @abc.abstractmethod
    def _craft(self, honest: Honest, key: Key[Array, ""] | None) -> list[Array]:
        """One leaf each: ``[...]``, the same of all Byzantine workers, or ``[local workers, ...]``."""


class ScaledAttack(Attack):
    """An attack with one number that says how far it goes, for `OptimalScale`."""

    def _craft(self, honest, key):
        mean, direction = self._line(honest, key)
        scale = self._scale(honest)
        return [m + scale * p for m, p in zip(mean, direction, strict=True)]

    @abc.abstractmethod
    def _line(self, honest: Honest, key: Key[Array, ""] | None) -> tuple[list[Array], list[Array]]:
        """Start and direction: the message is ``start + scale * direction``."""

    @abc.abstractmethod
    def _scale(self, honest: Honest) -> Any: ...


def honest_of(stacked: PyTree, byzantine: Byzantine, *, axis_name: str | None = None) -> Honest:
    """What attackers know of stacked messages; arguments and errors as of `Attack.apply`."""
    layout = layout_of(stacked, axis_name)
    mask = jnp.asarray(byzantine_mask(byzantine, layout.n_workers))
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(stacked)]
    local, workers = mask, jnp.arange(layout.n_workers)
    if axis_name is not None:
        first = lax.axis_index(axis_name) * len(leaves[0])
        local, workers = (lax.dynamic_slice_in_dim(x, first, len(leaves[0])) for x in (local, workers))
    return Honest(leaves, ~local, workers, jnp.sum(~mask), layout.n_workers, axis_name)


def byzantine_mask(byzantine: Byzantine, n: int) -> np.ndarray | Bool[Array, " n"]:
    """``[n]``, True for Byzantine workers, of such a mask or of how many (the last ones) there are.

    Raises:
      ValueError: if the mask has another length or there are not so many workers.
      TypeError: if it is neither an integer nor a mask.
    """
    if isinstance(byzantine, int | np.integer) and not isinstance(byzantine, bool):
        if not 0 <= byzantine <= n:
            raise ValueError(f"there can be 0 to {n} Byzantine workers of n={n}, got {byzantine}")
        return np.arange(n) >= n - byzantine
    if getattr(byzantine, "dtype", None) != jnp.bool_:
        raise TypeError(f"Byzantine workers are given by their number or a mask of bools, got {byzantine!r}")
    if jnp.shape(byzantine) != (n,):
        raise ValueError(f"a mask of Byzantine workers needs shape ({n},), got {jnp.shape(byzantine)}")
    return byzantine  # type: ignore[return-value]


def flip_labels(
    labels: Int[Array | np.ndarray, " *batch"],
    n_classes: int,
    *,
    byzantine: Bool[Array, " n"] | np.ndarray | None = None,
) -> Int[Array | np.ndarray, " *batch"]:
    """The class ``y`` becomes ``n_classes - 1 - y``, for all or for the Byzantine workers of the leading axis."""
    flipped = n_classes - 1 - labels
    if byzantine is None:
        return flipped
    return jnp.where(per_worker(jnp.asarray(byzantine), jnp.asarray(labels)), flipped, labels)


def per_worker(values: Array, like: Array) -> Array:
    """``[n]`` shaped so that it broadcasts against ``[n, ...]``."""
    return values.reshape(-1, *([1] * (like.ndim - 1)))
