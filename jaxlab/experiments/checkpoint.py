"""The state of one loop on disk, through orbax.

A checkpoint holds the carry after the last finished chunk and the outputs of all finished ones. A newer one replaces
the older only once it is complete, so that a process killed at any moment leaves one that restores.
"""

import functools
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

__all__ = ["LoopCheckpoint", "LoopState", "settle"]


class LoopState(NamedTuple):
    """Where a loop stands: the carry after ``len(outputs)`` chunks, and the output of each as numpy arrays."""

    carry: PyTree
    outputs: list[Any]

    def advance(self, name: str, carry: PyTree, output: PyTree) -> "LoopState":
        """One more chunk, of the same structure, shapes and dtypes as those before.

        Raises:
          RuntimeError: the body changed the structure of the carry, or its output cannot be stacked or stored.
        """
        before: Any = jax.tree.structure(self.carry)
        if jax.tree.structure(carry) != before:
            raise RuntimeError(f"loop {name!r}: the body changes the structure of its carry")
        if self.outputs and _signature(output) != _signature(self.outputs[0]):
            raise RuntimeError(f"loop {name!r}: an output differs in structure, shape or dtype from the one before")
        if not self.outputs:
            _encode_structure(name, output)
        return LoopState(carry, [*self.outputs, output])

    @property
    def donated(self) -> bool:
        """Whether the carry was given away to a computation that did not return."""
        return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.carry))


class LoopCheckpoint:
    """The checkpoint of one loop in its own directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()

    def save(self, state: LoopState) -> None:
        """Store the state; the previous one goes when this one is complete."""
        tree = {
            "carry": jax.tree.leaves(state.carry),
            "outputs": [np.stack(leaves) for leaves in zip(*map(jax.tree.leaves, state.outputs), strict=True)],
            "structure": _encode_structure(self._directory.name, state.outputs[0]),
        }
        length = len(state.outputs)
        for stale in self._directory.glob("*.crc32"):
            stale.unlink()
        with self._manager() as manager:
            manager.save(length, args=ocp.args.StandardSave(tree))
        self._checksum(length).write_text(f"{_crc32(self._directory / str(length))}\n")

    def restore(self, init: PyTree) -> LoopState | None:
        """The newest complete state, its carry in the structure of ``init``; None if there is none.

        Raises:
          ValueError: the checkpoint is damaged, or its carry has other shapes than ``init``. Nothing is deleted.
        """
        if not self._directory.is_dir():
            return None
        init = settle(init)
        try:
            with self._manager() as manager:
                length = manager.latest_step()
                if length is None:
                    return None
                # Told before orbax reads it: the reads it has in flight when one fails print their own tracebacks.
                checksum = self._checksum(length)
                if checksum.exists() and int(checksum.read_text()) != _crc32(self._directory / str(length)):
                    raise ValueError("its files are not those that were written")
                tree = manager.restore(length, args=ocp.args.StandardRestore())
            carry = jax.tree.unflatten(jax.tree.structure(init), tree["carry"])
            structure = _decode_structure(tree["structure"])
            outputs = [
                jax.tree.unflatten(structure, [np.asarray(leaf[i]) for leaf in tree["outputs"]]) for i in range(length)
            ]
        except Exception as error:  # orbax and tensorstore raise whatever broke first
            raise ValueError(
                f"checkpoint {self._directory} cannot be restored; remove that directory to compute this loop anew "
                f"({' '.join(str(error).split())[:200]})"
            ) from error
        stored, wanted = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (carry, init))
        if stored != wanted:
            raise ValueError(f"checkpoint {self._directory} is of another config: its carry has shapes {stored}")
        return LoopState(carry, outputs)

    def _checksum(self, length: int) -> Path:
        return self._directory / f"{length}.crc32"

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self._directory, options=options)


def settle(tree: PyTree) -> PyTree:
    """The tree with arrays for leaves, none of them weakly typed.

    A weak type does not survive a checkpoint, and a resumed loop could then promote to another dtype than a fresh one.
    """

    def leaf(x: Any) -> Any:
        if isinstance(x, jax.Array):
            return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x
        return np.asarray(x)

    return jax.tree.map(leaf, tree)


def _crc32(directory: Path) -> int:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return functools.reduce(lambda crc, path: zlib.crc32(path.read_bytes(), crc), files, 0)


def _signature(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _encode_structure(name: str, output: PyTree) -> np.ndarray:
    structure: Any = jax.tree.structure(output)
    try:
        return np.frombuffer(structure.serialize_using_proto(), np.uint8)
    except ValueError as error:
        raise RuntimeError(
            f"loop {name!r}: an output is made of arrays, dicts, lists and tuples, got {structure}; "
            "return info._asdict() for a NamedTuple"
        ) from error


def _decode_structure(encoded: np.ndarray) -> jax.tree_util.PyTreeDef:
    return jax.tree_util.PyTreeDef.deserialize_using_proto(jax.tree_util.default_registry, encoded.tobytes())
