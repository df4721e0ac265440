"""How much disparity a change of coefficients can cause.

Let s_θ(x) in [0, 1] be the score of a model, L its Lipschitz constant in θ (Euclidean norm, uniform in x), θ_ref a
model whose disparity is known and d = L ‖θ - θ_ref‖. With DPD_s the demographic parity difference of scores and EOD the
equalized odds difference at a threshold t ::

    DPD_s(θ) ≤ DPD_s(θ_ref) + 2 d

since a mean of s over a group moves by at most d, and a difference of two by twice that. For the hard decisions s > t
let B_y bound the density of s_ref near t in every group among rows with label y. For every δ > 0 and every group ::

    |P(s_θ > t) - P(s_ref > t)| ≤ P(|s_ref - t| ≤ δ) + P(|s_θ - s_ref| > δ) ≤ 2 B_y δ + d / δ        (Markov)

which is least at δ = √(d / 2 B_y) and gives, with U = 2 d, ::

    EOD(θ) ≤ EOD(θ_ref) + 4 √(max(B₀, B₁) U)                                  (the published form has B₀ + B₁)

and, as no score moves by more than d, δ = d leaves the second term 0 ::

    EOD(θ) ≤ EOD(θ_ref) + 4 max(B₀, B₁) d

The published theorem is the case θ_ref = θ̄ = θ₀ + (1/G) Σ Δ_g, DPD(θ̄) = 0, Σ λ_g = G and
U = 2 L Σ_g |λ_g - 1| ‖Δ_g‖ (`published_bound`). Here is the general one at the coefficients of a sweep::

    def score_fn(params, inputs):
        return jax.nn.sigmoid(inputs @ params["w"])

    base, vectors = {"w": jnp.zeros(2)}, {"w": jnp.array([[1.0, 0.0], [0.5, 1.0]])}
    inputs = jax.random.normal(jax.random.key(0), (200, 2))
    labels, membership = (inputs[:, 0] > 0).astype(jnp.int32), membership_from_ids(jnp.arange(200) % 2, 2)
    found = fairness_bounds(score_fn, apply(base, vectors, 0.5), apply(base, vectors, 0.7), inputs, labels, membership)
    found.parity, found.parity_bound                     # the soft difference and what it is bounded by
    found.certified                                      # False: L was estimated from these rows

L of a network is not known. `empirical_lipschitz` gives the largest slope that is found on rows and on points of the
segment from θ_ref to θ: by the mean value theorem the bound then holds for these rows up to how fine the points are,
and for no others, so that results say ``certified=False`` unless a constant is handed in.

Reference: section 5 of Gomezjurado Gonzalez et al. 2026, On Fairness of Task Arithmetic, arXiv 2505.24262.

Deviations from the paper:

1. The statement by distance covers what the published one does not: a single λ for all groups (which cannot move while
   Σ λ_g = G), sums instead of means of vectors, injection into another model, references with DPD > 0.
2. The maximum over y is bounded with max(B₀, B₁), which is at most B₀ + B₁; `published_bound` keeps the sum.
3. The linear form, which the paper does not have, is smaller where d < 1 / max(B₀, B₁).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxlab.editing.fairness.group_statistics import (
    Membership,
    Vector,
    check_rows,
    demographic_parity_difference,
    equalized_odds_difference,
    group_statistics,
    is_concrete,
)
from jaxlab.editing.task_vectors import TaskVectors, grams

__all__ = [
    "FairnessBounds",
    "LipschitzEstimate",
    "OddsBound",
    "demographic_parity_bound",
    "density_bound",
    "empirical_lipschitz",
    "equalized_odds_bound",
    "fairness_bounds",
    "merge_distance",
    "published_bound",
]

Scalar = float | int | Float[Array, ""]


class OddsBound(NamedTuple):
    """Two bounds on one equalized odds difference.

    Attributes:
      square_root: from Markov's inequality; holds if d bounds the mean change of the scores.
      linear: holds if d bounds the change of every score.
      value: the smaller one.
    """

    square_root: Float[Array, "*s"]
    linear: Float[Array, "*s"]
    value: Float[Array, "*s"]


class LipschitzEstimate(NamedTuple):
    """Slopes of scores that were found on rows.

    Attributes:
      value: L.
      certified: always False: other rows and points may be steeper.
    """

    value: Float[Array, ""]
    certified: bool = False


class FairnessBounds(NamedTuple):
    """Disparities of a model and what bounds them.

    Attributes:
      parity: soft demographic parity difference of the model.
      parity_bound: of it.
      odds: hard equalized odds difference of the model.
      odds_bound: of it.
      distance: ‖θ - θ_ref‖.
      lipschitz: L.
      certified: whether L was handed in.
    """

    parity: Float[Array, ""]
    parity_bound: Float[Array, ""]
    odds: Float[Array, ""]
    odds_bound: Float[Array, ""]
    distance: Float[Array, ""]
    lipschitz: Float[Array, ""]
    certified: bool


def demographic_parity_bound(reference_difference: Any, lipschitz: Any, distance: Any) -> Float[Array, "*s"]:
    """``DPD_s(θ_ref) + 2 L ‖θ - θ_ref‖``, of scores.

    Args:
      reference_difference: soft demographic parity difference of the reference.
      lipschitz: L.
      distance: ‖θ - θ_ref‖.

    Raises:
      ValueError: a negative value.
    """
    _check_positive(reference_difference=reference_difference, lipschitz=lipschitz, distance=distance)
    return jnp.asarray(reference_difference) + 2 * jnp.asarray(lipschitz) * jnp.asarray(distance)


def equalized_odds_bound(
    reference_difference: Any,
    lipschitz: Any,
    distance: Any,
    *,
    density_negative: Any,
    density_positive: Any,
    bandwidth: Any = 0.0,
) -> OddsBound:
    """Both bounds on the equalized odds difference of hard decisions.

    Args:
      reference_difference: hard equalized odds difference of the reference.
      lipschitz: L.
      distance: ‖θ - θ_ref‖.
      density_negative: B₀, of the reference's scores near the threshold among rows with label 0, in any group.
      density_positive: B₁, the same of label 1.
      bandwidth: the densities were bounded by `density_bound` with it, so that no δ below it may be used.

    Raises:
      ValueError: a negative value.
    """
    _check_positive(
        reference_difference=reference_difference,
        lipschitz=lipschitz,
        distance=distance,
        density_negative=density_negative,
        density_positive=density_positive,
        bandwidth=bandwidth,
    )
    density = jnp.maximum(density_negative, density_positive)
    moved = jnp.asarray(lipschitz) * jnp.asarray(distance)
    best = jnp.sqrt(moved / jnp.where(density > 0, 2 * density, 1.0))
    margin = jnp.maximum(best, bandwidth)
    root = reference_difference + 2 * (
        2 * density * margin + jnp.where(margin > 0, moved / jnp.where(margin > 0, margin, 1.0), 0.0)
    )
    linear = reference_difference + 4 * density * jnp.maximum(moved, bandwidth)
    return OddsBound(root, linear, jnp.minimum(root, linear))


def published_bound(
    lipschitz: Any,
    scales: Float[Array, "*s g"],
    lengths: Float[Array, " _"],
    *,
    density_negative: Any = None,
    density_positive: Any = None,
) -> tuple[Float[Array, "*s"], Float[Array, "*s"] | None]:
    """The theorem as it is printed: for Σ λ_g = G and a balanced model θ₀ + (1/G) Σ Δ_g without disparity.

    Args:
      lipschitz: L.
      scales: λ_g.
      lengths: ‖Δ_g‖, from `jaxlab.editing.task_vectors.norms`.
      density_negative: B₀.
      density_positive: B₁.

    Returns:
      ``U = 2 L Σ_g |λ_g - 1| ‖Δ_g‖``, which bounds the demographic parity difference, and ``4 √((B₀ + B₁) U)``, by
      which the equalized odds difference may exceed that of the balanced model; None without densities.

    Raises:
      ValueError: a negative L or density, one density without the other, numbers of groups that differ.
    """
    scales, lengths = jnp.asarray(scales), jnp.asarray(lengths)
    _check_positive(lipschitz=lipschitz)
    if scales.shape[-1:] != lengths.shape:
        raise ValueError(f"there are {lengths.shape[0]} vectors, got scales {list(scales.shape)}")
    parity = 2 * jnp.asarray(lipschitz) * jnp.sum(jnp.abs(scales - 1) * lengths, axis=-1)
    if (density_negative is None) != (density_positive is None):
        raise ValueError("density_negative and density_positive must be given together")
    if density_negative is None:
        return parity, None
    _check_positive(density_negative=density_negative, density_positive=density_positive)
    return parity, 4 * jnp.sqrt((jnp.asarray(density_negative) + jnp.asarray(density_positive)) * parity)


def merge_distance(
    vectors: TaskVectors, scales: Any, reference_scales: Any, *, reduce: str = "sum"
) -> Float[Array, "*s"]:
    """``‖θ(λ) - θ(λ_ref)‖``, exactly, from inner products of the vectors.

    Args:
      vectors: Δ, ``[g, ...]``.
      scales: λ, ``[..., g]``, or a number for all groups.
      reference_scales: λ_ref, ``[g]`` or a number.
      reduce: "sum" or "mean", as in `jaxlab.editing.task_vectors.apply`.

    Raises:
      ValueError: an unknown ``reduce``.
    """
    if reduce not in ("sum", "mean"):
        raise ValueError(f"reduce must be 'sum' or 'mean', got {reduce!r}")
    products = grams(vectors)
    count = products.shape[0]
    change = jnp.asarray(scales, jnp.float32) - jnp.asarray(reference_scales, jnp.float32)
    change = change if change.ndim else jnp.full(count, change)
    square = jnp.einsum("...i,ij,...j->...", change, products, change, precision="highest")
    return jnp.sqrt(jnp.maximum(square, 0.0)) / (count if reduce == "mean" else 1)


def density_bound(
    scores: Float[Array, " n"],
    threshold: Scalar = 0.5,
    *,
    bandwidth: Scalar,
    weights: Float[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """The smallest B with ``P(|s - t| ≤ δ) ≤ 2 B δ`` for every δ from ``bandwidth`` on, of these very scores.

    A sample has no density; this is what the proof needs of one at the margins that it uses.

    Args:
      scores: s, ``[n]``.
      threshold: t.
      bandwidth: the smallest δ, above 0.
      weights: of the rows, 0 for those that are not in the group; 0 / 0 gives 0.

    Raises:
      ValueError: a bandwidth that is not positive.
    """
    if is_concrete(bandwidth) and not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive, got {bandwidth}")
    weights = jnp.ones_like(scores) if weights is None else weights
    away = jnp.abs(scores - threshold)
    order = jnp.argsort(away)
    away, weights = away[order], weights[order]
    share = jnp.cumsum(weights) / jnp.maximum(weights.sum(), jnp.finfo(weights.dtype).tiny)
    return jnp.max(share / (2 * jnp.maximum(away, bandwidth)), initial=0.0)


def empirical_lipschitz(
    score_fn: Callable[[Any, Any], Float[Array, " n"]],
    reference: PyTree,
    params: PyTree,
    inputs: PyTree,
    *,
    points: int = 5,
    directional: bool = True,
) -> LipschitzEstimate:
    """Largest slope of the scores in the parameters, over rows and over points of the segment between two models.

    Args:
      score_fn: ``score_fn(params, inputs)``, scores ``[n]``.
      reference: θ_ref.
      params: θ, a tree like it.
      inputs: tree of arrays with a leading axis of n rows.
      points: of the segment, evenly spaced, both ends among them.
      directional: the slope along the segment, which is all that a bound between its ends needs and is far smaller;
        otherwise the norm of the gradient, for any θ near the segment (one backward pass a row).

    Returns:
      The estimate; 0 where the models are the same.

    Raises:
      ValueError: fewer than two points.
    """
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")
    difference = jax.tree.map(lambda end, start: end - start, params, reference)
    length = _length(difference)

    def slope(position: Array) -> Array:
        place = jax.tree.map(lambda start, step: start + position.astype(start.dtype) * step, reference, difference)
        if directional:
            rate = jax.jvp(lambda p: score_fn(p, inputs), (place,), (difference,))[1]
            return jnp.abs(rate).max() / jnp.where(length > 0, length, 1.0)

        def of_row(row: PyTree) -> Array:
            one = jax.tree.map(lambda leaf: leaf[None], row)
            return _length(jax.grad(lambda p: score_fn(p, one)[0])(place))

        return jax.lax.map(of_row, inputs, batch_size=64).max()

    return LipschitzEstimate(jax.lax.map(slope, jnp.linspace(0.0, 1.0, points)).max())


def fairness_bounds(
    score_fn: Callable[[Any, Any], Float[Array, " n"]],
    reference: PyTree,
    params: PyTree,
    inputs: PyTree,
    labels: Vector,
    membership: Membership,
    *,
    lipschitz: Scalar | Callable[[PyTree, PyTree], Scalar] | None = None,
    points: int = 21,
    threshold: float = 0.5,
    smallest_margin: float = 1e-3,
) -> FairnessBounds:
    """Both disparities of a model on some rows, and their bounds from a reference.

    Args:
      score_fn: ``score_fn(params, inputs)``, scores ``[n]`` in [0, 1].
      reference: θ_ref.
      params: θ.
      inputs: tree of arrays with a leading axis of n rows.
      labels: ``[n]``.
      membership: ``[n, g]``.
      lipschitz: a certified L, or what gives one for ``(reference, params)``; None estimates it on these rows along
        the segment.
      points: of the estimate.
      threshold: of the decisions.
      smallest_margin: smallest δ. Densities near the threshold are those at margins from d on, and from this on.

    Raises:
      ValueError: as `group_statistics` and `empirical_lipschitz`.
    """
    check_rows(labels, labels, membership, None)
    certified = lipschitz is not None
    if lipschitz is None:
        value: Any = empirical_lipschitz(score_fn, reference, params, inputs, points=points).value
    else:
        value = lipschitz(reference, params) if callable(lipschitz) else lipschitz
    before, after = score_fn(reference, inputs), score_fn(params, inputs)
    distance = _length(jax.tree.map(lambda end, start: end - start, params, reference))
    truth, members = jnp.asarray(labels, jnp.float32), jnp.asarray(membership, jnp.float32)

    # Margins below d are not used by the linear form, and the smaller the margin the more a single row counts.
    margin = jnp.maximum(value * distance, smallest_margin)

    def densest(rows: Array) -> Array:
        densities = jax.vmap(
            lambda of_group: density_bound(before, threshold, bandwidth=margin, weights=of_group * rows), in_axes=1
        )(members)
        return densities.max()

    def odds(scores: Array) -> Array:
        return equalized_odds_difference(group_statistics(scores > threshold, labels, membership))

    def parity(scores: Array) -> Array:
        return demographic_parity_difference(group_statistics(scores, labels, membership))

    bound = equalized_odds_bound(
        odds(before),
        value,
        distance,
        density_negative=densest(1 - truth),
        density_positive=densest(truth),
        bandwidth=margin,
    )
    return FairnessBounds(
        parity=parity(after),
        parity_bound=demographic_parity_bound(parity(before), value, distance),
        odds=odds(after),
        odds_bound=bound.value,
        distance=distance,
        lipschitz=jnp.asarray(value, jnp.float32),
        certified=certified,
    )


def _length(tree: PyTree) -> Float[Array, ""]:
    return jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)))


def _check_positive(**values: Any) -> None:
    for name, value in values.items():
        if is_concrete(value) and not np.all(np.asarray(value) >= 0):
            raise ValueError(f"{name} must be at least 0, got {value}")
