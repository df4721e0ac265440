"""Which blocks to remove: the paper's one-shot ranking, and a search over sets.

`rank` sorts by contribution (arXiv 2602.07804, section 3.5); the sets for more and more removed blocks are nested. A
ranking cannot know that two blocks are good only as a pair's backup, which the surrogate does: `search` looks for the
best set under it, and since the best of many predictions is an optimistic one, `verify` evaluates the few best sets
truly and keeps the best of those.

Example::

    removed = rank(found.mean, 6, protect=(0, 1))
    candidates = search(fitted.apply, fitted.params, 30, 6, start=removed)
    best = verify(utility, candidates.masks[:8])                                          # 8 evaluations
    np.flatnonzero(~best.mask)

`search` and `verify` are extras, not in the paper.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxlab.compress.masks import check_masks, without

__all__ = ["Candidates", "Verified", "check_protected", "check_removal", "rank", "search", "verify"]


class Candidates(NamedTuple):
    """Masks that all keep the same number of blocks, the best first.

    Attributes:
      masks: True keeps a block.
      predicted: values under the surrogate.
    """

    masks: Bool[np.ndarray, "n l"]
    predicted: Float[np.ndarray, " n"]


class Verified(NamedTuple):
    """The best of some masks by true evaluation.

    Attributes:
      mask: the best.
      value: its value.
      values: those of all, in their order.
    """

    mask: Bool[np.ndarray, " l"]
    value: float
    values: Float[np.ndarray, " n"]


def rank(contribution: Any, remove: int, *, protect: Sequence[int] = ()) -> Int[np.ndarray, " n"]:
    """The blocks of the smallest contribution, the smallest first; of equal ones the deeper first.

    Args:
      contribution: ``[L]``, larger is more valuable; of `contributions` or any score of `jaxlab.compress.baselines`.
      remove: how many.
      protect: blocks that stay.

    Raises:
      ValueError: if a contribution is NaN, a protected block does not exist, or not so many can be removed.
    """
    scores = np.asarray(contribution, np.float64)
    if scores.ndim != 1 or np.isnan(scores).any():
        raise ValueError(f"contributions must be one number a block, and none NaN; got {scores}")
    check_removal(len(scores), remove, protect)
    order = np.lexsort((-np.arange(len(scores)), scores))
    return order[~np.isin(order, list(protect))][:remove]


def search(
    apply_fn: Callable[[PyTree, Array], Array],
    params: PyTree,
    num_players: int,
    remove: int,
    *,
    start: Sequence[int] | Int[np.ndarray, " n"] | None = None,
    beam: int = 32,
    protect: Sequence[int] = (),
) -> Candidates:
    """Search for the sets whose removal costs least under a surrogate.

    A beam grows the set block by block; then, with ``start`` among its sets, every exchange of a removed block for a
    kept one is tried, as long as the best set gets better.

    Args:
      apply_fn: ``(params, masks [n, L]) -> values [n]``; larger is better.
      params: its parameters.
      num_players: L.
      remove: how many blocks.
      start: a set to begin the exchanges from too, such as that of `rank`.
      beam: sets that are kept at a time, and at most returned.
      protect: blocks that stay.

    Raises:
      ValueError: if ``beam`` is below one, or as `rank`.
    """
    check_removal(num_players, remove, protect)
    if beam < 1:
        raise ValueError(f"beam must be at least 1; got {beam}")
    free = np.ones(num_players, bool)
    free[list(protect)] = False
    value_of = functools.partial(_values, apply_fn, params)
    masks = np.ones((1, num_players), bool)
    for _ in range(remove):
        masks, predicted = _best(_children(masks, free), value_of, beam)
    if start is not None:
        masks = np.concatenate([masks, without(num_players, start)[None]])
    masks, predicted = _best(masks, value_of, beam)
    # Each round strictly improves the best of finitely many sets.
    while 0 < remove < free.sum():
        more, values = _best(np.concatenate([masks, _exchanges(masks, free)]), value_of, beam)
        improved = values[0] > predicted[0]
        masks, predicted = more, values
        if not improved:
            break
    return Candidates(masks, predicted)


def verify(utility: Callable[[Any], Any], masks: Any) -> Verified:
    """Evaluate masks truly and keep the best; the first of equal ones.

    Raises:
      ValueError: if there is no mask, or none has a finite value.
    """
    array = check_masks(masks)
    values = np.asarray(utility(array), np.float32)
    if not np.isfinite(values).any():
        raise ValueError(f"none of {len(array)} masks has a finite value")
    best = int(np.nanargmax(np.where(np.isfinite(values), values, np.nan)))
    return Verified(array[best], float(values[best]), values)


def check_removal(num_players: int, remove: int, protect: Iterable[int] = ()) -> None:
    """Raise ValueError unless ``remove`` of the blocks can go, at least one staying and the protected ones there."""
    if not 0 <= remove < num_players:
        raise ValueError(f"between 0 and {num_players - 1} of {num_players} blocks can be removed; got {remove}")
    protected = check_protected(num_players, protect)
    if remove + len(protected) > num_players:
        raise ValueError(f"{remove} removed and {len(protected)} protected blocks are more than the {num_players}")


def check_protected(num_players: int, protect: Iterable[int]) -> tuple[int, ...]:
    """Give the protected blocks, each once.

    Raises:
      ValueError: if there is no such block.
    """
    protected = tuple(sorted({int(block) for block in protect}))
    if outside := [block for block in protected if not 0 <= block < num_players]:
        raise ValueError(f"protected blocks must be between 0 and {num_players - 1}; got {outside[0]}")
    return protected


def _children(masks: np.ndarray, free: np.ndarray) -> np.ndarray:
    """All masks with one more block removed."""
    row, block = np.nonzero(masks & free)
    children = masks[row]
    children[np.arange(len(row)), block] = False
    return children


def _exchanges(masks: np.ndarray, free: np.ndarray) -> np.ndarray:
    """All masks with one removed block brought back and another one removed."""
    row, back, out = np.nonzero(~masks[:, :, None] & (masks & free)[:, None, :])
    exchanged = masks[row]
    exchanged[np.arange(len(row)), back] = True
    exchanged[np.arange(len(row)), out] = False
    return exchanged


def _best(
    masks: np.ndarray, value_of: Callable[[np.ndarray], np.ndarray], number: int
) -> tuple[Bool[np.ndarray, "n l"], Float[np.ndarray, " n"]]:
    distinct = np.unique(masks, axis=0)
    values = value_of(distinct)
    order = np.argsort(-values, kind="stable")[:number]
    return distinct[order], values[order]


def _values(apply_fn: Callable[..., Array], params: PyTree, masks: np.ndarray) -> np.ndarray:
    # Rounded up to a power of two, so that few programs are compiled.
    room = 1 << (len(masks) - 1).bit_length()
    padded = np.concatenate([masks, np.repeat(masks[:1], room - len(masks), axis=0)])
    return np.asarray(_apply(apply_fn, params, padded))[: len(masks)]


@functools.partial(jax.jit, static_argnums=0)
def _apply(apply_fn: Callable[..., Array], params: PyTree, masks: Array) -> Array:
    return apply_fn(params, masks)
