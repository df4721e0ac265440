"""The velocity field of a flow-matching model, as every function of `jaxlab.flow` calls it.

A model is a callback ``velocity(z, t, condition) -> v`` with

* ``z`` an array ``[B, ...]`` or a tree of them, one leading size B throughout;
* ``t`` a scalar of z's dtype, **0 for data and 1 for noise**, on the path ``z_t = (1 - t) z_0 + t noise``;
* ``condition`` any tree, of arrays with leading size B where two conditions are compared;
* ``v`` like ``z``, the estimate of ``noise - z_0``. Generation integrates dz/dt = v from 1 down to 0.

The adapters here bring other models into this form and nest freely. What they return is a `jax.tree_util.Partial`: a
function that is also a tree of the weights, so that it passes through ``jax.jit`` as an argument, and no weight is
compiled into the program as a constant. Latents are float32 (float64 stays): a model of lower precision is wrapped in
`in_dtype`, which rounds inside a call and never between two steps.

Example, a flax model whose time runs the other way, in bfloat16::

    velocity = in_dtype(flip_time(from_nnx(model)), jnp.bfloat16)
    edit = jax.jit(uni_edit, static_argnames=("delay_rate",))
    result = edit(velocity, images, time_grids.uniform(15), source=a, target=b, inversion=null)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import PyTree

__all__ = [
    "Velocity",
    "batch_time",
    "flip_time",
    "from_linen",
    "from_nnx",
    "guided",
    "in_dtype",
    "paired",
]

Velocity = Callable[[Any, Any, Any], Any]


def from_nnx(model: nnx.Module, *, condition_map: Callable[[Any], tuple] | None = None) -> Partial:
    """The velocity of a flax nnx module called as ``model(z, t, condition)`` with ``t`` of shape ``[B]``.

    Args:
      model: the module, its weights and all. Dropout and the like must be off.
      condition_map: ``condition_map(condition)`` gives the arguments after ``t``; by default the condition alone.
    """
    graph, state = nnx.split(model)
    return batch_time(Partial(_call_nnx, graph, _Static(condition_map), state))


def from_linen(module: Any, params: PyTree, *, condition_map: Callable[[Any], tuple] | None = None) -> Partial:
    """The velocity of a flax linen module called as ``module.apply(params, z, t, condition)``, ``t`` of shape ``[B]``.

    ``module.apply`` may be any function of that signature.
    """
    return batch_time(Partial(_call_linen, _Static(module.apply), _Static(condition_map), params))


def batch_time(velocity: Velocity) -> Partial:
    """For a model that wants one time a sample, ``[B]``, rather than a scalar."""
    return Partial(_batch_time, as_partial(velocity))


def flip_time(velocity: Velocity) -> Partial:
    """For a model whose time is 0 for noise and 1 for data: ``v'(z, t) = -v(z, 1 - t)``."""
    return Partial(_flip_time, as_partial(velocity))


def in_dtype(velocity: Velocity, dtype: Any) -> Partial:
    """For a model of another precision: latents and time are cast to ``dtype``, its output is cast back."""
    return Partial(_in_dtype, _Static(jnp.dtype(dtype)), as_partial(velocity))


def guided(velocity: Velocity, null: PyTree, weight: Any) -> Partial:
    """Classifier-free guidance ``v_null + weight (v_condition - v_null)``, both in one call of size 2B.

    Inversion needs weight 1, that is the model itself (arXiv 2504.13109): guidance spoils the way back.

    Args:
      velocity: the model.
      null: its unconditional condition, leaves with leading size B.
      weight: 1 is the model itself; may be traced.
    """
    return Partial(_guided, as_partial(velocity), null, weight)


def paired(velocity: Velocity, z: PyTree, t: Any, first: PyTree, second: PyTree, *, batched: bool = True) -> tuple:
    """Velocities at one point under two conditions.

    Args:
      velocity: the model.
      z: latents ``[B, ...]``.
      t: time.
      first: a condition, every leaf with leading size B.
      second: another one of the same structure.
      batched: one call of size 2B; otherwise two calls, which take half the memory.

    Returns:
      ``(velocity under first, velocity under second)``.
    """
    if not batched:
        return velocity(z, t, first), velocity(z, t, second)

    def join(a: Any, b: Any) -> Any:
        return jnp.concatenate([a, b])

    both = velocity(jax.tree.map(join, z, z), t, jax.tree.map(join, first, second))
    return halves(both)


