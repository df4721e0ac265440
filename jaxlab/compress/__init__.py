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
from jaxlab.compress.attribution import *  # noqa: F403
from jaxlab.compress.deletion import *  # noqa: F403
from jaxlab.compress.estimation import *  # noqa: F403
from jaxlab.compress.evaluations import *  # noqa: F403
from jaxlab.compress.masks import *  # noqa: F403
from jaxlab.compress.residual_stack import *  # noqa: F403
from jaxlab.compress.selection import *  # noqa: F403
from jaxlab.compress.utilities import *  # noqa: F403

__all__ = [
    *attribution.__all__,
    *deletion.__all__,
    *estimation.__all__,
    *evaluations.__all__,
    *masks.__all__,
    *residual_stack.__all__,
    *selection.__all__,
    *utilities.__all__,
    "attribution",
    "baselines",
    "deletion",
    "estimation",
    "evaluations",
    "masked_losses",
    "masks",
    "pairwise_ridge",
    "recovery",
    "residual_stack",
    "selection",
    "surrogate",
    "utilities",
]
