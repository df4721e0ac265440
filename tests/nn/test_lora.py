import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.nn import DecoderConfig, bert, decoder, lora, next_token_loss, unstack_layers, vit
from jaxlab.nn.linear import LowRankSum

SMALL = DecoderConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=3, num_heads=2)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 6)))


def drawn_params(module, config):
    """Parameters of order one, drawn by NumPy: nothing to compile."""
    shapes = jax.eval_shape(lambda: module.init(config, jax.random.key(0))[1])
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.0, 0.5, leaf.shape), jnp.float32), shapes)


@pytest.fixture(scope="module")
def network():
    return jax.jit(decoder.make_apply(SMALL)), drawn_params(decoder, SMALL)


def random_adapters(params, **options):
    """Adapters whose B is no longer zero."""
    adapters = lora.init(params, jax.random.key(1), **{"target": ("q_proj", "down_proj"), "rank": 2, **options})
    leaves, structure = jax.tree.flatten(adapters)
    rng = np.random.default_rng(2)
    draws = [jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, draws)


def paths_of(adapters):
    return [target.path for target in adapters.targets]


class TestInit:
    def test_changes_nothing_yet(self, network):
        apply_fn, params = network
        adapters = lora.init(params, jax.random.key(0), target=("q_proj", "down_proj"), rank=2)
        np.testing.assert_array_equal(apply_fn(lora.apply(params, adapters), TOKENS), apply_fn(params, TOKENS))

    def test_factors_lie_where_the_matrices_lie(self, network):
        adapters = lora.init(network[1], jax.random.key(0), target=("q_proj", "down_proj"), rank=2)
        leaves = jax.tree.leaves_with_path(adapters.factors)
        found = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}
        assert found == {
            "model/layers/self_attn/q_proj/lora_A/weight": (3, 2, 8),
            "model/layers/self_attn/q_proj/lora_B/weight": (3, 8, 2),
            "model/layers/mlp/down_proj/lora_A/weight": (3, 2, 12),
            "model/layers/mlp/down_proj/lora_B/weight": (3, 8, 2),
        }

    def test_blocks_one_by_one(self, network):
        with pytest.raises(ValueError, match="adapters need stacked blocks; apply or merge them first"):
            lora.init(unstack_layers(network[1]), jax.random.key(0), target="q_proj", rank=2)

    def test_draws(self):
        shapes = {"wide": {"weight": jax.ShapeDtypeStruct((100, 400), jnp.float32)}}
        adapters = lora.init(shapes, jax.random.key(0), target="wide", rank=50, dtype="bfloat16")
        down = adapters.factors["wide"]["lora_A"]["weight"].astype(jnp.float32)
        assert adapters.factors["wide"]["lora_A"]["weight"].dtype == jnp.bfloat16
        assert float(jnp.abs(down).max()) == pytest.approx(1 / 20, rel=0.02)
        assert float(jnp.std(down)) == pytest.approx(1 / 20 / math.sqrt(3), rel=0.02)
        np.testing.assert_array_equal(adapters.factors["wide"]["lora_B"]["weight"], 0)

    def test_every_block_and_matrix_has_its_own_draw(self, network):
        adapters = lora.init(network[1], jax.random.key(0), target="*_proj", rank=2)
        attention = adapters.factors["model"]["layers"]["self_attn"]
        down = attention["q_proj"]["lora_A"]["weight"]
        assert not jnp.allclose(down[0], down[1])
        assert not jnp.allclose(down, attention["k_proj"]["lora_A"]["weight"])

    @pytest.mark.parametrize(
        ("target", "expected"),
        [
            ("q_proj", ["self_attn/q_proj"]),
            (("self_attn/*",), [f"self_attn/{name}_proj" for name in "kqvo"]),
            (("[qk]_proj", "down_proj"), ["mlp/down_proj", "self_attn/k_proj", "self_attn/q_proj"]),
        ],
    )
    def test_patterns(self, network, target, expected):
        adapters = lora.init(network[1], jax.random.key(0), target=target, rank=1)
        assert sorted(paths_of(adapters)) == sorted(f"model/layers/{path}" for path in expected)

    def test_star_is_every_linear_map_and_no_table_norm_or_convolution(self, network):
        everything = paths_of(lora.init(network[1], jax.random.key(0), target="*", rank=1))
        assert len(everything) == 8
        assert "lm_head" in everything
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_layers": 2, "num_heads": 2}
        for module, config in (
            (bert, bert.BertConfig(**sizes, vocab_size=5, num_labels=2)),
            (vit, vit.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=2)),
        ):
            shapes = jax.eval_shape(lambda module=module, config=config: module.init(config, jax.random.key(0))[1])
            found = lora.matrices(shapes)
            assert len(found) == 6 + 2, sorted(found)  # of a block, the pooler and the classes
            assert not any("orm" in path or "embed" in path for path in found)


