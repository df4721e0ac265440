"""GGUF files: written with the package ``gguf`` as its converter does, read here."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxlab.nn import DecoderConfig, RopeScaling, decoder
from jaxlab.nn.checkpoints import load
from jaxlab.nn.checkpoints.gguf import open_gguf
from jaxlab.nn.checkpoints.gguf_format import read_gguf

gguf = pytest.importorskip("gguf", reason="needs the models extra")

SIZES = {"vocab_size": 34, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4}
CONFIGS = {
    "llama": DecoderConfig(**SIZES, num_kv_heads=2, norm_eps=1e-5, rope_theta=5e5),
    "qwen2": DecoderConfig(**SIZES, num_kv_heads=2, qkv_bias=True, tie_embeddings=True),
    "qwen3": DecoderConfig(**SIZES, num_kv_heads=2, qk_norm=True, head_dim=16),
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn/q_proj": "attn_q",
    "self_attn/k_proj": "attn_k",
    "self_attn/v_proj": "attn_v",
    "self_attn/o_proj": "attn_output",
    "self_attn/q_norm": "attn_q_norm",
    "self_attn/k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp/gate_proj": "ffn_gate",
    "mlp/up_proj": "ffn_up",
    "mlp/down_proj": "ffn_down",
}


def to_neighbouring_pairs(rows, heads):
    """The order of the rows of a file: in each head the two halves, a row of each in turn."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors_of(architecture, config, params):
    yield "token_embd.weight", params["model"]["embed_tokens"]["weight"]
    yield "output_norm.weight", params["model"]["norm"]["weight"]
    if not config.tie_embeddings:
        yield "output.weight", params["lm_head"]["weight"]
    for keys, leaf in jax.tree.leaves_with_path(params["model"]["layers"]):
        *module, kind = [key.key for key in keys]
        for i, value in enumerate(np.asarray(leaf)):
            heads = {"q_proj": config.num_heads, "k_proj": config.kv_heads}.get(module[-1])
            if architecture == "llama" and heads:
                value = to_neighbouring_pairs(value, heads)
            yield f"blk.{i}.{NAMES['/'.join(module)]}.{kind}", value


def write(path, architecture, config, params, *, quantise=None, more=(), extra=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.head_dim:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if extra:
        extra(writer)
    for name, value in [*tensors_of(architecture, config, params), *more]:
        value = np.asarray(value, np.float32)
        if quantise and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def fresh():
    return {name: decoder.init(config, jax.random.key(0))[1] for name, config in CONFIGS.items()}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_settings_and_weights(architecture, fresh, tmp_path):
    config, params = CONFIGS[architecture], fresh[architecture]
    write(tmp_path / "model.gguf", architecture, config, params)
    model = load(tmp_path / "model.gguf")
    explicit = {"head_dim": config.head_size, "max_position_embeddings": 128}
    assert model.config == dataclasses.replace(config, **explicit)
    assert model.tokenizer is None
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    assert load(tmp_path).source == tmp_path  # a folder with one such file


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # there every head of a Qwen3 file has size 128
def test_transformers_reads_the_same_network(architecture, fresh, tmp_path):
    """That library reads GGUF by its own code."""
    torch = pytest.importorskip("torch", reason="needs the peers extra")
    transformers = pytest.importorskip("transformers", reason="needs the peers extra")
    config = CONFIGS[architecture]
    extra = lambda writer: writer.add_vocab_size(config.vocab_size)  # noqa: E731
    write(tmp_path / "model.gguf", architecture, config, fresh[architecture], extra=extra)
    network = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, local_files_only=True
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 9), dtype=np.int32)
    with torch.no_grad():
        expected = network.eval()(torch.as_tensor(tokens, dtype=torch.long)).logits.numpy()
    model = load(tmp_path / "model.gguf")
    np.testing.assert_allclose(jax.jit(model.apply_fn)(model.params, tokens), expected, atol=1e-5)


