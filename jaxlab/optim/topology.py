r"""Communication graphs and their mixing matrices.

A network of ``n`` nodes averages by multiplying with a *mixing matrix* :math:`W \in \mathbb{R}^{n \times n}`: node
``i`` replaces its value by :math:`\sum_r W_{ir} x_r`, and ``W[i, r]`` is nonzero only where ``i`` hears ``r`` (or is
``r``). Every function here returns such a matrix as a float64 NumPy array: graphs are made once, on the host. Row
``i`` holds the weights with which node ``i`` takes what it receives.

Decentralised methods converge to the minimiser of the *average* loss when ``W`` is doubly stochastic (rows and
columns sum to one) and primitive (some power of it is positive). Then

.. math:: \rho(W) = \lVert W - \tfrac{1}{n} 1 1^\top \rVert_2 < 1

is the factor by which one exchange contracts the disagreement between nodes. :func:`validate_mixing` checks all of
this and names the row or column at fault.

Weights, for a graph with degrees :math:`d_i` (self-loops not counted):

* ``"metropolis"``: :math:`W_{ij} = 1 / (1 + \max(d_i, d_j))`, the rest on the diagonal (Metropolis-Hastings).
* ``"max_degree"``: :math:`W_{ij} = 1 / (1 + \max_k d_k)`, the rest on the diagonal.
* ``"laplacian"``: :math:`W = I - L / n` with the graph Laplacian ``L``; needs no degree of any other node and has
  :math:`\rho \le 1 - c / n^3` on every connected graph, so a step size can be chosen without knowing the graph.

References: Xiao and Boyd, *Fast linear iterations for distributed averaging* (2004), for the weights; Ying et al.
(arXiv 2110.13363) for exponential graphs; Yu, Jakovetic, Kar (arXiv 2505.03736) for the graphs of the experiments.
"""

from typing import Literal

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Key

__all__ = [
    "complete",
    "directed_exponential",
    "erdos_renyi",
    "from_adjacency",
    "hypercube",
    "lazy",
    "path",
    "ring",
    "spectral_gap",
    "spectral_norm",
    "star",
    "torus",
    "undirected_exponential",
    "validate_mixing",
]

MixingMatrix = Float[np.ndarray, "n n"]
WeightRule = Literal["metropolis", "max_degree", "laplacian"]

# Row and column sums, symmetry and signs are compared in float64; a matrix that went through float32 still passes.
_SUM_TOLERANCE = 1e-6


def ring(n: int, *, degree: int = 1, rule: WeightRule = "metropolis") -> MixingMatrix:
    """Cycle in which node ``i`` hears ``i ± 1, ..., i ± degree`` (modulo ``n``).

    With Metropolis weights and ``2 * degree < n`` every nonzero weight is ``1 / (2 * degree + 1)``. The ring of the
    paper's experiments is ``ring(20, degree=2)``, whose spectral norm is 0.904.

    Raises:
      ValueError: if ``n < 1`` or ``degree < 1``.
    """
    _check_at_least("degree", degree, 1)
    offsets = np.arange(1, degree + 1)
    return from_adjacency(_circulant_adjacency(n, np.concatenate([offsets, -offsets])), rule=rule)


def path(n: int, *, rule: WeightRule = "metropolis") -> MixingMatrix:
    """Line in which node ``i`` hears ``i - 1`` and ``i + 1``; the ends hear one node."""
    _check_at_least("n", n, 1)
    return from_adjacency(np.eye(n, k=1) + np.eye(n, k=-1), rule=rule)


def star(n: int, *, rule: WeightRule = "metropolis") -> MixingMatrix:
    """Node 0 hears everybody; everybody hears node 0."""
    _check_at_least("n", n, 1)
    adjacency = np.zeros((n, n))
    adjacency[0, 1:] = adjacency[1:, 0] = 1.0
    return from_adjacency(adjacency, rule=rule)


def complete(n: int) -> MixingMatrix:
    """Everybody hears everybody: ``1/n`` everywhere, the spectral norm is 0, one exchange is the exact average."""
    _check_at_least("n", n, 1)
    return np.full((n, n), 1.0 / n)


def torus(rows: int, columns: int, *, rule: WeightRule = "metropolis") -> MixingMatrix:
    """``rows x columns`` grid that wraps around; node ``(a, b)`` has index ``a * columns + b`` and hears four others.

    Along a side of length 1 or 2 the wrapped neighbours coincide, and each is counted once.
    """
    _check_at_least("rows", rows, 1)
    _check_at_least("columns", columns, 1)
    index = np.arange(rows * columns).reshape(rows, columns)
    adjacency = np.zeros((rows * columns, rows * columns))
    for axis in (0, 1):
        for step in (1, -1):
            adjacency[index.ravel(), np.roll(index, step, axis).ravel()] = 1.0
    return from_adjacency(_without_self_loops(adjacency), rule=rule)


