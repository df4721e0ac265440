"""Robust training as transformations: closed forms, and the promises that all transformations keep.

They are not in ``test_battery.py`` because updates carry a worker axis that parameters do not.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec

from jaxlab import optim
from jaxlab.optim import aggregation, attacks

N, F = 8, 2
RULE = aggregation.compose(aggregation.NearestNeighbourMixing(F), aggregation.TrimmedMean(F))
KEY = jax.random.key(5)


def chain(*links) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(optax.chain(*links))


TRANSFORMATIONS = {
    "client_momentum": lambda axis=None: optim.client_momentum(N, 0.7),
    "client_momentum, zero": lambda axis=None: optim.client_momentum(N, 0.7, init="zero"),
    "page": lambda axis=None: optim.page(N),
    "simulate_attack": lambda axis=None: optim.simulate_attack(attacks.Gaussian(), F, key=KEY, axis_name=axis),
    "robust_aggregate": lambda axis=None: optim.robust_aggregate(RULE, axis_name=axis),
    "robust_aggregate, layerwise": lambda axis=None: optim.robust_aggregate(
        aggregation.Krum(F), axis_name=axis, layerwise=True
    ),
    "robust_aggregate, with memory": lambda axis=None: optim.robust_aggregate(
        aggregation.CentredClipping(0.5), axis_name=axis
    ),
    "robust_aggregate, at random": lambda axis=None: optim.robust_aggregate(
        aggregation.compose(aggregation.Bucketing(2), aggregation.CoordinateMedian()), key=KEY, axis_name=axis
    ),
    "whole chain": lambda axis=None: chain(
        optim.client_momentum(N, 0.9),
        optim.simulate_attack(attacks.ALittleIsEnough(), F, axis_name=axis),
        optim.robust_aggregate(RULE, axis_name=axis),
        optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float32),
    ),
}
every = pytest.mark.parametrize("name", TRANSFORMATIONS)
random = np.random.default_rng(0)
PARAMS = {"a": jnp.float32(random.normal(size=3)), "b": jnp.float32(1.5), "none": None, "empty": {}}


def messages(params):
    return jax.tree.map(lambda p: jnp.asarray(random.normal(size=(N, *jnp.shape(p))), p.dtype), params)


GRADS = [messages(PARAMS) for _ in range(3)]
REFRESH = [True, False, False]


def make(name: str, axis: str | None = None) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(TRANSFORMATIONS[name](axis))


def extra(name: str, t: int, grads) -> dict[str, Any]:
    return {"previous": jax.tree.map(lambda g: 0.5 * g, grads), "refresh": REFRESH[t]} if name == "page" else {}


def run(name: str, grads=None, params=None, update=None):
    transformation = make(name)
    params = PARAMS if params is None else params
    state, outputs = transformation.init(params), []
    for t, g in enumerate(GRADS if grads is None else grads):
        updates, state = (update or transformation.update)(g, state, params, **extra(name, t, g))
        outputs.append(updates)
    return outputs, state


def assert_close(got, expected, rtol=1e-5, atol=1e-6) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        if jax.dtypes.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


@pytest.fixture(scope="module")
def eager():
    return {name: run(name) for name in TRANSFORMATIONS}


@every
def test_jit_equals_eager_and_the_state_is_constant(name: str, eager) -> None:
    compiled = jax.jit(make(name).update)
    assert_close(run(name, update=compiled), eager[name], atol=1e-5)
    assert compiled._cache_size() <= 2  # a fresh state's scalars may be weakly typed once


@every
def test_scan_under_vmap_over_seeds_equals_steps_of_single_runs(name: str, eager) -> None:
    transformation = make(name)
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *GRADS)

    def step(state, inputs):
        g, refresh = inputs
        more = {"previous": jax.tree.map(lambda x: 0.5 * x, g), "refresh": refresh} if name == "page" else {}
        updates, state = transformation.update(g, state, PARAMS, **more)
        return state, updates

    @jax.jit
    @jax.vmap
    def runs(grads):
        return jax.lax.scan(step, transformation.init(PARAMS), (grads, jnp.array(REFRESH)))

    state, updates = runs(jax.tree.map(lambda g: jnp.stack([-2.0 * g, g]), stacked))
    assert_close(jax.tree.map(lambda x: x[1, -1], updates), eager[name][0][-1], atol=1e-5)
    assert_close(jax.tree.map(lambda x: x[1], state), eager[name][1], atol=1e-5)


class Layer(NamedTuple):
    weight: Any
    bias: Any


TREES = {
    "nested": {"x": [jnp.ones(2), {"y": (jnp.ones(()),)}], "z": jnp.ones((1, 2, 3))},
    "NamedTuple with None": Layer(jnp.ones(2), None),
    "0-size leaf": {"x": jnp.ones(0), "y": jnp.ones(2)},
    "single array": jnp.ones(5),
    "no leaves": {},
}


@every
def test_any_tree_and_its_dtypes(name: str) -> None:
    """Updates come in the parameters' structure; states are float32, and constant in kind."""
    for tree, dtype in zip(TREES.values(), itertools.cycle([jnp.bfloat16, jnp.float32]), strict=False):
        params = jax.tree.map(lambda p, dtype=dtype: p.astype(dtype), tree)
        grads = messages(params)

        def step(state, grads, params=params):
            return make(name).update(grads, state, params, **extra(name, 0, grads))

        state = jax.eval_shape(make(name).init, params)
        updates, after = jax.eval_shape(step, state, grads)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
        for leaf in jax.tree.leaves(updates):
            wide = name.startswith(("client_momentum", "page", "whole"))
            assert leaf.dtype == (jnp.float32 if wide else dtype)
        for leaf in jax.tree.leaves(state):
            assert not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.float32


