"""``jaxlab merge`` with coefficients that are learned on texts: the files are the model that was trained."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.cli import main
from jaxlab.editing.expert_merging import Coefficients, tensor_layout
from jaxlab.editing.expert_merging.checkpoints import PieceArithmetic, tensor_methods
from jaxlab.editing.expert_merging.coefficients import merge
from jaxlab.editing.task_vectors import task_vectors
from jaxlab.nn import lora
from jaxlab.nn.checkpoints import Model, find_decoder_family, load, save, save_adapters
from jaxlab.nn.decoder import DecoderConfig, init
from jaxlab.verbs.learned_merge import read_calibration

CONFIG = DecoderConfig(
    vocab_size=256, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, initializer_range=0.3
)
TEXTS = {"code": ["def f(x):", "return x"], "math": ["1+1=2;", "3+4=7;"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base with a tokenizer of bytes, two experts and one that is adapters; texts for each."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the models extra")
    from jaxlab.nn.tokenizer import Tokenizer

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    directory = tmp_path_factory.mktemp("learned")
    base = init(CONFIG, jax.random.key(0))[1]
    for seed, name in enumerate(("base", "code", "math")):
        moved = jax.tree.map_with_path(
            lambda path, leaf, s=seed: (
                leaf
                + 0.2 * (s > 0 and "proj" in str(path)) * jax.random.normal(jax.random.key(s * leaf.size), leaf.shape)
            ),
            base,
        )
        family = find_decoder_family(CONFIG)
        save(directory / name, Model(config=CONFIG, params=moved, family=family, tokenizer=Tokenizer(backend, {})))
    adapters = lora.init(base, jax.random.key(1), rank=2, target=("up_proj",))
    factors = adapters.factors["model"]["layers"]["mlp"]["up_proj"]["lora_B"]
    factors["weight"] = 0.3 * jax.random.normal(jax.random.key(2), factors["weight"].shape)
    save_adapters(adapters, directory / "lora")
    for name, texts in TEXTS.items():
        (directory / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return directory


def words(folder, out, method, *more, experts=("code", "math"), calibration=("code.jsonl", "math.jsonl")):
    listed = [word for expert in experts for word in ("--expert", str(folder / expert))]
    files = [str(folder / file) for file in calibration]
    return [
        *("merge", "--base", str(folder / "base"), *listed, "--method", method, "--calibration", *files),
        *("--out", str(out), "--steps", "5", "--length", "8", *more),
    ]


@pytest.mark.parametrize(
    ("method", "more"), [("expert-merging", ()), ("expert-merging++", ("--budget", "3")), ("adamerging", ())]
)
def test_the_files_are_the_model_that_was_trained(folder, tmp_path, capsys, method, more):
    out = tmp_path / "out"
    assert main(words(folder, out, method, *more)) == 0
    assert "coefficients.png" in capsys.readouterr().out
    assert (out / "coefficients.png").stat().st_size > 5_000
    report = json.loads((out / "merge.json").read_text())
    assert report["method"] == method
    assert report["texts"] == [2, 2]
    assert report["loss"][1] < report["loss"][0]
    models = [load(folder / name).params for name in ("base", "code", "math")]
    vectors = task_vectors(models[0], models[1:], include=("proj",))
    found = report["coefficients"]
    pieces = {
        path: [len(found[path.replace("layers/", f"layers/{layer}/")][0]) for layer in range(2)] for path in vectors
    }
    assert (max(max(of) for of in pieces.values()) > 1) == (method == "expert-merging++")
    moved = [np.abs(np.array(one) - 0.3).max() for one in found.values()]
    assert max(moved) > 0.01
    alpha = {
        path: jnp.concatenate([jnp.array(found[path.replace("layers/", f"layers/{i}/")]) for i in range(2)], axis=1)
        for path in vectors
    }
    wanted = merge(models[0], vectors, alpha, tensor_layout(vectors, chunks=pieces))
    got = load(out).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, wanted)


def test_adapters_and_one_file_for_all(folder, tmp_path):
    rows = [{"expert": 0, "text": "def"}, {"expert": str(folder / "lora"), "text": "1+1"}]
    (folder / "all.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    out = tmp_path / "out"
    assert main(words(folder, out, "expert-merging", experts=("code", "lora"), calibration=("all.jsonl",))) == 0
    report = json.loads((out / "merge.json").read_text())
    assert report["texts"] == [1, 1]
    # What the adapters do not change has no gradient, and stays where it started.
    assert all(
        one[1][0] == pytest.approx(0.3, abs=1e-4) for name, one in report["coefficients"].items() if "q_proj" in name
    )
    assert any(abs(one[1][0] - 0.3) > 1e-3 for name, one in report["coefficients"].items() if "up_proj" in name)


def test_pieces_of_a_file_are_those_of_the_layout():
    vectors = {"layers/w": jax.random.normal(jax.random.key(0), (2, 2, 3, 5))}
    layout = tensor_layout(vectors, chunks={"layers/w": [4, 1]})
    alpha = {"layers/w": jax.random.normal(jax.random.key(1), (2, 5))}
    methods = tensor_methods(Coefficients(alpha, layout))
    assert list(methods) == ["layers.0.w", "layers.1.w"]
    wanted = merge({"layers": {"w": jnp.zeros((2, 3, 5))}}, vectors, alpha, layout)["layers"]["w"]
    for layer, method in enumerate(methods.values()):
        np.testing.assert_allclose(method.combine(vectors["layers/w"][:, layer]), wanted[layer], atol=1e-6)
    first = methods["layers.0.w"]
    assert isinstance(first, PieceArithmetic)
    np.testing.assert_allclose(first.coefficients(2), alpha["layers/w"][:, :4].mean(1), rtol=1e-5)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "a.jsonl, line 1 is not JSON"),
        (['{"text": "x", "expert": 0}', '{"expert": 0}'], "a.jsonl, line 2 must have a field 'text'"),
        (['{"text": "x"}'], r"a.jsonl, line 1: 'expert' must be 0 to 1 or a name, got None"),
        (['{"text": "x", "expert": 2}'], "'expert' must be 0 to 1 or a name, got 2"),
        (['{"text": "x", "expert": [0]}'], r"'expert' must be 0 to 1 or a name, got \[0\]"),
        (['{"text": "x", "expert": "code"}'], "no text for the expert math"),
    ],
)
def test_texts_that_are_refused(tmp_path, lines, message):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        read_calibration([file], ["code", "math"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method", "expert-merging"], "--method expert-merging learns from texts: --calibration is needed"),
        (["--method", "ties", "--calibration", "x"], "--calibration is for expert-merging"),
        (["--method", "adamerging", "--calibration", "x", "--density", "0.2"], "adamerging has no option --density"),
        (["--method", "expert-merging", "--calibration", "a", "b", "c"], "one file or 2, one an expert; got 3"),
        (["--method", "expert-merging", "--calibration", "no.jsonl"], "no.jsonl"),
    ],
)
def test_bad_input(folder, tmp_path, capsys, more, message):
    listed = [word for expert in ("code", "math") for word in ("--expert", str(folder / expert))]
    assert main(["merge", "--base", str(folder / "base"), *listed, "--out", str(tmp_path / "out"), *more]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not Path(tmp_path / "out").exists()
