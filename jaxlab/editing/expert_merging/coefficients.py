"""Coefficients for every tensor, or every piece of one, of every expert, and the merge that they give.

With task vectors τ_k (`jaxlab.editing.task_vectors`) of K experts, flattened row by row and cut in m_ℓ pieces ::

    θ^ℓ(α) = θ₀^ℓ + Σ_k Σ_s α_{k,s}^ℓ τ_{k,s}^ℓ,      α = squash(a)

where a tensor ℓ is one matrix of one block: a leaf that stacks the blocks, ``[layers, ...]``, counts as one tensor a
layer. Pieces have ⌈n/m⌉ elements, the last one those that are left, as ``torch.chunk`` cuts; m = 0 keeps a tensor at
the anchor ᾱ_k. What is optimised is a, from squash⁻¹(ᾱ) on::

    base, vectors = {"w": jnp.zeros((4, 3))}, {"w": jnp.ones((2, 4, 3))}
    layout = tensor_layout(vectors, chunks={"w": 5})                             # pieces of 3, 3, 3, 3
    raw = initial(layout, jnp.array([0.3, 0.3]))                                 # {"w": [2, 4]}
    params = merge(base, vectors, values(raw, layout, jnp.array([0.3, 0.3])), layout)

The gradient in α is one inner product with the gradient in θ for each piece and expert; no gradient of the size of the
task vectors is kept.

Reference: section 3 of Zhang et al. 2026, Expert Merging, arXiv 2509.25712.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, PyTree

from jaxlab.editing.task_vectors import TaskVectors, apply

__all__ = [
    "STACKED",
    "Coefficients",
    "Layout",
    "Leaf",
    "chunk_sizes",
    "distance_to_anchor",
    "initial",
    "merge",
    "tensor_layout",
    "values",
]

_AT_ANCHOR = 1e-4

STACKED = r"(^|/)layers?/(?!\d)"
"""Paths of leaves that stack blocks: those below ``layers`` that do not go on with a number."""


@dataclass(frozen=True)
class Leaf:
    """One leaf of the parameters: one tensor, or one for each of the blocks it stacks.

    Attributes:
      path: of the leaf.
      shape: of the leaf.
      stacked: the first axis counts blocks.
      pieces: of each tensor; 0 where its coefficients are frozen.
    """

    path: str
    shape: tuple[int, ...]
    stacked: bool
    pieces: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of one tensor."""
        return math.prod(self.shape[1:] if self.stacked else self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """Of its tensors: the number of the block goes where a checkpoint has it."""
        if not self.stacked:
            return (self.path,)
        found = re.search(STACKED, self.path)
        head, tail = (self.path[: found.end()], "/" + self.path[found.end() :]) if found else (f"{self.path}/", "")
        return tuple(f"{head}{i}{tail}" for i in range(len(self.pieces)))

    @property
    def slots(self) -> np.ndarray:
        """Coefficients of each tensor, the one of a frozen tensor too."""
        return np.maximum(self.pieces, 1)

    @property
    def trained(self) -> np.ndarray:
        """Which coefficients are trained, in the order of tensors and pieces."""
        return np.repeat(np.asarray(self.pieces) > 0, self.slots)


@dataclass(frozen=True)
class Layout:
    """How the coefficients of one expert are laid out. Hashable, so that it may be a static argument of jit."""

    leaves: tuple[Leaf, ...]

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return sum(len(leaf.pieces) for leaf in self.leaves)

    @property
    def trained(self) -> int:
        """Coefficients of one expert that are trained."""
        return sum(sum(leaf.pieces) for leaf in self.leaves)


@struct.dataclass
class Coefficients:
    """Coefficients with what they belong to.

    Attributes:
      alpha: from path to ``[K, c]``: the pieces of the first tensor, of the second, and so on; frozen ones too.
      layout: where they lie; static.
    """

    alpha: dict[str, Float[Array, "k c"]]
    layout: Layout = struct.field(pytree_node=False)

    def of_tensors(self) -> dict[str, Array]:
        """Mean coefficient of each tensor, weighted by the sizes of the pieces: ``[K]``, or ``[K, layers]``.

        These are scales as `jaxlab.editing.task_vectors.apply` takes them; without pieces they give the same model.
        """
        found = {}
        for leaf in self.layout.leaves:
            sizes = np.concatenate([chunk_sizes(leaf.size, int(m)) for m in leaf.slots]) / leaf.size
            owner = np.repeat(np.arange(len(leaf.pieces)), leaf.slots)
            means = (self.alpha[leaf.path] * sizes) @ (owner[:, None] == np.arange(len(leaf.pieces)))
            found[leaf.path] = means if leaf.stacked else means[:, 0]
        return found

    def by_name(self) -> dict[str, list[list[float]]]:
        """From the name of each tensor to its ``[K][pieces]``, ready for JSON."""
        found: dict[str, list[list[float]]] = {}
        for leaf in self.layout.leaves:
            parts = np.split(np.asarray(self.alpha[leaf.path], np.float64), np.cumsum(leaf.slots)[:-1], axis=1)
            found |= {name: part.tolist() for name, part in zip(leaf.names, parts, strict=True)}
        return found


def chunk_sizes(size: int, pieces: int) -> np.ndarray:
    """Lengths of the pieces of ``size`` elements, as ``torch.chunk`` has them: there may be fewer than asked for.

    Raises:
      ValueError: a size or number of pieces below one.
    """
    if size < 1 or pieces < 1:
        raise ValueError(f"size and pieces must be at least 1, got {size} and {pieces}")
    length = -(-size // pieces)
    return np.minimum(length, size - length * np.arange(-(-size // length)))


def tensor_layout(
    vectors: Mapping[str, Any],
    *,
    chunks: int | Mapping[str, Any] = 1,
    stacked: str = STACKED,
) -> Layout:
    """Lay out the coefficients of task vectors.

    Args:
      vectors: τ, or their shapes.
      chunks: pieces m of every tensor; or from path to its number, or to one for each stacked block. 0 freezes.
      stacked: regular expression for the paths of leaves that stack blocks on their first axis.

    Raises:
      ValueError: a path that is in one of ``vectors`` and ``chunks`` only, another number of blocks, a negative number
        of pieces or one above the elements of a tensor, or nothing that is trained.
    """
    if not vectors:
        raise ValueError("there must be at least one tensor to merge, got none")
    if isinstance(chunks, Mapping) and chunks.keys() != vectors.keys():
        raise ValueError(f"chunks must have the paths of the vectors; {min(chunks.keys() ^ vectors.keys())} differs")
    leaves = []
    for path, vector in vectors.items():
        shape = tuple(vector.shape[1:])
        is_stacked = bool(re.search(stacked, path)) and len(shape) > 0
        layers = shape[0] if is_stacked else 1
        wanted = np.asarray(chunks[path] if isinstance(chunks, Mapping) else chunks)
        if wanted.ndim > 1 or (wanted.ndim == 1 and wanted.shape != (layers,)):
            raise ValueError(f"chunks of {path} must be a number or {layers} of them, got {list(wanted.shape)}")
        size = math.prod(shape[1:] if is_stacked else shape)
        if wanted.min() < 0 or wanted.max() > size:
            raise ValueError(f"chunks of {path} must lie between 0 and its {size} elements, got {wanted.tolist()}")
        pieces = tuple(len(chunk_sizes(size, int(m))) if m else 0 for m in np.broadcast_to(wanted, (layers,)))
        leaves.append(Leaf(path, shape, is_stacked, pieces))
    layout = Layout(tuple(leaves))
    if layout.trained == 0:
        raise ValueError("all tensors are frozen: nothing is left to train; raise the budget or min_chunks")
    return layout


def initial(layout: Layout, anchor: Any, *, squash: str = "sigmoid") -> dict[str, Float[Array, "k c"]]:
    """The raw coefficients a at which every α_k is the anchor ᾱ_k, ``[K]``; frozen ones have none.

    Raises:
      ValueError: an anchor that ``squash`` cannot give, or an unknown ``squash``.
    """
    _check_anchor(anchor, squash)
    anchor = jnp.asarray(anchor, jnp.float32)
    if squash == "sigmoid":
        anchor = jnp.log(anchor) - jnp.log1p(-anchor)
    elif squash == "softplus":
        anchor = anchor + jnp.log(-jnp.expm1(-anchor))
    count = {leaf.path: sum(leaf.pieces) for leaf in layout.leaves}
    return {path: jnp.broadcast_to(anchor[:, None], (len(anchor), c)) for path, c in count.items() if c}


def values(
    raw: Mapping[str, Float[Array, "k c"]],
    layout: Layout,
    anchor: Float[Array, " k"],
    *,
    squash: str = "sigmoid",
) -> dict[str, Float[Array, "k c"]]:
    """The coefficients α of `Coefficients` at raw ones: squashed where trained, the anchor where frozen."""
    give = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus, "none": lambda a: a}[squash]
    found = {}
    for leaf in layout.leaves:
        trained = leaf.trained
        frozen = jnp.asarray(anchor)[:, None]
        if not trained.any():
            found[leaf.path] = jnp.broadcast_to(frozen, (len(frozen), len(trained)))
        elif trained.all():
            found[leaf.path] = give(raw[leaf.path])
        else:
            places = np.where(trained, np.cumsum(trained) - 1, trained.sum())
            found[leaf.path] = jnp.concatenate([give(raw[leaf.path]), frozen], 1)[:, places]
    return found


def distance_to_anchor(
    alpha: Mapping[str, Float[Array, "k c"]],
    layout: Layout,
    anchor: Float[Array, " k"],
    *,
    kind: str = "paper",
) -> Float[Array, ""]:
    """The regulariser R: mean of ``|α - ᾱ_k|`` over the coefficients that are trained.

    A coefficient less than 1e-4 from its anchor counts as being there: its slope would be the sign of a rounding, which
    an optimiser like Adam turns into whole steps.

    Args:
      alpha: α as `values` gives them.
      layout: of α.
      anchor: ᾱ, ``[K]``.
      kind: "paper", or "release", K times that, as in the authors' code.
    """
    total: Any = 0.0
    for leaf in layout.leaves:
        gaps = jnp.abs(alpha[leaf.path] - anchor[:, None])
        total = total + jnp.where(leaf.trained & (gaps > _AT_ANCHOR), gaps, 0.0).sum()
    return total / (layout.trained * (1 if kind == "release" else len(anchor)))


def merge(base: PyTree, vectors: TaskVectors, alpha: Mapping[str, Float[Array, "k c"]], layout: Layout) -> PyTree:
    """``θ₀ + Σ_k Σ_s α_{k,s} τ_{k,s}``: pure, differentiable in α; results have the dtypes of the base.

    Raises:
      ValueError: vectors that do not fit the base.
    """
    changes = {leaf.path: _weighted(leaf, vectors[leaf.path], alpha[leaf.path])[None] for leaf in layout.leaves}
    return apply(base, changes, 1.0)


@functools.partial(jax.checkpoint, static_argnums=0)
def _weighted(leaf: Leaf, vector: Float[Array, "k ..."], alpha: Float[Array, "k c"]) -> Array:
    """``Σ_k α_k τ_k`` of one leaf. Tensors with the same number of pieces are one array operation."""
    slots = leaf.slots
    begins = np.cumsum(slots) - slots
    flat = vector.reshape(vector.shape[0], len(slots), leaf.size)
    parts, order = [], []
    for m in np.unique(slots):
        rows = np.flatnonzero(slots == m)
        chosen = flat if len(rows) == len(slots) else flat[:, rows]
        scale = alpha[:, begins[rows, None] + np.arange(m)]
        length = -(-leaf.size // int(m))
        padded = jnp.pad(chosen, ((0, 0), (0, 0), (0, int(m) * length - leaf.size)))
        pieces = padded.reshape(*chosen.shape[:2], int(m), length)
        total = (scale[..., None] * pieces).sum(0)
        parts.append(total.reshape(len(rows), -1)[:, : leaf.size])
        order.append(rows)
    whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts)[np.argsort(np.concatenate(order))]
    return whole.reshape(leaf.shape)


def _check_anchor(anchor: Any, squash: str) -> None:
    if squash not in ("sigmoid", "softplus", "none"):
        raise ValueError(f"squash must be 'sigmoid', 'softplus' or 'none', got {squash!r}")
    if jnp.ndim(anchor) != 1:
        raise ValueError(f"anchor must have one number an expert, got shape {list(jnp.shape(anchor))}")
    if isinstance(anchor, jax.core.Tracer):
        return
    found = np.asarray(anchor, np.float64)
    low, high = {"sigmoid": (0, 1), "softplus": (0, np.inf), "none": (-np.inf, np.inf)}[squash]
    if not ((found > low) & (found < high)).all():
        raise ValueError(f"with squash {squash!r} the anchor must lie strictly in ({low}, {high}), got {anchor}")
