"""GT-NSGDm and its baselines: parity with their equations in NumPy, limits, closed forms, invariants, refusals."""

import functools
from collections import defaultdict
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import PartitionSpec

from jaxlab import optim
from jaxlab.optim import make_mixer, topology

N = 5
# Directed, irregular and not symmetric, so that a transposed or a permuted product shows.
W = np.mean([np.eye(N), np.eye(N)[[1, 2, 0, 4, 3]], np.eye(N)[[3, 0, 1, 2, 4]]], axis=0)
MIXER = make_mixer(W)
TARGETS = np.random.default_rng(1).normal(size=(N, 7))
SETTINGS = settings(max_examples=50, deadline=None, derandomize=True)


# ------------------------------------------------------------------------------- the equations, transcribed into NumPy
# ``step(t, X, G, S) -> X`` with X, G ``[n, d]`` and S the method's memory, in which everything starts at 0.


def unit(y):
    norms = np.sqrt((y**2).sum(1, keepdims=True))
    return np.divide(y, norms, out=np.zeros_like(y), where=norms > 0)


def clip(g, limit):
    return g * np.minimum(1.0, limit / np.sqrt((g**2).sum(1, keepdims=True)))


def track(S, v):
    S["Y"], S["tracked"] = W @ (S["Y"] + v - S["tracked"]), v
    return S["Y"]


def ema(S, g, beta, name="V"):
    S[name] = beta * S[name] + (1 - beta) * g
    return S[name]


def adam(S, g, t):
    m, v = ema(S, g, 0.9, "m"), ema(S, g**2, 0.999, "v")
    return (m / (1 - 0.9 ** (t + 1))) / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)


def qg_dsgdm_step(t, X, G, S, a, beta=0.9):
    after = W @ (X - a * (beta * S["M"] + G))
    S["M"] = beta * S["M"] + (1 - beta) * (X - after) / a
    return after


def sclip_step(t, X, G, S, a, phi=3.0, tau=0.5, b=0.7):
    u = G - S["M"]
    beta = b / np.sqrt(t + 1)
    S["M"] = beta * S["M"] + (1 - beta) * phi / np.sqrt(t + 1) * u / np.sqrt(u**2 + tau * (t + 1) ** 0.6)
    return W @ (X - a / (t + 1) ** 0.2 * S["M"])


def heavy_ball_step(t, X, G, S, a):
    S["trace"] = 0.9 * S["trace"] + clip(G, 1.5)
    return W @ (X - a * S["trace"])


RATE = 0.1

# name: (optimiser of a learning rate and a mixer, its equation)
METHODS: dict[str, tuple[Callable, Callable]] = {
    "gt_nsgdm": (optim.gt_nsgdm, lambda t, X, G, S: W @ (X - RATE * unit(track(S, ema(S, G, 0.8))))),
    "gt_nsgdm, no momentum": (
        lambda rate, mixer: optim.gt_nsgdm(rate, mixer, 0.0),
        lambda t, X, G, S: W @ (X - RATE * unit(track(S, G))),
    ),
    "gt_nsgdm, weight decay": (
        lambda rate, mixer: optim.gt_nsgdm(rate, mixer, 0.5, weight_decay=0.3),
        lambda t, X, G, S: W @ (X - RATE * (unit(track(S, ema(S, G, 0.5))) + 0.3 * X)),
    ),
    "dsgd": (optim.dsgd, lambda t, X, G, S: W @ (X - RATE * G)),
    "nsgd": (optim.nsgd, lambda t, X, G, S: W @ (X - RATE * unit(G))),
    "nsgdm": (optim.nsgdm, lambda t, X, G, S: W @ (X - RATE * unit(ema(S, G, 0.8)))),
    "dsgd_gclip": (
        lambda rate, mixer: optim.dsgd_gclip(rate, mixer, 2.0),
        lambda t, X, G, S: W @ (X - RATE * clip(G, 2.0)),
    ),
    "dsgd_cclip": (
        lambda rate, mixer: optim.dsgd_cclip(rate, mixer, 0.7),
        lambda t, X, G, S: W @ (X - RATE * np.clip(G, -0.7, 0.7)),
    ),
    "dsgd_clip": (
        lambda rate, mixer: optim.dsgd_clip(rate, mixer, 2.0),
        lambda t, X, G, S: W @ (X - RATE / (t + 1) * clip(G, 2.0 * (t + 1) ** 0.4)),
    ),
    "dsgd_clip, shrinking": (
        lambda rate, mixer: optim.dsgd_clip(rate, mixer, 2.0, clip_power=-0.4),
        lambda t, X, G, S: W @ (X - RATE / (t + 1) * clip(G, 2.0 * (t + 1) ** -0.4)),
    ),
    "gt_dsgd": (optim.gt_dsgd, lambda t, X, G, S: W @ (X - RATE * track(S, G))),
    "sclip_ef_network": (
        lambda rate, mixer: optim.sclip_ef_network(rate, mixer, scale=3.0, threshold=0.5, memory=0.7),
        functools.partial(sclip_step, a=RATE),
    ),
    "gt_adam": (optim.gt_adam, lambda t, X, G, S: W @ (X - RATE * adam(S, track(S, G), t))),
    "qg_dsgdm": (optim.qg_dsgdm, functools.partial(qg_dsgdm_step, a=RATE)),
    "decentralize(adam)": (
        lambda rate, mixer: optim.decentralize(optax.adam(rate), mixer),
        lambda t, X, G, S: W @ (X - RATE * adam(S, G, t)),
    ),
    "decentralize(adam, tracking)": (
        lambda rate, mixer: optim.decentralize(optax.adam(rate), mixer, tracking=True),
        lambda t, X, G, S: W @ (X - RATE * adam(S, track(S, G), t)),
    ),
    "decentralize(clipped heavy ball)": (
        lambda rate, mixer: optim.decentralize(
            optax.chain(optax.clip_by_global_norm(1.5), optax.sgd(rate, momentum=0.9)), mixer
        ),
        functools.partial(heavy_ball_step, a=RATE),
    ),
}