def halves(tree: PyTree) -> tuple:
    """A tree of leading size 2B as two of size B."""
    return jax.tree.map(lambda leaf: leaf[: len(leaf) // 2], tree), jax.tree.map(
        lambda leaf: leaf[len(leaf) // 2 :], tree
    )


def as_partial(velocity: Velocity) -> Partial:
    """Any callable as one that passes through ``jax.jit`` as an argument."""
    return velocity if isinstance(velocity, Partial) else Partial(velocity)


def check_conditions(z: PyTree, **conditions: PyTree) -> None:
    """Two conditions that are to be compared: one structure, one leading size, that of ``z``.

    Raises:
      ValueError: they differ; the message names the leaf.
    """
    batch = _leading_size(z)
    (name, first), *others = conditions.items()
    for other_name, other in others:
        expected, found = _structures(first, other)
        if expected != found:
            raise ValueError(f"conditions {name} and {other_name} must have one structure, got {expected} and {found}")
    for name, condition in conditions.items():
        for path, leaf in jax.tree.leaves_with_path(condition):
            if np.ndim(leaf) < 1 or np.shape(leaf)[0] != batch:
                raise ValueError(
                    f"condition {name}{jax.tree_util.keystr(path)} must have the leading size {batch} of the latents, "
                    f"got shape {np.shape(leaf)}"
                )


def prepare(velocity: Velocity, z: PyTree, *conditions: PyTree) -> PyTree:
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
    _leading_size(z)
    z = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.promote_types(jnp.result_type(leaf), jnp.float32)), z)
    for condition in conditions:
        out = jax.eval_shape(velocity, z, time_of(z, 0.5), condition)
        expected, found = _structures(z, out)
        if expected != found:
            raise ValueError(f"the velocity must have the structure of the latents, got {found} for {expected}")
        for (path, leaf), given in zip(jax.tree.leaves_with_path(out), jax.tree.leaves(z), strict=True):
            if leaf.shape != given.shape or leaf.dtype != given.dtype:
                raise ValueError(
                    f"the velocity{jax.tree_util.keystr(path)} must be like the latents, {given.dtype}"
                    f"{list(given.shape)}, got {leaf.dtype}{list(leaf.shape)}; a model of another precision is wrapped "
                    "in in_dtype"
                )
    return z


def time_of(z: PyTree, t: Any) -> jax.Array:
    """``t`` in the dtype of the latents."""
    return jnp.asarray(t, jax.tree.leaves(z)[0].dtype)


def _structures(first: PyTree, second: PyTree) -> tuple[Any, Any]:
    return jax.tree.structure(first), jax.tree.structure(second)


def _leading_size(z: PyTree) -> int:
    sizes = {shape[0] if shape else None for shape in map(np.shape, jax.tree.leaves(z))}
    if len(sizes) != 1 or sizes == {None}:
        raise ValueError(f"latents must have one leading batch size, got {sorted(sizes, key=str)}")
    return int(sizes.pop() or 0)


@jax.tree_util.register_static
class _Static:
    """A value that is part of the program rather than of its data."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


def _call_nnx(graph: Any, condition_map: _Static, state: Any, z: Any, t: Any, condition: Any) -> Any:
    arguments = (condition,) if condition_map.value is None else condition_map.value(condition)
    return nnx.merge(graph, state)(z, t, *arguments)


def _call_linen(apply: _Static, condition_map: _Static, params: Any, z: Any, t: Any, condition: Any) -> Any:
    arguments = (condition,) if condition_map.value is None else condition_map.value(condition)
    return apply.value(params, z, t, *arguments)


def _batch_time(velocity: Velocity, z: Any, t: Any, condition: Any) -> Any:
    return velocity(z, jnp.broadcast_to(t, (jax.tree.leaves(z)[0].shape[0],)), condition)


def _flip_time(velocity: Velocity, z: Any, t: Any, condition: Any) -> Any:
    return jax.tree.map(jnp.negative, velocity(z, 1 - t, condition))


def _in_dtype(dtype: _Static, velocity: Velocity, z: Any, t: Any, condition: Any) -> Any:
    low = jax.tree.map(lambda leaf: leaf.astype(dtype.value), z)
    out = velocity(low, t.astype(dtype.value), condition)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), out, z)


def _guided(velocity: Velocity, null: Any, weight: Any, z: Any, t: Any, condition: Any) -> Any:
    low, high = paired(velocity, z, t, null, condition)
    return jax.tree.map(lambda a, b: a + jnp.asarray(weight, a.dtype) * (b - a), low, high)
