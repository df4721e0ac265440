"""``jaxlab lm`` on a tiny model with its own tokenizer, and on a real one that tells stories."""

import io
import json
import math
import re

import jax
import numpy as np
import pytest

from jaxlab.cli import main
from jaxlab.nn import DecoderConfig, decoder, generate
from jaxlab.nn.checkpoints import Model, find_decoder_family, load, save
from jaxlab.nn.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs the models extra")
pytest.importorskip("jinja2", reason="needs the models extra")

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}[assistant]"
PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder of random weights over single bytes; its text is nonsense, and always the same."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    config = DecoderConfig(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, max_position_embeddings=128
    )
    params = decoder.init(config, jax.random.key(3))[1]
    model = Model(
        config=config,
        params=params,
        family=find_decoder_family(config),
        tokenizer=Tokenizer(backend, {"eos_token": "<|end|>", "chat_template": TEMPLATE}),
        stop_ids=(256,),
    )
    directory = tmp_path_factory.mktemp("lm") / "model"
    save(directory, model)
    return directory


def expected_text(folder, prompt, **options):
    model = load(folder)
    tokens = np.asarray([model.tokenizer.encode(prompt)], np.int32)
    out = generate(model.config, model.params, tokens, stop_tokens=(256,), **{"key": jax.random.key(0), **options})
    return model.tokenizer.decode(np.asarray(out.tokens[0, : out.lengths[0]]))


def test_generate_prints_the_continuation_and_its_speed(folder, capsys):
    assert main(["lm", "generate", str(folder), "--prompt", PROMPT, "--max-new", "40"]) == 0
    out, err = capsys.readouterr()
    assert out == expected_text(folder, PROMPT, max_new_tokens=40) + "\n"
    number = r"[\d.]+"
    speed = rf"11 tokens read, 40 written in {number} s; {number} tokens/s once compiled \(after {number} s\)\n"
    assert re.fullmatch(speed, err)


def test_generate_with_options(folder, capsys):
    filters = ["--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.01"]
    words = ["--max-new", "12", *filters, "--seed", "4"]
    assert main(["lm", "generate", str(folder), "--prompt", PROMPT, *words]) == 0
    drawn = expected_text(
        folder, PROMPT, max_new_tokens=12, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, key=jax.random.key(4)
    )
    assert capsys.readouterr().out == drawn + "\n"
    assert drawn != expected_text(folder, PROMPT, max_new_tokens=12)


def test_generate_a_chat(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    words = ["lm", "generate", str(folder), "--prompt", "-", "--chat", "--system", "be kind", "--max-new", "12"]
    assert main(words) == 0
    prompt = "[system]be kind<|end|>[user]hello<|end|>[assistant]"
    assert capsys.readouterr().out == expected_text(folder, prompt, max_new_tokens=12) + "\n"


def test_perplexity(folder, tmp_path, capsys):
    text = "".join(np.random.default_rng(0).choice(list("abcdefgh "), 300))
    (tmp_path / "text.txt").write_text(text)
    words = ["lm", "perplexity", str(folder), str(tmp_path / "text.txt"), "--window", "64", "--stride", "16"]
    assert main([*words, "--batch-size", "4", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    # Random small weights: the model is nearly uniform over its 257 tokens.
    assert found["perplexity"] == pytest.approx(257, rel=0.05)
    assert (found["tokens"], found["windows"]) == (299, 16)
    assert found["bits_per_byte"] == pytest.approx(found["nats_per_token"] / math.log(2), rel=1e-6)
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["perplexity", f"{found['perplexity']:.4f}"]
    assert max(map(len, lines)) < 80
    assert main([*words, "--tokens", "65", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 64


def test_a_real_model_tells_a_story(capsys):
    try:
        load("stories260k")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert main(["lm", "generate", "stories260k", "--prompt", "Once upon a", "--max-new", "12"]) == 0
    assert capsys.readouterr().out == " time, there was a little girl named Lily.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "the following arguments are required: MODEL, --prompt; see jaxlab lm generate --help"),
        (["generate", "{}", "--prompt", ""], "the prompt is empty"),
        (["generate", "{}", "--prompt", "a", "--system", "b"], "--system needs --chat"),
        (["generate", "{}", "--prompt", "a", "--max-new", "0"], "--max-new must be at least 1, got 0"),
        (["generate", "{}", "--prompt", "a", "--max-new", "900"], "leaves room for --max-new 127, got 900"),
        (["generate", "{}", "--prompt", "a" * 200], "leaves room for --max-new 0, got 1"),
        (["generate", "{}", "--prompt", "a", "--seed", "9" * 20], "--seed must fit into 64 bits, got 99999"),
        (["perplexity", "{}", "{}/config.json", "--tokens", "-3"], "--tokens must be at least 2, got -3"),
        (["generate", "{}", "--prompt", "a\udcff"], "a text must be Unicode; character 1 is"),
        (["generate", "{}", "--prompt", "a", "--temperature", "-1"], "temperature must be at least 0"),
        (["generate", "{}", "--prompt", "a", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["generate", "absent.gguf", "--prompt", "a"], "no such model file or folder: absent.gguf"),
        (["generate", "owner/name", "--prompt", "a"], "ask for the download (download=True, --download)"),
        (["perplexity", "{}", "absent.txt"], "no such file or folder: absent.txt"),
        (["perplexity", "{}", "{}/model.safetensors"], "model.safetensors"),
        (["perplexity", "{}", "{}/one.txt"], "at least two tokens"),
        (
            ["perplexity", "{}", "{}/config.json", "--window", "129"],
            "at most the model's context of 128 tokens, got 129",
        ),
        (["perplexity", "{}", "{}/config.json", "--window", "64", "--stride", "65"], "stride must be between 1 and"),
        (["mumble"], "invalid choice: 'mumble'"),
    ],
)
def test_bad_input_is_one_line(folder, words, message, capsys):
    (folder / "one.txt").write_text("a")
    assert main(["lm", *(word.replace("{}", str(folder)) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxlab: ")
    assert err.count("\n") == 1
    assert message in err


def test_models_that_speak_no_language(folder, tmp_path, capsys):
    save(tmp_path / "mute", Model(**{**vars(load(folder)), "tokenizer": None}))
    assert main(["lm", "generate", str(tmp_path / "mute"), "--prompt", "a"]) == 2
    assert "mute has no tokenizer that can be read (tokenizer.json)" in capsys.readouterr().err


def test_a_tokenizer_of_another_model(folder, tmp_path, capsys):
    config = DecoderConfig(vocab_size=64, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2)
    params = decoder.init(config, jax.random.key(0))[1]
    save(tmp_path / "other", Model(config=config, params=params, family=find_decoder_family(config)))
    load(folder).tokenizer.save(tmp_path / "other")
    assert main(["lm", "generate", str(tmp_path / "other"), "--prompt", "a"]) == 2
    assert "the tokenizer has ids up to 256, but" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(folder, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    assert main(["lm", "generate", str(folder), "--prompt", "a"]) == 2
    assert "this needs the package tokenizers: pip install 'jaxlab[models]'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--help"], ["generate", "--help"], ["perplexity", "--help"]])
def test_help_fits_the_terminal(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["lm", *words]) == 0
    out = capsys.readouterr().out
    assert "usage: jaxlab lm" in out
    assert max(map(len, out.splitlines())) <= 80
