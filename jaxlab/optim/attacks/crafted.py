"""Attacks whose messages have a closed form."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import Array

from jaxlab.optim.aggregation.geometry import wide_dtype
from jaxlab.optim.attacks.attack import Attack, ScaledAttack

__all__ = ["ALittleIsEnough", "BitFlip", "Constant", "Gaussian", "InnerProduct", "Mimic", "NoAttack", "SignFlip"]


@dataclasses.dataclass(frozen=True)
class NoAttack(Attack):
    """Byzantine workers send what honest ones would."""

    def _check_honest(self, count: int) -> None:
        del count

    def _craft(self, honest, key):
        del key
        return honest.leaves


@dataclasses.dataclass(frozen=True)
class InnerProduct(ScaledAttack):
    r"""Minus the honest mean, scaled: the aggregate should point backwards (inner-product manipulation).

    Attributes:
      scale: :math:`\epsilon`; 2 as in byzfl. Small ones (0.1) hide inside the spread; the plain mean is reversed
        beyond ``honest / Byzantine``. May be traced.
    """

    scale: Any = 2.0

    def _line(self, honest, key):
        del key
        mean = honest.mean()
        return [jnp.zeros_like(m) for m in mean], [-m for m in mean]

    def _scale(self, honest):
        del honest
        return self.scale


@dataclasses.dataclass(frozen=True)
class SignFlip(InnerProduct):
    """Minus the honest mean."""

    scale: Any = 1.0


@dataclasses.dataclass(frozen=True)
class ALittleIsEnough(ScaledAttack):
    r"""The honest mean, moved by so many standard deviations that it still passes for an honest message.

    Attributes:
      scale: z; byzfl has +1.5, the paper a negative sign, and None its rule: with :math:`s = \lfloor n / 2 \rfloor + 1
        - f` honest workers to win over, z is the :math:`(n - f - s) / (n - f)` quantile of the normal distribution. May
        be traced.
    """

    scale: Any = None

    def _check_honest(self, count: int) -> None:
        if count < 2:
            raise ValueError(f"a standard deviation needs at least 2 honest workers, got {count}")

    def _line(self, honest, key):
        del key
        mean = honest.mean()
        return mean, honest.deviation(mean)

    def _scale(self, honest):
        if self.scale is not None:
            return self.scale
        needed = honest.n_workers // 2 + 1 - (honest.n_workers - honest.count)
        # With half of the workers and more nobody has to be won over: the quantile of 1 would be infinite.
        share = jnp.minimum((honest.count - needed) / honest.count, 1 - 0.5 / honest.count)
        return norm.ppf(share)


@dataclasses.dataclass(frozen=True)
class BitFlip(Attack):
    """Every Byzantine worker negates its own message."""

    def _check_honest(self, count: int) -> None:
        del count

    def _craft(self, honest, key):
        del key
        return [-leaf for leaf in honest.leaves]


@dataclasses.dataclass(frozen=True)
class Mimic(Attack):
    """All Byzantine workers repeat one honest worker, whose data then count for more than their share.

    Attributes:
      target: index of that worker; may be traced, and out of range is then a message of zeros.

    Raises:
      ValueError: in `apply`, if there is no such worker.
    """

    target: Any = 0

    def _craft(self, honest, key):
        del key
        if isinstance(self.target, int | np.integer) and not 0 <= self.target < honest.n_workers:
            raise ValueError(f"target must be the index of one of n={honest.n_workers} workers, got {self.target}")
        return honest.row(self.target)


@dataclasses.dataclass(frozen=True)
class Gaussian(Attack):
    """Independent normal numbers, for every Byzantine worker its own.

    Attributes:
      mean, deviation: of the numbers; may be traced.
      relative: with it both are multiplied by the norm of the honest mean over all leaves.
    """

    mean: Any = 0.0
    deviation: Any = 1.0
    relative: bool = False

    @property
    def stochastic(self) -> bool:
        return True

    def _craft(self, honest, key):
        unit: Any = 1.0
        if self.relative:
            unit = jnp.sqrt(sum(jnp.sum(jnp.square(m)) for m in honest.mean()))
        sizes = [int(np.prod(leaf.shape[1:], dtype=int)) for leaf in honest.leaves]

        # Keys are folded with the worker, so that it draws the same numbers on any number of devices; one draw for all
        # leaves, because the program of each would be compiled by itself.
        def one(worker: Array) -> Array:
            return jax.random.normal(jax.random.fold_in(key, worker), (sum(sizes),), wide_dtype(honest.leaves))

        drawn = unit * (self.mean + self.deviation * jax.vmap(one)(honest.workers))
        parts = jnp.split(drawn, np.cumsum(sizes)[:-1], axis=1)
        return [part.reshape(leaf.shape) for part, leaf in zip(parts, honest.leaves, strict=True)]


@dataclasses.dataclass(frozen=True)
class Constant(Attack):
    """The same number everywhere: 0 (a worker that does nothing), NaN, infinity.

    Attributes:
      value: may be traced.
    """

    value: Any = 0.0

    def _check_honest(self, count: int) -> None:
        del count

    def _craft(self, honest, key):
        del key
        return [jnp.full_like(leaf, self.value) for leaf in honest.leaves]
