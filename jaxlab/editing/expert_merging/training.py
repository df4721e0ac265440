"""Training of coefficients: some tens or thousands of numbers, by any optax transformation, in one compiled scan.

The loss of raw coefficients a, over inputs i of experts k(i) ::

    L(a) = Σ_parts w_part Σ_i u_i part_i(θ(α)) + γ R(α),     α = squash(a),   u_i = β_{k(i)} / n_{k(i)}

is that of `jaxlab.editing.expert_merging.objectives`. The parameters are merged once a step. All of w, u, γ and the
anchor may be traced, so that a grid of settings is one `jax.vmap`::

    def at(gamma):
        return learn_coefficients(objective, base, vectors, rows, u, layout=layout, anchor=anchor, gamma=gamma).loss[-1]

    losses = jax.vmap(at)(jnp.array([0.0, 0.1, 0.8]))

Reference: section 3 of Zhang et al. 2026, Expert Merging, arXiv 2509.25712.

Deviations from the paper:

1. The default takes all inputs in each of 60 steps of AdamW at 0.1 with a cosine decay. The authors' command takes a
   single epoch of eight inputs a step at 0.5, five steps for forty inputs: `release`.
2. A loss or gradient that is not finite ends training: the coefficients before it come back, with a flag.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxlab.editing.expert_merging.coefficients import (
    Layout,
    distance_to_anchor,
    initial,
    merge,
    values,
)
from jaxlab.editing.expert_merging.objectives import Objective, Rows
from jaxlab.editing.task_vectors import TaskVectors

__all__ = ["Learned", "Recipe", "adamw", "learn_coefficients", "release", "round_robin", "warm_restarts"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How coefficients are trained.

    Attributes:
      steps: optimiser steps; None means one epoch of ``batch_size``.
      optimizer: over raw coefficients; None means `adamw` of ``steps``. Keep one object: compiled programs are found
        by it.
      batch_size: inputs a step, experts in turn; None means all.
      inputs_at_once: inputs whose activations are held at the same time; None means all of a step.
      squash: from raw to coefficient: "sigmoid", in (0, 1), as in the authors' code; "softplus", positive; "none".
        Where the best coefficients are 1 or more (few experts, nearly orthogonal) a sigmoid saturates.
      gamma: γ; 0.8 for Mistral-7B and Qwen2-VL-7B, 5 for InternVL2.5-1B in the paper.
      regularizer: as in `distance_to_anchor`.

    Raises:
      ValueError: sizes below one, a negative γ, an unknown regulariser.
    """

    steps: int | None = 60
    optimizer: optax.GradientTransformation | None = None
    batch_size: int | None = None
    inputs_at_once: int | None = None
    squash: str = "sigmoid"
    gamma: float = 0.8
    regularizer: str = "paper"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "inputs_at_once"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.steps is None and self.batch_size is None:
            raise ValueError("a recipe without steps needs a batch_size, to know what an epoch is")
        if not self.gamma >= 0:
            raise ValueError(f"gamma must not be negative, got {self.gamma}")
        if self.regularizer not in ("paper", "release"):
            raise ValueError(f"regularizer must be 'paper' or 'release', got {self.regularizer!r}")


class Learned(NamedTuple):
    """What training gave.

    Attributes:
      raw: a, before the squash.
      alpha: α, as `jaxlab.editing.expert_merging.coefficients.values` gives them.
      loss: at the start and after each step, ``[steps + 1]``; NaN from where training stopped.
      regularizer: R, the same.
      parts: from the name of each part of the objective to the same.
      finite: whether loss and gradient were numbers throughout; if not, the coefficients are the last at which they
        were.
    """

    raw: dict[str, Float[Array, "k c"]]
    alpha: dict[str, Float[Array, "k c"]]
    loss: Float[Array, " steps+1"]
    regularizer: Float[Array, " steps+1"]
    parts: dict[str, Float[Array, " steps+1"]]
    finite: Bool[Array, ""]


@functools.cache
def adamw(steps: int, learning_rate: float = 0.1) -> optax.GradientTransformation:
    """AdamW with a cosine decay to a tenth, after clipping to norm 1. Weight decay pulls α to 1/2, and is small."""
    schedule = optax.cosine_decay_schedule(learning_rate, steps, alpha=0.1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-5))


