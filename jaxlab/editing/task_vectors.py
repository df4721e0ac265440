"""Task vectors: what training changed, as something to add, scale, negate and compare.

From one base θ₀ and K models θ_k that were trained from it ::

    τ_k = θ_k - θ₀,    θ(λ) = θ₀ + Σ_k λ_k τ_k

`task_vectors` gives all τ at once: a dict from the path of a parameter to an array ``[K, ...]``, with the parameters
that are edited and no others, so that what a method does to a tensor is a function of one array, and memory holds
nothing that stays as it was. `apply` adds them to any tree with those paths, be it the base or another model::

    vectors = task_vectors(base, [code, math, chat], exclude=("norm", "embed", "lm_head"))
    merged = apply(base, vectors, 0.3)                                     # one λ for all
    forgetful = apply(base, vectors, jnp.array([1.0, 0.0, -0.5]))          # one for each
    candidates = jax.vmap(lambda scale: apply(base, vectors, scale))(jnp.linspace(0, 1, 11))
    similar = cosines(vectors)                                             # [K, K]

Arithmetic is in float32 (or wider, where parameters are) whatever the dtype of the parameters: what fine-tuning changes
is near the resolution of bfloat16. Results have the dtype of the tree they are added to. Parameters that are not
floating point (counters, random keys) are never edited.

Reference: Ilharco et al. 2023, Editing Models with Task Arithmetic, arXiv 2212.04089.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxlab.nn.lora import Adapters, factors_of, matrices

__all__ = [
    "Paths",
    "TaskVectors",
    "adapter_vectors",
    "apply",
    "cosines",
    "edited_paths",
    "grams",
    "norms",
    "path_of",
    "stack_vectors",
    "task_vectors",
]

TaskVectors = dict[str, Array]
"""From path to ``[K, ...]``."""

Paths = Sequence[str] | Callable[[str], bool]
"""Regular expressions to be found anywhere in a path (``("q_proj", r"layers/0/")``), or a predicate of it."""


def task_vectors(
    base: PyTree, tuned: Sequence[PyTree], *, include: Paths | None = None, exclude: Paths = ()
) -> TaskVectors:
    """What training changed, in each of K models.

    Args:
      base: parameters θ₀ before training; any tree of arrays.
      tuned: K trees like it.
      include: paths to edit, all by default.
      exclude: paths not to edit, which wins over ``include``.

    Returns:
      From path to ``θ_k - θ₀``, ``[K, ...]``, float32 or wider.

    Raises:
      ValueError: no model; a model whose paths, shapes or dtypes are not those of the base, naming it and the path;
        patterns that leave nothing to edit, or one that stands for nothing.
    """
    if not tuned:
        raise ValueError("tuned must hold at least one model, got none")
    leaves = _leaves(base)
    chosen = edited_paths(base, include=include, exclude=exclude)
    others = [_leaves(tree) for tree in tuned]
    for i, other in enumerate(others):
        _check_alike(leaves, other, f"tuned[{i}]")

    def difference(path: str) -> Array:
        start = _widened(leaves[path])
        return jnp.stack([_widened(other[path]) - start for other in others])

    return {path: difference(path) for path in chosen}


def apply(
    params: PyTree,
    vectors: Mapping[str, Float[Array, "k ..."]],
    scales: Any,
    *,
    reduce: str = "sum",
) -> PyTree:
    """``θ + Σ_k λ_k τ_k``. Pure, and differentiable in all arguments.

    Args:
      params: θ: the base, or any tree that has the paths of the vectors. Its other leaves are returned as they are.
      vectors: τ.
      scales: λ, a number for all; ``[K]``, one for each; or a dict from path to ``[K, ...]``, whose further axes are
        the leading ones of the tensor (``[K, layers]`` for blocks that are stacked).
      reduce: "sum", or "mean", which divides by K.

    Returns:
      A tree like ``params``.

    Raises:
      ValueError: a path or shape of the vectors that is not in ``params``; scales of another length or other paths; an
        unknown ``reduce``.
    """
    if reduce not in ("sum", "mean"):
        raise ValueError(f"reduce must be 'sum' or 'mean', got {reduce!r}")
    count = _count(vectors)
    known = _leaves(params)
    for path, vector in vectors.items():
        if path not in known:
            raise ValueError(f"the vectors do not fit: {path} is not a parameter here")
        if known[path].shape != vector.shape[1:]:
            raise ValueError(
                f"the vectors do not fit: {path} must have shape {known[path].shape}, got {vector.shape[1:]}"
            )
    by_path = isinstance(scales, Mapping)
    if by_path and scales.keys() != vectors.keys():
        path = sorted(scales.keys() ^ vectors.keys())[0]
        raise ValueError(f"scales must have the paths of the vectors; {path} is in one of them only")

    def change(key_path: Any, leaf: Any) -> Any:
        path = path_of(key_path)
        if path not in vectors:
            return leaf
        vector = vectors[path]
        scale = jnp.asarray(scales[path] if by_path else scales, vector.dtype)
        lead = scale.ndim if scale.ndim else 1
        if scale.ndim and scale.shape != vector.shape[:lead]:
            raise ValueError(
                f"scales must be a number, one for each of {count} vectors, or these for leading axes of {path} "
                f"{list(vector.shape)}; got {list(scale.shape)}"
            )
        weighted = jnp.reshape(scale, scale.shape + (1,) * (vector.ndim - scale.ndim)) * vector
        total = weighted.sum(0) / (count if reduce == "mean" else 1)
        return (_widened(leaf) + total).astype(leaf.dtype)

    return jax.tree.map_with_path(change, params)


def adapter_vectors(params: Mapping[str, Any], experts: Sequence[Adapters]) -> TaskVectors:
    """Task vectors ``s B A`` of LoRA experts, in float32; zero where an expert has no pair.

    Args:
      params: parameters of the base, or their shapes.
      experts: K adapters of it, such as `jaxlab.nn.checkpoints.adapters.load_adapters` gives.

    Raises:
      ValueError: no expert, or one that changes a matrix that is not there or has another shape.
    """
    if not experts:
        raise ValueError("experts must hold at least one, got none")
    known = matrices(params)
    found: dict[str, list[Array | None]] = {}
    for i, expert in enumerate(experts):
        for target in expert.targets:
            down, up = (factor.astype(jnp.float32) for factor in factors_of(expert, target))
            wanted = known.get(target.path)
            if wanted is None or (*up.shape[:-1], down.shape[-1]) != wanted:
                shape = (*up.shape[:-1], down.shape[-1])
                raise ValueError(f"experts[{i}] does not fit: {target.path} is {wanted or 'not there'}, got {shape}")
            scale = jnp.reshape(jnp.asarray(expert.scales(target)), (*up.shape[:-2], 1, 1))
            change = scale * jnp.matmul(up, down, precision="highest")
            found.setdefault(f"{target.path}/weight", [None] * len(experts))[i] = change

    def together(changes: list[Array | None]) -> Array:
        like = next(change for change in changes if change is not None)
        return jnp.stack([jnp.zeros_like(like) if change is None else change for change in changes])

    return {path: together(changes) for path, changes in found.items()}


def stack_vectors(vectors: Sequence[Mapping[str, Float[Array, "k ..."]]]) -> TaskVectors:
    """Put task vectors one after the other, as if they had been made in one call.

    Raises:
      ValueError: none, or vectors of different paths or shapes.
    """
    if not vectors:
        raise ValueError("vectors must hold at least one, got none")
    first = vectors[0]
    for other in vectors[1:]:
        for path in first.keys() | other.keys():
            shapes = [v[path].shape[1:] if path in v else None for v in (first, other)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"vectors differ: {path} has shape {shapes[0]} in one and {shapes[1]} in another")
    return {path: jnp.concatenate([other[path] for other in vectors]) for path in first}


def grams(vectors: Mapping[str, Float[Array, "k ..."]]) -> Float[Array, "k k"]:
    """Inner products of all pairs, over all parameters together."""
    _count(vectors)

    def of_leaf(vector: Array) -> Array:
        flat = vector.reshape(vector.shape[0], -1)
        return jnp.matmul(flat, flat.T, precision="highest")

    return sum(of_leaf(vector) for vector in vectors.values())  # type: ignore[return-value]


def norms(vectors: Mapping[str, Float[Array, "k ..."]]) -> Float[Array, " k"]:
    """Euclidean lengths, over all parameters together."""
    _count(vectors)
    squares = sum(jnp.square(vector).reshape(vector.shape[0], -1).sum(1) for vector in vectors.values())
    return jnp.sqrt(squares)


def cosines(vectors: Mapping[str, Float[Array, "k ..."]]) -> Float[Array, "k k"]:
    """Cosines of the angles of all pairs; NaN for a vector of length zero."""
    products = grams(vectors)
    lengths = jnp.sqrt(jnp.diagonal(products))
    return products / (lengths[:, None] * lengths[None, :])


def edited_paths(params: PyTree, *, include: Paths | None = None, exclude: Paths = ()) -> tuple[str, ...]:
    """Paths of the floating-point leaves that patterns choose, in the order of the tree.

    Raises:
      ValueError: nothing is left, or a pattern of ``include`` stands for no path.
    """
    known = [path for path, leaf in _leaves(params).items() if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if include is not None and not callable(include):
        for pattern in _sequence(include, "include"):
            if not any(re.search(pattern, path) for path in known):
                raise ValueError(f"include pattern {pattern!r} stands for no parameter; there are {_some(known)}")
    chosen = [
        path
        for path in known
        if (include is None or _matches(path, include, "include")) and not _matches(path, exclude, "exclude")
    ]
    if not chosen:
        raise ValueError(f"include and exclude leave no floating-point parameter to edit; there are {_some(known)}")
    return tuple(chosen)


def path_of(key_path: Any) -> str:
    """The path of a leaf as methods here name it: ``model/layers/mlp/up_proj/weight``."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def _leaves(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(tree)
    found = {path_of(path): leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf) for path, leaf in leaves}
    if len(found) < len(leaves):
        raise ValueError("two parameters have the same path; keys must not hold slashes that make them so")
    return found


