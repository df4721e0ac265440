"""Bounds in closed form, on random networks and on scores of known density; slopes; bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing import task_vectors
from jaxlab.editing.fairness import (
    demographic_parity_bound,
    demographic_parity_difference,
    density_bound,
    empirical_lipschitz,
    equalized_odds_bound,
    equalized_odds_difference,
    fairness_bounds,
    group_statistics,
    membership_from_ids,
    merge_distance,
    published_bound,
)


def network(params, inputs):
    return jax.nn.sigmoid(jnp.tanh(inputs @ params["in"]) @ params["out"])


def random_problem(seed: int):
    keys = jax.random.split(jax.random.key(seed), 7)
    base = {"in": jax.random.normal(keys[0], (4, 6)), "out": jax.random.normal(keys[1], (6,))}
    vectors = {"in": jax.random.normal(keys[2], (3, 4, 6)), "out": jax.random.normal(keys[3], (3, 6))}
    inputs = jax.random.normal(keys[4], (180, 4)) + (jnp.arange(180) % 3)[:, None] / 3
    labels = jax.random.bernoulli(keys[5], 0.4, (180,)).astype(jnp.int32)
    return base, vectors, inputs, labels, membership_from_ids(jnp.arange(180) % 3, 3)


@pytest.mark.parametrize("theta", [0.1, 2.0])
def test_closed_form(theta):
    """Scores σ(θx), x = 1 in one group and -1 in the other: the difference is tanh(θ/2), L = 1/4, the bound θ/2."""
    inputs = jnp.array([[1.0], [-1.0]] * 40)
    membership = membership_from_ids(jnp.arange(80) % 2, 2)
    score_fn = lambda params, x: jax.nn.sigmoid(x @ params)  # noqa: E731
    found = fairness_bounds(
        score_fn, jnp.zeros(1), jnp.array([theta]), inputs, np.arange(80) // 2 % 2, membership, lipschitz=0.25
    )
    assert float(found.parity) == pytest.approx(np.tanh(theta / 2), abs=1e-6)
    assert float(found.parity_bound) == pytest.approx(theta / 2, abs=1e-6)
    assert found.certified
    assert float(found.parity) <= float(found.parity_bound)
    # σ' is largest at 0, an end of the segment, so that the estimate is L itself.
    for directional in (True, False):
        slope = empirical_lipschitz(score_fn, jnp.zeros(1), jnp.array([theta]), inputs, directional=directional)
        assert float(slope.value) == pytest.approx(0.25, abs=1e-6)
        assert slope.certified is False


@pytest.mark.parametrize("seed", range(4))
def test_bounds_hold_for_random_networks(seed):
    """Soft parity and hard odds at ten scales from the balanced model, slopes from 33 points of each segment."""
    base, vectors, inputs, labels, membership = random_problem(seed)
    reference = task_vectors.apply(base, vectors, 1 / 3)

    @jax.jit
    @jax.vmap
    def at(scale):
        params = task_vectors.apply(base, vectors, scale)
        found = fairness_bounds(network, reference, params, inputs, labels, membership, points=33)
        wide = empirical_lipschitz(network, reference, params, inputs, points=33, directional=False).value
        return found._replace(certified=jnp.array(found.certified)), wide

    found, wide = at(jnp.linspace(0.0, 1.0, 10))
    # The steepest point may lie between two of the 33; at distance 0 both are one number by two programs.
    assert (found.parity <= found.parity_bound + 1e-3 * found.distance + 1e-6).all()
    assert (found.odds <= found.odds_bound + 1e-6).all()
    assert (wide >= found.lipschitz - 1e-5).all()
    assert not found.certified.any()
    assert float(found.parity.max() - found.parity.min()) > 0.01
    nearest = int(jnp.argmin(found.distance))
    assert float(found.odds_bound[nearest]) < 1 + float(found.odds[nearest])  # not vacuous near the reference


def test_a_slope_that_is_too_small_is_violated():
    """The check above bites: a tenth of the slope is no bound."""
    inputs = jnp.array([[1.0], [-1.0]] * 40)
    membership = membership_from_ids(jnp.arange(80) % 2, 2)
    found = fairness_bounds(
        lambda params, x: jax.nn.sigmoid(x @ params),
        jnp.zeros(1),
        jnp.ones(1),
        inputs,
        np.arange(80) // 2 % 2,
        membership,
        lipschitz=lambda reference, params: 0.025,
    )
    assert found.certified
    assert float(found.parity) > 5 * float(found.parity_bound)


def test_odds_of_uniform_scores():
    """Uniform scores have density 1. All those of one group move by d towards 1, the others by d towards 0."""
    n = 2000
    scores = (jnp.arange(n) + 0.5) / n
    scores = jnp.concatenate([scores] * 4)
    membership = membership_from_ids(jnp.repeat(jnp.array([0, 0, 1, 1]), n), 2)
    labels = np.repeat([0, 1, 0, 1], n)
    assert float(density_bound(scores[:n], bandwidth=0.1)) == pytest.approx(1, abs=0.01)
    for d in (0.02, 0.2):
        moved = jnp.where(membership[:, 0] > 0, scores + d, scores - d)
        odds = float(equalized_odds_difference(group_statistics(moved > 0.5, labels, membership)))
        bound = equalized_odds_bound(0.0, 1.0, d, density_negative=1.0, density_positive=1.0)
        assert odds == pytest.approx(2 * d, abs=2e-3)
        assert float(bound.linear) == pytest.approx(4 * d)
        assert float(bound.square_root) == pytest.approx(4 * np.sqrt(2 * d), rel=1e-5)
        assert odds <= float(bound.value) == float(min(bound.linear, bound.square_root))


def test_densities_hold_at_every_margin():
    scores = jax.random.beta(jax.random.key(0), 2.0, 5.0, (500,))
    weights = (jnp.arange(500) % 3 > 0).astype(jnp.float32)
    bound = float(density_bound(scores, 0.4, bandwidth=0.01, weights=weights))
    away = np.abs(np.asarray(scores) - 0.4)[np.asarray(weights) > 0]
    margins = np.maximum(away, 0.01)  # between two of these the share stays and the margin grows
    shares = (away[:, None] <= margins).mean(0)
    assert (shares <= 2 * bound * margins + 1e-5).all()
    assert (shares / (2 * margins)).max() == pytest.approx(bound, rel=1e-4)
    assert float(density_bound(scores, bandwidth=0.01, weights=jnp.zeros(500))) == 0


def test_published_bound():
    lengths = jnp.array([2.0, 1.0, 4.0])
    parity, odds = published_bound(
        0.5, jnp.array([[1.0, 1, 1], [1.5, 0.5, 1]]), lengths, density_negative=1.0, density_positive=3.0
    )
    np.testing.assert_allclose(parity, [0, 0.5 * 2 * (0.5 * 2 + 0.5 * 1)])
    np.testing.assert_allclose(odds, 4 * np.sqrt(4 * np.asarray(parity)), rtol=1e-6)
    assert published_bound(0.5, jnp.ones(3), lengths)[1] is None


def test_published_bound_is_looser_than_the_general_one():
    """By the triangle inequality, and by a factor of G for the mean of the vectors that its statement is about."""
    _, vectors, *_ = random_problem(0)
    scales = jnp.array([[1.4, 0.9, 0.7], [0.2, 1.8, 1.0], [1.0, 1.0, 1.0]])
    distance = merge_distance(vectors, scales, 1.0, reduce="mean")
    general = demographic_parity_bound(0.0, 0.25, distance)
    published, _ = published_bound(0.25, scales, task_vectors.norms(vectors))
    assert (general[:2] * 3 <= published[:2]).all()
    np.testing.assert_allclose([general[2], published[2]], 0, atol=1e-6)


def test_distance_is_that_of_the_models():
    base, vectors, *_ = random_problem(1)
    flat = jax.flatten_util.ravel_pytree
    for scale, reference in ((0.8, 1 / 3), (jnp.array([0.1, -0.4, 0.9]), jnp.array([0.3, 0.2, 0.1]))):
        for reduce in ("sum", "mean"):
            ends = [flat(task_vectors.apply(base, vectors, s, reduce=reduce))[0] for s in (scale, reference)]
            exact = float(jnp.linalg.norm(ends[0] - ends[1]))
            assert float(merge_distance(vectors, scale, reference, reduce=reduce)) == pytest.approx(exact, rel=1e-4)
    one_scale = float(merge_distance(vectors, 0.8, 1 / 3))
    total = {path: leaf.sum(0, keepdims=True) for path, leaf in vectors.items()}
    assert one_scale == pytest.approx((0.8 - 1 / 3) * float(task_vectors.norms(total)[0]), rel=1e-4)


def test_soft_parity_moves_by_no_more_than_the_scores():
    base, vectors, inputs, labels, membership = random_problem(2)
    scores = [network(task_vectors.apply(base, vectors, s), inputs) for s in (0.2, 0.9)]
    soft = [float(demographic_parity_difference(group_statistics(s, labels, membership))) for s in scores]
    assert abs(soft[1] - soft[0]) <= 2 * float(jnp.abs(scores[1] - scores[0]).max())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: demographic_parity_bound(0.1, -1.0, 2.0), "lipschitz must be at least 0, got -1"),
        (lambda: demographic_parity_bound(0.1, 1.0, np.nan), "distance must be at least 0, got nan"),
        (
            lambda: equalized_odds_bound(0.1, 1.0, 2.0, density_negative=-1.0, density_positive=1.0),
            "density_negative must be at least 0",
        ),
        (lambda: published_bound(1.0, jnp.ones(2), jnp.ones(3)), r"there are 3 vectors, got scales \[2\]"),
        (lambda: published_bound(1.0, jnp.ones(3), jnp.ones(3), density_negative=1.0), "must be given together"),
        (lambda: density_bound(jnp.ones(3), bandwidth=0.0), "bandwidth must be positive, got 0"),
        (lambda: merge_distance({"w": jnp.ones((2, 3))}, 1.0, 0.5, reduce="max"), "'sum' or 'mean', got 'max'"),
        (
            lambda: empirical_lipschitz(network, {}, {}, jnp.ones((2, 4)), points=1),
            "points must be at least 2, got 1",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
