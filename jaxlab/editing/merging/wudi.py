r"""WUDI: a task vector that disturbs none of the experts (Cheng et al. 2025, arXiv 2503.08099).

The rows of τ_k span what the inputs of the layer of expert k looked like. So the merged τ shall not differ from τ_k on
those directions ::

    L(τ) = Σ_k ‖(τ - τ_k) τ_kᵀ‖² / ‖τ_k‖²                      (matrices [out, in], Frobenius norms)

* `Wudi`: the authors' 300 steps of Adam from Σ_k τ_k;
* `WudiClosedForm`: the minimiser itself, ``(Σ_k τ_k G_k) (Σ_k G_k)⁺`` with ``G_k = τ_kᵀ τ_k / ‖τ_k‖²``, the one whose
  rows lie in the span of all rows;
* `WudiLowRank` (WUDI v2, of the code of arXiv 2509.25712): targets and directions of rank r / K.

With rows A_k = τ_k / ‖τ_k‖ of all experts below each other in A, the gradient is 2 ((τ - τ⁰) AᵀA + R), 2 R that
at the start τ⁰. It is computed as (τ Aᵀ) A or τ (AᵀA), whichever is the smaller product, instead of two for each
expert; and the closed form is T (A⁺)ᵀ, T = (τ_1 A_1ᵀ, ..., τ_K A_Kᵀ), whose condition is not squared as that of the
normal equations is.
"""

from typing import Any

import jax.numpy as jnp
import optax
from flax import struct
from jax import lax
from jaxtyping import Array, Float

from jaxlab.editing.merging.method import MatrixMethod, after, check_range, widened

__all__ = ["ORIENTATIONS", "Wudi", "WudiClosedForm", "WudiLowRank", "interference"]

ORIENTATIONS = ("out_in", "in_out")


def interference(
    merged: Float[Array, "rows columns"], vectors: Float[Array, "k rows columns"], *, orientation: str = "out_in"
) -> Float[Array, ""]:
    """L(τ) above.

    Args:
      merged: τ.
      vectors: τ_k; one that is zero counts nothing.
      orientation: "out_in" (PyTorch, Hugging Face, our decoders) or "in_out" (kernels of flax).
    """
    merged, vectors = _facing(widened(merged), orientation), _facing(widened(vectors), orientation)
    products = jnp.matmul(merged - vectors, _normalized(vectors).mT, precision="highest")
    return jnp.square(products).sum()


@struct.dataclass
class Wudi(MatrixMethod):
    """Adam on L from Σ_k τ_k, times λ.

    Attributes:
      scale: λ.
      learning_rate: of Adam, in units of the weights.
      steps: of Adam; static.
      orientation: "out_in" for matrices ``[out, in]``, "in_out" for ``[in, out]``; static.

    Raises:
      ValueError: a learning rate or number of steps below 0, an unknown orientation.
    """

    scale: Any = 1.0
    learning_rate: Any = 1e-5
    steps: int = struct.field(pytree_node=False, default=300)
    orientation: str = struct.field(pytree_node=False, default="out_in")

    def __post_init__(self) -> None:
        _check(self)

    def _combine_matrices(self, vectors: Float[Array, "k rows columns"], statistics: Any) -> Array:
        del statistics
        vectors = _facing(vectors, self.orientation)
        merged = _descend(vectors.sum(0), vectors, _normalized(vectors), self.learning_rate, self.steps)
        return _facing(merged, self.orientation)