def test_a_checkpoint_holds_every_state_bit_for_bit(eager, tmp_path) -> None:
    states = {name: state for name, (_, state) in eager.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", states)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, states))
    assert_close(restored, states, rtol=0, atol=0)


# Momentum and the plain rule are in the whole chain.
@pytest.mark.parametrize("name", [name for name in TRANSFORMATIONS if not name.endswith(("momentum", "zero", "gate"))])
def test_a_mesh_axis_gives_the_numbers_of_one_device(name: str, eager, node_mesh) -> None:
    """Messages and states of the workers spread over four devices, the server's part on each of them."""
    transformation = make(name, "node")
    spread, whole = PartitionSpec("node"), PartitionSpec()
    keeps_workers = not name.startswith(("robust", "whole"))
    state = make(name).init(PARAMS)
    state_specs = jax.tree.map(lambda x: spread if jnp.shape(x)[:1] == (N,) else whole, state)

    def step(grads, state, refresh):
        more = {"previous": jax.tree.map(lambda x: 0.5 * x, grads), "refresh": refresh} if name == "page" else {}
        return transformation.update(grads, state, PARAMS, **more)

    sharded = jax.jit(
        jax.shard_map(
            step,
            mesh=node_mesh(4),
            in_specs=(spread, state_specs, whole),
            out_specs=(spread if keeps_workers else whole, state_specs),
        )
    )
    for t, g in enumerate(GRADS):
        updates, state = sharded(g, state, jnp.array(REFRESH[t]))
        assert_close(updates, eager[name][0][t], rtol=1e-5, atol=1e-5)
    assert_close(state, eager[name][1], rtol=1e-5, atol=1e-5)


def test_momentum_in_closed_form() -> None:
    grads = [g["a"] for g in GRADS]
    for init, start in (("first", grads[0]), ("zero", 0.3 * grads[0])):
        transformation = optim.client_momentum(N, 0.7, init=init)
        state, expected = transformation.init(PARAMS["a"]), start
        for t, g in enumerate(grads):
            updates, state = transformation.update(g, state)
            expected = expected if t == 0 else 0.7 * expected + 0.3 * g
            np.testing.assert_allclose(updates, expected, rtol=1e-6)


def test_page_telescopes() -> None:
    """With full batches the estimate is the gradient at every step, whatever is drawn: M + G(u) - G(u') = G(u)."""
    transformation = optim.page(N)
    state = transformation.init(PARAMS)
    before = messages(PARAMS)
    for t, refresh in enumerate((False, False, True, False, False, False)):  # the first refreshes in any case
        g = messages(PARAMS)
        updates, state = transformation.update(g, state, previous=before, refresh=refresh)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), updates, g)
        before = g
        assert state.count == t + 1


def test_layerwise_krum_may_choose_another_worker_for_every_leaf() -> None:
    rows = jax.tree.map(lambda x: x + 0.0, GRADS[0])
    whole = optim.robust_aggregate(aggregation.Krum(F))
    by_leaf = optim.robust_aggregate(aggregation.Krum(F), layerwise=True)
    together, _ = whole.update(rows, whole.init(PARAMS))
    apart, _ = by_leaf.update(rows, by_leaf.init(PARAMS))
    for key in ("a", "b"):
        np.testing.assert_array_equal(apart[key], aggregation.Krum(F).aggregate(rows[key]))
    chosen = [int(np.argmin(np.abs(np.asarray(rows["b"]) - together["b"])))]
    np.testing.assert_array_equal(together["a"], rows["a"][chosen[0]])


def test_random_rules_and_attacks_draw_anew_every_step() -> None:
    for name in ("simulate_attack", "robust_aggregate, at random"):
        outputs, _ = run(name, [GRADS[0]] * 3)
        for x, y in itertools.combinations(outputs, 2):
            assert np.abs(x["a"] - y["a"]).max() > 1e-3