class TestApplyAndMerge:
    @pytest.mark.parametrize("use_rslora", [False, True])
    def test_both_equal_the_formula(self, network, use_rslora):
        apply_fn, params = network
        adapters = random_adapters(params, alpha=3.0, use_rslora=use_rslora)
        merged = lora.merge(params, adapters)
        scale = 3.0 / (math.sqrt(2) if use_rslora else 2)
        for path in ("self_attn/q_proj", "mlp/down_proj"):
            before, after = (lora.find(p, f"model/layers/{path}/weight") for p in (params, merged))
            pair = lora.find(adapters.factors, f"model/layers/{path}")
            for layer in range(3):
                down, up = (np.asarray(pair[name]["weight"][layer], np.float64) for name in ("lora_A", "lora_B"))
                np.testing.assert_allclose(after[layer], before[layer] + scale * up @ down, rtol=1e-5, atol=1e-5)
        untouched = jax.tree.map(lambda a, b: bool((a == b).all()), params, merged)
        assert sum(not same for same in jax.tree.leaves(untouched)) == 2
        applied = apply_fn(lora.apply(params, adapters), TOKENS)
        np.testing.assert_allclose(applied, apply_fn(merged, TOKENS), atol=1e-4)
        assert np.abs(applied - apply_fn(params, TOKENS)).max() > 0.1

    def test_no_changed_matrix_is_formed(self, network):
        """The program with adapters holds no intermediate of the size of the stacked matrices."""
        _, params = network
        apply_fn = decoder.make_apply(SMALL)
        adapters = random_adapters(params, target="down_proj")

        def loss(adapters):
            return next_token_loss(apply_fn(lora.apply(params, adapters), TOKENS), TOKENS)

        def made(jaxpr):
            for equation in jaxpr.eqns:
                yield from (value.aval.shape for value in equation.outvars)
                for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        yield from made(inner)

        assert (3, 8, 12) not in set(made(jax.make_jaxpr(loss)(adapters).jaxpr))

    def test_params_are_left_as_they_are(self, network):
        _, params = network
        before = jax.tree.map(lambda leaf: leaf, params)
        applied = lora.apply(params, random_adapters(params))
        assert isinstance(lora.find(applied, "model/layers/self_attn/q_proj/weight"), LowRankSum)
        assert jax.tree.structure(before) == jax.tree.structure(params)

    def test_one_upon_another_adds_up(self, network):
        _, params = network
        one, other = random_adapters(params), random_adapters(params, target="q_proj", rank=1)
        both = lora.merge(lora.apply(params, one), other)
        expected = lora.merge(lora.merge(params, one), other)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), both, expected)

    def test_unstacked_blocks(self, network):
        apply_fn, params = network
        applied = lora.apply(params, random_adapters(params))
        np.testing.assert_allclose(
            jax.jit(decoder.make_apply(SMALL))(unstack_layers(applied), TOKENS), apply_fn(applied, TOKENS), atol=1e-5
        )

    def test_bfloat16_is_merged_in_float32(self):
        """2^-9 + 2^-8 is more than half the distance 2^-7 of bfloat16 above 1, though each alone would be lost."""
        params = {"map": {"weight": jnp.ones((2, 2), jnp.bfloat16)}}
        adapters = lora.init(params, jax.random.key(0), target="map", rank=2, alpha=2.0, dtype="bfloat16")
        pair = {
            "lora_A": {"weight": jnp.ones((2, 2), jnp.bfloat16)},
            "lora_B": {"weight": jnp.asarray([[2.0**-9, 2.0**-8], [2.0**-10, 2.0**-10]], jnp.bfloat16)},
        }
        merged = lora.merge(params, adapters.replace(factors={"map": pair}))["map"]["weight"]
        assert merged.dtype == jnp.bfloat16
        exact = jnp.asarray([[1 + 3 * 2.0**-9] * 2, [1 + 2.0**-9] * 2], jnp.float32)
        np.testing.assert_array_equal(merged, exact.astype(jnp.bfloat16))
        assert merged[0, 0] > 1

    def test_half_precision_networks_take_float32_adapters(self, network):
        _, params = network
        apply_fn = decoder.make_apply(
            DecoderConfig(
                **{**SMALL.__dict__, "dtype": "bfloat16", "param_dtype": "bfloat16"},
            )
        )
        adapters = random_adapters(params)
        narrow = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf).astype(jnp.bfloat16)), params)
        logits = jax.jit(apply_fn)(lora.apply(narrow, adapters), TOKENS)
        exact = network[0](lora.apply(params, adapters), TOKENS)
        assert jnp.linalg.norm(logits - exact) < 0.1 * jnp.linalg.norm(exact)

    def test_the_head_may_be_changed(self, network):
        apply_fn, params = network
        adapters = random_adapters(params, target="lm_head")
        np.testing.assert_allclose(
            apply_fn(lora.apply(params, adapters), TOKENS), apply_fn(lora.merge(params, adapters), TOKENS), atol=1e-4
        )


