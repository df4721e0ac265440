"""Fairness of task arithmetic: what the paper promises, measured.

Gomezjurado Gonzalez et al., arXiv 2505.24262. A classifier is fine-tuned once for every group; the sum of what changed,
times λ, is added to the base. Recidivism and income tables with a small network, and posts with a sentence encoder whose
upper layers are trained; against fine-tuning on everybody (and the same scaled by λ), low-rank adapters, reweighing and
fairlearn's mitigations. Every choice is made on validation rows, every number is of test rows.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.editing.fairness import (
    demographic_parity_difference,
    equalized_odds_difference,
    group_statistics,
    lambda_sweep,
    resample,
    subgroup_finetune,
)
from jaxlab.experiments.base import Claim, Experiment, Run
from jaxlab.experiments.task_arithmetic_fairness import plots
from jaxlab.experiments.task_arithmetic_fairness.evaluation import (
    METRICS,
    SCALES,
    bounds_of,
    count_violations,
    evaluate,
)
from jaxlab.experiments.task_arithmetic_fairness.mitigations import has_fairlearn, mitigate
from jaxlab.experiments.task_arithmetic_fairness.people import ATTRIBUTES, People, Split, load_people
from jaxlab.experiments.task_arithmetic_fairness.tables import Training, network, score, train_models

__all__ = ["EXPERIMENT", "Config"]

MAIN = "compas.sex"
_ACCURACY, _PARITY, _ODDS = (METRICS.index(name) for name in ("accuracy", "demographic_parity", "equalized_odds"))
_MODELS = ("full", "lora", "reweighed")
