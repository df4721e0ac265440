"""Identities of one step and of linear models, groups trained together as alone, LoRA, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.editing.fairness import membership_from_ids, subgroup_finetune
from jaxlab.editing.task_vectors import task_vectors
from jaxlab.nn import lora
from jaxlab.nn.linear import LowRankSum

N = 60


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return optax.sigmoid_binary_cross_entropy(hidden @ params["out"], batch["y"])


@pytest.fixture(scope="module")
def problem():
    keys = jax.random.split(jax.random.key(0), 4)
    base = {"in": jax.random.normal(keys[0], (3, 4)), "out": jax.random.normal(keys[1], (4,)), "step": jnp.array(7)}
    x = jax.random.normal(keys[2], (N, 3))
    y = (x[:, 0] + jax.random.normal(keys[3], (N,)) > 0).astype(jnp.float32)
    ids = np.repeat([0, 1, 2], [30, 20, 10])
    return base, {"x": x, "y": y}, ids


def test_one_step_identity(problem):
    """A step of gradient descent is linear in the rows, so the groups' vectors average to that of all rows."""
    base, data, ids = problem
    options = {"optimizer": optax.sgd(0.3), "key": jax.random.key(0), "steps": 1, "batch_size": None}
    groups = subgroup_finetune(loss_fn, base, data, membership_from_ids(ids, 3), **options)
    everyone = subgroup_finetune(loss_fn, base, data, jnp.ones((N, 1)), **options)
    vectors = task_vectors(base, groups.models())
    pooled = task_vectors(base, everyone.models())
    shares = jnp.array([0.5, 1 / 3, 1 / 6])
    for path, vector in vectors.items():
        assert float(jnp.abs(vector).max()) > 1e-2
        np.testing.assert_allclose(jnp.tensordot(shares, vector, 1), pooled[path][0], atol=1e-6)


@pytest.mark.parametrize("steps", [1, 40])
def test_linear_model_identity(steps):
    """Least squares on the same inputs in every group: descent is affine in the targets at any number of steps."""
    x = jax.random.normal(jax.random.key(0), (20, 3))
    targets = jax.random.normal(jax.random.key(1), (3, 20))
    data = {"x": jnp.tile(x, (3, 1)), "y": targets.ravel()}
    base = {"w": jnp.ones(3)}
    options = {"optimizer": optax.sgd(0.1), "key": jax.random.key(0), "steps": steps, "batch_size": None}

    def squared(params, batch):
        return (batch["x"] @ params["w"] - batch["y"]) ** 2

    groups = subgroup_finetune(squared, base, data, membership_from_ids(np.repeat([0, 1, 2], 20), 3), **options)
    everyone = subgroup_finetune(squared, base, data, jnp.ones((60, 1)), **options)
    assert float(jnp.ptp(groups.params["w"], axis=0).max()) > 0.05
    np.testing.assert_allclose(groups.params["w"].mean(0), everyone.params["w"][0], atol=1e-5)


def test_groups_train_as_if_alone(problem):
    """Each against a plain loop of optax over the rows of its group."""
    base, data, ids = problem
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    found = subgroup_finetune(
        loss_fn, base, data, membership_from_ids(ids, 3), optimizer, jax.random.key(0), steps=5, batch_size=None
    )
    for group in range(3):
        rows = {name: leaf[ids == group] for name, leaf in data.items()}
        params = {"in": base["in"], "out": base["out"]}
        state = optimizer.init(params)
        for step in range(5):
            loss, gradients = jax.value_and_grad(lambda p, rows=rows: loss_fn(p, rows).mean())(params)
            assert float(found.losses[group, step]) == pytest.approx(float(loss), rel=1e-5)
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        for name, leaf in params.items():
            np.testing.assert_allclose(found.params[name][group], leaf, atol=1e-5)
    np.testing.assert_array_equal(found.params["step"], [7, 7, 7])


def test_batches_hold_rows_of_their_group_alone(problem):
    """Rows of the other groups are NaN: a single one of them in a batch would show."""
    base, data, ids = problem
    for group in range(3):
        spoilt = data | {"x": jnp.where((ids == group)[:, None], data["x"], jnp.nan)}
        found = subgroup_finetune(
            loss_fn,
            base,
            spoilt,
            membership_from_ids(ids, 3),
            optax.sgd(0.1),
            jax.random.key(1),
            steps=20,
            batch_size=8,
        )
        np.testing.assert_array_equal(np.isfinite(found.losses).all(1), np.arange(3) == group)


def test_groups_take_the_share_of_the_steps_that_they_have_of_the_rows(problem):
    """A step of sign descent moves the weight of an idle loss by exactly its size: the way tells the steps."""
    data = {"y": jnp.ones(N)}
    arguments = (lambda p, b: p["w"] * b["y"], {"w": jnp.array(0.0)}, data)
    membership = membership_from_ids(problem[2], 3)
    options = {"steps": 12, "batch_size": 4}
    sign = optax.sign_sgd(1.0)
    found = subgroup_finetune(*arguments, membership, sign, jax.random.key(0), **options)
    np.testing.assert_array_equal(found.params["w"], [-6, -4, -2])
    np.testing.assert_array_equal(found.losses[2], [0, -1] + [-2] * 10)
    all_alike = subgroup_finetune(*arguments, membership, sign, jax.random.key(0), equal_epochs=False, **options)
    np.testing.assert_array_equal(all_alike.params["w"], [-12, -12, -12])
    few = subgroup_finetune(*arguments, membership, sign, jax.random.key(0), steps=1, batch_size=4)
    np.testing.assert_array_equal(few.params["w"], [-1, -1, -1])


