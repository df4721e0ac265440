"""Methods of ``jaxlab merge`` whose coefficients are learned on unlabelled texts.

``--calibration`` names files of JSON lines with a field ``text``: one file for each expert, in their order, or a single
one whose lines have a field ``expert`` too (its number from 0, or what was given to ``--expert``). Base and experts are
loaded as decoders to learn the coefficients, the experts one after the other; the merge itself is streamed like any.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlab.editing.expert_merging import (
    Alignment,
    Entropy,
    Recipe,
    allocate_chunks,
    decoder_forward,
    layer_importance,
    pose,
    solve,
    token_batch,
)
from jaxlab.editing.expert_merging.checkpoints import tensor_methods
from jaxlab.editing.merging import Base, Expert, MergeMethod
from jaxlab.nn import lora
from jaxlab.nn.checkpoints import load, load_adapters

__all__ = ["LEARNED", "learn", "read_calibration"]

LEARNED = ("expert-merging", "expert-merging++", "adamerging")


def learn(
    method: str,
    base: Base,
    experts: Sequence[Expert],
    names: Sequence[str],
    calibration: Sequence[Path],
    *,
    length: int = 256,
    anchor: float = 0.3,
    gamma: float | None = None,
    budget: float = 1.2,
    steps: int | None = None,
    dtype: str | None = None,
    inputs_at_once: int = 1,
) -> tuple[dict[str, MergeMethod], dict[str, Any]]:
    """Learn coefficients of a model in files.

    Args:
      method: one of `LEARNED`.
      base: opened.
      experts: opened.
      names: of the tensors that may be merged.
      calibration: files of texts.
      length: most tokens of a text.
      anchor: ᾱ.
      gamma: γ; None means that of the recipe.
      budget: pieces of a tensor, for expert-merging++.
      steps: of the optimiser; None means those of the recipe.
      dtype: in which the models are run; None is that of their files.
      inputs_at_once: texts whose activations are held together.

    Returns:
      A method for each tensor, and settings for the report.

    Raises:
      ValueError: files that cannot be read or have no text for an expert, a model without a tokenizer, or one that is
        no decoder.
    """
    model = load(base.folder, dtype=dtype)
    if model.tokenizer is None:
        raise ValueError(f"{base.folder} has no tokenizer that can be read (tokenizer.json)")
    texts = read_calibration(calibration, [expert.name for expert in experts])
    batches = [token_batch([model.tokenizer.encode(text) for text in of_expert], length=length) for of_expert in texts]

    def expert(k: int) -> Any:
        folder = experts[k].folder
        if experts[k].is_difference:
            return lora.merge(model.params, load_adapters(folder, model.params))
        return load(folder, dtype=dtype, tokenizer=False).params

    entropy = method == "adamerging"
    forward = decoder_forward(model.config)
    problem = pose(
        Entropy(forward) if entropy else Alignment(forward, top_k=min(64, model.config.vocab_size - 1)),
        model.params,
        expert,
        batches,
        masks=[np.asarray(batch["mask"]) for batch in batches],
        include=None,
        exclude=lambda path: not _is_named(path, set(names)),
        anchor=anchor,
        inputs_at_once=inputs_at_once,
    )
    recipe = Recipe(
        steps=60 if steps is None else steps,
        gamma=(0.0 if entropy else 0.8) if gamma is None else gamma,
        inputs_at_once=inputs_at_once,
    )
    found = solve(problem, recipe=recipe)
    if method == "expert-merging++":
        importance = layer_importance(found.coefficients, problem.vectors)
        chunks = allocate_chunks(importance, found.coefficients.layout, budget=budget)
        found = solve(problem, chunks=chunks, recipe=recipe)
    settings = {
        "method": method,
        "options": {"anchor": anchor, "gamma": recipe.gamma, "steps": recipe.steps, "length": length}
        | ({"budget": budget} if method == "expert-merging++" else {}),
        "texts": [len(of_expert) for of_expert in texts],
        "loss": [float(found.learned.loss[0]), float(found.learned.loss[-1])],
        "coefficients": found.coefficients.by_name(),
    }
    return tensor_methods(found.coefficients), settings


def read_calibration(files: Sequence[Path], experts: Sequence[str]) -> list[list[str]]:
    """Texts of every expert.

    Raises:
      ValueError: another number of files, a line that is not JSON or has no text, an expert that is not known or has no
        text; names file and line.
    """
    if len(files) not in (1, len(experts)):
        raise ValueError(f"--calibration must be one file or {len(experts)}, one an expert; got {len(files)}")
    shared = len(files) == 1 and len(experts) > 1
    found: list[list[str]] = [[] for _ in experts]
    for k, file in enumerate(files):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
            text = row.get("text") if isinstance(row, dict) else None
            if not isinstance(text, str) or not text:
                raise ValueError(f"{where} must have a field 'text'")
            owner = k
            if shared:
                wanted = row.get("expert")
                known = [*range(len(experts)), *experts]
                if isinstance(wanted, bool) or wanted not in known or isinstance(wanted, float):
                    raise ValueError(f"{where}: 'expert' must be 0 to {len(experts) - 1} or a name, got {wanted!r}")
                owner = wanted if isinstance(wanted, int) else list(experts).index(wanted)
            found[owner].append(text)
    for name, texts in zip(experts, found, strict=True):
        if not texts:
            raise ValueError(f"--calibration has no text for the expert {name}")
    return found


def _is_named(path: str, names: set[str]) -> bool:
    """Whether files have this leaf, or the first of its stacked blocks."""
    dotted = path.replace("/", ".")
    return dotted in names or dotted.replace(".layers.", ".layers.0.", 1) in names
