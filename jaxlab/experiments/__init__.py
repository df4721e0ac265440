"""One module per paper: its claims, measured.

An experiment is a frozen config dataclass, a function ``run(config, run)`` and a tuple of claims, held together by
:class:`~jaxlab.experiments.base.Experiment`; :mod:`~jaxlab.experiments.registry` lists the nineteen methods, and
:func:`~jaxlab.experiments.outcome.execute` runs one into a directory. Names load on first use, so that the list of
methods can be printed without importing jax.
"""

import importlib
from typing import Any

_HOMES = {
    "Claim": "base",
    "Experiment": "base",
    "Run": "base",
    "execute": "outcome",
    "Outcome": "outcome",
    "METHODS": "registry",
    "Method": "registry",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
