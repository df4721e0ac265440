"""The interface of all mixers, and what they share."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jaxlab.optim import topology

__all__ = ["LeafwiseMixer", "MeanMixer", "Mixer", "SequenceMixer", "Step", "local_nodes"]

Step = int | Int[Array, ""]

# A ``ppermute`` of a small leaf is all latency: leaves below this many numbers a node travel in one buffer.
BUCKET_LIMIT = 16_384


class Mixer(abc.ABC):
    """Averages trees over the neighbours of a graph.

    Mixers are not callable on purpose: ``optax.inject_hyperparams`` takes every callable argument for a schedule.

    Attributes:
      matrix: ``[n, n]``, or ``[period, n, n]`` for a graph that changes every step.
      n_nodes: number of nodes in the whole network.
      axis_name: mesh axis that carries the nodes, or None when all of them are stacked on one device.
    """

    matrix: Float[np.ndarray, "*period n n"] | Float[Array, "*period n n"]
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
        return jax.tree.map(lambda leaf: _mean_leaf(jnp.asarray(leaf), axis_name=self.axis_name), tree)

    @property
    def rho(self) -> float:
        """Spectral norm of ``W - 11'/n``: how much disagreement one exchange leaves at worst.

        For a graph that changes, the geometric mean over its period.
        """
        if isinstance(self.matrix, jax.core.Tracer):
            raise TypeError("rho of a mixing matrix that is traced is not known; give the matrix as a NumPy array")
        matrices = np.asarray(self.matrix, dtype=np.float64)
        if matrices.ndim == 2:
            return topology.spectral_norm(matrices)
        return topology.spectral_norm(product(matrices)) ** (1.0 / len(matrices))


class LeafwiseMixer(Mixer):
    """A mixer that treats every leaf by itself."""

    def mix(self, tree: PyTree, *, step: Step = 0) -> PyTree:
        _check_leaves(tree, self.n_nodes, self.axis_name)

        def mix_leaf(leaf: npt.ArrayLike) -> Array:
            return self._mix_leaf(jnp.asarray(leaf), step=step)

        if self.axis_name is None:
            return jax.tree.map(mix_leaf, tree)
        return _in_buckets(mix_leaf, tree)

    @abc.abstractmethod
    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array: ...


@dataclasses.dataclass(frozen=True, eq=False)
class MeanMixer(LeafwiseMixer):
    """Exact averaging: the complete graph, without its ``n^2`` products."""

    n_nodes: int
    axis_name: str | None = None

    @property
    def matrix(self) -> Float[np.ndarray, "n n"]:
        return topology.complete(self.n_nodes)

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        del step
        return _mean_leaf(leaf, axis_name=self.axis_name)


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
    def matrix(self) -> Float[np.ndarray, "period n n"]:
        return np.stack([mixer.matrix for mixer in self.mixers])

    def mix(self, tree: PyTree, *, step: Step = 0) -> PyTree:
        branches = [functools.partial(mixer.mix, step=step) for mixer in self.mixers]
        return lax.switch(step % len(self.mixers), branches, tree)


def local_nodes(n_local: int, axis_name: str | None) -> Int[Array, " n_local"]:
    """Indices, in the whole network, of the nodes whose rows this device holds: ``[n_local]``."""
    if axis_name is None:
        return jnp.arange(n_local)
    axis_size(axis_name)  # says how to bind an axis that is not
    return lax.axis_index(axis_name) * n_local + jnp.arange(n_local)


def contract(matrix: Array, rows: Array) -> Array:
    """``matrix @ rows`` over the node axis, at full precision on every accelerator."""
    return jnp.tensordot(matrix, rows, axes=1, precision=lax.Precision.HIGHEST)


def matrix_at(matrix: Any, step: Step) -> Any:
    """The matrix of this step, ``[n, n]``, of one or of a periodic sequence ``[period, n, n]``."""
    return matrix if matrix.ndim == 2 else jnp.asarray(matrix)[step % len(matrix)]


def accumulator(leaf: Array) -> Any:
    """The dtype sums are taken in: float32 or wider."""
    return jnp.promote_types(leaf.dtype, jnp.float32)


def product(matrices: np.ndarray) -> np.ndarray:
    """What a whole period does: the first matrix acts first."""
    return functools.reduce(np.matmul, matrices[::-1])


def axis_size(axis_name: str) -> int:
    """Devices along the mesh axis; a NameError that says what to do outside of ``jax.shard_map``."""
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise NameError(
            f"mesh axis {axis_name!r} is not bound: call inside jax.shard_map over a mesh that has this axis"
        ) from None


def _mean_leaf(leaf: Array, *, axis_name: str | None) -> Array:
    mean = leaf.astype(accumulator(leaf)).mean(0, keepdims=True)
    if axis_name is not None:
        # pmean's result is the same on all devices; marked as varying again so that it can replace what it averaged.
        mean = lax.pcast(lax.pmean(mean, axis_name), axis_name, to="varying")
    return jnp.broadcast_to(mean.astype(leaf.dtype), leaf.shape)


def _in_buckets(mix_leaf: Callable[[npt.ArrayLike], Array], tree: PyTree) -> PyTree:
    """Apply ``mix_leaf`` to large leaves one by one and to small leaves of one dtype in a single buffer.

    Leaves that vary over different mesh axes are kept apart: one that a node's devices share would else come out of a
    buffer with leaves split over them as if it were split, too.
    """
    leaves, structure = jax.tree.flatten(tree)
    mixed: list[Array | None] = [None] * len(leaves)
    small: dict[tuple[Any, Any], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.size // leaf.shape[0] < BUCKET_LIMIT:
            small.setdefault((leaf.dtype, jax.typeof(leaf).manual_axis_type), []).append(index)
        else:
            mixed[index] = mix_leaf(leaf)
    for indices in small.values():
        rows = [leaves[index].reshape(leaves[index].shape[0], -1) for index in indices]
        buffer = mix_leaf(jnp.concatenate(rows, axis=1) if len(rows) > 1 else rows[0])
        ends = np.cumsum([row.shape[1] for row in rows])
        for index, part in zip(indices, jnp.split(buffer, ends[:-1], axis=1), strict=True):
            mixed[index] = part.reshape(leaves[index].shape)
    return jax.tree.unflatten(structure, mixed)


def _check_leaves(tree: PyTree, n_nodes: int, axis_name: str | None) -> None:
    devices = 1 if axis_name is None else axis_size(axis_name)
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
