"""Group fairness of classifiers, and what task arithmetic does to it (arXiv 2505.24262).

Fine-tune once for every group of people, keep what changed, and choose afterwards how much of each change to add::

    tuned = subgroup_finetune(loss_fn, base, data, membership, optimizer, key, steps=600, batch_size=128)
    vectors = task_vectors(base, tuned.models())
    table = lambda_sweep(apply_fn, base, vectors, jnp.linspace(0, 1, 11), inputs, labels, membership)
    chosen = select_scale(table, reference_accuracy=0.69)
    model = apply(base, vectors, table.scales[chosen.row])

* :mod:`~jaxlab.editing.fairness.group_statistics`: rates of groups, differences between them, intervals;
* :mod:`~jaxlab.editing.fairness.subgroups`: one fine-tuned model a group, all at once;
* :mod:`~jaxlab.editing.fairness.sweep`: metrics at every coefficient, and which coefficient to take;
* :mod:`~jaxlab.editing.fairness.bounds`: how much disparity a change of coefficients can cause.
"""

from jaxlab.editing.fairness.bounds import (
    FairnessBounds,
    LipschitzEstimate,
    OddsBound,
    demographic_parity_bound,
    density_bound,
    empirical_lipschitz,
    equalized_odds_bound,
    fairness_bounds,
    merge_distance,
    published_bound,
)
from jaxlab.editing.fairness.group_statistics import (
    GroupStatistics,
    Rates,
    bootstrap_interval,
    concerns,
    demographic_parity_difference,
    equal_opportunity_difference,
    equalized_odds_difference,
    group_statistics,
    membership_from_ids,
    one_vs_rest,
    resample,
)
from jaxlab.editing.fairness.subgroups import SubgroupModels, subgroup_finetune
from jaxlab.editing.fairness.sweep import Selection, SweepTable, lambda_sweep, predict, select_scale

__all__ = [
    "FairnessBounds",
    "GroupStatistics",
    "LipschitzEstimate",
    "OddsBound",
    "Rates",
    "Selection",
    "SubgroupModels",
    "SweepTable",
    "bootstrap_interval",
    "concerns",
    "demographic_parity_bound",
    "demographic_parity_difference",
    "density_bound",
    "empirical_lipschitz",
    "equal_opportunity_difference",
    "equalized_odds_bound",
    "equalized_odds_difference",
    "fairness_bounds",
    "group_statistics",
    "lambda_sweep",
    "membership_from_ids",
    "merge_distance",
    "one_vs_rest",
    "predict",
    "published_bound",
    "resample",
    "select_scale",
    "subgroup_finetune",
]
