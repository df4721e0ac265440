"""Smaller models: which parts of a network are worth keeping, and the network without the others.

Layer pruning as a cooperative game (Ding et al., arXiv 2602.07804):

* :mod:`~jaxlab.compress.masks`: masks of kept parts, drawn by strata.
* :mod:`~jaxlab.compress.residual_stack`, :mod:`~jaxlab.compress.masked_losses`: a network with blocks left out, for
  many masks at a time.
* :mod:`~jaxlab.compress.utilities`, :mod:`~jaxlab.compress.evaluations`: the value of masks, kept on disk.
* :mod:`~jaxlab.compress.surrogate`, :mod:`~jaxlab.compress.pairwise_ridge`: cheap models of a game.
* :mod:`~jaxlab.compress.attribution`: contributions of parts, exact and sampled Shapley values.
* :mod:`~jaxlab.compress.estimation`: both in one call, with warnings where they cannot be trusted.
* :mod:`~jaxlab.compress.selection`, :mod:`~jaxlab.compress.baselines`: which blocks to remove.
* :mod:`~jaxlab.compress.deletion`, :mod:`~jaxlab.compress.recovery`: the smaller network, and its training.
"""

from jaxlab.compress import (
    attribution,
    baselines,
    deletion,
    estimation,
    evaluations,
    masked_losses,
    masks,
    pairwise_ridge,
    recovery,
    residual_stack,
    selection,
    surrogate,
    utilities,
)
from jaxlab.compress.attribution import (
    Contribution,
    contributions,
    exact_contributions,
    exact_shapley,
    permutation_shapley,
    shapley_from_permutations,
)
from jaxlab.compress.deletion import prune_config, prune_model, prune_stacked
from jaxlab.compress.estimation import (
    SURROGATES,
    Estimate,
    UnreliableWarning,
    check_depth,
    costly_blocks,
    estimate_contributions,
)
from jaxlab.compress.evaluations import EvaluationCache, fingerprint
from jaxlab.compress.masks import (
    all_masks,
    check_masks,
    flip,
    strata_counts,
    strata_deploy,
    strata_shapley,
    stratified_masks,
    without,
)
from jaxlab.compress.residual_stack import (
    ResidualStack,
    TokenBatch,
    decoder_stack,
    hidden_states,
    num_blocks,
    stack_trees,
    token_batch,
)
from jaxlab.compress.selection import Candidates, Verified, check_protected, check_removal, rank, search, verify
from jaxlab.compress.utilities import (
    StackUtility,
    Utility,
    evaluate_masks,
    gated_utility,
    keep_finite,
    loss_increase,
    make_utility,
)

__all__ = [
    "SURROGATES",
    "Candidates",
    "Contribution",
    "Estimate",
    "EvaluationCache",
    "ResidualStack",
    "StackUtility",
    "TokenBatch",
    "UnreliableWarning",
    "Utility",
    "Verified",
    "all_masks",
    "attribution",
    "baselines",
    "check_depth",
    "check_masks",
    "check_protected",
    "check_removal",
    "contributions",
    "costly_blocks",
    "decoder_stack",
    "deletion",
    "estimate_contributions",
    "estimation",
    "evaluate_masks",
    "evaluations",
    "exact_contributions",
    "exact_shapley",
    "fingerprint",
    "flip",
    "gated_utility",
    "hidden_states",
    "keep_finite",
    "loss_increase",
    "make_utility",
    "masked_losses",
    "masks",
    "num_blocks",
    "pairwise_ridge",
    "permutation_shapley",
    "prune_config",
    "prune_model",
    "prune_stacked",
    "rank",
    "recovery",
    "residual_stack",
    "search",
    "selection",
    "shapley_from_permutations",
    "stack_trees",
    "strata_counts",
    "strata_deploy",
    "strata_shapley",
    "stratified_masks",
    "surrogate",
    "token_batch",
    "utilities",
    "verify",
    "without",
]
