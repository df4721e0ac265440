"""Which parts of a model are kept: masks, the strata they are drawn from, and the games they are moves of.

A mask m in {0, 1}^L keeps part i where m_i = 1. Masks are drawn by strata: of each size k in K the same number, and
uniformly among the masks of that size (Ding et al., arXiv 2602.07804, section 3.2 as released). Two choices of K:

* `strata_deploy`: the sizes that will be deployed, as in the paper; the contributions are those near that depth.
* `strata_shapley`: all sizes 0, ..., L; then the expected contribution is exactly the Shapley value.

Example::

    masks = stratified_masks(jax.random.key(0), 32, strata_deploy(32, 14, step=3), 8_000)          # K = 30, 27, ..., 18
    neighbours = flip(masks)                                                                # [8000, 32, 32]: m ⊕ e_i
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

__all__ = [
    "all_masks",
    "check_masks",
    "flip",
    "strata_counts",
    "strata_deploy",
    "strata_shapley",
    "stratified_masks",
    "without",
]


def strata_deploy(num_players: int, max_remove: int, *, step: int = 1) -> tuple[int, ...]:
    """Sizes of the deployed models: from L - 1 or just below, every ``step``, down to L - ``max_remove``.

    Raises:
      ValueError: if ``max_remove`` is not between 1 and L, or ``step`` below 1.
    """
    if not 1 <= max_remove <= num_players:
        raise ValueError(f"max_remove must be between 1 and the {num_players} parts; got {max_remove}")
    if step < 1:
        raise ValueError(f"step must be at least 1; got {step}")
    return tuple(reversed(range(num_players - max_remove, num_players, step)))


def strata_shapley(num_players: int) -> tuple[int, ...]:
    """All sizes, from L down to 0, for which contributions are Shapley values."""
    return tuple(range(num_players, -1, -1))


def strata_counts(strata: Sequence[int], total: int) -> tuple[int, ...]:
    """How many of ``total`` masks each stratum gets: all the same, the first ``total mod J`` one more."""
    share, rest = divmod(total, len(strata))
    return tuple(share + (index < rest) for index in range(len(strata)))


def stratified_masks(
    key: Key[Array, ""],
    num_players: int,
    strata: Sequence[int],
    total: int,
    *,
    dedupe: bool = False,
    protect: Sequence[int] = (),
) -> Bool[Array, "n l"]:
    """Draw masks, stratum by stratum.

    Args:
      key: source of the draws.
      num_players: L.
      strata: sizes K, each once.
      total: number of masks, at least one a stratum.
      dedupe: no mask twice. Where a stratum has fewer masks than its share, the others get the rest, and where all
        together have fewer than ``total``, all of them come. The result's shape is then not known before, so that this
        cannot be traced; without it the function is pure and may be jitted with static sizes.
      protect: parts that every mask keeps; they count in its size.

    Raises:
      ValueError: if there are no strata, one is outside [0, L] or there twice or too small for the protected parts, or
        ``total`` is below their number.
    """
    sizes = _check_strata(num_players, strata, total)
    free = np.setdiff1d(np.arange(num_players), list(protect))
    if outside := [part for part in protect if not 0 <= part < num_players]:
        raise ValueError(f"protected parts must be between 0 and {num_players - 1}; got {outside[0]}")
    protected = num_players - len(free)
    if protected > sizes.min():
        raise ValueError(f"{protected} protected parts do not fit into masks of {sizes.min()}")
    if dedupe:
        drawn = jnp.asarray(_distinct(key, len(free), sizes - protected, total))
    else:
        order = jnp.argsort(jnp.argsort(jax.random.uniform(key, (total, len(free))), axis=1), axis=1)
        drawn = order < np.repeat(sizes - protected, strata_counts(strata, total))[:, None]
    return drawn if not protected else jnp.ones((len(drawn), num_players), bool).at[:, free].set(drawn)


def flip(masks: Bool[Array | np.ndarray, "n l"]) -> Bool[Array, "n l l"]:
    """``[n, i]`` is mask n with part i flipped, ``m ⊕ e_i``."""
    return jnp.asarray(masks)[:, None, :] ^ jnp.eye(masks.shape[1], dtype=bool)


def without(num_players: int, removed: Sequence[int] | Int[np.ndarray, " n"]) -> Bool[np.ndarray, " l"]:
    """The mask that keeps all parts but these."""
    mask = np.ones(num_players, bool)
    mask[np.asarray(removed, int)] = False
    return mask


def all_masks(num_players: int) -> Bool[np.ndarray, "games l"]:
    """All 2^L masks; row s keeps part i where bit i of s is set, the order of `exact_shapley`.

    Raises:
      ValueError: if L is not between 1 and 24.
    """
    if not 1 <= num_players <= 24:
        raise ValueError(f"all masks can be listed for 1 to 24 parts; got {num_players}")
    return (np.arange(2**num_players)[:, None] >> np.arange(num_players)) & 1 == 1


def check_masks(masks: Any, num_players: int | None = None) -> Bool[np.ndarray, "n l"]:
    """Give masks as a Boolean array of NumPy.

    Raises:
      ValueError: if they are no matrix, hold something other than 0 and 1, or have another number of parts.
    """
    array = np.asarray(masks)
    if array.ndim != 2:
        raise ValueError(f"masks must be a matrix [masks, parts]; got shape {array.shape}")
    if array.dtype != bool:
        if not np.isin(array, (0, 1)).all():
            raise ValueError(f"masks must hold 0 and 1 only; got {array[~np.isin(array, (0, 1))].flat[0]}")
        array = array.astype(bool)
    if num_players is not None and array.shape[1] != num_players:
        raise ValueError(f"masks must have one entry for each of the {num_players} parts; got {array.shape[1]}")
    return array


def _check_strata(num_players: int, strata: Sequence[int], total: int) -> np.ndarray:
    sizes = [int(size) for size in strata]
    if not sizes:
        raise ValueError("at least one stratum is needed; got none")
    if outside := [size for size in sizes if not 0 <= size <= num_players]:
        raise ValueError(f"strata must be between 0 and the {num_players} parts; got {outside[0]}")
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"strata must differ; got {tuple(sizes)}")
    if total < len(sizes):
        raise ValueError(f"{len(sizes)} strata need at least as many masks; got {total}")
    return np.array(sizes)


def _distinct(key: Key[Array, ""], num_players: int, sizes: np.ndarray, total: int) -> Bool[np.ndarray, "n l"]:
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
    there_are = [math.comb(num_players, int(size)) for size in sizes]
    wanted = np.zeros(len(sizes), int)
    # Strata that are exhausted leave their share to the others, in the order of the strata.
    while (missing := min(total, sum(there_are)) - wanted.sum()) > 0:
        open_strata = [i for i in range(len(sizes)) if wanted[i] < there_are[i]]
        for i, share in zip(open_strata, strata_counts(open_strata, int(missing)), strict=True):
            wanted[i] = min(wanted[i] + share, there_are[i])
    parts = [
        _distinct_of_size(rng, num_players, int(size), int(number), available)
        for size, number, available in zip(sizes, wanted, there_are, strict=True)
    ]
    return np.concatenate(parts)


def _distinct_of_size(
    rng: np.random.Generator, num_players: int, size: int, number: int, available: int
) -> Bool[np.ndarray, "n l"]:
    if available <= 4 * number:
        chosen = np.sort(rng.choice(available, number, replace=False))
        kept = np.array(list(itertools.combinations(range(num_players), size)), int).reshape(available, size)[chosen]
        masks = np.zeros((number, num_players), bool)
        masks[np.arange(number)[:, None], kept] = True
        return masks
    found = np.zeros((0, num_players), bool)
    while len(found) < number:
        more = rng.random((2 * number, num_players)).argsort(1).argsort(1) < size
        found = np.concatenate([found, more])
        found = found[np.sort(np.unique(found, axis=0, return_index=True)[1])]
    return found[:number]
