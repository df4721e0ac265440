"""The decoder against `transformers` on randomly initialised tiny checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn import DecoderConfig, decoder

torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
transformers = pytest.importorskip("transformers", reason="needs the peers extra: transformers")

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}, {}),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {"tie_word_embeddings": True}, {"tie_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"tie_word_embeddings": False}, {"qkv_bias": True}),
    "qwen3": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {"head_dim": 10, "tie_word_embeddings": False},
        {"qk_norm": True, "head_dim": 10},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 4}, {"sliding_window": 4}),
}


def stack(state, num_layers):
    """Names to paths, and ``model.layers.N`` to the leading axis: all there is to do."""
    params = {}
    for name, tensor in state.items():
        parts, value = name.split("."), tensor.numpy()
        if parts[:2] == ["model", "layers"]:
            if parts[2] != "0":
                continue
            rest = ".".join(parts[3:])
            value = np.stack([state[f"model.layers.{layer}.{rest}"].numpy() for layer in range(num_layers)])
            parts = ["model", "layers", *parts[3:]]
        node = params
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = jnp.asarray(value)
    return params


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name):
    model_class, config_class, theirs, ours = MODELS[name]
    torch.manual_seed(0)
    peer_config = getattr(transformers, config_class)(**SIZES, **theirs)
    peer = getattr(transformers, model_class)(peer_config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():  # norms and biases start at one and zero, where mistakes would not show
            parameter.add_(0.2 * torch.randn_like(parameter))
    config = DecoderConfig(
        vocab_size=31,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        norm_eps=1e-5,
        **ours,
    )
    tokens = np.random.default_rng(0).integers(0, 31, (2, 12))
    with torch.no_grad():
        expected = peer(torch.from_numpy(tokens)).logits.numpy()
    state = peer.state_dict()
    if config.tie_embeddings:
        del state["lm_head.weight"]
    logits = jax.jit(decoder.make_apply(config))(stack(state, config.num_layers), tokens)
    # Logits are of order ten; both sides are float32.
    np.testing.assert_allclose(logits, expected, atol=1e-4)
