"""Training of coefficients: closed form, limits in γ, batches, grids, one compilation, and numbers that are not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.editing.expert_merging import Alignment, Recipe, Rows, learn_coefficients, release, tensor_layout, training
from jaxlab.editing.expert_merging.training import adamw, round_robin, warm_restarts

DRAWS = np.random.default_rng(0)
BASE = {"w": jnp.asarray(DRAWS.normal(size=(4, 3)), jnp.float32)}
VECTORS = {"w": jnp.asarray(DRAWS.normal(size=(2, 4, 3)), jnp.float32)}
INPUTS = jnp.asarray(DRAWS.normal(size=(6, 4)), jnp.float32)
TASKS = np.array([0, 0, 0, 0, 1, 1])
WEIGHTS = (1 / np.bincount(TASKS))[TASKS]
LAYOUT = tensor_layout(VECTORS)
ANCHOR = np.array([0.3, 0.4], np.float32)


def linear(params, batch):
    out = batch @ params["w"]
    return out, (out,)


OBJECTIVE = Alignment(linear)


def _rows(objective=OBJECTIVE):
    teachers = [objective.target({"w": BASE["w"] + vector}, INPUTS) for vector in VECTORS["w"]]
    target = jax.tree.map(lambda a, b: jnp.where((TASKS == 0)[:, None], a, b), *teachers)
    return Rows(INPUTS, jnp.ones(6), target)


def _learn(**options):
    settings = {"layout": LAYOUT, "anchor": ANCHOR, "gamma": 0.0, "steps": 60} | options
    return learn_coefficients(OBJECTIVE, BASE, VECTORS, _rows(), WEIGHTS, **settings)


ONLY_HIDDEN = {"hidden": 1.0, "logits": 0.0}


def test_the_optimum_of_a_linear_map_is_that_of_the_normal_equations():
    found = _learn(
        squash="none", part_weights=ONLY_HIDDEN, steps=500, optimizer=optax.adam(optax.cosine_decay_schedule(0.1, 500))
    )
    # Σ_i u_i ‖x_i Σ_k α_k τ_k - x_i τ_{k(i)}‖² is least where A α = b.
    outputs = np.einsum("ni,kio->kno", np.asarray(INPUTS, np.float64), np.asarray(VECTORS["w"], np.float64))
    products = np.einsum("n,kno,lno->nkl", WEIGHTS, outputs, outputs)
    wanted = np.linalg.solve(products.sum(0), products[np.arange(6), :, TASKS].sum(0))
    np.testing.assert_allclose(found.alpha["w"][:, 0], wanted, atol=1e-5)
    assert found.finite
    assert found.loss.shape == found.parts["hidden"].shape == (501,)
    np.testing.assert_allclose(found.loss, found.parts["hidden"], rtol=1e-6)


def test_one_expert_pulls_its_coefficient_to_one():
    vectors = {"w": VECTORS["w"][:1]}
    rows = Rows(INPUTS, jnp.ones(6), OBJECTIVE.target({"w": BASE["w"] + vectors["w"][0]}, INPUTS))
    found = learn_coefficients(
        *(OBJECTIVE, BASE, vectors, rows, np.full(6, 1 / 6)),
        layout=tensor_layout(vectors),
        anchor=ANCHOR[:1],
        gamma=0.0,
        squash="softplus",
        steps=200,
    )
    assert float(found.alpha["w"][0, 0]) == pytest.approx(1, abs=1e-3)
    assert float(found.loss[-1]) < 1e-5 < float(found.loss[0])


def test_a_strong_regulariser_keeps_the_anchor_and_a_grid_is_one_vmap():
    gammas = jnp.array([0.0, 0.3, 1e4])
    grid = jax.vmap(lambda gamma: _learn(gamma=gamma))(gammas)
    alone = _learn(gamma=0.3)
    np.testing.assert_allclose(grid.alpha["w"][1], alone.alpha["w"], rtol=1e-4)
    moved = np.abs(grid.alpha["w"][..., 0] - ANCHOR).mean(1)
    assert moved[0] > moved[1] > moved[2]
    # What is left is the last step of the optimiser: learning rate 0.01 times the slope of a sigmoid, at most 1/4.
    assert moved[2] < 0.01 / 4
    np.testing.assert_allclose(grid.regularizer[:, -1], moved, atol=1e-6)
    assert float(grid.regularizer[0, 0]) < 1e-7


def test_inputs_some_at_a_time_give_the_same():
    whole, some = _learn(steps=20), _learn(steps=20, inputs_at_once=4)
    np.testing.assert_allclose(some.alpha["w"], whole.alpha["w"], rtol=1e-4)
    np.testing.assert_allclose(some.loss, whole.loss, rtol=1e-4)


def test_compiled_once_for_other_numbers():
    _learn(steps=7)
    before = training._learn._cache_size()
    for gamma in (0.1, 0.2):
        learn_coefficients(
            Alignment(linear, hidden_weight=gamma),  # equal but for its weights, which are arguments
            {"w": BASE["w"] + gamma},
            VECTORS,
            _rows(),
            WEIGHTS * gamma,
            layout=tensor_layout(VECTORS),
            anchor=ANCHOR * gamma,
            steps=7,
            gamma=gamma,
        )
    assert training._learn._cache_size() == before


def test_batches_take_experts_in_turn():
    schedule = round_robin(jax.random.key(0), TASKS, steps=5, batch_size=4)
    np.testing.assert_array_equal(TASKS[schedule], np.broadcast_to([0, 1, 0, 1], (5, 4)))
    assert set(schedule[:4].ravel()) == set(range(6))  # eight turns of an expert with four inputs
    weights = np.full((5, 4), 2 / 4)
    found = learn_coefficients(
        *(OBJECTIVE, BASE, VECTORS, _rows(), weights),
        layout=LAYOUT,
        anchor=ANCHOR,
        schedule=schedule,
        steps=5,
        gamma=0.0,
    )
    rows = _rows()
    first = OBJECTIVE({"w": BASE["w"] + jnp.einsum("k,kio->io", ANCHOR, VECTORS["w"])}, rows)
    assert float(found.loss[0]) == pytest.approx(
        float((weights[0] * (first["hidden"] + first["logits"])[schedule[0]]).sum()), rel=1e-5
    )


def test_the_authors_schedule_restarts_after_50_and_150_steps():
    recipe = release(40)
    assert (recipe.steps, recipe.batch_size, recipe.regularizer) == (5, 8, "release")
    transformation = warm_restarts(200, learning_rate=0.5)
    params = {"a": jnp.zeros(1)}

    def step(state, _):
        updates, state = transformation.update({"a": jnp.ones(1)}, state, params)
        return state, -updates["a"][0]

    _, sizes = jax.lax.scan(step, transformation.init(params), length=200)
    # With a constant gradient Adam's step is the learning rate.
    np.testing.assert_allclose(sizes[jnp.array([0, 50, 150])], 0.5, rtol=1e-3)
    assert float(sizes[49]) < 0.052
    assert float(sizes[100]) == pytest.approx(0.5 * (0.1 + 0.9 / 2), rel=0.01)


def test_not_a_number_ends_training_with_what_was_before():
    def exploding(params, batch):
        out = batch @ params["w"]
        return out, (jnp.where(jnp.abs(params["w"][0, 0]) > limit, jnp.nan, 1.0) * out,)

    start, end = BASE["w"][0, 0] + jnp.einsum("k,k", ANCHOR, VECTORS["w"][:, 0, 0]), None
    plain = _learn(part_weights=ONLY_HIDDEN)
    end = BASE["w"][0, 0] + jnp.einsum("k,k", plain.alpha["w"][:, 0], VECTORS["w"][:, 0, 0])
    limit = float(jnp.abs(start) + 0.5 * (jnp.abs(end) - jnp.abs(start)))
    if abs(float(end)) < abs(float(start)):
        pytest.fail("the draw must grow the entry")
    found = learn_coefficients(
        *(Alignment(exploding), BASE, VECTORS, _rows(), WEIGHTS),
        layout=LAYOUT,
        anchor=ANCHOR,
        gamma=0.0,
        part_weights=ONLY_HIDDEN,
    )
    assert not found.finite
    stopped = int(np.isnan(found.loss).argmax())
    assert 0 < stopped < 60
    assert np.isnan(found.loss[stopped:]).all()
    np.testing.assert_allclose(found.loss[:stopped], plain.loss[:stopped], rtol=1e-5)
    assert np.isfinite(found.alpha["w"]).all()
    before = _learn(part_weights=ONLY_HIDDEN, steps=stopped - 1, optimizer=adamw(60))
    np.testing.assert_allclose(found.alpha["w"], before.alpha["w"], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"steps": None}, "a recipe without steps needs a batch_size"),
        ({"gamma": -0.1}, "gamma must not be negative, got -0.1"),
        ({"regularizer": "none"}, "regularizer must be 'paper' or 'release', got 'none'"),
    ],
)
def test_recipes_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**options)
