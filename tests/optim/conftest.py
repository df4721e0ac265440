"""What the tests of the decentralised optimisers share."""

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
