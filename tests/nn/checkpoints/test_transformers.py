"""Folders that `transformers` wrote and reads: the same logits on both sides, of every family and spelling."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn import DecoderConfig, RopeScaling, decoder
from jaxlab.nn.checkpoints import Model, find_decoder_family, find_family, load, save

transformers = pytest.importorskip("transformers", reason="needs the peers extra")
torch = pytest.importorskip("torch", reason="needs the peers extra")

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 12), dtype=np.int32)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Name, class of the config, and what is not the default.
THEIRS = {
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_theta": 5000.0, **LLAMA3}}),
    "llama-biases-tied": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "mistral-without-window": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"rope_parameters": {"rope_theta": 1e6, **YARN}}),
    "qwen2-windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-linear": ("Qwen3Config", {"head_dim": 8, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
}


def logits_of(network, tokens=TOKENS):
    with torch.no_grad():
        return network(torch.asarray(tokens, dtype=torch.long)).logits.float().numpy()


@pytest.mark.parametrize("name", THEIRS)
def test_their_folder_gives_their_logits_and_comes_back(name, tmp_path):
    kind, options = THEIRS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES, **options, initializer_range=0.2, attn_implementation="eager")
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in network.parameters():  # norms and biases too
        torch.nn.init.normal_(parameter, 0.5 * (parameter.ndim == 1), 0.2)
    expected = logits_of(network)
    network.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()

    model = load(tmp_path / "theirs")
    np.testing.assert_allclose(model.apply_fn(model.params, TOKENS), expected, atol=1e-4)

    save(tmp_path / "ours", model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert type(again) is type(network)
    np.testing.assert_array_equal(logits_of(again), expected)  # the very same weights


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"tie_embeddings": True, "num_kv_heads": 1, "rope_scaling": RopeScaling("dynamic", 2.0)},
        {"sliding_window": 3, "head_dim": 16},
        {"qkv_bias": True},
        {"qk_norm": True, "sliding_window": 3, "layer_types": ("full_attention", "sliding_attention")},
    ],
    ids=["llama", "llama-tied", "mistral", "qwen2", "qwen3"],
)
def test_our_network_loads_in_bfloat16(switches, tmp_path):
    config = DecoderConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=64,
        initializer_range=0.2,
        param_dtype="bfloat16",
        **switches,
    )
    apply_fn, params = decoder.init(config, jax.random.key(0))
    save(tmp_path / "ours", Model(config=config, params=params, family=find_decoder_family(config)))
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert network.dtype == torch.bfloat16
    network = network.float()
    # bfloat16 weights are the same in float32, and so the logits agree to that precision.
    np.testing.assert_allclose(apply_fn(params, TOKENS), logits_of(network), atol=1e-4)

    loaded = load(tmp_path / "ours")
    assert loaded.config.dtype == loaded.config.param_dtype == "bfloat16"
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    assert load(tmp_path / "ours", dtype="float32").params["model"]["norm"]["weight"].dtype == jnp.float32


def test_settings_of_version_4():
    """``rope_theta`` and ``rope_scaling`` at the top, ``type`` for ``rope_type``, ``torch_dtype`` for ``dtype``."""
    settings = {
        **SIZES,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 500_000.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "torch_dtype": "bfloat16",
    }
    config = find_family(settings).read_config(settings)
    assert (config.rope_theta, config.rope_scaling) == (500_000.0, RopeScaling("linear", 4.0))
    assert config.dtype == "bfloat16"


def test_version_4_finds_its_settings(tmp_path):
    scaling = RopeScaling("llama3", 8.0, original_max_position_embeddings=16)
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        rope_theta=7.0,
        rope_scaling=scaling,
    )
    params = decoder.init(config, jax.random.key(0))[1]
    save(tmp_path, Model(config=config, params=params, family=find_decoder_family(config)))
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == 7.0
    assert written["rope_scaling"]["rope_type"] == "llama3"
    assert written["torch_dtype"] == "float32"


def test_a_family_refuses_what_it_cannot_express():
    config = DecoderConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, qk_norm=True, mlp_bias=True
    )
    with pytest.raises(ValueError, match="no model type of llama, mistral, qwen2, qwen3 has this combination"):
        find_decoder_family(config)
    llama = find_decoder_family(dataclasses.replace(config, qk_norm=False))
    assert llama.model_type == "llama"
    with pytest.raises(ValueError, match="model_type 'llama' has no qk_norm=True"):
        llama.write_config(config)
