"""Merging: one model with the skills of K experts that were trained from the same base.

=================== ================================ ======================================= ==========================
name                class                            what it does                            reference
=================== ================================ ======================================= ==========================
task_arithmetic     `TaskArithmetic`                 λ Σ w_k τ_k                             arXiv 2212.04089
weight_average      `weight_average`                 the mean of the models                  arXiv 2203.05482
ties                `Ties`                           trim, elect a sign, average             arXiv 2306.01708
dare, dare_ties     `Dare`                           drop at random, then one of the above   arXiv 2311.03099
tsv                 `TaskSingularVectors`            singular vectors made orthogonal        arXiv 2412.00081
iso_c               `IsotropicMerging`               equal singular values                   arXiv 2502.04959
wudi                `Wudi`                           least disturbance, 300 steps            arXiv 2503.08099
wudi_closed_form    `WudiClosedForm`                 the same, its minimiser                 arXiv 2503.08099
wudi_low_rank       `WudiLowRank`                    WUDI v2                                 code of arXiv 2509.25712
regmean             `RegMean`                        nearest outputs; needs inputs           arXiv 2212.09849
=================== ================================ ======================================= ==========================

Every method is a frozen dataclass with ``combine(vectors [K, ...]) -> [...]``, a pure function of the task vectors of
one tensor. Built on it are `merge` for trees of parameters, `merge_tensors` for state dicts, `merge_checkpoints` for
files that are larger than memory, and ``jaxlab merge``, which also reads configuration files of mergekit
(`read_mergekit`).

Example:
  >>> import jax.numpy as jnp
  >>> from jaxlab.editing.merging import Ties, merge
  >>> from jaxlab.editing.task_vectors import task_vectors
  >>> base = {"w": jnp.zeros(3)}
  >>> vectors = task_vectors(base, [{"w": jnp.array([1.0, -2.0, 3.0])}, {"w": jnp.array([-0.5, -1.0, 1.0])}])
  >>> merge(base, vectors, Ties(density=1.0))["w"].tolist()
  [1.0, -1.5, 2.0]
"""

from jaxlab.editing.merging.arithmetic import TaskArithmetic, weight_average
from jaxlab.editing.merging.checkpoints import merge_checkpoints, merge_tensors, merged_names
from jaxlab.editing.merging.choice import METHODS, make_method, options_of
from jaxlab.editing.merging.dare import Dare
from jaxlab.editing.merging.experts import Base, Expert, check_experts, open_base, open_expert
from jaxlab.editing.merging.mergekit import MergekitFile, read_mergekit
from jaxlab.editing.merging.method import MatrixMethod, MergeMethod
from jaxlab.editing.merging.regmean import RegMean, input_gram
from jaxlab.editing.merging.spectral import IsotropicMerging, TaskSingularVectors
from jaxlab.editing.merging.streaming import TensorSummary
from jaxlab.editing.merging.ties import Ties, TiesStatistics
from jaxlab.editing.merging.tree import DEFAULT_EXCLUDE, combine, merge
from jaxlab.editing.merging.wudi import Wudi, WudiClosedForm, WudiLowRank, interference

__all__ = [
    "DEFAULT_EXCLUDE",
    "METHODS",
    "Base",
    "Dare",
    "Expert",
    "IsotropicMerging",
    "MatrixMethod",
    "MergeMethod",
    "MergekitFile",
    "RegMean",
    "TaskArithmetic",
    "TaskSingularVectors",
    "TensorSummary",
    "Ties",
    "TiesStatistics",
    "Wudi",
    "WudiClosedForm",
    "WudiLowRank",
    "check_experts",
    "combine",
    "input_gram",
    "interference",
    "make_method",
    "merge",
    "merge_checkpoints",
    "merge_tensors",
    "merged_names",
    "open_base",
    "open_expert",
    "options_of",
    "read_mergekit",
    "weight_average",
]
