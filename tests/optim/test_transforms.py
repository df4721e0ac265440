"""Tracking, normalisation, clipping and gossip: each against its equation in NumPy, and its refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, PartitionSpec

from jaxlab.optim import (
    clip_per_node,
    gossip,
    gt_nsgdm,
    make_mixer,
    momentum_tracking,
    normalize_per_node,
    per_node_norm,
    smooth_clip_error_feedback,
    topology,
    track_gradients,
    vmap_nodes,
    widened,
)

N, STEPS = 5, 30
W = np.mean([np.eye(N), np.eye(N)[[1, 2, 0, 4, 3]], np.eye(N)[[3, 0, 1, 2, 4]]], axis=0)  # directed and irregular
MIXER = make_mixer(W)
SETTINGS = settings(max_examples=50, deadline=None, derandomize=True)
random = np.random.default_rng(0)


def gradients(steps: int = STEPS) -> dict[str, np.ndarray]:
    """``[steps, n, ...]``, with the heavy tails of a Student t of 1.5 degrees of freedom."""
    return {"a": random.standard_t(1.5, (steps, N, 2, 3)), "b": random.standard_t(1.5, (steps, N))}


def flat(tree) -> np.ndarray:
    """``[..., n, all coordinates]`` of trees ``[..., n, 2, 3]`` and ``[..., n]``."""
    return np.concatenate([np.asarray(tree["a"]).reshape(*tree["b"].shape, 6), np.asarray(tree["b"])[..., None]], -1)


def run(transform, grads, params=None):
    """Updates of every step, stacked, and the last state."""
    params = jax.tree.map(lambda g: jnp.zeros_like(g[0]), grads) if params is None else params

    def step(state, g):
        updates, state = transform.update(g, state, params)
        return state, updates

    state, updates = jax.jit(lambda g: jax.lax.scan(step, transform.init(params), g))(grads)
    return updates, state


# ------------------------------------------------------------------------------------------------- tracking, momentum


def test_tracking_follows_its_recursion() -> None:
    with jax.enable_x64(True):
        grads = gradients()
        updates, state = run(track_gradients(MIXER), grads)
    y = previous = 0.0
    for g, update in zip(flat(grads), flat(updates), strict=True):
        y, previous = W @ (y + g - previous), g
        np.testing.assert_allclose(update, y, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(flat(state.previous), flat(grads)[-1])
    assert int(state.count) == STEPS


@pytest.mark.parametrize("make", [track_gradients, functools.partial(momentum_tracking, 0.0)])
def test_tracking_walks_through_a_time_varying_graph(make) -> None:
    sequence = np.stack([W, topology.complete(N), topology.ring(N)])
    with jax.enable_x64(True):
        grads = gradients(5)
        updates, _ = run(make(make_mixer(sequence)), grads)
    y = previous = 0.0
    for t, (g, update) in enumerate(zip(flat(grads), flat(updates), strict=True)):
        y, previous = sequence[t % 3] @ (y + g - previous), g
        np.testing.assert_allclose(update, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_fused_momentum_tracking_is_ema_then_tracking(beta: float) -> None:
    with jax.enable_x64(True):
        grads = gradients()
        fused, state = run(momentum_tracking(beta, MIXER), grads)
        chained, _ = run(optax.chain(optax.ema(beta, debias=False), track_gradients(MIXER)), grads)
    np.testing.assert_allclose(flat(fused), flat(chained), rtol=1e-12, atol=1e-12)
    v = 0.0
    for g in flat(grads):
        v = beta * v + (1 - beta) * g
    np.testing.assert_allclose(flat(state.momentum), v, rtol=1e-12)


@pytest.mark.parametrize(("x64", "bound"), [(False, 1e-6), (True, 1e-14)])
def test_the_average_of_the_trackers_is_the_average_of_the_momenta(x64: bool, bound: float) -> None:
    # Spec: 1.4e-7 in float32 and 2.5e-16 in float64 after 200 steps of standard normal gradients.
    with jax.enable_x64(x64):
        grads = jax.tree.map(
            lambda g: jnp.asarray(g, float),
            {"a": random.normal(size=(200, N, 2, 3)), "b": random.normal(size=(200, N))},
        )
        tracker, state = run(momentum_tracking(0.8, MIXER), grads)
        plain_tracker, _ = run(track_gradients(MIXER), grads)
    y, v = np.float64(flat(tracker)[-1]), np.float64(flat(state.momentum))
    assert np.abs(y.mean(0) - v.mean(0)).max() < bound
    assert np.abs(np.float64(flat(plain_tracker)).mean(1) - np.float64(flat(grads)).mean(1)).max() < 10 * bound


def skipping_run(skip: bool, mixer=MIXER):
    grads = gradients(6)
    grads["a"][3, 2, 0, 1] = np.nan
    grads["b"][4, 2] = -np.inf
    grads = jax.tree.map(jnp.float32, grads)
    return grads, *run(momentum_tracking(0.8, mixer, skip_nonfinite=skip), grads)


def test_a_skipped_gradient_counts_as_the_momentum_before_it() -> None:
    grads, updates, state = skipping_run(skip=True)
    assert state.skipped.tolist() == [0, 0, 2, 0, 0]
    y = v = np.zeros((N, 7))
    for g, update in zip(flat(grads), flat(updates), strict=True):
        bad = ~np.isfinite(g).all(1, keepdims=True)
        old, v = v, np.where(bad, v, 0.8 * v + 0.2 * np.where(bad, 0.0, g))
        y = W @ (y + v - old)
        np.testing.assert_allclose(update, y, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(flat(state.tracker).mean(0), flat(state.momentum).mean(0), atol=1e-5)


def test_an_unskipped_gradient_reaches_everybody() -> None:
    _, updates, state = skipping_run(skip=False)
    assert np.isfinite(flat(updates)[:3]).all()
    assert state.skipped.tolist() == [0] * N
    assert np.isnan(flat(updates)[5]).any(1).all()


def test_with_neighbour_exchange_the_damage_travels_one_edge_an_exchange(node_mesh) -> None:
    mixer = make_mixer(topology.ring(8), axis_name="node", exchange="neighbours")
    transform = momentum_tracking(0.5, mixer)
    grads = jnp.ones((8, 3)).at[4, 1].set(jnp.nan)

    def two_steps(grads):
        first, state = transform.update(grads, transform.init(grads))
        return first, transform.update(jnp.ones_like(grads), state)[0]

    node = PartitionSpec("node")
    first, second = jax.jit(jax.shard_map(two_steps, mesh=node_mesh(8), in_specs=node, out_specs=node))(grads)
    assert np.flatnonzero(np.isnan(first).any(1)).tolist() == [3, 4, 5]
    assert np.flatnonzero(np.isnan(second).any(1)).tolist() == [2, 3, 4, 5, 6]


# -------------------------------------------------------------------------------------------------- norms and clipping


def test_the_norm_is_joint_over_leaves_and_separate_over_nodes() -> None:
    tree = {
        "a": jnp.array([[[3.0, 0.0]], [[1.0, 1.0]]]),
        "b": jnp.array([4.0, 1.0]),
        "none": None,
        "empty": jnp.zeros((2, 0)),
    }
    np.testing.assert_allclose(per_node_norm(tree), [5.0, np.sqrt(3)], rtol=1e-6)
    assert per_node_norm(jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)).dtype == jnp.float32
    assert per_node_norm({}).shape == (0,)


@given(
    values=hnp.arrays(np.float32, (3, 4), elements=st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=False))
)
@SETTINGS
def test_norms_of_all_magnitudes(values: np.ndarray) -> None:
    exact = np.linalg.norm(values.astype(np.float64), axis=1)
    # A few roundings of float32, whose squares would overflow or vanish for most of these values.
    np.testing.assert_allclose(per_node_norm([values[:, 0], values[:, 1:]]), exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_half_precision_norms_do_not_overflow(dtype) -> None:
    tree = jnp.full((2, 100), 3e4, dtype)  # 3e4 squared is beyond float16
    np.testing.assert_allclose(per_node_norm(tree), 3e5, rtol=4e-3)
    np.testing.assert_allclose(per_node_norm(normalize_per_node().update(tree, optax.EmptyState())[0]), 1.0, rtol=4e-3)


def test_infinite_and_undefined_entries_stay_with_their_node() -> None:
    norms = per_node_norm(jnp.array([[jnp.inf, 1.0], [jnp.nan, 1.0], [3.0, 4.0]]))
    assert np.isinf(norms[0])
    assert np.isnan(norms[1])
    assert norms[2] == 5.0


def test_normalised_updates_have_unit_norm_and_zero_stays_zero() -> None:
    tree = jax.tree.map(lambda g: jnp.float32(g[0]), gradients(1))
    tree = jax.tree.map(lambda x: x.at[2].set(0.0), tree)
    unit = normalize_per_node().update(tree, optax.EmptyState())[0]
    np.testing.assert_allclose(per_node_norm(unit), [1, 1, 0, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(flat(unit)[0] * np.linalg.norm(flat(tree)[0]), flat(tree)[0], rtol=1e-5)
    tiny = normalize_per_node(eps=1e-3).update(jnp.full((2, 1), 1e-6), optax.EmptyState())[0]
    np.testing.assert_allclose(tiny, 1e-3, rtol=1e-5)


def test_clipping_keeps_what_is_short_and_shortens_what_is_long() -> None:
    tree = {"a": jnp.array([[3.0, 0.0], [0.3, 0.0], [0.0, 0.0]]), "b": jnp.array([4.0, 0.4, 0.0])}
    clipped, _ = clip_per_node(1.0).update(tree, optax.EmptyState())
    np.testing.assert_allclose(clipped["a"], [[0.6, 0.0], [0.3, 0.0], [0.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], [0.8, 0.4, 0.0], rtol=1e-6)


def test_the_limit_of_clipping_may_be_a_schedule() -> None:
    grads = jnp.full((4, 2, 1), 10.0)
    updates, state = run(clip_per_node(lambda count: 1.0 + count), grads)
    np.testing.assert_allclose(updates[:, 0, 0], [1.0, 2.0, 3.0, 4.0], rtol=1e-6)
    assert int(state.count) == 4


@pytest.mark.parametrize("memory", [1.0, 0.4])
def test_smooth_clip_error_feedback_follows_its_recursion(memory: float) -> None:
    with jax.enable_x64(True):
        grads = gradients()
        updates, _ = run(smooth_clip_error_feedback(scale=2.0, threshold=0.5, memory=memory), grads)
    m = np.zeros((N, 7))
    for t, (g, update) in enumerate(zip(flat(grads), flat(updates), strict=True)):
        u = g - m
        psi = 2.0 / np.sqrt(t + 1) * u / np.sqrt(u**2 + 0.5 * (t + 1) ** 0.6)
        b = memory / np.sqrt(t + 1)
        m = b * m + (1 - b) * psi
        np.testing.assert_allclose(update, m, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------- one node over several devices


def model_mesh():
    return jax.make_mesh((4, 2), ("node", "model"), axis_types=(AxisType.Auto,) * 2)


SPECS = {"split": PartitionSpec("node", "model"), "whole": PartitionSpec("node")}
REPLICATED = {"split": False, "whole": True}


def two_leaves(shape_of_split=(8, 6), shape_of_whole=(8, 3)) -> dict[str, jax.Array]:
    return {
        "split": jnp.float32(random.normal(size=shape_of_split)),
        "whole": jnp.float32(random.normal(size=shape_of_whole)),
    }


@pytest.mark.parametrize("check_vma", [True, False])
def test_norms_of_parameters_sharded_inside_a_node(check_vma: bool) -> None:
    tree = two_leaves()

    def norms_and_clipped(tree):
        clipped = clip_per_node(0.5, model_axes=("model",)).update({"split": tree["split"]}, optax.EmptyState())[0]
        return per_node_norm(tree, model_axes=("model",), replicated_mask=REPLICATED), clipped

    norms, clipped = jax.jit(
        jax.shard_map(
            norms_and_clipped,
            mesh=model_mesh(),
            in_specs=(SPECS,),
            out_specs=(PartitionSpec("node"), {"split": SPECS["split"]}),
            check_vma=check_vma,
        )
    )(tree)
    np.testing.assert_allclose(norms, per_node_norm(tree), rtol=1e-6)
    np.testing.assert_allclose(per_node_norm(clipped), np.full(8, 0.5), rtol=1e-6)


def test_gt_nsgdm_over_nodes_and_model_shards_equals_the_stacked_run() -> None:
    params, steps = two_leaves(), 5
    grads = [two_leaves() for _ in range(steps)]
    # One device of node 3 sees a NaN in its half: both halves must be left out.
    grads[2]["split"] = grads[2]["split"].at[3, 5].set(jnp.nan)

    def run_steps(optimizer, params, grads):
        state = optimizer.init(params)
        for g in grads:
            updates, state = optimizer.update(g, state, params)
            params = optax.apply_updates(params, updates)
        return params, state[0].skipped

    matrix = topology.path(8)
    expected, skipped = run_steps(
        gt_nsgdm(0.1, make_mixer(matrix), weight_decay=0.1, skip_nonfinite=True), params, grads
    )
    optimizer = gt_nsgdm(
        0.1,
        make_mixer(matrix, axis_name="node"),
        weight_decay=0.1,
        skip_nonfinite=True,
        model_axes=("model",),
        replicated_mask=REPLICATED,
    )
    sharded, skipped_on_mesh = jax.jit(
        jax.shard_map(
            functools.partial(run_steps, optimizer),
            mesh=model_mesh(),
            in_specs=(SPECS, [SPECS] * steps),
            out_specs=(SPECS, PartitionSpec("node")),
        )
    )(params, grads)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6), sharded, expected)
    assert skipped_on_mesh.tolist() == skipped.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


# --------------------------------------------------------------------------------------------- gossip and the wrappers


@pytest.mark.parametrize("order", ["atc", "cta"])
def test_gossip_leads_to_the_mixed_parameters(order: str) -> None:
    with jax.enable_x64(True):
        params = jax.tree.map(lambda g: jnp.asarray(g[0]), gradients(1))
        step = jax.tree.map(lambda g: jnp.asarray(g[0]), gradients(1))
        updates, state = gossip(MIXER, order=order).update(step, gossip(MIXER).init(params), params)
        after = optax.apply_updates(params, updates)
    x, u = flat(params), flat(step)
    np.testing.assert_allclose(flat(after), W @ (x + u) if order == "atc" else W @ x + u, rtol=1e-12, atol=1e-12)
    assert int(state.count) == 1


def test_gossip_walks_through_a_time_varying_graph() -> None:
    sequence = np.stack([W, topology.complete(N), topology.ring(N)])
    params = jnp.float32(random.normal(size=(N, 3)))
    updates, _ = run(gossip(make_mixer(sequence)), jnp.zeros((4, N, 3)), params)
    for t in range(4):
        np.testing.assert_allclose(params + updates[t], sequence[t % 3] @ params, atol=1e-6)


def test_gossip_of_16_bit_parameters_averages_in_float32() -> None:
    params = jnp.array([[1.0], [1.0078125], [1.0], [1.0078125]], jnp.bfloat16)  # neighbours in bfloat16
    updates, _ = gossip(make_mixer(topology.complete(4))).update(
        jnp.zeros_like(params), gossip(make_mixer(topology.complete(4))).init(params), params
    )
    assert updates.dtype == jnp.float32
    np.testing.assert_array_equal(params + updates, jnp.full((4, 1), 1.00390625))


def test_vmap_nodes_gives_each_node_its_own_statistics() -> None:
    grads = jnp.array([[3.0, 4.0], [0.3, 0.4], [30.0, 40.0]])
    clipped, _ = vmap_nodes(optax.clip_by_global_norm(1.0)).update(grads, vmap_nodes(optax.identity()).init(grads))
    np.testing.assert_allclose(clipped, [[0.6, 0.8], [0.3, 0.4], [0.6, 0.8]], rtol=1e-6)
    adam = vmap_nodes(optax.scale_by_adam())
    updates, state = adam.update(grads, adam.init(grads), grads)
    assert state.count.tolist() == [1, 1, 1]
    alone, _ = optax.scale_by_adam().update(grads[1], optax.scale_by_adam().init(grads[1]))
    np.testing.assert_allclose(updates[1], alone, rtol=1e-6)


def test_vmap_nodes_passes_extra_arguments_to_every_node() -> None:
    scale = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), lambda u, s, p=None, *, factor, **_: (factor * u, s)
    )
    updates, _ = vmap_nodes(scale).update(jnp.ones((3, 2)), optax.EmptyState(), factor=jnp.float32(4.0))
    np.testing.assert_array_equal(updates, jnp.full((3, 2), 4.0))


def test_widened_keeps_accumulators_in_float32() -> None:
    params = jnp.zeros((2, 3), jnp.bfloat16)
    ema = widened(optax.ema(0.999, debias=False))
    state = ema.init(params)
    for _ in range(3):
        updates, state = ema.update(jnp.ones_like(params), state, params)
    assert jax.tree.leaves(state.ema)[0].dtype == jnp.float32
    # In bfloat16 the third addition of 0.001 would be off by its spacing there, 2**-17.
    np.testing.assert_allclose(updates, 1 - 0.999**3, rtol=1e-5)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normalize_per_node(eps=0.0), "eps must be positive, got 0.0"),
        (lambda: normalize_per_node(eps=-1.0), "eps must be positive, got -1.0"),
        (lambda: normalize_per_node(eps=float("nan")), "eps must be positive, got nan"),
        (lambda: clip_per_node(0.0), "max_norm must be positive, got 0.0"),
        (lambda: smooth_clip_error_feedback(scale=0.0), "scale must be positive, got 0.0"),
        (lambda: smooth_clip_error_feedback(threshold=-2.0), "threshold must be positive, got -2.0"),
        (lambda: smooth_clip_error_feedback(memory=0), "memory must be positive, got 0"),
        (lambda: momentum_tracking(1.0, MIXER), r"beta must be in \[0, 1\), got 1.0"),
        (lambda: gossip(MIXER, order="mix"), "order must be 'atc' .* or 'cta' .*, got 'mix'"),
        (
            lambda: gossip(MIXER).update(jnp.ones((N, 2)), gossip(MIXER).init(jnp.ones((N, 2)))),
            r"gossip averages parameters: call update\(grads, state, params\) with params",
        ),
    ],
)
def test_bad_arguments(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_traced_arguments_are_not_looked_at() -> None:
    grads = jnp.ones((N, 2))

    def norm(eps, limit, beta):
        unit = normalize_per_node(eps=eps).update(grads, optax.EmptyState())[0]
        clipped = clip_per_node(limit).update(unit, optax.EmptyState())[0]
        tracking = momentum_tracking(beta, MIXER)
        return tracking.update(clipped, tracking.init(grads))[0]

    np.testing.assert_allclose(jax.jit(norm)(1e-6, 0.5, 0.75), np.full((N, 2), 0.25 * 0.5 / np.sqrt(2)), rtol=1e-5)
