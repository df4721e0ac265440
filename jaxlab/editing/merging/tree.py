"""Merging whole trees of parameters.

Example::

    vectors = task_vectors(base, [code, math, chat], exclude=DEFAULT_EXCLUDE)
    merged = merge(base, vectors, Ties(density=0.2))
    merged = merge(base, vectors, Wudi(), stacked=("model/layers",))      # blocks on a leading axis, as in our decoders
    merged = merge(base, vectors, Dare(), key=jax.random.key(0))
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from jaxlab.editing.merging.method import MatrixMethod, MergeMethod, after
from jaxlab.editing.task_vectors import Paths, apply

__all__ = ["DEFAULT_EXCLUDE", "combine", "merge"]

DEFAULT_EXCLUDE = ("vision_model", "lm_head", "norm", "embed_tokens", "bias")
"""What is not merged unless asked for, as in the code of arXiv 2509.25712: expressions found anywhere in a path."""


def merge(
    params: PyTree,
    vectors: Mapping[str, Float[Array, "k ..."]],
    method: MergeMethod,
    *,
    key: Key[Array, ""] | None = None,
    stacked: Paths = (),
    grams: Mapping[str, Float[Array, "k ..."]] | None = None,
) -> PyTree:
    """Add what a method makes of K task vectors to the base. Pure; jits and differentiates where the method does.

    Args:
      params: θ₀, or any tree with the paths of the vectors; other leaves are returned as they are.
      vectors: τ by path, of `jaxlab.editing.task_vectors.task_vectors`; which paths are merged was chosen there.
      method: how.
      key: of all draws, for methods that need one.
      stacked: paths of leaves that hold one tensor for each block on a leading axis ``[K, blocks, ...]``: each block is
        merged by itself.
      grams: by path what `RegMean` takes, ``[K, in, in]`` (``[K, blocks, in, in]`` where stacked).

    Returns:
      A tree like ``params``.

    Raises:
      ValueError: vectors that do not fit, a key or Gram matrices that are missing or superfluous, a leaf that should be
        stacked and has no such axis.
    """
    merged = combine(vectors, method, key=key, stacked=stacked, grams=grams)
    return apply(params, {path: change[None] for path, change in merged.items()}, 1.0)


def combine(
    vectors: Mapping[str, Float[Array, "k ..."]],
    method: MergeMethod,
    *,
    key: Key[Array, ""] | None = None,
    stacked: Paths = (),
    grams: Mapping[str, Float[Array, "k ..."]] | None = None,
) -> dict[str, Array]:
    """The one task vector that a method makes of K, by path; arguments and errors as of `merge`."""
    if not vectors:
        raise ValueError("there must be task vectors of at least one parameter, got none")
    if method.needs_key != (key is not None):
        raise ValueError(f"{type(method).__name__} {'draws: give a key' if method.needs_key else 'draws nothing'}")
    if grams is not None and not method.needs_calibration:
        raise ValueError(f"{type(method).__name__} takes no Gram matrices")
    if isinstance(stacked, str):
        raise ValueError(f"stacked must be a sequence of patterns or a predicate, got the string {stacked!r}")
    shared = method.statistics(vectors)
    keys = dict(zip(vectors, jax.random.split(key, len(vectors)), strict=True)) if key is not None else {}
    merged: dict[str, Array] = {}
    for path, vector in vectors.items():
        if merged and isinstance(method, MatrixMethod):
            vector = after(vector, next(reversed(merged.values())))
        own = shared if grams is None else grams.get(path)
        in_blocks = stacked(path) if callable(stacked) else any(re.search(pattern, path) for pattern in stacked)
        if not in_blocks:
            merged[path] = method.combine(vector, key=keys.get(path), statistics=own)
            continue
        if vector.ndim < 2:
            raise ValueError(f"{path} of shape {list(vector.shape[1:])} has no leading axis of blocks")
        blocks = jnp.moveaxis(vector, 1, 0)
        of_block = None if grams is None or own is None else jnp.moveaxis(own, 1, 0)
        of_all = None if grams is not None else own
        split = jax.random.split(keys[path], len(blocks)) if keys else None

        def one(block: Any, key: Any, gram: Any, of_all: Any = of_all) -> Array:
            return method.combine(block, key=key, statistics=of_all if gram is None else gram)

        merged[path] = jax.vmap(one)(blocks, split, of_block)
    return merged
