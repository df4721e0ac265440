"""Alignment, neighbour graphs, Chebyshev layers and pooling: by hand, dense, torch_geometric, symmetries, bad input."""

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from jaxlab.dynamics.molecules import (
    adaptive_pool_matrix,
    align,
    chebyshev_convolution,
    graph_laplacian,
    init_chebyshev,
    nearest_neighbors,
    neighbor_laplacian,
    residue_pool_matrix,
    root_mean_square_deviation,
    to_jraph,
)


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, 12, 3)).astype(np.float32) * 3


def dense_laplacian(neighbors: np.ndarray) -> np.ndarray:
    """``-D^{-1/2} A D^{-1/2}`` with out-degrees, one matrix of one frame, row i receiving from column j."""
    atoms = len(neighbors)
    adjacency = np.zeros((atoms, atoms))
    for i, senders in enumerate(neighbors):
        adjacency[i, senders] = 1
    degree = adjacency.sum(0)
    scale = np.array([d**-0.5 if d else 0.0 for d in degree])
    return -scale[:, None] * adjacency * scale[None, :]


def dense_chebyshev(params: dict, x: np.ndarray, laplacian: np.ndarray) -> np.ndarray:
    terms = [x, laplacian @ x]
    while len(terms) < len(params["kernel"]):
        terms.append(2 * laplacian @ terms[-1] - terms[-2])
    return sum(t @ w for t, w in zip(terms, np.asarray(params["kernel"]), strict=False)) + np.asarray(params["bias"])


@pytest.mark.usefixtures("float64")
def test_a_rotation_is_undone_and_never_a_reflection():
    rng = np.random.default_rng(1)
    reference = rng.normal(size=(10, 3))
    turns = Rotation.random(4, random_state=2).as_matrix()
    moved = np.einsum("fij,aj->fai", turns, reference) + rng.normal(size=(4, 1, 3))
    np.testing.assert_allclose(align(moved, reference), np.broadcast_to(reference, moved.shape), atol=1e-6)
    mirrored = np.asarray(align(reference * [1, 1, -1], reference))
    assert np.sign(np.linalg.det(mirrored[:3] - mirrored[3])) == -np.sign(np.linalg.det(reference[:3] - reference[3]))
    assert float(root_mean_square_deviation(mirrored, reference)) > 0.3


@pytest.mark.usefixtures("float64")
def test_superposition_is_that_of_scipy():
    rng = np.random.default_rng(3)
    x, reference = rng.normal(size=(2, 8, 3))
    rotation, _ = Rotation.align_vectors(reference - reference.mean(0), x - x.mean(0))
    expected = rotation.apply(x - x.mean(0)) + reference.mean(0)
    np.testing.assert_allclose(align(x, reference), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 4, 3)), r"must hold the same atoms, got \(4, 3\) and \(5, 3\)"),
        (np.full((2, 5, 3), np.nan), "coordinates must be finite; 30 of its values"),
    ],
)
def test_frames_that_cannot_be_aligned_are_refused(x, message):
    with pytest.raises(ValueError, match=message):
        align(x, np.ones((5, 3)))


def test_neighbours_are_those_of_a_tree(frames):
    found = np.asarray(nearest_neighbors(frames, 4))
    for frame, neighbors in zip(frames, found, strict=True):
        expected = cKDTree(frame).query(frame, 5)[1][:, 1:]
        np.testing.assert_array_equal(neighbors, expected)


def test_coinciding_atoms_are_each_others_neighbours():
    x = np.zeros((4, 3))
    x[3] = 1
    found = np.asarray(nearest_neighbors(x, 2))
    assert found.tolist() == [[1, 2], [0, 2], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("atoms", "k", "message"),
    [
        (4, 4, "4 neighbours of each atom need at least 5 atoms and k >= 1, got 4"),
        (4, 0, "at least 2 atoms and k >= 1"),
    ],
)
def test_too_few_atoms_are_refused(atoms, k, message):
    with pytest.raises(ValueError, match=message):
        nearest_neighbors(np.zeros((2, atoms, 3)), k)


def test_two_nodes_by_hand():
    """``Lh = [[0, -1], [-1, 0]]``, so that ``y = x W0 - swapped(x) W1``."""
    laplacian = neighbor_laplacian(nearest_neighbors(np.array([[0.0, 0, 0], [1, 0, 0]]), 1))
    params = {"kernel": jnp.array([[[2.0]], [[3.0]]]), "bias": jnp.array([0.5])}
    x = jnp.array([[1.0], [10.0]])
    np.testing.assert_allclose(chebyshev_convolution(params, x, laplacian), [[2 - 30 + 0.5], [20 - 3 + 0.5]])


