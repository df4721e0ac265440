"""Imitation and entropy: zero at the truth, divergence against cross-entropy, top-k, masks, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing.expert_merging import Alignment, Entropy, Rows

DRAWS = np.random.default_rng(0)
PARAMS = {"up": jnp.asarray(DRAWS.normal(size=(3, 4)), jnp.float32), "head": jnp.asarray(DRAWS.normal(size=(4, 7)))}
OTHER = {name: leaf + 0.3 * jnp.asarray(DRAWS.normal(size=leaf.shape), jnp.float32) for name, leaf in PARAMS.items()}
INPUTS = jnp.asarray(DRAWS.normal(size=(5, 6, 3)), jnp.float32)
ONES = jnp.ones((5, 6))


def forward(params, batch):
    hidden = jnp.tanh(batch @ params["up"])
    return hidden @ params["head"], (batch, hidden)


def _parts(objective, params, mask=ONES):
    return objective(params, Rows(INPUTS, mask, objective.target(OTHER, INPUTS)))


@pytest.mark.parametrize("options", [{}, {"temperature": 3.0}, {"top_k": 2}, {"hidden_layers": (1,)}])
def test_nothing_is_lost_at_the_teacher(options):
    parts = _parts(Alignment(forward, **options), OTHER)
    assert parts.keys() == {"hidden", "logits"}
    for part in parts.values():
        np.testing.assert_allclose(part, np.zeros(5), atol=1e-6)
    assert all((part > 1e-3).all() for part in _parts(Alignment(forward, **options), PARAMS).values())


def test_parts_are_what_the_equations_say():
    parts = _parts(Alignment(forward, hidden_layers=(-1,), temperature=2.0), PARAMS)
    ours, theirs = (jax.tree.map(np.asarray, forward(params, INPUTS)) for params in (PARAMS, OTHER))
    np.testing.assert_allclose(parts["hidden"], np.square(ours[1][1] - theirs[1][1]).mean((1, 2)), rtol=1e-5)

    def soft(logits):
        weights = np.exp(logits.astype(np.float64) / 2)
        return weights / weights.sum(-1, keepdims=True)

    p, q = soft(theirs[0]), soft(ours[0])
    np.testing.assert_allclose(parts["logits"], 4 * (p * np.log(p / q)).sum(-1).mean(1), rtol=1e-4)


def test_the_divergence_has_the_gradient_of_the_soft_cross_entropy():
    objective = Alignment(forward, temperature=1.5)

    def cross_entropy(params):
        ours, theirs = forward(params, INPUTS)[0] / 1.5, forward(OTHER, INPUTS)[0] / 1.5
        return 1.5**2 * -(jax.nn.softmax(theirs) * jax.nn.log_softmax(ours)).sum(-1).mean()

    found = jax.grad(lambda params: _parts(objective, params)["logits"].mean())(PARAMS)
    wanted = jax.grad(cross_entropy)(PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)


def test_top_logits_bound_the_divergence_from_below_and_all_but_one_of_them_give_it():
    whole = _parts(Alignment(forward), PARAMS)["logits"]
    bounds = [_parts(Alignment(forward, top_k=k), PARAMS)["logits"] for k in (1, 3, 6)]
    for smaller, larger in zip(bounds, [*bounds[1:], whole], strict=True):
        assert (smaller <= larger + 1e-6).all()
    np.testing.assert_allclose(bounds[-1], whole, atol=1e-6)
    gradient = jax.grad(lambda p: _parts(Alignment(forward, top_k=3), p)["logits"].sum())(PARAMS)
    assert all(np.isfinite(leaf).all() and jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    with pytest.raises(ValueError, match="top_k must be below the 7 outcomes, got 7"):
        Alignment(forward, top_k=7).target(PARAMS, INPUTS)


def test_masked_positions_do_not_count():
    mask = ONES.at[:, 4:].set(0.0).at[0].set(0.0)
    for objective in (Alignment(forward), Entropy(forward)):
        short = objective(PARAMS, Rows(INPUTS[1:, :4], ONES[1:, :4], objective.target(OTHER, INPUTS[1:, :4])))
        masked = _parts(objective, PARAMS, mask)
        for name, part in masked.items():
            np.testing.assert_allclose(part[1:], short[name], rtol=1e-5)
            assert part[0] == 0
    # NaN at padding reaches neither loss nor gradient where the mask is 0.
    rows = Rows(INPUTS, mask, Alignment(forward).target(OTHER, INPUTS))
    rows = rows._replace(target=jax.tree.map(lambda leaf: leaf.at[:, 4:].set(1e30), rows.target))
    assert np.isfinite(Alignment(forward)(PARAMS, rows)["logits"]).all()


def test_teachers_may_be_kept_in_bfloat16():
    kept = Alignment(forward, teacher_dtype="bfloat16").target(OTHER, INPUTS)
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {jnp.dtype(jnp.bfloat16)}
    exact, near = (_parts(Alignment(forward, teacher_dtype=d), PARAMS) for d in ("float32", "bfloat16"))
    # rounding moves a logit of a few units by 2^-8 of it, and a divergence by as much of its square root
    np.testing.assert_allclose(near["logits"], exact["logits"], rtol=0.1)
    assert (_parts(Alignment(forward, teacher_dtype="bfloat16"), OTHER)["logits"] >= 0).all()


def test_entropy_of_sure_and_of_uniform_predictions():
    objective = Entropy(lambda params, batch: (params * batch, ()))
    logits = jnp.array([[1.0, 0.0, 0.0]])
    rows = Rows(logits, jnp.ones(1), ())
    assert float(objective(0.0, rows)["entropy"][0]) == pytest.approx(np.log(3), rel=1e-6)
    assert float(objective(200.0, rows)["entropy"][0]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"hidden_weight": -1.0}, r"not be negative, nor both 0; got \(-1.0, 1.0\)"),
        ({"hidden_weight": 0.0, "logit_weight": 0.0}, r"got \(0.0, 0.0\)"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        Alignment(forward, **options)


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"hidden_layers must be among the 2 that forward gives, got \(2,\)"):
        Alignment(forward, hidden_layers=(2,)).target(PARAMS, INPUTS)
    objective = Alignment(forward)
    target = objective.target(PARAMS | {"head": PARAMS["head"][:, :6]}, INPUTS)
    with pytest.raises(ValueError, match=r"share a vocabulary, got logits \(5, 6, 6\), \(5, 6, 7\)"):
        objective(PARAMS, Rows(INPUTS, ONES, target))
    with pytest.raises(ValueError, match=r"must have the positions of the outputs, \(5, 6\); got \(5,\)"):
        _parts(objective, PARAMS, jnp.ones(5))
