"""What the tests of training with many workers share."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable

import jax
import jaxtyping
import pytest
from jax.sharding import AxisType, Mesh


@pytest.fixture
def types_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """See what a user sees: the checks of types that tests switch on speak before some of the package's own errors."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def node_mesh() -> Callable[[int], Mesh]:
    """``node_mesh(devices)``: a mesh of that many devices with one axis, ``"node"``."""

    def make(devices: int) -> Mesh:
        return jax.make_mesh((devices,), ("node",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    return make


@pytest.fixture(scope="session")
def byzfl() -> tuple[types.ModuleType, types.ModuleType, types.ModuleType]:
    """Aggregators, pre-aggregators and attacks of the library byzfl; tests skip where it is not installed.

    Only the parts that need NumPy and PyTorch are imported: the package itself imports its benchmarks, and with them
    torchvision and seaborn.
    """
    pytest.importorskip("torch", reason="byzfl needs PyTorch")
    found = importlib.util.find_spec("byzfl")
    if found is None:
        pytest.skip("byzfl is not installed (extra: peers)")
    package = types.ModuleType("byzfl")
    package.__path__ = list(found.submodule_search_locations)
    package.__spec__ = found
    sys.modules.setdefault("byzfl", package)
    names = ("byzfl.aggregators.aggregators", "byzfl.aggregators.preaggregators", "byzfl.attacks.attacks")
    return tuple(importlib.import_module(name) for name in names)
