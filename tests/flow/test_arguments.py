"""What every function asks of grids, weights, counts, masks and conditions: one clear error, NaN where it is traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.flow import (
    calls,
    check_orientation,
    ddim_as_flow,
    edit_latents,
    fields,
    flow_edit,
    guided,
    in_dtype,
    invert,
    psnr,
    rf_inversion_edit,
    rf_inversion_invert,
    sample,
    sdedit,
    ssim,
    staged,
    structure_distance,
    time_grids,
    uni_edit,
    uni_invert,
)
from tests.flow.conftest import as_a_user, linear

KEY = jax.random.key(0)
GRID = time_grids.uniform(5)
Z0 = jax.random.normal(jax.random.key(1), (3, 4, 2))
SOURCE, TARGET = jnp.array([0.0, 0.5, 1.0]), jnp.array([1.0, -0.5, 0.2])
PAIR = {"source": SOURCE, "target": TARGET}


def velocity(z, t, condition):
    return jnp.sin(z + condition[:, None, None]) + t


def edit(z0=Z0, grid=GRID, **options):
    return uni_edit(options.pop("velocity", velocity), z0, grid, **{**PAIR, "inversion": SOURCE, **options}).z


def bad_masks():
    return {
        "channels": (
            lambda d: jnp.ones((3, 4, 3)),
            r"the mask must broadcast to the latents \[3, 4, 2\], got \[3, 4, 3\]",
        ),
        "more axes": (lambda d: jnp.ones((1, 3, 4, 2)), r"broadcast to the latents \[3, 4, 2\], got \[1, 3, 4, 2\]"),
        "none": (lambda d: None, "the mask must have the structure of the latents"),
        "tree": (lambda d: (d, d), "the mask must have the structure of the latents"),
    }


@pytest.mark.parametrize("kind", bad_masks())
def test_masks_of_another_shape_are_named(kind) -> None:
    mask_fn, message = bad_masks()[kind]
    with pytest.raises(ValueError, match=message):
        edit(mask_fn=mask_fn)


def test_masks_broadcast_and_may_be_of_any_kind() -> None:
    """A number, booleans and double precision say what an array of ones says; NaN is not swallowed."""
    ones = edit(mask_fn=jnp.ones_like)
    for mask_fn in (lambda d: 1.0, lambda d: np.ones((3, 4, 1)), lambda d: jnp.full((4, 1), True)):
        np.testing.assert_array_equal(edit(mask_fn=mask_fn), ones)
    assert np.all(np.isnan(edit(mask_fn=lambda d: jnp.full_like(d, jnp.nan))))


def test_a_strength_a_sample() -> None:
    """The batch with three strengths is three batches with one."""
    strengths = (0.0, 0.7, 2.0)
    found = edit(strength=np.array(strengths))
    for k, strength in enumerate(strengths):
        np.testing.assert_allclose(found[k], edit(strength=strength)[k], rtol=2e-6)
    pulls = jnp.array([0.0, 0.5, 1.0])
    there = rf_inversion_invert(KEY, velocity, Z0, GRID, SOURCE, gamma=pulls)
    back = rf_inversion_edit(velocity, there, Z0, GRID, TARGET, eta=pulls)
    for k, pull in enumerate((0.0, 0.5, 1.0)):
        np.testing.assert_allclose(
            there[k], rf_inversion_invert(KEY, velocity, Z0, GRID, SOURCE, gamma=pull)[k], atol=1e-6
        )
        alone = rf_inversion_edit(velocity, there, Z0, GRID, TARGET, eta=pull)
        np.testing.assert_allclose(back[k], alone[k], atol=1e-6)


@pytest.mark.parametrize("batched", [True, False])
def test_guidance_inside_an_edit(batched) -> None:
    """A guided model is a model: both conditions in one call, or a null condition of one row, change nothing."""

    def by_hand(z, t, condition):
        null = velocity(z, t, jnp.full(len(z), 0.3))
        return null + 2.5 * (velocity(z, t, condition) - null)

    expected = edit(velocity=by_hand, batched=False)
    for rows in (3, 1):
        found = edit(velocity=guided(velocity, jnp.full(rows, 0.3), 2.5), batched=batched)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    each = edit(velocity=guided(velocity, jnp.full(1, 0.3), jnp.array([2.5, 1.0, 2.5])), batched=batched)
    np.testing.assert_allclose(each[0], expected[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(each[1], edit(batched=False)[1], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("null", "weight", "condition", "message"),
    [
        (jnp.zeros(2), 2.0, SOURCE, r"null must have the leading size 3 of the latents or a divisor, got \(2,\)"),
        ({"a": jnp.zeros(())}, 2.0, {"a": SOURCE}, r"null\['a'\] must have the leading size 3"),
        (None, 2.0, SOURCE, "conditions null and condition must have one structure"),
        (jnp.zeros(3), jnp.ones(2), SOURCE, "guidance weight must have the leading size 3"),
        (jnp.zeros(3), jnp.ones((3, 1, 1)), SOURCE, r"a number or one a sample, got shape \(3, 1, 1\)"),
        (jnp.zeros((1, 4)), 2.0, SOURCE, "must have one shape to go through the model in one call"),
    ],
)
def test_guidance_that_does_not_fit_is_named(null, weight, condition, message) -> None:
    with pytest.raises(ValueError, match=message):
        sample(guided(velocity, null, weight), Z0, GRID, condition)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: edit(strength=np.ones(2)), ValueError, "strength must be a number or one for each of the 3 samples"),
        (lambda: edit(strength=np.inf), ValueError, "strength must be finite and at least 0, got inf"),
        (lambda: edit(strength="5"), ValueError, "strength must be a number, got '5'"),
        (lambda: edit(delay_rate=np.nan), ValueError, r"delay_rate must be in \(0, 1\].*got nan of 5 steps"),
        (lambda: edit(delay_rate=np.inf), ValueError, "got inf of 5 steps"),
        (lambda: edit(delay_rate="most"), TypeError, "static Python float, .*got 'most'"),
        (lambda: edit(corrections=1.5), TypeError, "corrections must be a static Python int, got 1.5"),
        (lambda: jax.jit(lambda k: edit(corrections=k))(2), TypeError, "corrections must be a static Python int"),
        (lambda: invert(velocity, Z0, GRID, SOURCE, steps=2.0), TypeError, "steps must be a static Python int, got 2"),
        (lambda: edit(grid=np.array([0, 1 - 1e-9, 1])), ValueError, "increase strictly in the float32 of the latents"),
        (lambda: edit(Z0[:, 0, 0], velocity=linear, channel_axis=None), ValueError, "no positions to find a region"),
        (lambda: edit(mask_fn=lambda d: d + 1j), TypeError, "made of real numbers or booleans, got complex"),
        (lambda: edit(mask_fn=lambda d: "x"), TypeError, "mask must be made of real numbers or booleans, got 'x'"),
        (lambda: edit(Z0[:, :0]), ValueError, r"latents \[3, 0, 2\] have no positions to find a region in"),
        (lambda: edit(delay_rate="0.6"), TypeError, "static Python float, .*got '0.6'"),
        (lambda: edit(strength=1e39), ValueError, r"strength must be finite and at least 0, got 1e\+39"),
        (lambda: edit(grid=np.array([0, 0.5j, 1])), ValueError, "time grid must be made of real numbers, got complex"),
        (lambda: guided(velocity, SOURCE, 1j)(Z0, 0.5, SOURCE), ValueError, "guidance weight must be a real number"),
        (lambda: staged(3, velocity), TypeError, "prepare must be a function, got int"),
        (lambda: edit(mask_fn=jnp.ones((3, 4, 1))), TypeError, "mask_fn must be a function of the difference, got"),
        (
            lambda: edit(source=jnp.zeros((3, 7)), target=jnp.zeros((3, 5))),
            ValueError,
            r"source and target must have one shape .*got \(3, 7\) and \(3, 5\); pad them or take batched=False",
        ),
        (lambda: time_grids.uniform(2.5), TypeError, "steps of a time grid must be a static Python int, got 2.5"),
        (lambda: time_grids.flux(3, 10**9), ValueError, "sequence_length must leave steps next to the data"),
        (lambda: calls("euler", -1), ValueError, "steps must be at least 0, got -1"),
        (lambda: in_dtype(velocity, jnp.int8), TypeError, "dtype must be floating point, got int8"),
        (lambda: check_orientation(KEY, velocity, Z0, SOURCE, time=1.5), ValueError, r"time must be in \(0, 1\], "),
        (lambda: rf_inversion_invert(KEY, velocity, Z0, GRID, SOURCE, gamma=2), ValueError, r"gamma must be in \[0, 1"),
        (lambda: rf_inversion_edit(velocity, Z0, Z0, GRID, SOURCE, eta=-1), ValueError, r"eta must be in \[0, 1\]"),
        (lambda: rf_inversion_edit(linear, Z0, Z0[:1], GRID, SOURCE), ValueError, "z0 must be like the latents"),
        (lambda: jax.jit(lambda s: rf_inversion_edit(velocity, Z0, Z0, GRID, SOURCE, stop=s))(0.5), TypeError, "trac"),
        (
            lambda: flow_edit(KEY, velocity, Z0, GRID, n_max=3, target_velocity=lambda z, t, c: z[..., :1], **PAIR),
            ValueError,
            r"the velocity must be like the latents, float32\[3, 4, 2\], got float32\[3, 4, 1\]",
        ),
        (lambda: flow_edit(KEY, velocity, Z0, GRID, n_max=3, n_avg=1.5, **PAIR), TypeError, "n_avg must be a static"),
        (lambda: fields.gaussian_velocity(np.zeros(2), 0.0), ValueError, "deviation must be a positive number, got 0"),
        (lambda: fields.mixture_velocity(np.zeros(2), 1.0), ValueError, r"centres must be \[k, d\] .*got shape \(2,\)"),
        (lambda: fields.mixture_velocity(np.zeros((0, 2)), 1.0), ValueError, r"at least one, got shape \(0, 2\)"),
        (
            lambda: sample(fields.gaussian_velocity(np.zeros(3), 1.0), Z0[0], GRID),
            ValueError,
            r"as many numbers as the centres, 3, got \[4, 2\]",
        ),
        (lambda: ssim(jnp.ones((2, 12, 12)), jnp.ones((2, 12, 12))), ValueError, r"must be \[B, H, W, C\], got \[2"),
        (
            lambda: structure_distance(lambda x: x, jnp.ones((1, 4, 2)), jnp.ones((1, 3, 2))),
            ValueError,
            r"as many for both images, got similarities \(1, 4, 4\) and \(1, 3, 3\)",
        ),
        (lambda: ddim_as_flow(velocity, np.array([]), np.array([1])), ValueError, "numbers of one schedule"),
        (lambda: ddim_as_flow(velocity, np.array([0.5]), np.array([1.5])), ValueError, "whole numbers in one dimen"),
        (lambda: psnr(Z0, Z0[:1]), ValueError, r"images must have one shape, got \[3, 4, 2\] and \[1, 4, 2\]"),
        (lambda: psnr(Z0, Z0, data_range=0.0), ValueError, "data_range must be positive and finite, got 0.0"),
        (lambda: ssim(jnp.ones((1, 12, 12, 1)), jnp.ones((1, 12, 12, 3))), ValueError, "images must have one shape"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, error, message) -> None:
    with as_a_user(), pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("strength", -1.0),
        ("strength", np.inf),
        ("grid", GRID[::-1].copy()),
        ("grid", np.array([0, 0.2, np.nan, 0.6, 0.8, 1])),
        ("grid", np.array([0, 0.2, 0.2, 0.6, 0.8, 1])),
        ("grid", GRID / 2),
    ],
)
def test_what_is_out_of_range_when_traced_is_nan(name, bad) -> None:
    assert np.all(np.isnan(traced_edit()({"strength": 1.0, "grid": GRID, name: bad})))


def test_what_is_in_range_when_traced_is_as_it_was() -> None:
    found = traced_edit()({"strength": 1.0, "grid": GRID})
    np.testing.assert_allclose(found, edit(strength=1.0), rtol=1e-5, atol=1e-6)


@functools.cache
def traced_edit():
    return jax.jit(lambda options: edit(**options))


def test_no_samples_are_no_samples() -> None:
    nothing, none = Z0[:0], SOURCE[:0]
    pair = {"source": none, "target": none}
    for found in (
        uni_edit(velocity, nothing, GRID, inversion=none, **pair).z,
        edit_latents(guided(velocity, jnp.zeros(1), 2.0), nothing, GRID, steps=2, **pair)[0],
        flow_edit(KEY, velocity, nothing, GRID, n_max=2, **pair),
        sdedit(KEY, velocity, nothing, GRID, none),
        invert(velocity, nothing, GRID, none, method="fireflow"),
    ):
        assert found.shape == (0, 4, 2)


def test_leaves_of_two_precisions() -> None:
    """Each leaf is computed in its own."""
    with jax.enable_x64(True):
        z0 = {"a": jnp.ones((2, 3, 1), jnp.float64), "b": jnp.full((2, 3, 1), 0.5, jnp.float32)}

        def field(z, t, condition):
            return jax.tree.map(lambda x: jnp.cos(x) + condition[:, None, None].astype(x.dtype), z)

        pair = {"source": jnp.zeros(2), "target": jnp.ones(2)}
        found = uni_edit(field, z0, GRID, inversion=jnp.zeros(2), **pair).z
        there = uni_invert(field, z0, GRID, jnp.zeros(2)).z
        noised = sdedit(KEY, field, z0, GRID, jnp.zeros(2))
        for tree in (found, there, noised):
            assert (tree["a"].dtype, tree["b"].dtype) == (jnp.float64, jnp.float32)
        same = uni_invert(field, {"b": z0["b"]}, GRID, jnp.zeros(2)).z
        np.testing.assert_allclose(there["b"], same["b"], rtol=1e-6)
