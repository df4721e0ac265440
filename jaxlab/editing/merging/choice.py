"""Methods by name, as the command and configuration files call them."""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from jaxlab.editing.merging.arithmetic import TaskArithmetic, weight_average
from jaxlab.editing.merging.dare import Dare
from jaxlab.editing.merging.method import MergeMethod
from jaxlab.editing.merging.regmean import RegMean
from jaxlab.editing.merging.spectral import IsotropicMerging, TaskSingularVectors
from jaxlab.editing.merging.ties import Ties
from jaxlab.editing.merging.wudi import Wudi, WudiClosedForm, WudiLowRank

__all__ = ["METHODS", "make_method", "options_of"]


def _dare(**options: Any) -> Dare:
    own, others = _divide(options)
    return Dare(then=TaskArithmetic(**others), **own)


def _dare_ties(**options: Any) -> Dare:
    own, others = _divide(options)
    return Dare(then=Ties(**{"density": 1.0, "scope": "tensor", "election": "mergekit", **others}), **own)


METHODS: MappingProxyType[str, Callable[..., MergeMethod]] = MappingProxyType(
    {
        "task_arithmetic": TaskArithmetic,
        "weight_average": weight_average,
        "ties": Ties,
        "dare": _dare,
        "dare_ties": _dare_ties,
        "tsv": TaskSingularVectors,
        "iso_c": IsotropicMerging,
        "wudi": Wudi,
        "wudi_closed_form": WudiClosedForm,
        "wudi_low_rank": WudiLowRank,
        "regmean": RegMean,
    }
)

_OF_DARE = ("drop", "rescale")
_FIELDS: dict[str, tuple[str, ...]] = {
    "weight_average": ("scale", "weights"),
    "dare": (*_OF_DARE, "scale", "weights", "normalize"),
    "dare_ties": (*_OF_DARE, "scale", "weights", "density", "normalize", "scope", "election"),
}


def make_method(name: str, **options: Any) -> MergeMethod:
    """A method by name: ``make_method("ties", density=0.2)``, ``make_method("dare-ties", drop=0.5)``.

    Args:
      name: a key of `METHODS`; ``-`` counts as ``_``.
      options: of the method; those of ``dare`` and ``dare_ties`` are of `Dare` or of what comes after it.

    Raises:
      ValueError: an unknown name or option, listing those that are known; a value out of range.
    """
    known = options_of(name)
    if unknown := [option for option in options if option not in known]:
        raise ValueError(f"{name} has no option {unknown[0]!r}; it has {', '.join(known)}")
    return METHODS[name.replace("-", "_")](**options)


def options_of(name: str) -> tuple[str, ...]:
    """Options that a method takes.

    Raises:
      ValueError: an unknown name, listing the known ones.
    """
    plain = name.replace("-", "_")
    if plain not in METHODS:
        raise ValueError(f"unknown method {name!r}; the methods are {', '.join(METHODS)}")
    return _FIELDS.get(plain) or tuple(field.name for field in dataclasses.fields(METHODS[plain]))  # type: ignore[arg-type]


def _divide(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {name: value for name, value in options.items() if name in _OF_DARE}
    return own, {name: value for name, value in options.items() if name not in _OF_DARE}
