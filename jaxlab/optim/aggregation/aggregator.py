"""The interface of all aggregators, and how pre-aggregation goes before a rule."""

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Key, PyTree

from jaxlab.optim.aggregation.geometry import Geometry, combine, geometry_of, over_columns, wide_dtype
from jaxlab.optim.aggregation.layout import Layout, from_blocks, layout_of, worker_blocks

__all__ = [
    "Aggregator",
    "CoordinatewiseAggregator",
    "GeometricAggregator",
    "PreAggregated",
    "PreAggregator",
    "check_count",
    "compose",
    "largest_tolerated",
]


class Aggregator(abc.ABC):
    r"""Makes one message of many, some of which may be Byzantine.

    A rule is :math:`(f, \kappa)`-robust (Allouah et al. 2023, arXiv 2302.01772) if for any messages
    :math:`v_1, \dots, v_n` and *every* set S of n - f of them

    .. math:: \lVert F(v_1, \dots, v_n) - \bar v_S \rVert^2 \le \kappa \frac{1}{|S|} \sum_{i \in S}
        \lVert v_i - \bar v_S \rVert^2

    Norms are over all leaves of a worker together. Aggregators are frozen and hashable, and not callable on purpose:
    ``optax.inject_hyperparams`` takes every callable argument for a schedule.
    """

    @property
    def stochastic(self) -> bool:
        """Whether `apply` needs a key."""
        return False

    def init(self, params: PyTree) -> PyTree:
        """State before the first aggregation, of a tree of one worker's shape. Most rules have none."""
        del params
        return optax.EmptyState()

    def apply(
        self, stacked: PyTree, state: PyTree, *, key: Key[Array, ""] | None = None, axis_name: str | None = None
    ) -> tuple[PyTree, PyTree]:
        """The aggregate of the messages, and the next state.

        Args:
          stacked: leaves ``[workers, ...]``, real and floating; inside ``jax.shard_map`` with ``axis_name`` the leaves
            are ``[workers / devices, ...]`` and the result is the same on all devices.
          state: of `init` or of the call before.
          key: for a stochastic rule; the same on all devices.
          axis_name: mesh axis that carries the workers.

        Returns:
          Leaves ``[...]`` in the dtype of the messages', computed in float32 or wider.

        Raises:
          ValueError: if the rule cannot tolerate its f of so many workers, a leaf has another leading axis than the
            others, there are no leaves, or a stochastic rule gets no key.
          TypeError: if a leaf is not real and floating.
        """
        layout = layout_of(stacked, axis_name)
        self.check(layout.n_workers)
        if self.stochastic and key is None:
            raise ValueError(f"{type(self).__name__} draws at random: call it with key=jax.random.key(...)")
        return self._apply(layout, stacked, state, key)

    def aggregate(self, stacked: PyTree, *, key: Key[Array, ""] | None = None, axis_name: str | None = None) -> PyTree:
        """`apply` from a fresh state, without the next one."""
        first = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf)[1:], jnp.result_type(leaf)), stacked)
        return self.apply(stacked, self.init(first), key=key, axis_name=axis_name)[0]

    def check(self, n: int) -> None:
        """Raise a ValueError if the rule cannot work with ``n`` workers."""
        if n < 1:
            raise ValueError(f"there must be at least 1 worker, got {n}")

    @abc.abstractmethod
    def tolerates(self, n: int) -> int:
        """Largest number of Byzantine workers among ``n`` under which the result stays bounded."""

    @abc.abstractmethod
    def kappa(self, n: int, f: int | None = None) -> float:
        """The constant of ``(f, kappa)``-robustness, ``inf`` where none is known.

        Args:
          n: workers.
          f: Byzantine ones; by default the rule's own ``f``, or all it tolerates.
        """

    @abc.abstractmethod
    def _apply(
        self, layout: Layout, stacked: PyTree, state: PyTree, key: Key[Array, ""] | None
    ) -> tuple[PyTree, PyTree]: ...


class _Rule(Aggregator):
    """A rule that pre-aggregation can go before: it sees the messages only through a `Geometry` and blocks."""

    needs_gram = False

    def _apply(self, layout, stacked, state, key):
        return self._finish(layout, worker_blocks(layout, stacked), state, (), key)

    def _finish(
        self,
        layout: Layout,
        blocks: list[Array],
        state: PyTree,
        stages: "tuple[PreAggregator, ...]",
        key: Key[Array, ""] | None,
    ) -> tuple[PyTree, PyTree]:
        raise NotImplementedError


class CoordinatewiseAggregator(_Rule):
    """A rule that treats every coordinate by itself. Only its columns remain to be written: `_columns`."""

    def _finish(self, layout, blocks, state, stages, key):
        dtype = wide_dtype(blocks)
        if not stages:
            return from_blocks(layout, [self._columns(block) for block in blocks]), state
        needs_gram = any(stage.needs_gram for stage in stages)
        geometry = geometry_of(blocks, distances=needs_gram, axis_name=layout.axis_name)
        sent = geometry.finite
        geometry = _through(stages, geometry, key)
        mixing = geometry.coefficients[: len(geometry.finite), : layout.n_workers]

        def columns_of(piece: Array) -> Array:
            rows = jnp.where(sent[:, None], piece.astype(dtype), 0)
            mixed = jnp.matmul(mixing, rows, precision=lax.Precision.HIGHEST)
            return self._columns(jnp.where(geometry.finite[:, None], mixed, jnp.nan))

        return from_blocks(layout, [over_columns(columns_of, block, dtype) for block in blocks]), state

    @abc.abstractmethod
    def _columns(self, rows: Float[Array, "m columns"]) -> Float[Array, " columns"]:
        """The aggregate of every column by itself."""


