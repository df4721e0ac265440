"""Group fairness of a binary classifier: how its rates differ between groups, inside jit, vmap and grad.

For group g with rows D_g, labels y and predictions ŷ in {0, 1} (or scores in [0, 1]) ::

    PPR_g = mean of ŷ,   TPR_g = mean of ŷ where y = 1,   FPR_g = mean of ŷ where y = 0

    demographic parity difference   max_g PPR_g - min_g PPR_g
    equal opportunity difference    max_g TPR_g - min_g TPR_g
    equalized odds difference       max of the last and of max_g FPR_g - min_g FPR_g

All of them come from four counts a group, which `group_statistics` takes::

    membership = membership_from_ids(jnp.array([0, 0, 0, 1, 1, 1]), 2)
    labels, scores = jnp.array([1, 0, 1, 1, 0, 0]), jnp.array([0.9, 0.6, 0.8, 0.7, 0.2, 0.1])
    with warnings.catch_warnings():  # three rows a group say little, and a warning says so
        warnings.simplefilter("ignore")
        statistics = group_statistics(scores > 0.5, labels, membership)
    demographic_parity_difference(statistics)                                              # 2 / 3
    low, high = bootstrap_interval(jax.random.key(0), equalized_odds_difference, scores > 0.5, labels, membership)
    soft = lambda scores: demographic_parity_difference(group_statistics(scores, labels, membership))
    jax.grad(soft)(scores)                                                    # the same functions of scores are smooth

A row may be in several groups, or in none: such a row counts in the overall rates and in no group's.

Rates are those of Hardt et al. 2016 (arXiv 1610.02413); options and their defaults are fairlearn's
(``fairlearn.metrics``, arXiv 2303.16626), as is that a rate without rows (0 / 0) counts as 0. That default hides that
nothing is known: ``undefined="skip"`` leaves such a group out and is the better choice with small groups.

Deviations from fairlearn:

1. Groups without any row are left out whatever ``undefined`` says; fairlearn never sees them, a bootstrap does.
2. With ``undefined="skip"`` a difference of fewer than two groups is NaN, not 0.

The difference between groups is a maximum of noisy rates and so is biased upwards where groups are small; look at the
interval and the counts beside it.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

__all__ = [
    "GroupStatistics",
    "Rates",
    "bootstrap_interval",
    "concerns",
    "demographic_parity_difference",
    "equal_opportunity_difference",
    "equalized_odds_difference",
    "group_statistics",
    "membership_from_ids",
    "one_vs_rest",
    "resample",
]

Method = Literal["between_groups", "to_overall"]
Aggregate = Literal["worst_case", "mean"]
Undefined = Literal["zero", "skip"]
Vector = Float[Array | np.ndarray, " _"] | Int[Array | np.ndarray, " _"] | Bool[Array | np.ndarray, " _"]
Membership = Float[Array | np.ndarray, "_ g"] | Int[Array | np.ndarray, "_ g"] | Bool[Array | np.ndarray, "_ g"]

MOST_DRAWN = 2**26  # numbers of rows that are drawn at once: 256 MiB
SMALL_GROUP = 30  # rows, below which a rate is worth a warning (section on small groups of the paper's protocol)


class Rates(NamedTuple):
    """Counts of outcomes, and the rates that follow; a rate without rows is NaN.

    With scores in place of predictions the counts are expected ones.

    Attributes:
      true_positives: Σ ŷ over rows with y = 1, ``[...]``.
      false_positives: Σ ŷ over rows with y = 0.
      positives: rows with y = 1.
      negatives: rows with y = 0.
    """

    true_positives: Float[Array, "*g"]
    false_positives: Float[Array, "*g"]
    positives: Float[Array, "*g"]
    negatives: Float[Array, "*g"]

    @property
    def rows(self) -> Float[Array, "*g"]:
        """Number of rows, or their weight."""
        return self.positives + self.negatives

    @property
    def positive_rate(self) -> Float[Array, "*g"]:
        """PPR, the share that is predicted positive."""
        return _ratio(self.true_positives + self.false_positives, self.rows)

    @property
    def true_positive_rate(self) -> Float[Array, "*g"]:
        """TPR."""
        return _ratio(self.true_positives, self.positives)

    @property
    def false_positive_rate(self) -> Float[Array, "*g"]:
        """FPR."""
        return _ratio(self.false_positives, self.negatives)

    @property
    def accuracy(self) -> Float[Array, "*g"]:
        """Share of right predictions."""
        return _ratio(self.true_positives + self.negatives - self.false_positives, self.rows)

    @property
    def balanced_accuracy(self) -> Float[Array, "*g"]:
        """Mean of TPR and 1 - FPR: 1/2 for a model that always says the same."""
        return (self.true_positive_rate + 1 - self.false_positive_rate) / 2


class GroupStatistics(NamedTuple):
    """Rates of each group and of all rows.

    Attributes:
      groups: ``[g]``.
      overall: of all rows, those without a group too.
    """

    groups: Rates
    overall: Rates


def group_statistics(
    predictions: Vector, labels: Vector, membership: Membership, *, weights: Vector | None = None
) -> GroupStatistics:
    """Count outcomes in every group.

    Args:
      predictions: ŷ, ``[n]``: 0 or 1, or scores in [0, 1] for the soft rates.
      labels: y, ``[n]``, 0 or 1.
      membership: ``[n, g]``, 1 where a row is in a group; any number of groups a row.
      weights: of the rows, ``[n]``, 1 by default; how often a row was drawn, for example.

    Returns:
      The counts, float32.

    Raises:
      ValueError: numbers of rows that differ; labels or membership other than 0 and 1; predictions that are NaN or not
        in [0, 1]; weights below 0 or not finite; fewer than two groups with rows. Under
        jit none of it is looked at: a prediction that is NaN makes the rates of its groups NaN.

    Warns:
      UserWarning: what `concerns` has to say, outside jit.
    """
    check_rows(predictions, labels, membership, weights)
    statistics = _count(predictions, labels, membership, weights)
    if is_concrete(*jax.tree.leaves(statistics)):
        for concern in concerns(statistics):
            warnings.warn(concern, stacklevel=2)
    return statistics


def concerns(
    statistics: GroupStatistics, *, names: Sequence[str] | None = None, smallest: int = SMALL_GROUP
) -> tuple[str, ...]:
    """Why differences of these groups may mean little: one sentence each.

    Args:
      statistics: counts that are not traced.
      names: of the groups, numbers by default.
      smallest: a group with fewer rows is named.

    Returns:
      A sentence for a group with few rows, without positives or without negatives.
    """
    groups = statistics.groups
    count = np.asarray(groups.rows)
    names = [f"group {i}" for i in range(len(count))] if names is None else list(names)
    found = []
    for i, name in enumerate(names):
        if 0 < count[i] < smallest:
            found.append(f"{name} has {count[i]:g} rows, fewer than {smallest}: its rates are mostly noise")
        if count[i] > 0 and groups.positives[i] == 0:
            found.append(f"{name} has no positives: its true positive rate is undefined")
        if count[i] > 0 and groups.negatives[i] == 0:
            found.append(f"{name} has no negatives: its false positive rate is undefined")
    return tuple(found)


def demographic_parity_difference(
    statistics: GroupStatistics, *, method: Method = "between_groups", undefined: Undefined = "zero"
) -> Float[Array, ""]:
    """How far apart the shares of positive predictions are, in [0, 1].

    Args:
      statistics: of the groups.
      method: "between_groups", largest minus smallest; "to_overall", largest distance to the rate of all rows.
      undefined: see the module; a share of positive predictions is defined wherever there are rows.
    """
    return _gap(statistics, "positive_rate", method, undefined)


def equal_opportunity_difference(
    statistics: GroupStatistics, *, method: Method = "between_groups", undefined: Undefined = "zero"
) -> Float[Array, ""]:
    """How far apart the true positive rates are, in [0, 1].

    Args:
      statistics: of the groups.
      method: as in `demographic_parity_difference`.
      undefined: a group without positives counts as 0 ("zero") or is left out ("skip").
    """
    return _gap(statistics, "true_positive_rate", method, undefined)


def equalized_odds_difference(
    statistics: GroupStatistics,
    *,
    method: Method = "between_groups",
    agg: Aggregate = "worst_case",
    undefined: Undefined = "zero",
) -> Float[Array, ""]:
    """How far apart true and false positive rates are, in [0, 1].

    Args:
      statistics: of the groups.
      method: as in `demographic_parity_difference`.
      agg: "worst_case", the larger of both gaps; "mean", their mean.
      undefined: a group without positives (negatives) counts as 0 ("zero") or is left out ("skip") of that gap; a gap
        that fewer than two groups define is left out itself.

    Raises:
      ValueError: an unknown option.
    """
    if agg not in ("worst_case", "mean"):
        raise ValueError(f"agg must be 'worst_case' or 'mean', got {agg!r}")
    gaps = jnp.stack(
        [_gap(statistics, rate, method, undefined) for rate in ("true_positive_rate", "false_positive_rate")]
    )
    known = ~jnp.isnan(gaps)
    if agg == "mean":
        return _ratio(jnp.where(known, gaps, 0.0).sum(), known.sum().astype(gaps.dtype))
    return jnp.where(known.any(), jnp.where(known, gaps, -jnp.inf).max(), jnp.nan)


def one_vs_rest(statistics: GroupStatistics, *, undefined: Undefined = "zero") -> dict[str, Float[Array, " g"]]:
    """Each group against all rows that are not in it.

    Args:
      statistics: of the groups.
      undefined: a rate without rows counts as 0 ("zero"), or makes the difference NaN ("skip").

    Returns:
      ``demographic_parity_difference``, ``equal_opportunity_difference`` and ``equalized_odds_difference``, ``[g]``;
      NaN for a group without rows, or with all of them.
    """
    _check_option("undefined", undefined, ("zero", "skip"))
    groups = statistics.groups
    rest = jax.tree.map(lambda overall, of_group: overall - of_group, statistics.overall, groups)

    def difference(rate: str) -> Array:
        ours, theirs = (_values(rates, rate, undefined)[0] for rates in (groups, rest))
        return jnp.where((groups.rows > 0) & (rest.rows > 0), jnp.abs(ours - theirs), jnp.nan)

    opportunity = difference("true_positive_rate")
    return {
        "demographic_parity_difference": difference("positive_rate"),
        "equal_opportunity_difference": opportunity,
        "equalized_odds_difference": jnp.fmax(opportunity, difference("false_positive_rate")),
    }


def membership_from_ids(ids: Int[Array | np.ndarray, " _"], num_groups: int) -> Float[Array, "_ g"]:
    """One group a row: ``[n, g]`` with a 1 in the column of the id; no group for an id outside ``[0, num_groups)``.

    Raises:
      ValueError: if ``num_groups`` is below two.
    """
    if num_groups < 2:
        raise ValueError(f"num_groups must be at least 2, got {num_groups}")
    return jax.nn.one_hot(ids, num_groups, dtype=jnp.float32)


def bootstrap_interval(
    key: Key[Array, ""],
    metric: Callable[[GroupStatistics], Float[Array, "*m"]],
    predictions: Vector,
    labels: Vector,
    membership: Membership,
    *,
    resamples: int = 1000,
    level: float = 0.95,
) -> tuple[Float[Array, "*m"], Float[Array, "*m"]]:
    """Percentile interval of a metric when the rows are drawn anew with replacement.

    Args:
      key: source of the draws.
      metric: of the statistics, such as `equalized_odds_difference`; may return an array.
      predictions: as in `group_statistics`.
      labels: as there.
      membership: as there.
      resamples: how often to draw; the paper's intervals take 1,000.
      level: share of the resamples inside.

    Returns:
      Lower and upper end. Resamples in which the metric is NaN are left out.

    Raises:
      ValueError: a level outside (0, 1), and as `resample`.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    values = jax.vmap(metric)(resample(key, predictions, labels, membership, resamples=resamples))
    tail = (1 - level) / 2
    low, high = jnp.nanquantile(values, jnp.array([tail, 1 - tail]), axis=0)
    return low, high


