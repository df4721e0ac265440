import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlab.nn import clip_vision, dinov2, vit
from jaxlab.nn.patches import PatchProjection, VisionConfig, resize_positions

SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_layers": 1,
    "num_heads": 2,
    "image_size": (8, 12),
    "patch_size": 4,
}


def test_projection_is_a_convolution():
    config = VisionConfig(**SMALL, num_channels=2)
    projection = PatchProjection(config, use_bias=True, rngs=nnx.Rngs(0))
    projection.bias[...] = jnp.arange(8.0)
    images = jax.random.normal(jax.random.key(0), (3, 8, 12, 2))
    expected = jax.lax.conv_general_dilated(
        images, projection.weight[...], (4, 4), "VALID", dimension_numbers=("NHWC", "OIHW", "NHWC")
    )
    out = projection(images)
    assert (config.grid, config.num_patches, out.shape) == ((2, 3), 6, (3, 6, 8))
    np.testing.assert_allclose(out, expected.reshape(3, 6, 8) + jnp.arange(8.0), atol=1e-5)


GRIDS = [((3, 4), (5, 9)), ((6, 5), (2, 4)), ((4, 4), (4, 7)), ((7, 7), (1, 3)), ((1, 2), (3, 3))]


@pytest.mark.parametrize(("old", "new"), GRIDS)
@pytest.mark.parametrize("antialias", [False, True])
def test_positions_are_interpolated_as_by_torch(old, new, antialias):
    torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
    table = np.random.default_rng(0).normal(size=(*old, 3)).astype(np.float32)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(table).permute(2, 0, 1)[None], size=new, mode="bicubic", antialias=antialias
    )
    out = resize_positions(jnp.asarray(table).reshape(-1, 3), old, new, antialias=antialias)
    np.testing.assert_allclose(out, expected[0].permute(1, 2, 0).reshape(-1, 3).numpy(), atol=1e-5)


@pytest.mark.parametrize(("old", "new"), GRIDS)
def test_antialiased_positions_are_interpolated_as_by_jax(old, new):
    table = jax.random.normal(jax.random.key(0), (*old, 3))
    expected = jax.image.resize(table, (*new, 3), "cubic", antialias=True)
    out = resize_positions(table.reshape(-1, 3), old, new, antialias=True)
    np.testing.assert_allclose(out, expected.reshape(-1, 3), atol=1e-5)


@pytest.mark.parametrize("antialias", [False, True])
def test_a_constant_stays_and_the_same_grid_changes_nothing(antialias):
    constant = jnp.full((6, 2), 0.25)
    np.testing.assert_allclose(resize_positions(constant, (2, 3), (7, 2), antialias=antialias), 0.25, atol=1e-6)
    table = jax.random.normal(jax.random.key(0), (6, 2)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(resize_positions(table, (2, 3), (2, 3), antialias=antialias), table)
    assert resize_positions(table, (2, 3), (4, 4), antialias=antialias).dtype == jnp.bfloat16


def outputs(module, config, images, **options):
    params = jax.eval_shape(lambda: module.init(config, jax.random.key(0))[1])
    return jax.eval_shape(lambda p, x: module.make_apply(config)(p, x, **options), params, images)


class TestBadInput:
    @pytest.mark.parametrize(
        ("module", "config", "options"),
        [
            (vit, vit.ViTConfig(**SMALL), {"interpolate_positions": True}),
            (clip_vision, clip_vision.CLIPVisionConfig(**SMALL), {"interpolate_positions": True}),
            (dinov2, dinov2.Dinov2Config(**SMALL), {}),
        ],
        ids=["vit", "clip_vision", "dinov2"],
    )
    def test_images(self, module, config, options):
        assert outputs(module, config, jnp.zeros((2, 8, 12, 3))).last_hidden_state.shape == (2, 7, 8)
        assert outputs(module, config, jnp.zeros((2, 4, 4, 3)), **options).last_hidden_state.shape == (2, 2, 8)
        with pytest.raises(ValueError, match=r"images must have 3 channels; got 1\n"):
            outputs(module, config, jnp.zeros((2, 8, 12, 1)))
        with pytest.raises(ValueError, match=r"got 12 \(images are \[b, height, width, channels\]\)"):
            outputs(module, config, jnp.zeros((2, 3, 8, 12)))
        with pytest.raises(ValueError, match="must be multiples of patch_size 4; got 8 x 10"):
            outputs(module, config, jnp.zeros((2, 8, 10, 3)), **options)
        if options:
            with pytest.raises(ValueError, match="images must be 8 x 12; got 12 x 12"):
                outputs(module, config, jnp.zeros((2, 12, 12, 3)))

    def test_config(self):
        with pytest.raises(ValueError, match=r"patch_size must divide image_size; got 5 and \(8, 12\)"):
            VisionConfig(**{**SMALL, "patch_size": 5})
        with pytest.raises(ValueError, match="image_size must be at least 1; got 0"):
            VisionConfig(**{**SMALL, "image_size": 0})
        with pytest.raises(ValueError, match="num_labels must be None; got 2"):
            clip_vision.CLIPVisionConfig(**SMALL, num_labels=2)
        with pytest.raises(ValueError, match="num_register_tokens must not be negative; got -1"):
            dinov2.Dinov2Config(**SMALL, num_register_tokens=-1)
        with pytest.raises(ValueError, match="pooler_act must be one of"):
            vit.ViTConfig(**SMALL, pooler_act="mish")


def test_hidden_patches_are_not_seen():
    config = dinov2.Dinov2Config(**SMALL, num_register_tokens=1)
    shapes = jax.eval_shape(lambda: dinov2.init(config, jax.random.key(0))[1])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.0, 0.5, leaf.shape), jnp.float32), shapes)
    apply_fn = jax.jit(dinov2.make_apply(config))
    images = jax.random.normal(jax.random.key(1), (1, 8, 12, 3))
    hidden = jnp.zeros((1, 6), bool).at[0, 1].set(True)
    masked = apply_fn(params, images, patch_mask=hidden).last_hidden_state
    other = apply_fn(params, images.at[:, :4, 4:8].add(1.0), patch_mask=hidden).last_hidden_state
    np.testing.assert_array_equal(masked, other)
    none = apply_fn(params, images, patch_mask=jnp.zeros((1, 6), bool)).last_hidden_state
    assert np.abs(masked - none).max() > 1e-2
    with pytest.raises(ValueError, match=r"patch_mask must have shape \(1, 6\); got \(1, 7\)"):
        apply_fn(params, images, patch_mask=jnp.zeros((1, 7), bool))
    without = dinov2.Dinov2Config(**SMALL, mask_token=False)
    with pytest.raises(ValueError, match="patch_mask needs a network with mask_token=True"):
        outputs(dinov2, without, images, patch_mask=hidden)
