"""What the experiment adds to the battery: the language model's side on a tiny one, its cache, and bad configs."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxlab.experiments.outcome import execute
from jaxlab.experiments.shapley_pruning import CLAIMS, EXPERIMENT, Config, language, synthetic
from jaxlab.nn import DecoderConfig, decoder
from jaxlab.nn.checkpoints import Model, find_decoder_family, save


def test_games_of_the_synthetic_part():
    game = synthetic.Redundant(0, 5)
    assert game(np.ones((1, 5), bool))[0] == 1
    # Losing neighbours costs more than losing each.
    alone = np.log(game(~np.eye(5, dtype=bool)))
    both = np.ones((1, 5), bool)
    both[0, [2, 3]] = False
    assert np.log(game(both))[0] < alone[2] + alone[3]
    assert synthetic.error_of_small_games(0, 4, 2).max() < 1e-12
    found = synthetic.twins()
    np.testing.assert_allclose(found["losses"], [0.3, 1.0], atol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the models extra")
    from jaxlab.nn.tokenizer import Tokenizer

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    config = DecoderConfig(
        vocab_size=256, hidden_size=8, intermediate_size=8, num_layers=8, num_heads=2, initializer_range=0.4
    )
    directory = tmp_path_factory.mktemp("pruning")
    model = Model(
        config=config,
        params=decoder.init(config, jax.random.key(0))[1],
        family=find_decoder_family(config),
        tokenizer=Tokenizer(backend, {}),
    )
    save(directory / "model", model)
    (directory / "text.txt").write_text("".join(np.random.default_rng(0).choice(list("abcdefgh "), 600)))
    return directory


@pytest.mark.filterwarnings("ignore::jaxlab.compress.UnreliableWarning")
def test_a_language_model_and_its_cache(folder, tmp_path, monkeypatch):
    config = dataclasses.replace(
        EXPERIMENT.presets["smoke"],
        model=str(folder / "model"),
        text=str(folder / "text.txt"),
        window=16,
        cache=str(folder / "cache"),
        strata=(6, 5, 4),
        depths=(1, 2),
        shapley_share=0.0,
        random_sets=1,
    )
    outcome = execute(EXPERIMENT, preset="quick", config=config, seed=0, out=tmp_path / "one")
    table = {row["method"]: row for row in outcome.result["table"]}
    assert {"contribution_verified", "sleb", "block_influence", "angular", "magnitude", "leave_one_out"} <= set(table)
    assert table["sleb"]["evaluations"] == 8 + 7
    assert all(np.isfinite(row["ppl_2"]) for row in table.values())
    judged = {claim["id"] for claim in outcome.result["claims"]}
    assert judged == {claim.id for claim in CLAIMS} - {"beats_leave_one_out_when_deep"}  # no depth is deep here
    # A second run evaluates no mask of the model.
    evaluated = []
    evaluate = language.compress.StackUtility.__call__

    def counting(self, masks):
        evaluated.extend([self.num_players] * len(masks))
        return evaluate(self, masks)

    monkeypatch.setattr(language.compress.StackUtility, "__call__", counting)
    again = execute(EXPERIMENT, preset="quick", config=config, seed=0, out=tmp_path / "two")
    assert set(evaluated) == {3}  # the twins
    assert again.result["table"] == outcome.result["table"]
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert {line["loop"] for line in lines} >= {"alone", "masks", "surrogates", "verify", "sleb"}


@pytest.mark.parametrize("preset", EXPERIMENT.presets)
def test_presets_have_shapes(preset):
    config = EXPERIMENT.presets[preset]
    found = EXPERIMENT.shapes(config)
    if config.model:
        found, losses = found
        assert losses.shape == (1,)
    assert found.mean.shape == ((max(config.strata) + 2,) if config.model else (config.blocks,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"masks": 0}, "masks must be at least 1, got 0"),
        ({"masks": 2}, "at least the number of strata, got 2"),
        ({"depths": (16,)}, "depths must be below the 16 blocks, got 16"),
        ({"depths": (4, 2)}, "positive and grow"),
        ({"strata": (17,)}, "strata must be between 0 and the 16 blocks"),
        ({"blocks": 2}, "blocks must be at least 3, got 2"),
        ({"small_blocks": 9}, "small_blocks must be between 2 and 8, got 9"),
        ({"shapley_share": -1.0}, "shapley_share must be finite and not negative, got -1.0"),
        ({"window": 1}, "window must be at least 2, got 1"),
    ],
)
def test_bad_configs_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(**fields)