def test_sharded_over_a_mesh(fresh, tmp_path):
    write(tmp_path / "model.gguf", "llama", CONFIGS["llama"], fresh["llama"])
    mesh = jax.make_mesh((2,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model = load(tmp_path / "model.gguf", sharding=sharding)
    jax.tree.map(np.testing.assert_array_equal, model.params, fresh["llama"])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_quantised_weights_are_what_the_package_makes_of_them(kind, fresh, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    write(tmp_path / "model.gguf", "llama", CONFIGS["llama"], fresh["llama"], quantise=kind)
    loaded = load(tmp_path / "model.gguf").params["model"]
    for leaf, original in [
        (loaded["embed_tokens"]["weight"], fresh["llama"]["model"]["embed_tokens"]["weight"]),
        (
            loaded["layers"]["mlp"]["down_proj"]["weight"][1],
            fresh["llama"]["model"]["layers"]["mlp"]["down_proj"]["weight"][1],
        ),
    ]:
        expected = gguf.quants.dequantize(gguf.quants.quantize(np.asarray(original), kind), kind)
        np.testing.assert_array_equal(leaf, expected)
        assert 0 < np.abs(leaf - original).max() < 0.02


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS"])
def test_blocks_that_the_package_only_reads(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 64, (3, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, tensors = read_gguf(tmp_path / "model.gguf")
    assert tensors["x"].shape == (3, 2 * block)
    np.testing.assert_array_equal(tensors["x"].dequantize("x"), gguf.quants.dequantize(raw, kind))


def test_the_format_is_read_as_the_package_reads_it(fresh, tmp_path):
    def extra(writer):
        writer.add_string("a.text", "größe")
        writer.add_array("a.words", ["one", "", "three"])
        writer.add_array("a.numbers", [1, -2, 3])
        writer.add_array("a.floats", [0.5, 1.5])
        writer.add_bool("a.truth", True)
        writer.add_int8("a.small", -3)
        writer.add_uint64("a.large", 2**40)
        writer.add_float64("a.double", 0.1)
        writer.add_custom_alignment(64)

    write(tmp_path / "model.gguf", "llama", CONFIGS["llama"], fresh["llama"], extra=extra)
    metadata, tensors = read_gguf(tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert metadata == theirs
    assert list(tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        assert tensors[tensor.name].shape == tuple(tensor.shape[::-1])
        np.testing.assert_array_equal(tensors[tensor.name].data.view(np.float32), tensor.data.ravel())


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_recovered(factor, fresh, tmp_path):
    """The divisors are computed as the converter of llama.cpp does."""
    divisors = []
    for frequency in 5e5 ** -(np.arange(0, 8, 2) / 8):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            divisors.append(1)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    path = tmp_path / "model.gguf"
    write(path, "llama", CONFIGS["llama"], fresh["llama"], more=[("rope_freqs.weight", np.array(divisors))])
    expected = RopeScaling("llama3", factor, original_max_position_embeddings=8192)
    assert load(path).config.rope_scaling == expected
    write(path, "llama", CONFIGS["llama"], fresh["llama"], more=[("rope_freqs.weight", np.array([1, 2, 3, 8.0]))])
    with pytest.raises(ValueError, match="is not the scaling of Llama 3"):
        load(path)


def test_other_scalings(fresh, tmp_path):
    path = tmp_path / "model.gguf"

    def config_with(kind, **numbers):
        def extra(writer):
            writer.add_string("llama.rope.scaling.type", kind)
            for name, value in numbers.items():
                (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(
                    f"llama.rope.scaling.{name}", value
                )

        write(path, "llama", CONFIGS["llama"], fresh["llama"], extra=extra)
        return load(path).config

    assert config_with("none").rope_scaling is None
    assert config_with("linear", factor=4.0).rope_scaling == RopeScaling("linear", 4.0)
    yarn = config_with("yarn", factor=4.0, original_context_length=32).rope_scaling
    assert yarn == RopeScaling("yarn", 4.0, original_max_position_embeddings=32)
    with pytest.raises(ValueError, match=r"rope scaling 'longrope' with factor 4\.0 is not supported"):
        config_with("longrope", factor=4.0)


def test_a_window_makes_a_mistral(fresh, tmp_path):
    extra = lambda writer: writer.add_sliding_window(16)  # noqa: E731
    write(tmp_path / "model.gguf", "llama", CONFIGS["llama"], fresh["llama"], extra=extra)
    model = load(tmp_path / "model.gguf")
    assert (model.family.model_type, model.config.sliding_window) == ("mistral", 16)


def test_what_is_not_supported(fresh, tmp_path):
    path, arguments = tmp_path / "model.gguf", (CONFIGS["llama"], fresh["llama"])
    write(path, "gemma", *arguments)
    with pytest.raises(ValueError, match="unknown architecture 'gemma': known are llama, qwen2, qwen3"):
        load(path)
    write(path, "llama", *arguments, extra=lambda writer: writer.add_rope_dimension_count(4))
    with pytest.raises(ValueError, match="rotary positions of a part of each head are not supported"):
        load(path)
    write(path, "llama", *arguments, extra=lambda writer: writer.add_expert_count(8))
    with pytest.raises(ValueError, match="mixture of experts is not supported"):
        load(path)
    write(path, "llama", *arguments, more=[("blk.0.ffn_gate_inp.weight", np.ones((2, 2)))])
    with pytest.raises(ValueError, match=r"has a tensor that the llama of its config has not: blk\.0\.ffn_gate_inp"):
        load(path)


def test_truncated_and_damaged_files(fresh, tmp_path):
    path = tmp_path / "model.gguf"
    write(path, "llama", CONFIGS["llama"], fresh["llama"])
    whole = path.read_bytes()
    start = whole.index(b"token_embd")
    for raw, message in [
        (whole[:-100], "is truncated: tensor .* ends at byte"),
        (whole[: start + 4], f"is truncated: its metadata go beyond its {start + 4} bytes"),
        (whole[:10], "is truncated: its metadata go beyond its 10 bytes"),
        (b"GGML" + whole[4:], "is no GGUF file"),
        (whole[:4] + b"\x09" + whole[5:], "is of version 9; GGUF files of versions 2 and 3"),
        (whole[:4] + b"\0\0\0\x03" + whole[8:], "is big-endian"),
        (whole[:8] + b"\xff" * 8 + whole[16:], "is truncated|is damaged"),
    ]:
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=message):
            open_gguf(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_gguf(tmp_path / "absent.gguf")
    # Wherever the file ends, it is one clear error and not a crash.
    for end in range(5, start, 37):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="is truncated"):
            open_gguf(path)


def test_without_the_package(fresh, tmp_path, monkeypatch):
    write(tmp_path / "model.gguf", "llama", CONFIGS["llama"], fresh["llama"])
    monkeypatch.setitem(__import__("sys").modules, "gguf.constants", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package gguf: pip install 'jaxlab\[models\]'"):
        load(tmp_path / "model.gguf")
