"""The parts of the experiment on GT-NSGDm, each against what is known of it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from jaxlab import cli
from jaxlab.data import load_text, split_words
from jaxlab.experiments.base import Run
from jaxlab.experiments.gt_nsgdm import bias, experiment, language_model, rates, regression
from jaxlab.experiments.gt_nsgdm.claims import CLAIMS
from jaxlab.experiments.gt_nsgdm.config import PRESETS, Config
from jaxlab.experiments.gt_nsgdm.methods import METHODS, configurations, select
from jaxlab.optim import topology

SMOKE = PRESETS["smoke"]


# Where the methods come to rest on three nodes (specified in closed form; bias.STEP is the length of a step).
@pytest.mark.parametrize("start", [4.0, 6.0])
def test_resting_points_of_three_nodes(start):
    end = {name: path[-1] for name, path in bias.trajectories(start).items()}
    assert end["nsgd"] == pytest.approx(0.0, abs=bias.STEP)  # the median
    assert end["nsgdm"] == pytest.approx(0.0, abs=bias.STEP)
    assert end["dsgd_gclip"] == pytest.approx(0.5, abs=bias.STEP)  # 2 x = 1: two gradients in, one clipped
    assert end["dsgd"] == pytest.approx(bias.MINIMISER, abs=bias.STEP)
    assert end["gt_nsgd"] == pytest.approx(bias.MINIMISER, abs=bias.STEP)
    assert end["gt_nsgdm"] == pytest.approx(bias.MINIMISER, abs=bias.STEP)


def test_every_method_has_as_many_configurations():
    second = {"beta": (0.1, 0.2), "max_norm": (1.0, 2.0), "max_value": (3.0, 4.0), "scale": (5.0, 6.0)}
    grids = {name: configurations(m, low=0.1, high=10.0, points=3, second=second) for name, m in METHODS.items()}
    assert {grid.shape for grid in grids.values()} == {(6, 2)}
    np.testing.assert_allclose(grids["dsgd"][:, 0], np.geomspace(0.1, 10.0, 6))
    np.testing.assert_allclose(grids["gt_nsgdm"], [[a, b] for a in (0.1, 1.0, 10.0) for b in (0.1, 0.2)])


def test_unknown_methods_are_named():
    with pytest.raises(ValueError, match=r"unknown method 'sgd'; there are dsgd, .*gt_nsgdm"):
        select(["dsgd", "sgd"])


@functools.cache
def problem() -> regression.Problem:
    return regression.make_problem(jax.random.key(0))


def test_regression_problem_is_the_papers():
    features, labels, target = map(np.asarray, problem())
    assert features.shape == (20, 50, 20)
    frequency = features.reshape(1000, 20).mean(0)
    # Four standard deviations of a share over 1000 rows, widened for 20 features at once.
    np.testing.assert_allclose(frequency, [0.9] * 2 + [0.5] * 2 + [0.1] * 16, atol=4 * 0.5 / 1000**0.5)
    np.testing.assert_allclose(labels, features @ target, atol=1e-5)


def tukey_gradient(params: np.ndarray, features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Derivative of Tukey's biweight by hand: r (1 - (r/c)^2)^2 inside c, 0 outside."""
    c = 4.6851
    rows = []
    for x, rows_of_node, y in zip(params, features, labels, strict=True):
        r = rows_of_node @ x - y
        rows.append(rows_of_node.T @ np.where(np.abs(r) < c, r * (1 - (r / c) ** 2) ** 2, 0.0) / len(y))
    return np.stack(rows)


