"""A cheap model of a game: from masks to their values, fitted on some hundred to some thousand true evaluations.

`mlp_surrogate` is the paper's (arXiv 2602.07804, section 3.3): L → 2L → 1 with CELU and a sigmoid, weights and biases
from U(±1/√in). `fit` trains it on the squared error and says how well it predicts masks that it has not seen. Another
surrogate is a pair of functions; `jaxlab.compress.pairwise_ridge` has one in closed form.

A score may be fitted as it is, or on a scale where masks far from the whole model still differ, see `to_target`. All
scales grow with the score, so that larger contributions stay the more valuable ones.

Example::

    found = fit(jax.random.key(0), mlp_surrogate(30), masks, scores, folds=5)
    found.quality.r2, found.quality.spearman                                                   # of held-out masks
    contribution = contributions(found.apply, found.params, queries)

Deviations from the paper:

1. The recipe of the paper makes 8,100 updates from its 8,000 masks, and hardly learns from 1,000: 1,200 updates at
   small steps. ``recipe="auto"`` takes it from 5,000 masks on, and AdamW below.
2. The paper does not use the L masks that it leaves out of training; here they measure the fit.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Key, PyTree

from jaxlab.compress.masks import check_masks

__all__ = [
    "Fit",
    "Quality",
    "Surrogate",
    "fit",
    "held_out_sets",
    "mlp_surrogate",
    "quality",
    "to_target",
]

PAPER_MASKS = 5_000  # from this number on the paper's recipe makes enough updates


class Surrogate(NamedTuple):
    """A model of a game. Hashable where its functions are.

    Attributes:
      init: ``key -> params``.
      apply: ``(params, masks [n, L]) -> values [n]``, of Boolean or 0/1 masks.
    """

    init: Callable[..., PyTree]
    apply: Callable[..., Array]


class Quality(NamedTuple):
    """How well values are predicted, on masks that were not trained on.

    Attributes:
      r2: share of the variance explained; NaN where the values are constant.
      rmse: root mean squared error, in the unit of the target.
      spearman: rank correlation; NaN where the values are constant.
    """

    r2: float
    rmse: float
    spearman: float


class Fit(NamedTuple):
    """A fitted surrogate.

    Attributes:
      apply: of the surrogate.
      params: fitted parameters.
      quality: on the masks held out.
      held_out: which masks were held out in turn.
      predicted: value of each mask as predicted where it was held out, else by ``params``.
      params_of_sets: those of each training, stacked; the last are ``params``, those before each left a fold out.
    """

    apply: Callable[..., Array]
    params: PyTree
    quality: Quality
    held_out: Bool[np.ndarray, " n"]
    predicted: Float[np.ndarray, " n"]
    params_of_sets: PyTree


def to_target(scores: Any, target: str = "score") -> Float[np.ndarray, " n"]:
    """Scores on the scale that a surrogate is fitted on; all grow with the score.

    Args:
      scores: positive, 1 for the whole model.
      target: "score" leaves them as they are (the paper); "log" is log s, minus the loss increase in nats; "log1p" is
        ``-log(1 + max(0, -log s))``, for games in which the loss of some masks explodes.

    Raises:
      ValueError: if the target is unknown, or a score has no logarithm and one is needed.
    """
    values = np.asarray(scores, np.float32)
    if target == "score":
        return values
    if target not in ("log", "log1p"):
        raise ValueError(f"target must be 'score', 'log' or 'log1p'; got {target!r}")
    if (values <= 0).any():
        raise ValueError(f"target {target!r} needs positive scores; got {values.min()}")
    return np.log(values) if target == "log" else -np.log1p(np.maximum(0.0, -np.log(values)))


@functools.lru_cache(maxsize=64)
def mlp_surrogate(num_players: int, *, hidden: int | None = None, output: str = "sigmoid") -> Surrogate:
    """The paper's network: L → ``hidden`` → 1, CELU (α = 1) between.

    Args:
      num_players: L.
      hidden: width; None means the paper's 2 L.
      output: "sigmoid" (the paper) for values in (0, 1); it saturates near 1, where lightly pruned models lie. "linear"
        for any values.

    Raises:
      ValueError: if a size is below one, or the output unknown.
    """
    width = 2 * num_players if hidden is None else hidden
    if num_players < 1 or width < 1:
        raise ValueError(f"sizes must be at least 1; got {num_players} parts and a width of {width}")
    if output not in ("sigmoid", "linear"):
        raise ValueError(f"output must be 'sigmoid' or 'linear'; got {output!r}")

    def init(key: Key[Array, ""]) -> dict[str, Array]:
        keys = jax.random.split(key, 4)

        def draw(key: Array, shape: tuple[int, ...], fan_in: int) -> Array:
            return jax.random.uniform(key, shape, jnp.float32, -(fan_in**-0.5), fan_in**-0.5)

        return {
            "hidden_weight": draw(keys[0], (num_players, width), num_players),
            "hidden_bias": draw(keys[1], (width,), num_players),
            "output_weight": draw(keys[2], (width,), width),
            "output_bias": draw(keys[3], (), width),
        }

    def apply(params: dict[str, Array], masks: Array) -> Array:
        hidden = jax.nn.celu(masks.astype(jnp.float32) @ params["hidden_weight"] + params["hidden_bias"])
        value = hidden @ params["output_weight"] + params["output_bias"]
        return jax.nn.sigmoid(value) if output == "sigmoid" else value

    return Surrogate(init, apply)


def fit(
    key: Key[Array, ""],
    surrogate: Surrogate,
    masks: Any,
    values: Any,
    *,
    recipe: str | optax.GradientTransformation = "auto",
    epochs: int | None = None,
    batch_size: int = 300,
    holdout: int | None = None,
    folds: int | None = None,
) -> Fit:
    """Train a surrogate on the mean squared error, and measure it on masks that it has not seen.

    Args:
      key: source of fresh weights, the order of the masks, and the choice of those held out.
      surrogate: the model.
      masks: ``[n, L]``, at least two.
      values: ``[n]``, finite; on any scale.
      recipe: "paper" is SGD with learning rate 0.008, momentum 0.9, 300 epochs, a tenth of the rate after 100 and 200;
        "adamw" has learning rate 5e-3, weight decay 1e-2, 1,500 epochs; "auto" chooses by the number of masks. Or an
        optax transformation, with ``epochs``.
      epochs: passes over the masks; None means those of the recipe.
      batch_size: masks of an update.
      holdout: masks left out of training, drawn at random; None means the paper's L, at most a fifth.
      folds: hold out each mask once (but see `held_out_sets`), in so many parts, and train on all in the end; in place
        of ``holdout``. All trainings run side by side.

    Raises:
      ValueError: if masks and values do not fit, a value is not finite, or a number is out of range.
    """
    array, numbers = check_pairs(masks, values)
    key_sets, key_train = jax.random.split(key)
    held_out = held_out_sets(key_sets, array, holdout=holdout, folds=folds)
    optimizer, passes = _recipe(recipe, epochs, len(array), batch_size)
    params = _train(surrogate, optimizer, passes, batch_size, key_train, array, numbers, jnp.asarray(~held_out))
    predicted = np.asarray(jax.vmap(surrogate.apply, (0, None))(params, jnp.asarray(array)))
    return Fit(
        surrogate.apply, jax.tree.map(lambda leaf: leaf[-1], params), *measure(held_out, predicted, numbers), params
    )


def held_out_sets(
    key: Key[Array, ""], masks: Bool[np.ndarray, "n l"], *, holdout: int | None = None, folds: int | None = None
) -> Bool[np.ndarray, "sets n"]:
    """Which masks each training leaves out; the last training gives the parameters.

    A mask that alone removes some part, or alone keeps it, is the only source on that part: what it is worth cannot be
    told from the others. It is left in, as long as there are enough others to hold out.

    Raises:
      ValueError: if there are fewer than two masks, or ``holdout`` or ``folds`` is out of range.
    """
    number, num_players = masks.shape
    if number < 2:
        raise ValueError(f"a fit needs at least two masks, one of them to be held out; got {number}")
    order = np.asarray(jax.random.permutation(key, number))
    kept = masks.sum(0)
    alone = (masks & (kept == 1)).any(1) | (~masks & (kept == number - 1)).any(1)
    sourced = order[~alone[order]]
    if folds is not None:
        if holdout is not None:
            raise ValueError(f"either folds or holdout may be given; got {folds} and {holdout}")
        if not 2 <= folds <= number:
            raise ValueError(f"folds must be between 2 and the {number} masks; got {folds}")
        chosen = sourced if len(sourced) >= folds else order
        sets = np.zeros((folds + 1, number), bool)
        sets[np.arange(len(chosen)) % folds, chosen] = True
        return sets
    out = max(1, min(num_players, number // 5)) if holdout is None else holdout
    if not 1 <= out < number:
        raise ValueError(f"holdout must be between 1 and {number - 1} of the {number} masks; got {out}")
    sets = np.zeros((1, number), bool)
    sets[0, (sourced if len(sourced) >= out else order)[:out]] = True
    return sets


def measure(
    held_out: Bool[np.ndarray, "sets n"], predicted: Float[np.ndarray, "sets n"], values: Float[np.ndarray, " n"]
) -> tuple[Quality, Bool[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Quality on the masks held out, which these are, and the prediction of each mask: fields of `Fit`."""
    out = np.asarray(held_out.any(0))
    of_masks = np.where(out, predicted[held_out.argmax(0), np.arange(len(values))], predicted[-1])
    return quality(of_masks[out], values[out]), out, of_masks


