"""From true evaluations to contributions: surrogate, fit, estimate in one call, and what may be wrong with them.

Example::

    strata = strata_deploy(30, 11)
    masks = stratified_masks(key, 30, strata, 300, dedupe=True)
    values = evaluate_masks(utility, masks, cache=cache)
    found = estimate_contributions(key, masks, values, strata)
    removed = rank(found.contribution.mean, 6, protect=(0, 1))
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxlab.compress import pairwise_ridge, surrogate
from jaxlab.compress.attribution import Contribution, contributions
from jaxlab.compress.masks import stratified_masks
from jaxlab.compress.surrogate import Fit, check_pairs, mlp_surrogate, to_target
from jaxlab.compress.utilities import keep_finite, loss_increase

__all__ = ["SURROGATES", "Estimate", "UnreliableWarning", "check_depth", "costly_blocks", "estimate_contributions"]

SURROGATES = ("mlp", "pairwise")
LEAST_R2 = 0.5
FOLD_QUERIES = 4_000
COSTLY = 0.5


class UnreliableWarning(UserWarning):
    """A ranking that rests on a poor fit, or on strata far from where it is used."""


class Estimate(NamedTuple):
    """Contributions and the surrogate that they were estimated on.

    Attributes:
      contribution: on the scale of ``target``; larger is more valuable. Its standard error is over the masks of the
        estimate.
      fit_error: standard error of the contributions over the masks that were evaluated, by the jackknife over folds;
        NaN without folds. It is the larger one where evaluations are few.
      fit: the surrogate, with its quality on held-out masks.
      target: scale of the scores that was fitted, see `to_target`.
      truth: the values that were fitted, one a usable mask, in the order of ``fit.predicted``.
      sizes: how many blocks each of these masks keeps.
    """

    contribution: Contribution
    fit_error: Float[Array, " l"]
    fit: Fit
    target: str
    truth: Float[np.ndarray, " n"]
    sizes: Int[np.ndarray, " n"]


def estimate_contributions(
    key: Key[Array, ""],
    masks: Any,
    scores: Any,
    strata: Sequence[int],
    *,
    kind: str = "mlp",
    target: str | None = None,
    queries: int = 80_000,
    folds: int | None = 5,
    protect: Sequence[int] = (),
) -> Estimate:
    """Fit a surrogate to evaluated masks and estimate the contributions under it.

    Args:
      key: source of all draws.
      masks: ``[n, L]``; those whose score is not finite are dropped, and with a logarithmic target those of score 0.
      scores: ``[n]``, 1 for the whole model.
      strata: sizes of the masks of the estimate.
      kind: "mlp" is the paper's network, "pairwise" the closed form of `jaxlab.compress.pairwise_ridge`.
      target: scale to fit; None means the paper's "score" for "mlp", "log1p" for "pairwise".
      queries: masks of the estimate, the paper's 80,000.
      folds: parts that are held out in turn; None holds out the paper's L masks.
      protect: blocks that all masks keep; what is said of them is what the surrogate guesses.

    Raises:
      ValueError: if the kind is unknown, fewer than two masks have a usable score, or as `stratified_masks`.

    Warns:
      UnreliableWarning: if R² on held-out masks is below 0.5.
    """
    if kind not in SURROGATES:
        raise ValueError(f"kind must be one of {', '.join(SURROGATES)}; got {kind!r}")
    target = ("score" if kind == "mlp" else "log1p") if target is None else target
    array, numbers = keep_finite(masks, scores)
    if target != "score":
        array, numbers = array[numbers > 0], numbers[numbers > 0]
    array, values = check_pairs(array, to_target(numbers, target))
    key_fit, key_queries = jax.random.split(key)
    folds = None if folds is None else max(2, min(folds, len(array)))
    if kind == "mlp":
        network = mlp_surrogate(array.shape[1], output="sigmoid" if target == "score" else "linear")
        found = surrogate.fit(key_fit, network, array, values, folds=folds)
    else:
        found = pairwise_ridge.fit(array, values, key=key_fit, full=float(target == "score"), folds=folds)
    if not found.quality.r2 >= LEAST_R2:
        warnings.warn(
            f"R² of {kind} on held-out masks is {found.quality.r2:.2f}, below {LEAST_R2}: with {len(array)} evaluated "
            f"masks the ranking of {array.shape[1]} blocks is unreliable; evaluate more",
            UnreliableWarning,
            stacklevel=2,
        )
    drawn = stratified_masks(key_queries, array.shape[1], strata, queries, protect=protect)
    # Every so many, so that the shorter estimates have all strata.
    few = drawn[:: max(1, len(drawn) // FOLD_QUERIES)]
    return Estimate(
        contributions(found.apply, found.params, drawn),
        _jackknife(found, few, folds is not None),
        found,
        target,
        values,
        array.sum(1),
    )


def _jackknife(found: Fit, masks: Array, has_folds: bool) -> Array:
    """``√((F - 1) / F Σ_f (φ_f - φ̄)²)`` over the fits that left fold f out."""
    if not has_folds:
        return jnp.full((masks.shape[1],), jnp.nan)
    of_folds = jax.tree.map(lambda leaf: leaf[:-1], found.params_of_sets)
    means = jax.lax.map(lambda params: contributions(found.apply, params, masks).mean, of_folds)
    return jnp.sqrt((means.shape[0] - 1) * jnp.var(means, axis=0))


def costly_blocks(scores_alone: Any, *, above: float = COSTLY, most: int | None = None) -> tuple[int, ...]:
    """Blocks that no good set removes, since the removal of each alone costs too much.

    Where a few blocks are vital, nearly all random masks of a deep stratum lack one of them, score nothing and teach
    nothing of the others. Masks that keep them all are worth their evaluation. An extra, not in the paper.

    Args:
      scores_alone: ``[L]``, the score without each block; one that is not finite counts as 0.
      above: nats of loss from which a block is kept; 0.5 is 1.65 times the perplexity.
      most: keep only so many, those that cost most.
    """
    cost = loss_increase(np.nan_to_num(np.asarray(scores_alone, np.float32), nan=0.0, posinf=0.0))
    order = np.argsort(-cost, kind="stable")
    costly = order[cost[order] > above]
    return tuple(sorted(int(block) for block in costly[:most]))


def check_depth(num_players: int, strata: Sequence[int], remove: int) -> None:
    """Warn if a model of L - ``remove`` blocks is not near the strata: contributions are valid only there.

    Warns:
      UnreliableWarning: if L - ``remove`` is outside [min K - 1, max K].
    """
    left = num_players - remove
    if not min(strata) - 1 <= left <= max(strata):
        warnings.warn(
            f"{left} blocks are left, but contributions were estimated on {min(strata)} to {max(strata)} of them; "
            "take strata around that number",
            UnreliableWarning,
            stacklevel=2,
        )
