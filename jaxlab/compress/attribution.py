"""What each part contributes to the value of a game: the paper's estimate, and Shapley values to compare with.

For masks m¹, ..., m^Q drawn by strata, the contribution of part i under a model f of the game is (arXiv 2602.07804,
section 3.4) ::

    φ_i = 1/Q Σ_q [ f(m^q with i) - f(m^q without i) ] = 1/Q Σ_q (2 m^q_i - 1) (f(m^q) - f(m^q ⊕ e_i)),

where f(m^q) is shared by all i: Q (L + 1) calls of f in place of 2 Q L. A mask of size k drawn uniformly contains i
with probability k/L, so that with D_i(s) the mean of v(S ∪ i) - v(S) over the S of size s without i ::

    E φ_i = 1/J Σ_j [ k_j/L D_i(k_j - 1) + (1 - k_j/L) D_i(k_j) ].

With all sizes 0, ..., L the weight of every size is 1/L, and E φ is the Shapley value; with other strata it is a
semivalue of the sizes near them, and does not add up to v(1) - v(0).

Example::

    queries = stratified_masks(jax.random.key(1), 30, strata_deploy(30, 11), 80_000)
    found = contributions(fitted.apply, fitted.params, queries)
    found.mean, found.stderr                                                                         # [L], [L]
    exact_shapley(values)                                                     # values [2**L], in the order of all_masks
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Key, PyTree

from jaxlab.compress.masks import flip, strata_shapley

__all__ = [
    "Contribution",
    "contributions",
    "exact_contributions",
    "exact_shapley",
    "permutation_shapley",
    "shapley_from_permutations",
]


class Contribution(NamedTuple):
    """What each part contributes; larger is more valuable.

    Attributes:
      mean: the estimate.
      stderr: its standard error over the draw of the masks; it knows nothing of errors of the surrogate.
    """

    mean: Float[Array, " l"]
    stderr: Float[Array, " l"]


@functools.partial(jax.jit, static_argnums=0, static_argnames="chunk")
def contributions(
    apply_fn: Callable[[PyTree, Array], Array],
    params: PyTree,
    masks: Bool[Array | np.ndarray, "q l"],
    *,
    chunk: int = 4096,
) -> Contribution:
    """Estimate the contributions under a model of the game. Pure.

    Args:
      apply_fn: ``(params, masks [n, L]) -> values [n]``; static, so that the same object compiles once.
      params: its parameters.
      masks: drawn by strata, such as by `stratified_masks`.
      chunk: masks at a time; memory is ``chunk · (L + 1)`` calls. Static.

    Returns:
      Means, and standard errors that count the spread within each size of mask only, as the sizes are not random.
    """
    number, players = masks.shape
    chunk = min(chunk, number)
    padding = -number % chunk
    rows = jnp.pad(jnp.asarray(masks), ((0, padding), (0, 0))).reshape(-1, chunk, players)
    real = (jnp.arange(number + padding) < number).reshape(-1, chunk)

    def step(carry: tuple[Array, Array, Array], xs: tuple[Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
        masks, real = xs
        neighbours = jnp.concatenate([masks[:, None], flip(masks)], axis=1)
        values = apply_fn(params, neighbours.reshape(-1, players)).reshape(chunk, players + 1)
        gains = jnp.where(masks, 1.0, -1.0) * (values[:, :1] - values[:, 1:])
        # By size of the mask: number, mean and sum of squares about it, merged from chunk to chunk (Chan et al.).
        one_hot = (jnp.sum(masks, axis=1)[:, None] == jnp.arange(players + 1)) & real[:, None]
        belongs = one_hot.astype(jnp.float32)
        count = jnp.sum(belongs, axis=0)
        mean = belongs.T @ gains / jnp.maximum(count, 1)[:, None]
        squares = belongs.T @ ((gains - belongs @ mean) ** 2)
        before, mean_before, squares_before = carry
        total = before + count
        share = (count / jnp.maximum(total, 1))[:, None]
        shift = mean - mean_before
        squares = squares + squares_before + shift**2 * before[:, None] * share
        return (total, mean_before + shift * share, squares), None

    start = (jnp.zeros(players + 1), jnp.zeros((players + 1, players)), jnp.zeros((players + 1, players)))
    (count, mean, squares), _ = lax.scan(step, start, (rows, real))
    variance = squares / jnp.maximum(count - 1, 1)[:, None]
    return Contribution(count @ mean / number, jnp.sqrt(count @ variance) / number)


def exact_shapley(values: Float[Array | np.ndarray, " games"]) -> Float[Array, " l"]:
    """Shapley values of a game by enumeration, ``Σ_S |S|! (L - |S| - 1)! / L! (v(S ∪ i) - v(S))``; pure.

    Args:
      values: of all 2^L masks, in the order of `all_masks`.

    Raises:
      ValueError: if their number is no power of two above one.
    """
    return exact_contributions(values, strata_shapley(_players(values)))


def exact_contributions(values: Float[Array | np.ndarray, " games"], strata: Sequence[int]) -> Float[Array, " l"]:
    """What the estimate of `contributions` converges to for these strata, by enumeration; pure.

    Args:
      values: of all 2^L masks, in the order of `all_masks`.
      strata: sizes K.

    Raises:
      ValueError: if the number of values is no power of two above one, or a stratum is outside [0, L].
    """
    players = _players(values)
    if not strata or any(not 0 <= size <= players for size in strata):
        raise ValueError(f"strata must be between 0 and the {players} parts; got {tuple(strata)}")
    weights = np.zeros(players)
    for size in strata:
        if size > 0:
            weights[size - 1] += size / players
        if size < players:
            weights[size] += 1 - size / players
    # D_i(s) is a mean over the masks of size s without i.
    weights /= len(strata) * np.array([math.comb(players - 1, size) for size in range(players)])
    sizes = np.bitwise_count(np.arange(2 ** (players - 1), dtype=np.uint32))
    values = jnp.asarray(values)
    of_mask = jnp.asarray(weights[sizes], values.dtype)

    def contribution(part: Array) -> Array:
        rest = jnp.arange(2 ** (players - 1))
        low = rest & ((1 << part) - 1)
        without_part = ((rest - low) << 1) | low
        return of_mask @ (values[without_part | (1 << part)] - values[without_part])

    return lax.map(contribution, jnp.arange(players))


def permutation_shapley(
    key: Key[Array, ""], utility: Callable[[Any], Any], num_players: int, *, budget: int
) -> Contribution:
    """Shapley values of the true game by random orders of the parts (Castro et al. 2009).

    In each order the parts join one by one, and each is credited with what it adds.

    Args:
      key: source of the orders.
      utility: the game.
      num_players: L, at least 2.
      budget: most evaluations: two for the whole and the empty model, and L - 1 for each order.

    Raises:
      ValueError: if the budget does not pay for two orders.
    """
    orders = (budget - 2) // (num_players - 1) if num_players > 1 else 0
    if orders < 2:
        raise ValueError(f"two orders of {num_players} parts take {2 * num_players} evaluations; got budget {budget}")
    ranks = np.asarray(jnp.argsort(jax.random.uniform(key, (orders, num_players)), axis=1))
    sizes = np.arange(1, num_players)
    joined = ranks[:, None, :] < sizes[:, None]
    ends = np.array([[False], [True]]) & np.ones((2, num_players), bool)
    values = np.asarray(utility(np.concatenate([ends, joined.reshape(-1, num_players)])))
    empty, whole = np.full((orders, 1), values[0]), np.full((orders, 1), values[1])
    paths = np.concatenate([empty, values[2:].reshape(orders, -1), whole], axis=1)
    return shapley_from_permutations(ranks, paths)


def shapley_from_permutations(ranks: Any, paths: Any) -> Contribution:
    """Means and standard errors over orders.

    Args:
      ranks: ``[orders, L]``, the place of each part in each order.
      paths: ``[orders, L + 1]``, the value after 0, 1, ..., L parts.
    """
    gains = jnp.take_along_axis(jnp.diff(jnp.asarray(paths), axis=1), jnp.asarray(ranks), axis=1)
    return Contribution(jnp.mean(gains, axis=0), jnp.std(gains, axis=0, ddof=1) / math.sqrt(gains.shape[0]))


def _players(values: Float[Array | np.ndarray, " games"]) -> int:
    players = values.shape[0].bit_length() - 1
    if values.ndim != 1 or players < 1 or values.shape[0] != 2**players:
        raise ValueError(f"values of all masks are 2, 4, 8, ... numbers; got shape {values.shape}")
    return players
