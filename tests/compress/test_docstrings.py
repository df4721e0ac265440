"""The examples of the module docstrings run as they stand, in the order in which a user would come across them."""

import importlib
import re
import textwrap

import jax
import numpy as np
import pytest

from jaxlab import compress
from jaxlab.compress import recovery
from jaxlab.nn import DecoderConfig, decoder
from jaxlab.nn.checkpoints import Model, find_decoder_family, save


# What takes seconds as it stands.
def fewer_masks(key, num_players, strata, total, **options):
    return compress.stratified_masks(key, num_players, strata, min(total, 500), **options)


def shorter_fit(key, surrogate, masks, values, **options):
    return compress.surrogate.fit(key, surrogate, masks, values, epochs=150, **options)


def tiny(depth):
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=depth,
        num_heads=1,
        max_position_embeddings=160,
        initializer_range=0.1,
    )
    return Model(config=config, params=decoder.init(config, jax.random.key(0))[1], family=find_decoder_family(config))


def run(name, scope):
    """Run the example of a module in a scope that has what the package exports, and the module's own names first."""
    module = importlib.import_module(f"jaxlab.compress.{name}")
    (example,) = re.findall(r"Example::\n\n((?:    .*\n|\n)+)", module.__doc__)
    own = {of: getattr(module, of) for of in module.__all__}
    own |= {"stratified_masks": fewer_masks} | ({"fit": shorter_fit} if name == "surrogate" else {})
    exec(textwrap.dedent(example), scope | own | {"__builtins__": __builtins__}, found := {})
    return found


@pytest.fixture
def scope(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny(30)
    worth = np.linspace(0.02, 0.3, 30)  # of blocks: the score without some is exp of minus their sum
    utility = lambda masks: np.exp(-(1.0 - np.asarray(masks, float)) @ worth)  # noqa: E731
    masks = np.asarray(compress.stratified_masks(jax.random.key(7), 30, (29, 27, 24), 60, dedupe=True))
    names = {name: getattr(compress, name) for name in compress.__all__} | {"to_target": compress.surrogate.to_target}
    return {
        **names,
        "jax": jax,
        "np": np,
        "key": jax.random.key(1),
        "model": model,
        "params": model.params,
        "tokens": [i % 7 for i in range(300)],
        "masks": masks,
        "queries": masks,
        "utility": utility,
        "scores": utility(masks),
        "load": lambda name: model,
        "save": save,
        "pruned": tiny(2),
    }


def test_masks_and_contributions(scope):
    found = run("masks", scope)
    assert sorted(set(found["masks"].sum(1).tolist())) == [18, 21, 24, 27, 30]
    assert found["neighbours"].shape == (500, 32, 32)
    few = compress.all_masks(6)[-40:]
    scores = np.exp((few - 1.0) @ np.linspace(0.02, 0.3, 6))
    assert run("pairwise_ridge", scope | {"masks": few, "scores": scores})["found"].quality.r2 > 0.9
    surrogate = run("surrogate", scope | {"queries": scope["masks"][:10]})["found"]
    assert surrogate.quality.rmse > 0
    scope |= {"fitted": surrogate, "values": np.arange(2**6, dtype=float)}
    scope["found"] = run("attribution", scope)["found"]
    assert scope["found"].mean.shape == scope["found"].stderr.shape == (30,)
    chosen = run("selection", scope)
    assert len(chosen["removed"]) == 6
    assert chosen["best"].mask.sum() == 24


def test_games_and_networks(scope):
    batch = compress.token_batch(scope["tokens"], window=16, limit=2)
    stack = compress.decoder_stack(scope["model"].config)
    assert np.isfinite(run("masked_losses", scope)["losses"]).all()
    np.testing.assert_allclose(run("evaluations", scope | {"batch": batch})["values"], scope["scores"], rtol=1e-6)
    assert run("baselines", scope | {"batch": batch, "stack": stack})["found"].order.shape == (6,)
    run("deletion", scope)
    assert compress.prune_model(scope["model"], [12]).config.num_layers == 29
    assert np.isfinite(run("recovery", scope | {"recover": recovery.recover})["losses"]).all()