def hypercube(dimension: int, *, rule: WeightRule = "metropolis") -> MixingMatrix:
    """``2 ** dimension`` nodes; node ``i`` hears every node whose index differs from ``i`` in one bit."""
    _check_at_least("dimension", dimension, 0)
    nodes = np.arange(2**dimension)
    adjacency = np.zeros((len(nodes), len(nodes)))
    for bit in range(dimension):
        adjacency[nodes, nodes ^ (1 << bit)] = 1.0
    return from_adjacency(adjacency, rule=rule)


def directed_exponential(n: int, *, self_weight: Literal["uniform", "lazy"] = "uniform") -> MixingMatrix:
    """Directed graph in which node ``i`` sends to ``i + 2**k`` (modulo ``n``) for ``k = 0 .. floor(log2(n - 1))``.

    Circulant, and so doubly stochastic although messages go one way only.

    Args:
      n: number of nodes.
      self_weight: ``"uniform"`` gives every in-neighbour and the node itself ``1 / (degree + 1)`` (spectral norm 0.5
        at 8 nodes); ``"lazy"`` gives neighbours ``1 / (degree + 2)`` and the node itself the rest (0.6 at 8 nodes), as
        the published scripts do.

    Raises:
      ValueError: if ``n < 1`` or ``self_weight`` is unknown.
    """
    _check_at_least("n", n, 1)
    if self_weight not in ("uniform", "lazy"):
        raise ValueError(f"self_weight must be 'uniform' or 'lazy', got {self_weight!r}")
    adjacency = _circulant_adjacency(n, -_powers_of_two_below(n))
    degree = adjacency.sum(1)[0]
    return _fill_diagonal(adjacency / (degree + (1 if self_weight == "uniform" else 2)))


def undirected_exponential(n: int, *, rule: WeightRule = "metropolis") -> MixingMatrix:
    """Undirected graph in which node ``i`` hears ``i ± 2**k`` (modulo ``n``) for ``k = 0 .. floor(log2(n - 1))``."""
    _check_at_least("n", n, 1)
    offsets = _powers_of_two_below(n)
    return from_adjacency(_circulant_adjacency(n, np.concatenate([offsets, -offsets])), rule=rule)


def erdos_renyi(
    key: Key[Array, ""], n: int, *, edge_probability: float, rule: WeightRule = "metropolis", attempts: int = 100
) -> MixingMatrix:
    """Random graph in which each of the ``n (n - 1) / 2`` edges is there with the given probability.

    Draws again, with a key folded from ``key``, until the graph is connected.

    Raises:
      ValueError: if ``edge_probability`` is outside (0, 1], or no connected graph came up in ``attempts`` draws.
    """
    _check_at_least("n", n, 1)
    if not 0.0 < edge_probability <= 1.0:
        raise ValueError(f"edge_probability must be in (0, 1], got {edge_probability}")
    for attempt in range(attempts):
        draw = np.asarray(jax.random.uniform(jax.random.fold_in(key, attempt), (n, n)))
        upper = np.triu(draw < edge_probability, k=1)
        weights = from_adjacency(upper + upper.T, rule=rule)
        if _is_connected(weights):
            return weights
    raise ValueError(
        f"no connected graph in {attempts} draws with n={n} and edge_probability={edge_probability}; "
        f"connectivity needs a probability of about log(n)/n = {np.log(n) / n:.3g} or more"
    )


def from_adjacency(adjacency: npt.ArrayLike, *, rule: WeightRule = "metropolis") -> MixingMatrix:
    """Symmetric doubly stochastic weights for an undirected graph.

    Args:
      adjacency: ``[n, n]`` symmetric, nonzero where two nodes are neighbours; the diagonal is ignored.
      rule: the weights, see the module's docstring.

    Raises:
      ValueError: if the matrix is not square or not symmetric, or the rule is unknown. (A symmetric rule cannot make
        a directed graph doubly stochastic: build such a matrix by hand, as :func:`directed_exponential` does.)
    """
    edges = _without_self_loops(_as_square(adjacency) != 0)
    if (edges != edges.T).any():
        i, j = np.argwhere(edges != edges.T)[0]
        raise ValueError(f"adjacency must be symmetric; it has an edge between {i} and {j} in one direction only")
    n, degree = len(edges), edges.sum(1)
    match rule:
        case "metropolis":
            neighbour_weight = 1.0 / (1.0 + np.maximum(degree[:, None], degree[None, :]))
        case "max_degree":
            neighbour_weight = np.full((n, n), 1.0 / (1.0 + degree.max(initial=0)))
        case "laplacian":
            neighbour_weight = np.full((n, n), 1.0 / n)
        case _:
            raise ValueError(f"rule must be 'metropolis', 'max_degree' or 'laplacian', got {rule!r}")
    return _fill_diagonal(edges * neighbour_weight)


