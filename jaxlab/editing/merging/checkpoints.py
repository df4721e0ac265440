"""Merging checkpoints that are larger than memory: tensor by tensor, from files to files.

What treats every number by itself (`MergeMethod.blockwise`) needs memory for two tensors of the result and a few pieces
of each model; other methods hold one tensor of each model, in float32. What TIES takes from all tensors together is
found in passes of its own, before anything is written (`jaxlab.editing.merging.streaming`).

Example::

    base = open_base("llama")
    experts = [open_expert(folder, base) for folder in ("code", "math-lora")]
    names = merged_names(base)
    summary = merge_checkpoints(base, experts, "merged", {name: Ties() for name in names})

A method for each tensor is what learned coefficients need: ``{name: TaskArithmetic(1.0, weights=alpha[name])}``.
"""

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Key

from jaxlab.editing.merging.experts import Base, Expert, check_experts
from jaxlab.editing.merging.method import MergeMethod
from jaxlab.editing.merging.streaming import Stream, TensorSummary
from jaxlab.editing.merging.tree import DEFAULT_EXCLUDE
from jaxlab.editing.task_vectors import Paths, edited_paths
from jaxlab.nn.checkpoints.tensors import Tensors, TensorWriter, check_writable
from jaxlab.nn.tokenizer import TOKENIZER_FILES

__all__ = ["merge_checkpoints", "merge_tensors", "merged_names"]


def merged_names(base: Base, *, include: Paths | None = None, exclude: Paths = DEFAULT_EXCLUDE) -> tuple[str, ...]:
    """Names of the floating-point tensors of the base that patterns choose.

    Raises:
      ValueError: none is left, or a pattern of ``include`` stands for none.
    """
    specs = {name: spec for name, spec in base.tensors.specs.items() if name not in base.superfluous}
    return edited_paths(specs, include=include, exclude=exclude)


def merge_checkpoints(
    base: Base,
    experts: Sequence[Expert],
    directory: str | Path,
    methods: Mapping[str, MergeMethod],
    *,
    dtype: str | None = None,
    key: Key[Array, ""] | None = None,
    max_shard_size: int = 5_000_000_000,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, TensorSummary]:
    """Merge experts into a Hugging Face folder that ``transformers`` loads.

    Settings, tokenizer and whatever small files there are come from the base. ``config.json`` is written last, and
    nothing in the folder is replaced before all tensors are: interrupted, it holds what it held before, or no model.

    Args:
      base: what the experts were trained from.
      experts: K of them.
      directory: folder to write; made if it is missing.
      methods: how each tensor is merged; those that are not in it are the base's. Tensors with the same `Ties` of scope
        "global" are trimmed and elect together.
      dtype: of the floating-point tensors written; None keeps the base's.
      key: of all draws.
      max_shard_size: most bytes of a file.
      overwrite: replace the checkpoint in a folder that is not empty.
      progress: called with the bytes of tensors that are read so far, and of all.

    Returns:
      By name, in the order of the base.

    Raises:
      FileExistsError: the folder is not empty and ``overwrite`` is false.
      ValueError: experts that do not fit the base (`check_experts`), a name that is not in it, a key that is missing, a
        method that needs calibration, an expert or result that is not finite.
    """
    directory = Path(directory)
    if directory.resolve() in {folder.resolve() for folder in (base.folder, *(expert.folder for expert in experts))}:
        raise ValueError(f"{directory} is one of the models that are merged; write elsewhere")
    stream = Stream(base, experts, methods, dtype=dtype, key=key, progress=progress)
    check_experts(base, experts, methods)
    check_writable(directory, overwrite=overwrite)
    stream.look_ahead()
    summary: dict[str, TensorSummary] = {}
    with (
        TensorWriter(directory, stream.written, max_shard_size=max_shard_size, overwrite=overwrite) as writer,
        ThreadPoolExecutor(1) as output,
    ):
        pending: Future[None] | None = None
        for name, tensor, summary[name] in stream.merge():
            if pending is not None:
                pending.result()  # one tensor is written while another is merged, and no more wait
            pending = output.submit(writer.write, name, tensor)
        if pending is not None:
            pending.result()
        (directory / _CONFIG).unlink(missing_ok=True)  # no model is here until all tensors have their names
    _copy_files(base, directory, dtype)
    return summary


def merge_tensors(
    base: Mapping[str, np.ndarray],
    experts: Sequence[Mapping[str, np.ndarray]],
    methods: Mapping[str, MergeMethod],
    *,
    dtype: str | None = None,
    key: Key[Array, ""] | None = None,
) -> dict[str, np.ndarray]:
    """The same for tensors by name that are in memory, such as the NumPy views of PyTorch's state dicts.

    Beyond the result it needs memory for a few pieces only, unlike `jaxlab.editing.merging.merge` on task vectors.

    Raises:
      ValueError: as `merge_checkpoints`.
    """

    def opened(tensors: Mapping[str, np.ndarray]) -> Tensors:
        entries = {
            name: (jax.ShapeDtypeStruct(tensor.shape, tensor.dtype), functools.partial(np.asarray, tensor))
            for name, tensor in tensors.items()
        }
        return Tensors(entries)

    of_base = Base(Path(), {}, opened(base))
    others = [
        Expert(f"experts[{k}]", Path(), found.specs, found.__getitem__) for k, found in enumerate(map(opened, experts))
    ]
    stream = Stream(of_base, others, methods, dtype=dtype, key=key)
    check_experts(of_base, others, methods)
    stream.look_ahead()
    return {name: tensor for name, tensor, _ in stream.merge()}


_CONFIG = "config.json"
# Small files of a model, beside its weights. Code is copied and never run.
_SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
_STALE = (
    *TOKENIZER_FILES,
    "added_tokens.json",
    "generation_config.json",
    "merges.txt",
    "tokenizer.model",
    "vocab.json",
)


def _copy_files(base: Base, directory: Path, dtype: str | None) -> None:
    for name in _STALE:
        (directory / name).unlink(missing_ok=True)
    for file in sorted(base.folder.iterdir()):
        if file.suffix in _SMALL and file.is_file() and file.name != _CONFIG and not file.name.endswith(_INDEX):
            shutil.copyfile(file, directory / file.name)
    settings = dict(base.settings)
    if dtype is not None:
        settings |= {name: dtype for name in ("dtype", "torch_dtype") if name in settings or name == "dtype"}
    unfinished = directory / (_CONFIG + ".partial")
    unfinished.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, directory / _CONFIG)


_INDEX = ".index.json"