def resample(
    key: Key[Array, ""], predictions: Vector, labels: Vector, membership: Membership, *, resamples: int = 1000
) -> GroupStatistics:
    """Statistics of rows drawn with replacement, ``[resamples, g]``.

    How often each of m distinct rows comes in n draws is multinomial. Hard predictions leave a handful of distinct
    rows, so outside jit these are drawn together, which makes a thousand resamples of thousands of rows a matter of
    milliseconds; under jit, and where almost all rows are distinct, row numbers are drawn. Either way the distribution
    is that of the bootstrap, and a key always gives the same draws.

    Raises:
      ValueError: fewer than one resample, and as `group_statistics`.
    """
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    check_rows(predictions, labels, membership, None)
    bits = jax.random.key_data(key)
    if is_concrete(bits, predictions, labels, membership):
        rows = np.column_stack([np.asarray(a, np.float32) for a in (predictions, labels, membership)])
        distinct, counts = np.unique(rows, axis=0, return_counts=True)
        if len(distinct) * 8 <= len(rows):
            random = np.random.default_rng(np.asarray(bits).ravel().tolist())
            drawn = random.multinomial(len(rows), counts / len(rows), size=resamples).astype(np.float32)
            return _weigh(
                jnp.asarray(drawn), jnp.asarray(_outcomes(distinct[:, 0], distinct[:, 1], distinct[:, 2:], xp=np))
            )
    return _draw_rows(key, predictions, labels, membership, resamples)