@struct.dataclass
class WudiLowRank(MatrixMethod):
    """WUDI v2: Adam on ``Σ_k ‖(τ - T_k) D_kᵀ‖² / ‖τ_k‖²``, times λ.

    T_k is the mean τ̄ plus the best approximation of rank r / K of τ_k - τ̄; D_k is S Vᵀ of that of τ_k; r is the
    smaller side of the matrix and ``max(1, ⌊r / K⌋)`` the rank.

    Attributes:
      scale: λ.
      learning_rate: of Adam, in units of the weights.
      steps: of Adam; static.
      orientation: as in `Wudi`; static.

    Raises:
      ValueError: as `Wudi`.
    """

    scale: Any = 1.0
    learning_rate: Any = 1e-6
    steps: int = struct.field(pytree_node=False, default=300)
    orientation: str = struct.field(pytree_node=False, default="out_in")

    def __post_init__(self) -> None:
        _check(self)

    def _combine_matrices(self, vectors: Float[Array, "k rows columns"], statistics: Any) -> Array:
        del statistics
        vectors = _facing(vectors, self.orientation)
        count, rows, columns = vectors.shape
        rank = max(1, min(rows, columns) // count)
        mean = vectors.mean(0)
        u, s, vt = jnp.linalg.svd(vectors - mean, full_matrices=False)
        targets = mean + jnp.matmul(u[:, :, :rank] * s[:, None, :rank], vt[:, :rank], precision="highest")
        _, s, vt = jnp.linalg.svd(after(vectors, s), full_matrices=False)
        directions = _over_norms(s[:, :rank, None] * vt[:, :rank], vectors)
        merged = _descend(vectors.sum(0), targets, directions, self.learning_rate, self.steps)
        return _facing(merged, self.orientation)


@struct.dataclass
class WudiClosedForm(MatrixMethod):
    """The minimiser of L whose rows lie in the span of the rows of all experts, times λ.

    Attributes:
      scale: λ.
      tolerance: singular values of A below this part of the largest count as zero. The default is ten times what
        float32 resolves.
      orientation: as in `Wudi`; static.

    Raises:
      ValueError: a tolerance outside [0, 1], an unknown orientation.
    """

    scale: Any = 1.0
    tolerance: Any = 1e-6
    orientation: str = struct.field(pytree_node=False, default="out_in")

    def __post_init__(self) -> None:
        check_range("tolerance", self.tolerance, 0.0, 1.0)
        _check(self)

    def _combine_matrices(self, vectors: Float[Array, "k rows columns"], statistics: Any) -> Array:
        del statistics
        vectors = _facing(vectors, self.orientation)
        directions = _normalized(vectors)
        seen = jnp.matmul(vectors, directions.mT, precision="highest")  # [K, out, out]
        inverse = jnp.linalg.pinv(directions.reshape(-1, directions.shape[-1]), rtol=self.tolerance)
        merged = jnp.matmul(jnp.concatenate(list(seen), axis=1), inverse.mT, precision="highest")
        return _facing(merged, self.orientation)


def _descend(start: Array, targets: Array, directions: Array, learning_rate: Any, steps: int) -> Array:
    """Adam on ``Σ_k ‖(τ - targets_k) directions_kᵀ‖²``."""
    below = directions.reshape(-1, directions.shape[-1])
    height, width = below.shape
    gram = jnp.matmul(below.T, below, precision="highest") if width < 2 * height else None
    errors = jnp.matmul(start - targets, directions.mT, precision="highest")
    constant = jnp.matmul(errors, directions, precision="highest").sum(0)
    optimizer = optax.adam(learning_rate)

    def step(_: Any, state: tuple[Array, Any]) -> tuple[Array, Any]:
        moved, memory = state
        if gram is None:
            product = jnp.matmul(jnp.matmul(moved, below.T, precision="highest"), below, precision="highest")
        else:
            product = jnp.matmul(moved, gram, precision="highest")
        updates, memory = optimizer.update(2 * (product + constant), memory)
        return moved + updates, memory

    # What has moved is kept apart from where it started: the steps are far below the resolution of their sum.
    moved = jnp.zeros_like(start)
    return start + lax.fori_loop(0, steps, step, (moved, optimizer.init(moved)))[0]


def _normalized(vectors: Array) -> Array:
    return _over_norms(vectors, vectors)


def _over_norms(matrices: Array, vectors: Array) -> Array:
    squares = jnp.square(vectors).sum((-2, -1), keepdims=True)
    # The root of what is not zero, so that the gradient at an expert that is the base is zero too.
    return jnp.where(squares == 0, 0, matrices / jnp.sqrt(jnp.where(squares == 0, 1, squares)))


def _facing(matrices: Array, orientation: str) -> Array:
    """As ``[..., out, in]``, and back."""
    return matrices.mT if orientation == "in_out" else matrices


def _check(method: Any) -> None:
    check_range("scale", method.scale)
    check_range("learning_rate", getattr(method, "learning_rate", 0.0), 0.0)
    check_range("steps", getattr(method, "steps", 0), 0.0)
    if method.orientation not in ORIENTATIONS:
        raise ValueError(f"orientation must be 'out_in' or 'in_out', got {method.orientation!r}")