def test_simulation_equals_a_loop_over_nodes():
    """Two hundred steps of DSGD written with NumPy."""
    features, labels, target = map(np.asarray, problem())
    noise = np.asarray(regression.draw_noise(jax.random.key(1), "gaussian", runs=2, steps=200))
    hyperparameters = jnp.array([[0.05, 0.0], [0.02, 0.0]])
    which = jnp.array([1, 0])
    trace = regression.simulate(
        METHODS["dsgd"], hyperparameters, which, jnp.asarray(noise), jnp.asarray(regression.RING), problem()
    )
    for run in range(2):
        rate, params, motion = float(hyperparameters[run, 0]), np.zeros((20, 20)), []
        for step in range(200):
            gradient = tukey_gradient(params, features, labels) + noise[step, which[run]]
            moved = regression.RING @ (params - rate * gradient)
            motion.append(np.linalg.norm(moved.mean(0) - params.mean(0)) / rate)
            params = moved
        # float32 against float64 over 200 steps of a stable iteration.
        assert trace.error[run, -1] == pytest.approx(np.linalg.norm(params - target, axis=1).mean(), rel=1e-4)
        assert trace.motion[run, -1] == pytest.approx(max(motion[100:]), rel=1e-3)


def test_plateau_of_a_known_curve():
    """Errors 1 over two of four decades, a thousandfold outside: two decades, and a part of a step at each end."""
    rates_ = np.geomspace(1e-3, 10.0, 9)  # half a decade apart
    errors = np.where((rates_ > 9e-3) & (rates_ < 1.1), 1.0, 1e3)
    sweep = regression.Sweep(np.stack([rates_, np.zeros(9)], 1), errors, rates_[:1], {})
    # On logarithmic axes the flank passes 2 after log(2) / log(1000) of half a decade.
    assert sweep.plateau() == pytest.approx(2.0 + 2 * 0.5 * np.log(2) / np.log(1e3), abs=0.01)
    assert dataclasses.replace(sweep, tuning_errors=np.full(9, np.inf)).plateau() >= 0.0


def test_norms_of_rates_equal_a_slow_loop():
    """One block of GT-NSGDm on the rate problem against NumPy, with the noise it drew."""
    key = jax.random.key(3)
    centres = 3.0 * jax.random.normal(jax.random.split(key)[0], (8, 10))
    measured = rates.norm_by_horizon(key, [rates.BLOCK], knows_tail=True, trials=2)
    noise = np.asarray(
        rates._draw(jax.random.fold_in(jax.random.split(key)[1], 0), (rates.BLOCK, 2, 8, 10)), dtype=np.float64
    )
    w, a = topology.ring(8), np.asarray(centres, dtype=np.float64)
    beta = 1.0 - rates.BLOCK**-0.6
    rate = 2.0 * ((1.0 - beta) / rates.BLOCK) ** 0.5
    for trial in range(2):
        x, v, y, norms = np.zeros((8, 10)), np.zeros((8, 10)), np.zeros((8, 10)), []
        for step in range(rates.BLOCK):
            offsets = x[:, None] - a
            norms.append(np.linalg.norm((offsets / np.sqrt(1 + offsets**2)).mean(1), axis=1).mean())
            g = (x - a) / np.sqrt(1 + (x - a) ** 2) + noise[step, trial]
            new_v = beta * v + (1 - beta) * g
            y, v = w @ (y + new_v - v), new_v
            x = w @ (x - rate * y / np.linalg.norm(y, axis=1, keepdims=True))
        assert measured[0, trial] == pytest.approx(np.mean(norms), rel=1e-3)  # float32 over 256 steps


def test_slope_of_a_power_law():
    horizons = [256, 1024, 4096]
    assert rates.log_slope(horizons, 3.0 * np.asarray(horizons, float) ** -0.2) == pytest.approx(-0.2)
    # p = 1.5: -(p - 1) / (3 p - 2) and -(p - 1) / (2 p).
    for knowledge, exponent in (("known", -0.2), ("unknown", -1 / 6)):
        assert rates.THEORY_SLOPES[knowledge] == pytest.approx(exponent)


