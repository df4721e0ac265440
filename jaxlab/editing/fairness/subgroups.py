"""One fine-tuned model for every group, all trained in one program.

From parameters θ₀ and the rows D_g of each group ::

    θ_g = Train(θ₀, D_g),     Δ_g = θ_g - θ₀

with the same optimiser, the same number of epochs and the same θ₀ (its head included) for every group. Training is
`jax.vmap` over groups of one `jax.lax.scan` over steps::

    def loss_fn(params, batch):  # one loss a row, [b]
        return optax.sigmoid_binary_cross_entropy(batch["x"] @ params["w"], batch["y"])

    key, optimizer = jax.random.key(0), optax.adamw(3e-4, weight_decay=0.01)
    data = {"x": jax.random.normal(key, (200, 4)), "y": jnp.arange(200.0) % 2}
    membership = membership_from_ids(jnp.arange(200) % 3, 3)
    base = {"w": jnp.zeros(4)}
    tuned = subgroup_finetune(loss_fn, base, data, membership, optimizer, key, steps=50, batch_size=16)
    vectors = task_vectors(base, tuned.models())                                      # {"w": [3, 4]}

``params`` is any tree: for LoRA train the adapters, ``loss_fn(lora.apply(base, adapters), batch)``, and merge each
(`jaxlab.nn.lora`). Full fine-tuning is a single group of all rows: ``membership = jnp.ones((n, 1))``.

Reference: section 3 of Gomezjurado Gonzalez et al. 2026, On Fairness of Task Arithmetic, arXiv 2505.24262.

Deviations from the paper:

1. Batches are drawn with replacement, so that an epoch is as many draws as there are rows.
2. There is one θ₀ with one head for all groups. In the authors' script each group's model starts from a head of its
   own, whose difference to the first one's is then part of Δ_g.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key, PyTree

from jaxlab.editing.fairness.group_statistics import Membership, Vector

__all__ = ["SubgroupModels", "subgroup_finetune"]


class SubgroupModels(NamedTuple):
    """What training gave.

    Attributes:
      params: the trees θ_g, stacked on a leading axis ``[g, ...]``.
      losses: mean loss of each batch, ``[g, steps]``; of the finished model where a group takes fewer steps.
      groups: column of the membership that each model belongs to, ``[g]``.
    """

    params: PyTree
    losses: Float[Array, "g steps"]
    groups: np.ndarray

    def models(self) -> list[PyTree]:
        """The trees one by one, as `jaxlab.editing.task_vectors.task_vectors` takes them."""
        return [jax.tree.map(lambda leaf, i=i: leaf[i], self.params) for i in range(len(self.groups))]


def subgroup_finetune(
    loss_fn: Callable[[Any, Any], Float[Array, " b"]],
    params: PyTree,
    data: PyTree,
    membership: Membership,
    optimizer: optax.GradientTransformation,
    key: Key[Array, ""],
    *,
    steps: int,
    batch_size: int | None = 128,
    equal_epochs: bool = True,
    weights: Vector | None = None,
) -> SubgroupModels:
    """Train one model for every group.

    Args:
      loss_fn: ``loss_fn(params, batch)``, the loss of every row of a batch.
      params: θ₀; integers and booleans in it stay as they are.
      data: tree of arrays with a leading axis of n rows; a batch is the same tree of fewer rows.
      membership: ``[n, g]``; rows of no group are not used, rows of several in each.
      optimizer: an optax transformation, started anew for every group.
      key: source of the batches.
      steps: optimiser steps that all n rows would take.
      batch_size: rows a step, drawn with replacement; None takes all rows of the group in every step.
      equal_epochs: a group takes the share of the steps that it has of the rows, at least one, as in the paper; False:
        all take ``steps``, so that rows of small groups are seen more often. With all rows in every step, a step is an
        epoch.
      weights: factor of each row's loss, ``[n]``; the loss of a batch is divided by its rows, not by their weights.

    Returns:
      The models. Outside jit a group without rows is left out with a warning; under jit its losses and parameters are
      NaN.

    Raises:
      ValueError: sizes below one, numbers of rows that differ, no group with rows, a loss that is not one number a row.

    Warns:
      UserWarning: groups without rows, by number.
    """
    count, groups = membership.shape
    _check(data, count, steps, batch_size)
    kept = np.arange(groups)
    if not isinstance(membership, jax.core.Tracer):
        filled = np.asarray(membership).sum(0) > 0
        if not filled.any():
            raise ValueError(f"no row of {count} is in any of {groups} groups")
        if not filled.all():
            empty = ", ".join(map(str, np.flatnonzero(~filled)))
            warnings.warn(f"groups without rows get no model: {empty}", stacklevel=2)
            kept = np.flatnonzero(filled)
    members = jnp.asarray(membership)[:, kept] > 0
    factors = jnp.ones(count) if weights is None else jnp.asarray(weights, jnp.float32)
    sizes = members.sum(0)
    moving, still = _partition(params)
    if batch_size is None:
        chosen = jnp.arange(steps)
        shares = (members * factors[:, None] / sizes).T
    else:
        # Members first, so that a number below the size of the group stands for one of its rows. One draw for all.
        order = jnp.argsort(~members, axis=0).T
        uniform = jax.random.uniform(key, (steps, len(kept), batch_size))
        places = jnp.minimum((uniform * sizes[:, None]).astype(jnp.int32), sizes[:, None] - 1)
        chosen = jnp.take_along_axis(order[None], places, axis=2)
        shares = jnp.zeros((len(kept), 0))

    # Groups that are done go through the motions: under vmap they cost the same.
    share_of_rows = sizes / count if equal_epochs and batch_size is not None else jnp.ones(len(kept))
    last = jnp.maximum(jnp.round(steps * share_of_rows), 1)

    def batch_loss(moving: Any, rows: Any, share: Array) -> Array:
        batch = data if batch_size is None else jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows], data)
        losses = loss_fn(_join(moving, still), batch)
        expected = (count if batch_size is None else batch_size,)
        if losses.shape != expected:
            raise ValueError(f"loss_fn must give one loss a row, {list(expected)}; got {list(losses.shape)}")
        factor = share if batch_size is None else factors[rows] / batch_size
        # A row of weight 0 is out, whatever its loss is.
        return jnp.where(factor != 0, losses * factor, 0.0).sum()

    def step(carry: Any, batch: Any) -> tuple[Any, Array]:
        number, rows = batch

        def of_group(moving: Any, state: Any, rows: Any, share: Array, last: Array) -> tuple[Any, Any, Array]:
            loss, gradients = jax.value_and_grad(batch_loss)(moving, rows, share)
            updates, after = optimizer.update(gradients, state, moving)
            tuned = optax.apply_updates(moving, updates)
            moving, state = jax.tree.map(
                lambda new, old: jnp.where(number < last, new, old), (tuned, after), (moving, state)
            )
            return moving, state, loss

        axes = (0, 0, None if batch_size is None else 0, 0, 0)
        moving, state = carry
        moving, state, losses = jax.vmap(of_group, in_axes=axes)(moving, state, rows, shares, last)
        return (moving, state), losses

    stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(kept), *jnp.shape(leaf))), moving)
    (tuned, _), losses = jax.lax.scan(step, (stacked, jax.vmap(optimizer.init)(stacked)), (jnp.arange(steps), chosen))
    tuned = jax.tree.map(lambda leaf: jnp.where(_like(sizes, leaf) > 0, leaf, jnp.nan), tuned)
    losses = jnp.where(sizes[:, None] > 0, losses.T, jnp.nan)
    return SubgroupModels(jax.vmap(partial(_join, still=still))(tuned), losses, kept)


def _check(data: PyTree, count: int, steps: int, batch_size: int | None) -> None:
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for path, leaf in jax.tree.leaves_with_path(data):
        if jnp.shape(leaf)[:1] != (count,):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"data must have the {count} rows of the membership; {where} is {list(jnp.shape(leaf))}")


def _like(sizes: Array, leaf: Array) -> Array:
    return sizes.reshape(-1, *(1,) * (leaf.ndim - 1))


def _partition(params: PyTree) -> tuple[PyTree, PyTree]:
    """Floating-point leaves, which are trained, and the others, each with None in place of the rest."""
    floating = [jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating) for leaf in jax.tree.leaves(params)]
    leaves: list[Any]
    tree: Any
    leaves, tree = jax.tree.flatten(params)
    moving = [leaf if trained else None for leaf, trained in zip(leaves, floating, strict=True)]
    still = [None if trained else leaf for leaf, trained in zip(leaves, floating, strict=True)]
    return tree.unflatten(moving), tree.unflatten(still)


def _join(moving: PyTree, still: PyTree) -> PyTree:
    def is_none(leaf: Any) -> bool:
        return leaf is None

    return jax.tree.map(lambda a, b: b if a is None else a, moving, still, is_leaf=is_none)
