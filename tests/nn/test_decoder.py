import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab.nn import (
    Decoder,
    DecoderConfig,
    RopeScaling,
    decoder,
    init_cache,
    next_token_loss,
    unstack_layers,
)
from jaxlab.nn.rotary import rotary_rotation

SMALL = DecoderConfig(
    vocab_size=13, hidden_size=12, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6
)
WINDOWS = {
    "sliding_window": 3,
    "layer_types": ("full_attention", "sliding_attention", "full_attention"),
}
VARIANTS = {
    "llama": {},
    "multi_head": {"num_kv_heads": 4},
    "one_kv_head": {"num_kv_heads": 1, "rope_theta": 50.0},
    "tied": {"tie_embeddings": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "norm_eps": 1e-2},
    "mistral": {"sliding_window": 3},
    "bidirectional": {"causal": False},
}


def assert_trees_close(a, b, atol):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol), a, b)


def parameter_shapes(config):
    return jax.eval_shape(lambda: decoder.init(config, jax.random.key(0))[1])


def random_params(config, seed=0):
    """Parameters of order one, so that no term of the equations is too small to be seen."""
    leaves, structure = jax.tree.flatten(parameter_shapes(config))
    rng = np.random.default_rng(seed)
    draws = [rng.normal(0.0, 0.4, leaf.shape).astype(np.float32) for leaf in leaves]
    return jax.tree.map(jnp.asarray, jax.tree.unflatten(structure, draws))


def random_tokens(config, shape=(2, 7), seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, shape))


