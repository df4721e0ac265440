"""Expert Merging, Expert Merging++ and AdaMerging: from a base, experts and a few unlabelled inputs to one model.

One coefficient for every tensor of every expert, trained so that the merged model behaves like each expert on that
expert's inputs; then, in Expert Merging++, more coefficients where they matter::

    def forward(params, batch):  # logits [b, ..., v], hidden states, each [b, ..., d]
        hidden = jnp.tanh(batch @ params["up"])
        return hidden @ params["head"], (hidden,)

    draws, head = jax.random.normal(jax.random.key(0), (3, 4, 8)), jax.random.normal(jax.random.key(3), (8, 5))
    base, *experts = [{"up": 0.5 * draw, "head": head} for draw in draws]
    inputs = [jax.random.normal(jax.random.key(k), (6, 4)) for k in (1, 2)]          # five to ten an expert will do
    merged = expert_merging(forward, base, experts, inputs, exclude=("head",), recipe=Recipe(gamma=0.1))
    finer = expert_merging_plus_plus(forward, base, experts, inputs, exclude=("head",), budget=4.0)
    merged.params, merged.coefficients.of_tensors(), merged.learned.loss

`jaxlab.editing.expert_merging.decoders` has the ``forward`` of our language models. To train several variants on the
same experts, `pose` a `Problem` once and `solve` it as often as is needed.

Reference: Zhang et al. 2026, Expert Merging: Model Merging with Unsupervised Expert Alignment and Importance-Guided
Layer Chunking, arXiv 2509.25712. AdaMerging: Yang et al. 2024, arXiv 2310.02575.

Deviations from the paper:

1. The second stage of Expert Merging++ may start from the coefficients of the first (``warm_start``); the authors'
   starts from the anchor, as is the default.
2. AdaMerging has the parameterisation of Expert Merging where the recipe says so; its own is ``squash="none"``,
   without the clipping to [0, 1] of its authors.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key, PyTree

from jaxlab.editing.expert_merging.coefficients import Coefficients, merge, tensor_layout
from jaxlab.editing.expert_merging.importance import allocate_chunks, layer_importance
from jaxlab.editing.expert_merging.objectives import Alignment, Entropy, Forward, Objective, Rows
from jaxlab.editing.expert_merging.training import Learned, Recipe, learn_coefficients, release, round_robin
from jaxlab.editing.merging.tree import DEFAULT_EXCLUDE
from jaxlab.editing.task_vectors import Paths, TaskVectors, apply, edited_paths, norms, stack_vectors, task_vectors

__all__ = [
    "Experts",
    "Merged",
    "Problem",
    "adamerging",
    "expert_merging",
    "expert_merging_plus_plus",
    "pose",
    "solve",
]

Experts = Sequence[PyTree] | Callable[[int], PyTree] | Mapping[str, Any]
"""Trees of parameters like the base; a function that gives the k-th, which is called once for each k and need not be
held; or task vectors."""

_MOVED_OUTSIDE = 0.1


class Problem(NamedTuple):
    """All that coefficients are trained on.

    Attributes:
      objective: what is asked of the merged model.
      base: θ₀.
      vectors: τ of the tensors that are merged.
      rows: the inputs of all experts, one after the other, with what the teachers say.
      tasks: expert of each input, ``[n]``.
      weights: β_k of each expert, ``[K]``.
      anchor: ᾱ_k, ``[K]``.
    """

    objective: Objective
    base: PyTree
    vectors: TaskVectors
    rows: Rows
    tasks: np.ndarray
    weights: np.ndarray
    anchor: np.ndarray

    @property
    def input_weights(self) -> Float[np.ndarray, " n"]:
        """u: ``β_k / n_k`` of each input of expert k."""
        counts = np.bincount(self.tasks, minlength=len(self.weights))
        return (self.weights / counts)[self.tasks].astype(np.float32)


class Merged(NamedTuple):
    """A merged model.

    Attributes:
      params: in the dtypes of the base.
      coefficients: what it was merged with.
      learned: losses and flags of the training.
      importance: of each tensor after the first stage; None where there is one stage.
    """

    params: PyTree
    coefficients: Coefficients
    learned: Learned
    importance: dict[str, Float[Array, " layers"]] | None = None


def expert_merging(
    forward: Forward | Alignment,
    base: PyTree,
    experts: Experts,
    calibration: Sequence[PyTree],
    *,
    masks: Sequence[Any] | None = None,
    include: Paths | None = None,
    exclude: Paths = DEFAULT_EXCLUDE,
    anchor: Any = 0.3,
    task_weights: Any = 1.0,
    chunks: int | Mapping[str, Any] = 1,
    recipe: Recipe | str = "default",
    key: Key[Array, ""] | None = None,
) -> Merged:
    """Merge experts by imitation.

    Args:
      forward: the network, or an `Alignment` with settings of its own.
      base: θ₀, any tree.
      experts: see `Experts`.
      calibration: for each expert a tree of arrays with a leading axis of inputs; all alike but for their number.
      masks: for each expert the weights of the positions, ``[n_k, ...]``, such as 0 on padding; None counts all.
      include: paths to merge, all by default (regular expressions, `jaxlab.editing.task_vectors.edited_paths`).
      exclude: paths that keep the base's values; by default those of the authors' code.
      anchor: ᾱ, the coefficient of task arithmetic, a number or ``[K]``; 0.3 in the paper, 0.1 for InternVL2.5-1B.
      task_weights: β, a number or ``[K]``; tuned by hand in the paper.
      chunks: pieces of the tensors, as in `jaxlab.editing.expert_merging.coefficients.tensor_layout`.
      recipe: how to train; "default" is ``Recipe()``, "release" the authors' command.
      key: source of the batches, where the recipe has some.

    Raises:
      ValueError: experts that are not like the base, nothing to merge, numbers of experts, inputs, masks, anchors or
        weights that do not agree, no inputs, an anchor outside (0, 1) with a sigmoid, a negative β or none positive.

    Warns:
      UserWarning: experts that changed in what is not merged, by more than a tenth of what is; a training that ended
        early.
    """
    objective = forward if isinstance(forward, Alignment) else Alignment(forward)
    problem = pose(
        objective,
        base,
        experts,
        calibration,
        masks=masks,
        include=include,
        exclude=exclude,
        anchor=anchor,
        task_weights=task_weights,
        inputs_at_once=_at_once(recipe),
    )
    return solve(problem, chunks=chunks, recipe=recipe, key=key)


def expert_merging_plus_plus(
    forward: Forward | Alignment,
    base: PyTree,
    experts: Experts,
    calibration: Sequence[PyTree],
    *,
    budget: float = 1.2,
    kappa: float = 1.0,
    min_chunks: int = 0,
    warm_start: bool = False,
    masks: Sequence[Any] | None = None,
    include: Paths | None = None,
    exclude: Paths = DEFAULT_EXCLUDE,
    anchor: Any = 0.3,
    task_weights: Any = 1.0,
    recipe: Recipe | str = "default",
    key: Key[Array, ""] | None = None,
) -> Merged:
    """Merge experts by imitation, once with a coefficient a tensor and again with pieces where it mattered.

    Args:
      forward: as for `expert_merging`, like all that is not named here.
      base: θ₀.
      experts: see `Experts`.
      calibration: inputs of each expert.
      budget: as in `allocate_chunks`, like the next two.
      kappa: as there.
      min_chunks: as there.
      warm_start: start the pieces from the coefficients of the first stage.
      masks: weights of the positions.
      include: paths to merge.
      exclude: paths not to merge.
      anchor: ᾱ.
      task_weights: β.
      recipe: of both stages.
      key: source of the batches.

    Raises:
      ValueError: as `expert_merging` and `allocate_chunks`.
    """
    objective = forward if isinstance(forward, Alignment) else Alignment(forward)
    problem = pose(
        objective,
        base,
        experts,
        calibration,
        masks=masks,
        include=include,
        exclude=exclude,
        anchor=anchor,
        task_weights=task_weights,
        inputs_at_once=_at_once(recipe),
    )
    first = solve(problem, recipe=recipe, key=key)
    importance = layer_importance(first.coefficients, problem.vectors)
    chunks = allocate_chunks(importance, first.coefficients.layout, budget=budget, kappa=kappa, min_chunks=min_chunks)
    second = solve(problem, chunks=chunks, recipe=recipe, key=key, start=first.learned.raw if warm_start else None)
    return second._replace(importance=importance)


def adamerging(
    forward: Forward,
    base: PyTree,
    experts: Experts,
    calibration: Sequence[PyTree],
    *,
    masks: Sequence[Any] | None = None,
    include: Paths | None = None,
    exclude: Paths = DEFAULT_EXCLUDE,
    anchor: Any = 0.3,
    task_weights: Any = 1.0,
    recipe: Recipe | None = None,
    key: Key[Array, ""] | None = None,
) -> Merged:
    """AdaMerging, layer-wise: coefficients that make predictions sure. With vectors trimmed by TIES, AdaMerging++.

    Args:
      forward: the network; its hidden states are not looked at.
      base: θ₀.
      experts: see `Experts`.
      calibration: inputs of each expert.
      masks: weights of the positions.
      include: paths to merge.
      exclude: paths not to merge.
      anchor: where training starts.
      task_weights: β.
      recipe: how to train; by default 500 steps of Adam at 1e-3 on the coefficients themselves, without a regulariser.
      key: source of the batches.

    Raises:
      ValueError: as `expert_merging`.
    """
    problem = pose(
        Entropy(forward),
        base,
        experts,
        calibration,
        masks=masks,
        include=include,
        exclude=exclude,
        anchor=anchor,
        task_weights=task_weights,
        inputs_at_once=_at_once(recipe),
    )
    return solve(problem, recipe=_ADAMERGING if recipe is None else recipe, key=key)


_ADAMERGING = Recipe(steps=500, optimizer=optax.adam(1e-3), squash="none", gamma=0.0)


def pose(
    objective: Objective,
    base: PyTree,
    experts: Experts,
    calibration: Sequence[PyTree],
    *,
    masks: Sequence[Any] | None = None,
    include: Paths | None = None,
    exclude: Paths = DEFAULT_EXCLUDE,
    anchor: Any = 0.3,
    task_weights: Any = 1.0,
    inputs_at_once: int | None = None,
) -> Problem:
    """Take task vectors, and ask every expert once for its outputs on its inputs.

    Arguments, errors and warnings are those of `expert_merging`. Of an expert that a function gives, its vectors and
    its outputs are kept. ``inputs_at_once`` limits how many inputs an expert sees at the same time.
    """
    count = len(calibration)
    if not callable(experts):
        given = _count_vectors(experts) if isinstance(experts, Mapping) else len(experts)
        if given != count:
            raise ValueError(f"calibration must have inputs for each of {given} experts, got {count}")
    if not count:
        raise ValueError("calibration must have inputs of at least one expert, got none")
    sizes = [_inputs(batch, k) for k, batch in enumerate(calibration)]
    betas = _of_experts(task_weights, count, "task_weights")
    anchors = _of_experts(anchor, count, "anchor")
    if not betas.min() >= 0 or not betas.max() > 0:
        raise ValueError(f"task_weights must not be negative, nor all 0; got {task_weights}")
    if masks is not None and len(masks) != count:
        raise ValueError(f"masks must be given for each of {count} experts, got {len(masks)}")

    vectors, outside, targets = [], [], []
    chosen = edited_paths(base, include=include, exclude=exclude)
    if isinstance(experts, Mapping):
        if not (kept := [path for path in chosen if path in experts]):
            raise ValueError(f"include and exclude leave none of the vectors, which are of {sorted(experts)}")
        vectors.append({path: experts[path] for path in kept})
    for k, batch in enumerate(calibration):
        if isinstance(experts, Mapping):
            teacher = apply(base, experts, jnp.eye(count)[k])
        else:
            teacher = experts(k) if callable(experts) else experts[k]
            changed = task_vectors(base, [teacher])
            vectors.append({path: changed.pop(path) for path in chosen})
            if changed:
                outside.append(float(norms(changed)[0] / norms(vectors[-1])[0]))
        targets.append(_target(objective, teacher, batch, inputs_at_once or sizes[k]))
    if outside and max(outside) > _MOVED_OUTSIDE:
        k = int(np.argmax(outside))
        warnings.warn(
            f"expert {k} changed in parameters that are not merged by {outside[k]:.2f} times what it changed in those "
            "that are: the merged model loses that",
            stacklevel=3,
        )
    rows = Rows(_joined(calibration), _mask(objective, base, calibration, masks), _joined(targets))
    tasks = np.repeat(np.arange(count), sizes)
    return Problem(objective, base, stack_vectors(vectors), rows, tasks, betas, anchors)


def solve(
    problem: Problem,
    *,
    chunks: int | Mapping[str, Any] = 1,
    recipe: Recipe | str = "default",
    key: Key[Array, ""] | None = None,
    start: Mapping[str, Float[Array, "k c"]] | None = None,
) -> Merged:
    """Train coefficients on a problem, and merge with them.

    Args:
      problem: from `pose`.
      chunks: pieces of the tensors.
      recipe: how to train.
      key: source of the batches, where the recipe has some.
      start: raw coefficients to start from, those of one a tensor; None for the anchor.

    Raises:
      ValueError: an unknown recipe, batches without a key, and as `tensor_layout`.
    """
    recipe = _recipe(recipe, len(problem.tasks))
    layout = tensor_layout(problem.vectors, chunks=chunks)
    schedule, weights, steps = None, problem.input_weights, recipe.steps
    if recipe.batch_size is not None:
        if key is None:
            raise ValueError(f"a recipe with batches of {recipe.batch_size} needs a key")
        experts = len(problem.weights)
        steps = steps or -(-int(np.bincount(problem.tasks).max()) * experts // recipe.batch_size)
        schedule = round_robin(key, problem.tasks, steps=steps, batch_size=recipe.batch_size)
        weights = (problem.weights * experts / recipe.batch_size)[problem.tasks[schedule]]
    if start is not None:
        start = {leaf.path: jnp.repeat(start[leaf.path], np.array(leaf.pieces), axis=1) for leaf in layout.leaves}
    learned = learn_coefficients(
        problem.objective,
        problem.base,
        problem.vectors,
        problem.rows,
        weights,
        layout=layout,
        anchor=problem.anchor,
        steps=int(steps or 0),
        optimizer=recipe.optimizer,
        schedule=schedule,
        gamma=recipe.gamma,
        squash=recipe.squash,
        regularizer=recipe.regularizer,
        inputs_at_once=recipe.inputs_at_once,
        start=start,
    )
    if not learned.finite:
        step = int(np.isnan(learned.loss).argmax())
        warnings.warn(f"the loss or its gradient is not finite at step {step}; coefficients before it", stacklevel=2)
    params = _merge(problem.base, problem.vectors, learned.alpha, layout=layout)
    return Merged(params, Coefficients(learned.alpha, layout), learned)


_merge = jax.jit(merge, static_argnames="layout")


@functools.partial(jax.jit, static_argnames="objective")
def _teach(params: PyTree, batch: PyTree, *, objective: Objective) -> PyTree:
    return objective.target(params, batch)


def _target(objective: Objective, params: PyTree, batch: PyTree, at_once: int) -> PyTree:
    count = jax.tree.leaves(batch)[0].shape[0]
    some = [jax.tree.map(lambda leaf, i=i: leaf[i : i + at_once], batch) for i in range(0, count, at_once)]
    return _joined([_teach(params, one, objective=objective) for one in some])


def _joined(trees: Sequence[PyTree]) -> PyTree:
    structures = {str(jax.tree.structure(tree)): None for tree in trees}
    if len(structures) > 1:
        raise ValueError(f"calibration must have the same tree for every expert, got {' and '.join(structures)}")
    return jax.tree.map(lambda *leaves: jnp.concatenate([jnp.asarray(leaf) for leaf in leaves]), *trees)


def _mask(objective: Objective, base: PyTree, calibration: Sequence[PyTree], masks: Sequence[Any] | None) -> Array:
    positions = jax.eval_shape(objective.forward, base, _joined(calibration))[0].shape[:-1]
    mask = jnp.ones(positions) if masks is None else _joined([jnp.asarray(one, jnp.float32) for one in masks])
    if mask.shape != positions:
        raise ValueError(f"masks must have the positions of the logits, {positions} in all; got {mask.shape}")
    return mask


def _inputs(batch: PyTree, k: int) -> int:
    counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(counts) != 1 or not (size := next(iter(counts))) or not size[0]:
        raise ValueError(f"calibration of expert {k} must have arrays with a leading axis of inputs, got {counts or 0}")
    return size[0]


def _of_experts(value: Any, count: int, name: str) -> np.ndarray:
    found = np.asarray(value, np.float32)
    if found.shape not in ((), (count,)):
        raise ValueError(f"{name} must be a number or one for each of {count} experts, got shape {list(found.shape)}")
    return np.broadcast_to(found, (count,))


def _count_vectors(vectors: Mapping[str, Any]) -> int:
    counts = {path: jnp.shape(vector)[:1] for path, vector in vectors.items() if not isinstance(vector, Mapping)}
    if len(counts) < len(vectors) or len(set(counts.values())) != 1 or counts[next(iter(counts))] == ():
        raise ValueError("experts must be a sequence of trees, a function, or task vectors [K, ...] by path")
    return int(next(iter(counts.values()))[0])


def _at_once(recipe: Any) -> int | None:
    return recipe.inputs_at_once if isinstance(recipe, Recipe) else None


def _recipe(recipe: Recipe | str, inputs: int) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    known: dict[str, Callable[[], Recipe]] = {"default": Recipe, "release": lambda: release(inputs)}
    if recipe not in known:
        raise ValueError(f"recipe must be a Recipe, 'default' or 'release', got {recipe!r}")
    return known[recipe]()
