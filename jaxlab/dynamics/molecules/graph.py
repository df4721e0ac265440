r"""Nearest-neighbour graphs of molecular frames and their scaled Laplacian.

Each atom receives from its k nearest atoms: directed edges ``j -> i``, no loops, unit weights. With the number ``d_j``
of atoms that j is a neighbour of (its out-degree),

.. math::
    \hat L x\,|_i = -\sum_{j \to i} (d_j d_i)^{-1/2}\, x_j,

which is the Laplacian scaled by ``lambda_max = 2``, without its diagonal; an atom that is nobody's neighbour counts
zero. All frames have k edges an atom, so a graph is an array of neighbours ``[..., atom, k]`` and the sum a gather;
`to_jraph` gives the same graph as a `jraph.GraphsTuple`, and `graph_laplacian` acts on any of those.

Reference: Defferrard et al., arXiv 1606.09375 (as in PyTorch Geometric's ``ChebConv``); Sengar et al., arXiv
2509.02196.

Example:
  >>> nearest_neighbors(jnp.array([[0.0, 0, 0], [1, 0, 0], [3, 0, 0]]), 1)[:, 0]
  Array([1, 0, 1], dtype=int32)
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import jraph
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Real
from scipy.spatial import cKDTree

from jaxlab.dynamics.reduced_rank import check_finite, integer, is_concrete, real_array

__all__ = ["Laplacian", "graph_laplacian", "nearest_neighbors", "neighbor_laplacian", "to_jraph"]

Laplacian = Callable[[Array], Array]

# Atoms from which on a tree on the host beats all distances: 2300 atoms take it 5 ms and those 50 ms a frame.
_TREE = 500
# Distances held at once.
_DISTANCE_BUDGET = 1 << 23


def nearest_neighbors(x: Real[Array | np.ndarray, "*frames n 3"], k: int = 4) -> Int[Array, "*frames n k"]:
    """Indices of the k nearest other atoms of each atom, nearest first; of equally near ones any.

    Frames are worked through in chunks, so that memory does not grow with their number. Molecules of more than 500
    atoms go through a k-d tree, outside of `jit`.

    Args:
      x: coordinates.
      k: the paper's is 4.

    Raises:
      TypeError: values that are no real numbers, a k that is no integer.
      ValueError: fewer than k + 1 atoms, k below 1, values that are not finite.
    """
    x = real_array("coordinates", x, "[atom, coordinate]")
    k = integer("k", k)
    atoms = x.shape[-2]
    if k < 1 or atoms < k + 1:
        raise ValueError(f"{k} neighbours of each atom need at least {max(k, 1) + 1} atoms and k >= 1, got {atoms}")
    check_finite("coordinates", x)
    frames = x.reshape(-1, *x.shape[-2:])
    if atoms > _TREE and is_concrete(x):
        found = np.stack([_by_tree(frame, k) for frame in np.asarray(frames, np.float64)])
        return jnp.asarray(found.reshape(*x.shape[:-1], k))
    chunk = max(1, min(len(frames), _DISTANCE_BUDGET // atoms**2))
    return _nearest(frames, k=k, chunk=chunk).reshape(*x.shape[:-1], k)


def neighbor_laplacian(neighbors: Int[Array, "*frames n k"]) -> Laplacian:
    """The scaled Laplacian of nearest-neighbour graphs, on features ``[*frames, n, channel]``."""
    weights = _edge_weights(neighbors)

    def apply(features: Array) -> Array:
        flat = neighbors.reshape(*neighbors.shape[:-2], -1)
        sent = jnp.take_along_axis(features, flat[..., None], axis=-2).reshape(*neighbors.shape, features.shape[-1])
        return -jnp.sum(weights[..., None].astype(features.dtype) * sent, axis=-2)

    return apply


def graph_laplacian(graph: jraph.GraphsTuple) -> Laplacian:
    """The same of any graph, on features ``[node, channel]``; batches are one graph of many parts (`jraph.batch`)."""
    senders, receivers = jnp.asarray(graph.senders), jnp.asarray(graph.receivers)
    nodes = sum(leaf.shape[0] for leaf in jax.tree.leaves(graph.nodes)[:1])
    degree = jraph.segment_sum(jnp.ones(len(senders)), senders, nodes)
    scale = _inverse_square_root(degree)
    weights = scale[senders] * scale[receivers]

    def apply(features: Array) -> Array:
        return -jraph.segment_sum(weights[:, None].astype(features.dtype) * features[senders], receivers, nodes)

    return apply


def to_jraph(
    x: Float[Array | np.ndarray, "frames n c"], neighbors: Int[Array | np.ndarray, "frames n k"]
) -> jraph.GraphsTuple:
    """One `jraph.GraphsTuple` of all frames, with the coordinates as nodes."""
    frames, atoms, k = neighbors.shape
    offset = (jnp.arange(frames) * atoms)[:, None, None]
    receivers = jnp.broadcast_to(jnp.arange(atoms)[:, None] + offset, neighbors.shape)
    return jraph.GraphsTuple(
        nodes=jnp.asarray(x).reshape(frames * atoms, -1),
        edges=None,
        senders=(neighbors + offset).ravel(),
        receivers=receivers.ravel(),
        globals=None,
        n_node=jnp.full(frames, atoms),
        n_edge=jnp.full(frames, atoms * k),
    )


def _by_tree(x: np.ndarray, k: int) -> np.ndarray:
    _, found = cKDTree(x).query(x, k + 1)
    itself = found == np.arange(len(x))[:, None]
    # An atom that coincides with more than k others may not be among its own nearest.
    itself[:, -1] |= ~itself.any(1)
    return found[~itself].reshape(len(x), k).astype(np.int32)


@partial(jax.jit, static_argnames=("k", "chunk"))
def _nearest(frames: Array, *, k: int, chunk: int) -> Array:
    atoms = frames.shape[1]

    def of_frame(x: Array) -> Array:
        # Differences, not products: rounding of |a|^2 + |b|^2 - 2ab far from the origin would shuffle neighbours.
        squared = sum((x[:, c, None] - x[None, :, c]) ** 2 for c in range(x.shape[1]))
        squared = jnp.where(jnp.eye(atoms, dtype=bool), jnp.inf, squared)

        def take(squared: Array, _: None) -> tuple[Array, Array]:
            nearest = jnp.argmin(squared, axis=1).astype(jnp.int32)
            return jnp.where(jnp.arange(atoms)[None, :] == nearest[:, None], jnp.inf, squared), nearest

        # k passes are faster than the sort behind top_k for the few neighbours wanted.
        return lax.scan(take, squared, length=k)[1].T

    return lax.map(of_frame, frames, batch_size=chunk)


def _edge_weights(neighbors: Array) -> Array:
    *frames, atoms, k = neighbors.shape
    flat = neighbors.reshape(-1, atoms * k)
    rows = jnp.arange(len(flat))[:, None]
    degree = jnp.zeros((len(flat), atoms)).at[rows, flat].add(1.0)
    scale = _inverse_square_root(degree)
    sent = jnp.take_along_axis(scale, flat, axis=1).reshape(-1, atoms, k)
    return (sent * scale[..., None]).reshape(*frames, atoms, k)


def _inverse_square_root(degree: Array) -> Array:
    return jnp.where(degree > 0, 1 / jnp.sqrt(jnp.maximum(degree, 1)), 0)