def test_corpus_is_shared_out_without_overlap(tmp_path):
    """Two texts of different length: as many words of each, every word in one place only."""
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text(" ".join("ab"[i % 2] for i in range(9_000)))
    second.write_text(" ".join("cd"[i % 2] for i in range(20_000)))
    sizes = dataclasses.replace(SMOKE, corpora=(str(first), str(second)), held_out_windows=10**6).language_model
    corpus = language_model.load_corpus(sizes)
    ids = [set(shard.tolist()) for shard in corpus.shards]
    assert ids[0] == ids[2]  # the first nodes read one text, the last the other
    assert ids[5] == ids[7]
    assert not ids[2] & ids[5]
    assert corpus.shards.shape == (8, (18_000 - 5 * 320) // 8)
    windows_of_a_block = 320 // (sizes.context + 1)
    assert corpus.validation.shape == corpus.test.shape == (2 * windows_of_a_block, sizes.context + 1)
    assert corpus.unknown == 0.0


def test_a_corpus_that_is_too_short_is_named(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("word " * 4_000)
    sizes = dataclasses.replace(SMOKE, corpora=(str(short),)).language_model
    with pytest.raises(ValueError, match=r"4000 words in .*short.txt are too few to hold out two blocks"):
        language_model.load_corpus(sizes)
    sizes = dataclasses.replace(SMOKE, corpora=(str(short),) * 2, nodes=1000).language_model
    with pytest.raises(ValueError, match=r"8000 words in .*short.txt are too few for 1000 nodes that each need 9"):
        language_model.load_corpus(sizes)


def test_windows_may_be_longer_than_the_usual_block():
    corpus = language_model.load_corpus(dataclasses.replace(SMOKE, context=500).language_model)
    assert corpus.validation.shape[1] == corpus.test.shape[1] == 501


@functools.cache
def task(devices: int) -> language_model.Task:
    sizes = dataclasses.replace(SMOKE.language_model, devices=devices, steps=6, evaluations=2)
    return language_model.Task(sizes, language_model.load_corpus(sizes))


def test_nodes_on_eight_devices_train_to_the_same_losses():
    method, rates_, matrix = METHODS["gt_nsgdm"], np.array([[0.1, 0.8], [0.3, 0.9]]), topology.ring(8)
    keys = jax.random.split(jax.random.key(0), 2)
    losses = []
    for devices in (1, 8):
        params = task(devices).train(method, rates_, matrix, keys)
        if devices == 8:
            assert len(jax.tree.leaves(params)[0].sharding.device_set) == 8
        losses.append(np.asarray(task(devices).evaluate(params, split="test")))
    # Six float32 steps with sums in another order.
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_training_learns_and_the_untrained_model_knows_nothing():
    method, matrix = METHODS["gt_nsgdm"], topology.ring(8)
    keys = jax.random.split(jax.random.key(1), 1)
    sizes = dataclasses.replace(SMOKE.language_model, steps=60, evaluations=1)
    learner = language_model.Task(sizes, language_model.load_corpus(sizes))
    start = learner.start(method, np.array([[0.3, 0.8]]), keys)
    untrained = np.asarray(learner.evaluate(start.params, split="test"))
    np.testing.assert_allclose(untrained, np.log(sizes.vocabulary), atol=0.1)  # near the uniform guess
    trained = learner.evaluate(learner.train(method, np.array([[0.3, 0.8]]), matrix, keys), split="test")
    assert np.asarray(trained).max() < untrained.min() - 0.2


def test_deviations_are_centred_gradients():
    """Against gradients of a hand-written loop over draws and nodes."""
    method, keys = METHODS["dsgd"], jax.random.split(jax.random.key(2), 1)
    params = jax.tree.map(lambda leaf: leaf[0], task(1).start(method, np.array([[0.1, 0.0]]), keys).params)
    measured = np.asarray(task(1).gradient_deviations(params, jax.random.key(5), draws=3))
    batches = task(1)._batches(jax.random.key(5), 3)
    network = task(1).config.decoder
    flat = []
    for draw in range(3):
        grads = language_model._gradients(network, params, batches[:, draw])
        flat.append(np.concatenate([np.asarray(leaf).reshape(8, -1) for leaf in jax.tree.leaves(grads)], axis=1))
    centred = np.stack(flat) - np.mean(flat, axis=0)
    np.testing.assert_allclose(measured, np.linalg.norm(centred, axis=2).ravel(), rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"regression_steps": 250}, "regression_steps must be a multiple of 100, got 250"),
        ({"lm_steps": 5}, "lm_steps must be a multiple of 2, got 5"),
        ({"horizons": (256, 300)}, "horizons must be a multiple of 256, got 300"),
        ({"bias_steps": 49}, "bias_steps must be a multiple of 50, got 49"),
        ({"networks": (4, 4)}, r"networks must be two numbers or more, in increasing order, got \(4, 4\)"),
        ({"networks": (8, 2)}, r"networks must be two numbers or more, in increasing order, got \(8, 2\)"),
        ({"horizons": (256,)}, r"horizons must be two numbers or more, in increasing order, got \(256,\)"),
        ({"noises": ("stable", "stable")}, "noises must differ, got stable, stable"),
        ({"topologies": ("ring", "ring")}, "topologies must differ, got ring, ring"),
        ({"noises": ("cauchy",)}, "noises must be some of gaussian, student_t, stable, got cauchy"),
        ({"topologies": ("star",)}, "topologies must be some of ring, exponential, complete, got star"),
        ({"lm_methods": ("adam",)}, "unknown method 'adam'"),
        ({"tail_draws": 19}, "tail_draws must be 0 or at least 20, got 19"),
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"devices": 3}, "devices must divide the 8 nodes, got 3"),
        ({"heads": 3}, "num_heads must divide hidden_size"),
        ({"corpora": ()}, "corpora must not be empty"),
    ],
)
def test_bad_configs_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMOKE, **change)


