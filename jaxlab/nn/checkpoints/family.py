"""What `config.json` calls a model type: how its settings and tensor names map to one of our networks.

A checkpoint and our parameters differ in three ways only, so that one reader and one writer serve every network:

1. the path of a parameter is the tensor's name with ``/`` for ``.``;
2. blocks, ``model.layers.0.…``, ``model.layers.1.…``, are stacked on a leading axis as ``model/layers/…``;
3. some files spell a name in another way, or hold what the network has no use for.

A `Family` says which. It is found by the ``"model_type"`` of a ``config.json``::

    family = find_family({"model_type": "qwen2", ...})
    config = family.read_config({"model_type": "qwen2", ...})
    apply_fn, params = family.init(config, jax.random.key(0))
"""

import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Family", "find_family", "known_families"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model type of ``config.json``.

    Attributes:
      model_type: the ``"model_type"`` in ``config.json``.
      architectures: class names that ``"architectures"`` may hold; the first is the one that is written, unless
        ``write_config`` gives another. A file with none of them is refused.
      read_config: from the whole of ``config.json`` to the config of our network, a dataclass with at least the fields
        ``dtype`` and ``param_dtype`` ("float32", "bfloat16", "float16"). It raises ValueError naming a setting that our
        network does not have, for a network that differs silently is worse than none.
      write_config: the settings back, such that ``transformers`` reads them; without ``model_type`` and ``dtype``,
        which the writer adds, and ``architectures``, which it adds where they are absent.
      init: ``(config, key) -> (apply_fn, params)``; safe under ``jax.eval_shape``.
      make_apply: ``config -> apply_fn`` of the same network.
      blocks: paths of the stacked blocks in our parameters: ``("model/layers",)`` stands for the tensors
        ``model.layers.{i}.…``.
      renames: pairs of a regular expression and its replacement (`re.sub`), applied in this order to each tensor name
        that is read: ``(r"^bert\\.", "")``, ``(r"LayerNorm\\.gamma$", "LayerNorm.weight")``.
      write_renames: the same for each tensor name that is written.
      ignored: regular expressions of tensor names (after the renames) that a file may hold although the network has no
        such parameter: buffers of older versions, the head of a tied embedding. They are read where it has.
    """

    model_type: str
    architectures: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], Any]
    write_config: Callable[[Any], dict[str, Any]]
    init: Callable[..., tuple[Callable[..., Any], dict[str, Any]]]
    make_apply: Callable[[Any], Callable[..., Any]]
    blocks: tuple[str, ...]
    renames: tuple[tuple[str, str], ...] = ()
    write_renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def read_name(self, name: str) -> str:
        """The name of a tensor in a file after the renames."""
        return _substitute(self.renames, name)

    def written_name(self, name: str) -> str:
        """The name in a file of a tensor that is written."""
        return _substitute(self.write_renames, name)


def known_families() -> dict[str, Family]:
    """Every family by its model type."""
    families = [family for module in _MODULES for family in importlib.import_module(module).FAMILIES]
    return {family.model_type: family for family in families}


def find_family(config: Mapping[str, Any], *, source: str = "config.json") -> Family:
    """The family of a ``config.json``.

    Args:
      config: the parsed file.
      source: what an error calls it.

    Raises:
      ValueError: if it has no model type, or one that is unknown, or another network of a known type; lists the known.
    """
    known = known_families()
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if model_type not in known:
        nearest = difflib.get_close_matches(str(model_type), list(known), n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"{source}: unknown model_type {model_type!r}: {hint}known are {', '.join(sorted(known))}")
    family = known[model_type]
    if architectures and not set(architectures) & set(family.architectures):
        raise ValueError(
            f"{source}: unknown architecture {', '.join(map(str, architectures))} of model_type {model_type!r}: "
            f"known are {', '.join(family.architectures)}"
        )
    return family


def _substitute(patterns: tuple[tuple[str, str], ...], name: str) -> str:
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


# Each has a tuple FAMILIES. They import the networks, so that only who reads a checkpoint pays for all of them.
_MODULES = ("jaxlab.nn.checkpoints.decoders", "jaxlab.nn.checkpoints.encoders")