def test_two_of_eight_workers_ruin_the_mean_and_not_the_robust_rule() -> None:
    """Least squares with the same solution for all honest workers, which the robust rule must reach exactly."""
    inputs = jnp.float32(np.random.default_rng(1).normal(size=(N, 20, 3)))
    solution = jnp.array([1.0, -2.0, 0.5])

    def gradient(w, x):
        return jax.grad(lambda w: 0.5 * jnp.square(x @ (w - solution)).mean())(w)

    def distance(rule) -> float:
        optimizer = optax.chain(
            optim.client_momentum(N, 0.5),
            optim.simulate_attack(attacks.InnerProduct(4.0), F),
            optim.robust_aggregate(rule),
            optax.sgd(0.2),
        )

        def step(carry, _):
            w, state = carry
            updates, state = optimizer.update(jax.vmap(gradient, (None, 0))(w, inputs), state, w)
            return (optax.apply_updates(w, updates), state), None

        w = jnp.zeros(3)
        (w, _), _ = jax.lax.scan(step, (w, optimizer.init(w)), length=300)
        return float(jnp.linalg.norm(w - solution))

    assert distance(RULE) < 1e-5
    assert not distance(aggregation.Mean()) < 1e3  # 6 / 2 < 4: the mean points backwards


def test_agreement_is_with_the_honest_messages() -> None:
    """Against NumPy; what Byzantine workers send does not matter, nor that it is no number."""
    rows = {"a": np.float32(np.random.default_rng(2).normal(size=(5, 3))), "b": np.float32([1, 2, 3, 4, 5])}
    rows["a"][[1, 4]] = np.nan
    honest = np.concatenate([rows["a"], rows["b"][:, None]], 1)[[0, 2, 3]].astype(np.float64)
    mean, found = honest.mean(0), np.array([1.0, -2.0, 0.5, 3.0])
    result = optim.agreement(
        rows, {"a": jnp.float32(found[:3]), "b": jnp.float32(found[3])}, np.isin(np.arange(5), [1, 4])
    )
    expected = (
        mean @ found / np.linalg.norm(mean) / np.linalg.norm(found),
        np.linalg.norm(found - mean),
        np.sqrt(np.square(honest - mean).sum(1).mean()),
    )
    np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: optim.page(N).update({"a": GRADS[0]["a"]}, optim.page(N).init(PARAMS), previous={}, refresh=True),
            r"messages must be structured like the parameters of init, .*'b'.*; got .*'a'",
        ),
        (
            lambda: optim.page(N).update(
                {"a": GRADS[0]["a"]},
                optim.page(N).init({"a": PARAMS["a"]}),
                previous={"a": jnp.zeros((1, 3))},
                refresh=True,
            ),
            r"need shape \(8, 3\); \['a'\] has \(1, 3\)",
        ),
        (
            lambda: optim.robust_aggregate(aggregation.Krum(F), layerwise=True).update(
                {"a": GRADS[0]["a"]}, optim.robust_aggregate(aggregation.Krum(F), layerwise=True).init(PARAMS)
            ),
            r"messages have 1 leaves, the parameters of init had 2",
        ),
        (lambda: optim.client_momentum(0, 0.5), r"n_workers must be at least 1, got 0"),
        (lambda: optim.page(0), r"n_workers must be at least 1, got 0"),
        (lambda: optim.client_momentum(N, 1.0), r"beta must be in \[0, 1\), got 1.0"),
        (lambda: optim.page(N).update(GRADS[0], optim.page(N).init(PARAMS)), r"page needs update\(messages, state"),
        (lambda: optim.simulate_attack(attacks.Gaussian(), 2), r"Gaussian draws at random: give simulate_attack key="),
        (
            lambda: optim.robust_aggregate(aggregation.compose(aggregation.Bucketing(2), aggregation.Mean())),
            r"draws at random: give robust_aggregate key=",
        ),
        (
            lambda: optim.client_momentum(4, 0.5).update(GRADS[0], optim.client_momentum(4, 0.5).init(PARAMS)),
            r"messages of every worker need shape \(4, 3\); \['a'\] has \(8, 3\)",
        ),
        (
            lambda: optim.robust_aggregate(aggregation.Krum(4)).update(
                GRADS[0], optim.robust_aggregate(aggregation.Krum(4)).init(PARAMS)
            ),
            r"f=4 of n=8 workers: need 2f < n, at most f=3",
        ),
    ],
)
def test_bad_values(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_types(types_unchecked) -> None:
    with pytest.raises(TypeError, match=r"expected an aggregator, got str; make_aggregator\(name\) makes one"):
        optim.robust_aggregate("krum")
    with pytest.raises(TypeError, match=r"expected an attack, got str; make_attack\(name\) makes one"):
        optim.simulate_attack("alie", 2)
    with pytest.raises(ValueError, match="init must be 'first' or 'zero', got 'last'"):
        optim.client_momentum(N, 0.5, init="last")