def quality(predicted: Float[np.ndarray, " n"], values: Float[np.ndarray, " n"]) -> Quality:
    """How well values are predicted; NaN where nothing varies."""
    error, spread = np.mean((predicted - values) ** 2, dtype=np.float64), np.var(values, dtype=np.float64)
    r2 = 1 - error / spread if spread > 0 else np.nan
    return Quality(float(r2), float(np.sqrt(error)), _spearman(predicted, values))


def check_pairs(masks: Any, values: Any) -> tuple[Bool[np.ndarray, "n l"], Float[np.ndarray, " n"]]:
    """Give masks and values as arrays.

    Raises:
      ValueError: if they do not fit each other, or a value is not finite.
    """
    array, numbers = check_masks(masks), np.asarray(values, np.float32)
    if numbers.shape != (len(array),):
        raise ValueError(f"one value for each of the {len(array)} masks is needed; got shape {numbers.shape}")
    if not np.isfinite(numbers).all():
        raise ValueError(
            f"values must be finite, see keep_finite; that of mask {np.argmin(np.isfinite(numbers))} is not"
        )
    return array, numbers


def _recipe(
    recipe: str | optax.GradientTransformation, epochs: int | None, number: int, batch_size: int
) -> tuple[optax.GradientTransformation, int]:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs must be at least 1; got {epochs}")
    if not isinstance(recipe, str):
        if epochs is None:
            raise ValueError("an optimiser of your own needs epochs")
        return recipe, epochs
    if recipe == "auto":
        recipe = "paper" if number >= PAPER_MASKS else "adamw"
    if recipe == "paper":
        passes = 300 if epochs is None else epochs
        return _paper_optimizer(passes * -(-number // batch_size)), passes
    if recipe == "adamw":
        return _adamw(), 1_500 if epochs is None else epochs
    raise ValueError(f"recipe must be 'auto', 'paper', 'adamw' or an optax transformation; got {recipe!r}")


# The same object for the same recipe, so that the training is compiled once.
@functools.lru_cache(maxsize=64)
def _paper_optimizer(updates: int) -> optax.GradientTransformation:
    schedule = optax.piecewise_constant_schedule(0.008, {updates // 3: 0.1, 2 * updates // 3: 0.1})
    return optax.sgd(schedule, momentum=0.9)


@functools.lru_cache(maxsize=1)
def _adamw() -> optax.GradientTransformation:
    return optax.adamw(5e-3, weight_decay=1e-2)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _train(
    surrogate: Surrogate,
    optimizer: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    key: Key[Array, ""],
    masks: Array,
    values: Array,
    weights: Array,
) -> PyTree:
    """Train one surrogate for each row of weights ``[sets, n]``; they share initial weights and batches."""
    number = masks.shape[0]
    size = min(batch_size, number)
    batches = -(-number // size)
    key_init, key_order = jax.random.split(key)
    padding = batches * size - number

    def epoch(carry: PyTree, draws: Array) -> tuple[PyTree, None]:
        order = jnp.argsort(draws) if batches > 1 else jnp.arange(number)
        rows = jnp.concatenate([order, jnp.zeros((padding,), order.dtype)]).reshape(batches, size)
        real = (jnp.arange(batches * size) < number).reshape(batches, size)

        def update(carry: PyTree, xs: tuple[Array, Array]) -> tuple[PyTree, None]:
            rows, real = xs

            def one(carry: tuple[PyTree, PyTree], weights: Array) -> tuple[PyTree, PyTree]:
                params, state = carry
                weight = weights[rows] * real

                def loss(params: PyTree) -> Array:
                    errors = (surrogate.apply(params, masks[rows]) - values[rows]) ** 2
                    return jnp.sum(weight * errors) / jnp.maximum(jnp.sum(weight), 1)

                updates, state = optimizer.update(jax.grad(loss)(params), state, params)
                return optax.apply_updates(params, updates), state

            return jax.vmap(one)(carry, weights), None

        return lax.scan(update, carry, (rows, real))

    params = surrogate.init(key_init)
    start = jax.tree.map(
        lambda leaf: jnp.repeat(leaf[None], weights.shape[0], axis=0), (params, optimizer.init(params))
    )
    draws = jax.random.uniform(key_order, (epochs, number if batches > 1 else 1))
    (params, _), _ = lax.scan(lambda carry, draws: epoch(carry, draws), start, draws)
    return params


def _spearman(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> float:
    from scipy.stats import rankdata

    ranks = [rankdata(values) for values in (first, second)]
    centred = [values - values.mean() for values in ranks]
    norm = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    return float(centred[0] @ centred[1] / norm) if norm > 0 else float("nan")
