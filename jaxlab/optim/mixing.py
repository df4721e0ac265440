r"""Averaging with graph neighbours, on one device or over a mesh axis.

Every leaf of a tree that is mixed has a leading *node axis*. A :class:`Mixer` replaces row ``i`` of every leaf by
:math:`\sum_r W_{ir} x_r` for a mixing matrix ``W`` (see :mod:`jaxlab.optim.topology`). There are two backends with the
same numbers:

* **stacked**: leaves are ``[n, ...]`` on one device (a simulated network);
* **sharded**: inside :func:`jax.shard_map` the leaves are ``[n / devices, ...]`` and the exchange runs over the mesh
  axis ``axis_name`` (many devices, or many hosts after ``jax.distributed.initialize``).

Code written against ``Mixer.mix`` and ``Mixer.mean`` does not know which of the two it runs on. It keeps the node
axis on every leaf and never reduces over that axis itself.

================== ========= =================================================================================
class              backend   one exchange costs, for D numbers a node and m nodes a device
================== ========= =================================================================================
`DenseMixer`       stacked   a matrix product, ``n^2 D`` multiply-adds
`SparseMixer`      stacked   ``max degree * n D`` multiply-adds: large sparse graphs
`MeanMixer`        both      the exact average (complete graph); ``pmean`` over the axis
`CirculantMixer`   sharded   one or two ``ppermute`` an offset, boundary rows only: rings, exponential graphs, tori
`GraphMixer`       sharded   one ``ppermute`` of the device's ``m D`` numbers a round, any graph between devices
`AllGatherMixer`   sharded   ``n D`` numbers received: dense graphs, matrices that change while compiled
`SequenceMixer`    both      a periodic sequence of any of these: time-varying graphs
================== ========= =================================================================================

:func:`make_mixer` picks one from a matrix. Products are accumulated in float32 at full precision (float64 for float64
leaves), whatever the leaf's dtype and the accelerator's default, because gradient tracking relies on column sums of 1.

Example:
  >>> import jax.numpy as jnp
  >>> from jaxlab.optim import mixing, topology
  >>> mixer = mixing.make_mixer(topology.ring(4))
  >>> mixer.mix({"w": jnp.array([0.0, 3.0, 0.0, 0.0])})["w"].round(3).tolist()
  [1.0, 1.0, 1.0, 0.0]
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jaxlab.optim import topology

__all__ = [
    "AllGatherMixer",
    "CirculantMixer",
    "DenseMixer",
    "GraphMixer",
    "MeanMixer",
    "Mixer",
    "SequenceMixer",
    "SparseMixer",
    "local_nodes",
    "make_mixer",
]

Step = int | Int[Array, ""]

# A ``ppermute`` of a small leaf is all latency: leaves below this many numbers a node travel in one buffer.
_BUCKET_LIMIT = 16_384


class Mixer(abc.ABC):
    """Averages trees over the neighbours of a graph.

    Mixers are not callable on purpose: ``optax.inject_hyperparams`` takes every callable argument for a schedule.

    Attributes:
      n_nodes: number of nodes in the whole network.
      axis_name: mesh axis that carries the nodes, or None when all of them are stacked on one device.
    """

    n_nodes: int
    axis_name: str | None

    @abc.abstractmethod
    def mix(self, tree: PyTree, *, step: Step = 0) -> PyTree:
        """Row ``i`` of every leaf becomes the weighted sum of the rows that node ``i`` hears.

        Args:
          tree: leaves ``[local nodes, ...]`` of floating (or complex) dtype.
          step: counts exchanges; only a time-varying mixer looks at it.

        Raises:
          ValueError: if a leaf's leading axis is not the number of nodes, naming the leaf.
          TypeError: if a leaf is not floating.
        """

    def mean(self, tree: PyTree) -> PyTree:
        """Row ``i`` of every leaf becomes the exact average over all nodes, whatever the graph."""
        _check_leaves(tree, self.n_nodes, self.axis_name)
        return jax.tree.map(functools.partial(_mean_leaf, axis_name=self.axis_name), tree)

    @property
    @abc.abstractmethod
    def rho(self) -> float:
        """Spectral norm of ``W - 11'/n``: how much disagreement one exchange leaves at worst."""


