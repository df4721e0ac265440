"""Strata: sizes, frequencies, determinism, no mask twice, protected parts, bad input."""

import math

import jax
import numpy as np
import pytest
from scipy.stats import chi2

from jaxlab.compress import (
    all_masks,
    check_masks,
    flip,
    strata_counts,
    strata_deploy,
    strata_shapley,
    stratified_masks,
    without,
)


def test_sizes_of_the_paper():
    assert strata_deploy(32, 14, step=3) == (30, 27, 24, 21, 18)
    assert strata_deploy(5, 2) == (4, 3)
    assert strata_shapley(3) == (3, 2, 1, 0)
    assert strata_counts((9, 8, 7), 11) == (4, 4, 3)


def test_every_mask_has_its_size_and_every_part_its_frequency():
    strata, total, players = (12, 9, 4), 6000, 13
    masks = np.asarray(stratified_masks(jax.random.key(3), players, strata, total))
    sizes, counts = np.unique(masks.sum(1), return_counts=True)
    assert dict(zip(sizes.tolist(), counts.tolist(), strict=True)) == {4: 2000, 9: 2000, 12: 2000}
    for size in strata:
        kept = masks[masks.sum(1) == size].sum(0)
        share = size / players
        # Parts of one mask are negatively correlated: χ² of 12 degrees of freedom after the factor (L - 1) / L.
        statistic = ((kept - 2000 * share) ** 2).sum() / (2000 * share * (1 - share)) * (players - 1) / players
        assert chi2.cdf(statistic, players - 1) < 0.9999


def test_draws_are_a_function_of_the_key_and_traceable():
    draw = jax.jit(lambda key: stratified_masks(key, 7, (5, 3), 9))
    first = draw(jax.random.key(0))
    np.testing.assert_array_equal(first, stratified_masks(jax.random.key(0), 7, (5, 3), 9))
    assert (np.asarray(first) != np.asarray(draw(jax.random.key(1)))).any()
    batched = jax.vmap(draw)(jax.random.split(jax.random.key(0), 3))
    assert batched.shape == (3, 9, 7)


@pytest.mark.parametrize(("strata", "total"), [((7, 6, 4), 40), ((8, 7), 200), ((5,), 30)])
def test_no_mask_twice(strata, total):
    masks = np.asarray(stratified_masks(jax.random.key(1), 8, strata, total, dedupe=True))
    there_are = {size: math.comb(8, size) for size in strata}
    assert len(np.unique(masks, axis=0)) == len(masks) == min(total, sum(there_are.values()))
    # (7, 6, 4): 8 masks of size 7 are all there; the other two share what is left.
    for size in strata:
        assert (masks.sum(1) == size).sum() >= min(there_are[size], total // len(strata))


@pytest.mark.parametrize("dedupe", [False, True])
def test_protected_parts_stay(dedupe):
    masks = np.asarray(stratified_masks(jax.random.key(1), 9, (7, 4), 50, dedupe=dedupe, protect=(0, 8)))
    assert masks[:, [0, 8]].all()
    assert set(masks.sum(1)) == {7, 4}
    assert not masks[:, 1:8].all(0).any()


def test_flips_and_enumeration():
    masks = all_masks(3)
    np.testing.assert_array_equal(masks @ [1, 2, 4], np.arange(8))
    flipped = np.asarray(flip(masks))
    for part in range(3):
        np.testing.assert_array_equal(flipped[:, part] @ [1, 2, 4], np.arange(8) ^ (1 << part))
    np.testing.assert_array_equal(without(4, [2, 0]), [False, True, False, True])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stratified_masks(jax.random.key(0), 4, (5,), 3), "between 0 and the 4 parts; got 5"),
        (lambda: stratified_masks(jax.random.key(0), 4, (-1,), 3), "got -1"),
        (lambda: stratified_masks(jax.random.key(0), 4, (), 3), "at least one stratum"),
        (lambda: stratified_masks(jax.random.key(0), 4, (3, 3), 3), r"strata must differ; got \(3, 3\)"),
        (lambda: stratified_masks(jax.random.key(0), 4, (3, 2, 1), 2), "3 strata need at least as many masks; got 2"),
        (lambda: stratified_masks(jax.random.key(0), 4, (1,), 2, protect=(0, 1)), "2 protected parts do not fit"),
        (lambda: stratified_masks(jax.random.key(0), 4, (3,), 2, protect=(4,)), "between 0 and 3; got 4"),
        (lambda: strata_deploy(4, 5), "max_remove must be between 1 and the 4 parts; got 5"),
        (lambda: strata_deploy(4, 2, step=0), "step must be at least 1; got 0"),
        (lambda: all_masks(30), "1 to 24 parts; got 30"),
        (lambda: check_masks(np.array([[0, 2]])), "0 and 1 only; got 2"),
        (lambda: check_masks(np.array([0, 1])), r"\[masks, parts\]; got shape \(2,\)"),
        (lambda: check_masks(np.array([[0.0, np.nan]])), "0 and 1 only; got nan"),
        (lambda: check_masks(np.ones((2, 3)), 4), "each of the 4 parts; got 3"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
