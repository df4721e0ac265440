"""Blocks taken out for good: fewer parameters, fewer keys and values in the cache, the same numbers as masking them.

The blocks that stay move together, so that their indices, and with them the slots of a cache, run from 0. Rotary
positions belong to tokens and stay. Whether a block has a sliding window goes with the block: a pattern such as "every
fourth block sees everything" is no pattern any more, but each block does what it did.

Example::

    pruned = prune_model(load("smollm2-135m-instruct"), [12, 13, 16])
    save("pruned", pruned)                                       # AutoModelForCausalLM.from_pretrained("pruned")
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PyTree

from jaxlab.compress.selection import check_removal
from jaxlab.nn.checkpoints import Model

__all__ = ["prune_config", "prune_model", "prune_stacked"]


def prune_stacked(blocks: PyTree, remove: Sequence[int] | Int[np.ndarray, " n"]) -> PyTree:
    """Take blocks out of parameters that are stacked on a leading axis, or out of a list or tuple of blocks.

    Raises:
      ValueError: if leading axes differ, a block does not exist or is named twice, or none would be left.
    """
    if isinstance(blocks, list | tuple) and not hasattr(blocks, "_fields"):
        kept = _kept(len(blocks), remove)
        return type(blocks)(blocks[index] for index in kept)
    depths = {jax.tree_util.keystr(path): leaf.shape[:1] for path, leaf in jax.tree.leaves_with_path(blocks)}
    (first, depth), *rest = depths.items()
    for path, other in rest:
        if other != depth:
            raise ValueError(f"stacked blocks must have one leading axis: {first} has {depth}, {path} has {other}")
    kept = _kept(depth[0] if depth else 0, remove)
    return jax.tree.map(lambda leaf: leaf[kept], blocks)


def prune_config(config: Any, remove: Sequence[int] | Int[np.ndarray, " n"]) -> Any:
    """The config of the smaller network: any dataclass with ``num_layers``, and ``layer_types`` where it has them.

    Raises:
      ValueError: as `prune_stacked`.
    """
    kept = _kept(config.num_layers, remove)
    changes: dict[str, Any] = {"num_layers": len(kept)}
    if getattr(config, "layer_types", None) is not None:
        changes["layer_types"] = tuple(config.layer_types[index] for index in kept)
    return dataclasses.replace(config, **changes)


def prune_model(model: Model, remove: Sequence[int] | Int[np.ndarray, " n"]) -> Model:
    """The smaller model, with the tokenizer of the whole one.

    Raises:
      ValueError: as `prune_stacked`; or if the model has several towers of blocks.
    """
    if len(model.family.blocks) != 1:
        raise ValueError(
            f"a model with blocks at {', '.join(model.family.blocks)} cannot be pruned; one stack is needed"
        )
    config = prune_config(model.config, remove)
    *parents, last = model.family.blocks[0].split("/")
    params = dict(model.params)
    node = params
    for part in parents:
        node[part] = dict(node[part])
        node = node[part]
    node[last] = prune_stacked(node[last], remove)
    return dataclasses.replace(model, config=config, params=params, source=None)


def _kept(depth: int, remove: Sequence[int] | Int[np.ndarray, " n"]) -> np.ndarray:
    removed = [int(block) for block in remove]
    if outside := [block for block in removed if not 0 <= block < depth]:
        raise ValueError(f"blocks to remove must be between 0 and {depth - 1}; got {outside[0]}")
    if len(set(removed)) < len(removed):
        raise ValueError(f"blocks to remove must differ; got {removed}")
    check_removal(depth, len(removed))
    return np.setdiff1d(np.arange(depth), removed)
