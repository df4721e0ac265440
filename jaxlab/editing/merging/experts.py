"""The models that are merged, as files: whole checkpoints, or LoRA adapters of the base."""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.nn.checkpoints import Tensors, load_adapters, locate, open_tensors
from jaxlab.nn.lora import factors_of, place
from jaxlab.nn.untrusted import read_object, refused

__all__ = ["Base", "Expert", "check_experts", "open_base", "open_expert"]


@dataclasses.dataclass(frozen=True)
class Base:
    """A Hugging Face folder that is opened and not read.

    Attributes:
      folder: where it lies.
      settings: of its ``config.json``.
      tensors: by name, read when asked for.
      superfluous: names that are not written: the head of a model that ties it to the embeddings.
    """

    folder: Path
    settings: Mapping[str, Any]
    tensors: Tensors
    superfluous: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Expert:
    """A model trained from the base.

    Attributes:
      name: for messages.
      folder: where it lies.
      specs: shape and dtype of its tensors; for adapters, of those that they change.
      read: gives a tensor; for adapters its change ``s B A`` in float32, made when asked for.
      is_difference: ``read`` gives changes, and what is not in ``specs`` is unchanged.
    """

    name: str
    folder: Path
    specs: Mapping[str, jax.ShapeDtypeStruct]
    read: Callable[[str], np.ndarray]
    is_difference: bool = False


def open_base(model: str | Path, *, download: bool = False) -> Base:
    """Open the model that experts were trained from.

    Args:
      model: a Hugging Face folder, or ``OWNER/NAME`` on the hub.
      download: fetch what is not on this machine.

    Raises:
      FileNotFoundError: no such folder, no ``config.json`` or no tensors in it.
      ValueError: a damaged file, pickles, quantised weights.
    """
    folder = locate(model, download=download)
    settings = _settings(folder)
    tensors = open_tensors(folder)
    tied = bool(settings.get("tie_word_embeddings")) and any(re.search("embed_tokens|wte", name) for name in tensors)
    heads = frozenset(name for name in tensors if tied and re.search(_HEAD, name))
    return Base(folder, settings, tensors, heads)


def open_expert(model: str | Path, base: Base, *, download: bool = False) -> Expert:
    """Open a model that was trained from the base: a Hugging Face folder, or one with LoRA adapters as PEFT has them.

    Raises:
      FileNotFoundError, ValueError: as `open_base`; adapters that are no plain LoRA or do not fit the base.
    """
    folder = locate(model, download=download)
    if folder.is_dir() and (folder / "adapter_config.json").is_file():
        return _open_adapters(str(model), folder, base)
    _settings(folder)
    tensors = open_tensors(folder)
    return Expert(str(model), folder, tensors.specs, tensors.__getitem__)


def check_experts(base: Base, experts: Sequence[Expert], merged: Iterable[str]) -> list[str]:
    """Compare the experts with the base.

    Args:
      base: what they were trained from.
      experts: at least one.
      merged: names of the tensors that shall be merged.

    Returns:
      What to warn of: tensors that are not merged and have another shape or are missing, heads that the base has not.

    Raises:
      ValueError: no expert, or one that lacks a tensor that is merged, has one more than the base, or another shape or
        kind of numbers; names the expert, the tensor and both shapes.
    """
    if not experts:
        raise ValueError("there must be at least one expert, got none")
    known, chosen, notes = base.tensors.specs, set(merged), []
    for expert in experts:
        for name in () if expert.is_difference else sorted(chosen - expert.specs.keys()):
            raise ValueError(f"expert {expert.name} lacks the tensor {name} of the base")
        for name in () if expert.is_difference else sorted(known.keys() - expert.specs.keys() - base.superfluous):
            if not re.search(_BUFFER, name):
                notes.append(f"expert {expert.name} lacks {name}: the base's is kept")
        for name, spec in expert.specs.items():
            if name not in known:
                if base.settings.get("tie_word_embeddings") and re.search(_HEAD, name):
                    notes.append(f"{name} of expert {expert.name} is left out: the base ties it to its embeddings")
                elif not re.search(_BUFFER, name):
                    raise ValueError(f"expert {expert.name} has the tensor {name}, which the base lacks")
                continue
            if spec.shape != known[name].shape:
                shapes = f"{list(spec.shape)}, but {list(known[name].shape)} in the base"
                if name in chosen:
                    raise ValueError(f"expert {expert.name}: {name} has shape {shapes}")
                notes.append(f"{name} of expert {expert.name} has shape {shapes}: the base's is kept")
            elif name in chosen and not jnp.issubdtype(spec.dtype, jnp.floating):
                raise ValueError(f"expert {expert.name}: {name} must hold floating-point numbers, got {spec.dtype}")
    return notes


_HEAD = r"(^|\.)lm_head\.weight$"
_BUFFER = r"\.rotary_emb\.inv_freq$"


def _settings(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; models are merged as Hugging Face folders")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it is no Hugging Face checkpoint, or not a whole one")
    settings = read_object(folder / "config.json")
    if settings.get("quantization_config"):
        raise ValueError(f"{folder} holds quantised weights, which cannot be merged; take the unquantised ones")
    return settings


def _open_adapters(name: str, folder: Path, base: Base) -> Expert:
    # Adapters are read for a network with stacked blocks: the names of the base, with the first number as an axis.
    sizes: dict[str, dict[int | None, str]] = collections.defaultdict(dict)
    for tensor in base.tensors:
        path, block = _place(tensor)
        sizes[path][block] = tensor
    specs = base.tensors.specs
    shapes: dict[str, Any] = {}
    for path, names in sizes.items():
        alike = {specs[tensor].shape for tensor in names.values()}
        if len(alike) > 1 or (None in names and len(names) > 1):
            continue
        shape = alike.pop()
        stacked = shape if None in names else (1 + max(block for block in names if block is not None), *shape)
        with refused(base.folder):
            place(shapes, path, jax.ShapeDtypeStruct(stacked, jnp.float32))
    adapters = load_adapters(folder, shapes)
    pairs: dict[str, tuple[np.ndarray, np.ndarray, float]] = {}
    for target in adapters.targets:
        down, up = (np.asarray(factor) for factor in factors_of(adapters, target))
        in_blocks = down.ndim == 3
        for block, (rank, scale) in enumerate(zip(target.ranks, adapters.scales(target), strict=True)):
            if rank:
                changes = sizes[f"{target.path}/weight"].get(block if in_blocks else None)
                if changes is None:
                    raise ValueError(f"{folder} changes {target.path} of block {block}, which the base lacks")
                pair = (down[block, :rank], up[block, :, :rank]) if in_blocks else (down, up)
                pairs[changes] = (*pair, float(scale))

    def read(tensor: str) -> np.ndarray:
        down, up, scale = pairs[tensor]
        return (scale * up.astype(np.float32)) @ down.astype(np.float32)

    changed = {tensor: jax.ShapeDtypeStruct(specs[tensor].shape, jnp.float32) for tensor in pairs}
    return Expert(name, folder, changed, read, is_difference=True)


def _place(name: str) -> tuple[str, int | None]:
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal() and len(part) < 6]
    block = int(parts[numbers[0]]) if numbers else None
    return "/".join(part for i, part in enumerate(parts) if i not in numbers[:1]), block
