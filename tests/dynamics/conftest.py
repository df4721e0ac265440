"""Fixtures of the tests of dynamical systems."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.dynamics import Spectrum


@pytest.fixture
def float64() -> Iterator[None]:
    """Double precision while the test runs."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def draw() -> Callable[..., Spectrum]:
    """Random spectra: ``draw(rng, rank, dimension)`` with standard complex normals in the order of POT's example."""

    def spectrum(rng: np.random.Generator, rank: int = 4, dimension: int = 8, batch: tuple[int, ...] = ()) -> Spectrum:
        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.normal(size=(*batch, *shape)) + 1j * rng.normal(size=(*batch, *shape)))

        return Spectrum(eigenvalues=normal(rank), right=normal(dimension, rank), left=normal(dimension, rank))

    return spectrum
