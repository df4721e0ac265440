"""The loss of a network with blocks left out, for many masks: three forms of the same numbers.

* `gate_losses`: every block runs, and a mask chooses between its output and its input. One program for all masks, pure
  and vectorised over masks: for accelerators and small networks.
* `gather_losses`: only the blocks that are kept run, by their indices. One program for each number of kept blocks.
* `prefix_losses`: masks that begin alike share the hidden states of their beginning. The masks are the leaves of a
  tree, walked depth first by one loop whose instructions ("run block l on the state at depth d, and store the result
  at depth d + 1") are data. One program for all masks, no block is run twice, L + 1 hidden states are held.

With a ``mesh`` each device takes its share of the masks, with the parameters whole on every one.

Example::

    stack, batch = decoder_stack(model.config), token_batch(tokens, limit=4)
    losses = prefix_losses(stack, model.params, batch, prefix_program(masks), number=len(masks))     # [n], nats
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxlab.compress.masks import check_masks
from jaxlab.compress.residual_stack import ResidualStack

__all__ = ["PrefixProgram", "gate_losses", "gather_losses", "kept_blocks", "prefix_losses", "prefix_program"]

NO_BLOCK = -1
NO_MASK = -1


class PrefixProgram(NamedTuple):
    """Instructions that evaluate masks depth first; made by `prefix_program`, one row a device.

    Attributes:
      block: block to run, `NO_BLOCK` for none.
      depth: slot of the state that it reads; the result goes to the next slot.
      mask: which mask is complete after it, `NO_MASK` for none.
      length: number of instructions; the rest is padding.
    """

    block: Int[Array | np.ndarray, "d p"]
    depth: Int[Array | np.ndarray, "d p"]
    mask: Int[Array | np.ndarray, "d p"]
    length: Int[Array | np.ndarray, " d"]


@functools.partial(jax.jit, static_argnums=0, static_argnames=("vectorize", "mesh"))
def gate_losses(
    stack: ResidualStack,
    params: PyTree,
    batch: PyTree,
    masks: Bool[Array | np.ndarray, "n l"],
    *,
    vectorize: int = 1,
    mesh: Mesh | None = None,
) -> Float[Array, " n"]:
    """Loss under each mask, all blocks run.

    Args:
      stack: the network; static.
      params: its parameters.
      batch: what it reads.
      masks: True keeps a block. With a mesh their number is a multiple of its size.
      vectorize: masks that are computed at a time; memory grows with it. Static.
      mesh: devices that share the masks, along its only axis. Static.
    """

    def losses(params: PyTree, batch: PyTree, masks: Array) -> Array:
        def loss(mask: Array) -> Array:
            hidden, context = stack.embed(params, batch)

            def step(hidden: Array, xs: tuple[PyTree, Array]) -> tuple[Array, None]:
                block, keep = xs
                # A choice and not a product, for what is left out may be infinite.
                return jnp.where(keep, stack.block(block, hidden, context), hidden), None

            return stack.loss(params, lax.scan(step, hidden, (stack.blocks(params), mask))[0], batch)

        return lax.map(loss, masks, batch_size=vectorize if vectorize > 1 else None)

    return _spread(losses, mesh, params, batch, jnp.asarray(masks))


@functools.partial(jax.jit, static_argnums=0, static_argnames=("vectorize", "mesh"))
def gather_losses(
    stack: ResidualStack,
    params: PyTree,
    batch: PyTree,
    kept: Int[Array | np.ndarray, "n k"],
    *,
    vectorize: int = 1,
    mesh: Mesh | None = None,
) -> Float[Array, " n"]:
    """Loss with the blocks ``kept`` alone, in this order; the other arguments are those of `gate_losses`.

    With ``vectorize`` the parameters of the kept blocks are copied for each mask.
    """

    def losses(params: PyTree, batch: PyTree, kept: Array) -> Array:
        def loss(kept: Array) -> Array:
            hidden, context = stack.embed(params, batch)
            blocks = stack.blocks(params)

            def step(hidden: Array, index: Array) -> tuple[Array, None]:
                return stack.block(jax.tree.map(lambda leaf: leaf[index], blocks), hidden, context), None

            return stack.loss(params, lax.scan(step, hidden, kept)[0], batch)

        return lax.map(loss, kept, batch_size=vectorize if vectorize > 1 else None)

    return _spread(losses, mesh, params, batch, jnp.asarray(kept))


@functools.partial(jax.jit, static_argnums=0, static_argnames=("number", "mesh"))
def prefix_losses(
    stack: ResidualStack,
    params: PyTree,
    batch: PyTree,
    program: PrefixProgram,
    *,
    number: int,
    mesh: Mesh | None = None,
) -> Float[Array, " n"]:
    """Loss under each mask of a program, with what their beginnings share computed once.

    Args:
      stack: the network; static.
      params: its parameters.
      batch: what it reads.
      program: of `prefix_program`, with one row a device.
      number: masks a row has room for; static.
      mesh: devices that share the rows, along its only axis. Static.

    Returns:
      ``[rows · number]``, in the order of the masks of each row; NaN where a row has fewer.
    """

    def losses(params: PyTree, batch: PyTree, program: PrefixProgram) -> Array:
        return lax.map(lambda row: walk(params, batch, row), program).reshape(-1)

    def walk(params: PyTree, batch: PyTree, row: PrefixProgram) -> Array:
        hidden, context = stack.embed(params, batch)
        blocks = stack.blocks(params)
        depth = jax.tree.leaves(blocks)[0].shape[0]
        states = jnp.zeros((depth + 1, *hidden.shape), hidden.dtype).at[0].set(hidden)

        def step(place: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            states, losses = carry
            index, slot, mask = row.block[place], row.depth[place], row.mask[place]

            def run(hidden: Array) -> Array:
                return stack.block(jax.tree.map(lambda leaf: leaf[index], blocks), hidden, context)

            hidden = lax.cond(index >= 0, run, lambda hidden: hidden, states[slot])
            loss = lax.cond(mask >= 0, lambda h: stack.loss(params, h, batch), lambda h: jnp.float32(jnp.nan), hidden)
            # The empty mask runs nothing and must not move the embedding; a negative mask is out of bounds.
            slot = jnp.where(index >= 0, slot + 1, slot)
            states = lax.dynamic_update_index_in_dim(states, hidden, slot, 0)
            return states, losses.at[jnp.where(mask >= 0, mask, number)].set(loss, mode="drop")

        start = (states, jnp.full((number,), jnp.nan, jnp.float32))
        return lax.fori_loop(0, row.length, step, start)[1]

    return _spread(losses, mesh, params, batch, jax.tree.map(jnp.asarray, program))


def prefix_program(masks: Any, *, rows: int = 1, capacity: int | None = None) -> PrefixProgram:
    """Write the instructions for masks that are sorted lexicographically, True first, and all different.

    Args:
      masks: ``[rows · n, L]``; each row of the program takes n of them, one after another.
      rows: number of devices.
      capacity: room for instructions; None means the next power of two, so that few programs are compiled.
    """
    array = check_masks(masks)
    programs = [_instructions(part) for part in np.split(array, rows)]
    longest = max(len(block) for block, _, _ in programs)
    room = 1 << (longest - 1).bit_length() if capacity is None else capacity

    def padded(column: int, fill: int) -> np.ndarray:
        return np.stack(
            [np.pad(program[column], (0, room - len(program[0])), constant_values=fill) for program in programs]
        ).astype(np.int32)

    lengths = np.array([len(block) for block, _, _ in programs], np.int32)
    return PrefixProgram(padded(0, NO_BLOCK), padded(1, 0), padded(2, NO_MASK), lengths)


def kept_blocks(masks: Any) -> Int[np.ndarray, "n k"]:
    """Indices of the kept blocks, for masks that all keep the same number.

    Raises:
      ValueError: if they do not.
    """
    array = check_masks(masks)
    sizes = np.unique(array.sum(1))
    if len(sizes) != 1:
        raise ValueError(f"masks must all keep the same number of blocks; got {sizes.tolist()}")
    return np.nonzero(array)[1].reshape(len(array), int(sizes[0])).astype(np.int32)


def _instructions(masks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block, depth and completed mask of each instruction of one device."""
    differs = masks[1:] != masks[:-1]
    # Blocks kept before the first difference to the mask before are computed already.
    first = np.where(differs.any(1), differs.argmax(1), masks.shape[1])
    before = np.cumsum(masks, axis=1) - masks
    shared = np.concatenate(
        [[0], np.take_along_axis(before[1:], np.minimum(first, masks.shape[1] - 1)[:, None], 1)[:, 0]]
    )
    new = masks & (before >= shared[:, None])
    owner, block = np.nonzero(new)
    depth = before[owner, block]
    # A mask without a block of its own is the beginning of one before it, or empty.
    bare = np.flatnonzero(~new.any(1))
    order = np.argsort(np.concatenate([owner, bare]), kind="stable")
    owner, block, depth = (
        np.concatenate(pair)[order]
        for pair in ((owner, bare), (block, np.full(len(bare), NO_BLOCK)), (depth, masks[bare].sum(1)))
    )
    last = np.append(owner[1:] != owner[:-1], True)
    return block, depth, np.where(last, owner, NO_MASK)


def _spread(losses: Any, mesh: Mesh | None, params: PyTree, batch: PyTree, work: PyTree) -> Array:
    """``losses(params, batch, work)`` with the leading axis of the work split over the devices."""
    if mesh is None:
        return losses(params, batch, work)
    if len(mesh.axis_names) != 1 or mesh.axis_types[0] != AxisType.Auto:
        kinds = ", ".join(f"{name} ({kind.name})" for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True))
        raise ValueError(f"the mesh must have one axis, over masks, of type Auto; got {kinds}")
    split = PartitionSpec(mesh.axis_names[0])
    whole = PartitionSpec()
    return jax.shard_map(losses, mesh=mesh, in_specs=(whole, whole, split), out_specs=split, check_vma=False)(
        params, batch, work
    )