def numpy_decoder(config, params, tokens):
    """The equations written out in float64, one sequence, one position, one head and one key at a time."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    model, layers = params["model"], params["model"]["layers"]
    size, group = config.head_dim, config.num_heads // config.num_kv_heads

    def rms_norm(x, weight):
        return weight * x / np.sqrt(np.dot(x, x) / len(x) + config.norm_eps)

    def turn(x, position):
        out = np.empty(size)
        for i in range(size // 2):
            angle = position * config.rope_theta ** (-2 * i / size)
            out[i] = x[i] * np.cos(angle) - x[i + size // 2] * np.sin(angle)
            out[i + size // 2] = x[i + size // 2] * np.cos(angle) + x[i] * np.sin(angle)
        return out

    def sees(query, key):
        if not config.causal:
            return True
        return key <= query and (config.sliding_window is None or query - key < config.sliding_window)

    def project(layer, name, x, head, norm=None):
        rows = slice(head * size, (head + 1) * size)
        out = layers["self_attn"][name]["weight"][layer][rows] @ x
        if config.qkv_bias:
            out = out + layers["self_attn"][name]["bias"][layer][rows]
        return rms_norm(out, layers["self_attn"][norm]["weight"][layer]) if norm and config.qk_norm else out

    def attention(layer, inputs, position):
        heads = []
        for head in range(config.num_heads):
            query = turn(project(layer, "q_proj", inputs[position], head, "q_norm"), position)
            scores, values = [], []
            for other in range(len(inputs)):
                if sees(position, other):
                    key = turn(project(layer, "k_proj", inputs[other], head // group, "k_norm"), other)
                    scores.append(np.dot(query, key) / np.sqrt(size))
                    values.append(project(layer, "v_proj", inputs[other], head // group))
            weights = np.exp(np.array(scores) - max(scores))
            heads.append(sum(w * v for w, v in zip(weights / weights.sum(), values, strict=True)))
        return layers["self_attn"]["o_proj"]["weight"][layer] @ np.concatenate(heads)

    def feed_forward(layer, x):
        gate = layers["mlp"]["gate_proj"]["weight"][layer] @ x
        return layers["mlp"]["down_proj"]["weight"][layer] @ (
            gate / (1 + np.exp(-gate)) * (layers["mlp"]["up_proj"]["weight"][layer] @ x)
        )

    logits = []
    for sequence in np.asarray(tokens):
        hidden = [model["embed_tokens"]["weight"][token] for token in sequence]
        for layer in range(config.num_layers):
            inputs = [rms_norm(h, layers["input_layernorm"]["weight"][layer]) for h in hidden]
            hidden = [h + attention(layer, inputs, position) for position, h in enumerate(hidden)]
            norm = layers["post_attention_layernorm"]["weight"][layer]
            hidden = [h + feed_forward(layer, rms_norm(h, norm)) for h in hidden]
        head = model["embed_tokens"] if config.tie_embeddings else params["lm_head"]
        logits.append([head["weight"] @ rms_norm(h, model["norm"]["weight"]) for h in hidden])
    return np.array(logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_the_equations(variant):
    config = dataclasses.replace(SMALL, **VARIANTS[variant])
    params, tokens = random_params(config), random_tokens(config)
    logits = jax.jit(decoder.make_apply(config))(params, tokens)
    assert logits.dtype == jnp.float32
    # Logits are of order one; float32 keeps them to a few 1e-6.
    np.testing.assert_allclose(logits, numpy_decoder(config, params, tokens), atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def small():
    return jax.jit(decoder.make_apply(SMALL)), random_params(SMALL), random_tokens(SMALL)


def test_paths_are_those_of_a_checkpoint():
    config = dataclasses.replace(SMALL, qkv_bias=True, qk_norm=True)
    layer = "model/layers"
    expected = {
        "lm_head/weight": (13, 12),
        "model/embed_tokens/weight": (13, 12),
        "model/norm/weight": (12,),
        f"{layer}/input_layernorm/weight": (3, 12),
        f"{layer}/post_attention_layernorm/weight": (3, 12),
        f"{layer}/mlp/gate_proj/weight": (3, 20, 12),
        f"{layer}/mlp/up_proj/weight": (3, 20, 12),
        f"{layer}/mlp/down_proj/weight": (3, 12, 20),
        f"{layer}/self_attn/q_proj/weight": (3, 24, 12),
        f"{layer}/self_attn/q_proj/bias": (3, 24),
        f"{layer}/self_attn/k_proj/weight": (3, 12, 12),
        f"{layer}/self_attn/k_proj/bias": (3, 12),
        f"{layer}/self_attn/v_proj/weight": (3, 12, 12),
        f"{layer}/self_attn/v_proj/bias": (3, 12),
        f"{layer}/self_attn/o_proj/weight": (3, 12, 24),
        f"{layer}/self_attn/q_norm/weight": (3, 6),
        f"{layer}/self_attn/k_norm/weight": (3, 6),
    }
    leaves = jax.tree.leaves_with_path(parameter_shapes(config))
    assert {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves} == expected


# All matrices of a block have one shape here, so that drawing them compiles once.
FRESH = dataclasses.replace(
    SMALL, intermediate_size=12, num_heads=2, num_kv_heads=2, qkv_bias=True, initializer_range=0.1
)


def test_fresh_parameters():
    _, params = decoder.init(FRESH, jax.random.key(0))
    layers = params["model"]["layers"]
    assert jnp.all(params["model"]["norm"]["weight"] == 1)
    assert jnp.all(layers["input_layernorm"]["weight"] == 1)
    assert jnp.all(layers["self_attn"]["q_proj"]["bias"] == 0)
    # 432 draws: the relative error of the deviation is 3.4 %; five of those.
    assert float(jnp.std(layers["mlp"]["up_proj"]["weight"])) == pytest.approx(0.1, rel=0.17)
    gates = layers["mlp"]["gate_proj"]["weight"]
    assert not jnp.allclose(gates[0], gates[1]), "every block has its own draw"
    assert not jnp.allclose(gates, layers["mlp"]["up_proj"]["weight"]), "and every matrix"
    _, again = decoder.init(FRESH, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    _, other = decoder.init(FRESH, jax.random.key(1))
    assert not jnp.allclose(other["lm_head"]["weight"], params["lm_head"]["weight"])


def test_keys_vmap_to_stacked_parameters():
    keys = jax.random.split(jax.random.key(0), 4)
    together = jax.eval_shape(jax.vmap(lambda key: decoder.init(FRESH, key)[1]), keys)
    assert jax.tree.map(lambda leaf: leaf.shape[1:], together) == jax.tree.map(jnp.shape, parameter_shapes(FRESH))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(together)} == {4}


def test_dtype_of_fresh_parameters():
    shapes = parameter_shapes(dataclasses.replace(FRESH, param_dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("bfloat16")}


def test_module_and_function_agree(small):
    apply_fn, params, tokens = small
    module = nnx.eval_shape(lambda: Decoder(SMALL, rngs=nnx.Rngs(0)))
    nnx.update(module, params)
    np.testing.assert_array_equal(nnx.jit(module)(tokens), apply_fn(params, tokens))


@pytest.mark.parametrize("sliding_window", [None, 2])
def test_later_tokens_change_no_earlier_logits(sliding_window):
    config = dataclasses.replace(SMALL, sliding_window=sliding_window)
    apply_fn, params = jax.jit(decoder.make_apply(config)), random_params(config)
    tokens = random_tokens(config)
    changed = tokens.at[:, 4:].set((tokens[:, 4:] + 1) % config.vocab_size)
    before, after = apply_fn(params, tokens), apply_fn(params, changed)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.abs(before[:, 4:] - after[:, 4:]).max(axis=-1).min() > 1e-3


def test_without_causality_later_tokens_do():
    config = dataclasses.replace(SMALL, causal=False)
    apply_fn, params = jax.jit(decoder.make_apply(config)), random_params(config)
    tokens = random_tokens(config)
    changed = tokens.at[:, -1].set((tokens[:, -1] + 1) % config.vocab_size)
    moved = np.abs(apply_fn(params, tokens) - apply_fn(params, changed)).max(axis=-1)
    assert moved.min() > 1e-4


def test_a_window_forgets_what_lies_behind_it():
    config = dataclasses.replace(SMALL, num_layers=1, sliding_window=3)
    apply_fn, params = jax.jit(decoder.make_apply(config)), random_params(config)
    tokens = random_tokens(config)
    changed = tokens.at[:, 0].set((tokens[:, 0] + 1) % config.vocab_size)
    moved = np.abs(apply_fn(params, tokens) - apply_fn(params, changed)).max(axis=(0, 2))
    assert moved[:3].min() > 1e-4
    np.testing.assert_array_equal(moved[3:], 0)


def test_positions_count_relatively(small):
    apply_fn, params, tokens = small
    positions = jnp.arange(7)[None]
    plain = apply_fn(params, tokens)
    np.testing.assert_array_equal(apply_fn(params, tokens, positions=positions), plain)
    np.testing.assert_allclose(apply_fn(params, tokens, positions=positions + 40), plain, atol=1e-4)
    assert np.abs(apply_fn(params, tokens, positions=2 * positions) - plain).max() > 1e-2
    # One row of positions for each sequence.
    rows = apply_fn(params, tokens, positions=jnp.stack([jnp.arange(7), 2 * jnp.arange(7)]))
    np.testing.assert_allclose(rows[0], plain[0], atol=1e-6)
    np.testing.assert_allclose(rows[1], apply_fn(params, tokens, positions=2 * positions)[1], atol=1e-6)


def one_layer(params, index):
    layers = jax.tree.map(lambda leaf: np.asarray(leaf)[index : index + 1], params["model"]["layers"])
    return {**params, "model": {**params["model"], "layers": layers}}


def test_block_mask(small):
    apply_fn, params, tokens = small
    plain = apply_fn(params, tokens)
    np.testing.assert_array_equal(apply_fn(params, tokens, block_mask=jnp.ones(3)), plain)
    # A block masked out is the identity: what remains is the decoder without it.
    single = decoder.make_apply(dataclasses.replace(SMALL, num_layers=1))
    alone = apply_fn(params, tokens, block_mask=jnp.array([0.0, 1.0, 0.0]))
    np.testing.assert_allclose(alone, jax.jit(single)(one_layer(params, 1), tokens), atol=1e-5)
    # In between it scales both residual branches, as scaling their last matrices does.
    half = apply_fn(params, tokens, block_mask=jnp.full(3, 0.5))
    scaled = jax.tree.map(np.array, params)
    scaled["model"]["layers"]["self_attn"]["o_proj"]["weight"] *= 0.5
    scaled["model"]["layers"]["mlp"]["down_proj"]["weight"] *= 0.5
    np.testing.assert_allclose(half, apply_fn(scaled, tokens), atol=1e-5)


def test_scan_equals_blocks_run_one_after_another(small):
    apply_fn, params, tokens = small
    hidden = params["model"]["embed_tokens"]["weight"][tokens]
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(SMALL, rngs=nnx.Rngs(0))).model.layers)
    rotation = rotary_rotation(jnp.arange(7)[None], head_dim=SMALL.head_dim, theta=SMALL.rope_theta)
    causal = jnp.tril(jnp.ones((1, 7, 7), bool))
    block = jax.jit(lambda state, hidden: nnx.merge(graph, state)(hidden, rotation, causal, None)[0])
    layers = jax.tree.map(np.asarray, params["model"]["layers"])
    for layer in range(SMALL.num_layers):
        hidden = block(jax.tree.map(lambda leaf, layer=layer: leaf[layer], layers), hidden)
    norm = params["model"]["norm"]["weight"]
    hidden = hidden * jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + SMALL.norm_eps) * norm
    np.testing.assert_allclose(apply_fn(params, tokens), hidden @ params["lm_head"]["weight"].T, atol=1e-5)


def count_equations(jaxpr):
    inner = [p for eqn in jaxpr.eqns for p in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)]
    return len(jaxpr.eqns) + sum(count_equations(getattr(p, "jaxpr", p)) for p in inner if is_jaxpr(p))


def is_jaxpr(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def test_program_does_not_grow_with_depth():
    def equations(depth, gradient):
        config = dataclasses.replace(SMALL, num_layers=depth)
        apply_fn, params, tokens = decoder.make_apply(config), parameter_shapes(config), random_tokens(config)

        def loss(p):
            return next_token_loss(apply_fn(p, tokens), tokens)

        return count_equations(jax.make_jaxpr(jax.grad(loss) if gradient else loss)(params).jaxpr)

    assert equations(2, False) == equations(9, False) > 50
    assert equations(2, True) == equations(9, True) > 100


def test_remat_changes_memory_and_no_gradient(small, gradient_of_small):
    _, params, tokens = small

    def gradient(config):
        apply_fn = decoder.make_apply(config)
        return jax.grad(lambda p: next_token_loss(apply_fn(p, tokens), tokens))

    kept, recomputed = gradient(SMALL), gradient(dataclasses.replace(SMALL, remat=True))
    assert "remat" in str(jax.make_jaxpr(recomputed)(params))
    assert "remat" not in str(jax.make_jaxpr(kept)(params))
    # Recomputed sums are fused in another order.
    assert_trees_close(jax.jit(recomputed)(params), gradient_of_small, atol=1e-6)


def loss_and_gradient(params, tokens):
    apply_fn = decoder.make_apply(SMALL)
    return jax.value_and_grad(lambda p: next_token_loss(apply_fn(p, tokens), tokens))(params)


# Compiled once for all tests.
jitted_loss_and_gradient = jax.jit(loss_and_gradient)


@pytest.fixture(scope="module")
def gradient_of_small(small):
    _, params, tokens = small
    return jitted_loss_and_gradient(params, tokens)[1]


def test_gradient_matches_finite_differences(small, gradient_of_small):
    _, params, tokens = small
    params, direction, gradient = jax.tree.map(np.asarray, (params, random_params(SMALL, seed=5), gradient_of_small))
    step = np.float32(1e-2)
    ahead, behind = (
        jitted_loss_and_gradient(jax.tree.map(lambda p, d, s=s: p + s * d, params, direction), tokens)[0]
        for s in (step, -step)
    )
    slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, gradient, direction)))
    # Central differences err by step²; float32 losses by 1e-7 / step.
    assert float(slope) == pytest.approx(float(ahead - behind) / (2 * float(step)), rel=2e-2)


def relative_error(tree, exact):
    """By NumPy: nothing to compile for the shape of each leaf."""
    tree, exact = (
        np.concatenate([np.asarray(leaf, np.float32).ravel() for leaf in jax.tree.leaves(t)]) for t in (tree, exact)
    )
    return float(np.linalg.norm(tree - exact) / np.linalg.norm(exact))


# bfloat16 keeps 8 bits; errors of 2^-8 pile up over three blocks, and backwards over them again, to about a percent.


def test_bfloat16_products_of_float32_parameters(small):
    apply_fn, params, tokens = small
    logits = jax.jit(decoder.make_apply(dataclasses.replace(SMALL, dtype="bfloat16")))(params, tokens)
    assert logits.dtype == jnp.float32
    assert 1e-4 < relative_error(logits, apply_fn(params, tokens)) < 0.03


def test_bfloat16_parameters(small, gradient_of_small):
    apply_fn, params, tokens = small
    narrow = decoder.make_apply(dataclasses.replace(SMALL, dtype="bfloat16", param_dtype="bfloat16"))

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        logits = narrow(params, tokens)
        return next_token_loss(logits, tokens), logits

    (value, logits), gradient = loss(jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), params))
    assert logits.dtype == value.dtype == jnp.float32
    assert relative_error(logits, apply_fn(params, tokens)) < 0.03
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("bfloat16")}
    assert relative_error(gradient, gradient_of_small) < 0.04


@pytest.fixture(scope="module")
def nodes():
    """Four nodes with parameters and tokens of their own, and the gradient of each computed alone."""
    params = jax.tree.map(lambda *leaves: np.stack(leaves), *(random_params(SMALL, seed) for seed in range(4)))
    tokens = np.asarray(random_tokens(SMALL, (4, 2, 7)))

    alone = [jitted_loss_and_gradient(jax.tree.map(lambda leaf, i=i: leaf[i], params), tokens[i]) for i in range(4)]
    return loss_and_gradient, params, tokens, jax.tree.map(lambda *leaves: np.stack(leaves), *alone)


def test_vmap_over_nodes_equals_separate_calls(nodes):
    gradient, params, tokens, alone = nodes
    assert_trees_close(jax.jit(jax.vmap(gradient))(params, tokens), alone, atol=1e-6)


def test_shard_map_over_nodes_equals_separate_calls(nodes):
    gradient, params, tokens, alone = nodes
    mesh = jax.make_mesh((2,), ("node",), devices=jax.devices()[:2])
    spec = PartitionSpec("node")
    sharded = jax.shard_map(jax.vmap(gradient), mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec))
    placed = jax.device_put((params, tokens), NamedSharding(mesh, spec))
    assert_trees_close(jax.jit(sharded)(*placed), alone, atol=1e-6)


def test_learns_a_rule():
    """Each token is the last but one plus one: it takes attention, and nothing of it can be guessed (2.6 nats)."""
    apply_fn, params = decoder.init(FRESH, jax.random.key(0))
    optimizer = optax.adam(1e-2)

    def batch(key):
        starts = jax.random.randint(key, (32, 1, 2), 0, 13)
        return jnp.reshape(starts + jnp.arange(5)[:, None], (32, 10)) % 13

    def loss(params, tokens):
        return next_token_loss(apply_fn(params, tokens), tokens, mask=jnp.arange(10) > 1 + jnp.zeros((32, 1)))

    def step(carry, key):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, batch(key))
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), value

    keys = jax.random.split(jax.random.key(1), 300)
    _, losses = jax.jit(lambda carry: jax.lax.scan(step, carry, keys))((params, optimizer.init(params)))
    assert losses[0] > 2
    assert losses[-10:].mean() < 0.1, "fresh batches: nothing is learnt by heart"


class TestNextTokenLoss:
    def test_closed_form(self):
        logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]]]))
        tokens = jnp.array([[2, 1, 2]])
        expected = -(np.log(0.25) + np.log(0.8)) / 2
        assert float(next_token_loss(logits, tokens)) == pytest.approx(expected, rel=1e-6)

    def test_uniform_logits_give_the_log_of_the_vocabulary(self):
        tokens = random_tokens(SMALL, (4, 2, 7))
        assert float(next_token_loss(jnp.zeros((4, 2, 7, 13)), tokens)) == pytest.approx(np.log(13), rel=1e-6)

    def test_mask_weighs_targets(self):
        logits = np.random.default_rng(0).normal(size=(2, 5, 13)).astype(np.float32)
        tokens = np.asarray(random_tokens(SMALL, (2, 5)))
        mask = np.array([[True, True, False, True, False], [False, True, False, False, False]])
        log_probs = np.asarray(jax.nn.log_softmax(logits))
        kept = [-log_probs[row, at - 1, tokens[row, at]] for row, at in ((0, 1), (0, 3), (1, 1))]
        loss = jax.jit(next_token_loss)
        assert float(loss(logits, tokens, mask=mask)) == pytest.approx(float(sum(kept)) / 3, rel=1e-6)
        weights = 0.25 * mask.astype(np.float32)
        assert float(loss(logits, tokens, mask=weights)) == pytest.approx(float(sum(kept)) / 3, rel=1e-6)

    def test_nothing_to_count_is_zero_with_zero_gradient(self):
        tokens = random_tokens(SMALL, (2, 5))
        loss = functools.partial(next_token_loss, tokens=tokens, mask=jnp.zeros((2, 5)))
        value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.ones((2, 5, 13)))
        assert value == 0
        np.testing.assert_array_equal(gradient, 0)

    def test_one_token_has_no_next(self):
        with pytest.raises(ValueError, match="at least two tokens; got 1"):
            next_token_loss(jnp.zeros((2, 1, 13)), jnp.zeros((2, 1), int))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1; got 0"),
        ({"num_layers": -1}, "num_layers must be at least 1; got -1"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads; got 3 and 4"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1; got 0"),
        (
            {"hidden_size": 30, "head_dim": None},
            "num_heads must divide hidden_size unless head_dim is given; got 4 and 30",
        ),
        ({"head_dim": 5}, "head_dim must be even.*got 5"),
        ({"sliding_window": 0}, "sliding_window must be at least 1; got 0"),
        ({"sliding_window": 2, "causal": False}, "sliding_window needs causal=True"),
        ({"rope_theta": 0.0}, "rope_theta must be positive; got 0.0"),
        ({"norm_eps": float("nan")}, "norm_eps must be a finite number; got nan"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1; got 0"),
        ({"layer_types": ("full_attention",)}, "one entry for each of the 3 blocks; got 1"),
        (
            {"layer_types": ("full_attention", "linear_attention", "full_attention")},
            "layer_types must be one of full_attention, sliding_attention; got 'linear_attention'",
        ),
        ({"layer_types": ("sliding_attention",) * 3}, "sliding_attention need a sliding_window; got None"),
        ({"rope_scaling": RopeScaling("yarn", 2.0)}, "yarn needs original_max_position_embeddings.*got neither"),
        ({"attention_implementation": "triton"}, "attention_implementation must be one of xla, cudnn; got 'triton'"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16; got 'int8'"),
        ({"param_dtype": "float64"}, "param_dtype must be one of .*; got 'float64'"),
    ],
)
def test_config_names_the_bad_value(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_heads_default_to_equal_parts():
    config = DecoderConfig(vocab_size=5, hidden_size=32, intermediate_size=8, num_layers=1, num_heads=4)
    assert (config.kv_heads, config.head_size) == (4, 8)
    wider = dataclasses.replace(config, hidden_size=64, num_heads=2)
    assert (wider.kv_heads, wider.head_size) == (2, 32)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_sequences_and_no_tokens(small, shape):
    _, params, _ = small
    logits = jax.eval_shape(decoder.make_apply(SMALL), params, jnp.zeros(shape, jnp.int32))
    assert logits.shape == (*shape, SMALL.vocab_size)


def test_hidden_states_in_the_order_asked_for(small):
    apply_fn, params, tokens = small
    chosen = jax.jit(functools.partial(decoder.make_apply(SMALL), hidden_states=(2, -1, 0)))
    logits, hidden = map(np.asarray, chosen(params, tokens))
    params, tokens = jax.tree.map(np.asarray, (params, tokens))
    assert hidden.shape == (3, 2, 7, 12)
    np.testing.assert_allclose(logits, apply_fn(params, tokens), atol=1e-6)
    np.testing.assert_array_equal(hidden[2], params["model"]["embed_tokens"]["weight"][tokens])
    np.testing.assert_allclose(hidden[1] @ params["lm_head"]["weight"].T, logits, atol=1e-5)
    # After block 1: what the decoder of two blocks has before its norm, which a norm of one half undoes.
    two = jax.tree.map(lambda leaf: leaf, params)
    two["model"]["layers"] = jax.tree.map(lambda leaf: leaf[:2], params["model"]["layers"])
    shallow = decoder.make_apply(dataclasses.replace(SMALL, num_layers=2))
    last = jax.jit(functools.partial(shallow, hidden_states=(2,)))(two, tokens)[1][0]
    last = np.asarray(last) / params["model"]["norm"]["weight"]
    scale = np.sqrt(np.mean(hidden[0] ** 2, axis=-1, keepdims=True) + SMALL.norm_eps)
    np.testing.assert_allclose(last * scale, hidden[0], atol=1e-4)


def test_only_the_hidden_states_asked_for_are_kept(small):
    _, params, tokens = small

    def shapes(wanted):
        jaxpr = jax.make_jaxpr(functools.partial(decoder.make_apply(SMALL), hidden_states=wanted))(params, tokens)
        return [v.aval.shape for eqn in jaxpr.jaxpr.eqns for v in eqn.outvars if v.aval.shape[1:] == (2, 7, 12)]

    assert max(shape[0] for shape in shapes((1,))) == 2, "one row, and one more for the states that are dropped"
    assert max(shape[0] for shape in shapes((0, 1, 2, 3))) == 5


@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["full", "windows"])
def test_padding_changes_nothing(windows):
    config = dataclasses.replace(SMALL, **windows)
    apply_fn, params = jax.jit(decoder.make_apply(config)), random_params(config)
    tokens = random_tokens(config, (1, 7))
    alone = apply_fn(params, tokens[:, :4])
    noise = random_tokens(config, (1, 3), seed=8)
    for side in ("left", "right"):
        pieces = [noise, tokens[:, :4]] if side == "left" else [tokens[:, :4], noise]
        real = jnp.concatenate([jnp.full((1, piece.shape[1]), piece is not noise) for piece in pieces], axis=1)
        padded = apply_fn(params, jnp.concatenate(pieces, axis=1), padding_mask=real)
        assert np.isfinite(padded).all()
        np.testing.assert_allclose(padded[real], alone[0], atol=1e-5)


@pytest.mark.parametrize("unstacked", [False, True])
def test_cached_pieces_equal_the_whole(unstacked):
    """Prompts padded left and right, then a padded piece, then single tokens: all as if read at once."""
    config = dataclasses.replace(SMALL, **WINDOWS, qk_norm=True)
    params = random_params(config)
    whole = jax.jit(decoder.make_apply(config))
    apply_cached = jax.jit(decoder.apply_cached, static_argnums=0, static_argnames=("fresh", "last"))
    layout = unstack_layers(params) if unstacked else params
    real = np.array([[0, 0, 1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0, 1, 1]], bool)
    tokens = np.asarray(random_tokens(config, real.shape))
    cache, got = init_cache(config, 2, 10, unstacked=unstacked), []
    for start, stop in ((0, 4), (4, 7), (7, 8), (8, 9)):
        piece = slice(start, stop)
        logits, cache = apply_cached(
            config, layout, tokens[:, piece], cache, padding_mask=real[:, piece], fresh=start == 0
        )
        got.append(logits)
    assert int(cache.filled) == 9
    for row in range(2):
        expected = whole(params, tokens[row][real[row]][None])[0]
        np.testing.assert_allclose(np.concatenate(got, axis=1)[row][real[row]], expected, atol=1e-5)


@pytest.mark.parametrize("unstacked", [False, True])
def test_last_logits_are_those_of_the_last_real_token(small, unstacked):
    apply_fn, params, tokens = small
    real = jnp.array([[True] * 7, [True] * 4 + [False] * 3])
    cache = init_cache(SMALL, 2, 7, unstacked=unstacked)
    layout = unstack_layers(params) if unstacked else params
    apply_cached = jax.jit(decoder.apply_cached, static_argnums=0, static_argnames=("fresh", "last"))
    last, cache = apply_cached(SMALL, layout, tokens, cache, padding_mask=real, fresh=True, last=True)
    every = apply_fn(params, tokens)
    np.testing.assert_allclose(last, [every[0, 6], every[1, 3]], atol=1e-5)
    leaves = map(np.asarray, jax.tree.leaves(cache.layers))
    assert all((np.abs(leaf).sum(axis=(-1, -3)) > 0).all() for leaf in leaves), "none is left out"


class TestBadInput:
    def test_padding_inside_a_sequence(self, small):
        _, params, tokens = small
        mask = np.array([[True] * 7, [True, False, True, True, True, True, True]])
        with pytest.raises(ValueError, match="left or right of a sequence, not inside; row 1"):
            decoder.make_apply(SMALL)(params, tokens, padding_mask=mask)

    def test_hidden_state_that_does_not_exist(self, small):
        _, params, tokens = small
        with pytest.raises(ValueError, match="hidden_states must be between -4 and 3; got 4"):
            decoder.make_apply(SMALL)(params, tokens, hidden_states=(0, 4))
        with pytest.raises(ValueError, match=r"must not name a state twice; got \(3, -1\)"):
            decoder.make_apply(SMALL)(params, tokens, hidden_states=(3, -1))

    def test_cache_too_small(self, small):
        _, params, tokens = small
        with pytest.raises(ValueError, match=r"0 [+] 7 tokens do not fit into a cache of 5 slots"):
            decoder.apply_cached(SMALL, params, tokens, init_cache(SMALL, 2, 5), fresh=True)
        with pytest.raises(ValueError, match="for each of the cache's 3 sequences; got 2"):
            decoder.apply_cached(SMALL, params, tokens, init_cache(SMALL, 3, 9))
        with pytest.raises(ValueError, match="length of a cache must be at least 1; got 0"):
            init_cache(SMALL, 2, 0)

    def test_cache_of_the_other_layout(self, small):
        _, params, tokens = small
        with pytest.raises(ValueError, match="params are stacked and the cache is unstacked"):
            decoder.apply_cached(SMALL, params, tokens, init_cache(SMALL, 2, 9, unstacked=True))

    def test_cache_of_a_decoder_that_sees_ahead(self, small):
        _, params, tokens = small
        config = dataclasses.replace(SMALL, causal=False)
        with pytest.raises(ValueError, match="a cache needs a causal decoder"):
            decoder.apply_cached(config, params, tokens, init_cache(config, 2, 9))

    def test_params_of_another_config(self, small):
        apply_fn, _, tokens = small
        deeper = random_params(dataclasses.replace(SMALL, num_layers=4))
        with pytest.raises(ValueError, match=r"input_layernorm/weight must have shape \(3, 12\); got \(4, 12\)"):
            apply_fn(deeper, tokens)
        tied = random_params(dataclasses.replace(SMALL, tie_embeddings=True))
        with pytest.raises(ValueError, match=r"lm_head/weight is missing"):
            apply_fn(tied, tokens)
        with pytest.raises(ValueError, match="k_proj/bias is not a parameter of it"):
            apply_fn(random_params(dataclasses.replace(SMALL, qkv_bias=True)), tokens)

    def test_block_mask_of_another_depth(self, small):
        apply_fn, params, tokens = small
        with pytest.raises(ValueError, match=r"block_mask must have shape \(3,\); got \(2,\)"):
            apply_fn(params, tokens, block_mask=jnp.ones(2))

    def test_token_outside_the_vocabulary(self, small):
        apply_fn, params, tokens = small
        logits = apply_fn(params, tokens.at[0, 3].set(SMALL.vocab_size))
        assert np.isnan(logits[0]).all(axis=-1)[3:].all()
        np.testing.assert_array_equal(logits[1], apply_fn(params, tokens)[1])
