"""Methods of nineteen ICLR 2026 papers as composable JAX functions.

``import jaxlab`` loads nothing but this file: a field package (``jaxlab.optim``, ``jaxlab.nn``, ...) is imported when
it is first used, so that a program pays only for the methods it calls.
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_PACKAGES = ("bidding", "blackbox", "compress", "data", "dynamics", "editing", "experiments", "flow", "nn", "optim")

__all__ = ["__version__", *_PACKAGES]


def __getattr__(name: str) -> ModuleType:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
