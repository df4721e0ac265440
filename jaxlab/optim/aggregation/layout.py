"""Stacked messages as a few matrices ``[workers, numbers]``, on one device or over a mesh axis.

On one device a block is a leaf, flattened. Over a mesh axis ``all_to_all`` turns "all numbers of my workers" into "my
share of the numbers of all workers": every device then holds ``[workers, numbers / devices]``, works on its columns,
and the aggregate is put together by one ``all_gather``. A device sends and receives ``O(numbers)``, not
``O(workers * numbers)``.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from jaxlab.optim.mixing.mixer import BUCKET_LIMIT, axis_size

__all__ = ["Layout", "from_blocks", "layout_of", "server_blocks", "worker_blocks"]


class Layout(NamedTuple):
    """How a tree is cut into blocks.

    Attributes:
      structure: of the tree.
      shapes, dtypes: of one worker's leaves.
      groups: indices of the leaves that share a block; small leaves of one dtype travel together.
      n_workers: in the whole network.
      axis_name: mesh axis that carries the workers, or None.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    groups: tuple[tuple[int, ...], ...]
    n_workers: int
    axis_name: str | None


def layout_of(stacked: PyTree, axis_name: str | None = None) -> Layout:
    """Check stacked messages and cut them into blocks.

    Raises:
      ValueError: if there is no leaf, no worker, or a leaf without the leading axis of the others, naming it.
      TypeError: if a leaf is not real and floating, naming it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(stacked)
    if not leaves:
        raise ValueError("nothing to aggregate: the tree of messages has no leaves")
    sizes = [jnp.shape(leaf)[:1] for _, leaf in leaves]
    for (key_path, leaf), size in zip(leaves, sizes, strict=True):
        name = jax.tree_util.keystr(key_path) or "the tree"
        if not size or size != sizes[0]:
            raise ValueError(
                f"every leaf needs the same leading axis of workers; {name} has shape {jnp.shape(leaf)}, "
                f"the first leaf {jnp.shape(leaves[0][1])}"
            )
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(f"only real floating leaves can be aggregated; {name} has dtype {jnp.result_type(leaf)}")
    devices = 1 if axis_name is None else axis_size(axis_name)
    n_workers = sizes[0][0] * devices
    if n_workers < 1:
        raise ValueError("there must be at least 1 worker, got leaves with a leading axis of 0")
    shapes = tuple(tuple(jnp.shape(leaf)[1:]) for _, leaf in leaves)
    dtypes = tuple(jnp.result_type(leaf) for _, leaf in leaves)
    groups: list[list[int]] = []
    small: dict[Any, list[int]] = {}
    for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        if np.prod(shape, dtype=int) < BUCKET_LIMIT:
            small.setdefault(dtype, []).append(index)
        else:
            groups.append([index])
    cut = tuple(tuple(group) for group in [*groups, *small.values()])
    return Layout(jax.tree.structure(stacked), shapes, dtypes, cut, n_workers, axis_name)


def worker_blocks(layout: Layout, stacked: PyTree) -> list[Array]:
    """Blocks ``[n_workers, numbers]`` of the messages; over a mesh axis this device's share of the numbers."""
    leaves = jax.tree.leaves(stacked)
    blocks = [_side_by_side([_rows(leaves[index]) for index in group]) for group in layout.groups]
    if layout.axis_name is None:
        return blocks
    return [_exchange(block, layout.axis_name) for block in blocks]


def server_blocks(layout: Layout, tree: PyTree) -> list[Array]:
    """Blocks ``[numbers]`` of a tree that every device holds whole, cut like the messages."""
    leaves = jax.tree.leaves(tree)
    blocks = [_side_by_side([_rows(leaves[index][None]) for index in group])[0] for group in layout.groups]
    if layout.axis_name is None:
        return blocks
    axis_name = layout.axis_name
    return [
        lax.dynamic_index_in_dim(_pad(block[None], axis_name)[0], lax.axis_index(axis_name), keepdims=False)
        for block in blocks
    ]


def from_blocks(layout: Layout, blocks: list[Array], *, wide: bool = False) -> PyTree:
    """A tree of one worker's shape of blocks ``[numbers]``, in the messages' dtypes or (``wide``) the blocks'."""
    if layout.axis_name is not None:
        # The same on all devices and marked so: what follows is the server's work, which every device repeats.
        blocks = [lax.all_gather(block, layout.axis_name, tiled=True, to="invarying") for block in blocks]
    leaves: list[Any] = [None] * len(layout.shapes)
    for group, block in zip(layout.groups, blocks, strict=True):
        sizes = [int(np.prod(layout.shapes[index], dtype=int)) for index in group]
        ends = np.cumsum(sizes)
        for index, size, end in zip(group, sizes, ends, strict=True):
            part = lax.slice_in_dim(block, int(end) - size, int(end)).reshape(layout.shapes[index])
            leaves[index] = part if wide else part.astype(layout.dtypes[index])
    return jax.tree.unflatten(layout.structure, leaves)


def _rows(leaf: Any) -> Array:
    leaf = jnp.asarray(leaf)
    return leaf.reshape(leaf.shape[0], int(np.prod(leaf.shape[1:], dtype=int)))


def _side_by_side(rows: list[Array]) -> Array:
    return jnp.concatenate(rows, axis=1) if len(rows) > 1 else rows[0]


def _pad(block: Array, axis_name: str) -> Array:
    """``[rows, numbers]`` to ``[rows, devices, share]``; zeros at the end, which no norm or distance sees."""
    devices = axis_size(axis_name)
    share = -(-block.shape[1] // devices)
    padded = jnp.pad(block, ((0, 0), (0, share * devices - block.shape[1])))
    return padded.reshape(block.shape[0], devices, share)


def _exchange(block: Array, axis_name: str) -> Array:
    mine = lax.all_to_all(_pad(block, axis_name), axis_name, split_axis=1, concat_axis=0, tiled=True)
    return mine.reshape(-1, mine.shape[-1])
