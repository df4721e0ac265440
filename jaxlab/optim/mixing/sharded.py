"""Mixers for nodes spread over a mesh axis, to be used inside ``jax.shard_map``."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxlab.optim.mixing.mixer import LeafwiseMixer, Step, accumulator, axis_size, contract, matrix_at

__all__ = ["AllGatherMixer", "CirculantMixer", "GraphMixer"]


@dataclasses.dataclass(frozen=True, eq=False)
class CirculantMixer(LeafwiseMixer):
    """Node ``i`` hears node ``i + offset`` (modulo ``n``) with a weight that depends on the offset only.

    Inside ``jax.shard_map``. With several nodes a device, rows that stay on the device are rolled locally and only
    the rows that cross a boundary travel.
    """

    weights: Mapping[int, float]
    n_nodes: int
    axis_name: str

    @property
    def matrix(self) -> Float[np.ndarray, "n n"]:
        matrix = np.zeros((self.n_nodes, self.n_nodes))
        nodes = np.arange(self.n_nodes)
        for offset, weight in self.weights.items():
            matrix[nodes, (nodes + offset) % self.n_nodes] += weight
        return matrix

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        del step
        dtype = accumulator(leaf)
        mixed = jnp.zeros_like(leaf, dtype)
        for offset, weight in self.weights.items():
            mixed += weight * self._roll(leaf, offset).astype(dtype)
        return mixed.astype(leaf.dtype)

    def _roll(self, leaf: Array, offset: int) -> Array:
        """Row ``a`` of the result is global row ``a + offset``."""
        block_offset, row_offset = divmod(offset % self.n_nodes, leaf.shape[0])
        near = self._from_device(leaf[row_offset:], block_offset)
        if row_offset == 0:
            return near
        return jnp.concatenate([near, self._from_device(leaf[:row_offset], block_offset + 1)])

    def _from_device(self, rows: Array, distance: int) -> Array:
        devices = axis_size(self.axis_name)
        if distance % devices == 0:
            return rows
        permutation = [((device + distance) % devices, device) for device in range(devices)]
        return lax.ppermute(rows, self.axis_name, permutation)


@dataclasses.dataclass(frozen=True, eq=False)
class GraphMixer(LeafwiseMixer):
    """Any graph, by rounds in which every device sends to at most one other and hears at most one other.

    Inside ``jax.shard_map``. The edges between devices are coloured greedily, grouped by distance along the axis, so
    that a ring costs two rounds and no graph more than a round for each pair of distance and conflict.
    """

    matrix: Float[np.ndarray, "n n"]
    axis_name: str

    @property
    def n_nodes(self) -> int:
        return len(self.matrix)

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        del step
        dtype = accumulator(leaf)
        rounds, weights = _exchange_rounds(self.matrix, axis_size(self.axis_name))
        own_weights = jnp.asarray(weights, dtype)[:, lax.axis_index(self.axis_name)]
        mixed = contract(own_weights[0], leaf.astype(dtype))
        for permutation, block in zip(rounds, own_weights[1:], strict=True):
            received = lax.ppermute(leaf, self.axis_name, permutation)
            mixed += contract(block, received.astype(dtype))
        return mixed.astype(leaf.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class AllGatherMixer(LeafwiseMixer):
    """Every device receives every node's row and keeps the sums of its own nodes. Inside ``jax.shard_map``.

    Attributes:
      matrix: ``[n, n]``, or ``[period, n, n]`` for a graph that changes every step; NumPy or traced.
    """

    matrix: Float[np.ndarray, "*period n n"] | Float[Array, "*period n n"]
    axis_name: str

    @property
    def n_nodes(self) -> int:
        return self.matrix.shape[-1]

    def _mix_leaf(self, leaf: Array, *, step: Step) -> Array:
        dtype = accumulator(leaf)
        everybody = lax.all_gather(leaf, self.axis_name, tiled=True).astype(dtype)
        matrix = jnp.asarray(matrix_at(self.matrix, step), dtype)
        own_rows = lax.dynamic_slice_in_dim(matrix, lax.axis_index(self.axis_name) * leaf.shape[0], leaf.shape[0])
        return contract(own_rows, everybody).astype(leaf.dtype)


def _exchange_rounds(matrix: np.ndarray, devices: int) -> tuple[list[list[tuple[int, int]]], np.ndarray]:
    """Colour the edges between devices.

    Returns:
      Rounds, each a list of (source, destination); and weights ``[1 + rounds, devices, m, m]``, where entry 0 is the
      block of a device's own nodes and entry k the block that multiplies what the device receives in round k.
    """
    m = len(matrix) // devices
    blocks = matrix.reshape(devices, m, devices, m).transpose(0, 2, 1, 3)
    destinations, sources = np.nonzero(np.abs(blocks).sum((2, 3)))
    pairs_of_devices = zip(sources.tolist(), destinations.tolist(), strict=True)
    edges = sorted(pairs_of_devices, key=lambda edge: ((edge[0] - edge[1]) % devices, edge[1]))
    rounds: list[dict[int, int]] = []  # source to destination
    hearing: list[set[int]] = []
    for source, destination in edges:
        if source == destination:
            continue
        free = (k for k, pairs in enumerate(rounds) if source not in pairs and destination not in hearing[k])
        k = next(free, len(rounds))
        if k == len(rounds):
            rounds.append({})
            hearing.append(set())
        rounds[k][source] = destination
        hearing[k].add(destination)
    weights = np.zeros((1 + len(rounds), devices, m, m))
    weights[0] = blocks[np.arange(devices), np.arange(devices)]
    for k, pairs in enumerate(rounds, start=1):
        for source, destination in pairs.items():
            weights[k, destination] = blocks[destination, source]
    return [list(pairs.items()) for pairs in rounds], weights
