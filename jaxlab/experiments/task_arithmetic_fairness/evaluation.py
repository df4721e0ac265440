"""Sweeps, injections, choices and bounds of one trained set of models; the same for tables and texts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.editing import task_vectors
from jaxlab.editing.fairness import (
    SweepTable,
    demographic_parity_difference,
    empirical_lipschitz,
    fairness_bounds,
    group_statistics,
    lambda_sweep,
    one_vs_rest,
    published_bound,
    select_scale,
)

__all__ = ["METRICS", "SCALES", "bounds_of", "count_violations", "evaluate"]

SCALES = np.linspace(0.0, 1.0, 11).astype(np.float32)
METRICS = ("accuracy", "balanced_accuracy", "positive_rate", "demographic_parity", "equalized_odds")
_GRID = 121
# A bound is computed from sums over rows in another order than what it bounds.
_ROUNDING = 1e-5
_MIXTURES = np.array([0.25, 0.5, 1.0], np.float32)


def evaluate(
    apply_fn: Callable[[Any, Any], Any],
    models: Mapping[str, Any],
    vectors: task_vectors.TaskVectors,
    validation: Any,
    test: Any,
    *,
    tolerance: float,
    seed: int,
    injections: np.ndarray = SCALES,
    models_at_once: int = 11,
    grid: bool = True,
) -> dict[str, np.ndarray]:
    """Metrics of every model on validation and test rows, and what the validation rows would choose.

    Args:
      apply_fn: of the models.
      models: ``base``, and others like it, each of which is also swept from the base to itself.
      vectors: Δ of the groups.
      validation: inputs, labels, membership to choose by.
      test: the same to report.
      tolerance: accuracy to be given up, against ``full``.
      seed: of the scales of a grid in more than two dimensions.
      injections: scales of the injection.
      models_at_once: models evaluated together.
      grid: evaluate scales that differ between groups too.

    Returns:
      ``PATH.PART``, metrics ``[λ, metric]`` in the order of `METRICS`, for the paths ``task_arithmetic``, one a model,
      and ``inject.NUMBER`` from ``full``; ``PATH.chosen``, an index; ``PATH.one_vs_rest`` ``[λ, g, 2]``; ``logits`` of
      the task arithmetic on test rows, ``injected_logits`` ``[g, λ, n]``, ``full_logits.PART``;
      ``grid.scales``, ``grid.test``, ``grid.validation``; ``worst``, a group.
    """
    sweep = partial(_both_parts, apply_fn, validation=validation, test=test, models_at_once=models_at_once)
    count = next(iter(vectors.values())).shape[0]
    paths = {"task_arithmetic": ("base", vectors)}
    for name, model in models.items():
        if name != "base":
            kept = task_vectors.task_vectors(models["base"], [model])
            paths[name] = ("base", {path: kept[path] for path in vectors})
    for group in range(count):
        paths[f"inject.{group}"] = ("full", {path: leaf[group : group + 1] for path, leaf in vectors.items()})
    # All paths have as many vectors, the others zero, so that they share one compiled program.
    paths = {name: (start, _filled(change, count)) for name, (start, change) in paths.items()}
    found: dict[str, np.ndarray] = {}
    tables = {
        name: sweep(models[start], change, _alike(injections if name.startswith("inject") else SCALES, count))
        for name, (start, change) in paths.items()
    }
    reference = tables["full"][0].accuracy[-1]
    for name, (on_validation, on_test) in tables.items():
        found |= {f"{name}.validation": _metrics(on_validation), f"{name}.test": _metrics(on_test)}
        chosen = _choose(on_validation, reference, tolerance)
        found[f"{name}.chosen"] = chosen
        against = jax.vmap(lambda statistics: one_vs_rest(statistics))(on_test.statistics)
        found[f"{name}.one_vs_rest"] = np.stack(
            [np.asarray(against[f"{of}_difference"]) for of in ("demographic_parity", "equalized_odds")], -1
        )
    found["logits"] = np.asarray(tables["task_arithmetic"][1].logits)
    found["injected_logits"] = np.stack([np.asarray(tables[f"inject.{g}"][1].logits) for g in range(count)])
    for part, table in zip(("validation", "test"), tables["full"], strict=True):
        found[f"full_logits.{part}"] = np.asarray(table.logits[-1])
    against = one_vs_rest(jax.tree.map(lambda leaf: leaf[-1], tables["full"][0].statistics))
    mean = (against["demographic_parity_difference"] + against["equalized_odds_difference"]) / 2
    found["worst"] = np.asarray(jnp.argmax(jnp.nan_to_num(mean)))
    if grid:
        scales = _grid(count, seed)
        on_validation, on_test = sweep(models["base"], vectors, scales)
        found |= {
            "grid.scales": scales,
            "grid.validation": _metrics(on_validation),
            "grid.test": _metrics(on_test),
            "grid.chosen": _choose(on_validation, reference, tolerance),
        }
    return found


def bounds_of(
    score_fn: Callable[[Any, Any], jax.Array],
    base: Any,
    full: Any,
    vectors: task_vectors.TaskVectors,
    rows: Any,
    *,
    points: int,
    injections: bool = True,
    published: bool = True,
) -> dict[str, np.ndarray]:
    """Measured disparities and their bounds, with slopes estimated on these rows.

    Args:
      score_fn: scores in [0, 1].
      base: θ₀.
      full: fine-tuned on everybody.
      vectors: Δ.
      rows: inputs, labels, membership.
      points: of each segment.
      injections: also injections into ``full``.
      published: also the published form, for coefficients that differ between groups and add up to G; its slope is the
        norm of the gradient, one backward pass for each row and point.

    Returns:
      ``scalar``: task arithmetic with one λ, from the balanced model, ``[λ, 4]``: soft demographic parity difference,
      its bound, hard equalized odds difference, its bound. ``injection``: the same from ``full``, ``[g, λ, 4]``.
      ``published``: ``[g, mixture, 2]``, soft difference and bound. ``norms``: ``[g]``.
    """
    count = next(iter(vectors.values())).shape[0]
    options: Any = {"score_fn": score_fn, "points": points}
    scalar, injection, mean = _bounds(base, full, vectors, *rows, injections=injections, **options)
    found = {"scalar": scalar, "injection": injection, "norms": task_vectors.norms(vectors)}
    if published:
        scales = 1 + _MIXTURES[:, None] * (count * np.eye(count, dtype=np.float32)[:, None] - 1)
        found["published"] = _published(base, vectors, scales, *rows, mean, **options)
    return {name: np.asarray(value) for name, value in found.items()}


def count_violations(found: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """How many bounds of `bounds_of` do not hold, and how many there are."""
    pairs = [found[name][..., i : i + 2] for name in ("scalar", "injection") for i in (0, 2)]
    if "published" in found:
        pairs.append(found["published"])
    broken = [~(pair[..., 0] <= pair[..., 1] + _ROUNDING) for pair in pairs]
    return int(sum(of.sum() for of in broken)), sum(of.size for of in broken)


@partial(jax.jit, static_argnames=("score_fn", "points", "injections"))
def _bounds(
    base: Any,
    full: Any,
    vectors: Any,
    inputs: Any,
    labels: Any,
    membership: Any,
    *,
    score_fn: Any,
    points: int,
    injections: bool,
) -> tuple[jax.Array, jax.Array, Any]:
    count = next(iter(vectors.values())).shape[0]
    balanced = task_vectors.apply(base, vectors, 1.0, reduce="mean")

    def four(reference: Any, params: Any) -> jax.Array:
        found = fairness_bounds(score_fn, reference, params, inputs, labels, membership, points=points)
        return jnp.stack([found.parity, found.parity_bound, found.odds, found.odds_bound])

    # One program for both: the model is that of a start, and of a vector of scales.
    starts = jax.tree.map(lambda a, b: jnp.stack([a, b]), base, full)
    references = jax.tree.map(lambda a, b: jnp.stack([a, b]), balanced, full)
    scales = jnp.concatenate([jnp.ones((1, count)), jnp.eye(count)])[:, None] * SCALES[:, None]
    which = jnp.repeat(jnp.array([0] + [1] * count), len(SCALES))
    if not injections:
        scales, which = scales[:1], which[: len(SCALES)]

    def at(job: Any) -> jax.Array:
        index, scale = job
        start, reference = (jax.tree.map(lambda leaf: leaf[index], tree) for tree in (starts, references))
        return four(reference, task_vectors.apply(start, vectors, scale))

    values = jax.lax.map(at, (which, scales.reshape(-1, count))).reshape(-1, len(SCALES), 4)
    return values[0], values[1:], balanced


@partial(jax.jit, static_argnames=("score_fn", "points"))
def _published(
    base: Any,
    vectors: Any,
    scales: Any,
    inputs: Any,
    labels: Any,
    membership: Any,
    balanced: Any,
    *,
    score_fn: Any,
    points: int,
) -> jax.Array:
    lengths = task_vectors.norms(vectors)

    def parity(params: Any) -> jax.Array:
        statistics = group_statistics(score_fn(params, inputs), labels, membership)
        return demographic_parity_difference(statistics)

    def at(scale: jax.Array) -> jax.Array:
        params = task_vectors.apply(base, vectors, scale, reduce="mean")
        slope = empirical_lipschitz(score_fn, balanced, params, inputs, points=points, directional=False).value
        extra, _ = published_bound(slope, scale, lengths)
        return jnp.stack([parity(params), parity(balanced) + extra])

    count = scales.shape[-1]
    return jax.lax.map(at, jnp.asarray(scales).reshape(-1, count)).reshape(*scales.shape[:-1], 2)


def _both_parts(
    apply_fn: Any, start: Any, change: Any, scales: Any, *, validation: Any, test: Any, models_at_once: int
) -> tuple[SweepTable, SweepTable]:
    found = []
    for part in (validation, test):
        rows = [
            lambda_sweep(apply_fn, start, change, chunk, *part, models_at_once=models_at_once)
            for chunk in np.split(scales, range(len(SCALES), len(scales), len(SCALES)))
        ]
        found.append(jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate(leaves)), *rows))
    return found[0], found[1]


def _filled(vectors: task_vectors.TaskVectors, count: int) -> task_vectors.TaskVectors:
    return {
        path: jnp.asarray(np.concatenate([leaf, np.zeros((count - leaf.shape[0], *leaf.shape[1:]), np.float32)]))
        for path, leaf in vectors.items()
    }


def _alike(scales: np.ndarray, count: int) -> np.ndarray:
    return np.repeat(scales[:, None], count, axis=1)


def _metrics(table: SweepTable) -> np.ndarray:
    columns: Sequence[Any] = [
        *(table.accuracy, table.balanced_accuracy, table.positive_rate),
        *(table.demographic_parity_difference, table.equalized_odds_difference),
    ]
    return np.stack([np.asarray(column) for column in columns], -1)


def _choose(table: SweepTable, reference: Any, tolerance: float) -> np.ndarray:
    # Under jit, where nothing is said: at λ = 0 an untrained head is near chance, and a note says what was chosen.
    return np.asarray(_chosen(table, reference, tolerance))


@jax.jit
def _chosen(table: SweepTable, reference: Any, tolerance: Any) -> jax.Array:
    return select_scale(table, reference_accuracy=reference, tolerance=tolerance).row


def _grid(count: int, seed: int) -> np.ndarray:
    if count == 2:
        return np.stack(np.meshgrid(SCALES, SCALES, indexing="ij"), -1).reshape(-1, 2)
    return np.random.default_rng(seed).uniform(size=(_GRID, count)).astype(np.float32)