def test_trained_alone_with_optax(network):
    """The loss falls by the adapters' doing; the parameters have neither gradient nor state."""
    apply_fn, params = network
    tokens = jnp.array([[9, 7, 5, 2, 3, 0], [1, 8, 0, 10, 4, 6]])
    # The head too: the last norm bounds the logits of a frozen one.
    adapters = lora.init(params, jax.random.key(0), target=("down_proj", "lm_head"), rank=4, alpha=8.0)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(adapters)
    assert len(jax.tree.leaves(state)) == 1 + 2 * len(jax.tree.leaves(adapters))

    def loss(adapters):
        return next_token_loss(apply_fn(lora.apply(params, adapters), tokens), tokens)

    def step(carry, _):
        adapters, state = carry
        value, gradient = jax.value_and_grad(loss)(adapters)
        updates, state = optimizer.update(gradient, state, adapters)
        return (optax.apply_updates(adapters, updates), state), value

    (adapters, _), losses = jax.jit(lambda carry: jax.lax.scan(step, carry, length=300))((adapters, state))
    assert losses[-1] < losses[0] / 10
    merged = next_token_loss(apply_fn(lora.merge(params, adapters), tokens), tokens)
    assert float(merged) == pytest.approx(float(loss(adapters)), abs=1e-3)


class TestBadInput:
    def test_pattern_that_stands_for_nothing(self, network):
        with pytest.raises(
            ValueError, match=r"target pattern 'query' stands for no linear map; there are lm_head, model/"
        ):
            lora.init(network[1], jax.random.key(0), target=("q_proj", "query"))
        with pytest.raises(ValueError, match="'embed_tokens' stands for no linear map"):
            lora.init(network[1], jax.random.key(0), target="embed_tokens")
        with pytest.raises(ValueError, match="at least one pattern"):
            lora.init(network[1], jax.random.key(0), target=())

    def test_rank(self, network):
        with pytest.raises(ValueError, match="rank must be at least 1; got 0"):
            lora.init(network[1], jax.random.key(0), target="q_proj", rank=0)
        with pytest.raises(ValueError, match=r"rank 9 is larger than model/layers/self_attn/q_proj \(8 x 8\)"):
            lora.init(network[1], jax.random.key(0), target="q_proj", rank=9)

    def test_adapters_of_another_network(self, network):
        _, params = network
        adapters = random_adapters(params)
        shallow = jax.tree.map(lambda leaf: leaf[:2], params["model"]["layers"])
        other = {**params, "model": {**params["model"], "layers": shallow}}
        message = (
            r"the adapters do not fit: model/layers/mlp/down_proj/lora_A/weight must have shape \(2, 2, 12\); got \(3"
        )
        with pytest.raises(ValueError, match=message):
            lora.apply(other, adapters)
        with pytest.raises(ValueError, match="down_proj is no linear map here; there are lm_head"):
            lora.merge({"lm_head": params["lm_head"]}, adapters)
