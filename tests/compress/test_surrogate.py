"""Fits of known games: additive, constant, pairwise; held-out masks; bad input."""

import jax
import numpy as np
import optax
import pytest
from scipy.stats import spearmanr

from jaxlab.compress import contributions, pairwise_ridge, strata_deploy, stratified_masks
from jaxlab.compress.surrogate import fit, held_out_sets, mlp_surrogate, quality, to_target

PLAYERS = 6
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def masks():
    return np.asarray(stratified_masks(KEY, PLAYERS, strata_deploy(PLAYERS, 4), 50 * PLAYERS))


@pytest.mark.parametrize("output", ["sigmoid", "linear"])
def test_an_additive_game_is_learnt(masks, output):
    weights = np.linspace(0.02, 0.15, PLAYERS)
    # Away from 0 and 1, where a sigmoid is anything but additive.
    found = fit(KEY, mlp_surrogate(PLAYERS, output=output), masks, 0.2 + masks @ weights, folds=10)
    assert found.quality.r2 > 0.99
    assert found.quality.spearman > 0.98
    estimate = contributions(found.apply, found.params, stratified_masks(KEY, PLAYERS, (5, 4, 3, 2), 4000))
    np.testing.assert_allclose(estimate.mean, weights, atol=0.02)


def test_a_constant_game_gives_constants(masks):
    found = fit(KEY, mlp_surrogate(PLAYERS, output="linear"), masks, np.full(len(masks), 0.7))
    assert found.quality.rmse < 1e-3
    assert np.isnan(found.quality.r2)
    assert np.isnan(found.quality.spearman)
    estimate = contributions(found.apply, found.params, masks)
    np.testing.assert_allclose(estimate.mean, 0.0, atol=2e-3)
    ridge = pairwise_ridge.fit(masks, np.zeros(len(masks)), key=KEY)
    np.testing.assert_array_equal(ridge.params.single, np.zeros(PLAYERS))


def test_recipe_of_the_paper_needs_its_updates(masks):
    """A third of its 8,100 updates learns an easy game; 300 masks for 300 epochs (300 updates) learn it less."""
    values = 1 / (1 + np.exp(-(masks @ np.linspace(-2, 2, PLAYERS))))
    network = mlp_surrogate(PLAYERS)
    few = fit(KEY, network, masks, values, recipe="paper", epochs=100)
    more = fit(KEY, network, masks, values, recipe="paper", epochs=900, batch_size=100)
    assert more.quality.rmse < 0.7 * few.quality.rmse
    own = fit(KEY, network, masks, values, recipe=optax.adam(1e-2), epochs=300)
    assert own.quality.r2 > 0.98


def test_pairs_are_found_exactly(masks):
    rng = np.random.default_rng(0)
    single, upper = rng.uniform(0, 1, PLAYERS), np.triu(rng.normal(size=(PLAYERS, PLAYERS)), 1)
    removed = 1.0 - masks
    values = -(removed @ single) - np.einsum("ni,ij,nj->n", removed, upper, removed)
    found = pairwise_ridge.fit(masks, values, key=KEY, l2_single=1e-4, l2_pair=1e-4)
    np.testing.assert_allclose(pairwise_ridge.singles(found.params), single, atol=2e-3)
    np.testing.assert_allclose(pairwise_ridge.interaction_matrix(found.params), upper + upper.T, atol=2e-3)
    assert found.quality.r2 > 0.9999
    np.testing.assert_allclose(found.apply(found.params, masks), values, atol=2e-3)


