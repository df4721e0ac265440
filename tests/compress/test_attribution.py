"""Contributions: linear games exactly, enumeration against the definition and shapiq, the Monte-Carlo rate, errors."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.compress import (
    all_masks,
    contributions,
    exact_contributions,
    exact_shapley,
    permutation_shapley,
    shapley_from_permutations,
    strata_shapley,
    stratified_masks,
)


def lookup(values, masks):
    """The game itself as a surrogate."""
    return values[masks.astype(jnp.int32) @ (1 << jnp.arange(masks.shape[1]))]


def by_definition(values, players):
    found = np.zeros(players)
    for part in range(players):
        rest = [other for other in range(players) if other != part]
        for size in range(players):
            weight = math.factorial(size) * math.factorial(players - size - 1) / math.factorial(players)
            for chosen in itertools.combinations(rest, size):
                index = sum(1 << other for other in chosen)
                found[part] += weight * (values[index | 1 << part] - values[index])
    return found


def test_shapley_values_are_those_of_the_definition(game):
    with jax.enable_x64(True):
        found = np.asarray(exact_shapley(jnp.asarray(game.values)))
    np.testing.assert_allclose(found, by_definition(game.values, 8), atol=1e-12)
    assert found.sum() == pytest.approx(game.values[-1] - game.values[0], abs=1e-12)


def test_all_masks_of_each_stratum_give_the_expectation(game):
    """The estimator on the enumeration of one stratum after the other, in double precision."""
    with jax.enable_x64(True):
        values = jnp.asarray(game.values)
        strata = (7, 5, 4)
        parts = [contributions(lookup, values, game.masks[game.masks.sum(1) == size], chunk=16).mean for size in strata]
        np.testing.assert_allclose(np.mean(parts, axis=0), exact_contributions(values, strata), atol=1e-12)
        parts = [contributions(lookup, values, game.masks[game.masks.sum(1) == size]).mean for size in range(9)]
        np.testing.assert_allclose(np.mean(parts, axis=0), by_definition(game.values, 8), atol=1e-12)


@pytest.mark.parametrize("strata", [(6, 5), strata_shapley(7)])
def test_linear_games_are_exact_for_any_draw(strata):
    weights = jnp.array([0.5, -1.0, 0.0, 2.0, 0.25, 3.0, -0.5])
    linear = lambda weights, masks: masks.astype(jnp.float32) @ weights  # noqa: E731
    found = contributions(linear, weights, stratified_masks(jax.random.key(1), 7, strata, 37), chunk=10)
    np.testing.assert_allclose(found.mean, weights, atol=1e-6)
    np.testing.assert_allclose(found.stderr, 0.0, atol=1e-6)


def test_flips_are_two_calls(game):
    values = jnp.asarray(game.values, jnp.float32)
    masks = np.asarray(stratified_masks(jax.random.key(2), 8, (7, 5, 4), 101))
    gains = []
    for part in range(8):
        with_part, without_part = masks.copy(), masks.copy()
        with_part[:, part], without_part[:, part] = True, False
        gains.append(np.asarray(lookup(values, with_part) - lookup(values, without_part)))
    found = contributions(lookup, values, masks, chunk=16)
    np.testing.assert_allclose(found.mean, np.mean(gains, axis=1), atol=1e-6)
    within = [np.var(np.array(gains)[:, masks.sum(1) == size], axis=1, ddof=1) for size in (7, 5, 4)]
    number = [(masks.sum(1) == size).sum() for size in (7, 5, 4)]
    expected = np.sqrt(sum(n * v for n, v in zip(number, within, strict=True))) / len(masks)
    np.testing.assert_allclose(found.stderr, expected, rtol=1e-4)


def test_standard_errors_and_rate_of_monte_carlo(game):
    """Twenty keys at three sizes: the spread is the standard error, and falls as the square root."""
    values, strata = jnp.asarray(game.values, jnp.float32), strata_shapley(8)
    exact = np.asarray(exact_shapley(values))

    def run(key, total):
        return contributions(lookup, values, stratified_masks(key, 8, strata, total), chunk=256)

    sizes, errors = (90, 900, 9000), []
    for total in sizes:
        found = jax.jit(jax.vmap(lambda key, total=total: run(key, total)))(jax.random.split(jax.random.key(5), 20))
        deviation = np.asarray(found.mean) - exact
        errors.append(np.sqrt(np.mean(deviation**2)))
        # 20 keys of 8 parts, of which 7 are free: the pooled spread itself is known to 1 / √(2 · 20 · 7) = 6 %.
        pooled = np.sqrt(np.mean(np.asarray(found.stderr) ** 2))
        assert errors[-1] == pytest.approx(pooled, rel=0.2)
    slope = np.polyfit(np.log10(sizes), np.log10(errors), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.06)


def test_dummies_and_twins(game):
    """A part that does nothing contributes nothing; two that are alike contribute alike."""
    base = game.values[: 2**6]
    masks = all_masks(8)
    index = masks[:, :6] @ (1 << np.arange(6))
    with_dummy = base[index]
    found = np.asarray(exact_shapley(jnp.asarray(with_dummy, jnp.float32)))
    np.testing.assert_allclose(found[6:], 0.0, atol=1e-6)
    twins = base[index] + 0.3 * (masks[:, 6] | masks[:, 7])
    found = np.asarray(exact_contributions(jnp.asarray(twins, jnp.float32), (7, 6, 5)))
    np.testing.assert_allclose(found[6], found[7], atol=1e-6)
    assert 0 < found[6] < 0.15


def test_parity_with_shapiq(game):
    shapiq = pytest.importorskip("shapiq", reason="needs the peers extra: shapiq")

    def of_coalitions(coalitions):
        return game(np.atleast_2d(coalitions))

    with jax.enable_x64(True):
        ours = np.asarray(exact_shapley(jnp.asarray(game.values)))
    exact = shapiq.ExactComputer(of_coalitions, n_players=8)("SV").get_n_order_values(1)
    np.testing.assert_allclose(ours, exact, atol=1e-12)
    kernel = shapiq.KernelSHAP(n=8, random_state=0).approximate(2**8, of_coalitions).get_n_order_values(1)
    np.testing.assert_allclose(ours, kernel, atol=1e-6)


def test_permutations_converge_and_add_up(game):
    calls = []

    def utility(masks):
        calls.append(len(masks))
        return game(masks)

    found = permutation_shapley(jax.random.key(0), utility, 8, budget=2 + 7 * 400)
    assert sum(calls) == 2 + 7 * 400
    exact = by_definition(game.values, 8)
    assert np.asarray(found.mean).sum() == pytest.approx(game.values[-1] - game.values[0], abs=1e-5)
    assert (np.abs(np.asarray(found.mean) - exact) < 5 * np.asarray(found.stderr)).all()
    one = shapley_from_permutations([[1, 0], [0, 1]], [[0.0, 1.0, 4.0], [0.0, 2.0, 4.0]])
    np.testing.assert_allclose(one.mean, [2.5, 1.5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: exact_shapley(np.zeros(6)), r"2, 4, 8, ... numbers; got shape \(6,\)"),
        (lambda: exact_contributions(np.zeros(4), (3,)), r"between 0 and the 2 parts; got \(3,\)"),
        (lambda: exact_contributions(np.zeros(4), ()), "got"),
        (
            lambda: permutation_shapley(jax.random.key(0), lambda m: m.sum(1), 8, budget=15),
            "16 evaluations; got budget 15",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
