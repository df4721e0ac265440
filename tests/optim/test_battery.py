"""Every transformation and optimiser keeps the same promises.

A new one joins by one line in :data:`TRANSFORMATIONS`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxlab import optim
from jaxlab.optim import make_mixer, noise, topology

N = 4


class Promise(NamedTuple):
    """What the battery has to know of a transformation.

    Attributes:
      make: of a learning rate (which building blocks ignore) and a mixer.
      has_rate: whether it is an optimiser, which takes the learning rate as its first argument.
      communicates: whether it must refuse a leaf with another number of nodes.
    """

    make: Callable[[Any, optim.Mixer], optax.GradientTransformation]
    has_rate: bool = True
    communicates: bool = True


def block(make: Callable[[optim.Mixer], optax.GradientTransformation], **promises: bool) -> Promise:
    return Promise(lambda rate, mixer: make(mixer), has_rate=False, **promises)


TRANSFORMATIONS = {
    "track_gradients": block(optim.track_gradients),
    "momentum_tracking": block(lambda m: optim.momentum_tracking(0.8, m)),
    "momentum_tracking, skipping": block(lambda m: optim.momentum_tracking(0.8, m, skip_nonfinite=True)),
    "normalize_per_node": block(lambda m: optim.normalize_per_node(), communicates=False),
    "clip_per_node": block(lambda m: optim.clip_per_node(0.5), communicates=False),
    "clip_per_node, scheduled": block(lambda m: optim.clip_per_node(lambda t: 0.5 * (t + 1)), communicates=False),
    "smooth_clip_error_feedback": block(lambda m: optim.smooth_clip_error_feedback(memory=0.5), communicates=False),
    "gossip, adapt then combine": block(optim.gossip),
    "gossip, combine then adapt": block(lambda m: optim.gossip(m, order="cta")),
    "vmap_nodes": block(lambda m: optim.vmap_nodes(optim.widened(optax.scale_by_adam())), communicates=False),
    "widened": block(lambda m: optim.widened(optax.ema(0.9, debias=False)), communicates=False),
    "add_gradient_noise": block(
        lambda m: noise.add_gradient_noise(jax.random.key(3), jax.random.normal, m), communicates=False
    ),
    "gt_nsgdm": Promise(optim.gt_nsgdm),
    "gt_nsgdm, all options": Promise(
        lambda rate, m: optim.gt_nsgdm(rate, m, 0.5, weight_decay=0.1, skip_nonfinite=True, eps=1e-6)
    ),
    "dsgd": Promise(optim.dsgd),
    "dsgd_gclip": Promise(lambda rate, m: optim.dsgd_gclip(rate, m, 0.5)),
    "dsgd_cclip": Promise(lambda rate, m: optim.dsgd_cclip(rate, m, 0.5)),
    "dsgd_clip": Promise(lambda rate, m: optim.dsgd_clip(rate, m, 0.5)),
    "nsgd": Promise(optim.nsgd),
    "nsgdm": Promise(optim.nsgdm),
    "gt_dsgd": Promise(optim.gt_dsgd),
    "gt_adam": Promise(optim.gt_adam),
    "sclip_ef_network": Promise(optim.sclip_ef_network),
    "qg_dsgdm": Promise(optim.qg_dsgdm),
    "decentralize(sgd)": Promise(lambda rate, m: optim.decentralize(optax.sgd(rate), m, tracking=True)),
}
OPTIMISERS = [name for name, promise in TRANSFORMATIONS.items() if promise.has_rate]
COMMUNICATING = [name for name, promise in TRANSFORMATIONS.items() if promise.communicates]
# Noise is drawn leaf by leaf: how a node's numbers are cut into leaves matters to it, and only to it.
DETERMINISTIC = [name for name in TRANSFORMATIONS if name != "add_gradient_noise"]

every = pytest.mark.parametrize("name", TRANSFORMATIONS)
MIXER = make_mixer(topology.ring(N))
random = np.random.default_rng(0)
PARAMS = {"a": jnp.float32(random.normal(size=(N, 3))), "b": jnp.float32(random.normal(size=N))}
GRADS = [jax.tree.map(lambda p: jnp.float32(random.normal(size=p.shape)), PARAMS) for _ in range(3)]
STACKED_GRADS = jax.tree.map(lambda *leaves: jnp.stack(leaves), *GRADS)


def make(name: str, rate: Any = 0.1, mixer: optim.Mixer = MIXER) -> optax.GradientTransformationExtraArgs:
    return optax.with_extra_args_support(TRANSFORMATIONS[name].make(rate, mixer))


def run(transformation, params, grads):
    """The parameters after one update for each of the gradients, and the state."""
    state = transformation.init(params)
    for g in grads:
        updates, state = transformation.update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def scan(transformation, params, state, grads):
    """The same in one program, which does not grow with the number of gradients."""

    def step(carry, g):
        params, state = carry
        updates, state = transformation.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (params, state), grads)[0]


def assert_close(got, expected, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Within a few roundings of float32 numbers of order one."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), got, expected)


def kinds(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.fixture(scope="module")
def eager():
    """``eager(name)``: parameters and state after the three gradients, step by step without jit."""
    results: dict[str, Any] = {}

    def of(name: str):
        if name not in results:
            results[name] = run(make(name), PARAMS, GRADS)
        return results[name]

    return of


@every
def test_a_compiled_scan_that_donates_equals_eager_steps(name: str, eager) -> None:
    transformation = make(name)
    steps = jax.jit(functools.partial(scan, transformation), donate_argnums=(0, 1))
    copies = jax.tree.map(jnp.copy, PARAMS)
    params, state = steps(copies, transformation.init(PARAMS), STACKED_GRADS)
    expected_params, expected_state = eager(name)
    assert_close(params, expected_params)
    assert jax.tree.structure(state) == jax.tree.structure(expected_state)
    # Donating the state took nothing that belongs to the transformation or to the caller.
    run(transformation, PARAMS, GRADS[:1])


@every
def test_gradients_act(name: str) -> None:
    """In every leaf, within two steps (SClip-EF ignores the first by its own schedule)."""
    ends = [run(make(name), PARAMS, [g, g])[0] for g in GRADS[:2]]
    jax.tree.map(lambda x, y: np.testing.assert_array_less(1e-4, jnp.abs(x - y).max()), *ends)


@every
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_parameters_keep_their_dtype_and_the_state_is_wide_and_constant(name: str, dtype) -> None:
    transformation = make(name)
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)

    def step(params, state, grads):
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(transformation.init, params)
    after, new_state = jax.eval_shape(step, params, state, params)
    assert kinds(after) == kinds(params)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert kinds(new_state) == kinds(state)
    for leaf in jax.tree.leaves(state):
        assert not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.float32
    # float32 gradients (accumulated elsewhere) for 16-bit parameters.
    assert kinds(jax.eval_shape(step, params, state, PARAMS)) == kinds((params, state))


class Layer(NamedTuple):
    weight: Any
    bias: Any


TREES = {
    "nested": {"x": [jnp.ones((N, 2)), {"y": (jnp.ones(N),)}], "z": jnp.ones((N, 1, 2, 3))},
    "NamedTuple with None": Layer(jnp.ones((N, 2)), None),
    "tuple": (jnp.ones((N, 2)), jnp.ones((N, 2))),
    "single array": jnp.ones((N, 5)),
    "0-size leaf": {"x": jnp.ones((N, 0)), "y": jnp.ones((N, 2))},
    "no leaves": {},
}


@every
@pytest.mark.parametrize("tree", TREES)
def test_any_tree_of_parameters(name: str, tree: str) -> None:
    transformation, params = make(name), TREES[tree]

    def step(params):
        updates, state = transformation.update(params, transformation.init(params), params)
        return optax.apply_updates(params, updates), state

    after, _ = jax.eval_shape(step, params)
    assert jax.tree.structure(after) == jax.tree.structure(params)
    assert kinds(after) == kinds(params)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_how_the_numbers_are_cut_into_leaves_does_not_matter(name: str, eager) -> None:
    def whole(tree):
        return jnp.concatenate([tree["a"], tree["b"][:, None]], axis=1)

    params, _ = run(make(name), whole(PARAMS), [whole(g) for g in GRADS])
    assert_close(params, whole(eager(name)[0]))


@every
def test_vmap_over_seeds_and_learning_rates_equals_single_runs(name: str, eager) -> None:
    rates = jnp.array([0.1, 0.03])
    seeds = jax.tree.map(lambda p: jnp.stack([p, -2.0 * p]), PARAMS)

    def one(params, rate):
        transformation = make(name, rate)
        return scan(transformation, params, transformation.init(params), STACKED_GRADS)[0]

    together = jax.jit(jax.vmap(one))(seeds, rates)
    assert_close(jax.tree.map(lambda x: x[0], together), eager(name)[0])
    alone, _ = run(make(name, 0.03), jax.tree.map(lambda x: x[1], seeds), GRADS)
    assert_close(jax.tree.map(lambda x: x[1], together), alone)


@every
def test_masked_leaves_are_left_out(name: str) -> None:
    masked = optax.masked(make(name), {"a": True, "b": False})
    updates, state = masked.update(GRADS[0], masked.init(PARAMS), PARAMS)
    masked.update(GRADS[1], state, PARAMS)
    np.testing.assert_array_equal(updates["b"], GRADS[0]["b"])
    alone, only_a = make(name), {"a": PARAMS["a"]}
    expected, _ = alone.update({"a": GRADS[0]["a"]}, alone.init(only_a), only_a)
    assert_close(updates["a"], expected["a"])


@every
def test_labels_and_chains(name: str) -> None:
    """By label next to another transformation, one of the labels unused; behind another link of a chain."""
    by_label = optax.multi_transform(
        {"ours": make(name), "theirs": optax.scale(3.0), "unused": make(name)}, {"a": "ours", "b": "theirs"}
    )
    updates, _ = by_label.update(GRADS[0], by_label.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["b"], 3.0 * GRADS[0]["b"], rtol=1e-6)
    alone, only_a = make(name), {"a": PARAMS["a"]}
    expected, _ = alone.update({"a": GRADS[0]["a"]}, alone.init(only_a), only_a)
    assert_close(updates["a"], expected["a"])

    behind = optax.chain(optax.scale(2.0), make(name))
    updates, _ = behind.update(GRADS[0], behind.init(PARAMS), PARAMS)
    doubled = jax.tree.map(lambda g: 2.0 * g, GRADS[0])
    assert_close(updates, make(name).update(doubled, make(name).init(PARAMS), PARAMS)[0])


@pytest.mark.parametrize("name", OPTIMISERS)
def test_multi_steps_accumulate_before_the_optimiser_sees_anything(name: str) -> None:
    accumulating = optax.MultiSteps(make(name), every_k_schedule=2)
    params, state = PARAMS, accumulating.init(PARAMS)
    update = jax.jit(accumulating.update)
    for t, g in enumerate((GRADS[0], GRADS[1], GRADS[2], GRADS[0])):
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        if t == 0:
            assert_close(params, PARAMS, atol=0)
    means = [jax.tree.map(lambda x, y: (x + y) / 2, *pair) for pair in (GRADS[:2], (GRADS[2], GRADS[0]))]
    assert_close(params, run(make(name), PARAMS, means)[0])


@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_learning_rate_may_be_injected(name: str, eager) -> None:
    optimiser = optax.inject_hyperparams(lambda learning_rate: make(name, learning_rate))(learning_rate=0.1)
    assert_close(run(optimiser, PARAMS, GRADS)[0], eager(name)[0])
    state = optimiser.init(PARAMS)
    state.hyperparams["learning_rate"] = jnp.float32(0.02)
    updates, _ = optimiser.update(GRADS[0], state, PARAMS)
    expected, _ = make(name, 0.02).update(GRADS[0], make(name, 0.02).init(PARAMS), PARAMS)
    assert_close(updates, expected)


@pytest.mark.parametrize(
    ("factory", "arguments"),
    [
        (optim.gt_nsgdm, {"beta": 0.5, "eps": 1e-9, "weight_decay": 0.1}),
        (optim.gt_nsgdm, {"beta": 0.5}),
        (optim.dsgd, {}),
        (optim.dsgd_gclip, {"max_norm": 0.5}),
        (optim.dsgd_cclip, {"max_value": 0.5}),
        (optim.dsgd_clip, {"max_norm": 0.5, "clip_power": -0.4}),
        (optim.nsgd, {"eps": 1e-9}),
        (optim.nsgdm, {"beta": 0.5}),
        (optim.gt_dsgd, {}),
        (optim.gt_adam, {"b1": 0.8, "b2": 0.99, "eps": 1e-6}),
        (optim.sclip_ef_network, {"scale": 2.0, "threshold": 0.5, "memory": 0.7}),
        (optim.qg_dsgdm, {"beta": 0.5}),
    ],
)
def test_every_hyperparameter_of_the_factories_may_be_injected(factory, arguments) -> None:
    """``inject_hyperparams`` around the factory itself: all numbers become arrays in the state."""
    injected = optax.inject_hyperparams(factory)(learning_rate=0.1, mixer=MIXER, **arguments)
    params, state = run(injected, PARAMS, GRADS[:2])
    assert set(arguments) | {"learning_rate"} <= set(state.hyperparams)
    assert_close(params, run(factory(0.1, MIXER, **arguments), PARAMS, GRADS[:2])[0])


@every
def test_optax_finds_the_parts_of_the_state_that_are_shaped_like_parameters(name: str) -> None:
    """``optax.tree.map_params`` (sharding rules, partial resets) reaches accumulators and spares counters."""
    state = make(name).init(PARAMS)
    marked = optax.tree.map_params(make(name), lambda x: jnp.full_like(x, 7.0), state)
    assert kinds(marked) == kinds(state)
    for before, after in zip(*map(jax.tree.leaves, (state, marked)), strict=True):
        if jnp.issubdtype(before.dtype, jnp.floating):
            np.testing.assert_array_equal(after, jnp.full_like(before, 7.0))
        elif jnp.issubdtype(before.dtype, jnp.integer):
            np.testing.assert_array_equal(after, before)


@pytest.fixture(scope="module")
def restored(eager, tmp_path_factory):
    """The states and parameters of all transformations after three steps, written and read by orbax."""
    reached = {name.replace(" ", "_"): eager(name) for name in TRANSFORMATIONS}
    path = tmp_path_factory.mktemp("checkpoint") / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, reached)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, reached))


@every
def test_a_checkpoint_continues_bit_for_bit(name: str, eager, restored) -> None:
    transformation = make(name)
    continued = []
    for params, state in (eager(name), restored[name.replace(" ", "_")]):
        updates, state = transformation.update(GRADS[0], state, params)
        continued.append((updates, state))
    assert jax.tree.structure(continued[0]) == jax.tree.structure(continued[1])
    for x, y in zip(*map(jax.tree.leaves, continued), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", COMMUNICATING)
def test_another_number_of_nodes_is_refused_by_the_leaf_s_name(name: str) -> None:
    transformation = make(name)
    wrong = {"fine": jnp.ones((N, 2)), "wrong": jnp.ones((N + 1, 2))}
    scalar = {"fine": jnp.ones((N, 2)), "scalar": jnp.float32(1.0)}
    everywhere = {"w": jnp.ones((N + 1, 2))}

    def update(params):
        transformation.update(params, transformation.init(params), params)

    with pytest.raises(ValueError, match=r"leading axis of .*nodes; \['wrong'\] has shape \(5, 2\)"):
        update(wrong)
    with pytest.raises(ValueError, match=r"leading axis of .*nodes; \['scalar'\] has shape \(\)"):
        update(scalar)
    with pytest.raises(ValueError, match=r"leading axis of 4 nodes; \['w'\] has shape \(5, 2\)"):
        update(everywhere)
