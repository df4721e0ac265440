"""Where finer coefficients pay: the importance of each tensor, and pieces in proportion to it.

After a first stage with one coefficient a tensor ::

    Ĩ_ℓ = Σ_k |α_k^ℓ| ‖τ_k^ℓ‖₁,     I = Ĩ / Σ Ĩ,     m_ℓ = ⌊B L I_ℓ^κ / Σ_j I_j^κ⌋

for L tensors: B is the mean number of pieces of a tensor, κ how much they gather where the importance is. A tensor
with m = 0 stays at the anchor::

    importance = layer_importance(coefficients, vectors)
    layout = tensor_layout(vectors, chunks=allocate_chunks(importance, budget=1.2))

Reference: section 3.3 of Zhang et al. 2026, Expert Merging, arXiv 2509.25712.

Deviations from the paper:

1. The paper prints B without L. With its B of about 1 that would leave one piece for the whole model.
2. ``min_chunks=1`` keeps a coefficient for every tensor. With few tensors the floor freezes most of them: of L = 9 at
   B = 1.2 all those with less than 0.093 of the importance.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxlab.editing.expert_merging.coefficients import Coefficients, Layout, merge
from jaxlab.editing.task_vectors import TaskVectors

__all__ = ["allocate_chunks", "layer_importance"]


def layer_importance(coefficients: Coefficients, vectors: TaskVectors) -> dict[str, Float[Array, " layers"]]:
    """I: from path to the importance of each of its tensors; all together sum to one.

    Args:
      coefficients: α of the first stage; pieces count with their own.
      vectors: τ, those that α belongs to.
    """
    layout = coefficients.layout
    shape = {leaf.path: jnp.zeros(leaf.shape) for leaf in layout.leaves}
    sizes = {path: jnp.abs(vector) for path, vector in vectors.items()}
    alpha = {path: jnp.abs(one) for path, one in coefficients.alpha.items()}
    masses = {
        leaf.path: merge(shape, sizes, alpha, layout)[leaf.path].reshape(len(leaf.pieces), -1).sum(1)
        for leaf in layout.leaves
    }
    total: Any = sum(mass.sum() for mass in masses.values())
    return {path: mass / total for path, mass in masses.items()}


def allocate_chunks(
    importance: Mapping[str, Any],
    layout: Layout,
    *,
    budget: float = 1.2,
    kappa: float = 1.0,
    min_chunks: int = 0,
) -> dict[str, np.ndarray]:
    """m: from path to the number of pieces of each of its tensors, as `tensor_layout` takes them.

    Args:
      importance: I, from `layer_importance`.
      layout: of the tensors, for their sizes, which no number of pieces exceeds.
      budget: B, 0.9 to 1.2 in the paper; at least 3 where there are fewer than some fifty tensors.
      kappa: κ; 0 gives every tensor ⌊B⌋ pieces.
      min_chunks: fewest pieces; 0 is the paper's.

    Raises:
      ValueError: a budget that is not positive, a negative κ or ``min_chunks``, importances of other paths or that are
        not finite, or pieces for no tensor at all.
    """
    if not budget > 0 or not np.isfinite(budget):
        raise ValueError(f"budget must be positive, got {budget}")
    if not kappa >= 0 or min_chunks < 0:
        raise ValueError(f"kappa and min_chunks must not be negative, got {kappa} and {min_chunks}")
    paths = [leaf.path for leaf in layout.leaves]
    if set(paths) != importance.keys():
        raise ValueError(f"importance must have the paths of the layout, got {sorted(importance)}")
    flat = np.concatenate([np.asarray(importance[path], np.float64).reshape(-1) for path in paths])
    if not np.isfinite(flat).all() or flat.min() < 0 or not flat.max() > 0:
        raise ValueError(f"importance must be finite and not negative, and not all 0; got {flat}")
    shares = flat**kappa
    # A floor must not depend on the last bit of a share.
    wanted = np.floor(budget * len(flat) * shares / shares.sum() * (1 + 1e-6))
    sizes = np.repeat([leaf.size for leaf in layout.leaves], [len(leaf.pieces) for leaf in layout.leaves])
    pieces = np.clip(wanted.astype(np.int64), min_chunks, sizes)
    if pieces.sum() == 0:
        raise ValueError(
            f"budget {budget} gives none of {len(flat)} tensors a piece of its own, so that all are frozen: raise it, "
            "or min_chunks"
        )
    bounds = np.cumsum([len(leaf.pieces) for leaf in layout.leaves])[:-1]
    return dict(zip(paths, np.split(pieces, bounds), strict=True))
