"""Rankings and their ties, search against enumeration, verification, every baseline, and twins as backups."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.compress import (
    ResidualStack,
    all_masks,
    decoder_stack,
    estimate_contributions,
    exact_contributions,
    hidden_states,
    make_utility,
    pairwise_ridge,
    rank,
    search,
    strata_deploy,
    stratified_masks,
    verify,
    without,
)
from jaxlab.compress.baselines import (
    angular_blocks,
    angular_distances,
    block_influence,
    deepest_blocks,
    leave_one_out,
    magnitude,
    random_blocks,
    sleb,
    taylor,
    taylor_protected,
)
from jaxlab.compress.estimation import UnreliableWarning, check_depth, costly_blocks
from jaxlab.compress.surrogate import to_target


def test_ranking_ties_and_protection():
    scores = [0.5, 0.1, 0.5, 0.1, 0.9]
    np.testing.assert_array_equal(rank(scores, 3), [3, 1, 2])
    np.testing.assert_array_equal(rank(scores, 3, protect=(1, 2)), [3, 0, 4])
    assert rank(scores, 0).shape == (0,)
    # Nested: more removed blocks are the same ones and others.
    for more in range(4):
        assert set(rank(scores, more)) <= set(rank(scores, more + 1))
    np.testing.assert_array_equal(rank([np.inf, 1.0], 1), [1])


def surrogate(game):
    return pairwise_ridge.PairwiseGame(
        jnp.float32(0), jnp.asarray(game.single, jnp.float32), jnp.asarray(game.pair + game.pair.T, jnp.float32)
    )


@pytest.mark.parametrize("protect", [(), (3, 6)])
@pytest.mark.parametrize("remove", [1, 3, 5])
def test_search_finds_the_best_set(game, remove, protect):
    free = [block for block in range(8) if block not in protect]
    sets = [without(8, removed) for removed in itertools.combinations(free, remove)]
    values = game(np.stack(sets))
    found = search(pairwise_ridge.apply, surrogate(game), 8, remove, beam=8, protect=protect)
    assert (found.masks.sum(1) == 8 - remove).all()
    assert found.masks[:, list(protect)].all()
    assert (np.diff(found.predicted) <= 0).all()
    np.testing.assert_allclose(np.exp(found.predicted[0]), values.max(), rtol=1e-5)


def test_search_begins_at_a_set(game):
    start = rank(-np.arange(8.0), 3)
    found = search(pairwise_ridge.apply, surrogate(game), 8, 3, start=start, beam=1)
    assert found.masks.shape == (1, 8)
    assert found.predicted[0] >= pairwise_ridge.apply(surrogate(game), without(8, start)[None])[0]


def test_verification_takes_the_truly_best():
    values = np.array([np.nan, 0.3, 0.9, np.inf])
    found = verify(lambda masks: values, all_masks(2))
    np.testing.assert_array_equal(found.mask, [False, True])
    assert found.value == pytest.approx(0.9)
    with pytest.raises(ValueError, match="none of 4 masks has a finite value"):
        verify(lambda masks: np.full(4, np.nan), all_masks(2))


def test_block_influence_of_known_blocks():
    state = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    turned = np.stack([-state[..., 1], state[..., 0], -state[..., 3], state[..., 2]], -1)
    states = np.stack([state, state, -state, 3 * turned])
    np.testing.assert_allclose(block_influence(states), [0.0, 2.0, 1.0], atol=1e-6)
    counts = np.zeros((2, 3), bool)
    counts[0, 0] = True
    np.testing.assert_allclose(block_influence(states, counts), [0.0, 2.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(angular_distances(states, 1), [0.0, 1.0, 0.5], atol=1e-3)
    np.testing.assert_array_equal(angular_blocks(states, 1), [0])
    np.testing.assert_array_equal(angular_blocks(states, 2, protect=(0,)), [1, 2])
    with pytest.raises(ValueError, match="no 2 consecutive blocks are free"):
        angular_blocks(states, 2, protect=(1,))


def test_greedy_removal():
    costs = np.array([0.3, 0.1, 0.5, 0.2, 0.1])
    asked = []

    def additive(masks):
        asked.append(len(masks))
        return np.exp(-(~masks @ costs))

    found = sleb(additive, 5, 3)
    np.testing.assert_array_equal(found.order, rank(costs, 3))  # additive: greedy is sorting, ties the deeper first
    assert asked == [5, 4, 3]
    assert found.evaluations == 12
    np.testing.assert_allclose(found.values, np.exp([-0.1, -0.2, -0.4]), rtol=1e-6)
    np.testing.assert_array_equal(sleb(additive, 5, 1).order, rank(leave_one_out(additive, 5), 1))
    np.testing.assert_array_equal(sleb(additive, 5, 2, protect=(1, 4)).order, [3, 0])
    exploding = lambda masks: np.where(masks[:, 1], 0.5, np.nan)  # noqa: E731
    assert leave_one_out(exploding, 3)[1] == np.inf
    assert 1 not in sleb(exploding, 3, 2).order


def test_scores_of_parameters(tiny):
    stack = decoder_stack(tiny.config)
    layers = tiny.params["model"]["layers"]
    flat = np.concatenate([np.abs(np.asarray(leaf)).reshape(5, -1) for leaf in jax.tree.leaves(layers)], axis=1)
    np.testing.assert_allclose(magnitude(stack, tiny.params), flat.mean(1), rtol=1e-5)

    def loss(layers):
        params = {**tiny.params, "model": {**tiny.params["model"], "layers": layers}}
        losses = jax.nn.log_softmax(tiny.apply_fn(params, tiny.batch.tokens)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(losses, tiny.batch.tokens[:, 1:, None], axis=-1))

    products = jax.tree.map(
        lambda w, g: np.abs(np.asarray(w * g)).reshape(5, -1).sum(1), layers, jax.grad(loss)(layers)
    )
    expected = sum(jax.tree.leaves(products))
    np.testing.assert_allclose(taylor(stack, tiny.params, tiny.batch), expected, rtol=1e-3)
    assert taylor_protected(30) == (0, 1, 2, 3, 28, 29)
    states = hidden_states(stack, tiny.params, tiny.batch)
    _, kept = tiny.apply_fn(tiny.params, tiny.batch.tokens, hidden_states=(0, 1, 2, 3, 4))
    np.testing.assert_allclose(states[:5], kept, atol=1e-5)


def test_blind_orders():
    np.testing.assert_array_equal(deepest_blocks(5, 3), [3, 2, 1])
    np.testing.assert_array_equal(deepest_blocks(3, 2, protect=(1,)), [0, 2])
    drawn = random_blocks(jax.random.key(0), 9, 4, protect=(2,))
    assert len(set(drawn.tolist()) - {2}) == 4


def test_one_of_two_twins_stays():
    """Blocks 1 and 2 both write a feature that the loss needs; alone neither is missed, together they are."""
    features = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    stack = ResidualStack(
        embed=lambda params, batch: (jnp.zeros((1, 1, 2)), None),
        block=lambda block, hidden, context: jnp.maximum(hidden, block),
        loss=lambda params, hidden, batch: jnp.sum(jnp.array([0.3, 1.0]) * (1 - hidden[0, 0])),
        blocks=lambda params: params,
    )
    utility = make_utility(stack, features, None)
    alone = leave_one_out(utility, 3)
    assert set(rank(alone, 2)) == {1, 2}
    contribution = exact_contributions(np.log(utility(all_masks(3))), strata_deploy(3, 2))
    # By hand: block 0 costs 0.3; a twin 1 where the other is gone, with probability 1/2 at these sizes.
    np.testing.assert_allclose(contribution, [0.3, 0.5, 0.5], atol=1e-6)
    chosen = rank(contribution, 2)
    np.testing.assert_array_equal(chosen, [0, 2])
    losses = utility.losses(np.stack([without(3, rank(alone, 2)), without(3, chosen)]))
    np.testing.assert_allclose(losses, [1.0, 0.3], atol=1e-6)


@pytest.mark.parametrize("kind", ["mlp", "pairwise"])
def test_contributions_from_evaluations(game, kind):
    strata = strata_deploy(8, 4)
    masks = np.asarray(stratified_masks(jax.random.key(0), 8, strata, 120, dedupe=True))
    scores = game(masks).astype(np.float32)
    scores[3] = np.nan
    found = estimate_contributions(jax.random.key(1), masks, scores, strata, kind=kind, queries=4000)
    assert len(found.truth) == len(found.sizes) == len(found.fit.predicted) == 119
    assert found.fit.quality.r2 > 0.9
    if kind == "mlp":
        exact = np.asarray(exact_contributions(jnp.asarray(game.values, jnp.float32), strata))
        error = np.asarray(found.contribution.mean) - exact
        assert np.sqrt(np.mean(error**2)) < 0.02
        # The jackknife knows the size of the error, which the spread over queries does not.
        assert 0.3 < np.sqrt(np.mean(np.asarray(found.fit_error) ** 2)) / np.sqrt(np.mean(error**2)) < 5


def test_what_cannot_be_relied_on_is_said(game):
    rng = np.random.default_rng(0)
    masks = np.asarray(stratified_masks(jax.random.key(0), 8, (6, 5), 20))
    with pytest.warns(
        UnreliableWarning, match="R² of pairwise on held-out masks is .*, below 0.5: with 20 evaluated masks"
    ):
        estimate_contributions(jax.random.key(0), masks, rng.uniform(size=20), (6, 5), kind="pairwise", queries=10)
    with pytest.warns(UnreliableWarning, match="3 blocks are left, but contributions were estimated on 5 to 6"):
        check_depth(8, (6, 5), 5)
    check_depth(8, (6, 5), 4)
    with pytest.raises(ValueError, match="kind must be one of mlp, pairwise; got 'tree'"):
        estimate_contributions(jax.random.key(0), masks, rng.uniform(size=20), (6, 5), kind="tree")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rank([1.0, 2.0], 2), "between 0 and 1 of 2 blocks can be removed; got 2"),
        (lambda: rank([1.0, 2.0], -1), "got -1"),
        (lambda: rank([1.0, 2.0, 3.0], 2, protect=(0, 1)), "2 removed and 2 protected blocks are more than the 3"),
        (lambda: rank([1.0, 2.0], 1, protect=(2,)), "protected blocks must be between 0 and 1; got 2"),
        (lambda: rank([1.0, np.nan], 1), "none NaN"),
        (lambda: search(pairwise_ridge.apply, None, 3, 1, beam=0), "beam must be at least 1; got 0"),
        (lambda: sleb(len, 3, 3), "between 0 and 2 of 3"),
        (lambda: deepest_blocks(3, 3), "between 0 and 2 of 3"),
        (lambda: random_blocks(jax.random.key(0), 3, 2, protect=(0, 1)), "more than the 3"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_costly_blocks_stay_in_all_masks():
    alone = [*np.exp([-3.0, -0.1, -0.6, -0.4]), np.nan, 0.0]
    assert costly_blocks(alone) == (0, 2, 4, 5)
    assert costly_blocks(alone, above=1.0) == (0, 4, 5)
    assert costly_blocks(alone, most=2) == (4, 5)
    assert costly_blocks(alone, most=0) == ()
    assert costly_blocks(np.ones(3), above=np.inf) == ()


def test_protected_blocks_are_not_asked_about(game):
    """Without a mask that lacks it, nothing is known of a block, and nothing is asked about masks without it."""
    strata = strata_deploy(8, 4)
    masks = np.asarray(stratified_masks(jax.random.key(0), 8, strata, 100, dedupe=True, protect=(2,)))
    values = to_target(game(masks), "log")
    found = estimate_contributions(
        jax.random.key(1), masks, game(masks), strata, kind="pairwise", target="log", queries=2000, protect=(2,)
    )
    assert found.contribution.mean[2] == pytest.approx(0.0, abs=1e-4)
    np.testing.assert_allclose(np.sort(found.truth), np.sort(values), rtol=1e-6)
    # The others, in a game where block 2 is always there: single costs, and pairs as often as their partner is gone.
    queries = np.asarray(stratified_masks(jax.random.key(2), 8, strata, 4000, protect=(2,)))
    pair = game.pair + game.pair.T
    expected = game.single + pair @ (1 - queries.mean(0))
    others = [0, 1, 3, 4, 5, 6, 7]
    np.testing.assert_allclose(np.asarray(found.contribution.mean)[others], expected[others], atol=0.05)