class GeometricAggregator(_Rule):
    """A rule whose result is a combination of the messages that depends on distances only: `_weights`."""

    needs_gram = True

    def _finish(self, layout, blocks, state, stages, key):
        centre = self._centre(layout, state)
        geometry = geometry_of(blocks, centre, axis_name=layout.axis_name)
        geometry = _through(stages, geometry, key)
        weights = self._weights(geometry) @ geometry.coefficients
        # More messages than the rule tolerates are no numbers: there is no answer, and NaN says so.
        m = len(geometry.finite)
        weights = jnp.where(geometry.finite.sum() >= m - self.tolerates(m), weights, jnp.nan)
        blocks = combine(weights, blocks, centre)
        return from_blocks(layout, blocks), self._next_state(layout, blocks, state)

    @abc.abstractmethod
    def _weights(self, geometry: Geometry) -> Float[Array, " p"]:
        """Weights of the points, with sum 1; 0 for a message that is not finite."""

    def _centre(self, layout: Layout, state: PyTree) -> list[Array] | None:
        del layout, state
        return None

    def _next_state(self, layout: Layout, blocks: list[Array], state: PyTree) -> PyTree:
        del layout, blocks
        return state


class PreAggregator(abc.ABC):
    """Turns messages into other messages, each a combination of the given ones and the origin, before a rule."""

    needs_gram = True
    stochastic = False

    @abc.abstractmethod
    def mix(self, geometry: Geometry, key: Key[Array, ""] | None) -> tuple[Float[Array, "k p"], Bool[Array, " k"]]:
        """Weights of the new messages over the points of the geometry, rows of sum 1; and which of them are finite."""

    def check(self, n: int) -> None:
        """Raise a ValueError if it cannot work with ``n`` messages."""
        if n < 1:
            raise ValueError(f"there must be at least 1 worker, got {n}")

    def n_messages(self, n: int) -> int:
        """How many messages it makes of ``n``."""
        return n

    def tolerates(self, n: int, after: int) -> int:
        """Largest number of Byzantine workers of ``n``, if what follows tolerates ``after``."""
        del n
        return after

    @abc.abstractmethod
    def kappa(self, n: int, f: int, after: float) -> float:
        """The constant of the composition, if that of what follows is ``after``; ``inf`` where none is known."""


@dataclasses.dataclass(frozen=True)
class PreAggregated(Aggregator):
    """Pre-aggregation in front of a rule; `compose` makes it."""

    stages: tuple[PreAggregator, ...]
    rule: _Rule

    @property
    def stochastic(self) -> bool:
        return any(stage.stochastic for stage in self.stages)

    def init(self, params: PyTree) -> PyTree:
        return self.rule.init(params)

    def check(self, n: int) -> None:
        for stage in self.stages:
            stage.check(n)
            n = stage.n_messages(n)
        self.rule.check(n)

    def tolerates(self, n: int) -> int:
        *sizes, last = self._sizes(n)
        after = self.rule.tolerates(last)
        for stage, size in zip(self.stages[::-1], sizes[::-1], strict=True):
            after = stage.tolerates(size, after)
        return after

    def kappa(self, n: int, f: int | None = None) -> float:
        *sizes, last = self._sizes(n)
        f = self.tolerates(n) if f is None else f
        constant = self.rule.kappa(last, f)
        for stage, size in zip(self.stages[::-1], sizes[::-1], strict=True):
            constant = stage.kappa(size, f, constant)
        return constant

    def _sizes(self, n: int) -> list[int]:
        sizes = [n]
        for stage in self.stages:
            sizes.append(stage.n_messages(sizes[-1]))
        return sizes

    def _apply(self, layout, stacked, state, key):
        return self.rule._finish(layout, worker_blocks(layout, stacked), state, self.stages, key)


def compose(*parts: Any) -> Aggregator:
    """Pre-aggregators in the order they act, and the rule at the end.

    Raises:
      ValueError: without a rule.
      TypeError: if the last part is no rule, or another is no pre-aggregator.
    """
    if not parts:
        raise ValueError("compose needs at least a rule, got nothing")
    *stages, rule = parts
    for stage in stages:
        if not isinstance(stage, PreAggregator):
            raise TypeError(f"all but the last part must be pre-aggregators, got {type(stage).__name__}")
    if isinstance(rule, PreAggregated):
        return PreAggregated((*stages, *rule.stages), rule.rule)
    if not isinstance(rule, _Rule):
        raise TypeError(f"the last part must be an aggregation rule, got {type(rule).__name__}")
    return PreAggregated(tuple(stages), rule) if stages else rule


def check_count(name: str, value: Any, *, least: int = 0) -> None:
    """Raise unless ``value`` is a Python (or NumPy) integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def largest_tolerated(n: int) -> int:
    """Nobody can tolerate half of the workers: the largest f with ``2 f < n``."""
    return (n - 1) // 2


def check_minority(f: int, n: int) -> None:
    """Raise unless ``2 f < n``."""
    if n < 1:
        raise ValueError(f"there must be at least 1 worker, got {n}")
    if 2 * f >= n:
        raise ValueError(f"cannot tolerate f={f} of n={n} workers: need 2f < n, at most f={largest_tolerated(n)}")


def ratio(n: int, f: int) -> float:
    """``f / (n - 2 f)``, in which most constants are written; ``inf`` from half on."""
    return f / (n - 2 * f) if 2 * f < n else math.inf


def _through(stages: tuple[PreAggregator, ...], geometry: Geometry, key: Any) -> Geometry:
    for index, stage in enumerate(stages):
        own = None if key is None else jax.random.fold_in(key, index)
        geometry = geometry.replaced(*stage.mix(geometry, own))
    return geometry
