"""Other ways to say which blocks a model can spare.

Scores (larger is more valuable, for `jaxlab.compress.selection.rank`):

* `block_influence`: ShortGPT (Men et al. 2024, arXiv 2403.03853), ``1 - cos(h_l, h_{l+1})`` averaged over tokens.
* `leave_one_out`: Shortened LLaMA (Kim et al. 2024, arXiv 2402.02834) by perplexity: what each block's removal costs.
* `taylor`: the same paper's other criterion, ``Σ |W ⊙ ∂loss/∂W|`` of a block.
* `magnitude`: mean ``|W|`` of a block.

Orders or sets of removal:

* `angular_blocks`: n consecutive blocks (Gromov et al. 2024, arXiv 2403.17887) by the angle between what enters the
  first and what leaves the last.
* `sleb`: greedily by perplexity (Song et al. 2024, arXiv 2402.09025), one true evaluation a remaining block and step.
* `random_blocks`, `deepest_blocks`: at random; the last ones but the very last.

Example::

    states = hidden_states(stack, params, batch)
    rank(block_influence(states), 6)
    found = sleb(utility, 30, 6)
    found.order, found.evaluations
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxlab.compress.masks import without
from jaxlab.compress.residual_stack import ResidualStack
from jaxlab.compress.selection import check_protected, check_removal

__all__ = [
    "Greedy",
    "angular_blocks",
    "angular_distances",
    "block_influence",
    "deepest_blocks",
    "leave_one_out",
    "magnitude",
    "random_blocks",
    "sleb",
    "taylor",
    "taylor_protected",
]


class Greedy(NamedTuple):
    """Blocks in the order in which they were removed.

    Attributes:
      order: the blocks.
      values: of the game after each removal.
      evaluations: how often the game was evaluated.
    """

    order: Int[np.ndarray, " n"]
    values: Float[np.ndarray, " n"]
    evaluations: int


@jax.jit
def block_influence(
    states: Float[Array | np.ndarray, "states b t d"], counts: Bool[Array | np.ndarray, "b t"] | None = None
) -> Float[Array, " l"]:
    """How much each block turns the residual stream: 0 for the identity, 2 for a change of sign.

    Args:
      states: of `hidden_states`.
      counts: tokens that count; None means all.
    """
    states = jnp.asarray(states).astype(jnp.float32)
    weights = jnp.ones(states.shape[1:3]) if counts is None else jnp.asarray(counts).astype(jnp.float32)
    return 1 - jnp.sum(_cosine(states[:-1], states[1:]) * weights, axis=(1, 2)) / jnp.sum(weights)


def angular_distances(states: Float[Array | np.ndarray, "states b t d"], remove: int) -> Float[Array, " starts"]:
    """Angle, as a share of π, between what enters block l and what enters block l + ``remove``, at the last token."""
    states = jnp.asarray(states)[:, :, -1].astype(jnp.float32)
    cosine = _cosine(states[: states.shape[0] - remove], states[remove:])
    return jnp.mean(jnp.arccos(jnp.clip(cosine, -1, 1)), axis=1) / jnp.pi


def angular_blocks(
    states: Float[Array | np.ndarray, "states b t d"], remove: int, *, protect: Sequence[int] = ()
) -> Int[np.ndarray, " n"]:
    """The ``remove`` consecutive blocks that turn the stream least.

    Raises:
      ValueError: if no run of so many blocks avoids the protected ones.
    """
    players = states.shape[0] - 1
    check_removal(players, remove, protect)
    starts = np.arange(players - remove + 1)
    runs = starts[:, None] + np.arange(remove)
    free = ~np.isin(runs, list(protect)).any(1)
    if not free.any():
        raise ValueError(f"no {remove} consecutive blocks are free of the protected ones")
    distances = np.asarray(angular_distances(states, remove))
    return runs[free][np.argmin(distances[free])]


def leave_one_out(utility: Callable[[Any], Any], num_players: int) -> Float[np.ndarray, " l"]:
    """What the removal of each block alone costs: minus the value without it; L evaluations.

    A block whose removal has no finite value is infinitely valuable.
    """
    values = np.asarray(utility(~np.eye(num_players, dtype=bool)), np.float32)
    return np.where(np.isfinite(values), -values, np.inf)


def sleb(utility: Callable[[Any], Any], num_players: int, remove: int, *, protect: Sequence[int] = ()) -> Greedy:
    """Remove block after block, each time the one whose removal costs least; of equal ones the deeper.

    It evaluates Σ (L - j) masks, j < ``remove``, less those of protected blocks.
    """
    check_removal(num_players, remove, protect)
    protected = check_protected(num_players, protect)
    order: list[int] = []
    values: list[float] = []
    evaluations = 0
    for _ in range(remove):
        choices = np.setdiff1d(np.arange(num_players), [*protected, *order])[::-1]
        masks = np.stack([without(num_players, [*order, int(block)]) for block in choices])
        found = np.asarray(utility(masks), np.float32)
        found = np.where(np.isfinite(found), found, -np.inf)
        evaluations += len(masks)
        order.append(int(choices[np.argmax(found)]))
        values.append(float(found.max()))
    return Greedy(np.array(order, int), np.array(values, np.float32), evaluations)


@functools.partial(jax.jit, static_argnums=0)
def taylor(stack: ResidualStack, params: PyTree, batch: PyTree) -> Float[Array, " l"]:
    """``Σ |W ⊙ ∂loss/∂W|`` over the parameters of each block; pure. Its authors keep `taylor_protected` besides."""

    def loss(blocks: PyTree) -> Array:
        hidden, context = stack.embed(params, batch)
        hidden, _ = lax.scan(lambda hidden, block: (stack.block(block, hidden, context), None), hidden, blocks)
        return stack.loss(params, hidden, batch)

    blocks = stack.blocks(params)
    gradients = jax.grad(loss, allow_int=True)(blocks)
    return _sum_of_blocks(
        lambda leaf, gradient: jnp.abs(leaf.astype(jnp.float32) * gradient.astype(jnp.float32)), blocks, gradients
    )[0]


def taylor_protected(num_players: int) -> tuple[int, ...]:
    """The first four and the last two blocks, which Shortened LLaMA never removes by the Taylor criterion."""
    return tuple(sorted({*range(min(4, num_players)), *range(max(0, num_players - 2), num_players)}))


@functools.partial(jax.jit, static_argnums=0)
def magnitude(stack: ResidualStack, params: PyTree) -> Float[Array, " l"]:
    """Mean absolute parameter of each block; pure."""
    total, number = _sum_of_blocks(lambda leaf: jnp.abs(leaf.astype(jnp.float32)), stack.blocks(params))
    return total / number


def random_blocks(
    key: Key[Array, ""], num_players: int, remove: int, *, protect: Sequence[int] = ()
) -> Int[np.ndarray, " n"]:
    """Blocks drawn at random."""
    check_removal(num_players, remove, protect)
    order = np.asarray(jax.random.permutation(key, num_players))
    return order[~np.isin(order, list(protect))][:remove]


def deepest_blocks(num_players: int, remove: int, *, protect: Sequence[int] = ()) -> Int[np.ndarray, " n"]:
    """The last blocks but the very last, the deepest first; the very last goes when nothing else is left."""
    check_removal(num_players, remove, protect)
    order = np.append(np.arange(num_players - 1)[::-1], num_players - 1)
    return order[~np.isin(order, list(protect))][:remove]


def _cosine(first: Array, second: Array) -> Array:
    product = jnp.sum(first * second, axis=-1)
    return product / jnp.maximum(jnp.linalg.norm(first, axis=-1) * jnp.linalg.norm(second, axis=-1), 1e-12)


def _sum_of_blocks(of_leaf: Callable[..., Array], blocks: PyTree, *others: PyTree) -> tuple[Array, int]:
    """Sum over the floating parameters of each block, and their number in one."""
    leaves = list(zip(*map(jax.tree.leaves, (blocks, *others)), strict=True))
    leaves = [each for each in leaves if jnp.issubdtype(each[0].dtype, jnp.floating)]
    sums = [jnp.sum(of_leaf(*each).reshape(each[0].shape[0], -1), axis=1) for each in leaves]
    return sum(sums[1:], sums[0]), sum(each[0][0].size for each in leaves)