def test_every_row_of_a_group_is_drawn_alike():
    """Descent on (w - y)² / 2 at a step of 1 ends on the mean of the last batch: its mean over keys is the group's."""
    data = {"y": jnp.arange(10.0)}
    membership = membership_from_ids(np.array([0, 1] * 5), 2)

    def last(key):
        found = subgroup_finetune(
            lambda params, batch: (params["w"] - batch["y"]) ** 2 / 2,
            {"w": jnp.array(0.0)},
            data,
            membership,
            optax.sgd(1.0),
            key,
            steps=1,
            batch_size=4,
        )
        return found.params["w"]

    ends = jax.vmap(last)(jax.random.split(jax.random.key(0), 500))
    # Deviation of a group's rows over the root of 4 rows a batch and 500 batches; five of these.
    tolerance = 5 * np.sqrt(8 / 4 / 500)
    np.testing.assert_allclose(ends.mean(0), [4, 5], atol=tolerance)
    np.testing.assert_allclose(ends.var(0), [2, 2], rtol=0.3)


def test_weights_scale_the_losses_and_drop_rows(problem):
    base, data, _ = problem
    spoilt = data | {"x": data["x"].at[0].set(jnp.nan)}
    weights = jnp.full(N, 2.0).at[0].set(0.0)
    options = {"optimizer": optax.sgd(0.1), "key": jax.random.key(0), "steps": 1, "batch_size": None}
    found = subgroup_finetune(loss_fn, base, spoilt, jnp.ones((N, 1)), weights=weights, **options)
    expected = 2 * loss_fn(base, {name: leaf[1:] for name, leaf in data.items()}).sum() / N
    assert float(found.losses[0, 0]) == pytest.approx(float(expected), rel=1e-5)


def test_groups_without_rows_get_no_model(problem):
    base, data, ids = problem
    options = {"optimizer": optax.sgd(0.1), "key": jax.random.key(0), "steps": 1, "batch_size": 4}
    membership = membership_from_ids(np.where(ids == 1, 3, ids), 5)
    with pytest.warns(UserWarning, match="groups without rows get no model: 1, 4"):
        found = subgroup_finetune(loss_fn, base, data, membership, **options)
    np.testing.assert_array_equal(found.groups, [0, 2, 3])
    assert found.params["in"].shape == (3, 3, 4)
    traced = jax.jit(lambda m: subgroup_finetune(loss_fn, base, data, m, **options).params)(membership)
    np.testing.assert_array_equal(np.isnan(traced["in"]).all((1, 2)), [False, True, False, False, True])
    np.testing.assert_array_equal(traced["in"][jnp.array([0, 2, 3])].shape, (3, 3, 4))


def test_adapters_are_trained_like_any_tree():
    """Low-rank adapters of a matrix, one pair a group; merged they give what the adapter path gives."""
    params = {"layer0": {"weight": jax.random.normal(jax.random.key(0), (4, 3))}, "head": {"weight": jnp.eye(2, 4)}}
    adapters = lora.init(params, jax.random.key(1), target=["layer0"], rank=2, alpha=4.0)
    x = jax.random.normal(jax.random.key(2), (40, 3))
    data = {"x": x, "y": (x[:, 0] > 0).astype(jnp.float32)}

    def matrix(weight, inputs):
        if isinstance(weight, LowRankSum):
            return inputs @ weight.weight.T + weight.scale * (inputs @ weight.down.T) @ weight.up.T
        return inputs @ weight.T

    def network(params, inputs):
        return matrix(params["head"]["weight"], jnp.tanh(matrix(params["layer0"]["weight"], inputs)))

    def loss(adapters, batch):
        logits = network(lora.apply(params, adapters), batch["x"])
        return optax.sigmoid_binary_cross_entropy(logits[:, 1] - logits[:, 0], batch["y"])

    np.testing.assert_array_equal(network(lora.apply(params, adapters), x), network(params, x))  # B = 0 at first
    membership = membership_from_ids(np.arange(40) % 2, 2)
    found = subgroup_finetune(loss, adapters, data, membership, optax.adam(0.05), jax.random.key(3), steps=60)
    assert (found.losses[:, -1] < 0.9 * found.losses[:, 0]).all()
    for tuned in found.models():
        np.testing.assert_allclose(
            network(lora.merge(params, tuned), x), network(lora.apply(params, tuned), x), rtol=1e-4, atol=1e-4
        )
    vectors = task_vectors(params, [lora.merge(params, tuned) for tuned in found.models()], include=["layer0"])
    assert list(vectors) == ["layer0/weight"]
    assert (jnp.linalg.matrix_rank(vectors["layer0/weight"], rtol=1e-4) == 2).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"data": {"x": jnp.ones((N, 3)), "y": jnp.ones(5)}}, rf"the {N} rows of the membership; y is \[5\]"),
        ({"membership": jnp.zeros((N, 2))}, f"no row of {N} is in any of 2 groups"),
        ({"loss_fn": lambda params, batch: loss_fn(params, batch).mean()}, r"one loss a row, \[8\]; got \[\]"),
    ],
)
def test_bad_input(problem, change, message):
    base, data, ids = problem
    good = {"loss_fn": loss_fn, "params": base, "data": data, "membership": membership_from_ids(ids, 3)}
    good |= {"optimizer": optax.sgd(0.1), "key": jax.random.key(0), "steps": 2, "batch_size": 8}
    with pytest.raises(ValueError, match=message):
        subgroup_finetune(**good | change)
