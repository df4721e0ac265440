"""Graphs and mixing matrices: closed forms, invariants over all sizes, and every refusal."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlab.optim import topology

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
RULES = ("metropolis", "max_degree", "laplacian")

# One line a builder: any size n >= 1, any rule (where it takes one).
BUILDERS = {
    "ring": lambda n, rule: topology.ring(n, rule=rule),
    "wide ring": lambda n, rule: topology.ring(n, degree=3, rule=rule),
    "path": lambda n, rule: topology.path(n, rule=rule),
    "star": lambda n, rule: topology.star(n, rule=rule),
    "complete": lambda n, rule: topology.complete(n),
    "torus": lambda n, rule: topology.torus(n, 3, rule=rule),
    "thin torus": lambda n, rule: topology.torus(2, n, rule=rule),
    "hypercube": lambda n, rule: topology.hypercube(n % 6, rule=rule),
    "directed exponential": lambda n, rule: topology.directed_exponential(n),
    "lazy directed exponential": lambda n, rule: topology.directed_exponential(n, self_weight="lazy"),
    "undirected exponential": lambda n, rule: topology.undirected_exponential(n, rule=rule),
    "Erdos-Renyi": lambda n, rule: topology.erdos_renyi(
        jax.random.key(n), n, edge_probability=min(1.0, 0.3 + 2.0 / n), rule=rule
    ),
}


def assert_mixing_matrix(matrix: np.ndarray) -> None:
    """Nonnegative, sums of one to 1e-12 (a few hundred roundings of 1e-16), contracts disagreement."""
    assert matrix.dtype == np.float64
    assert (matrix >= -1e-15).all()
    np.testing.assert_allclose(matrix.sum(0), 1.0, rtol=0, atol=1e-12)
    np.testing.assert_allclose(matrix.sum(1), 1.0, rtol=0, atol=1e-12)
    assert topology.spectral_norm(matrix) < 1.0 - 1e-9
    np.testing.assert_array_equal(topology.validate_mixing(matrix), matrix)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_mixes_at_small_sizes(name: str, n: int, rule: str) -> None:
    assert_mixing_matrix(BUILDERS[name](n, rule))


@given(name=st.sampled_from(sorted(BUILDERS)), n=st.integers(6, 48), rule=st.sampled_from(RULES))
@SETTINGS
def test_every_builder_mixes_at_any_size(name: str, n: int, rule: str) -> None:
    assert_mixing_matrix(BUILDERS[name](n, rule))


@given(
    n=st.integers(1, 12),
    edges=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=40),
    rule=st.sampled_from(RULES),
)
@SETTINGS
def test_any_undirected_graph_gets_symmetric_doubly_stochastic_weights(n, edges, rule) -> None:
    adjacency = np.zeros((n, n))
    for i, j in edges:
        adjacency[i % n, j % n] = adjacency[j % n, i % n] = 2.5  # any nonzero value is an edge
    matrix = topology.from_adjacency(adjacency, rule=rule)
    off_diagonal = ~np.eye(n, dtype=bool)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal((matrix != 0)[off_diagonal], (adjacency != 0)[off_diagonal])
    np.testing.assert_allclose(matrix.sum(1), 1.0, rtol=0, atol=1e-12)
    assert (np.diag(matrix) > 0).all() or rule == "laplacian"
    topology.validate_mixing(matrix, allow_disconnected=True)


@pytest.mark.parametrize(
    ("matrix", "rho", "digits"),
    [
        # Values quoted by the paper and its published scripts, to the digits given there.
        (topology.ring(20, degree=2), 0.9040, 4),
        (topology.ring(20), 0.9674, 4),
        (topology.ring(20, degree=5), 0.5740, 4),
        (topology.ring(8), 0.8047, 4),
        (topology.directed_exponential(8), 0.5, 12),
        (topology.directed_exponential(20), 0.6667, 4),
        (topology.directed_exponential(8, self_weight="lazy"), 0.6, 12),
        (topology.complete(7), 0.0, 12),
        # Closed forms from the eigenvalues of the graphs' Laplacians.
        (topology.ring(8), 1 / 3 + 2 / 3 * np.cos(np.pi / 4), 12),
        (topology.hypercube(3), 1 - 2 / 4, 12),
        (topology.hypercube(5), 1 - 2 / 6, 12),
        (topology.torus(4, 4), 1 - 2 / 5, 12),
        (topology.torus(5, 7), 1 / 5 * (3 + 2 * np.cos(2 * np.pi / 7)), 12),
        (topology.star(9), 1 - 1 / 9, 12),
        (topology.path(6), 1 / 3 + 2 / 3 * np.cos(np.pi / 6), 12),
        (topology.star(9, rule="laplacian"), 1 - 1 / 9, 12),
        (topology.ring(10, rule="laplacian"), 1 - (2 - 2 * np.cos(2 * np.pi / 10)) / 10, 12),
    ],
)
def test_spectral_norm_of_known_graphs(matrix: np.ndarray, rho: float, digits: int) -> None:
    assert topology.spectral_norm(matrix) == pytest.approx(rho, abs=0.51 * 10.0**-digits)
    assert topology.spectral_gap(matrix) == pytest.approx(1.0 - rho, abs=0.51 * 10.0**-digits)


@given(matrix=st.sampled_from([topology.ring(9), topology.directed_exponential(11), topology.star(5)]))
@SETTINGS
def test_spectral_norm_is_the_second_singular_value(matrix: np.ndarray) -> None:
    assert topology.spectral_norm(matrix) == pytest.approx(np.linalg.svd(matrix)[1][1], abs=1e-12)


@pytest.mark.parametrize(
    ("matrix", "degrees"),
    [
        (topology.torus(4, 5), [4] * 20),
        (topology.torus(2, 5), [3] * 10),
        (topology.torus(1, 5), [2] * 5),
        (topology.torus(2, 2), [2] * 4),
        (topology.torus(1, 1), [0]),
        (topology.hypercube(0), [0]),
        (topology.hypercube(4), [4] * 16),
        (topology.star(6), [5, 1, 1, 1, 1, 1]),
        (topology.path(4), [1, 2, 2, 1]),
        (topology.ring(9, degree=3), [6] * 9),
        (topology.ring(4, degree=9), [3] * 4),
        (topology.ring(2), [1, 1]),
        (topology.directed_exponential(20), [5] * 20),
        (topology.directed_exponential(17), [5] * 17),
        (topology.directed_exponential(16), [4] * 16),
        (topology.undirected_exponential(8), [5] * 8),
    ],
)
def test_degrees(matrix: np.ndarray, degrees: list[int]) -> None:
    edges = (matrix != 0) & ~np.eye(len(matrix), dtype=bool)
    assert edges.sum(1).tolist() == degrees
    assert edges.sum(0).tolist() == degrees


def test_neighbours_are_the_documented_ones() -> None:
    torus, cube = topology.torus(3, 4), topology.hypercube(3)
    assert np.flatnonzero(torus[0 * 4 + 0]).tolist() == [0, 1, 3, 4, 8]
    assert np.flatnonzero(cube[0b101]).tolist() == [0b001, 0b100, 0b101, 0b111]
    # Node i sends to i + 1, i + 2 and i + 4: column i holds its receivers.
    assert np.flatnonzero(topology.directed_exponential(8)[:, 1]).tolist() == [1, 2, 3, 5]
    ring = topology.ring(20, degree=2)
    np.testing.assert_allclose(ring[ring != 0], 0.2, rtol=0, atol=1e-15)


def test_weights_of_each_rule() -> None:
    star = np.zeros((4, 4))
    star[0, 1:] = star[1:, 0] = 1
    path = np.eye(3, k=1) + np.eye(3, k=-1)
    assert topology.from_adjacency(star, rule="metropolis")[1].tolist() == [0.25, 0.75, 0.0, 0.0]
    third = 1 / 3
    np.testing.assert_allclose(
        topology.from_adjacency(path, rule="max_degree"),
        [[2 * third, third, 0], [third, third, third], [0, third, 2 * third]],
        atol=1e-15,
    )
    laplacian = np.diag(star.sum(1)) - star
    np.testing.assert_allclose(topology.from_adjacency(star, rule="laplacian"), np.eye(4) - laplacian / 4, atol=1e-15)


@given(n=st.integers(2, 30))
@SETTINGS
def test_laplacian_weights_keep_their_bound_on_the_worst_graph(n: int) -> None:
    # The path has the smallest algebraic connectivity, 2 - 2 cos(pi / n) >= 4 / n**2 (cos x <= 1 - 2 x^2 / pi^2).
    assert topology.spectral_norm(topology.path(n, rule="laplacian")) <= 1 - 4 / n**3 + 1e-12


def test_erdos_renyi_is_the_key_s_and_connected() -> None:
    def draw(seed, **options):
        return topology.erdos_renyi(jax.random.key(seed), 12, **options)

    sparse = [draw(seed, edge_probability=0.2) for seed in range(8)]  # most single draws are not connected
    np.testing.assert_array_equal(sparse[3], draw(3, edge_probability=0.2))
    assert any((sparse[0] != other).any() for other in sparse[1:])
    for matrix in sparse:
        assert_mixing_matrix(matrix)
    np.testing.assert_allclose(draw(0, edge_probability=1.0), topology.complete(12), atol=1e-15)


def test_erdos_renyi_edges_have_the_probability() -> None:
    n, probability = 60, 0.5
    edges = (topology.erdos_renyi(jax.random.key(0), n, edge_probability=probability) != 0).sum() - n
    pairs = n * (n - 1) / 2
    # Five standard deviations of a binomial count.
    assert abs(edges / 2 - pairs * probability) < 5 * np.sqrt(pairs * probability * (1 - probability))


def test_lazy() -> None:
    swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    np.testing.assert_array_equal(topology.lazy(swap), [[0.5, 0.5], [0.5, 0.5]])
    np.testing.assert_array_equal(topology.lazy(swap, self_weight=0.25), [[0.25, 0.75], [0.75, 0.25]])
    np.testing.assert_array_equal(topology.lazy(topology.ring(5), self_weight=0.0), topology.ring(5))
    assert np.linalg.eigvalsh(topology.lazy(topology.ring(8))).min() >= -1e-12


def test_validate_accepts_single_precision_and_the_identity_when_asked() -> None:
    matrix = topology.ring(7).astype(np.float32)
    assert topology.validate_mixing(matrix).dtype == np.float64
    np.testing.assert_array_equal(topology.validate_mixing(np.eye(3), allow_disconnected=True), np.eye(3))
    assert topology.validate_mixing([[1]]).tolist() == [[1.0]]


@pytest.mark.parametrize("n", [20, 21, 45])
def test_validate_forgives_a_diagonal_of_minus_one_rounding(n: int) -> None:
    neighbours = np.ones((n + 1, n + 1)) - np.eye(n + 1)
    matrix = neighbours / n + np.diag(1.0 - (neighbours / n).sum(1))
    assert -1e-15 < matrix.min() < 0.0
    topology.validate_mixing(matrix)


NOT_MIXING = {
    "not square": (np.ones((2, 3)) / 3, r"square matrix.*\(2, 3\)"),
    "a vector": (np.ones(3), r"square matrix.*\(3,\)"),
    "a scalar": (1.0, r"square matrix.*\(\)"),
    "empty": (np.zeros((0, 0)), r"square matrix.*\(0, 0\)"),
    "NaN": ([[0.5, 0.5], [np.nan, 0.5]], r"finite; entry \(1, 0\) is nan"),
    "infinite": ([[np.inf, 0.5], [0.5, 0.5]], r"finite; entry \(0, 0\) is inf"),
    "negative": ([[1.25, -0.25], [-0.25, 1.25]], r"nonnegative; entry \(0, 1\) is -0.25"),
    "row": ([[0.5, 0.5], [0.37, 0.5]], r"rows must sum to 1; row 1 sums to 0.87"),
    "column": ([[0.5, 0.5, 0], [0.5, 0.5, 0], [0.5, 0, 0.5]], r"columns must sum to 1; column 0 sums to 1.5"),
    "two islands": (np.kron(np.eye(2), np.full((2, 2), 0.5)), r"primitive.*node 2 never hears node 0"),
    "identity": (np.eye(3), r"primitive.*it is 1; .*node 1 never hears node 0"),
    "bipartite": ([[0.0, 1.0], [1.0, 0.0]], r"primitive.*it is 1; .*connected.*self.*lazy"),
    # Primitive, and yet nodes 1 and 2 only swap what they hold: one exchange need not contract.
    "no contraction": ([[0, 1, 0], [0.5, 0, 0.5], [0.5, 0, 0.5]], r"it is 1; .*connected.*self.*lazy"),
}


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("name", NOT_MIXING)
def test_validate_says_what_is_wrong_and_where(name: str) -> None:
    matrix, message = NOT_MIXING[name]
    with pytest.raises(ValueError, match=message):
        topology.validate_mixing(matrix)


@pytest.mark.parametrize("name", ["not square", "NaN", "negative", "row", "column"])
def test_disconnected_does_not_excuse_the_rest(name: str) -> None:
    matrix, message = NOT_MIXING[name]
    with pytest.raises(ValueError, match=message):
        topology.validate_mixing(matrix, allow_disconnected=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: topology.ring(0), "n must be at least 1, got 0"),
        (lambda: topology.ring(5, degree=0), "degree must be at least 1, got 0"),
        (lambda: topology.ring(5, rule="best"), "rule must be 'metropolis', 'max_degree' or 'laplacian', got 'best'"),
        (lambda: topology.path(0), "n must be at least 1, got 0"),
        (lambda: topology.star(-2), "n must be at least 1, got -2"),
        (lambda: topology.complete(0), "n must be at least 1, got 0"),
        (lambda: topology.torus(0, 3), "rows must be at least 1, got 0"),
        (lambda: topology.torus(3, 0), "columns must be at least 1, got 0"),
        (lambda: topology.hypercube(-1), "dimension must be at least 0, got -1"),
        (lambda: topology.directed_exponential(0), "n must be at least 1, got 0"),
        (lambda: topology.directed_exponential(4, self_weight="half"), "self_weight must be 'uniform' or 'lazy'"),
        (lambda: topology.undirected_exponential(0), "n must be at least 1, got 0"),
        (lambda: topology.erdos_renyi(jax.random.key(0), 0, edge_probability=0.5), "n must be at least 1, got 0"),
        (lambda: topology.erdos_renyi(jax.random.key(0), 4, edge_probability=0.0), r"\(0, 1\], got 0.0"),
        (lambda: topology.erdos_renyi(jax.random.key(0), 4, edge_probability=1.5), r"\(0, 1\], got 1.5"),
        (lambda: topology.erdos_renyi(jax.random.key(0), 4, edge_probability=float("nan")), r"\(0, 1\], got nan"),
        (
            lambda: topology.erdos_renyi(jax.random.key(0), 40, edge_probability=0.01, attempts=3),
            "no connected graph in 3 draws with n=40 and edge_probability=0.01.*0.0922 or more",
        ),
        (lambda: topology.lazy(topology.ring(3), self_weight=1.0), r"self_weight must be in \[0, 1\), got 1.0"),
        (lambda: topology.lazy(topology.ring(3), self_weight=-0.1), r"self_weight must be in \[0, 1\), got -0.1"),
        (lambda: topology.from_adjacency(np.ones((2, 3))), r"square matrix.*\(2, 3\)"),
        (lambda: topology.from_adjacency(np.eye(3, k=1)), "symmetric; it has an edge between 0 and 1 in one direction"),
        (lambda: topology.from_adjacency(np.full((2, 2), np.nan)), r"finite; entry \(0, 0\) is nan"),
        (lambda: topology.spectral_norm(np.ones(4)), r"square matrix.*\(4,\)"),
    ],
)
@pytest.mark.usefixtures("types_unchecked")
def test_bad_arguments(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