def check_rows(predictions: Any, labels: Any, membership: Any, weights: Any) -> None:
    """Raise the errors of `group_statistics`."""
    rows = len(labels)
    for name, array in (("predictions", predictions), ("membership", membership), ("weights", weights)):
        if array is not None and len(array) != rows:
            raise ValueError(f"{name} has {len(array)} rows and labels {rows}")
    if rows == 0:
        raise ValueError("there must be at least one row, got none")
    for name, array in (("labels", labels), ("membership", membership)):
        if is_concrete(array):
            values = np.asarray(array, np.float32)
            if not np.isin(values, (0, 1)).all():
                raise ValueError(f"{name} must be 0 or 1, got {values[~np.isin(values, (0, 1))][0]:g}")
    if is_concrete(predictions):
        values = np.asarray(predictions, np.float32)
        if not ((values >= 0) & (values <= 1)).all():
            row = int(np.argmin((values >= 0) & (values <= 1)))
            raise ValueError(f"predictions must lie in [0, 1], got {values[row]:g} in row {row}")
    if weights is not None and is_concrete(weights):
        values = np.asarray(weights, np.float32)
        if not ((values >= 0) & np.isfinite(values)).all():
            row = int(np.argmin((values >= 0) & np.isfinite(values)))
            raise ValueError(f"weights must be at least 0 and finite, got {values[row]:g} in row {row}")
    if is_concrete(membership):
        filled = int((np.asarray(membership).sum(0) > 0).sum())
        if filled < 2:
            raise ValueError(f"differences need at least 2 groups with rows, got {filled}")