@functools.cache
def warm_restarts(steps: int, learning_rate: float = 0.5) -> optax.GradientTransformation:
    """The authors' AdamW: cosines to a tenth over 50 steps, 100, 200, ..., after clipping to norm 1."""
    lengths = [50 * 2**i for i in range(max(1, math.ceil(math.log2(steps / 50 + 1))))]
    cosines = [optax.cosine_decay_schedule(learning_rate, length, alpha=0.1) for length in lengths]
    schedule = optax.join_schedules(cosines, np.cumsum(lengths)[:-1].tolist())
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-5))


def release(inputs: int, **options: Any) -> Recipe:
    """The authors' command: one epoch of `warm_restarts`, eight inputs a step, the regulariser K times.

    Args:
      inputs: number of inputs of all experts together.
      options: other fields of `Recipe`.
    """
    steps = math.ceil(inputs / 8)
    settings = {"steps": steps, "optimizer": warm_restarts(steps), "batch_size": 8, "regularizer": "release"}
    return Recipe(**{**settings, **options})  # type: ignore[arg-type]


def round_robin(key: Key[Array, ""], tasks: np.ndarray, *, steps: int, batch_size: int) -> Int[np.ndarray, "steps b"]:
    """Which inputs each step takes: experts in turn, the inputs of each in a random order, again and again.

    Args:
      key: source of the orders.
      tasks: expert of each input, ``[n]``.
      steps: number of steps.
      batch_size: inputs a step.
    """
    order = np.asarray(jax.random.permutation(key, len(tasks)))
    queues = [order[tasks[order] == k] for k in np.unique(tasks)]
    rounds, experts = np.divmod(np.arange(steps * batch_size), len(queues))
    chosen = [queues[k][i % len(queues[k])] for i, k in zip(rounds, experts, strict=True)]
    return np.array(chosen).reshape(steps, batch_size)


def learn_coefficients(
    objective: Objective,
    base: PyTree,
    vectors: TaskVectors,
    rows: Rows,
    input_weights: Float[Any, "..."],
    *,
    layout: Layout,
    anchor: Float[Any, " k"],
    steps: int = 60,
    optimizer: optax.GradientTransformation | None = None,
    schedule: Int[Any, "steps b"] | None = None,
    part_weights: Mapping[str, Any] | None = None,
    gamma: Any = 0.8,
    squash: str = "sigmoid",
    regularizer: str = "paper",
    inputs_at_once: int | None = None,
    start: Mapping[str, Float[Array, "k c"]] | None = None,
) -> Learned:
    """Train coefficients from the anchor on. Compiled once for all arrays of the same shapes.

    Args:
      objective: such as `Alignment`.
      base: θ₀.
      vectors: τ.
      rows: n inputs.
      input_weights: u, ``[n]``; or ``[steps, b]`` beside a schedule.
      layout: from `tensor_layout`.
      anchor: ᾱ, ``[K]``.
      steps: number of optimiser steps.
      optimizer: an optax transformation over the raw coefficients, by default `adamw`.
      schedule: which inputs each step takes, ``[steps, b]``; None for all of them.
      part_weights: factor of every part, by default those of the objective.
      gamma: γ.
      squash: as in `Recipe`.
      regularizer: as in `Recipe`.
      inputs_at_once: as in `Recipe`.
      start: raw coefficients to start from, by default those of the anchor.

    Raises:
      ValueError: an anchor that does not go with ``squash``.
    """
    raw = initial(layout, anchor, squash=squash)
    if start is not None:
        raw = {path: jnp.broadcast_to(start[path], leaf.shape) for path, leaf in raw.items()}
    weights = dict(objective.part_weights if part_weights is None else part_weights)
    return _learn(
        base,
        vectors,
        rows,
        jnp.asarray(input_weights, jnp.float32),
        raw,
        jnp.asarray(anchor, jnp.float32),
        None if schedule is None else jnp.asarray(schedule),
        weights,
        gamma,
        objective=objective,
        layout=layout,
        steps=steps,
        optimizer=adamw(steps) if optimizer is None else optimizer,
        squash=squash,
        regularizer=regularizer,
        inputs_at_once=inputs_at_once,
    )


