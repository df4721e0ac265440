"""Uni-Edit: the one-line identity, limiting cases, masks, calls, trees, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.flow import delayed_injection, fields, sample, time_grids, uni_edit, uni_invert, velocity_mask

GRID = time_grids.shifted(5)


def velocity(z, t, condition):
    """A field that couples pixels and depends on the condition ``[B, C]`` unevenly over the image ``[B, H, W, C]``."""
    where = jnp.linspace(0.0, 1.0, z.shape[1])[:, None, None]
    return jnp.sin(z + condition[:, None, None]) * where + 0.1 * jnp.roll(z, 1, 2) + t


def conditions(batch=3, channels=2):
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.normal(size=(batch, channels)), jnp.float32) for _ in range(3))


def images(batch=3):
    return jax.random.normal(jax.random.key(1), (batch, 4, 5, 2))


def test_one_line_identity() -> None:
    """Every step is ``z - h (v_S + (m + w (1 + m)) (v_T - v_S))``, with m from a transcription in NumPy."""
    source, target, null = conditions()
    found = uni_edit(
        velocity, images(), GRID, source=source, target=target, inversion=null, strength=1.5, return_masks=True
    )
    z = np.asarray(uni_invert(velocity, images(), GRID, null, steps=3).z)
    np.testing.assert_array_equal(found.inverted, z)
    for row, i in enumerate((3, 2, 1)):
        v_s, v_t = (np.asarray(velocity(z, np.float32(GRID[i]), c)) for c in (source, target))
        size = np.abs(v_t - v_s).mean(-1, keepdims=True)
        low, high = (getattr(size, f)((1, 2, 3), keepdims=True) for f in ("min", "max"))
        m = (size - low) / (high - low + 1e-7)
        np.testing.assert_allclose(found.masks[row], m, atol=2e-6)
        z = z - np.float32(GRID[i] - GRID[i - 1]) * (v_s + (m + 1.5 * (1 + m)) * (v_t - v_s))
    np.testing.assert_allclose(found.z, z, atol=2e-6)  # float32 rounding of numbers near one


def test_same_condition_is_reconstruction() -> None:
    source, _, null = conditions()
    found = uni_edit(
        velocity, images(), GRID, source=source, target=source, inversion=null, batched=False, return_masks=True
    )
    np.testing.assert_array_equal(found.masks, 0)
    np.testing.assert_allclose(found.z, sample(velocity, found.inverted, GRID, source, steps=3), atol=1e-6)
    # In one call of twice the size both halves may be rounded differently; nothing comes of it.
    batched = uni_edit(velocity, images(), GRID, source=source, target=source, inversion=null)
    np.testing.assert_allclose(batched.z, found.z, atol=1e-5)


@pytest.mark.parametrize(("level", "down"), [(1.0, 1), (0.0, 0)])
def test_without_strength_the_mask_chooses_the_condition(level, down) -> None:
    source, target, null = conditions()
    found = uni_edit(
        velocity,
        images(),
        GRID,
        source=source,
        target=target,
        inversion=null,
        strength=0.0,
        mask_fn=lambda difference: jnp.full_like(difference[..., :1], level),
    )
    plain = delayed_injection(velocity, images(), GRID, target=(source, target)[down], inversion=null)
    np.testing.assert_allclose(found.z, plain, atol=1e-6)


def test_two_calls_equal_one_of_twice_the_size_and_batch_mates_do_not_matter() -> None:
    source, target, null = conditions()
    run = jax.jit(uni_edit, static_argnames=("delay_rate", "batched"))
    options = {"source": source, "target": target, "inversion": null, "delay_rate": 0.8}
    together = run(velocity_partial(), images(), GRID, **options).z
    np.testing.assert_allclose(run(velocity_partial(), images(), GRID, batched=False, **options).z, together, atol=5e-6)
    order = np.array([2, 0, 1])
    options = {"source": source[order], "target": target[order], "inversion": null[order], "delay_rate": 0.8}
    np.testing.assert_allclose(run(velocity_partial(), images()[order], GRID, **options).z, together[order], atol=5e-6)
    alone = run(velocity_partial(), images()[:1], GRID, source=source[:1], target=target[:1], inversion=null[:1],
                delay_rate=0.8).z  # fmt: skip
    np.testing.assert_allclose(alone, together[:1], atol=5e-6)


def test_a_batch_spread_over_devices() -> None:
    source, target, null = conditions(batch=8)
    run = jax.jit(uni_edit)
    options = {"source": source, "target": target, "inversion": null}
    together = run(velocity_partial(), images(8), GRID, **options).z
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    spread = jax.device_put((images(8), options), sharding)
    found = run(velocity_partial(), spread[0], GRID, **spread[1]).z
    np.testing.assert_allclose(found, together, atol=5e-6)


def velocity_partial():
    return jax.tree_util.Partial(velocity)


@pytest.mark.parametrize(("steps", "rate", "expected"), [(15, 0.6, 28), (15, 0.8, 37), (1, 1.0, 4)])
def test_calls_are_three_for_every_inverted_step_and_one(steps, rate, expected) -> None:
    seen = []

    def counted(z, t, condition):
        if not isinstance(t, jax.core.Tracer):  # looks at shapes
            seen.append(t)
        return z

    label = jnp.zeros((1, 1))
    with jax.disable_jit():
        uni_edit(counted, jnp.ones((1, 2, 1)), time_grids.uniform(steps), source=label, target=label, inversion=label,
                 delay_rate=rate, batched=False)  # fmt: skip
    assert len(seen) == expected


def test_trees_have_a_mask_a_leaf() -> None:
    def both(z, t, condition):
        scale = condition[:, None, None]
        return {"video": z["video"] * scale, "audio": jnp.sin(z["audio"]) + scale}

    z0 = {"video": jnp.arange(6.0).reshape(1, 3, 2), "audio": jnp.ones((1, 4, 1))}
    one = jnp.ones(1)
    found = uni_edit(both, z0, GRID, source=one, target=2 * one, inversion=one, strength=1.0, return_masks=True)
    assert found.masks["video"].shape == (3, 1, 3, 1)
    assert found.masks["audio"].shape == (3, 1, 4, 1)
    np.testing.assert_allclose(found.masks["video"].max((1, 2, 3)), 1, atol=1e-5)
    np.testing.assert_array_equal(found.masks["audio"], 0)  # the difference is the same everywhere


def test_strength_may_be_traced_and_differentiated() -> None:
    source, target, null = conditions()

    def pixel(strength):
        return uni_edit(
            velocity, images(), GRID, source=source, target=target, inversion=null, strength=strength
        ).z.sum()

    by_hand = (pixel(1.0 + 1e-2) - pixel(1.0 - 1e-2)) / 2e-2
    np.testing.assert_allclose(jax.grad(pixel)(1.0), by_hand, rtol=2e-2)  # float32 differences of a sum of 120
    swept = jax.vmap(pixel)(jnp.array([0.0, 1.0]))
    np.testing.assert_allclose(swept, [pixel(0.0), pixel(1.0)], rtol=1e-5)


def test_editing_moves_the_part_that_the_condition_speaks_of() -> None:
    """Data with independent halves: the right half changes class, the left half stays."""
    means = jnp.array([[a, b] for a in (-2.0, 2.0) for b in (-2.0, 2.0)])
    field = fields.mixture_velocity(means, 0.3)
    off = -jnp.inf
    left_low = jnp.array([[0.0, off, off, off]])  # class (-2, -2)
    right_high = jnp.array([[off, 0.0, off, off]])  # class (-2, 2)
    z0 = jnp.array([[-2.2, -1.9]])
    found = uni_edit(field, z0, time_grids.uniform(15), source=left_low, target=right_high, inversion=left_low,
                     strength=0.5, delay_rate=0.8, channel_axis=None).z  # fmt: skip
    # Off by the round trip alone where both conditions agree; beyond the midpoint where they do not.
    np.testing.assert_allclose(found[0, 0], -2.2, atol=0.05)
    assert found[0, 1] > 1.0


def test_mask_modes() -> None:
    difference = jnp.array([[[1.0, -3.0], [0.0, 0.0], [2.0, 2.0]]])
    np.testing.assert_allclose(velocity_mask(difference)[0, :, 0], [1, 0, 1], atol=1e-6)
    np.testing.assert_allclose(velocity_mask(difference, mode="signed")[0, :, 0], [0, 1 / 3, 1], atol=1e-6)
    np.testing.assert_allclose(velocity_mask(difference[..., 0], channel_axis=None)[0], [0.5, 0, 1], atol=1e-6)
    np.testing.assert_array_equal(velocity_mask(jnp.zeros((2, 3, 1))), 0)
    first = velocity_mask(jnp.moveaxis(difference, -1, 1), channel_axis=1)
    np.testing.assert_allclose(first[0, 0], [1, 0, 1], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delay_rate": 0.0}, "delay_rate must be in"),
        ({"delay_rate": 1.1}, "delay_rate must be in"),
        ({"delay_rate": 0.1}, "must leave at least one step, got 0.1 of 5 steps"),
        ({"strength": -1.0}, "strength must be finite and at least 0, got -1.0"),
        ({"mask_mode": "norm"}, "mask_mode must be 'abs' or 'signed', got 'norm'"),
        ({"channel_axis": 0}, "other than the batch, got 0"),
        ({"channel_axis": 4}, "other than the batch, got 4"),
        ({"target": {"text": jnp.zeros((3, 2))}}, "must have one structure"),
        ({"target": jnp.zeros((2, 2))}, r"condition target must have the leading size 3 of the latents, got shape \(2"),
    ],
)
def test_bad_input_is_named(change, message) -> None:
    source, target, null = conditions()
    with pytest.raises(ValueError, match=message):
        uni_edit(velocity, images(), GRID, **{"source": source, "target": target, "inversion": null, **change})


def test_a_traced_delay_rate_and_vectors_with_channels_are_refused() -> None:
    source, target, null = conditions()
    options = {"source": source, "target": target, "inversion": null}
    with pytest.raises(TypeError, match="delay_rate must be a static Python float"):
        jax.jit(lambda rate: uni_edit(velocity, images(), GRID, delay_rate=rate, **options))(0.5)
    with pytest.raises(ValueError, match="take channel_axis=None"):
        uni_edit(lambda z, t, c: z, jnp.ones((3, 2)), GRID, **options)
