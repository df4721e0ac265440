"""Mixers for nodes stacked on one device."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.optim.mixing.mixer import LeafwiseMixer, Step, accumulator, contract, matrix_at

__all__ = ["DenseMixer", "SparseMixer"]


@dataclasses.dataclass(frozen=True, eq=False)
class DenseMixer(LeafwiseMixer):
    """``W @ x`` for leaves stacked on one device.

    Attributes:
      matrix: ``[n, n]``, or ``[period, n, n]`` for a graph that changes every step. A NumPy array, or a traced array
        when the graph is drawn inside a compiled function (then nothing is checked).
    """

    matrix: Float[np.ndarray, "*period n n"] | Float[Array, "*period n n"]
    axis_name: None = None

    @property
    def n_nodes(self) -> int:
        return self.matrix.shape[-1]

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        dtype = accumulator(leaf)
        return contract(jnp.asarray(matrix_at(self.matrix, step), dtype), leaf.astype(dtype)).astype(leaf.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class SparseMixer(LeafwiseMixer):
    """Sum over neighbours only, for leaves stacked on one device.

    The sum runs over "the k-th neighbour of every node" for k up to the largest degree, so that no ``[n, n]`` product
    and no ``[n, degree, ...]`` array is ever formed.
    """

    matrix: Float[np.ndarray, "n n"]
    axis_name: None = None

    @property
    def n_nodes(self) -> int:
        return len(self.matrix)

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        del step
        dtype = accumulator(leaf)
        degree = int((self.matrix != 0).sum(1).max())
        # The largest weights first; a row with fewer neighbours is padded with weights of zero.
        neighbours = np.argsort(-self.matrix, axis=1, kind="stable")[:, :degree]
        weights = np.take_along_axis(self.matrix, neighbours, axis=1)
        mixed = jnp.zeros_like(leaf, dtype)
        for k in range(degree):
            mixed += _per_row(weights[:, k], leaf.ndim, dtype) * leaf[neighbours[:, k]].astype(dtype)
        return mixed.astype(leaf.dtype)


def _per_row(values: np.ndarray, ndim: int, dtype: Any) -> Array:
    return jnp.asarray(values, dtype).reshape(-1, *([1] * (ndim - 1)))