def test_ridge_is_the_penalised_least_squares_solution(masks):
    """Against the normal equations, in double precision."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=len(masks)).astype(np.float32)
    removed = 1.0 - masks
    first, second = np.triu_indices(PLAYERS, 1)
    features = np.concatenate([removed, removed[:, first] * removed[:, second]], 1)
    sets = held_out_sets(KEY, masks, holdout=20)
    train = ~sets[0]
    penalty = np.diag([0.5] * PLAYERS + [2.0] * len(first))
    expected = np.linalg.solve(
        features[train].T @ features[train] + penalty, features[train].T @ (0.25 - values[train].astype(float))
    )
    found = pairwise_ridge.fit(masks, values, key=KEY, l2_single=0.5, l2_pair=2.0, full=0.25, holdout=20)
    np.testing.assert_allclose(found.params.single, expected[:PLAYERS], atol=1e-4)
    np.testing.assert_allclose(found.params.pair[first, second], expected[PLAYERS:], atol=1e-4)
    assert found.params.full == 0.25


def test_held_out_masks_are_held_out(masks):
    sets = held_out_sets(KEY, masks[:20], folds=3)
    np.testing.assert_array_equal(sets.sum(0), np.ones(20))
    assert not sets[-1].any()
    assert held_out_sets(KEY, masks[:20]).sum() == 4  # a fifth, less than the paper's L
    assert held_out_sets(KEY, masks[:200]).sum() == PLAYERS
    # Noise cannot be predicted where it was not seen, however well it is fitted.
    noise = np.random.default_rng(0).normal(size=60)
    found = pairwise_ridge.fit(masks[:60], noise, key=KEY, l2_single=1e-3, l2_pair=1e-3, folds=5)
    assert found.quality.r2 < 0.1
    assert found.held_out.all()


def test_the_only_mask_without_a_part_is_not_held_out(masks):
    """What the part is worth stands in no other mask: its prediction would be a guess, and so would the quality."""
    drawn = masks[:60].copy()
    drawn[:, 0] = True
    without = np.ones((1, PLAYERS), bool)
    without[0, 0] = False
    both = np.concatenate([drawn, without])
    removed = 1.0 - both
    values = -(removed @ np.linspace(9.0, 0.1, PLAYERS))
    for options in ({"folds": 5}, {"holdout": 30}):
        assert not held_out_sets(KEY, both, **options)[:, -1].any()
    found = pairwise_ridge.fit(both, values, key=KEY, l2_single=0.01, l2_pair=0.01, folds=5)
    np.testing.assert_array_equal(found.held_out, np.arange(61) < 60)
    assert found.quality.r2 > 0.99
    np.testing.assert_allclose(found.params.single[0], 9.0 / 1.01, rtol=1e-4)  # one row against the penalty
    # Where there is nothing else, there is no choice.
    np.testing.assert_array_equal(held_out_sets(KEY, ~np.eye(6, dtype=bool), folds=3).sum(0), np.ones(6))


def test_quality_is_that_of_scipy():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 5, 30).astype(np.float32), rng.normal(size=30).astype(np.float32)
    found = quality(first, second)
    assert found.spearman == pytest.approx(spearmanr(first, second).statistic, abs=1e-12)
    assert found.rmse == pytest.approx(np.sqrt(np.mean((first - second) ** 2)), rel=1e-6)


def test_targets_grow_with_the_score():
    scores = np.array([1e-4, 0.1, 0.9, 1.0], np.float32)
    for target in ("score", "log", "log1p"):
        assert (np.diff(to_target(scores, target)) > 0).all()
    np.testing.assert_allclose(to_target(scores, "log1p")[-1], 0.0)
    np.testing.assert_allclose(to_target(scores, "log1p")[0], -np.log1p(-np.log(1e-4)), rtol=1e-6)
    assert to_target([1.1], "log1p") == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: fit(KEY, mlp_surrogate(6), m, np.ones(3)), "one value for each of the 300 masks"),
        (lambda m: fit(KEY, mlp_surrogate(6), m[:2], [1.0, np.nan]), "that of mask 1 is not"),
        (lambda m: fit(KEY, mlp_surrogate(6), m[:1], [1.0]), "at least two masks"),
        (lambda m: fit(KEY, mlp_surrogate(6), m, m.sum(1), recipe="magic"), "got 'magic'"),
        (lambda m: fit(KEY, mlp_surrogate(6), m, m.sum(1), recipe=optax.sgd(1.0)), "needs epochs"),
        (lambda m: fit(KEY, mlp_surrogate(6), m, m.sum(1), epochs=0), "epochs must be at least 1; got 0"),
        (lambda m: fit(KEY, mlp_surrogate(6), m, m.sum(1), batch_size=0), "batch_size must be at least 1; got 0"),
        (lambda m: fit(KEY, mlp_surrogate(6), m, m.sum(1), folds=1), "folds must be between 2 and the 300"),
        (lambda m: fit(KEY, mlp_surrogate(6), m, m.sum(1), holdout=300), "between 1 and 299 of the 300"),
        (lambda m: fit(KEY, mlp_surrogate(6), m, m.sum(1), holdout=3, folds=3), "either folds or holdout"),
        (lambda m: mlp_surrogate(0), "got 0 parts"),
        (lambda m: mlp_surrogate(3, output="relu"), "got 'relu'"),
        (lambda m: to_target([0.0], "log"), "needs positive scores; got 0.0"),
        (lambda m: to_target([0.5], "square"), "got 'square'"),
        (lambda m: pairwise_ridge.fit(m, m.sum(1), key=KEY, l2_single=1.0), "go together"),
        (lambda m: pairwise_ridge.fit(m, m.sum(1), key=KEY, l2_single=0.0, l2_pair=1.0), "must be positive; got 0.0"),
    ],
)
def test_bad_input(masks, call, message):
    with pytest.raises(ValueError, match=message):
        call(masks)
