"""Adapters: what reaches the model, and that weights stay data under jit."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

from jaxlab.flow import (
    check_orientation,
    checked,
    flip_time,
    from_linen,
    from_nnx,
    guided,
    in_dtype,
    orientation,
    paired,
    sample,
    time_grids,
    uni_edit,
    uni_invert,
)
from jaxlab.flow.fields import gaussian_velocity
from tests.flow.conftest import as_a_user


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


class Training(nnx.Module):
    """Dropout, batch statistics and a count of the calls."""

    def __init__(self):
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, z, t, condition):
        self.calls[...] = self.calls[...] + 1
        return self.norm(self.drop(z))


def test_a_module_in_the_mode_of_training_is_refused_and_none_is_changed() -> None:
    model, z = Training(), jnp.ones((3, 2))
    with pytest.raises(ValueError, match=r"drop is in the mode of training.*call model.eval\(\) first"):
        from_nnx(model)
    model.drop.deterministic = True
    with pytest.raises(ValueError, match="norm is in the mode of training"):
        from_nnx(model)
    model.eval()
    velocity = from_nnx(model)
    # Batch statistics at rest are mean 0, variance 1 and an epsilon of 1e-5: z moves by the factor e.
    found = uni_invert(velocity, z, time_grids.uniform(4)).z
    np.testing.assert_allclose(found, uni_invert(lambda z, t, c: z, z, time_grids.uniform(4)).z, rtol=1e-4)
    velocity(z, jnp.array(0.5), None)
    assert model.calls[...] == 0
    model.norm.scale[...] = jnp.zeros(2)
    np.testing.assert_array_equal(uni_invert(velocity, z, time_grids.uniform(4)).z, found)
    with as_a_user(), pytest.raises(TypeError, match="model must be a flax nnx module, got function"):
        from_nnx(lambda z, t, c: z)


def broken(z, t, condition):
    """Not a number beyond 0.5 where the condition is negative, in one leaf of two."""
    bad = jnp.where((t > 0.5) & (condition[:, None, None] < 0), jnp.nan, 1.0)
    return {"image": jnp.cos(z["image"]), "sound": bad * z["sound"]}


def test_checks_name_the_time_and_the_leaf() -> None:
    z = {"image": jnp.ones((2, 3, 1)), "sound": jnp.ones((2, 4, 1))}
    grid, good, bad = time_grids.uniform(5), jnp.ones(2), jnp.array([1.0, -1.0])
    velocity = checked(broken)
    for run in (checkify.checkify(jax.jit(uni_invert)), jax.jit(checkify.checkify(uni_invert))):
        error, found = run(velocity, z, grid, good)
        error.throw()
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, uni_invert(broken, z, grid, good))
        error, found = run(velocity, z, grid, bad)
        with pytest.raises(checkify.JaxRuntimeError, match=r"the velocity\['sound'\] is not finite at time 0.6"):
            error.throw()
        assert np.all(np.isnan(found.z["sound"][1]))
        assert np.all(np.isfinite(found.z["sound"][0]))
    error, _ = run(velocity, z | {"image": z["image"] * jnp.inf}, grid, good)
    with pytest.raises(checkify.JaxRuntimeError, match=r"latents\['image'\] are not finite at time 0.0"):
        error.throw()


def test_checks_inside_an_edit_under_a_gradient_and_alone() -> None:
    def field(z, t, condition):
        return jnp.sqrt(z - 1) + condition[:, None, None]

    z, label = jnp.full((1, 3, 1), 2.0), jnp.zeros(1)

    def loss(velocity, z):
        edited = uni_edit(velocity, z, time_grids.uniform(3), source=label, target=label + 1, inversion=label).z
        return edited.sum()

    error, slope = checkify.checkify(jax.jit(jax.grad(loss, argnums=1)))(checked(field), z)
    error.throw()
    np.testing.assert_allclose(slope, jax.grad(loss, argnums=1)(field, z), rtol=1e-6)
    error, _ = checkify.checkify(loss)(checked(field), z - 5)
    with pytest.raises(checkify.JaxRuntimeError, match="is not finite at time 0"):
        error.throw()
    # Called by itself there is no program to carry the error out of.
    with pytest.raises(checkify.JaxRuntimeError, match=r"the velocity is not finite at time 0.5, its latents are"):
        checked(field)(z - 5, jnp.array(0.5), label)
    with pytest.raises(ValueError, match="not functionalized"):
        jax.jit(loss)(checked(field), z)


def test_adapters_take_a_number_for_the_time() -> None:
    z, label = jnp.ones((2, 3)), jnp.arange(2.0)
    for adapt in (flip_time, lambda v: in_dtype(v, jnp.bfloat16), lambda v: guided(v, label, 2.0), checked):
        velocity = adapt(from_nnx(Scale()))
        np.testing.assert_array_equal(velocity(z, 0.5, label), velocity(z, jnp.array(0.5), label))
