"""The decoder and its generation against `transformers` on randomly initialised tiny checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.nn import DecoderConfig, RopeScaling, decoder, generate, unstack_layers
from jaxlab.nn.sampling import filter_logits

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
WINDOW_ON_THE_SECOND = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
# Sequences of 12 tokens are longer than these 8, and heads of 8 turn 4 pairs, of which each scaling changes some.
LONG = {"head_dim": 8, "max_position_embeddings": 8}


def rope(rope_type, **parameters):
    theirs = {"rope_type": rope_type, "rope_theta": 100.0, **parameters}
    ours = {**LONG, "rope_theta": 100.0, "rope_scaling": RopeScaling(rope_type, **parameters)}
    return "Llama", {**LONG, "rope_parameters": theirs}, ours


MODELS = {
    "llama": ("Llama", {}, {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}, {"tie_embeddings": True}),
    "llama_biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("Qwen2", {}, {"qkv_bias": True}),
    "qwen2_windows": (
        "Qwen2",
        WINDOW_ON_THE_SECOND,
        {"qkv_bias": True, "sliding_window": 4, "layer_types": ("full_attention", "sliding_attention")},
    ),
    "qwen3": ("Qwen3", {"head_dim": 10}, {"qk_norm": True, "head_dim": 10}),
    "mistral": ("Mistral", {"sliding_window": 4}, {"sliding_window": 4}),
    "linear": rope("linear", factor=4.0),
    "dynamic": rope("dynamic", factor=4.0),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=8),
    "yarn_scales": rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=8,
        beta_fast=2.0,
        beta_slow=0.2,
        mscale=1.5,
        mscale_all_dim=0.5,
        truncate=False,
    ),
    "llama3": rope("llama3", factor=4.0, original_max_position_embeddings=8, low_freq_factor=0.1, high_freq_factor=0.9),
}
ROPE = ("linear", "dynamic", "yarn", "yarn_scales", "llama3")


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


@functools.cache
def models(name):
    """The peer, and the config and parameters that say the same."""
    family, theirs, ours = MODELS[name]
    torch.manual_seed(0)
    # Without the ids of its defaults the peer neither stops nor pads.
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    sizes = {**SIZES, "tie_word_embeddings": False, **ids, **theirs}
    peer_config = getattr(transformers, f"{family}Config")(**sizes)
    peer = getattr(transformers, f"{family}ForCausalLM")(peer_config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():  # norms and biases start at one and zero, where mistakes would not show
            parameter.add_(0.2 * torch.randn_like(parameter))
    config = DecoderConfig(
        **{
            "vocab_size": 31,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "norm_eps": 1e-5,
            "max_position_embeddings": 64,
            **ours,
        }
    )
    state = peer.state_dict()
    if config.tie_embeddings:
        del state["lm_head.weight"]
    return peer, config, stack(state, config.num_layers)


@functools.cache
def forward(config):
    return jax.jit(functools.partial(decoder.make_apply(config), hidden_states=(0, 1, 2)))


def random_tokens(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 31, shape)


def peer_forward(peer, tokens, **options):
    with torch.no_grad():
        out = peer(torch.from_numpy(tokens), output_hidden_states=True, **options)
    return out.logits.numpy(), np.stack([state.numpy() for state in out.hidden_states])


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_hidden_states_equal_those_of_transformers(name):
    peer, config, params = models(name)
    tokens = random_tokens((2, 12))
    expected, expected_hidden = peer_forward(peer, tokens)
    logits, hidden = forward(config)(params, tokens)
    # Logits are of order ten; both sides are float32.
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    np.testing.assert_allclose(hidden, expected_hidden, atol=1e-4)


@pytest.mark.parametrize("name", ROPE)
def test_scalings_change_what_they_should(name):
    """The sizes are such that a scaling which did nothing would not pass for the peer's; dynamic is kept up to 8."""
    _, config, params = models(name)
    plain = DecoderConfig(**{**vars(config), "rope_scaling": None})
    tokens = random_tokens((2, 12))
    scaled, unscaled = (forward(c)(params, tokens)[0] for c in (config, plain))
    assert np.abs(scaled - unscaled).max() > 1e-2
    if name == "dynamic":
        short = tokens[:, :8]
        np.testing.assert_allclose(forward(config)(params, short)[0], forward(plain)(params, short)[0], atol=1e-5)


def padded(lengths, width, side, seed=3):
    real = np.arange(width) < np.array(lengths)[:, None]
    real = real[:, ::-1] if side == "left" else real
    return random_tokens(real.shape, seed), real.copy()


def test_padded_logits_equal_those_of_transformers():
    peer, config, params = models("qwen2_windows")
    for side in ("left", "right"):
        tokens, real = padded((12, 7, 1), 12, side)
        positions = torch.from_numpy(np.maximum(real.cumsum(1) - 1, 0))
        expected, _ = peer_forward(peer, tokens, attention_mask=torch.from_numpy(real).long(), position_ids=positions)
        logits, _ = forward(config)(params, tokens, padding_mask=real)
        np.testing.assert_allclose(logits[real], expected[real], atol=1e-4)


def peer_generate(peer, tokens, real, count):
    with torch.no_grad():
        out = peer.generate(
            torch.from_numpy(tokens),
            attention_mask=torch.from_numpy(real).long(),
            max_new_tokens=count,
            do_sample=False,
        )
    return out[:, tokens.shape[1] :].numpy()


@pytest.mark.parametrize("name", ["llama_tied", "qwen2_windows", "qwen3", "mistral", "yarn_scales", "llama3"])
def test_greedy_tokens_equal_those_of_transformers(name):
    peer, config, params = models(name)
    tokens, real = padded((7, 4, 1), 7, "left")
    out = generate(
        config, params, tokens, key=jax.random.key(0), max_new_tokens=14, padding_mask=real, length_bucket=16
    )
    np.testing.assert_array_equal(out.tokens, peer_generate(peer, tokens, real, 14))


def test_greedy_tokens_of_a_growing_base_equal_those_of_transformers():
    """From the ninth token on each step has another base, and the keys before keep theirs."""
    peer, config, params = models("dynamic")
    tokens = random_tokens((1, 5), seed=4)
    real = np.ones_like(tokens, bool)
    for variant in (params, unstack_layers(params)):
        out = generate(config, variant, tokens, key=jax.random.key(0), max_new_tokens=14, length_bucket=16)
        np.testing.assert_array_equal(out.tokens, peer_generate(peer, tokens, real, 14))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"top_k": 1}, ("TopKLogitsWarper", 1)),
        ({"top_k": 7}, ("TopKLogitsWarper", 7)),
        ({"top_k": 1000}, ("TopKLogitsWarper", 1000)),
        ({"top_p": 0.05}, ("TopPLogitsWarper", 0.05)),
        ({"top_p": 0.8}, ("TopPLogitsWarper", 0.8)),
        ({"min_p": 0.1}, ("MinPLogitsWarper", 0.1)),
        ({"top_k": 9, "top_p": 0.7, "min_p": 0.2}, None),
    ],
)
def test_filters_equal_those_of_transformers(ours, theirs):
    names = {"top_k": "TopKLogitsWarper", "top_p": "TopPLogitsWarper", "min_p": "MinPLogitsWarper"}
    logits = np.random.default_rng(6).normal(0, 2, (5, 60)).astype(np.float32)
    expected = torch.from_numpy(logits)
    for warper, value in [theirs] if theirs else [(names[name], value) for name, value in ours.items()]:
        expected = getattr(transformers, warper)(value)(None, expected)
    np.testing.assert_array_equal(filter_logits(jnp.asarray(logits), **ours), expected.numpy())