def is_concrete(*arrays: Any) -> bool:
    """Whether values can be looked at: none of the arrays is traced."""
    return not any(isinstance(array, jax.core.Tracer) for array in arrays)


def _draw_rows(key: Any, predictions: Any, labels: Any, membership: Any, resamples: int) -> GroupStatistics:
    outcomes = _outcomes(*_floats(predictions, labels, membership))
    count = outcomes.shape[0]
    # Few draws for all: the generator is slow to start. Sixteen bits are not enough to choose a row evenly.
    draws = -(-resamples * count // MOST_DRAWN)
    size = -(-resamples // draws) if draws < resamples else 1

    def sums_of(key: Any) -> Array:
        chosen = jax.random.randint(key, (size, count), 0, count)
        return jax.lax.map(lambda rows: outcomes[rows].sum(0), chosen, batch_size=min(size, 16))

    if size == resamples:
        return _split(sums_of(key), membership.shape[1])
    sums = jax.lax.map(sums_of, jax.random.split(key, -(-resamples // size)))
    return _split(sums.reshape(-1, sums.shape[-1])[:resamples], membership.shape[1])


@jax.jit
def _weigh(weights: Float[Array, "b n"], outcomes: Float[Array, "n c"]) -> GroupStatistics:
    return _split(jnp.matmul(weights, outcomes, precision="highest"), outcomes.shape[1] // 4 - 1)


@jax.jit
def _count(predictions: Any, labels: Any, membership: Any, weights: Any) -> GroupStatistics:
    outcomes = _outcomes(*_floats(predictions, labels, membership))
    if weights is not None:
        outcomes = outcomes * weights.astype(jnp.float32)[:, None]
    return _split(outcomes.sum(0), membership.shape[1])


def _floats(*arrays: Any) -> list[Array]:
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def _outcomes(predictions: Any, labels: Any, membership: Any, xp: Any = jnp) -> Any:
    """True and false positives, positives and negatives of every row, for every group and for all, ``[n, 4 (g+1)]``."""
    four = xp.stack([predictions * labels, predictions * (1 - labels), labels, 1 - labels], -1)
    places = xp.concatenate([membership, xp.ones_like(labels)[:, None]], 1)
    # A prediction that is NaN must spoil its own groups only, and 0 * NaN is NaN.
    spread = xp.where(places[:, None, :] > 0, four[:, :, None] * places[:, None, :], 0.0)
    return spread.reshape(len(labels), -1)


def _split(sums: Float[Array, "*b c"], groups: int) -> GroupStatistics:
    four = jnp.moveaxis(sums.reshape(*sums.shape[:-1], 4, groups + 1), -2, 0)
    return GroupStatistics(groups=Rates(*four[..., :-1]), overall=Rates(*four[..., -1]))


def _gap(statistics: GroupStatistics, rate: str, method: str, undefined: str) -> Float[Array, ""]:
    _check_option("method", method, ("between_groups", "to_overall"))
    _check_option("undefined", undefined, ("zero", "skip"))
    rates, defined = _values(statistics.groups, rate, undefined)
    if method == "to_overall":
        of_all, _ = _values(statistics.overall, rate, undefined)
        gap, enough = jnp.where(defined, jnp.abs(rates - of_all), 0.0).max(), defined.any()
    else:
        gap = jnp.where(defined, rates, -jnp.inf).max() - jnp.where(defined, rates, jnp.inf).min()
        enough = defined.sum() >= 2
    return jnp.where(enough, gap, jnp.nan)


def _values(rates: Rates, rate: str, undefined: str) -> tuple[Array, Array]:
    """A rate, and where it counts. One that is NaN because a prediction is stays so."""
    base = {"true_positive_rate": rates.positives, "false_positive_rate": rates.negatives}.get(rate, rates.rows)
    values = getattr(rates, rate)
    if undefined == "zero":
        return jnp.where(base > 0, values, 0.0), rates.rows > 0
    return values, base > 0


def _ratio(numerator: Array, denominator: Array) -> Array:
    # Dividing by a safe number keeps the gradient of an undefined rate from being NaN times 0.
    return jnp.where(denominator > 0, numerator / jnp.where(denominator > 0, denominator, 1.0), jnp.nan)


def _check_option(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")