def test_order_one_is_a_linear_layer(frames):
    params = init_chebyshev(jax.random.key(0), 3, 5, order=1)

    def never(x):
        raise AssertionError("order one has no neighbours")

    found = chebyshev_convolution(params, jnp.asarray(frames), never)
    np.testing.assert_allclose(found, frames @ np.asarray(params["kernel"][0]), atol=1e-6)


@pytest.mark.usefixtures("float64")
def test_layer_is_that_of_dense_matrices_and_of_jraph(frames):
    x = frames.astype(np.float64)
    neighbors = nearest_neighbors(x, 4)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), init_chebyshev(jax.random.key(1), 3, 6))
    found = np.asarray(chebyshev_convolution(params, jnp.asarray(x), neighbor_laplacian(neighbors)))
    for k in range(len(x)):
        dense = dense_laplacian(np.asarray(neighbors[k]))
        assert np.abs(np.linalg.eigvals(dense)).max() <= 1 + 1e-9
        np.testing.assert_allclose(found[k], dense_chebyshev(params, x[k], dense), atol=1e-6)
    graph = to_jraph(x, neighbors)
    assert isinstance(graph, jraph.GraphsTuple)
    flat = chebyshev_convolution(params, graph.nodes, graph_laplacian(graph))
    np.testing.assert_allclose(flat.reshape(found.shape), found, atol=1e-9)
    parts = jraph.batch([to_jraph(x[k : k + 1], neighbors[k : k + 1]) for k in range(len(x))])
    np.testing.assert_array_equal(parts.senders, graph.senders)
    np.testing.assert_array_equal(parts.receivers, graph.receivers)


def test_layer_is_that_of_torch_geometric(frames):
    torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
    peer = pytest.importorskip("torch_geometric.nn", reason="needs torch_geometric, which no extra installs")
    params = init_chebyshev(jax.random.key(2), 3, 6)
    neighbors = nearest_neighbors(frames, 4)
    graph = to_jraph(frames, neighbors)
    layer = peer.ChebConv(3, 6, K=4)
    with torch.no_grad():
        for linear, kernel in zip(layer.lins, np.array(params["kernel"]), strict=True):
            linear.weight.copy_(torch.tensor(kernel.T))
        layer.bias.copy_(torch.tensor(np.array(params["bias"])))
        edges = torch.tensor(np.stack([np.array(graph.senders), np.array(graph.receivers)]).astype(np.int64))
        expected = layer(torch.tensor(np.array(graph.nodes)), edges, lambda_max=torch.tensor(2.0)).numpy()
    found = chebyshev_convolution(params, graph.nodes, graph_laplacian(graph))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_atom_that_is_nobodys_neighbour_counts_zero():
    x = np.array([[0.0, 0, 0], [1, 0, 0], [50, 0, 0]])
    dense = dense_laplacian(np.asarray(nearest_neighbors(x, 1)))
    found = neighbor_laplacian(nearest_neighbors(x, 1))(jnp.eye(3))
    np.testing.assert_allclose(found, dense, atol=1e-6)
    assert not np.any(found[2])


def test_pooling_takes_the_bins_of_torch():
    matrix = adaptive_pool_matrix(10, 4)
    assert [np.flatnonzero(row).tolist() for row in matrix] == [[0, 1, 2], [2, 3, 4], [5, 6, 7], [7, 8, 9]]
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-6)
    np.testing.assert_array_equal(adaptive_pool_matrix(7, 7), np.eye(7))
    torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
    embedding = np.random.default_rng(0).normal(size=(11, 8)).astype(np.float32)
    expected = torch.nn.AdaptiveAvgPool2d((5, 3))(torch.tensor(embedding)[None]).numpy()[0]
    found = adaptive_pool_matrix(11, 5) @ embedding @ adaptive_pool_matrix(8, 3).T
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_more_bins_than_places_repeat_with_a_warning():
    with pytest.warns(UserWarning, match="pooling 2 places to 4: bins repeat"):
        matrix = adaptive_pool_matrix(2, 4)
    np.testing.assert_allclose(matrix.sum(1), 1)
    with pytest.raises(ValueError, match="at least one place on both sides, got 3 to 0"):
        adaptive_pool_matrix(3, 0)


def test_residues_are_pooled_apart():
    matrix = residue_pool_matrix([5, 5, 5, 5, 2, 2], 2)
    expected = [[0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]
    np.testing.assert_allclose(matrix, expected)
    with pytest.raises(TypeError, match="residues must be integers, got float64"):
        residue_pool_matrix(np.array([0.5]), 1)
    with pytest.raises(ValueError, match=r"one integer an atom, got shape \(0,\)"):
        residue_pool_matrix([], 1)
    apart = residue_pool_matrix([5, 2, 5], 1)  # atoms of a residue need not follow one another
    np.testing.assert_allclose(apart, [[0.5, 0, 0.5], [0, 1, 0]])
