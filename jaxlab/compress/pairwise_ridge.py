"""The value of a mask as a sum over removed parts and pairs of them: a surrogate in closed form.

With r = 1 - m the removal indicators ::

    f(m) = v(1) - Σ_i c_i r_i - Σ_{i<j} J_ij r_i r_j,

fitted by least squares with penalties ``l2_single`` on c and ``l2_pair`` on J. It needs far fewer evaluations than a
network, and says which parts back each other up: where J_ij > 0 removing both costs more than the sum of each. On
``to_target(scores, "log")`` c and J are nats of loss.

An extra, not in arXiv 2602.07804.

Example::

    found = fit(masks, to_target(scores, "log1p"), folds=5, key=jax.random.key(0))
    interaction_matrix(found.params)                                                                     # [L, L]
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Shaped

from jaxlab.compress.surrogate import Fit, check_pairs, held_out_sets, measure

__all__ = ["PairwiseGame", "apply", "fit", "interaction_matrix", "singles"]

PENALTIES = ((0.03, 0.3), (0.3, 3.0), (3.0, 30.0))


class PairwiseGame(NamedTuple):
    """A game of singles and pairs.

    Attributes:
      full: value of the whole.
      single: c, the cost of removing each part alone.
      pair: J, symmetric with zero diagonal, the cost of removing two beyond that of each.
    """

    full: Float[Array, "*batch"]
    single: Float[Array, "*batch l"]
    pair: Float[Array, "*batch l l"]


def apply(params: PairwiseGame, masks: Shaped[Array | np.ndarray, "n l"]) -> Float[Array, " n"]:
    """Values of masks ``[n, L]``."""
    removed = 1.0 - jnp.asarray(masks).astype(jnp.float32)
    pairs = jnp.einsum("ni,ij,nj->n", removed, params.pair, removed) / 2
    return params.full - removed @ params.single - pairs


def interaction_matrix(params: PairwiseGame) -> Float[Array, "l l"]:
    """J: positive where two parts back each other up, so that losing both costs more than losing each."""
    return params.pair


def singles(params: PairwiseGame) -> Float[Array, " l"]:
    """c: what removing each part alone costs."""
    return params.single


def fit(
    masks: Any,
    values: Any,
    *,
    key: Key[Array, ""],
    l2_single: float | None = None,
    l2_pair: float | None = None,
    full: float = 0.0,
    holdout: int | None = None,
    folds: int | None = None,
) -> Fit:
    """Fit by penalised least squares, and measure on masks held out.

    Args:
      masks: ``[n, L]``, at least two.
      values: ``[n]``, finite; larger is better. Logarithms of scores, as the model is a sum.
      key: source of the choice of masks held out.
      l2_single: penalty on c², against the sum of squared errors. None chooses both penalties from `PENALTIES` by the
        error on the masks held out.
      l2_pair: penalty on J²; it goes with ``l2_single``.
      full: value of the whole, known and not fitted; 0 for logarithms of scores.
      holdout: masks left out, as in `jaxlab.compress.surrogate.fit`.
      folds: hold out each mask once instead.

    Raises:
      ValueError: if masks and values do not fit, a value is not finite, a penalty is not positive, or one is missing.
    """
    array, numbers = check_pairs(masks, values)
    if (l2_single is None) != (l2_pair is None):
        raise ValueError(f"l2_single and l2_pair go together; got {l2_single} and {l2_pair}")
    candidates: Sequence[tuple[float, float]] = PENALTIES
    if l2_single is not None and l2_pair is not None:
        candidates = ((l2_single, l2_pair),)
    if bad := [penalty for pair in candidates for penalty in pair if not penalty > 0]:
        raise ValueError(f"penalties must be positive; got {bad[0]}")
    sets = held_out_sets(key, array, holdout=holdout, folds=folds)
    found = []
    for single, pair in candidates:
        params = _solve(array, numbers, ~sets, jnp.float32(single), jnp.float32(pair), jnp.float32(full))
        predicted = np.asarray(jax.vmap(apply, (0, None))(params, jnp.asarray(array)))
        last = jax.tree.map(lambda leaf: leaf[-1], params)
        found.append(Fit(apply, last, *measure(sets, predicted, numbers), params))
    return min(found, key=lambda one: one.quality.rmse)


@jax.jit
def _solve(masks: Array, values: Array, weights: Array, single: Array, pair: Array, full: Array) -> PairwiseGame:
    """One game for each row of weights ``[sets, n]``."""
    players = masks.shape[1]
    first, second = np.triu_indices(players, 1)
    removed = 1.0 - masks.astype(jnp.float32)
    features = jnp.concatenate([removed, removed[:, first] * removed[:, second]], axis=1)
    penalties = jnp.concatenate([jnp.full((players,), single), jnp.full((len(first),), pair)])
    # Rows of √penalty make it plain least squares, whose QR loses half as many digits as normal equations.
    rows = features.shape[0] + features.shape[1]

    def one(weights: Array) -> Array:
        scale = weights.astype(jnp.float32)[:, None]
        matrix = jnp.concatenate([features * scale, jnp.diag(jnp.sqrt(penalties))])
        right = jnp.concatenate([(full - values) * scale[:, 0], jnp.zeros(rows - len(values))])
        orthogonal, triangular = jnp.linalg.qr(matrix)
        return jax.scipy.linalg.solve_triangular(triangular, orthogonal.T @ right)

    # One after another: a vmapped QR is slow on CPUs.
    solved = jax.lax.map(one, weights)
    upper = jnp.zeros((weights.shape[0], players, players)).at[:, first, second].set(solved[:, players:])
    return PairwiseGame(jnp.full(weights.shape[:1], full), solved[:, :players], upper + jnp.swapaxes(upper, 1, 2))