def _widened(leaf: Any) -> Array:
    return jnp.asarray(leaf, jnp.promote_types(leaf.dtype, jnp.float32))


def _check_alike(base: Mapping[str, Any], other: Mapping[str, Any], name: str) -> None:
    for path in [*base, *(path for path in other if path not in base)]:
        if path not in other or path not in base:
            raise ValueError(
                f"{name} is not like the base: {path} is missing in {name if path in base else 'the base'}"
            )
        ours, theirs = base[path], other[path]
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise ValueError(
                f"{name} is not like the base: {path} must be {ours.dtype}{list(ours.shape)}, "
                f"got {theirs.dtype}{list(theirs.shape)}"
            )


def _count(vectors: Mapping[str, Any]) -> int:
    counts = {path: vector.shape[0] for path, vector in vectors.items()}
    if not counts:
        raise ValueError("there must be at least one task vector, got none")
    if len(set(counts.values())) > 1:
        raise ValueError(f"all leaves must hold as many task vectors, got {counts}")
    return next(iter(counts.values()))


def _sequence(patterns: Sequence[str], name: str) -> Sequence[str]:
    if isinstance(patterns, str):
        raise ValueError(f"{name} must be a sequence of patterns or a predicate, got the string {patterns!r}")
    return patterns


def _matches(path: str, paths: Paths, name: str) -> bool:
    return paths(path) if callable(paths) else any(re.search(p, path) for p in _sequence(paths, name))


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "") if paths else "none"
