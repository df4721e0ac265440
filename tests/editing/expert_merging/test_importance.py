"""Importance and the pieces it buys."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing.expert_merging import Coefficients, allocate_chunks, layer_importance, tensor_layout

DRAWS = np.random.default_rng(0)
VECTORS = {
    "layers/up": jnp.asarray(DRAWS.normal(size=(2, 3, 4, 5)), jnp.float32),
    "embed": jnp.asarray(DRAWS.normal(size=(2, 6, 5)), jnp.float32),
}
LAYOUT = tensor_layout(VECTORS)
ALPHA = {"layers/up": jnp.array([[0.1, 0.5, 0.2], [0.3, 0.4, 0.6]]), "embed": jnp.array([[0.7], [0.2]])}


def test_importance_is_the_absolute_mass_that_is_added():
    found = layer_importance(Coefficients(ALPHA, LAYOUT), VECTORS)
    up = np.einsum("kl,klij->l", ALPHA["layers/up"], np.abs(VECTORS["layers/up"]))
    embed = np.einsum("kl,kij->l", ALPHA["embed"], np.abs(VECTORS["embed"]))
    total = up.sum() + embed.sum()
    np.testing.assert_allclose(found["layers/up"], up / total, rtol=1e-5)
    np.testing.assert_allclose(found["embed"], embed / total, rtol=1e-5)
    assert sum(float(one.sum()) for one in found.values()) == pytest.approx(1, abs=1e-6)


def test_importance_scales_with_a_tensor():
    plain = layer_importance(Coefficients(ALPHA, LAYOUT), VECTORS)
    tripled = layer_importance(Coefficients(ALPHA, LAYOUT), VECTORS | {"embed": -3 * VECTORS["embed"]})
    ratio = (tripled["embed"][0] / tripled["layers/up"]) / (plain["embed"][0] / plain["layers/up"])
    np.testing.assert_allclose(ratio, 3, rtol=1e-5)


def test_allocation_keeps_the_budget_and_follows_importance():
    importance = {"layers/up": np.array([0.1, 0.2, 0.3]), "embed": np.array([0.4])}
    found = allocate_chunks(importance, LAYOUT, budget=2.5)  # 10 pieces
    assert found["layers/up"].tolist() == [1, 2, 3]
    assert found["embed"].tolist() == [4]
    for kappa in (0.0, 0.7, 1.0, 2.0):
        for budget in (1.0, 1.2, 3.3):
            pieces = np.concatenate(list(allocate_chunks(importance, LAYOUT, budget=budget, kappa=kappa).values()))
            assert pieces.sum() <= np.floor(budget * 4 + 1e-6)
    uniform = allocate_chunks(importance, LAYOUT, budget=3.7, kappa=0.0)
    assert {int(m) for one in uniform.values() for m in one} == {3}
    squared = allocate_chunks(importance, LAYOUT, budget=2.5, kappa=2.0)
    assert squared["embed"][0] > found["embed"][0]
    assert squared["layers/up"].tolist() == [0, 1, 3]  # 10 · (1, 4, 9, 16) / 30
    assert allocate_chunks(importance, LAYOUT, budget=2.5, kappa=2.0, min_chunks=1)["layers/up"].tolist() == [1, 1, 3]
    # No tensor has more pieces than elements.
    assert allocate_chunks(importance, LAYOUT, budget=1000.0)["layers/up"].tolist() == [20, 20, 20]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.0}, "budget must be positive, got 0.0"),
        ({"kappa": -1.0}, "kappa and min_chunks must not be negative, got -1.0 and 0"),
        ({"min_chunks": -1}, "must not be negative, got 1.0 and -1"),
        ({"budget": 0.5}, "gives none of 4 tensors a piece of its own, so that all are frozen: raise it"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    importance = {"layers/up": np.full(3, 0.25), "embed": np.array([0.25])}
    with pytest.raises(ValueError, match=message):
        allocate_chunks(importance, LAYOUT, **options)


def test_importance_that_does_not_fit():
    with pytest.raises(ValueError, match="must have the paths of the layout"):
        allocate_chunks({"embed": np.ones(1)}, LAYOUT)
    with pytest.raises(ValueError, match="finite and not negative, and not all 0"):
        allocate_chunks({"layers/up": np.zeros(3), "embed": np.zeros(1)}, LAYOUT)
