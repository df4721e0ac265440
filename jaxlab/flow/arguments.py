"""What the functions of `jaxlab.flow` ask of latents, conditions, weights and counts, and the errors that say so.

All of it is known when a program is traced, but for the values of traced weights: those out of range become NaN.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

__all__ = [
    "check_conditions",
    "check_count",
    "check_like",
    "check_structure",
    "check_weight",
    "leading_size",
    "per_sample",
    "prepare",
    "time_of",
]


def check_count(name: str, value: Any, *, low: int, high: int | None = None, of: str = "") -> int:
    """A static whole number in a range.

    Raises:
      ValueError: it is out of range.
      TypeError: it is traced or no whole number.
    """
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a static Python int, got {value!r}") from None
    if count < low or (high is not None and count > high):
        limits = f"be at least {low}" if high is None else f"be in [{low}, {high}]"
        raise ValueError(f"{name} must {limits}{of}, got {value}")
    return count


def check_conditions(z: PyTree, /, *, batched: bool, **conditions: PyTree) -> None:
    """Conditions that are to be compared: one structure, the leading size of ``z``, and one shape to be batched.

    Raises:
      ValueError: they differ; the message names the leaf.
    """
    batch = leading_size(z)
    (name_of_first, first), *others = conditions.items()
    for other_name, other in others:
        expected: Any = jax.tree.structure(first)
        found: Any = jax.tree.structure(other)
        if expected != found:
            raise ValueError(
                f"conditions {name_of_first} and {other_name} must have one structure, got {expected} and {found}"
            )
    for name, condition in conditions.items():
        for path, leaf in jax.tree.leaves_with_path(condition):
            if np.ndim(leaf) < 1 or np.shape(leaf)[0] != batch:
                raise ValueError(
                    f"condition {name}{jax.tree_util.keystr(path)} must have the leading size {batch} of the latents, "
                    f"got shape {np.shape(leaf)}"
                )
    if not batched:
        return
    for other_name, other in others:
        for (path, leaf), given in zip(jax.tree.leaves_with_path(other), jax.tree.leaves(first), strict=True):
            if np.shape(leaf) != np.shape(given):
                raise ValueError(
                    f"conditions {name_of_first} and {other_name} must have one shape to go through the model in one "
                    f"call, got {np.shape(given)} and {np.shape(leaf)}{jax.tree_util.keystr(path)}; pad them or take "
                    "batched=False"
                )


def prepare(velocity: Callable[..., Any], z: PyTree, *conditions: PyTree) -> PyTree:
    """The latents in the dtype of accumulation, after a check that the model's output is like them.

    Raises:
      TypeError: the latents are not floating point.
      ValueError: the latents are empty or of several leading sizes, or the model's output has another structure, shape
        or dtype.
    """
    for path, leaf in jax.tree.leaves_with_path(z):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            where = jax.tree_util.keystr(path)
            raise TypeError(f"latents{where} must be floating point, got {jnp.result_type(leaf)}")
    leading_size(z)
    z = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.promote_types(jnp.result_type(leaf), jnp.float32)), z)
    for condition in conditions:
        out = jax.eval_shape(velocity, z, time_of(z, 0.5), condition)
        check_like("the velocity", out, z, "; a model of another precision is wrapped in in_dtype")
    return z


def check_structure(what: str, found: PyTree, z: PyTree) -> None:
    """A tree that must have the structure of the latents.

    Raises:
      ValueError: it has not.
    """
    expected: Any = jax.tree.structure(z)
    structure: Any = jax.tree.structure(found)
    if expected != structure:
        raise ValueError(f"{what} must have the structure of the latents, got {structure} for {expected}")


def check_like(what: str, found: PyTree, z: PyTree, hint: str = "") -> None:
    """A tree that must have the structure of the latents, and leaf by leaf their shape and dtype.

    Raises:
      ValueError: it has not; the message names the leaf.
    """
    check_structure(what, found, z)
    for (path, leaf), given in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(z), strict=True):
        if leaf.shape != given.shape or leaf.dtype != given.dtype:
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} must be like the latents, {given.dtype}{list(given.shape)}, got "
                f"{leaf.dtype}{list(leaf.shape)}{hint}"
            )


def check_weight(name: str, value: Any, z: PyTree, *, high: float = math.inf) -> jax.Array:
    """A finite number from 0 to ``high``, one in all or one a sample; a traced one outside of that becomes NaN.

    Raises:
      ValueError: another shape, or a value out of range.
    """
    batch, shape = leading_size(z), np.shape(value)
    if shape not in ((), (batch,)):
        raise ValueError(f"{name} must be a number or one for each of the {batch} samples, got shape {shape}")
    if isinstance(value, jax.core.Tracer):
        return jnp.where((value >= 0) & (value <= high) & jnp.isfinite(value), value, jnp.nan)
    known = np.asarray(value)
    if not jnp.issubdtype(known.dtype, jnp.number) or np.iscomplexobj(known):
        raise ValueError(f"{name} must be a number, got {value!r}")
    largest = min(high, float(jnp.finfo(jnp.result_type(float)).max))
    if not np.all((known >= 0) & (known <= largest)):
        limits = "be finite and at least 0" if high == math.inf else f"be in [0, {high:g}]"
        raise ValueError(f"{name} must {limits}, got {value}")
    return jnp.asarray(value)


def per_sample(value: jax.Array, leaf: jax.Array) -> jax.Array:
    """A number, or one a sample ``[B]``, in the dtype of latents and in a shape that multiplies them."""
    value = value.astype(leaf.dtype)
    return value.reshape(value.shape + (1,) * (leaf.ndim - 1)) if value.ndim else value


def time_of(z: PyTree, t: Any) -> jax.Array:
    """``t`` in the dtype of the latents."""
    return jnp.asarray(t, jax.tree.leaves(z)[0].dtype)


def leading_size(z: PyTree) -> int:
    """B, the first size of every leaf.

    Raises:
      ValueError: there is no leaf, a leaf without axes, or more than one such size.
    """
    sizes = {shape[0] if shape else None for shape in map(np.shape, jax.tree.leaves(z))}
    if len(sizes) != 1 or sizes == {None}:
        raise ValueError(f"latents must have one leading batch size, got {sorted(sizes, key=str)}")
    return int(sizes.pop() or 0)