@functools.partial(
    jax.jit,
    static_argnames=("objective", "layout", "steps", "optimizer", "squash", "regularizer", "inputs_at_once"),
)
def _learn(
    base: PyTree,
    vectors: TaskVectors,
    rows: Rows,
    input_weights: Array,
    raw: dict[str, Array],
    anchor: Array,
    schedule: Array | None,
    part_weights: dict[str, Any],
    gamma: Any,
    *,
    objective: Objective,
    layout: Layout,
    steps: int,
    optimizer: optax.GradientTransformation,
    squash: str,
    regularizer: str,
    inputs_at_once: int | None,
) -> Learned:
    def loss(raw: dict[str, Array], rows: Rows, weights: Array) -> tuple[Array, dict[str, Array]]:
        alpha = values(raw, layout, anchor, squash=squash)
        params = merge(base, vectors, alpha, layout)
        parts = _parts(objective, params, rows, weights, inputs_at_once)
        distance = distance_to_anchor(alpha, layout, anchor, kind=regularizer)
        total = sum(part_weights[name] * part for name, part in parts.items()) + gamma * distance
        return total, {"regularizer": distance, **parts}

    def step(carry: Any, inputs: Any) -> tuple[Any, dict[str, Array]]:
        raw, good, state, finite = carry
        number, chosen, weights = inputs
        some = rows if chosen is None else jax.tree.map(lambda leaf: leaf[chosen], rows)
        weights = input_weights if weights is None else weights
        (total, parts), gradients = jax.value_and_grad(loss, has_aux=True)(raw, some, weights)
        size = optax.tree.norm(gradients)
        finite = finite & jnp.isfinite(total) & jnp.isfinite(size)
        good = _where(finite, raw, good)
        updates, after = optimizer.update(gradients, state, raw)
        moves = finite & (number < steps)
        raw, state = _where(moves, (optax.apply_updates(raw, updates), after), (raw, state))
        told = {"loss": total, **parts}
        return (raw, good, state, finite), {name: jnp.where(finite, one, jnp.nan) for name, one in told.items()}

    # One step more, which is evaluated and not taken, tells the loss of what comes back.
    numbers = jnp.arange(steps + 1)
    xs: Any = (numbers, None, None)
    if schedule is not None:
        last = jnp.minimum(numbers, steps - 1)
        xs = (numbers, schedule[last], input_weights[last])
    carry = (raw, raw, optimizer.init(raw), jnp.array(True))
    (_, good, _, finite), told = jax.lax.scan(step, carry, xs)
    loss_, distance = told.pop("loss"), told.pop("regularizer")
    return Learned(good, values(good, layout, anchor, squash=squash), loss_, distance, told, finite)


def _parts(
    objective: Objective, params: PyTree, rows: Rows, weights: Array, inputs_at_once: int | None
) -> dict[str, Array]:
    """The weighted sum of each part. Where inputs go by some at a time, activations are computed again."""
    if inputs_at_once is None or inputs_at_once >= len(weights):
        return {name: weights @ part for name, part in objective(params, rows).items()}
    count = -(-len(weights) // inputs_at_once)
    places = np.minimum(np.arange(count * inputs_at_once), len(weights) - 1).reshape(count, inputs_at_once)
    counted = jnp.where(np.arange(count * inputs_at_once).reshape(places.shape) < len(weights), weights[places], 0.0)

    @jax.checkpoint
    def some(params: PyTree, chosen: Array, weights: Array) -> dict[str, Array]:
        found = objective(params, jax.tree.map(lambda leaf: leaf[chosen], rows))
        return {name: weights @ part for name, part in found.items()}

    def add(total: dict[str, Array], xs: Any) -> tuple[dict[str, Array], None]:
        return jax.tree.map(jnp.add, total, some(params, *xs)), None

    zeros = {name: jnp.zeros(()) for name in objective.part_weights}
    return jax.lax.scan(add, zeros, (jnp.asarray(places), counted))[0]


def _where(condition: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
