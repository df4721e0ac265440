"""Games whose truth can be enumerated: sixteen blocks of which neighbours back each other up, and a pair of twins."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import compress
from jaxlab.compress import ResidualStack, baselines

__all__ = ["TWIN_COSTS", "Redundant", "error_of_small_games", "twins"]

TWIN_COSTS = (0.3, 1.0)  # of the feature that one block writes, and of that which two write


class Redundant:
    """``s(m) = exp(-Σ c_i r_i - Σ_{i<j} J_ij r_i r_j)``, r = 1 - m: first and last blocks dear, neighbours redundant.

    c is Gamma(1.5, 0.08) with 1.5, 0.5 and 0.6 more on the first two and the last; J is ``0.25 exp(-(j - i)/1.5)``
    times U(0.2, 1).
    """

    def __init__(self, seed: int, num_players: int):
        rng = np.random.default_rng(seed)
        self.single = rng.gamma(1.5, 0.08, num_players)
        self.single[[0, 1, -1]] += [1.5, 0.5, 0.6]
        distance = np.arange(num_players)[None] - np.arange(num_players)[:, None]
        redundancy = 0.25 * np.exp(-distance / 1.5) * rng.uniform(0.2, 1, distance.shape)
        self.pair = np.triu(redundancy, 1)

    def __call__(self, masks: Any) -> np.ndarray:
        """Scores, float32."""
        removed = 1.0 - np.asarray(masks, np.float64)
        cost = removed @ self.single + np.einsum("ni,ij,nj->n", removed, self.pair, removed)
        return np.exp(-cost).astype(np.float32)


def error_of_small_games(seed: int, num_players: int, games: int) -> np.ndarray:
    """Largest error of the estimate over all masks of all sizes, against exact Shapley values, for random games.

    In double precision; each stratum is enumerated, so that nothing is random but the games.
    """
    masks = compress.all_masks(num_players)
    weight = 1 << jnp.arange(num_players)

    def lookup(values: jax.Array, masks: jax.Array) -> jax.Array:
        return values[masks.astype(jnp.int32) @ weight]

    errors = []
    with jax.enable_x64(True):
        for game in range(games):
            values = jnp.asarray(np.random.default_rng([seed, game]).normal(size=len(masks)))
            of_sizes = [
                compress.contributions(lookup, values, masks[masks.sum(1) == size]).mean
                for size in range(num_players + 1)
            ]
            errors.append(np.abs(np.mean(of_sizes, axis=0) - _shapley_by_permutations(np.asarray(values))).max())
    return np.array(errors)


def twins() -> dict[str, np.ndarray]:
    """Three blocks of a residual network, the last two of which write the same feature.

    Alone neither is missed, so that leave-one-out removes both. Returns scores and, for both ways, the loss after two
    blocks are gone.
    """
    features = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    stack = ResidualStack(
        embed=lambda params, batch: (jnp.zeros((1, 1, 2)), None),
        block=lambda block, hidden, context: jnp.maximum(hidden, block),
        loss=lambda params, hidden, batch: jnp.sum(jnp.array(TWIN_COSTS) * (1 - hidden[0, 0])),
        blocks=lambda params: params,
    )
    utility = compress.make_utility(stack, features, None)
    values = np.log(utility(compress.all_masks(3)))
    contribution = np.asarray(compress.exact_contributions(values, compress.strata_deploy(3, 2)))
    alone = baselines.leave_one_out(utility, 3)
    sets = [compress.without(3, compress.rank(scores, 2)) for scores in (contribution, alone)]
    losses = utility.losses(np.stack(sets))
    return {"contribution": contribution, "leave_one_out": alone, "losses": losses}


def _shapley_by_permutations(values: np.ndarray) -> np.ndarray:
    """By the other definition: the mean over all orders, one coalition at a time."""
    players = len(values).bit_length() - 1
    total = np.zeros(players)
    orders = list(itertools.permutations(range(players)))
    for order in orders:
        coalition = 0
        for part in order:
            total[part] += values[coalition | 1 << part] - values[coalition]
            coalition |= 1 << part
    return total / len(orders)
