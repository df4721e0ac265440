"""From named tensors to the stacked parameters of a network, a tensor at a time."""

import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.nn.checkpoints.family import Family
from jaxlab.nn.checkpoints.tensors import Tensors

__all__ = ["parameter_shapes", "path_of", "read_params", "tensor_names"]

ReadSlice = Callable[[Any], np.ndarray]  # of a tuple of slices


def parameter_shapes(family: Family, config: Any) -> dict[str, Any]:
    """The parameters of a network as `jax.ShapeDtypeStruct`, without making any."""
    return jax.eval_shape(lambda key: family.init(config, key)[1], jax.random.key(0))


def tensor_names(family: Family, path: str, shape: tuple[int, ...]) -> list[str]:
    """Names of the tensors that make up the parameter at a path: one for each block, or a single one.

    Args:
      family: the kind of network.
      path: path of the parameter, such as ``model/layers/mlp/up_proj/weight``.
      shape: its shape, the number of blocks first where it is stacked.
    """
    for blocks in family.blocks:
        if path.startswith(blocks + "/"):
            stem, rest = blocks.replace("/", "."), path[len(blocks) :].replace("/", ".")
            return [f"{stem}.{i}{rest}" for i in range(shape[0])]
    return [path.replace("/", ".")]


def path_of(keys: Any) -> str:
    """``a/b/c`` for the key path of a leaf."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def read_params(
    family: Family,
    config: Any,
    tensors: Tensors,
    *,
    sharding: Any = None,
    source: str = "the checkpoint",
) -> dict[str, Any]:
    """Read all parameters, in the ``param_dtype`` of the config.

    Each parameter is made once and filled in place from one tensor after the other, so that the memory needed is that
    of the parameters and one tensor.

    Args:
      family: the kind of network.
      config: its config.
      tensors: of the checkpoint.
      sharding: where the parameters go: a `jax.sharding.Sharding` for all, or a tree of them like the parameters; each
        device then reads its own part. None means the default device.
      source: what an error calls the checkpoint.

    Raises:
      ValueError: if tensors are missing, unexpected, of another shape, naming them and both shapes, or of integers.
    """
    shapes = parameter_shapes(family, config)
    stored = _rename(family, tensors, source)
    leaves = [(path_of(keys), leaf) for keys, leaf in jax.tree.leaves_with_path(shapes)]
    names = {path: tensor_names(family, path, leaf.shape) for path, leaf in leaves}
    _check_names(family, {name for group in names.values() for name in group}, stored, source)
    specs = tensors.specs
    for path, leaf in leaves:
        wanted = leaf.shape if names[path] == [path.replace("/", ".")] else leaf.shape[1:]
        for name in names[path]:
            if specs[stored[name]].shape != wanted:
                raise ValueError(
                    f"tensor {stored[name]} of {source} has shape {specs[stored[name]].shape}, "
                    f"but its config.json asks for {wanted}"
                )
            if not jnp.issubdtype(specs[stored[name]].dtype, jnp.floating):
                raise ValueError(
                    f"tensor {stored[name]} of {source} must hold floating-point numbers; "
                    f"got {specs[stored[name]].dtype}, as a quantised network has"
                )
    made = []
    for (path, leaf), where in zip(leaves, _broadcast(sharding, shapes), strict=True):
        read = [functools.partial(tensors.__getitem__, stored[name]) for name in names[path]]
        read_slice = _whole(read[0], leaf) if names[path] == [path.replace("/", ".")] else _stacked(read, leaf)
        if where is None:
            # The buffer is handed over and not touched again, so that a CPU device can take it as it is.
            made.append(jax.device_put(read_slice(_all(leaf)), may_alias=True))
            continue
        if not tensors.sliceable:
            read_slice = read_slice(_all(leaf)).__getitem__
        made.append(jax.make_array_from_callback(leaf.shape, where, read_slice))
    return jax.tree.unflatten(jax.tree.structure(shapes), made)


def _rename(family: Family, tensors: Tensors, source: str) -> dict[str, str]:
    """Name in the file of each tensor by the name that the family gives it."""
    stored: dict[str, str] = {}
    for name in tensors:
        new = family.read_name(name)
        if new in stored:
            raise ValueError(f"tensors {stored[new]} and {name} of {source} are the same parameter {new}")
        stored[new] = name
    return stored


def _check_names(family: Family, wanted: set[str], stored: Mapping[str, str], source: str) -> None:
    missing = sorted(wanted - stored.keys())
    surplus = [name for name in sorted(stored.keys() - wanted) if not any(re.search(p, name) for p in family.ignored)]
    if missing:
        near = difflib.get_close_matches(missing[0], surplus, n=1)
        hint = f"; it has {near[0]} instead" if near else ""
        raise ValueError(f"{source} lacks {_count(len(missing))}: {_some(missing)}{hint}")
    if surplus:
        raise ValueError(
            f"{source} has {_count(len(surplus))} that the {family.model_type} of its config has not: {_some(surplus)}"
        )


def _count(number: int) -> str:
    return "a tensor" if number == 1 else f"{number} tensors"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _broadcast(sharding: Any, shapes: dict[str, Any]) -> list[Any]:
    leaves = jax.tree.leaves(shapes)
    structure: Any = jax.tree.structure(shapes)
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return [sharding] * len(leaves)
    try:
        return structure.flatten_up_to(sharding)
    except (ValueError, TypeError) as error:
        raise ValueError(f"sharding must be one sharding or a tree of them like the parameters: {error}") from None


def _all(leaf: jax.ShapeDtypeStruct) -> tuple[slice, ...]:
    return (slice(None),) * len(leaf.shape)


def _whole(read: Callable[[], np.ndarray], leaf: jax.ShapeDtypeStruct) -> ReadSlice:
    def read_slice(index: Any) -> np.ndarray:
        part = read()[index]
        buffer = _aligned(part.shape, np.dtype(leaf.dtype))
        buffer[...] = part
        return buffer

    return read_slice


def _stacked(read: Sequence[Callable[[], np.ndarray]], leaf: jax.ShapeDtypeStruct) -> ReadSlice:
    def read_slice(index: Any) -> np.ndarray:
        blocks, *rest = (range(*part.indices(size)) for part, size in zip(index, leaf.shape, strict=True))
        buffer = _aligned((len(blocks), *map(len, rest)), np.dtype(leaf.dtype))
        for row, block in enumerate(blocks):
            buffer[row] = read[block]()[index[1:]]
        return buffer

    return read_slice


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array at an address that XLA's CPU devices use without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


_ALIGNMENT = 64
