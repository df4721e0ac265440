"""``jaxlab prune`` end to end on a tiny model: the folder, the numbers, a kill and a second run, bad input."""

import json

import jax
import numpy as np
import pytest

from jaxlab import compress
from jaxlab.cli import main
from jaxlab.nn import DecoderConfig, decoder
from jaxlab.nn.checkpoints import Model, find_decoder_family, load, save
from jaxlab.nn.tokenizer import Tokenizer
from jaxlab.verbs import prune

tokenizers = pytest.importorskip("tokenizers", reason="needs the models extra")

DEPTH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder of random weights over single bytes, and a text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    config = DecoderConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=16,
        num_layers=DEPTH,
        num_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    params = decoder.init(config, jax.random.key(3))[1]
    model = Model(
        config=config,
        params=params,
        family=find_decoder_family(config),
        tokenizer=Tokenizer(backend, {"eos_token": "<|end|>"}),
        stop_ids=(256,),
    )
    directory = tmp_path_factory.mktemp("prune")
    save(directory / "model", model)
    (directory / "text.txt").write_text("".join(np.random.default_rng(0).choice(list("abcdefgh "), 400)))
    return directory


def words(folder, out, *more, remove=2):
    fixed = ["--window", "16", "--windows", "3", "--budget", "12", "--out", str(out)]
    return ["prune", str(folder / "model"), "--remove", str(remove), "--text", str(folder / "text.txt"), *fixed, *more]


@pytest.mark.filterwarnings("ignore::jaxlab.compress.UnreliableWarning")
def test_a_folder_with_everything(folder, tmp_path, capsys):
    out = tmp_path / "pruned"
    assert main(words(folder, out, "--protect", "0", "--recover", str(folder / "text.txt"))) == 0
    printed = capsys.readouterr().out
    report = json.loads((out / "contributions.json").read_text())
    assert (out / "pruning.png").stat().st_size > 10_000
    assert report["method"] == "game"
    assert len(report["removed"]) == 2
    assert 0 not in report["removed"]
    assert f"removed blocks {', '.join(map(str, sorted(report['removed'])))} by game" in printed
    assert [entry["block"] for entry in report["blocks"]] == list(range(DEPTH))
    for entry in report["blocks"]:
        assert entry["removed"] == (entry["block"] in report["removed"])
        assert entry["protected"] == (entry["block"] == 0)
        assert entry["low"] <= entry["contribution"] <= entry["high"]
    assert report["evaluations"] <= 2**DEPTH
    assert set(report["surrogates"]) == {"mlp", "pairwise"}
    # What is said of the folder is true of it: after the recovery, on the calibration windows of this seed.
    model, whole = load(out), load(folder / "model")
    assert model.config.num_layers == DEPTH - 2
    tokens = whole.tokenizer.encode((folder / "text.txt").read_text())
    batch = compress.token_batch(tokens[:200], window=16, limit=3, key=jax.random.key(0))
    stack = compress.decoder_stack(whole.config)
    keep = compress.without(DEPTH, report["removed"])[None]
    game = compress.make_utility(stack, whole.params, batch)
    found = report["perplexity"]["calibration"]
    assert found["before"] == pytest.approx(np.exp(game.full_loss), rel=1e-4)
    assert found["after"] == pytest.approx(np.exp(game.losses(keep)[0]), rel=1e-4)
    after = compress.make_utility(compress.decoder_stack(model.config), model.params, batch)
    assert found["recovered"] == pytest.approx(np.exp(after.full_loss), rel=1e-4)
    assert found["recovered"] < found["after"]
    assert set(report["perplexity"]) == {"calibration", "held_out"}
    # The best of all sets that were looked at: no other pair of unprotected blocks costs less.
    pairs = [compress.without(DEPTH, pair) for pair in ((1, 2), (1, 3), (2, 3))]
    assert game.losses(keep)[0] == pytest.approx(game.losses(np.stack(pairs)).min(), abs=1e-5)


