"""Parameters and optimiser state on disk, through orbax, from any sharding to any other.

Every process writes the shards it holds, and a state may be restored onto more, fewer or other devices: what is
restored takes shapes, dtypes and shardings from the tree that it is to replace. Any pytree of arrays will do::

    save_state("run/step-1000", {"params": params, "optimiser": optimiser_state})
    like = jax.eval_shape(init_state, key)                                  # no memory is needed for it
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), like)
    state = restore_state("run/step-1000", like)
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from jaxlab.nn.checkpoints.reading import path_of

__all__ = ["restore_state", "save_state"]


def save_state(directory: str | Path, state: PyTree, *, overwrite: bool = False) -> None:
    """Write a tree of arrays; the directory appears when it is complete.

    Args:
      directory: must not exist, unless ``overwrite``.
      state: arrays, on one device or sharded.
      overwrite: replace the directory.

    Raises:
      FileExistsError: if the directory exists and ``overwrite`` is false.
    """
    directory = Path(directory).absolute()
    if directory.exists() and not overwrite:
        raise FileExistsError(f"{directory} exists; say overwrite=True to replace it")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, state, force=overwrite)


def restore_state(directory: str | Path, like: PyTree) -> PyTree:
    """Read what `save_state` wrote.

    Args:
      directory: what was written.
      like: tree of the same structure, of arrays or of `jax.ShapeDtypeStruct`; their shardings say where each leaf
        goes. Without one it goes to the first device.

    Raises:
      FileNotFoundError: if there is no such directory.
      ValueError: if it holds another structure or other shapes, or is damaged.
    """
    directory = Path(directory).absolute()
    if not directory.is_dir():
        raise FileNotFoundError(f"no saved state at {directory}")
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def target(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=default if sharding is None else sharding)

    wanted = jax.tree.map(target, like)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            # Told before orbax reads: the reads it has in flight when one fails print their own tracebacks.
            _check_fits(_shapes(checkpointer.metadata(directory).item_metadata.tree), _shapes(wanted))
            return checkpointer.restore(directory, wanted)
    except Exception as error:  # orbax and tensorstore raise whatever broke first
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{directory} cannot be restored as this state: {reason}") from error


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(tree)
    return {path_of(keys): tuple(leaf.shape) for keys, leaf in leaves if hasattr(leaf, "shape")}


def _check_fits(stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
    for path in sorted(stored.keys() | wanted.keys()):
        if path not in stored:
            raise ValueError(f"it has no {path}")
        if path not in wanted:
            raise ValueError(f"it has {path}, which is not asked for")
        if stored[path] != wanted[path]:
            raise ValueError(f"its {path} has shape {stored[path]}, not {wanted[path]}")
