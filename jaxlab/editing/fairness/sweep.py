"""Accuracy and fairness at every coefficient of task arithmetic, and which coefficient to take.

The models are ::

    θ(λ) = θ₀ + λ Σ_g Δ_g        (one λ for all groups, the paper's protocol: the sum of the vectors, not their mean)
    θ(λ) = θ₀ + Σ_g λ_g Δ_g      (one for each)

`lambda_sweep` makes and evaluates all of them in one compiled program, `select_scale` picks one::

    def apply_fn(params, inputs):  # logits of class 1, [b] (or of both classes, [b, 2])
        return inputs @ params["w"]

    base, vectors = {"w": jnp.zeros(2)}, {"w": jnp.array([[1.0, 0.0], [0.5, 1.0]])}
    inputs = jax.random.normal(jax.random.key(0), (500, 2))
    labels, membership = (inputs[:, 0] > 0).astype(jnp.int32), membership_from_ids(jnp.arange(500) % 2, 2)
    table = lambda_sweep(apply_fn, base, vectors, jnp.linspace(0.0, 1.0, 11), inputs, labels, membership)
    chosen = select_scale(table, reference_accuracy=0.8)
    params = apply(base, vectors, table.scales[chosen.row])

Neither function has an argument for test data: what is chosen must be chosen on rows set aside for it.

Injection of one group's vector into another model is the same sweep from that model:
``lambda_sweep(apply_fn, tuned, {path: leaf[g : g + 1] for path, leaf in vectors.items()}, ...)``.

Reference: section 3 of Gomezjurado Gonzalez et al. 2026, On Fairness of Task Arithmetic, arXiv 2505.24262.

Deviations from the paper:

1. The authors' script chooses λ on the test rows; here nothing can.
2. Their rule takes the least disparity at any accuracy ("min_disparity"), which a model that always says the same wins.
   The default, "constrained", asks for the accuracy of a reference first.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxlab.editing.fairness.group_statistics import (
    GroupStatistics,
    Membership,
    Undefined,
    Vector,
    check_rows,
    demographic_parity_difference,
    equal_opportunity_difference,
    equalized_odds_difference,
    group_statistics,
    is_concrete,
)
from jaxlab.editing.task_vectors import TaskVectors, apply

__all__ = ["Selection", "SweepTable", "lambda_sweep", "predict", "select_scale"]

Rule = Literal["constrained", "min_disparity", "max_accuracy"]

_COLLAPSED = 0.99  # share of rows with one prediction
_CHANCE = 0.55  # balanced accuracy


class SweepTable(NamedTuple):
    """One row for each of s candidates.

    Attributes:
      scales: λ, ``[s]`` or ``[s, g]``.
      logits: of class 1 against class 0, ``[s, n]``.
      statistics: counts of the hard predictions ``logits > 0``.
      accuracy: over all rows, ``[s]``.
      balanced_accuracy: ``[s]``.
      positive_rate: share of rows that are predicted positive, ``[s]``.
      demographic_parity_difference: ``[s]``.
      equalized_odds_difference: ``[s]``.
      equal_opportunity_difference: ``[s]``.
      finite: whether all logits are numbers, ``[s]``; the metrics of other candidates are NaN.
    """

    scales: Float[Array, "s ..."]
    logits: Float[Array, "s n"]
    statistics: GroupStatistics
    accuracy: Float[Array, " s"]
    balanced_accuracy: Float[Array, " s"]
    positive_rate: Float[Array, " s"]
    demographic_parity_difference: Float[Array, " s"]
    equalized_odds_difference: Float[Array, " s"]
    equal_opportunity_difference: Float[Array, " s"]
    finite: Bool[Array, " s"]


class Selection(NamedTuple):
    """The candidate of a rule.

    Attributes:
      row: of the table.
      fulfilled: False where no candidate is accurate enough, so that the most accurate one was taken.
      collapsed: it says the same for more than 99 % of the rows.
      near_chance: its balanced accuracy is at most 0.55.
    """

    row: Int[Array, ""]
    fulfilled: Bool[Array, ""]
    collapsed: Bool[Array, ""]
    near_chance: Bool[Array, ""]


def lambda_sweep(
    apply_fn: Callable[[Any, Any], Array],
    params: PyTree,
    vectors: TaskVectors,
    scales: Any,
    inputs: PyTree,
    labels: Vector,
    membership: Membership,
    *,
    reduce: Literal["sum", "mean"] = "sum",
    models_at_once: int = 1,
    rows_at_once: int | None = None,
    undefined: Undefined = "zero",
) -> SweepTable:
    """Evaluate ``θ + Σ_g λ_g Δ_g`` at every λ.

    Args:
      apply_fn: ``apply_fn(params, inputs)``, logits ``[b]`` or ``[b, 2]``. Keep one function object: the compiled
        program is found by it.
      params: θ, the base or any model with its paths.
      vectors: Δ, ``[g, ...]``. A scalar sweep adds them up once, so that its cost does not depend on g.
      scales: λ, ``[s]`` for one a candidate or ``[s, g]``.
      inputs: tree of arrays with a leading axis of n rows.
      labels: ``[n]``, 0 or 1.
      membership: ``[n, g']``.
      reduce: as in `jaxlab.editing.task_vectors.apply`.
      models_at_once: candidates that are evaluated together; each takes a copy of the parameters. One for large
        models, all for small ones.
      rows_at_once: rows that are evaluated together, all by default.
      undefined: as in `equalized_odds_difference`.

    Returns:
      The table.

    Raises:
      ValueError: scales that are not one or g a candidate, logits of another shape or, outside jit, NaN, and as
        `group_statistics` and `apply`.
    """
    check_rows(labels, labels, membership, None)
    scales = jnp.asarray(scales, jnp.float32)
    count = next(iter(vectors.values())).shape[0] if vectors else 0
    if scales.ndim not in (1, 2) or (scales.ndim == 2 and scales.shape[1] != count):
        raise ValueError(f"scales must be [s] or [s, {count}] for {count} vectors, got {list(scales.shape)}")
    for path, leaf in jax.tree.leaves_with_path(inputs):
        if jnp.shape(leaf)[:1] != (len(labels),):
            where = jax.tree_util.keystr(path, simple=True, separator="/") or "inputs"
            raise ValueError(f"inputs must have the {len(labels)} rows of the labels; {where} is {jnp.shape(leaf)}")
    for name, value in (("models_at_once", models_at_once), ("rows_at_once", rows_at_once)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    table = _sweep(
        params,
        vectors,
        scales,
        inputs,
        jnp.asarray(labels),
        jnp.asarray(membership),
        apply_fn=apply_fn,
        reduce=reduce,
        models_at_once=models_at_once,
        rows_at_once=rows_at_once,
        undefined=undefined,
    )
    if is_concrete(table.finite) and not table.finite.all():
        first = int(jnp.argmin(table.finite))
        raise ValueError(f"logits are NaN or infinite at scale {scales[first].tolist()}")
    return table


def predict(apply_fn: Callable[[Any, Any], Array], params: Any, inputs: PyTree) -> Float[Array, " n"]:
    """Logits of class 1 against class 0, float32; ``apply_fn`` gives ``[n]`` or ``[n, 2]``.

    Raises:
      ValueError: for logits of another shape.
    """
    logits = apply_fn(params, inputs).astype(jnp.float32)
    rows = jax.tree.leaves(inputs)[0].shape[0]
    if logits.shape == (rows, 2):
        return logits[:, 1] - logits[:, 0]
    if logits.shape != (rows,):
        raise ValueError(f"apply_fn must give logits [{rows}] or [{rows}, 2], got {list(logits.shape)}")
    return logits


def select_scale(
    table: SweepTable,
    *,
    rule: Rule = "constrained",
    reference_accuracy: Any = None,
    tolerance: Any = 0.01,
) -> Selection:
    """Choose a candidate by the validation rows that the table was made of.

    Args:
      table: from `lambda_sweep`.
      rule: "constrained", least sum of demographic parity and equalized odds difference among candidates whose accuracy
        is at least ``reference_accuracy - tolerance``, or the most accurate candidate if there is none;
        "min_disparity", the authors' rule: the candidate of least demographic parity or of least equalized odds
        difference, whichever has the smaller sum of both; "max_accuracy". Of equals, the smallest λ (by its sum).
      reference_accuracy: of the model to be compared with, such as full fine-tuning, on the same rows.
      tolerance: accuracy that may be given up; a point by default.

    Raises:
      ValueError: an unknown rule; "constrained" without a reference.

    Warns:
      UserWarning: outside jit, where the candidate says the same for nearly all rows, or its balanced accuracy is near
        chance: both differences go to 0 there for the wrong reason.
    """
    order = table.scales if table.scales.ndim == 1 else table.scales.sum(1)
    parity, odds = table.demographic_parity_difference, table.equalized_odds_difference
    total = parity + odds
    fulfilled = jnp.array(True)
    if rule == "max_accuracy":
        index = _first(-table.accuracy, order)
    elif rule == "min_disparity":
        both = jnp.stack([_first(parity, order), _first(odds, order)])
        index = both[_first(total[both], order[both])]
    elif rule == "constrained":
        if reference_accuracy is None:
            raise ValueError("the rule 'constrained' needs reference_accuracy, such as that of full fine-tuning")
        allowed = table.accuracy >= reference_accuracy - tolerance
        fulfilled = allowed.any()
        best = _first(jnp.where(allowed, total, jnp.inf), order)
        index = jnp.where(fulfilled, best, _first(-table.accuracy, order))
    else:
        raise ValueError(f"rule must be 'constrained', 'min_disparity' or 'max_accuracy', got {rule!r}")
    rate = table.positive_rate[index]
    chosen = Selection(
        row=index,
        fulfilled=fulfilled,
        collapsed=jnp.maximum(rate, 1 - rate) > _COLLAPSED,
        near_chance=table.balanced_accuracy[index] <= _CHANCE,
    )
    if is_concrete(index):
        if chosen.collapsed:
            share = 100 * np.maximum(rate, 1 - rate)
            warnings.warn(f"the chosen model predicts one class for {share:.1f} % of the rows", stacklevel=2)
        if chosen.near_chance:
            warnings.warn(
                f"the chosen model is near chance: its balanced accuracy is {table.balanced_accuracy[index]:.3f}",
                stacklevel=2,
            )
    return chosen


@partial(jax.jit, static_argnames=("apply_fn", "reduce", "models_at_once", "rows_at_once", "undefined"))
def _sweep(
    params: PyTree,
    vectors: TaskVectors,
    scales: Array,
    inputs: PyTree,
    labels: Array,
    membership: Array,
    *,
    apply_fn: Callable[[Any, Any], Array],
    reduce: str,
    models_at_once: int,
    rows_at_once: int | None,
    undefined: Undefined,
) -> SweepTable:
    if scales.ndim == 1:
        combine = jnp.mean if reduce == "mean" else jnp.sum
        vectors = {path: combine(vector, axis=0, keepdims=True) for path, vector in vectors.items()}
        reduce = "sum"

    def logits_at(scale: Array) -> Array:
        merged = apply(params, vectors, scale, reduce=reduce)
        if rows_at_once is None:
            return predict(apply_fn, merged, inputs)

        def of_row(row: PyTree) -> Array:
            return predict(apply_fn, merged, jax.tree.map(lambda leaf: leaf[None], row))[0]

        return jax.lax.map(of_row, inputs, batch_size=rows_at_once)

    logits = jax.lax.map(logits_at, scales, batch_size=min(models_at_once, len(scales)))

    def row(logits: Array) -> dict[str, Any]:
        predictions = jnp.where(jnp.isnan(logits), jnp.nan, (logits > 0).astype(jnp.float32))
        statistics = group_statistics(predictions, labels, membership)
        overall = statistics.overall
        return {
            "statistics": statistics,
            "accuracy": overall.accuracy,
            "balanced_accuracy": overall.balanced_accuracy,
            "positive_rate": overall.positive_rate,
            "demographic_parity_difference": demographic_parity_difference(statistics, undefined=undefined),
            "equalized_odds_difference": equalized_odds_difference(statistics, undefined=undefined),
            "equal_opportunity_difference": equal_opportunity_difference(statistics, undefined=undefined),
            "finite": jnp.isfinite(logits).all(),
        }

    return SweepTable(scales=scales, logits=logits, **jax.vmap(row)(logits))


def _first(values: Array, order: Array) -> Array:
    """Index of the least value; of equals, that of the least ``order``."""
    values = jnp.where(jnp.isnan(values), jnp.inf, values)
    return jnp.argmin(jnp.where(values == values.min(), order, jnp.inf))