class _LeafwiseMixer(Mixer):
    """A mixer that treats every leaf by itself."""

    def mix(self, tree: PyTree, *, step: Step = 0) -> PyTree:
        _check_leaves(tree, self.n_nodes, self.axis_name)
        mix_leaf = functools.partial(self._mix_leaf, step=step)
        if self.axis_name is None:
            return jax.tree.map(mix_leaf, tree)
        return _in_buckets(mix_leaf, tree)

    @abc.abstractmethod
    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array: ...


@dataclasses.dataclass(frozen=True, eq=False)
class DenseMixer(_LeafwiseMixer):
    """``W @ x`` for leaves stacked on one device.

    Attributes:
      matrix: ``[n, n]``, or ``[period, n, n]`` for a graph that changes every step. A NumPy array, or a traced array
        when the graph is drawn inside a compiled function (then nothing is checked).
    """

    matrix: Float[np.ndarray, "*period n n"] | Float[Array, "*period n n"]
    axis_name: None = None

    @property
    def n_nodes(self) -> int:
        return self.matrix.shape[-1]

    @property
    def rho(self) -> float:
        return _rho(self.matrix)

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        dtype = _accumulator(leaf)
        return _contract(jnp.asarray(_matrix_at(self.matrix, step), dtype), leaf.astype(dtype)).astype(leaf.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class SparseMixer(_LeafwiseMixer):
    """Sum over neighbours only, for leaves stacked on one device.

    The sum runs over "the k-th neighbour of every node" for k up to the largest degree, so that no ``[n, n]`` product
    and no ``[n, degree, ...]`` array is ever formed.
    """

    matrix: Float[np.ndarray, "n n"]
    axis_name: None = None

    @property
    def n_nodes(self) -> int:
        return len(self.matrix)

    @property
    def rho(self) -> float:
        return _rho(self.matrix)

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        del step
        dtype = _accumulator(leaf)
        degree = int((self.matrix != 0).sum(1).max())
        # The largest weights first; a row with fewer neighbours is padded with weights of zero.
        neighbours = np.argsort(-self.matrix, axis=1, kind="stable")[:, :degree]
        weights = np.take_along_axis(self.matrix, neighbours, axis=1)
        mixed = sum(
            _per_row(weights[:, k], leaf.ndim, dtype) * leaf[neighbours[:, k]].astype(dtype) for k in range(degree)
        )
        return mixed.astype(leaf.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class MeanMixer(_LeafwiseMixer):
    """Exact averaging: the complete graph, without its ``n^2`` products."""

    n_nodes: int
    axis_name: str | None = None

    @property
    def rho(self) -> float:
        return 0.0

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        del step
        return _mean_leaf(leaf, axis_name=self.axis_name)


@dataclasses.dataclass(frozen=True, eq=False)
class CirculantMixer(_LeafwiseMixer):
    """Node ``i`` hears node ``i + offset`` (modulo ``n``) with a weight that depends on the offset only.

    Inside ``jax.shard_map``. With several nodes a device, rows that stay on the device are rolled locally and only
    the rows that cross a boundary travel.
    """

    weights: Mapping[int, float]
    n_nodes: int
    axis_name: str

    @property
    def rho(self) -> float:
        matrix = np.zeros((self.n_nodes, self.n_nodes))
        nodes = np.arange(self.n_nodes)
        for offset, weight in self.weights.items():
            matrix[nodes, (nodes + offset) % self.n_nodes] += weight
        return _rho(matrix)

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        del step
        dtype = _accumulator(leaf)
        rolled = (weight * self._roll(leaf, offset).astype(dtype) for offset, weight in self.weights.items())
        return sum(rolled).astype(leaf.dtype)

    def _roll(self, leaf: Array, offset: int) -> Array:
        """Row ``a`` of the result is global row ``a + offset``."""
        block_offset, row_offset = divmod(offset % self.n_nodes, leaf.shape[0])
        near = self._from_device(leaf[row_offset:], block_offset)
        if row_offset == 0:
            return near
        return jnp.concatenate([near, self._from_device(leaf[:row_offset], block_offset + 1)])

    def _from_device(self, rows: Array, distance: int) -> Array:
        devices = _axis_size(self.axis_name)
        if distance % devices == 0:
            return rows
        permutation = [((device + distance) % devices, device) for device in range(devices)]
        return lax.ppermute(rows, self.axis_name, permutation)


@dataclasses.dataclass(frozen=True, eq=False)
class GraphMixer(_LeafwiseMixer):
    """Any graph, by rounds in which every device sends to at most one other and hears at most one other.

    Inside ``jax.shard_map``. The edges between devices are coloured greedily, grouped by distance along the axis, so
    that a ring costs two rounds and no graph more than a round for each pair of distance and conflict.
    """

    matrix: Float[np.ndarray, "n n"]
    axis_name: str

    @property
    def n_nodes(self) -> int:
        return len(self.matrix)

    @property
    def rho(self) -> float:
        return _rho(self.matrix)

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        del step
        dtype = _accumulator(leaf)
        rounds, weights = _exchange_rounds(self.matrix, _axis_size(self.axis_name))
        own_weights = jnp.asarray(weights, dtype)[:, lax.axis_index(self.axis_name)]
        mixed = _contract(own_weights[0], leaf.astype(dtype))
        for permutation, block in zip(rounds, own_weights[1:], strict=True):
            received = lax.ppermute(leaf, self.axis_name, permutation)
            mixed += _contract(block, received.astype(dtype))
        return mixed.astype(leaf.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class AllGatherMixer(_LeafwiseMixer):
    """Every device receives every node's row and keeps the sums of its own nodes. Inside ``jax.shard_map``.

    Attributes:
      matrix: ``[n, n]``, or ``[period, n, n]`` for a graph that changes every step; NumPy or traced.
    """

    matrix: Float[np.ndarray, "*period n n"] | Float[Array, "*period n n"]
    axis_name: str

    @property
    def n_nodes(self) -> int:
        return self.matrix.shape[-1]

    @property
    def rho(self) -> float:
        return _rho(self.matrix)

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        dtype = _accumulator(leaf)
        everybody = lax.all_gather(leaf, self.axis_name, tiled=True).astype(dtype)
        matrix = jnp.asarray(_matrix_at(self.matrix, step), dtype)
        own_rows = lax.dynamic_slice_in_dim(matrix, lax.axis_index(self.axis_name) * leaf.shape[0], leaf.shape[0])
        return _contract(own_rows, everybody).astype(leaf.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceMixer(Mixer):
    """Time-varying graph: exchange ``step`` goes through ``mixers[step % len(mixers)]``.

    Every branch is compiled, so that each may use its own neighbour exchange (one-peer exponential graphs).
    """

    mixers: tuple[Mixer, ...]

    def __post_init__(self) -> None:
        if not self.mixers:
            raise ValueError("a time-varying graph needs at least one mixer, got none")
        networks = {(mixer.n_nodes, mixer.axis_name) for mixer in self.mixers}
        if len(networks) > 1:
            raise ValueError(f"all mixers must share nodes and mesh axis, got (n_nodes, axis_name) in {networks}")

    @property
    def n_nodes(self) -> int:
        return self.mixers[0].n_nodes

    @property
    def axis_name(self) -> str | None:
        return self.mixers[0].axis_name

    @property
    def rho(self) -> float:
        """Upper bound: the geometric mean of the members' contraction factors."""
        return float(np.prod([mixer.rho for mixer in self.mixers]) ** (1.0 / len(self.mixers)))

    def mix(self, tree: PyTree, *, step: Step = 0) -> PyTree:
        branches = [functools.partial(mixer.mix, step=step) for mixer in self.mixers]
        return lax.switch(step % len(self.mixers), branches, tree)


def make_mixer(
    matrix: npt.ArrayLike,
    *,
    axis_name: str | None = None,
    exchange: Literal["auto", "dense", "sparse", "neighbours", "all_gather"] = "auto",
    allow_disconnected: bool = False,
) -> Mixer:
    """Check a mixing matrix and pick the cheapest exchange for it.

    Args:
      matrix: ``[n, n]`` mixing matrix, or a sequence ``[period, n, n]`` of them for a time-varying graph.
      axis_name: mesh axis that carries the nodes; None when all nodes are stacked on one device.
      exchange: ``"auto"``, or for the stacked backend ``"dense"`` or ``"sparse"``, for the sharded one
        ``"neighbours"`` (``ppermute`` along edges) or ``"all_gather"``.
      allow_disconnected: accept a graph that does not mix, such as the identity. The members of a time-varying
        graph need not mix one by one, only their product over a period must.

    Raises:
      ValueError: if a matrix is not doubly stochastic, or the graph does not mix
        (see :func:`jaxlab.optim.topology.validate_mixing`), or the exchange does not fit the backend.
    """
    known = ("auto", "dense", "sparse") if axis_name is None else ("auto", "neighbours", "all_gather")
    if exchange not in known:
        backend = "stacked" if axis_name is None else "sharded"
        raise ValueError(f"exchange of the {backend} backend must be one of {known}, got {exchange!r}")
    array = np.asarray(matrix, dtype=np.float64)
    if array.ndim == 3 and len(array) > 0:
        members = [topology.validate_mixing(member, allow_disconnected=True) for member in array]
        topology.validate_mixing(functools.reduce(np.matmul, members[::-1]), allow_disconnected=allow_disconnected)
        if axis_name is None and exchange != "sparse":
            return DenseMixer(np.stack(members))
        if exchange == "all_gather":
            return AllGatherMixer(np.stack(members), axis_name)
        return SequenceMixer(tuple(_static_mixer(member, axis_name, exchange) for member in members))
    return _static_mixer(topology.validate_mixing(array, allow_disconnected=allow_disconnected), axis_name, exchange)


def local_nodes(n_local: int, axis_name: str | None) -> Int[Array, " n_local"]:
    """Indices, in the whole network, of the nodes whose rows this device holds: ``[n_local]``."""
    if axis_name is None:
        return jnp.arange(n_local)
    return lax.axis_index(axis_name) * n_local + jnp.arange(n_local)


def _static_mixer(matrix: np.ndarray, axis_name: str | None, exchange: str) -> Mixer:
    n = len(matrix)
    if exchange == "auto" and np.allclose(matrix, 1.0 / n, rtol=0, atol=1e-12):
        return MeanMixer(n, axis_name)
    if axis_name is None:
        # Measured with benchmarks/optim_gt_nsgdm.py: below 64 nodes one small matrix product beats the gathers.
        is_sparse = n >= 64 and (matrix != 0).sum(1).max() <= n // 8
        return SparseMixer(matrix) if exchange == "sparse" or (exchange == "auto" and is_sparse) else DenseMixer(matrix)
    if exchange == "all_gather":
        return AllGatherMixer(matrix, axis_name)
    offsets = np.flatnonzero(matrix[0])
    is_circulant = all(np.allclose(np.roll(matrix[0], i), matrix[i], rtol=0, atol=1e-12) for i in range(n))
    if is_circulant and (exchange == "neighbours" or len(offsets) <= n // 2 + 1):
        return CirculantMixer({int(offset): float(matrix[0, offset]) for offset in offsets}, n, axis_name)
    if exchange == "neighbours" or (matrix != 0).sum(1).max() <= n // 2:
        return GraphMixer(matrix, axis_name)
    return AllGatherMixer(matrix, axis_name)


def _exchange_rounds(matrix: np.ndarray, devices: int) -> tuple[list[list[tuple[int, int]]], np.ndarray]:
    """Colour the edges between devices.

    Returns:
      Rounds, each a list of (source, destination); and weights ``[1 + rounds, devices, m, m]``, where entry 0 is the
      block of a device's own nodes and entry k the block that multiplies what the device receives in round k.
    """
    m = len(matrix) // devices
    blocks = matrix.reshape(devices, m, devices, m).transpose(0, 2, 1, 3)
    destinations, sources = np.nonzero(np.abs(blocks).sum((2, 3)))
    edges = sorted(zip(sources, destinations, strict=True), key=lambda edge: ((edge[0] - edge[1]) % devices, edge[1]))
    rounds: list[list[tuple[int, int]]] = []
    for source, destination in edges:
        if source == destination:
            continue
        for pairs in rounds:
            if all(source != s and destination != d for s, d in pairs):
                pairs.append((int(source), int(destination)))
                break
        else:
            rounds.append([(int(source), int(destination))])
    weights = np.zeros((1 + len(rounds), devices, m, m))
    weights[0] = blocks[np.arange(devices), np.arange(devices)]
    for k, pairs in enumerate(rounds, start=1):
        for source, destination in pairs:
            weights[k, destination] = blocks[destination, source]
    return rounds, weights


def _in_buckets(mix_leaf: Callable[[Array], Array], tree: PyTree) -> PyTree:
    """Apply ``mix_leaf`` to large leaves one by one and to small leaves of one dtype in a single buffer."""
    leaves, structure = jax.tree.flatten(tree)
    mixed: list[Array | None] = [None] * len(leaves)
    small: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.size // leaf.shape[0] < _BUCKET_LIMIT:
            small.setdefault(leaf.dtype, []).append(index)
        else:
            mixed[index] = mix_leaf(leaf)
    for indices in small.values():
        rows = [leaves[index].reshape(leaves[index].shape[0], -1) for index in indices]
        buffer = mix_leaf(jnp.concatenate(rows, axis=1) if len(rows) > 1 else rows[0])
        ends = np.cumsum([row.shape[1] for row in rows])
        for index, part in zip(indices, jnp.split(buffer, ends[:-1], axis=1), strict=True):
            mixed[index] = part.reshape(leaves[index].shape)
    return jax.tree.unflatten(structure, mixed)


def _mean_leaf(leaf: Array, *, axis_name: str | None) -> Array:
    mean = leaf.astype(_accumulator(leaf)).mean(0, keepdims=True)
    if axis_name is not None:
        # pmean's result is the same on all devices; marked as varying again so that it can replace what it averaged.
        mean = lax.pcast(lax.pmean(mean, axis_name), axis_name, to="varying")
    return jnp.broadcast_to(mean.astype(leaf.dtype), leaf.shape)


def _contract(matrix: Array, rows: Array) -> Array:
    return jnp.tensordot(matrix, rows, axes=1, precision=lax.Precision.HIGHEST)


def _per_row(values: np.ndarray, ndim: int, dtype: Any) -> Array:
    return jnp.asarray(values, dtype).reshape(-1, *([1] * (ndim - 1)))


def _matrix_at(matrix: Any, step: Step) -> Any:
    return matrix if matrix.ndim == 2 else jnp.asarray(matrix)[step % len(matrix)]


def _accumulator(leaf: Array) -> Any:
    return jnp.promote_types(leaf.dtype, jnp.float32)


def _rho(matrix: Any) -> float:
    if isinstance(matrix, jax.core.Tracer):
        raise TypeError("rho of a mixing matrix that is traced is not known; give the matrix as a NumPy array")
    array = np.asarray(matrix, dtype=np.float64)
    if array.ndim == 2:
        return topology.spectral_norm(array)
    return topology.spectral_norm(functools.reduce(np.matmul, array[::-1])) ** (1.0 / len(array))


def _axis_size(axis_name: str) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise NameError(
            f"mesh axis {axis_name!r} is not bound: call inside jax.shard_map over a mesh that has this axis"
        ) from None


def _check_leaves(tree: PyTree, n_nodes: int, axis_name: str | None) -> None:
    devices = 1 if axis_name is None else _axis_size(axis_name)
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(key_path) or "the tree"
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if not shape or shape[0] * devices != n_nodes:
            over = "" if axis_name is None else f" over {devices} devices of axis {axis_name!r}"
            raise ValueError(
                f"every leaf needs a leading axis of {n_nodes} nodes{over}; {name} has shape {tuple(shape)} on a device"
            )
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(f"only floating leaves can be averaged; {name} has dtype {dtype}")
