"""What the five encoders promise alike: masks, hidden states, dtypes, sharding, bad input."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlab.nn import bert, clip_vision, dinov2, distilbert, vit

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 3, "num_heads": 4}
IMAGES = {**SIZES, "image_size": 8, "patch_size": 4}
NETWORKS = {
    "bert": (bert, bert.BertConfig(**SIZES, vocab_size=11, max_position_embeddings=9, num_labels=3)),
    "distilbert": (distilbert, distilbert.DistilBertConfig(**SIZES, vocab_size=11, num_labels=3)),
    "vit": (vit, vit.ViTConfig(**IMAGES, num_labels=3)),
    "clip_vision": (clip_vision, clip_vision.CLIPVisionConfig(**IMAGES, projection_dim=3)),
    "dinov2": (dinov2, dinov2.Dinov2Config(**IMAGES, num_labels=3, num_register_tokens=2)),
}
STACK = {"bert": "encoder/layer", "distilbert": "transformer/layer", "clip_vision": "encoder/layers"}
every_network = pytest.mark.parametrize("name", NETWORKS)
# Where what is tested is one piece of code: of those that normalise after, and before.
two_networks = pytest.mark.parametrize("name", ["bert", "dinov2"])


def shapes_of(module, config):
    return jax.eval_shape(lambda: module.init(config, jax.random.key(0))[1])


def random_params(module, config, seed=0):
    """Parameters of order one, so that no term is too small to be seen."""
    leaves, structure = jax.tree.flatten(shapes_of(module, config))
    rng = np.random.default_rng(seed)
    draws = [jnp.asarray(rng.normal(0.0, 0.4, leaf.shape), jnp.float32) for leaf in leaves]
    return jax.tree.unflatten(structure, draws)


def inputs_of(name, batch=4):
    rng = np.random.default_rng(1)
    if name.endswith("bert"):
        return jnp.asarray(rng.integers(0, 11, (batch, 6)))
    return jnp.asarray(rng.normal(size=(batch, 8, 8, 3)), jnp.float32)


@functools.cache
def network(name):
    """The function (jitted once for all tests), parameters, inputs and the output."""
    module, config = NETWORKS[name]
    apply_fn = jax.jit(module.make_apply(config), static_argnames="hidden_states")
    params, inputs = random_params(module, config), inputs_of(name)
    ones = jnp.ones(config.num_layers)
    return apply_fn, params, inputs, apply_fn(params, inputs, block_mask=ones, hidden_states=(0, 1, 2, 3))


def head(output):
    return output.image_embeds if output.logits is None else output.logits


def stack_of(name, params):
    for part in STACK.get(name, "encoder/layer").split("/"):
        params = params[part]
    return params


@every_network
def test_masked_blocks_are_the_identity(name):
    apply_fn, params, inputs, plain = network(name)
    masked = functools.partial(apply_fn, params, inputs, hidden_states=(0, 1, 2, 3))
    none = masked(block_mask=jnp.zeros(3)).hidden_states
    np.testing.assert_array_equal(none, jnp.broadcast_to(plain.hidden_states[0], none.shape))
    one = masked(block_mask=jnp.array([1.0, 0.0, 1.0])).hidden_states
    np.testing.assert_array_equal(one[1], plain.hidden_states[1])
    np.testing.assert_array_equal(one[2], one[1])
    assert np.abs(one[3] - one[2]).max() > 0.1


@every_network
def test_half_a_block(name):
    """Half of each residual branch before a norm, half of the whole block after one."""
    apply_fn, params, inputs, plain = network(name)
    half = apply_fn(params, inputs, block_mask=jnp.full(3, 0.5), hidden_states=(0, 1, 2, 3)).hidden_states[1]
    if name.endswith("bert"):
        expected = (plain.hidden_states[0] + plain.hidden_states[1]) / 2
    else:
        halved = jax.tree.map(lambda leaf: leaf, params)
        last = {
            "vit": [("attention", "output", "dense"), ("output", "dense")],
            "clip_vision": [("self_attn", "out_proj"), ("mlp", "fc2")],
            "dinov2": [("layer_scale1",), ("layer_scale2",)],
        }
        for path in last[name]:
            node = stack_of(name, halved)
            for part in path:
                node = node[part]
            node.update({key: np.asarray(leaf) / 2 for key, leaf in node.items()})
        expected = apply_fn(halved, inputs, block_mask=jnp.ones(3), hidden_states=(0, 1, 2, 3)).hidden_states[1]
    np.testing.assert_allclose(half, expected, atol=1e-5)


@two_networks
def test_hidden_states_asked_for(name):
    apply_fn, params, inputs, plain = network(name)
    chosen = apply_fn(params, inputs, hidden_states=(-1, 0, 2)).hidden_states
    # Another program than the one with all of them and a mask: sums are fused in another order.
    np.testing.assert_allclose(chosen, plain.hidden_states[jnp.array([3, 0, 2])], atol=1e-5)
    assert jax.eval_shape(apply_fn, params, inputs).hidden_states is None
    assert jax.eval_shape(functools.partial(apply_fn, hidden_states=()), params, inputs).hidden_states.shape[0] == 0
    with pytest.raises(ValueError, match=r"hidden_states must be in -4\.\.3; got 4"):
        apply_fn(params, inputs, hidden_states=(0, 4))


def count_equations(jaxpr):
    inner = [p for eqn in jaxpr.eqns for p in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)]
    return len(jaxpr.eqns) + sum(count_equations(getattr(p, "jaxpr", p)) for p in inner if is_jaxpr(p))


def is_jaxpr(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")


@every_network
def test_program_does_not_grow_with_depth_and_remat_is_on_a_flag(name):
    module, config = NETWORKS[name]

    def gradient(**changes):
        changed = dataclasses.replace(config, **changes)
        apply_fn, inputs = module.make_apply(changed), inputs_of(name)
        return jax.make_jaxpr(jax.grad(lambda p: head(apply_fn(p, inputs)).sum()))(shapes_of(module, changed))

    shallow, deep = gradient(num_layers=2), gradient(num_layers=7)
    assert count_equations(shallow.jaxpr) == count_equations(deep.jaxpr) > 100
    assert "remat" in str(gradient(remat=True))
    assert "remat" not in str(deep)


def relative_error(a, b):
    return float(np.linalg.norm(np.asarray(a, np.float32) - b) / np.linalg.norm(b))


@every_network
def test_bfloat16(name):
    _, params, inputs, plain = network(name)
    module, config = NETWORKS[name]
    narrow = dataclasses.replace(config, dtype="bfloat16", param_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes_of(module, narrow))} == {jnp.dtype("bfloat16")}
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), params)
    output = jax.jit(module.make_apply(narrow))(params, inputs)
    assert output.last_hidden_state.dtype == jnp.bfloat16
    assert head(output).dtype == jnp.float32
    # 8 bits, errors of 2^-8 piled up over three blocks.
    assert 1e-4 < relative_error(output.last_hidden_state, plain.last_hidden_state) < 0.05


def two_by_four(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


@every_network
def test_sharded_equals_one_device(name):
    apply_fn, params, inputs, plain = network(name)
    module, config = NETWORKS[name]
    mesh = two_by_four()
    specs = module.partition_specs(config, mesh)
    placed = jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    first = jax.tree.leaves(stack_of(name, placed)["self_attn" if name == "clip_vision" else "attention"])[-1]
    assert first.addressable_shards[0].data.size * 4 == first.size, "a quarter on each device"
    rows = jax.device_put(inputs, NamedSharding(mesh, PartitionSpec("data")))
    sharded = apply_fn(placed, rows, hidden_states=(0, 1, 2, 3))
    np.testing.assert_allclose(sharded.hidden_states, plain.hidden_states, atol=1e-5)
    np.testing.assert_allclose(head(sharded), head(plain), atol=1e-5)


@every_network
def test_partition_specs(name):
    module, config = NETWORKS[name]
    mesh = two_by_four()
    specs = jax.tree.leaves_with_path(
        module.partition_specs(config, mesh), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    shapes = shapes_of(module, config)
    split = [path for path, spec in specs if "model" in spec]
    # Weight and bias of queries, keys, values and the first map of the feed-forward layer; two weights besides.
    assert len(split) == 10
    sizes = dict(jax.tree.leaves_with_path(shapes))
    for path, spec in specs:
        assert all(axis is None or size % 4 == 0 for axis, size in zip(spec, sizes[path].shape, strict=False))
    # Two heads cannot be shared by four devices, and stay whole.
    fewer = module.partition_specs(dataclasses.replace(config, num_heads=2), mesh)
    leaves = jax.tree.leaves(fewer, is_leaf=lambda x: isinstance(x, PartitionSpec))
    assert sum("model" in spec for spec in leaves) == 3
    with pytest.raises(ValueError, match="the mesh has no axis 'pipe'; its axes are data, model"):
        module.partition_specs(config, mesh, axis="pipe")
    with pytest.raises(ValueError, match=r"must be AxisType\.Auto, .*; got Explicit, Explicit"):
        module.partition_specs(config, two_by_four(AxisType.Explicit))


@two_networks
def test_vmap_over_stacked_parameters(name):
    _, params, inputs, _ = network(name)
    module, config = NETWORKS[name]
    apply_fn = module.make_apply(config)
    other = random_params(module, config, seed=2)
    stacked = jax.tree.map(lambda a, b: np.stack([a, b]), params, other)
    together = jax.jit(jax.vmap(lambda p, x: head(apply_fn(p, x))))(stacked, np.stack([inputs, inputs]))
    np.testing.assert_allclose(together[0], head(network(name)[3]), atol=1e-5)
    assert np.abs(together[1] - together[0]).max() > 0.1


@every_network
def test_bad_params_and_masks(name):
    apply_fn, params, inputs, _ = network(name)
    module, config = NETWORKS[name]
    with pytest.raises(ValueError, match=r"block_mask must have shape \(3,\); got \(2,\)"):
        apply_fn(params, inputs, block_mask=jnp.ones(2))
    deeper = shapes_of(module, dataclasses.replace(config, num_layers=4))
    with pytest.raises(ValueError, match=r"params do not fit the config: .* must have shape \(3, .*; got \(4, "):
        jax.eval_shape(apply_fn, deeper, inputs)
    headless = {key: value for key, value in params.items() if key not in ("classifier", "visual_projection")}
    with pytest.raises(ValueError, match=r"(classifier|visual_projection).* is missing"):
        apply_fn(headless, inputs)
    with pytest.raises(ValueError, match="extra is not a parameter of it"):
        apply_fn({**params, "extra": jnp.ones(3)}, inputs)


@every_network
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1; got 0"),
        ({"num_heads": 3}, "num_heads must divide hidden_size; got 3 and 16"),
        ({"hidden_act": "mish"}, "hidden_act must be one of gelu, .*; got 'mish'"),
        ({"norm_eps": 0.0}, "norm_eps must be positive; got 0.0"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16; got 'int8'"),
    ],
)
def test_config_names_the_bad_value(name, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(NETWORKS[name][1], **change)


@every_network
def test_no_inputs(name):
    module, config = NETWORKS[name]
    params, inputs = shapes_of(module, config), inputs_of(name)[:0]
    output = jax.eval_shape(module.make_apply(config), params, inputs)
    assert output.last_hidden_state.shape[0] == 0


def test_fresh_parameters():
    config = dinov2.Dinov2Config(**IMAGES, num_register_tokens=2, initializer_range=0.1, layer_scale=0.5)
    params = jax.jit(lambda key: dinov2.init(config, key)[1])(jax.random.key(0))
    layer = params["encoder"]["layer"]
    assert jnp.all(layer["norm1"]["weight"] == 1)
    assert jnp.all(layer["norm1"]["bias"] == 0)
    assert jnp.all(layer["layer_scale1"]["lambda1"] == 0.5)
    assert jnp.all(params["embeddings"]["register_tokens"] == 0)
    weight = layer["mlp"]["fc1"]["weight"]
    # 1536 draws: the relative error of the deviation is 1.8 %; five of those.
    assert float(jnp.std(weight)) == pytest.approx(0.1, rel=0.09)
    assert not jnp.allclose(weight[0], weight[1]), "every block has its own draw"
