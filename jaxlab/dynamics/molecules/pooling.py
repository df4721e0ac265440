r"""Pooling of an embedding ``E [atom, channel]`` to a latent vector, and back-compatible with torch's adaptive pooling.

.. math::
    z = \mathrm{vec}(P_H\, E\, P_W^\top), \qquad (P_m)_{ij} = 1/|B_i| \text{ for } j \in B_i
    = [\lfloor i n/m \rfloor, \lceil (i+1) n/m \rceil) .

``blind`` pools the whole matrix to H x W; ``residue`` pools the atoms of each residue apart, H rows a residue.

Reference: Sengar et al., arXiv 2509.02196 (``AdaptiveAvgPool2d``).

Example:
  >>> adaptive_pool_matrix(10, 4).astype(bool).sum(1)
  array([3, 3, 3, 3])
"""

import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxlab.dynamics.reduced_rank import integer

__all__ = ["adaptive_pool_matrix", "residue_pool_matrix"]


def adaptive_pool_matrix(inputs: int, outputs: int) -> Float[np.ndarray, "outputs inputs"]:
    """The averages of adaptive pooling from ``inputs`` places to ``outputs``; rows sum to one.

    A warning is given where there are more outputs than inputs: bins repeat then.

    Raises:
      TypeError: sizes that are no integers.
      ValueError: a size below 1.
    """
    inputs, outputs = integer("inputs", inputs), integer("outputs", outputs)
    if min(inputs, outputs) < 1:
        raise ValueError(f"pooling needs at least one place on both sides, got {inputs} to {outputs}")
    if outputs > inputs:
        warnings.warn(f"pooling {inputs} places to {outputs}: bins repeat", stacklevel=2)
    low = np.arange(outputs) * inputs // outputs
    high = -(-(np.arange(outputs) + 1) * inputs // outputs)
    places = np.arange(inputs)
    member = (places >= low[:, None]) & (places < high[:, None])
    return (member / member.sum(1, keepdims=True)).astype(np.float32)


def residue_pool_matrix(residues: Sequence[int] | np.ndarray, outputs: int) -> Float[np.ndarray, "rows atoms"]:
    """Adaptive pooling of the atoms of each residue to ``outputs`` rows, residues in order of appearance.

    Args:
      residues: number of the residue of each atom.
      outputs: rows for each residue.

    Raises:
      TypeError: residues that are no integers.
      ValueError: no atom, no output.
    """
    residues = np.asarray(residues)
    if residues.size and not np.issubdtype(residues.dtype, np.integer):
        raise TypeError(f"residues must be integers, got {residues.dtype}")
    if residues.ndim != 1 or len(residues) == 0:
        raise ValueError(f"residues must be one integer an atom, got shape {residues.shape}")
    _, first = np.unique(residues, return_index=True)
    rows = []
    for residue in residues[np.sort(first)]:
        atoms = np.flatnonzero(residues == residue)
        matrix = np.zeros((outputs, len(residues)), np.float32)
        matrix[:, atoms] = adaptive_pool_matrix(len(atoms), outputs)
        rows.append(matrix)
    return np.concatenate(rows)
