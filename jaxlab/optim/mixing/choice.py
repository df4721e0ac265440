"""Which mixer suits a matrix."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from jaxlab.optim import topology
from jaxlab.optim.mixing.mixer import MeanMixer, Mixer, SequenceMixer, product
from jaxlab.optim.mixing.sharded import AllGatherMixer, CirculantMixer, GraphMixer
from jaxlab.optim.mixing.stacked import DenseMixer, SparseMixer

__all__ = ["make_mixer"]


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
        topology.validate_mixing(product(np.stack(members)), allow_disconnected=allow_disconnected)
        if axis_name is None and exchange != "sparse":
            return DenseMixer(np.stack(members))
        if axis_name is not None and exchange == "all_gather":
            return AllGatherMixer(np.stack(members), axis_name)
        return SequenceMixer(tuple(_static_mixer(member, axis_name, exchange) for member in members))
    return _static_mixer(topology.validate_mixing(array, allow_disconnected=allow_disconnected), axis_name, exchange)


def _static_mixer(matrix: np.ndarray, axis_name: str | None, exchange: str) -> Mixer:
    n = len(matrix)
    if exchange == "auto" and np.allclose(matrix, 1.0 / n, rtol=0, atol=1e-12):
        return MeanMixer(n, axis_name)
    if axis_name is None:
        # benchmarks/optim_gt_nsgdm.py on CPU: on a ring of 128 the gathers are 1.6 times as fast; on rings of 8 and 32
        # they are up to 1.2 times as fast for tiny leaves and no faster for a decoder, where one product is simpler.
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
