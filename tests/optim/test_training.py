"""From a loss of one node to steps of the network: the same numbers and draws stacked and over meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlab.optim import (
    consensus_error,
    gt_nsgdm,
    make_mixer,
    make_train_step,
    node_mean,
    node_partition_specs,
    put_on_mesh,
    replicate,
    shard_train_step,
    topology,
    value_and_grad_per_node,
)

N = 8
NODE, WHOLE = PartitionSpec("node"), PartitionSpec()
SHARDED = make_mixer(topology.ring(N), axis_name="node")
STACKED = make_mixer(topology.ring(N))


def loss_fn(params, batch, key):
    """Least squares of a linear model with a random half of the inputs dropped: needs params, batch and key."""
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    predictions = jnp.where(kept, batch["x"], 0.0) @ params["w"] + params["b"]
    return jnp.square(predictions - batch["y"]).mean()


def problem(n: int = N):
    random = np.random.default_rng(0)
    params = replicate({"w": jnp.float32(random.normal(size=4)), "b": jnp.float32(0.5)}, n)
    batch = {"x": jnp.float32(random.normal(size=(n, 6, 4))), "y": jnp.float32(random.normal(size=(n, 6)))}
    return params, batch


def three_steps(step, params, state, batch):
    losses = []
    for t in range(3):
        params, state, loss = step(params, state, batch, jax.random.key(t))
        losses.append(loss)
    return params, state, jnp.stack([jnp.asarray(loss) for loss in losses])


@pytest.fixture(scope="module")
def stacked_result():
    params, batch = problem()
    optimizer = gt_nsgdm(0.05, STACKED, skip_nonfinite=True)
    step = jax.jit(make_train_step(loss_fn, optimizer, STACKED))
    return three_steps(step, params, optimizer.init(params), batch)


def mesh_of(devices: int, kind: AxisType, model: int = 1):
    shape, names = ((devices,), ("node",)) if model == 1 else ((devices, model), ("node", "model"))
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=jax.devices()[: devices * model])


@pytest.mark.parametrize(
    ("devices", "kind", "model"),
    [
        (8, AxisType.Auto, 1),
        (4, AxisType.Explicit, 1),  # what jax.make_mesh gives unless told otherwise
        (4, AxisType.Auto, 2),
    ],
)
def test_steps_over_a_mesh_equal_stacked_steps(devices: int, kind: AxisType, model: int, stacked_result) -> None:
    params, batch = problem()
    optimizer, mesh = gt_nsgdm(0.05, SHARDED, skip_nonfinite=True), mesh_of(devices, kind, model)
    state = optimizer.init(params)
    step = make_train_step(loss_fn, optimizer, SHARDED)
    step = jax.jit(shard_train_step(step, mesh, SHARDED, params=params, state=state, batch=batch))
    got = three_steps(step, *put_on_mesh((params, state, batch), mesh, SHARDED))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6), got, stacked_result)
    assert got[0]["w"].sharding.spec[0] == "node"


def test_shapes_are_enough_to_shard_a_step() -> None:
    params, batch = problem()
    optimizer, mesh = gt_nsgdm(0.05, SHARDED), mesh_of(2, AxisType.Auto)
    abstract = jax.eval_shape(lambda: (params, optimizer.init(params), batch))
    step = make_train_step(loss_fn, optimizer, SHARDED)
    arguments = dict(zip(("params", "state", "batch"), abstract, strict=True))
    sharded = shard_train_step(step, mesh, SHARDED, **arguments)
    after = jax.eval_shape(sharded, *abstract, jax.random.key(0))
    assert jax.tree.map(jnp.shape, after[:2]) == jax.tree.map(jnp.shape, abstract[:2])
    assert after[2].shape == (N,)


def test_losses_and_gradients_are_each_node_s_own() -> None:
    params, batch = problem(3)
    key, nodes = jax.random.key(5), jnp.array([4, 0, 7])
    losses, grads = value_and_grad_per_node(loss_fn)(params, batch, key, nodes)
    for row, node in enumerate([4, 0, 7]):
        one = functools.partial(jax.tree.map, lambda x, row=row: x[row])
        loss, grad = jax.value_and_grad(loss_fn)(one(params), one(batch), jax.random.fold_in(key, node))
        np.testing.assert_allclose(losses[row], loss, rtol=1e-6)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), one(grads), grad)
    # Equal parameters and batches, other draws.
    same = jax.tree.map(lambda x: jnp.broadcast_to(x[0], x.shape), batch)
    assert len(set(value_and_grad_per_node(loss_fn)(params, same, key, nodes)[0].tolist())) == 3


def test_a_train_step_scans() -> None:
    params, batch = problem()
    optimizer = gt_nsgdm(0.05, STACKED)
    step = make_train_step(loss_fn, optimizer, STACKED)

    def body(carry, key):
        params, state, loss = step(*carry, batch, key)
        return (params, state), loss.mean()

    _, losses = jax.lax.scan(body, (params, optimizer.init(params)), jax.random.split(jax.random.key(0), 60))
    assert losses.shape == (60,)
    assert float(losses[-10:].mean()) < 0.8 * float(losses[:10].mean())


def test_replicate_then_average_is_the_identity() -> None:
    model = {"w": jnp.arange(6.0).reshape(2, 3), "b": 2.0, "half": jnp.ones(3, jnp.bfloat16)}
    nodes = replicate(model, 5)
    assert jax.tree.map(jnp.shape, nodes) == {"w": (5, 2, 3), "b": (5,), "half": (5, 3)}
    jax.tree.map(np.testing.assert_array_equal, node_mean(nodes), model)
    assert node_mean(nodes)["half"].dtype == jnp.bfloat16
    assert float(consensus_error(nodes)) == 0.0


def test_mean_and_disagreement_in_closed_form() -> None:
    # Node i is at (i, i, ..., i): the variance of 0..n-1 is (n^2 - 1) / 12, for each of 3 + 1 coordinates.
    tree = {"w": jnp.tile(jnp.arange(6.0)[:, None], 3), "b": jnp.arange(6.0)}
    assert float(consensus_error(tree)) == pytest.approx(np.sqrt(4 * 35 / 12), rel=1e-6)
    np.testing.assert_allclose(node_mean(tree)["w"], np.full(3, 2.5))
    # bfloat16 is averaged in float32: 256 + 1 is not a bfloat16.
    assert float(node_mean(jnp.array([256.0, 258.0, 257.0 + 1.0], jnp.bfloat16))) == 258.0
    half = jnp.array([0.0, 1.0], jnp.bfloat16)
    assert consensus_error(half).dtype == jnp.float32
    assert float(consensus_error(half)) == 0.5


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mean_and_disagreement_of_sharded_parameters(kind: AxisType) -> None:
    tree = {"w": jnp.float32(np.random.default_rng(0).normal(size=(N, 3)))}
    on_mesh = put_on_mesh(tree, mesh_of(4, kind), SHARDED)
    np.testing.assert_allclose(node_mean(on_mesh)["w"], node_mean(tree)["w"], rtol=1e-6)
    np.testing.assert_allclose(consensus_error(on_mesh), consensus_error(tree), rtol=1e-6)


def test_trees_are_placed_by_their_leading_size() -> None:
    tree = {
        "node": jnp.arange(16.0).reshape(N, 2),
        "other": np.arange(3.0),
        "count": 4,
        "key": jax.random.key(1),
        "none": None,
    }
    specs = node_partition_specs(tree, SHARDED)
    assert specs == {"node": NODE, "other": WHOLE, "count": WHOLE, "key": WHOLE, "none": None}
    mesh = mesh_of(4, AxisType.Auto)
    placed = put_on_mesh(tree, mesh, SHARDED)
    assert placed["node"].sharding == NamedSharding(mesh, NODE)
    assert [shard.data.shape for shard in placed["node"].addressable_shards] == [(2, 2)] * 4
    assert placed["other"].sharding.is_fully_replicated
    assert placed["key"] == tree["key"]
    for name in ("node", "other", "count"):
        np.testing.assert_array_equal(placed[name], tree[name])


@pytest.mark.parametrize(
    ("mixer", "axis", "devices", "message"),
    [
        (STACKED, "node", 8, "nodes stacked on one device; make it with axis_name="),
        (SHARDED, "worker", 8, r"the mesh has axes \('worker',\), not the mixer's axis 'node'"),
        (SHARDED, "node", 3, "8 nodes do not divide among the 3 devices of axis 'node'"),
    ],
)
def test_meshes_that_do_not_fit(mixer, axis: str, devices: int, message: str) -> None:
    params, batch = problem()
    optimizer = gt_nsgdm(0.1, mixer)
    mesh = jax.make_mesh((devices,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    step = make_train_step(loss_fn, optimizer, mixer)
    with pytest.raises(ValueError, match=message):
        shard_train_step(step, mesh, mixer, params=params, state=optimizer.init(params), batch=batch)


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("which", ["params", "batch"])
def test_leaves_without_the_nodes_are_named(which: str, size: int) -> None:
    """A leading size of 1 is a device's share of 8 nodes on 8 devices: all nodes would silently train on it."""
    trees = dict(zip(("params", "batch"), problem(), strict=True))
    optimizer = gt_nsgdm(0.1, SHARDED)
    state = optimizer.init(trees["params"])
    trees[which] = {"deep": [jnp.ones((size, 2))]}
    step = make_train_step(loss_fn, optimizer, SHARDED)
    with pytest.raises(ValueError, match=rf"axis of 8 nodes; {which}\['deep'\]\[0\] has shape \({size}, 2\)"):
        shard_train_step(step, mesh_of(8, AxisType.Auto), SHARDED, state=state, **trees)


def test_a_sharded_step_outside_the_mesh_says_what_to_do() -> None:
    params, batch = problem()
    optimizer = gt_nsgdm(0.1, SHARDED)
    step = make_train_step(loss_fn, optimizer, SHARDED)
    with pytest.raises(NameError, match=r"mesh axis 'node' is not bound: call inside jax\.shard_map"):
        step(params, optimizer.init(params), batch, jax.random.key(0))


@pytest.mark.parametrize("n_nodes", [0, -1])
def test_replicate_needs_a_node(n_nodes: int) -> None:
    with pytest.raises(ValueError, match=f"n_nodes must be at least 1, got {n_nodes}"):
        replicate(jnp.ones(2), n_nodes)


def test_a_batch_of_other_nodes_is_refused() -> None:
    params, batch = problem()
    optimizer = gt_nsgdm(0.1, STACKED)
    step = make_train_step(loss_fn, optimizer, STACKED)
    with pytest.raises(ValueError, match="inconsistent sizes"):
        step(params, optimizer.init(params), jax.tree.map(lambda x: x[:3], batch), jax.random.key(0))
