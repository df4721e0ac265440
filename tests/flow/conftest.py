"""Fields with known answers, shared by the tests."""

import contextlib

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxlab.flow import fields


def wave(z, t, condition):
    """The pinned nonlinear field."""
    return jax.tree.map(lambda leaf: jnp.cos(leaf) + t, z)


def linear(z, t, condition):
    """``v = 0.7 z``."""
    return jax.tree.map(lambda leaf: 0.7 * leaf, z)


@contextlib.contextmanager
def as_a_user():
    """Without the type checks of the tests, which would say some of it first."""
    checked = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", checked)


@pytest.fixture
def in_double():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def mixture():
    """Four components in the plane: the field and 256 samples, in double precision."""
    with jax.enable_x64(True):
        centres = np.array([[1.5, 1.5], [1.5, -1.5], [-1.5, 1.5], [-1.5, -1.5]])
        rng = np.random.default_rng(0)
        data = centres[rng.integers(4, size=256)] + 0.5 * rng.normal(size=(256, 2))
        return fields.mixture_velocity(centres, 0.5), jnp.asarray(data)
