"""Attacks that look for the scale that does most harm."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxlab.optim.aggregation.aggregator import Aggregator
from jaxlab.optim.attacks.attack import Attack, ScaledAttack, per_worker

__all__ = ["DistanceAttack", "OptimalScale"]


@dataclasses.dataclass(frozen=True)
class DistanceAttack(ScaledAttack):
    r"""As far from the honest mean as the distances among honest workers allow (Shejwalkar, Houmansadr, NDSS 2021).

    The message is :math:`\mu - \gamma \sigma` with the largest :math:`\gamma` for which its largest distance to an
    honest message is at most the largest among them (``"min_max"``), or its sum of squared distances to them at most
    the largest such sum of an honest one (``"min_sum"``). Both conditions are solved exactly (quadratics in gamma).

    Attributes:
      bound: ``"min_max"`` or ``"min_sum"``.
    """

    bound: Literal["min_max", "min_sum"] = "min_max"

    def __post_init__(self) -> None:
        if self.bound not in ("min_max", "min_sum"):
            raise ValueError(f"bound must be 'min_max' or 'min_sum', got {self.bound!r}")

    def _check_honest(self, count: int) -> None:
        if count < 2:
            raise ValueError(f"a standard deviation needs at least 2 honest workers, got {count}")

    def _line(self, honest, key):
        del key
        mean = honest.mean()
        return mean, [-deviation for deviation in honest.deviation(mean)]

    def _scale(self, honest):
        # Everything is in the inner products of v_i - mu with one another and with the direction.
        mean, direction = self._line(honest, None)
        dtype = jnp.result_type(*mean)
        n = honest.n_workers
        gram, along, length = jnp.zeros((n, n), dtype), jnp.zeros(n, dtype), jnp.zeros((), dtype)
        known = honest.mask
        for leaf, m, p in zip(honest.leaves, mean, direction, strict=True):
            moved = jnp.where(per_worker(honest.mask, leaf), leaf.astype(m.dtype) - m, 0).reshape(len(leaf), -1)
            if honest.axis_name is not None:
                moved = lax.all_gather(moved, honest.axis_name, tiled=True, to="invarying")
            gram += jnp.matmul(moved, moved.T, precision=lax.Precision.HIGHEST)
            along += jnp.matmul(moved, p.ravel(), precision=lax.Precision.HIGHEST)
            length += jnp.vdot(p, p)
        if honest.axis_name is not None:
            known = lax.all_gather(known, honest.axis_name, tiled=True, to="invarying")
        squares = jnp.diagonal(gram)
        pairs = jnp.where(known[:, None] & known, squares[:, None] + squares - 2 * gram, 0)
        # |mu + gamma p - v_i|^2 = gamma^2 |p|^2 - 2 gamma <v_i - mu, p> + |v_i - mu|^2 <= limit
        if self.bound == "min_max":
            roots = _largest_root(length, along, squares, pairs.max())
            return jnp.where(known, roots, jnp.inf).min()
        return _largest_root(honest.count * length, 0.0, jnp.where(known, squares, 0).sum(), pairs.sum(1).max())


@dataclasses.dataclass(frozen=True)
class OptimalScale(Attack):
    r"""The scale of another attack that moves a given aggregator farthest from the honest mean.

    A search along the scale as in byzfl: from ``start`` the step doubles while the error grows, then shrinks by
    ``ratio`` a trial. Every trial aggregates once.

    Attributes:
      attack: `InnerProduct`, `ALittleIsEnough`; its own scale does not matter.
      aggregator: the one to be beaten, without memory (a stateful one is tried from its first state).
      evaluations, start, step, ratio: of the search; byzfl's 20, 0, 10, 0.8.

    Raises:
      TypeError: if the attack has no scale.
      ValueError: if ``evaluations`` is below 1 or ``ratio`` outside (0.5, 1).
    """

    attack: ScaledAttack
    aggregator: Aggregator
    evaluations: int = 20
    start: float = 0.0
    step: float = 10.0
    ratio: float = 0.8

    def __post_init__(self) -> None:
        if not isinstance(self.attack, ScaledAttack):
            raise TypeError(f"only an attack with a scale can be searched, got {type(self.attack).__name__}")
        if self.evaluations < 1:
            raise ValueError(f"evaluations must be at least 1, got {self.evaluations}")
        if not 0.5 < self.ratio < 1:
            raise ValueError(f"ratio must be in (0.5, 1), got {self.ratio}")

    @property
    def stochastic(self) -> bool:
        return self.aggregator.stochastic

    def _check_honest(self, count: int) -> None:
        self.attack._check_honest(count)

    def _craft(self, honest, key):
        start, direction = self.attack._line(honest, key)
        mean = honest.mean()

        def message(scale: Array) -> list[Array]:
            return [s + scale * p for s, p in zip(start, direction, strict=True)]

        def error(scale: Array) -> Array:
            stacked = [
                jnp.where(per_worker(honest.mask, leaf), leaf, crafted.astype(leaf.dtype))
                for leaf, crafted in zip(honest.leaves, message(scale), strict=True)
            ]
            result = self.aggregator.aggregate(stacked, key=key, axis_name=honest.axis_name)
            squares = [jnp.sum(jnp.square(r.astype(m.dtype) - m)) for r, m in zip(result, mean, strict=True)]
            return jnp.sqrt(sum(squares[1:], squares[0]))

        def trial(_, search):
            best, most, step, expanding = search
            candidate = error(best + step)
            better = candidate > most
            expanding = expanding & better
            next_step = jnp.where(expanding, 2 * step, self.ratio * step)
            return jnp.where(better, best + step, best), jnp.where(better, candidate, most), next_step, expanding

        first = jnp.asarray(self.start, jnp.result_type(*mean))
        search = (first, error(first), jnp.full_like(first, self.step), jnp.asarray(True))
        best, *_ = lax.fori_loop(0, self.evaluations - 1, trial, search)
        return message(best)


def _largest_root(square: Any, linear: Any, constant: Any, limit: Any) -> Array:
    """Largest x with ``square x^2 - 2 linear x + constant <= limit``; 0 where the square vanishes."""
    root = linear + jnp.sqrt(jnp.maximum(jnp.square(linear) + square * (limit - constant), 0))
    return jnp.where(square > 0, root / jnp.where(square > 0, square, 1), 0)