@pytest.mark.parametrize("order", [("dsgd", "nsgd"), ("nsgd", "dsgd")])
def test_a_baseline_that_diverged_is_higher_than_any(tmp_path, order):
    """Whichever comes first; and GT-NSGDm's own divergence makes its claims fail."""
    measured = []
    for own in (3.0, np.nan):
        losses = {"dsgd": np.nan, "nsgd": 5.0, "gt_nsgdm": own}
        trained = {
            name: experiment.Trained(np.ones(2), np.full((1, 1, 2), losses[name]), {}) for name in (*order, "gt_nsgdm")
        }
        run = Run(CLAIMS, preset="quick", seed=0, out=tmp_path)
        experiment._judge_language_model(Config(), run, trained)
        measured.append({claim["id"]: claim["measured"] for claim in run.judge(complete=False)["claims"]})
        run.close(complete=False)
    assert measured[0] == {"language_model_loss": 2.0, "language_model_loss_one_step_size": 2.0}
    assert np.isnan(list(measured[1].values())).all()


def test_help_names_every_method(capsys):
    assert cli.main(["run", "gt-nsgdm", "--help"]) == 0
    assert set(METHODS) <= set(re.findall(r"[a-z_]+", capsys.readouterr().out.partition("--noises")[0]))


def test_more_devices_than_there_are():
    sizes = dataclasses.replace(SMOKE, nodes=16, devices=16).language_model
    with pytest.raises(ValueError, match="16 devices are wanted, there are 8"):
        language_model.Task(sizes, language_model.load_corpus(sizes))


def test_default_corpora_differ():
    """Half of the nodes read English, half Python; the same words are common in both."""
    english, python = (split_words(load_text(name)) for name in Config().corpora)
    share = min(len(english), len(python))
    assert english[:share].count("the") > 2 * python[:share].count("the")
    assert python[:share].count("self") > 3 * english[:share].count("self")


def test_tukey_minimum_is_the_true_weights():
    """The loss of the simulation is zero at the true weights and positive around, so that the error has a meaning."""
    _, _, target = problem()

    def loss(x: np.ndarray) -> float:
        return float(regression._sum_of_losses(jnp.tile(jnp.asarray(x, jnp.float32), (20, 1)), problem()))

    assert loss(np.asarray(target)) == pytest.approx(0.0, abs=1e-6)
    numeric = optimize.approx_fprime(np.asarray(target, np.float64) + 0.3, loss, 1e-2).sum()
    assert numeric > 0.0
