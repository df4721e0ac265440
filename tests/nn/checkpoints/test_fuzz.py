"""Files cut anywhere, with bytes changed, or with settings of any kind: a model, or one clear error."""

import json
import math

import jax
import numpy as np
import pytest

from jaxlab.nn import DecoderConfig
from jaxlab.nn.checkpoints import Model, find_decoder_family, load, save
from jaxlab.nn.checkpoints.gguf import open_gguf
from jaxlab.nn.checkpoints.gguf_format import read_gguf
from jaxlab.nn.checkpoints.reading import parameter_shapes
from jaxlab.nn.checkpoints.tensors import open_tensors
from jaxlab.nn.checkpoints.vocabulary import gguf_tokenizer

CONFIG = DecoderConfig(vocab_size=8, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=2, qkv_bias=True)
ODD = [None, -1, 0, True, "4", 4.5, math.nan, math.inf, 10**9, 10**30, [], [4], {}, {"a": 1}, "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    family = find_decoder_family(CONFIG)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameter_shapes(family, CONFIG))
    path = tmp_path_factory.mktemp("fuzz") / "model"
    save(path, Model(config=CONFIG, params=params, family=family))
    return path


def damaged(rng, whole, end, count):
    """Copies of the bytes, cut or changed before ``end``."""
    for _ in range(count):
        yield whole[: rng.integers(end)]
        changed = bytearray(whole)
        for place in rng.integers(end, size=rng.integers(1, 6)):
            changed[place] = rng.choice([0, 255, ord("-"), ord("9"), changed[place] ^ 1, rng.integers(256)])
        yield bytes(changed)


def attempt(read, counts):
    try:
        read()
        counts["read"] += 1
    except (ValueError, OSError) as error:
        assert len(str(error)) > 20, error  # noqa: PT017
        counts["refused"] += 1


def test_safetensors(folder, tmp_path):
    whole = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    path, counts = tmp_path / "x.safetensors", {"read": 0, "refused": 0}
    for content in damaged(np.random.default_rng(0), whole, header, 200):
        path.write_bytes(content)
        attempt(lambda: [np.sum(value) for value in open_tensors(path).values()], counts)
    assert counts["refused"] > 200


def test_gguf(tmp_path):
    gguf = pytest.importorskip("gguf", reason="needs the models extra")
    path, counts = tmp_path / "x.gguf", {"read": 0, "refused": 0}
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in [("embedding_length", 4), ("block_count", 1), ("feed_forward_length", 4), ("head_count", 2)]:
        getattr(writer, f"add_{name}")(value)
    writer.add_context_length(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*"abcdef", "ab", "<s>"])
    writer.add_token_types([1] * 7 + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(7)
    writer.add_tensor("token_embd.weight", np.zeros((8, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = path.read_bytes()
    end = whole.index(b"token_embd.weight") + 60

    def read():
        try:
            opened = open_gguf(path)
            gguf_tokenizer(opened.metadata)
            sum(value.sum() for value in opened.tensors.values())
        except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # `load` names the file in these
            raise ValueError(f"{path} has damaged metadata: {error}") from error

    read()
    for content in damaged(np.random.default_rng(1), whole, end, 200):
        path.write_bytes(content)
        attempt(read, counts)
    assert counts["refused"] > 200


def test_arrays_of_arrays_do_not_reach_the_end_of_the_stack(tmp_path):
    pytest.importorskip("gguf", reason="needs the models extra")
    nested = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    path = tmp_path / "x.gguf"
    head = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    path.write_bytes(head + (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + nested * 50_000)
    with pytest.raises(ValueError, match="is damaged: an array of arrays at byte"):
        read_gguf(path)


def test_settings_of_any_kind(folder):
    path, counts = folder / "config.json", {"read": 0, "refused": 0}
    text = path.read_text()
    settings = {**json.loads(text), "use_sliding_window": True, "eos_token_id": 2}
    rope = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    changes = [{name: value} for name in settings for value in ODD]
    changes += [{"rope_parameters": {**rope, name: value}} for name in rope for value in ODD]
    names = ("architectures", "layer_types", "quantization_config", "max_window_layers")
    changes += [{name: value} for name in names for value in ODD]
    for change in changes:
        path.write_text(json.dumps({**settings, **change}))
        attempt(lambda: load(folder), counts)
    path.write_text(text)
    assert counts["refused"] > len(changes) / 3
    assert counts["read"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "has num_hidden_layers 1000000000, but there are 15 tensors"),
        ({"num_attention_heads": True}, "num_heads must be an integer; got True"),
        ({"eos_token_id": "2"}, "has the eos_token_id '2'; it must be a token's id"),
        ({"rope_parameters": {"rope_type": "linear", "factor": math.inf}}, "factor must be a finite number; got inf"),
    ],
)
def test_a_setting_is_named(folder, change, message):
    text = (folder / "config.json").read_text()
    try:
        (folder / "config.json").write_text(json.dumps({**json.loads(text), **change}))
        with pytest.raises(ValueError, match=message):
            load(folder)
    finally:
        (folder / "config.json").write_text(text)
