"""All ways of merging on the same experts: static ones at every scale, learned ones in every variant.

Every static method is given the best of `SCALES` by its score on the very test inputs it is judged on, which favours it
over the learned ones, which see no label (AdaMerging has the best of its learning rates).

A `Setting` holds some repeats of the same sizes, so that a method is one compiled program for all of them. Scores are
the larger the better: accuracy, or cross-entropy with a minus.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from jaxlab.editing import merging
from jaxlab.editing.expert_merging import Layout, Rows, learn_coefficients, tensor_layout
from jaxlab.editing.expert_merging import coefficients as of_tensors
from jaxlab.editing.expert_merging.objectives import Objective
from jaxlab.editing.expert_merging.training import adamw
from jaxlab.editing.merging import MergeMethod, Ties
from jaxlab.editing.task_vectors import TaskVectors, apply

__all__ = ["SCALES", "Learning", "Setting", "Variant", "layout_of", "learn", "static_scores", "trimmed"]

SCALES = (*np.round(np.arange(0.1, 1.55, 0.1), 2).tolist(), 1.75, 2.0, 2.5, 3.0)
STACKED = ("layers/",)


class Setting(NamedTuple):
    """Bases, experts and inputs of all repeats.

    Attributes:
      base: ``[R, ...]``.
      vectors: ``[R, K, ...]``.
      rows: inputs of all experts with what the teachers say, ``[R, K N, ...]``.
      tests: what ``score`` takes, ``[R, ...]``.
      score: ``score(params, test)``, ``[K]``; static.
      at_once: variants that are trained together; static.
    """

    base: PyTree
    vectors: TaskVectors
    rows: Rows
    tests: PyTree
    score: Callable[[Any, Any], Array]
    at_once: int


class Variant(NamedTuple):
    """One setting of the learned methods.

    Attributes:
      inputs: of each expert.
      gamma: weight of the regulariser.
      hidden: weight of the hidden states.
      logits: weight of the logits.
    """

    inputs: int
    gamma: float
    hidden: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True)
class Learning:
    """What all variants share. Hashable, for jit."""

    steps: int
    learning_rate: float
    squash: str
    anchor: float

    def optimizer(self) -> optax.GradientTransformation:
        """The default recipe's."""
        return adamw(self.steps, self.learning_rate)


def layout_of(setting: Setting, chunks: Any = 1) -> Layout:
    """The layout of the vectors of one repeat."""
    return tensor_layout({path: v[0] for path, v in setting.vectors.items()}, chunks=chunks)


def static_scores(
    setting: Setting, method: MergeMethod, key: Array | None = None, *, scales: Sequence[float] = SCALES
) -> Float[np.ndarray, "r s d"]:
    """Scores of a static method, times each scale."""
    changes = dict(_combine(setting.vectors, method, key))
    return np.asarray(_scaled(setting.base, changes, setting.tests, jnp.asarray(scales), score=setting.score))


def trimmed(setting: Setting, density: float) -> TaskVectors:
    """Task vectors with the largest magnitudes of each expert alone, as TIES trims them."""
    return _trim(setting.vectors, density)


def learn(
    setting: Setting,
    objective: Objective,
    layout: Layout,
    variants: Sequence[Variant],
    learning: Learning,
    *,
    vectors: TaskVectors | None = None,
) -> dict[str, Any]:
    """Train and score all variants: ``score`` ``[R, V, K]``, ``loss`` ``[R, V]``, ``parts`` and ``alpha`` by name."""
    experts = next(iter(setting.vectors.values())).shape[1]
    drawn = setting.rows.mask.shape[1] // experts
    counts = np.array([variant.inputs for variant in variants])
    taken = (drawn * np.arange(experts)[:, None] + np.arange(counts.max())).ravel()
    rows = setting.rows if "hidden" in objective.part_weights else setting.rows._replace(target=())
    rows = jax.tree.map(lambda leaf: leaf[:, taken], rows)
    used = (np.arange(counts.max()) < counts[:, None]) / counts[:, None]
    weights = np.tile(used, (1, experts)).astype(np.float32)
    names = list(objective.part_weights)
    given = {"hidden": [v.hidden for v in variants], "logits": [v.logits for v in variants]}
    parts = {name: np.array(given.get(name, np.ones(len(variants))), np.float32) for name in names}
    gammas = np.array([variant.gamma for variant in variants], np.float32)
    return _learn(
        setting.base,
        setting.vectors if vectors is None else vectors,
        rows,
        setting.tests,
        (weights, parts, gammas),
        objective=objective,
        layout=layout,
        learning=learning,
        score=setting.score,
        at_once=setting.at_once,
    )


@functools.partial(jax.jit, static_argnames=("objective", "layout", "learning", "score", "at_once"))
def _learn(
    base: PyTree,
    vectors: TaskVectors,
    rows: Rows,
    tests: PyTree,
    variants: Any,
    *,
    objective: Objective,
    layout: Layout,
    learning: Learning,
    score: Callable[[Any, Any], Array],
    at_once: int,
) -> dict[str, Any]:
    def of_repeat(base: PyTree, vectors: TaskVectors, rows: Rows, test: PyTree) -> Any:
        anchor = jnp.full(next(iter(vectors.values())).shape[0], learning.anchor)

        def of_variant(variant: Any) -> dict[str, Any]:
            weights, parts, gamma = variant
            learned = learn_coefficients(
                objective,
                base,
                vectors,
                rows,
                weights,
                layout=layout,
                anchor=anchor,
                steps=learning.steps,
                optimizer=learning.optimizer(),
                part_weights=parts,
                gamma=gamma,
                squash=learning.squash,
            )
            merged = of_tensors.merge(base, vectors, learned.alpha, layout)
            return {
                "score": score(merged, test),
                "loss": learned.loss,
                "parts": learned.parts,
                "alpha": learned.alpha,
            }

        return jax.lax.map(of_variant, variants, batch_size=min(at_once, len(variants[2])))

    if at_once > 1:
        return jax.vmap(of_repeat)(base, vectors, rows, tests)
    return jax.lax.map(lambda repeat: of_repeat(*repeat), (base, vectors, rows, tests))


@jax.jit
def _combine(vectors: TaskVectors, method: MergeMethod, key: Array | None) -> Mapping[str, Array]:
    def of_repeat(vectors: TaskVectors) -> Mapping[str, Array]:
        return merging.combine(vectors, method, key=key, stacked=STACKED)

    return jax.lax.map(of_repeat, vectors)


@functools.partial(jax.jit, static_argnames="score")
def _scaled(
    base: PyTree, changes: Mapping[str, Array], tests: PyTree, scales: Array, *, score: Callable[[Any, Any], Array]
) -> Float[Array, "r s d"]:
    def of_repeat(repeat: Any) -> Array:
        base, changes, test = repeat

        def at(scale: Array) -> Array:
            return score(apply(base, {path: change[None] for path, change in changes.items()}, scale), test)

        return jax.lax.map(at, scales)

    return jax.lax.map(of_repeat, (base, changes, tests))


@jax.jit
def _trim(vectors: TaskVectors, density: Any) -> TaskVectors:
    def of_expert(vectors: TaskVectors) -> TaskVectors:
        alone = {path: vector[None] for path, vector in vectors.items()}
        return dict(merging.combine(alone, Ties(density=density)))

    return jax.lax.map(lambda of_repeat: jax.lax.map(of_expert, of_repeat), vectors)