def split(x):
    """``[..., n, 7]`` as a tree of two leaves, so that joint norms are joint."""
    return {"matrix": x[..., :6].reshape(*x.shape[:-1], 2, 3), "scalar": x[..., 6]}


def join(tree):
    matrix, scalar = tree["matrix"], tree["scalar"]
    return jnp.concatenate([matrix.reshape(*scalar.shape, 6), scalar[..., None]], -1)


def trajectory(optimizer, start, noise, targets=TARGETS):
    """Parameters after every step ``[T, n, 7]`` of stochastic gradients ``X - targets + noise[t]``."""

    def step(carry, disturbance):
        params, state = carry
        grads = split(join(params) - targets + disturbance)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), join(params)

    params = split(jnp.asarray(start))
    return jax.lax.scan(step, (params, optimizer.init(params)), jnp.asarray(noise))[1]


def heavy_tailed(steps: int, n: int = N, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(1.5, (steps, n, 7))


@pytest.mark.parametrize("name", METHODS)
def test_fifty_steps_equal_the_equations(name: str) -> None:
    make, equation = METHODS[name]
    noise = heavy_tailed(50)
    x = start = np.random.default_rng(2).normal(size=(N, 7))
    with jax.enable_x64(True):
        got = jax.jit(functools.partial(trajectory, make(RATE, MIXER)))(start, noise)
        assert got.dtype == jnp.float64
    memory = defaultdict(float)
    for t in range(50):
        x = equation(t, x, x - TARGETS + noise[t], memory)
        # Roundings of 1e-16, amplified where a small tracker is normalised.
        np.testing.assert_allclose(got[t], x, rtol=1e-9, atol=1e-11, err_msg=f"step {t}")


SCHEDULED = ("gt_nsgdm", "dsgd", "nsgd", "nsgdm", "gt_dsgd", "gt_adam", "qg_dsgdm")


@pytest.mark.parametrize("name", ["gt_nsgdm", "gt_adam", "qg_dsgdm"])  # the others chain the same step as the first two
def test_a_schedule_is_read_at_every_step(name: str) -> None:
    make = getattr(optim, name)
    schedule = optax.piecewise_constant_schedule(0.2, {2: 0.1})
    start, noise = np.ones((N, 7), np.float32), np.float32(heavy_tailed(4))
    scheduled = jax.jit(functools.partial(trajectory, make(schedule, MIXER)))(start, noise)

    @jax.jit
    def by_hand(params, state, rate, disturbance):
        optimizer = make(rate, MIXER)
        updates, state = optimizer.update(split(join(params) - TARGETS + disturbance), state, params)
        return optax.apply_updates(params, updates), state

    params = split(jnp.asarray(start))
    # States of a constant and of a scheduled rate differ in the step count alone; start one of the former.
    state = make(0.2, MIXER).init(params)
    for t, rate in enumerate((0.2, 0.2, 0.02, 0.02)):
        params, state = by_hand(params, state, rate, noise[t])
        np.testing.assert_allclose(scheduled[t], join(params), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_rate_of_zero_only_mixes(name: str) -> None:
    """A warm-up from 0 and a decay to 0 are customary; no method may divide by the rate."""
    make = getattr(optim, name)
    start = np.ones((N, 7), np.float32)
    warm_up_and_decay = optax.join_schedules(
        [optax.linear_schedule(0.0, 0.1, 2), optax.linear_schedule(0.1, 0.0, 2), lambda count: 0.0], [2, 4]
    )
    path = trajectory(make(warm_up_and_decay, MIXER), start, np.float32(heavy_tailed(8)))
    np.testing.assert_allclose(path[0], start, atol=1e-6)
    assert float(jnp.abs(path[3] - path[0]).max()) > 0.05
    # At rate 0 all that happens is X <- W X.
    np.testing.assert_allclose(path[6], W @ np.asarray(path[5], np.float64), atol=1e-6)


# -------------------------------------------------------------------------------------------------------------- limits


def test_one_node_is_normalised_sgd_with_momentum() -> None:
    noise, start = heavy_tailed(50, n=1), np.zeros((1, 7))
    with jax.enable_x64(True):
        got = trajectory(optim.gt_nsgdm(RATE, make_mixer(topology.complete(1))), start, noise, TARGETS[:1])
    x, v = start, 0.0
    for t in range(50):
        v = 0.8 * v + 0.2 * (x - TARGETS[:1] + noise[t])
        x = x - RATE * v / np.linalg.norm(v)
        np.testing.assert_allclose(got[t], x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("exchange", ["auto", "dense"])
def test_complete_graph_is_the_centralised_method_on_the_mean_gradient(exchange: str) -> None:
    noise, start = heavy_tailed(50), np.full((N, 7), 0.5)
    with jax.enable_x64(True):
        got = trajectory(optim.gt_nsgdm(RATE, make_mixer(topology.complete(N), exchange=exchange)), start, noise)
    x, v = start[0], 0.0
    for t in range(50):
        v = 0.8 * v + 0.2 * (x - TARGETS + noise[t]).mean(0)
        x = x - RATE * v / np.linalg.norm(v)
        np.testing.assert_allclose(got[t], np.broadcast_to(x, (N, 7)), rtol=1e-9, atol=1e-11)


def test_identity_matrix_gives_independent_runs() -> None:
    noise, start = heavy_tailed(30), TARGETS + 1.0
    alone = make_mixer(topology.complete(1))
    with jax.enable_x64(True):
        together = trajectory(optim.gt_nsgdm(RATE, make_mixer(np.eye(N), allow_disconnected=True)), start, noise)
        for i in range(N):
            one = slice(i, i + 1)
            single = trajectory(optim.gt_nsgdm(RATE, alone), start[one], noise[:, one], TARGETS[one])
            np.testing.assert_allclose(together[:, one], single, rtol=1e-10, atol=1e-12)


def test_without_normalisation_and_momentum_it_is_gt_dsgd() -> None:
    plain = optax.chain(optim.momentum_tracking(0.0, MIXER), optax.scale(-RATE), optim.gossip(MIXER))
    normalised = optax.chain(
        optim.track_gradients(MIXER), optim.normalize_per_node(), optax.scale(-RATE), optim.gossip(MIXER)
    )
    noise, start = heavy_tailed(30), np.zeros((N, 7))
    with jax.enable_x64(True):
        for ours, expected in (
            (plain, optim.gt_dsgd(RATE, MIXER)),
            (optim.gt_nsgdm(RATE, MIXER, 0.0), normalised),
        ):
            np.testing.assert_allclose(
                trajectory(ours, start, noise), trajectory(expected, start, noise), rtol=1e-10, atol=1e-12
            )


# --------------------------------------------------------------------------- bias of naive normalisation (closed form)

# f_i(x) = (x - a_i)^2 / 2 with a = (0, 0, 9): the average is 3, the median 0. Values where each method settles.
OPTIMISED = {"xla_backend_optimization_level": 3}
SETTLES = {
    "nsgd": (lambda mixer: optim.nsgd(0.003, mixer), 0.0),
    "nsgdm": (lambda mixer: optim.nsgdm(0.003, mixer), 0.0),
    "dsgd_gclip": (lambda mixer: optim.dsgd_gclip(0.003, mixer, 1.0), 0.5),
    "gt_nsgd": (lambda mixer: optim.gt_nsgdm(0.003, mixer, 0.0), 3.0),
    "gt_nsgdm": (lambda mixer: optim.gt_nsgdm(0.003, mixer), 3.0),
    "dsgd": (lambda mixer: optim.dsgd(0.003, mixer), 3.0),
}


def settled(optimizer, targets, steps: int = 10_000):
    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(params - targets, state, params)
        return (optax.apply_updates(params, updates), state), None

    params = jnp.full((3, 1), 5.0)
    return jax.lax.scan(step, (params, optimizer.init(params)), length=steps)[0][0]


@pytest.mark.parametrize("name", SETTLES)
def test_where_each_method_settles(name: str) -> None:
    make, limit = SETTLES[name]
    targets = jnp.array([[0.0], [0.0], [9.0]])
    run = functools.partial(settled, make(make_mixer(topology.complete(3))))
    # Where on its turns about the limit a method ends depends on rounding: optimised, as users compile it.
    x = np.asarray(jax.jit(run, compiler_options=OPTIMISED)(targets))
    # Normalised methods end within a step of 0.003 of their limit, the others at it.
    np.testing.assert_allclose(x, limit, rtol=0, atol=0.0031)
    gradient = abs(float(x.mean()) - 3.0)
    assert gradient == pytest.approx(abs(limit - 3.0), abs=0.0031)


def test_the_bias_of_naive_normalisation_is_arbitrarily_large() -> None:
    mixer = make_mixer(topology.complete(3))
    targets = jnp.array([0.0, 0.0, 9.0])[:, None]
    for scale in (0.5, 2.0, 4.0):
        naive = settled(optim.nsgd(0.003, mixer), scale * targets)
        tracked = settled(optim.gt_nsgdm(0.003, mixer), scale * targets)
        assert abs(float(naive.mean()) - 3.0 * scale) == pytest.approx(3.0 * scale, abs=0.0031)
        assert abs(float(tracked.mean()) - 3.0 * scale) < 0.0031


# ---------------------------------------------------------------------------------------------------------- invariants


@functools.partial(jax.jit, static_argnames="graph")
def run_on_gradients(graph: str, learning_rate, beta, grads):
    """Parameters ``[T + 1, n, d]`` from consensus at 0, whatever the parameters are."""
    mixer = make_mixer(getattr(topology, graph)(grads.shape[1]))
    optimizer = optim.gt_nsgdm(learning_rate, mixer, beta)

    def step(carry, g):
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    params = jnp.zeros(grads.shape[1:])
    return jnp.concatenate([params[None], jax.lax.scan(step, (params, optimizer.init(params)), grads)[1]])


@given(
    graph=st.sampled_from(["ring", "star", "path"]),
    learning_rate=st.floats(1e-3, 10.0),
    beta=st.floats(0.0, 0.99),
    grads=hnp.arrays(np.float32, (6, 6, 2), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
)
@SETTINGS
def test_motion_is_bounded_whatever_the_gradients(graph, learning_rate, beta, grads) -> None:
    # Gradients up to 2**100 = 1.3e30.
    x = np.asarray(run_on_gradients(graph, learning_rate, beta, grads), np.float64)
    rounding = 1 + 1e-4
    moved = np.linalg.norm(np.diff(x.mean(1), axis=0), axis=-1)
    assert (moved <= learning_rate * rounding).all()
    rho = topology.spectral_norm(getattr(topology, graph)(6))
    disagreement = np.linalg.norm(x - x.mean(1, keepdims=True), axis=(1, 2))
    assert (disagreement <= rho * learning_rate * np.sqrt(6) / (1 - rho) * rounding).all()


def test_plain_dsgd_breaks_the_bound_that_normalisation_keeps() -> None:
    grads = np.zeros((2, 6, 2), np.float32)
    grads[0, 0] = 1e6
    params = jnp.zeros((6, 2))
    optimizer = optim.dsgd(0.1, make_mixer(topology.ring(6)))
    updates, _ = optimizer.update(jnp.asarray(grads[0]), optimizer.init(params), params)
    assert float(jnp.linalg.norm(updates.mean(0))) > 1e4
    assert np.linalg.norm(np.asarray(run_on_gradients("ring", 0.1, 0.0, grads))[1].mean(0)) <= 0.1001


def test_zero_gradients_move_nothing() -> None:
    moved = run_on_gradients("ring", 0.1, 0.8, np.zeros((3, 6, 2), np.float32))
    np.testing.assert_array_equal(moved, 0.0)


# ------------------------------------------------------------------------------------------------------ both backends


def on_mesh(function, mesh):
    node, later = PartitionSpec("node"), PartitionSpec(None, "node")
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(node, later, node), out_specs=later))


# Together they use every building block.
@pytest.mark.parametrize(
    "name", ["gt_nsgdm", "nsgdm", "dsgd_clip", "sclip_ef_network", "qg_dsgdm", "decentralize(adam, tracking)"]
)
def test_two_nodes_a_device_equal_the_stacked_run(name: str, node_mesh) -> None:
    make, _ = METHODS[name]
    matrix = topology.path(8)
    targets = np.random.default_rng(3).normal(size=(8, 7)).astype(np.float32)
    start, noise = np.zeros((8, 7), np.float32), np.float32(heavy_tailed(5, n=8))
    stacked = jax.jit(functools.partial(trajectory, make(RATE, make_mixer(matrix))))(start, noise, targets)
    sharded = on_mesh(functools.partial(trajectory, make(RATE, make_mixer(matrix, axis_name="node"))), node_mesh(4))
    # Five steps of float32; a longer run would amplify the rounding where a tracker nears 0.
    np.testing.assert_allclose(sharded(start, noise, targets), stacked, rtol=1e-5, atol=1e-5)


GRAPHS_AND_DEVICES = [
    (topology.ring(8), 8, "auto"),
    (topology.directed_exponential(8), 8, "neighbours"),
    (topology.star(8), 2, "neighbours"),
    (np.stack([topology.ring(8), topology.star(8), topology.hypercube(3)]), 4, "auto"),
]


@pytest.mark.parametrize(("matrix", "devices", "exchange"), GRAPHS_AND_DEVICES)
def test_200_steps_in_float64_agree_on_both_backends(matrix, devices: int, exchange: str, node_mesh) -> None:
    targets = np.random.default_rng(4).normal(size=(8, 7))
    start, noise = np.zeros((8, 7)), heavy_tailed(200, n=8)
    with jax.enable_x64(True):
        stacked = trajectory(optim.gt_nsgdm(0.05, make_mixer(matrix)), start, noise, targets)
        sharded_optimizer = optim.gt_nsgdm(0.05, make_mixer(matrix, axis_name="node", exchange=exchange))
        sharded = on_mesh(functools.partial(trajectory, sharded_optimizer), node_mesh(devices))(start, noise, targets)
        np.testing.assert_allclose(sharded, stacked, rtol=0, atol=1e-10)


def test_20_steps_in_float32_agree_on_both_backends(node_mesh) -> None:
    """To 1.2e-7 (spec 8.5), far from the optimum where no tracker is near 0."""
    targets = np.float32(10.0 + np.random.default_rng(4).normal(size=(8, 7)))
    start, noise = np.zeros((8, 7), np.float32), np.zeros((20, 8, 7), np.float32)
    matrix = topology.ring(8)
    stacked = jax.jit(functools.partial(trajectory, optim.gt_nsgdm(0.01, make_mixer(matrix))))(start, noise, targets)
    sharded_optimizer = optim.gt_nsgdm(0.01, make_mixer(matrix, axis_name="node"))
    sharded = on_mesh(functools.partial(trajectory, sharded_optimizer), node_mesh(8))(start, noise, targets)
    np.testing.assert_allclose(sharded, stacked, rtol=0, atol=1.2e-7)


# ------------------------------------------------------------------------------------------------------ half precision


def test_bfloat16_parameters_reach_the_float32_result() -> None:
    targets = jnp.float32(np.random.default_rng(5).uniform(-1, 1, (8, 7)))
    optimizer = optim.gt_nsgdm(optax.linear_schedule(0.1, 0.0, 200), make_mixer(topology.ring(8)))

    @jax.jit
    def minimise(params):
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(params.astype(jnp.float32) - targets, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), length=200)[0]

    wide, _ = minimise(jnp.zeros((8, 7)))
    half, state = minimise(jnp.zeros((8, 7), jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    np.testing.assert_allclose(wide.mean(0), targets.mean(0), atol=1e-2)
    np.testing.assert_allclose(optim.node_mean(half).astype(jnp.float32), optim.node_mean(wide), atol=1e-2)


# -------------------------------------------------------------------------------------------- options and combinations


@pytest.mark.parametrize("mask", [{"matrix": True, "scalar": False}, lambda params: {"matrix": True, "scalar": False}])
def test_weight_decay_is_decoupled_and_masked(mask) -> None:
    params = split(jnp.ones((N, 7)))
    optimizer = optim.gt_nsgdm(0.1, make_mixer(topology.complete(N)), weight_decay=0.5, mask=mask)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    # No gradient, so no direction; the decay is scaled by the rate, not normalised.
    np.testing.assert_allclose(updates["matrix"], -0.05, rtol=1e-5)
    np.testing.assert_allclose(updates["scalar"], 0.0, atol=1e-7)


def test_skip_nonfinite_keeps_training_where_the_plain_method_dies() -> None:
    noise = np.float32(heavy_tailed(12))
    noise[4, 1, 2], noise[6, 3, :] = np.nan, np.inf
    start = np.zeros((N, 7), np.float32)
    plain = trajectory(optim.gt_nsgdm(RATE, MIXER), start, noise)
    skipping = trajectory(optim.gt_nsgdm(RATE, MIXER, skip_nonfinite=True), start, noise)
    assert np.isnan(plain[-1]).all()
    assert np.isfinite(skipping).all()
    np.testing.assert_allclose(skipping[:4], plain[:4], rtol=1e-6)
    assert np.linalg.norm(np.diff(np.asarray(skipping).mean(1), axis=0), axis=-1).max() <= RATE * 1.001


def test_decentralize_is_mixing_after_independent_optimisers() -> None:
    """With mixing it contracts; the inner optimiser sees one node, and tracking shows it the average gradient."""
    seen = []

    def record(updates, params):
        seen.append(jax.tree.map(jnp.shape, updates))
        return jax.tree.map(lambda u: -u, updates)

    grads = split(jnp.asarray(TARGETS, jnp.float32))
    params = jax.tree.map(jnp.zeros_like, grads)
    mean = make_mixer(topology.complete(N))
    for tracking in (False, True):
        optimizer = optim.decentralize(optax.stateless(record), mean, tracking=tracking)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        np.testing.assert_allclose(join(updates), -np.broadcast_to(TARGETS.mean(0), (N, 7)), atol=1e-6)
    assert seen == [{"matrix": (2, 3), "scalar": ()}] * 2


# ----------------------------------------------------------------------------------------------------- hyperparameters


@pytest.mark.parametrize(
    ("tail_index", "momentum_order", "rate_order"),
    [(1.5, -0.6, -0.8), (2.0, -0.5, -0.75), (None, -0.5, -0.75), (1.2, -0.75, -0.875)],
)
def test_hyperparameters_have_the_order_of_the_theorem(tail_index, momentum_order, rate_order) -> None:
    short, long = (optim.gt_nsgdm_hyperparameters(steps, tail_index=tail_index) for steps in (10**3, 10**7))
    decades = 4
    assert np.log10((1 - long.beta) / (1 - short.beta)) / decades == pytest.approx(momentum_order, abs=1e-9)
    assert np.log10(long.learning_rate / short.learning_rate) / decades == pytest.approx(rate_order, abs=1e-9)


def test_hyperparameters_minimise_the_terms_of_the_bound() -> None:
    steps, rho, smoothness, gap = 500, 0.7, 3.0, 2.0
    rate, beta = optim.gt_nsgdm_hyperparameters(steps, tail_index=1.5, rho=rho, smoothness=smoothness, initial_gap=gap)
    assert 1 - beta == pytest.approx(500**-0.6)
    rates = np.geomspace(rate / 10, rate * 10, 2001)
    bound = gap / (rates * steps) + rates * smoothness / ((1 - rho) * (1 - beta))
    assert rates[bound.argmin()] == pytest.approx(rate, rel=2e-3)


def test_hyperparameters_of_one_step_keep_a_tenth_of_momentum() -> None:
    assert optim.gt_nsgdm_hyperparameters(1).beta == pytest.approx(0.1)
    assert optim.gt_nsgdm_hyperparameters(4).beta == pytest.approx(0.5)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optim.gt_nsgdm(0.0, MIXER), "learning_rate must be positive, got 0.0"),
        (lambda: optim.gt_nsgdm(-0.1, MIXER), "learning_rate must be positive, got -0.1"),
        (lambda: optim.gt_nsgdm(float("nan"), MIXER), "learning_rate must be positive, got nan"),
        (lambda: optim.gt_nsgdm(0.1, MIXER, 1.0), r"beta must be in \[0, 1\), got 1.0"),
        (lambda: optim.gt_nsgdm(0.1, MIXER, -0.1), r"beta must be in \[0, 1\), got -0.1"),
        (lambda: optim.gt_nsgdm(0.1, MIXER, eps=0.0), "eps must be positive, got 0.0"),
        (lambda: optim.gt_nsgdm(0.1, MIXER, weight_decay=-0.1), "weight_decay must be nonnegative, got -0.1"),
        (lambda: optim.nsgdm(0.1, MIXER, 1.5), r"beta must be in \[0, 1\), got 1.5"),
        (lambda: optim.qg_dsgdm(0.1, MIXER, 1.0), r"beta must be in \[0, 1\), got 1.0"),
        (lambda: optim.nsgd(0.1, MIXER, eps=-1.0), "eps must be positive, got -1.0"),
        (lambda: optim.dsgd_gclip(0.1, MIXER, 0.0), "max_norm must be positive, got 0.0"),
        (lambda: optim.dsgd_cclip(0.1, MIXER, -1.0), "max_value must be positive, got -1.0"),
        (lambda: optim.dsgd_clip(0.1, MIXER, 0.0), "max_norm must be positive, got 0.0"),
        (lambda: optim.sclip_ef_network(0.1, MIXER, threshold=0.0), "threshold must be positive, got 0.0"),
        (lambda: optim.gt_nsgdm_hyperparameters(0), "steps must be at least 1, got 0"),
        (lambda: optim.gt_nsgdm_hyperparameters(10, tail_index=1.0), r"tail_index must be in \(1, 2\], got 1.0"),
        (lambda: optim.gt_nsgdm_hyperparameters(10, tail_index=2.5), r"tail_index must be in \(1, 2\], got 2.5"),
        (lambda: optim.gt_nsgdm_hyperparameters(10, rho=1.0), r"rho must be in \[0, 1\), got 1.0"),
        (lambda: optim.gt_nsgdm_hyperparameters(10, rho=-0.1), r"rho must be in \[0, 1\), got -0.1"),
        (lambda: optim.gt_nsgdm_hyperparameters(10, smoothness=0.0), "smoothness must be positive, got 0.0"),
        (lambda: optim.gt_nsgdm_hyperparameters(10, initial_gap=-1.0), "initial_gap must be positive, got -1.0"),
    ],
)
def test_bad_arguments(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "make",
    [
        optim.dsgd,
        optim.nsgd,
        optim.gt_dsgd,
        optim.gt_adam,
        optim.qg_dsgdm,
        lambda a, m: optim.dsgd_clip(a, m, 1.0),
        optim.sclip_ef_network,
    ],
)
def test_no_method_takes_a_negative_rate(make) -> None:
    with pytest.raises(ValueError, match=r"learning_rate must be positive, got -1\.0"):
        make(-1.0, MIXER)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    "make", [lambda rate: optim.dsgd_clip(rate, MIXER, 1.0), lambda rate: optim.sclip_ef_network(rate, MIXER)]
)
def test_methods_with_a_schedule_of_their_own_take_no_other(make) -> None:
    with pytest.raises(TypeError):
        make(optax.constant_schedule(0.1))


def test_a_matrix_in_place_of_a_mixer_is_named(types_unchecked) -> None:
    with pytest.raises(TypeError, match=r"expected a mixer, got ndarray; make_mixer\(matrix\) makes one"):
        optim.gt_nsgdm(0.1, topology.ring(8))