@pytest.mark.filterwarnings("ignore::jaxlab.compress.UnreliableWarning")
def test_a_killed_run_continues(folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "pruned"
    evaluate, calls = compress.StackUtility.__call__, []

    def dying(self, masks):
        if len(calls) == 1:
            raise KeyboardInterrupt
        calls.append(len(masks))
        return evaluate(self, masks)

    monkeypatch.setattr(compress.StackUtility, "__call__", dying)
    assert main(words(folder, out, "--method", "sleb")) == 130
    assert [path.suffix for path in out.iterdir()] == [".values"]
    monkeypatch.undo()
    assert main(words(folder, out, "--method", "sleb")) == 0
    assert "7 masks evaluated, 4 of them from before" in capsys.readouterr().out
    report = json.loads((out / "contributions.json").read_text())
    assert report["evaluations_restored"] == calls[0] == 4
    assert report["evaluations"] == 4 + 3
    assert "contribution" not in report["blocks"][0]
    # A second run needs a word to replace the checkpoint, and evaluates nothing.
    assert main(words(folder, out, "--method", "sleb")) == 2
    assert "is not empty, it holds" in capsys.readouterr().err
    assert main(words(folder, out, "--method", "sleb", "--overwrite")) == 0
    assert json.loads((out / "contributions.json").read_text())["evaluations_restored"] == 7


@pytest.mark.filterwarnings("ignore::jaxlab.compress.UnreliableWarning")
@pytest.mark.parametrize("method", [m for m in prune.METHODS if m not in ("game", "sleb", "taylor")])
def test_every_method_removes(folder, method):
    model = load(folder / "model")
    batch = compress.token_batch(np.arange(60) % 256, window=16, limit=3)
    stack = compress.decoder_stack(model.config)
    game = compress.make_utility(stack, model.params, batch)
    chosen = prune.choose(
        method,
        stack,
        model.params,
        batch,
        game,
        num_players=DEPTH,
        remove=2,
        budget=30,
        protect=(1,),
    )
    assert len(set(chosen.removed.tolist())) == 2
    assert 1 not in chosen.removed
    assert (chosen.scores is None) == (method in ("random", "deepest", "angular"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--remove", "4"], "between 0 and 3 of 4 blocks can be removed; got 4"),
        (["--remove", "-1"], "--remove must be at least 0, got -1"),
        (["--remove", "2", "--protect", "0,1,2"], "2 removed and 3 protected blocks are more than the 4"),
        (["--protect", "7"], "protected blocks must be between 0 and 3; got 7"),
        (["--protect", "a"], "invalid blocks value: 'a'"),
        (["--method", "magic"], "invalid choice: 'magic'"),
        (["--window", "65"], "at most the model's context of 64 tokens, got 65"),
        (["--window", "1"], "--window must be at least 2, got 1"),
        (["--windows", "0"], "--windows must be at least 1, got 0"),
        (["--budget", "0"], "--budget must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must be between 0 and"),
        (["--text", "absent.txt"], "no such file or folder: absent.txt"),
        (["--text", "{}/one.txt"], "at least two tokens"),
        (["--recover", "{}/one.txt"], "at least two tokens"),
        (["--recover-epochs", "0"], "--recover-epochs must be at least 1, got 0"),
        (["--recover", "absent.txt"], "no such file or folder: absent.txt"),
        (["--out", "{}/text.txt"], "a file is in the way of that folder"),
        (["--out", "{}/model"], "is not empty, it holds config.json; --overwrite replaces"),
        (["--method", "taylor"], "2 removed and 4 protected blocks are more than the 4"),
    ],
)
def test_bad_input_is_one_line(folder, tmp_path, more, message, capsys):
    (folder / "one.txt").write_text("a")
    more = [word.replace("{}", str(folder)) for word in more]
    assert main([*words(folder, tmp_path / "out"), *more]) == 2
    assert not (tmp_path / "out").exists()  # nothing was evaluated first
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
