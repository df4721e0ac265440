"""Deleted blocks: stacked and listed parameters, configs, and what `transformers` makes of what is written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.compress import prune_config, prune_model, prune_stacked
from jaxlab.nn import DecoderConfig, decoder, init_cache
from jaxlab.nn.checkpoints import Model, find_decoder_family, load, save
from jaxlab.nn.vit import ViTConfig

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 9))
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
NETWORKS = {
    "LlamaForCausalLM": DecoderConfig(**SIZES, tie_embeddings=True),
    "MistralForCausalLM": DecoderConfig(**SIZES, sliding_window=3),
    "Qwen3ForCausalLM": DecoderConfig(
        **SIZES,
        qk_norm=True,
        sliding_window=3,
        layer_types=("full_attention", "sliding_attention", "full_attention", "sliding_attention"),
    ),
}
REMOVE = [2, 0]


@pytest.fixture(scope="module", params=NETWORKS)
def model(request):
    config = NETWORKS[request.param]
    params = decoder.init(config, jax.random.key(0))[1]
    family = find_decoder_family(config)
    assert family.architectures == (request.param,)
    return Model(config=config, params=params, family=family)


def test_stacked_and_listed_blocks():
    stacked = {"a": jnp.arange(4.0), "b": jnp.arange(8.0).reshape(4, 2)}
    found = prune_stacked(stacked, [3, 1])
    np.testing.assert_array_equal(found["a"], [0, 2])
    np.testing.assert_array_equal(found["b"], [[0, 1], [4, 5]])
    assert prune_stacked([{"x": 1}, {"y": 2}, {"z": 3}], [1]) == [{"x": 1}, {"z": 3}]
    assert prune_stacked(("a", "b"), np.array([0])) == ("b",)
    same = jax.jit(lambda tree: prune_stacked(tree, [0]))(stacked)
    np.testing.assert_array_equal(same["a"], [1, 2, 3])


def test_configs_of_any_network():
    windowed = prune_config(NETWORKS["Qwen3ForCausalLM"], REMOVE)
    assert windowed.num_layers == 2
    assert windowed.layer_types == ("sliding_attention", "sliding_attention")
    vision = ViTConfig(image_size=8, patch_size=4, hidden_size=8, intermediate_size=8, num_layers=3, num_heads=2)
    assert prune_config(vision, [0]).num_layers == 2


def test_a_pruned_model_is_the_masked_one(model):
    mask = np.array([0.0, 1.0, 0.0, 1.0], np.float32)
    expected = model.apply_fn(model.params, TOKENS, block_mask=mask)
    pruned = prune_model(model, REMOVE)
    np.testing.assert_allclose(pruned.apply_fn(pruned.params, TOKENS), expected, atol=1e-5)
    assert model.params["model"]["layers"]["input_layernorm"]["weight"].shape[0] == 4  # untouched
    # A cache with a slot for each block that is left gives the same, token by token.
    cache = init_cache(pruned.config, batch=2, length=9)
    assert cache.layers.keys.shape[0] == 2
    step = jax.jit(lambda tokens, cache: decoder.apply_cached(pruned.config, pruned.params, tokens, cache))
    for place in range(9):
        logits, cache = step(TOKENS[:, place : place + 1], cache)
        np.testing.assert_allclose(logits[:, 0], expected[:, place], atol=1e-4)


def test_transformers_loads_what_is_left(model, tmp_path):
    """Saved, loaded by `transformers`, against its own model with the same blocks deleted."""
    torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
    transformers = pytest.importorskip("transformers", reason="needs the peers extra: transformers")
    save(tmp_path / "whole", model)
    pruned = prune_model(model, REMOVE)
    save(tmp_path / "pruned", pruned)
    of = {"attn_implementation": "eager", "dtype": "float32"}
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", **of)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", **of)
    for index in sorted(REMOVE, reverse=True):
        del whole.model.layers[index]
    assert theirs.config.num_hidden_layers == len(theirs.model.layers) == 2
    assert [layer.self_attn.layer_idx for layer in theirs.model.layers] == [0, 1]
    tokens = torch.from_numpy(TOKENS)
    with torch.no_grad():
        logits = theirs(tokens, use_cache=False).logits.numpy()
        cached = theirs(tokens[:, :5], use_cache=True)
        rest = theirs(tokens[:, 5:], past_key_values=cached.past_key_values, use_cache=True)
        if model.config.layer_types is None:  # by hand its blocks keep their windows, but not their entry in the config
            deleted = whole(tokens, use_cache=False).logits.numpy()
            np.testing.assert_allclose(deleted, logits, atol=1e-4)
    assert len(rest.past_key_values.layers) == 2
    np.testing.assert_allclose(pruned.apply_fn(pruned.params, TOKENS), logits, atol=1e-4)
    np.testing.assert_allclose(rest.logits.numpy(), logits[:, 5:], atol=1e-4)
    again = load(tmp_path / "pruned")
    assert again.config.windowed_layers == pruned.config.windowed_layers
    np.testing.assert_allclose(again.apply_fn(again.params, TOKENS), logits, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: prune_stacked({"a": jnp.zeros(3)}, [3]), "between 0 and 2; got 3"),
        (lambda: prune_stacked({"a": jnp.zeros(3)}, [-1]), "between 0 and 2; got -1"),
        (lambda: prune_stacked({"a": jnp.zeros(3)}, [1, 1]), r"must differ; got \[1, 1\]"),
        (lambda: prune_stacked({"a": jnp.zeros(2)}, [0, 1]), "between 0 and 1 of 2 blocks can be removed; got 2"),
        (lambda: prune_stacked({"a": jnp.zeros(3), "b": jnp.zeros(2)}, [0]), r"one leading axis: \['a'\] has \(3,\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
