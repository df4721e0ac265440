"""Every mixer, on both backends and with any number of nodes a device, against ``W @ x`` in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlab.optim import (
    AllGatherMixer,
    CirculantMixer,
    DenseMixer,
    GraphMixer,
    MeanMixer,
    SequenceMixer,
    SparseMixer,
    dsgd,
    gossip,
    make_mixer,
    mixing,
    momentum_tracking,
    topology,
    track_gradients,
)
from jaxlab.optim.mixing.mixer import BUCKET_LIMIT

N = 24  # nodes: 1 device holds 24 of them, 2 hold 12, 4 hold 6, 8 hold 3
NODE = PartitionSpec("node")

_random = np.random.default_rng(0)


def _permutations(n: int, count: int) -> np.ndarray:
    """Doubly stochastic, neither symmetric nor circulant nor sparse by blocks (Birkhoff)."""
    return np.mean([np.eye(n)[_random.permutation(n)] for _ in range(count)] + [np.eye(n)], axis=0)


def graphs(n: int) -> dict[str, np.ndarray]:
    return {
        "ring": topology.ring(n),
        "wide ring": topology.ring(n, degree=3),
        "directed exponential": topology.directed_exponential(n),
        "complete": topology.complete(n),
        "star": topology.star(n),
        "path": topology.path(n),
        "torus": topology.torus(2, n // 2),
        "Erdos-Renyi": topology.erdos_renyi(jax.random.key(0), n, edge_probability=0.3),
        "directed, irregular": _permutations(n, 3),
        "lazy path": topology.lazy(topology.path(n), self_weight=0.7),
        # Most pairs of devices exchange nothing.
        "islands": np.kron(np.eye(n // 4), topology.ring(4)),
        "identity": np.eye(n),
        "one way": np.roll(np.eye(n), 5, axis=1),
        # Nodes of the first half of the devices hear nobody.
        "half asleep": np.block(
            [[np.eye(n // 2), np.zeros((n // 2, n // 2))], [np.zeros((n // 2, n // 2)), topology.star(n // 2)]]
        ),
    }


GRAPHS = graphs(N)
TREE = {
    "scalar": _random.normal(size=N).astype(np.float32),
    "nested": [_random.normal(size=(N, 2, 3)).astype(np.float32), (_random.normal(size=(N, 5)).astype(jnp.bfloat16),)],
    "empty": np.zeros((N, 0), np.float32),
    "none": None,
}


def matmul(matrix: np.ndarray, leaf: np.ndarray) -> np.ndarray:
    return np.tensordot(matrix, np.asarray(leaf, np.float64), axes=1)


def assert_mixed(mixed, matrix: np.ndarray, tree) -> None:
    def check(got, leaf) -> None:
        assert got.dtype == leaf.dtype
        # Sums of weights that add to 1, of numbers below 4: a few roundings of float32, one of bfloat16.
        tolerance = 4 * (2.0**-8 if leaf.dtype == jnp.bfloat16 else 2.0**-22)
        np.testing.assert_allclose(np.asarray(got, np.float64), matmul(matrix, leaf), rtol=0, atol=tolerance)

    assert jax.tree.structure(mixed) == jax.tree.structure(tree)
    jax.tree.map(check, mixed, tree)


def on_mesh(function, mesh, **options):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=NODE, out_specs=NODE, **options))


# ---------------------------------------------------------------------------------------------- same numbers as NumPy


@pytest.mark.parametrize("exchange", ["auto", "dense", "sparse"])
def test_stacked_mixers_multiply_with_the_matrix(exchange: str) -> None:
    mixers = {name: make_mixer(matrix, exchange=exchange, allow_disconnected=True) for name, matrix in GRAPHS.items()}
    mixed = jax.jit(lambda tree: {name: mixer.mix(tree) for name, mixer in mixers.items()})(TREE)
    for name, matrix in GRAPHS.items():
        assert_mixed(mixed[name], matrix, TREE)
        np.testing.assert_allclose(mixers[name].matrix, matrix, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("devices", "check_vma"), [(1, True), (4, False), (8, True)])
def test_sharded_mixers_multiply_with_the_matrix(devices: int, check_vma: bool, node_mesh) -> None:
    mixers = {
        (name, exchange): make_mixer(matrix, axis_name="node", exchange=exchange, allow_disconnected=True)
        for name, matrix in GRAPHS.items()
        for exchange in ("neighbours", "all_gather")
    }
    mixers |= {("complete", "auto"): make_mixer(GRAPHS["complete"], axis_name="node")}
    mixers |= {("ring", "by edges"): GraphMixer(GRAPHS["ring"], "node")}

    def all_of_them(tree):
        return {key: mixer.mix(tree) for key, mixer in mixers.items()}

    mixed = on_mesh(all_of_them, node_mesh(devices), check_vma=check_vma)(TREE)
    for (name, exchange), mixer in mixers.items():
        assert_mixed(mixed[name, exchange], GRAPHS[name], TREE)
        np.testing.assert_allclose(mixer.matrix, GRAPHS[name], rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_networks_of_a_few_nodes(n: int, node_mesh) -> None:
    leaf = np.arange(4.0 * n, dtype=np.float32).reshape(n, 4)
    for matrix in (topology.ring(n), topology.star(n), topology.directed_exponential(n, self_weight="lazy")):
        for exchange in ("auto", "dense", "sparse"):
            np.testing.assert_allclose(make_mixer(matrix, exchange=exchange).mix(leaf), matrix @ leaf, rtol=1e-6)
        for exchange in ("neighbours", "all_gather"):
            mixer = make_mixer(matrix, axis_name="node", exchange=exchange)
            np.testing.assert_allclose(on_mesh(mixer.mix, node_mesh(n))(leaf), matrix @ leaf, rtol=1e-6)


@pytest.mark.parametrize("name", ["ring", "Erdos-Renyi", "complete", "star"])
def test_float64_leaves_are_mixed_in_float64(name: str, node_mesh) -> None:
    matrix = GRAPHS[name]
    with jax.enable_x64(True):
        leaf = _random.normal(size=(N, 3))
        for exchange in ("auto", "dense", "sparse"):
            mixed = make_mixer(matrix, exchange=exchange).mix(leaf)
            assert mixed.dtype == jnp.float64
            np.testing.assert_allclose(mixed, matrix @ leaf, rtol=0, atol=1e-14)
        for exchange in ("auto", "neighbours", "all_gather"):
            mixer = make_mixer(matrix, axis_name="node", exchange=exchange)
            np.testing.assert_allclose(on_mesh(mixer.mix, node_mesh(4))(leaf), matrix @ leaf, rtol=0, atol=1e-14)


def test_complex_leaves_are_mixed() -> None:
    leaf = (_random.normal(size=N) + 1j * _random.normal(size=N)).astype(np.complex64)
    np.testing.assert_allclose(make_mixer(GRAPHS["ring"]).mix(leaf), GRAPHS["ring"] @ leaf, atol=1e-6)


def test_half_precision_is_accumulated_in_float32() -> None:
    # 1000 + 1 + ... + 1 rounds to 1000 at every addition in bfloat16 (spacing 4).
    leaf = jnp.ones((9, 1), jnp.bfloat16).at[0].set(1000.0)
    star = topology.complete(9)
    for exchange in ("auto", "dense", "sparse"):
        mixed = make_mixer(star, exchange=exchange).mix(leaf)
        np.testing.assert_array_equal(mixed, jnp.full((9, 1), 1008.0 / 9, jnp.bfloat16))


@pytest.mark.parametrize("devices", [2, 8])
def test_mean_is_exact_whatever_the_graph(devices: int, node_mesh) -> None:
    mean = np.broadcast_to(TREE["nested"][0].mean(0), (N, 2, 3))
    stacked = make_mixer(GRAPHS["path"])
    np.testing.assert_allclose(stacked.mean(TREE)["nested"][0], mean, atol=1e-6)
    for name in ("path", "ring", "complete"):
        mixer = make_mixer(GRAPHS[name], axis_name="node")
        means = on_mesh(mixer.mean, node_mesh(devices))(TREE)
        np.testing.assert_allclose(means["nested"][0], mean, atol=1e-6)
        assert means["nested"][1][0].dtype == jnp.bfloat16


def test_exchanges_keep_the_average_over_nodes(node_mesh) -> None:
    leaf = {"w": 100.0 + _random.normal(size=(N, 50)).astype(np.float32)}
    for name in ("directed, irregular", "star", "ring"):
        stacked = make_mixer(GRAPHS[name])
        sharded = make_mixer(GRAPHS[name], axis_name="node", exchange="neighbours")
        for mixed in (stacked.mix(leaf), on_mesh(sharded.mix, node_mesh(8))(leaf)):
            # Float32 weights: columns sum to 1 within 3e-8; and a rounding of 6e-8 a node, averaged over 24.
            means = [np.asarray(tree["w"], np.float64).mean(0) for tree in (mixed, leaf)]
            np.testing.assert_allclose(*means, rtol=1e-7)


# ------------------------------------------------------------------------------------------------- time-varying graphs


def one_peer_exponential(n: int) -> np.ndarray:
    """Exchange k averages pairs 2**k apart; with n = 2**p, p exchanges are the exact average."""
    rounds = (n - 1).bit_length()
    return np.stack([0.5 * (np.eye(n) + np.roll(np.eye(n), 2**k, axis=1)) for k in range(rounds)])


def test_a_sequence_of_graphs_is_gone_through_in_order_on_both_backends(node_mesh) -> None:
    sequence = np.stack([GRAPHS["star"], GRAPHS["directed exponential"], GRAPHS["islands"]])
    leaf = TREE["nested"][0]
    mixers = [make_mixer(sequence, exchange=exchange) for exchange in ("auto", "dense", "sparse")]
    for mixer in mixers:
        mix = jax.jit(lambda leaf, step, mixer=mixer: mixer.mix(leaf, step=step))
        for step in range(4):
            np.testing.assert_allclose(mix(leaf, step), matmul(sequence[step % 3], leaf), atol=1e-6)
        np.testing.assert_allclose(mixer.mix(leaf, step=4), matmul(sequence[1], leaf), atol=1e-6)
        np.testing.assert_allclose(mixer.mix(leaf), matmul(sequence[0], leaf), atol=1e-6)
    for exchange in ("auto", "neighbours", "all_gather"):
        mixer = make_mixer(sequence, axis_name="node", exchange=exchange)
        mix = jax.jit(
            jax.shard_map(
                lambda leaf, step, mixer=mixer: mixer.mix(leaf, step=step),
                mesh=node_mesh(4),
                in_specs=(NODE, PartitionSpec()),
                out_specs=NODE,
            )
        )
        for step in range(4):
            np.testing.assert_allclose(mix(leaf, step), matmul(sequence[step % 3], leaf), atol=1e-6)


def test_only_the_product_of_a_sequence_must_mix() -> None:
    sequence = one_peer_exponential(8)
    leaf = _random.normal(size=(8, 3)).astype(np.float32)
    for mixer in (make_mixer(sequence), make_mixer(sequence, exchange="sparse")):
        mixed = leaf
        for step in range(3):
            mixed = mixer.mix(mixed, step=step)
        np.testing.assert_allclose(mixed, np.broadcast_to(leaf.mean(0), (8, 3)), atol=1e-6)
        assert mixer.rho == pytest.approx(0.0, abs=1e-4)  # the cube root of a rounding error
    with pytest.raises(ValueError, match="must be primitive"):
        make_mixer(sequence[1:])  # the even and the odd nodes never meet
    assert make_mixer(sequence[1:], allow_disconnected=True).rho == pytest.approx(1.0)
    with pytest.raises(ValueError, match="columns must sum to 1; column 0 sums to"):
        make_mixer(np.stack([topology.complete(2), [[0.5, 0.5], [1.0, 0.0]]]))


def test_rho_is_the_same_for_every_exchange() -> None:
    sequence = np.stack([GRAPHS["star"], GRAPHS["directed, irregular"], GRAPHS["path"]])
    backwards = topology.spectral_norm(sequence[0] @ sequence[1] @ sequence[2])
    expected = topology.spectral_norm(sequence[2] @ sequence[1] @ sequence[0]) ** (1 / 3)
    assert abs(expected - backwards ** (1 / 3)) > 1e-4
    for axis_name, exchanges in ((None, ("auto", "dense", "sparse")), ("node", ("auto", "neighbours", "all_gather"))):
        for exchange in exchanges:
            assert make_mixer(sequence, axis_name=axis_name, exchange=exchange).rho == pytest.approx(expected)
            for name in ("ring", "path", "complete"):
                mixer = make_mixer(GRAPHS[name], axis_name=axis_name, exchange=exchange)
                assert mixer.rho == pytest.approx(topology.spectral_norm(GRAPHS[name]), abs=1e-12)


def test_a_matrix_may_be_drawn_inside_the_compiled_function(node_mesh) -> None:
    leaf = TREE["nested"][0]

    def mix_with(mixer_class, axis_name, matrix, leaf):
        return mixer_class(matrix, axis_name).mix(leaf)

    stacked = jax.jit(functools.partial(mix_with, DenseMixer, None))
    sharded = jax.jit(
        jax.shard_map(
            functools.partial(mix_with, AllGatherMixer, "node"),
            mesh=node_mesh(4),
            in_specs=(PartitionSpec(), NODE),
            out_specs=NODE,
        )
    )
    for name in ("ring", "directed, irregular"):
        matrix = GRAPHS[name].astype(np.float32)
        np.testing.assert_allclose(stacked(matrix, leaf), matmul(matrix, leaf), atol=1e-6)
        np.testing.assert_allclose(sharded(matrix, leaf), matmul(matrix, leaf), atol=1e-6)
    with pytest.raises(TypeError, match="traced is not known"):
        jax.jit(lambda matrix: DenseMixer(matrix).rho)(jnp.eye(3))


@pytest.mark.parametrize(
    "make", [gossip, track_gradients, functools.partial(momentum_tracking, 0.0), lambda m: dsgd(1.0, m)]
)
def test_mixing_argument_replaces_the_graph_for_one_step(make) -> None:
    optimizer = make(make_mixer(topology.ring(5)))
    params = {"w": jnp.arange(10.0).reshape(5, 2)}
    grads = {"w": jnp.ones((5, 2)).at[0].set(-3.0)}
    state = optimizer.init(params)
    replaced, _ = optimizer.update(grads, state, params, mixing=make_mixer(topology.complete(5)))
    expected, _ = make(make_mixer(topology.complete(5))).update(grads, state, params)
    own, _ = optimizer.update(grads, state, params)
    np.testing.assert_allclose(replaced["w"], expected["w"], rtol=1e-6)
    assert float(jnp.abs(own["w"] - expected["w"]).max()) > 0.1


# ----------------------------------------------------------------------------------------------- what the devices send


def collectives(mixer, devices: int, node_mesh, tree) -> dict[str, int]:
    jaxpr = str(jax.make_jaxpr(jax.shard_map(mixer.mix, mesh=node_mesh(devices), in_specs=NODE, out_specs=NODE))(tree))
    return {name: jaxpr.count(name + "[") for name in ("ppermute", "all_gather", "psum_invariant")}


@pytest.mark.parametrize(
    ("name", "devices", "rounds"),
    [
        ("ring", 8, 2),  # one boundary row each way, however many nodes a device holds
        ("ring", 2, 2),
        ("ring", 1, 0),
        ("wide ring", 8, 6),  # offsets up to 3 = the nodes of a device: whole blocks for +-3, boundaries else
        ("wide ring", 4, 6),
        ("path", 8, 2),
        ("star", 8, 7),
        ("islands", 4, 1),  # two pairs of devices share an island, and swap at the same time
        ("identity", 8, 0),
        ("one way", 8, 2),  # offset 5 = one device of 3 nodes and 2 more: rows from two devices
        ("half asleep", 8, 3),
    ],
)
def test_neighbours_talk_in_the_expected_number_of_rounds(name: str, devices: int, rounds: int, node_mesh) -> None:
    mixer = make_mixer(GRAPHS[name], axis_name="node", exchange="neighbours", allow_disconnected=True)
    used = collectives(mixer, devices, node_mesh, jnp.zeros((N, 3)))
    assert used == {"ppermute": rounds, "all_gather": 0, "psum_invariant": 0}


@pytest.mark.parametrize(
    ("matrix", "degree"),
    [
        (topology.ring(8), 2),
        (topology.directed_exponential(8), 3),
        (topology.hypercube(3), 3),
        (topology.star(8), 7),
        (topology.path(8), 2),
    ],
)
def test_one_node_a_device_needs_as_many_rounds_as_the_largest_degree(matrix, degree: int, node_mesh) -> None:
    mixer = make_mixer(matrix, axis_name="node", exchange="neighbours")
    assert collectives(mixer, 8, node_mesh, jnp.zeros((8, 3)))["ppermute"] == degree


def test_the_compiled_program_holds_these_collectives(node_mesh) -> None:
    def compiled(matrix, exchange):
        mixer = make_mixer(matrix, axis_name="node", exchange=exchange)
        return on_mesh(mixer.mix, node_mesh(8)).lower(jnp.zeros((8, 3))).compile().as_text()

    neighbours = compiled(topology.ring(8), "neighbours")
    assert neighbours.count("= f32[1,3]{1,0} collective-permute(") == 2
    assert "all-gather" not in neighbours
    gathered = compiled(topology.ring(8), "all_gather")
    assert gathered.count(" all-gather(") == 1
    assert "collective-permute" not in gathered
    assert compiled(topology.complete(8), "auto").count(" all-reduce(") == 1


def test_a_ring_sends_boundary_rows_only(node_mesh) -> None:
    mixer = make_mixer(topology.ring(N), axis_name="node")
    program = on_mesh(mixer.mix, node_mesh(4)).lower(jnp.zeros((N, 7))).compile().as_text()
    assert program.count("= f32[1,7]{1,0} collective-permute(") == 2
    assert program.count(" collective-permute(") == 2


@pytest.mark.parametrize("exchange", ["neighbours", "all_gather"])
def test_small_leaves_of_one_dtype_travel_together_and_large_ones_alone(exchange: str, node_mesh) -> None:
    limit = BUCKET_LIMIT
    sizes = {"small": limit - 1, "other": 7, "at the limit": limit, "large": limit + 1}
    tree = {name: _random.normal(size=(8, size)).astype(np.float32) for name, size in sizes.items()}
    tree |= {"scalar": np.arange(8.0, dtype=np.float32), "half": np.ones((8, 3), jnp.bfloat16)}
    matrix = topology.ring(8)
    mixer = make_mixer(matrix, axis_name="node", exchange=exchange)
    assert_mixed(on_mesh(mixer.mix, node_mesh(8))(tree), matrix, tree)
    # Two leaves by themselves, one buffer of float32, one of bfloat16.
    kind, each = ("ppermute", 2) if exchange == "neighbours" else ("all_gather", 1)
    assert collectives(mixer, 8, node_mesh, tree)[kind] == 4 * each


# -------------------------------------------------------------------------------------------------- transforms of jax


@pytest.mark.parametrize("name", ["complete", "ring", "path", "star"])
def test_vmap_over_seeds(name: str, node_mesh) -> None:
    seeds = _random.normal(size=(3, N, 2)).astype(np.float32)
    expected = np.stack([matmul(GRAPHS[name], leaf) for leaf in seeds])
    np.testing.assert_allclose(jax.vmap(make_mixer(GRAPHS[name]).mix)(seeds), expected, atol=1e-6)
    mixer = make_mixer(GRAPHS[name], axis_name="node")
    inside = jax.shard_map(
        jax.vmap(mixer.mix),
        mesh=node_mesh(4),
        in_specs=PartitionSpec(None, "node"),
        out_specs=PartitionSpec(None, "node"),
    )
    np.testing.assert_allclose(jax.jit(inside)(seeds), expected, atol=1e-6)


def test_gradients_flow_back_through_the_transposed_graph(node_mesh) -> None:
    matrix, leaf = GRAPHS["directed, irregular"], TREE["nested"][0]
    weights = _random.normal(size=leaf.shape).astype(np.float32)
    stacked, sharded = make_mixer(matrix), make_mixer(matrix, axis_name="node", exchange="neighbours")
    mix_on_mesh = jax.shard_map(sharded.mix, mesh=node_mesh(4), in_specs=NODE, out_specs=NODE)
    for mix in (stacked.mix, mix_on_mesh):
        grad = jax.jit(jax.grad(lambda leaf, mix=mix: (weights * mix(leaf)).sum()))(leaf)
        np.testing.assert_allclose(grad, matmul(matrix.T, weights), atol=1e-5)


def test_trees_without_leaves_pass() -> None:
    mixer = make_mixer(topology.ring(3))
    assert mixer.mix({}) == {}
    assert mixer.mix(None) is None
    assert mixer.mean([]) == []


# ------------------------------------------------------------------------------------------------- choice and refusals


@pytest.mark.parametrize(
    ("matrix", "axis_name", "exchange", "expected"),
    [
        (topology.complete(6), None, "auto", MeanMixer),
        (topology.complete(6), None, "dense", DenseMixer),
        (topology.ring(6), None, "auto", DenseMixer),
        (topology.ring(80), None, "auto", SparseMixer),
        (topology.star(80), None, "auto", DenseMixer),
        (topology.ring(6), None, "sparse", SparseMixer),
        (topology.complete(6), "node", "auto", MeanMixer),
        (topology.complete(6), "node", "neighbours", CirculantMixer),
        (topology.ring(6), "node", "auto", CirculantMixer),
        (topology.directed_exponential(12), "node", "auto", CirculantMixer),
        (topology.path(6), "node", "auto", GraphMixer),
        (topology.star(6), "node", "auto", AllGatherMixer),
        (topology.star(6), "node", "neighbours", GraphMixer),
        (topology.ring(6), "node", "all_gather", AllGatherMixer),
        (np.stack([topology.ring(6), topology.star(6)]), None, "auto", DenseMixer),
        (np.stack([topology.ring(6), topology.star(6)]), None, "sparse", SequenceMixer),
        (np.stack([topology.ring(6), topology.star(6)]), "node", "auto", SequenceMixer),
        (np.stack([topology.ring(6), topology.star(6)]), "node", "all_gather", AllGatherMixer),
    ],
)
def test_the_cheapest_exchange_is_chosen(matrix, axis_name, exchange, expected) -> None:
    mixer = make_mixer(matrix, axis_name=axis_name, exchange=exchange)
    assert type(mixer) is expected
    assert (mixer.n_nodes, mixer.axis_name) == (matrix.shape[-1], axis_name)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "neighbours"}, "stacked backend must be one of .'auto', 'dense', 'sparse'., got 'neighbours'"),
        ({"exchange": "dense", "axis_name": "node"}, "sharded backend must be one of .*'all_gather'.*got 'dense'"),
        ({"exchange": "fast"}, "got 'fast'"),
    ],
)
def test_bad_exchange(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_mixer(topology.ring(4), **options)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.eye(3), "must be primitive"),
        ([[0.5, 0.5], [0.4, 0.5]], "row 1 sums to 0.9"),
        (np.ones(3), r"square matrix.*\(3,\)"),
        (np.zeros((0, 3, 3)), r"square matrix.*\(0, 3, 3\)"),
        (np.zeros((2, 3, 4)), r"square matrix.*\(3, 4\)"),
    ],
)
def test_bad_matrices(matrix, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_mixer(matrix)


@pytest.mark.parametrize("call", ["mix", "mean"])
@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        (
            {"a": np.ones((4, 2)), "b": {"c": np.ones((3, 2))}},
            ValueError,
            r"axis of 4 nodes; \['b'\]\['c'\] has shape \(3, 2\)",
        ),
        ({"a": [np.float32(1.0)]}, ValueError, r"axis of 4 nodes; \['a'\]\[0\] has shape \(\)"),
        (np.ones(5), ValueError, r"axis of 4 nodes; the tree has shape \(5,\)"),
        ({"a": np.ones((4, 2), np.int32)}, TypeError, r"only floating leaves can be averaged; \['a'\] has dtype int32"),
        ({"a": np.ones((4, 2), bool)}, TypeError, r"\['a'\] has dtype bool"),
    ],
)
def test_leaves_that_cannot_be_mixed_are_named(call: str, tree, error, message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(make_mixer(topology.ring(4)), call)(tree)


def test_a_wrong_number_of_nodes_on_a_mesh_is_named(node_mesh) -> None:
    mixer = make_mixer(topology.ring(16), axis_name="node")
    message = r"16 nodes over 4 devices of axis 'node'; \['w'\] has shape \(2, 3\) on a device"
    with pytest.raises(ValueError, match=message):
        on_mesh(mixer.mix, node_mesh(4))({"w": jnp.ones((8, 3))})


@pytest.mark.parametrize("name", ["ring", "path", "star", "complete"])
def test_outside_the_mesh_axis_the_error_says_what_to_do(name: str) -> None:
    mixer = make_mixer(GRAPHS[name], axis_name="node")
    for call in (mixer.mix, mixer.mean, lambda _: mixing.local_nodes(3, "node")):
        with pytest.raises(NameError, match=r"mesh axis 'node' is not bound: call inside jax\.shard_map"):
            call(jnp.ones((N, 2)))


def test_a_sequence_needs_members_of_one_network() -> None:
    with pytest.raises(ValueError, match="at least one mixer, got none"):
        SequenceMixer(())
    with pytest.raises(ValueError, match="must share nodes and mesh axis"):
        SequenceMixer((make_mixer(topology.ring(4)), make_mixer(topology.ring(5))))


def test_local_nodes_count_through_the_network(node_mesh) -> None:
    assert mixing.local_nodes(4, None).tolist() == [0, 1, 2, 3]
    nodes = on_mesh(lambda x: mixing.local_nodes(x.shape[0], "node"), node_mesh(4))(jnp.zeros(12))
    assert nodes.tolist() == list(range(12))
