"""The types of the fields of a config, checked when it is made.

Configs are read from files that anyone may have written, and a number in quotes or a size of 32.0 would otherwise fail
far from where it stands, or not at all. Each field must have the type that it is annotated with::

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        num_layers: int
        norm_eps: float = 1e-6

        def __post_init__(self):
            check_types(self)

    Config(num_layers="2")             # ValueError: num_layers must be an integer; got '2'
"""

import math
import numbers
import typing
from types import NoneType, UnionType
from typing import Any

__all__ = ["check_types"]


def check_types(config: Any) -> None:
    """Raise ValueError, naming the field and its value, if a field of a dataclass has not the annotated type.

    An integer will do for a float, which must be finite; a bool for neither.
    """
    for name, annotation in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        allowed = _alternatives(annotation)
        if not any(_fits(value, kind) for kind in allowed):
            wanted = " or ".join(_name(kind) for kind in allowed)
            raise ValueError(f"{name} must be {wanted}; got {value!r}")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    union = isinstance(annotation, UnionType) or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if union else (annotation,)


def _fits(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        if not isinstance(value, tuple) or (inner[-1] is not Ellipsis and len(value) != len(inner)):
            return False
        return all(_fits(entry, inner[0 if inner[-1] is Ellipsis else i]) for i, entry in enumerate(value))
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind)


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        return f"a tuple of {len(inner)} values" if inner[-1] is not Ellipsis else f"a tuple ({inner[0].__name__}, ...)"
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string", NoneType: "None"}
    return names.get(kind, f"a {kind.__name__}")
