"""What all ways of merging share: K task vectors of one tensor go in, one comes out."""

import abc
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

__all__ = ["NOTHING", "MatrixMethod", "MergeMethod", "check_range", "is_known", "of_each", "products", "widened"]

NOTHING = 1e-8  # a sum of weights below it is not divided by


class MergeMethod(abc.ABC):
    """A way of merging the K task vectors of a tensor.

    Methods are frozen dataclasses and pytrees: their numbers are leaves, so that they may be traced, and one compiled
    program serves every tensor of a shape whatever its coefficients; a method may be mapped over (``jax.vmap`` over
    ``TaskArithmetic(scales)``). What changes a program is static.

    Attributes:
      needs_key: whether `combine` draws random numbers.
      needs_calibration: whether `combine` needs statistics of the inputs of a layer.
      blockwise: whether every number of the result depends on the same number of the vectors alone, given the
        statistics, so that a tensor may be merged in pieces.
    """

    needs_calibration: ClassVar[bool] = False

    @property
    def needs_key(self) -> bool:
        return False

    @property
    def blockwise(self) -> bool:
        return False

    def statistics(self, vectors: Mapping[str, Float[Array, "k ..."]]) -> Any:
        """What the method takes from all tensors together; None where it sees each by itself.

        Args:
          vectors: task vectors by path, as of `jaxlab.editing.task_vectors.task_vectors`.
        """
        del vectors
        return None

    def coefficients(self, count: int) -> list[float]:
        """What each of ``count`` task vectors is multiplied with, before anything that depends on their values."""
        return products(self.scale, 1.0, count)  # type: ignore[attr-defined]

    @abc.abstractmethod
    def combine(
        self, vectors: Float[Array, "k ..."], *, key: Key[Array, ""] | None = None, statistics: Any = None
    ) -> Float[Array, "..."]:
        """The change of one tensor, to be added to the base.

        Args:
          vectors: τ_k of the tensor, ``[K, ...]``; computed in float32 or wider.
          key: of all draws; needed where ``needs_key``.
          statistics: as `statistics` gives them (or as the class says); None: of this tensor alone.
        """


class MatrixMethod(MergeMethod):
    """A method for matrices ``[K, rows, columns]``; tensors of other ranks are averaged, and scaled like them."""

    def combine(
        self, vectors: Float[Array, "k ..."], *, key: Key[Array, ""] | None = None, statistics: Any = None
    ) -> Float[Array, "..."]:
        del key
        vectors = widened(vectors)
        merged = self._combine_matrices(vectors, statistics) if vectors.ndim == 3 else vectors.mean(0)
        return jnp.asarray(self.scale, merged.dtype) * merged  # type: ignore[attr-defined]

    @abc.abstractmethod
    def _combine_matrices(self, vectors: Float[Array, "k rows columns"], statistics: Any) -> Array: ...


def after(value: Array, done: Array) -> Array:
    """The value, for which a program has to wait until another array is computed.

    XLA on CPUs may run independent parts of a program at once, and decompositions that run at once wait for each
    other's threads for ever. An optimisation barrier is gone by then; a zero that is computed is not.
    """
    first = jnp.nan_to_num(done.reshape(-1)[:1].sum(), posinf=0.0, neginf=0.0)
    return value + (0 * first).astype(value.dtype)


def widened(vectors: Array) -> Array:
    """In float32, or wider where they are."""
    return vectors.astype(jnp.promote_types(vectors.dtype, jnp.float32))


def of_each(numbers: Any, vectors: Array) -> Array:
    """One number for all vectors or K of them, as ``[K, 1, ...]`` to multiply ``vectors`` with.

    Raises:
      ValueError: another number of them than vectors.
    """
    values = jnp.asarray(numbers, vectors.dtype)
    if values.ndim > 1 or (values.ndim == 1 and values.shape[0] != vectors.shape[0]):
        raise ValueError(f"there must be one number or {vectors.shape[0]}, one a model; got {list(values.shape)}")
    return jnp.broadcast_to(values, (vectors.shape[0],)).reshape((-1,) + (1,) * (vectors.ndim - 1))


def check_range(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise ValueError for a Python number, or one of several, outside ``[low, high]``; traced numbers pass."""
    for number in value if isinstance(value, tuple | list) else (value,):
        if isinstance(number, str):
            raise ValueError(f"{name} must be a number, got {number!r}")
        if isinstance(number, int | float) and not (low <= number <= high and math.isfinite(number)):
            within = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"finite and at least {low:g}"
            raise ValueError(f"{name} must be {within if math.isfinite(low) else 'finite'}, got {number}")


def products(scale: Any, weights: Any, count: int, *, normalize: bool = False) -> list[float]:
    """``λ w_k`` as Python numbers, over Σ w where asked for."""
    values = np.broadcast_to(np.asarray(weights, np.float64), (count,))
    total = values.sum() if normalize else 1.0
    return (float(scale) * values / (total if abs(total) >= NOTHING else 1.0)).tolist()


def is_known(value: Any) -> bool:
    """Whether numbers are known while a program is traced."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
