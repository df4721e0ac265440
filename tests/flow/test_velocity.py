"""Adapters: what reaches the model, and that weights stay data under jit."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlab.flow import (
    check_orientation,
    flip_time,
    from_linen,
    from_nnx,
    guided,
    in_dtype,
    orientation,
    paired,
    sample,
    time_grids,
    uni_invert,
)
from jaxlab.flow.fields import gaussian_velocity


class Scale(nnx.Module):
    """``v = w z + t + label``, with one time a sample."""

    def __init__(self):
        self.weight = nnx.Param(jnp.array(0.5))

    def __call__(self, z, t, label):
        assert t.shape == z.shape[:1]
        return self.weight[...] * z + (t + label)[:, None]


class LinenScale(nn.Module):
    @nn.compact
    def __call__(self, z, t, label, scale):
        weight = self.param("weight", lambda key: jnp.array(0.5))
        return weight * z + (t + label)[:, None] * scale


def test_nnx_and_linen_models_give_the_same_samples() -> None:
    z1, label = jax.random.normal(jax.random.key(0), (3, 2)), jnp.arange(3.0)
    module = LinenScale()
    params = module.init(jax.random.key(0), z1, label, label, 1.0)
    ours = from_nnx(Scale())
    theirs = from_linen(module, params, condition_map=lambda condition: (condition["label"], 1.0))
    grid = time_grids.uniform(4)
    np.testing.assert_allclose(sample(ours, z1, grid, label), sample(theirs, z1, grid, {"label": label}), rtol=1e-6)


def test_weights_are_arguments_of_the_compiled_program() -> None:
    traces = []

    @jax.jit
    def run(velocity, z):
        traces.append(None)
        return uni_invert(flip_time(in_dtype(velocity, jnp.float32)), z, time_grids.uniform(3), jnp.zeros(2)).z

    model, z = Scale(), jnp.ones((2, 3))
    first = run(from_nnx(model), z)
    model.weight[...] = jnp.array(1.0)
    second = run(from_nnx(model), z)
    assert len(traces) == 1
    assert jnp.abs(first - second).min() > 0.05


def test_guidance_weights() -> None:
    def velocity(z, t, condition):
        return z + condition[:, None]

    z, null, condition = jnp.ones((2, 3)), jnp.zeros(2), jnp.array([1.0, 2.0])
    for weight in (0.0, 1.0, 3.5):
        found = guided(velocity, null, weight)(z, jnp.array(0.5), condition)
        np.testing.assert_allclose(found, 1 + weight * condition[:, None] * np.ones((1, 3)), rtol=1e-6)


@pytest.mark.parametrize("batched", [True, False])
def test_pairs(batched) -> None:
    sizes = []

    def velocity(z, t, condition):
        sizes.append(len(z))
        return z * condition["scale"][:, None]

    first, second = paired(velocity, jnp.ones((2, 3)), 0.5, {"scale": jnp.full(2, 2.0)}, {"scale": jnp.full(2, 3.0)},
                           batched=batched)  # fmt: skip
    np.testing.assert_array_equal(first, 2)
    np.testing.assert_array_equal(second, 3)
    assert sizes == ([4] if batched else [2, 2])


def test_low_precision_calls() -> None:
    def velocity(z, t, condition):
        assert z.dtype == t.dtype == jnp.bfloat16
        return z

    out = in_dtype(velocity, jnp.bfloat16)(jnp.full((1, 1), 1 + 2.0**-10), jnp.float32(0.5), None)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, 1)  # rounded to eight bits


def test_orientation_tells_time_and_sign() -> None:
    key = jax.random.key(0)
    right = gaussian_velocity(jnp.array([2.0, -1.0]), 0.5)
    data = jnp.array([2.0, -1.0]) + 0.5 * jax.random.normal(jax.random.key(1), (64, 2))
    assert check_orientation(key, right, data) > 0.8
    flipped = flip_time(right)
    np.testing.assert_allclose(orientation(key, flip_time(flipped), data), orientation(key, right, data), rtol=1e-5)
    with pytest.raises(ValueError, match="wrapped in flip_time"):
        check_orientation(key, flipped, data)
    with pytest.raises(ValueError, match="must point from data to noise"):
        check_orientation(key, lambda z, t, c: -right(z, t, c), data)
