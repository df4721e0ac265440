"""Velocities of two stages: the same result, prepared once for all times where that is small."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlab.flow import from_nnx, invert, sample, staged, stages, time_grids, uni_edit, uni_invert
from jaxlab.nn.dit import DiT, DiTConfig
from tests.flow.conftest import as_a_user

GRID = time_grids.shifted(5)
Z0 = jax.random.normal(jax.random.key(1), (3, 4, 8, 1))
SOURCE, TARGET = jnp.array([[0], [1], [2]]), jnp.array([[1], [2], [0]])


@pytest.fixture(scope="module")
def model() -> DiT:
    """All weights drawn, those too that start at zero."""
    config = DiTConfig(image_shape=(4, 8, 1), patch_size=4, num_classes=(3,), hidden_size=8, num_layers=2, num_heads=2)
    graph, state = nnx.split(DiT(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), state))


def runs(velocity):
    options = {"source": SOURCE, "target": TARGET, "inversion": SOURCE, "strength": 1.0}
    return {
        "uni_invert": uni_invert(velocity, Z0, GRID, SOURCE).z,
        "zero_init": uni_invert(velocity, Z0, GRID, SOURCE, zero_init=True, corrections=2).z,
        "uni_edit": uni_edit(velocity, Z0, GRID, **options).z,
        "two calls": uni_edit(velocity, Z0, GRID, batched=False, **options).z,
        "euler": invert(velocity, Z0, GRID, SOURCE),
        "down": sample(velocity, Z0, GRID, TARGET, steps=3),
        "heun": sample(velocity, Z0, GRID, TARGET, method="heun"),
    }


@pytest.fixture(scope="module")
def expected(model):
    return jax.jit(runs)(from_nnx(model))


@pytest.mark.parametrize("most", [0, 2**20])
def test_stages_change_nothing(model, expected, monkeypatch, most) -> None:
    """A network of two stages against the same of one, prepared ahead or step by step."""
    monkeypatch.setattr(stages, "_MOST_BYTES", most)
    # A new function, for what jit keeps does not know of the limit.
    found = jax.jit(lambda velocity: runs(velocity))(from_nnx(model, stages=("prepare", "apply")))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), found, expected)


def test_times_are_prepared_together(monkeypatch) -> None:
    seen = []

    def prepare(params, t, condition):
        seen.append(t.shape)
        return jnp.sin(t + condition)[:, None]

    def apply(params, z, known):
        return params * z + known

    velocity = staged(prepare, apply, jnp.array(0.5))
    z, label = jnp.ones((2, 3)), jnp.array([0.0, 1.0])

    def by_hand(z, t, condition):
        return 0.5 * z + jnp.sin(t + condition)[:, None]

    # For all seven times at once or for each, and up to twice for shapes alone.
    for most, once in ((2**20, 1), (0, 7)):
        monkeypatch.setattr(stages, "_MOST_BYTES", most)
        seen.clear()
        with jax.disable_jit():
            found = uni_invert(velocity, z, time_grids.uniform(6), label).z
        np.testing.assert_allclose(found, uni_invert(by_hand, z, time_grids.uniform(6), label).z, rtol=1e-6)
        assert once <= len(seen) <= once + 2


def test_stages_that_a_module_lacks_are_named(model) -> None:
    with pytest.raises(TypeError, match="stages must name two methods of DiT, which has no 'embed'"):
        from_nnx(model, stages=("embed", "apply"))
    with pytest.raises(ValueError, match=r"stages must be the names of two methods, got \('prepare',\)"), as_a_user():
        from_nnx(model, stages=("prepare",))