def lazy(mixing_matrix: npt.ArrayLike, *, self_weight: float = 0.5) -> MixingMatrix:
    """``self_weight * I + (1 - self_weight) * W``: every node keeps more of its own value.

    Makes a bipartite graph without self-loops primitive, and with ``self_weight >= 1/2`` a symmetric matrix positive
    semidefinite, which some methods ask for.

    Raises:
      ValueError: if ``self_weight`` is outside [0, 1).
    """
    if not 0.0 <= self_weight < 1.0:
        raise ValueError(f"self_weight must be in [0, 1), got {self_weight}")
    matrix = _as_square(mixing_matrix)
    return self_weight * np.eye(len(matrix)) + (1.0 - self_weight) * matrix


def spectral_norm(mixing_matrix: npt.ArrayLike) -> float:
    r""":math:`\rho(W) = \lVert W - 11^\top/n \rVert_2`: the worst contraction of disagreement in one exchange."""
    matrix = _as_square(mixing_matrix)
    return float(np.linalg.norm(matrix - 1.0 / len(matrix), ord=2))


def spectral_gap(mixing_matrix: npt.ArrayLike) -> float:
    r""":math:`1 - \rho(W)`: 1 for the complete graph, 0 for a graph that does not mix."""
    return 1.0 - spectral_norm(mixing_matrix)


def validate_mixing(mixing_matrix: npt.ArrayLike, *, allow_disconnected: bool = False) -> MixingMatrix:
    r"""Return the matrix as float64 if it is a mixing matrix, else say what is wrong with it.

    Args:
      mixing_matrix: ``[n, n]``.
      allow_disconnected: accept :math:`\rho(W) = 1`, for example the identity (``n`` independent runs).

    Raises:
      ValueError: not square; a NaN, infinite or negative entry; rows or columns that do not sum to 1 (to 1e-6);
        :math:`\rho(W) \ge 1`, which means a graph that is disconnected, or periodic for want of self-loops.
    """
    matrix = _as_square(mixing_matrix)
    if not np.isfinite(matrix).all():
        i, j = np.argwhere(~np.isfinite(matrix))[0]
        raise ValueError(f"mixing matrix must be finite; entry ({i}, {j}) is {matrix[i, j]}")
    if (matrix < 0).any():
        i, j = np.argwhere(matrix < 0)[0]
        raise ValueError(f"mixing matrix must be nonnegative; entry ({i}, {j}) is {matrix[i, j]:.6g}")
    for name, sums in (("row", matrix.sum(1)), ("column", matrix.sum(0))):
        worst = int(np.abs(sums - 1.0).argmax())
        if abs(sums[worst] - 1.0) > _SUM_TOLERANCE:
            raise ValueError(
                f"mixing matrix must be doubly stochastic: {name}s must sum to 1; {name} {worst} sums to "
                f"{sums[worst]:.6g}"
            )
    rho = spectral_norm(matrix)
    if not allow_disconnected and rho >= 1.0 - 1e-9:
        cause = "some power of it is positive only with self-loops" if _is_connected(matrix) else _island(matrix)
        raise ValueError(
            f"mixing matrix must be primitive (spectral norm of W - 11'/n below 1): it is {rho:.6g}; {cause}"
        )
    return matrix


def _as_square(matrix: object) -> np.ndarray:
    array = np.asarray(matrix, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.size == 0:
        raise ValueError(f"expected a square matrix with one row a node, got shape {array.shape}")
    return array


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _powers_of_two_below(n: int) -> np.ndarray:
    return 2 ** np.arange((n - 1).bit_length())


def _circulant_adjacency(n: int, offsets: np.ndarray) -> np.ndarray:
    """Node ``i`` hears ``i + offset`` for each offset (modulo ``n``)."""
    _check_at_least("n", n, 1)
    adjacency = np.zeros((n, n))
    nodes = np.arange(n)
    for offset in offsets:
        adjacency[nodes, (nodes + offset) % n] = 1.0
    return _without_self_loops(adjacency)


def _without_self_loops(adjacency: np.ndarray) -> np.ndarray:
    return np.where(np.eye(len(adjacency), dtype=bool), 0, adjacency)


def _fill_diagonal(neighbour_weights: np.ndarray) -> np.ndarray:
    """Put on the diagonal what each row lacks to 1."""
    return neighbour_weights + np.diag(1.0 - neighbour_weights.sum(1))


def _reachable_from_0(matrix: np.ndarray) -> np.ndarray:
    reached = np.zeros(len(matrix), dtype=bool)
    frontier = reached.copy()
    frontier[0] = True
    while frontier.any():
        reached |= frontier
        frontier = (matrix[:, frontier] > 0).any(1) & ~reached
    return reached


def _is_connected(matrix: np.ndarray) -> bool:
    # With doubly stochastic weights a graph that is connected one way is strongly connected.
    return bool(_reachable_from_0(matrix).all())


def _island(matrix: np.ndarray) -> str:
    return f"the graph is not connected: node {int((~_reachable_from_0(matrix)).argmax())} never hears node 0"
