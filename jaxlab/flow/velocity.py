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

Nothing swallows a velocity that is not a number. `checked` says where the first one came from, under
``jax.experimental.checkify``.

Example, a flax model whose time runs the other way, in bfloat16::

    velocity = in_dtype(flip_time(from_nnx(model)), jnp.bfloat16)
    edit = jax.jit(uni_edit, static_argnames=("delay_rate",))
    result = edit(velocity, images, time_grids.uniform(15), source=a, target=b, inversion=null)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import checkify
from jax.tree_util import Partial
from jaxtyping import PyTree

from jaxlab.flow.arguments import check_conditions, check_structure, leading_size, per_sample, time_of
from jaxlab.flow.stages import Static, staged

__all__ = [
    "Velocity",
    "batch_time",
    "checked",
    "flip_time",
    "from_linen",
    "from_nnx",
    "guided",
    "in_dtype",
    "paired",
]

Velocity = Callable[[Any, Any, Any], Any]


def from_nnx(
    model: nnx.Module,
    *,
    condition_map: Callable[[Any], tuple] | None = None,
    stages: tuple[str, str] | None = None,
) -> Partial:
    """The velocity of a flax nnx module called as ``model(z, t, condition)`` with ``t`` of shape ``[B]``.

    The velocity holds the weights as they are now: calls leave the module as it is, and training it further does not
    change the velocity.

    Args:
      model: the module, its weights and all.
      condition_map: ``condition_map(condition)`` gives the arguments after ``t``; by default the condition alone.
      stages: names of two methods that together are the call, ``model.first(t, condition) -> known`` and
        ``model.second(z, known)``; see `jaxlab.flow.stages`. ``("prepare", "apply")`` for `jaxlab.nn.dit.DiT`.

    Raises:
      TypeError: no module, or one without these methods.
      ValueError: a part of it is in the mode of training (dropout, batch statistics), in which one latent would have
        several velocities; ``stages`` that are not two.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"model must be a flax nnx module, got {type(model).__name__}; a function is a velocity as it is"
        )
    for path, part in nnx.iter_modules(model):
        if _is_training(part):
            where = ".".join(map(str, path)) or type(part).__name__
            raise ValueError(f"{where} is in the mode of training, with no one velocity; call model.eval() first")
    graph, state = nnx.split(model)
    if stages is None:
        return batch_time(Partial(_call_nnx, graph, Static(condition_map), _fresh(state)))
    if isinstance(stages, str) or len(stages) != 2:
        raise ValueError(f"stages must be the names of two methods, got {stages!r}")
    for name in stages:
        if not callable(getattr(model, name, None)):
            raise TypeError(f"stages must name two methods of {type(model).__name__}, which has no {name!r}")
    first, second = stages
    return staged(_Prepare(first, condition_map), _Apply(second), (graph, _fresh(state)))


def from_linen(module: Any, params: PyTree, *, condition_map: Callable[[Any], tuple] | None = None) -> Partial:
    """The velocity of a flax linen module called as ``module.apply(params, z, t, condition)``, ``t`` of shape ``[B]``.

    ``module.apply`` may be any function of that signature. ``params`` is all that ``module.init`` gave, statistics too.
    """
    return batch_time(Partial(_call_linen, Static(module.apply), Static(condition_map), params))


def batch_time(velocity: Velocity) -> Partial:
    """For a model that wants one time a sample, ``[B]``, rather than a scalar."""
    return Partial(_batch_time, as_partial(velocity))


def flip_time(velocity: Velocity) -> Partial:
    """For a model whose time is 0 for noise and 1 for data: ``v'(z, t) = -v(z, 1 - t)``."""
    return Partial(_flip_time, as_partial(velocity))


def in_dtype(velocity: Velocity, dtype: Any) -> Partial:
    """For a model of another precision: latents and time are cast to ``dtype``, its output is cast back.

    Raises:
      TypeError: ``dtype`` is not floating point.
    """
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"dtype must be floating point, got {jnp.dtype(dtype)}")
    return Partial(_in_dtype, Static(jnp.dtype(dtype)), as_partial(velocity))


def guided(velocity: Velocity, null: PyTree, weight: Any) -> Partial:
    """Classifier-free guidance ``v_null + weight (v_condition - v_null)``, both in one call of size 2B.

    Inversion needs weight 1, that is the model itself (arXiv 2504.13109): guidance spoils the way back.

    Args:
      velocity: the model.
      null: its unconditional condition; leaves with leading size B, or a divisor of it such as 1, which are repeated.
      weight: 1 is the model itself; a scalar or ``[B]``, one a sample; may be traced.

    Raises:
      ValueError: when called, if null, weight and condition do not fit each other and the latents.
    """
    return Partial(_guided, as_partial(velocity), null, weight)


def checked(velocity: Velocity) -> Partial:
    """The same velocity, with a check of every call that latents and output are finite.

    A check is a value inside a compiled program; ``jax.experimental.checkify`` carries it out and keeps the first that
    failed, which names the time::

        run = checkify.checkify(jax.jit(uni_invert))  # or jit(checkify(...)), or vmap and grad inside either
        error, result = run(checked(velocity), images, time_grids.uniform(30))
        error.throw()  # JaxRuntimeError: the velocity is not finite at time 0.7, its latents are

    Without ``checkify`` a compiled program with checks in it is refused by JAX (ValueError, "not functionalized").
    """
    return Partial(_checked, as_partial(velocity))


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

    Raises:
      ValueError: conditions that differ in structure or lack the leading size, or in one call also in other sizes.
    """
    check_conditions(z, batched=batched, first=first, second=second)
    if not batched:
        return velocity(z, t, first), velocity(z, t, second)
    return halves(velocity(joined(z, z), t, joined(first, second)))


def joined(first: PyTree, second: PyTree) -> PyTree:
    """Two trees of leading size B as one of 2B."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)


def halves(tree: PyTree) -> tuple:
    """A tree of leading size 2B as two of size B."""
    return jax.tree.map(lambda leaf: leaf[: len(leaf) // 2], tree), jax.tree.map(
        lambda leaf: leaf[len(leaf) // 2 :], tree
    )


def as_partial(velocity: Velocity) -> Partial:
    """Any callable as one that passes through ``jax.jit`` as an argument."""
    return velocity if isinstance(velocity, Partial) else Partial(velocity)


@dataclasses.dataclass(frozen=True)
class _Prepare:
    """The first stage of a module."""

    method: str
    condition_map: Callable[[Any], tuple] | None

    def __call__(self, params: Any, t: Any, condition: Any) -> Any:
        arguments = (condition,) if self.condition_map is None else self.condition_map(condition)
        return getattr(_merged(params), self.method)(t, *arguments)


@dataclasses.dataclass(frozen=True)
class _Apply:
    """The second stage of a module."""

    method: str

    def __call__(self, params: Any, z: Any, known: Any) -> Any:
        return getattr(_merged(params), self.method)(z, known)


def _merged(params: Any) -> nnx.Module:
    graph, state = params
    return nnx.merge(graph, _fresh(state))


def _is_training(part: nnx.Module) -> bool:
    drops = getattr(part, "deterministic", None) is False
    share = getattr(part, "rate", getattr(part, "dropout_rate", 1.0))
    return bool(drops and share > 0) or getattr(part, "use_running_average", None) is False


def _fresh(state: Any) -> Any:
    """The same arrays in variables of their own: ``nnx.split`` and ``nnx.merge`` share them with the module."""
    return jax.tree.map(lambda leaf: leaf, state)


def _call_nnx(graph: Any, condition_map: Static, state: Any, z: Any, t: Any, condition: Any) -> Any:
    arguments = (condition,) if condition_map.value is None else condition_map.value(condition)
    return nnx.merge(graph, _fresh(state))(z, t, *arguments)


def _call_linen(apply: Static, condition_map: Static, params: Any, z: Any, t: Any, condition: Any) -> Any:
    arguments = (condition,) if condition_map.value is None else condition_map.value(condition)
    return apply.value(params, z, t, *arguments)


def _batch_time(velocity: Velocity, z: Any, t: Any, condition: Any) -> Any:
    return velocity(z, jnp.broadcast_to(time_of(z, t), (leading_size(z),)), condition)


def _flip_time(velocity: Velocity, z: Any, t: Any, condition: Any) -> Any:
    return jax.tree.map(jnp.negative, velocity(z, 1 - time_of(z, t), condition))


def _in_dtype(dtype: Static, velocity: Velocity, z: Any, t: Any, condition: Any) -> Any:
    low = jax.tree.map(lambda leaf: leaf.astype(dtype.value), z)
    out = velocity(low, jnp.asarray(t, dtype.value), condition)
    check_structure("the velocity", out, z)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), out, z)


def _guided(velocity: Velocity, null: Any, weight: Any, z: Any, t: Any, condition: Any) -> Any:
    batch = leading_size(z)
    null = jax.tree.map_with_path(lambda path, leaf: _repeat(leaf, batch, f"null{jax.tree_util.keystr(path)}"), null)
    check_conditions(z, batched=True, null=null, condition=condition)
    if isinstance(weight, str) or np.iscomplexobj(weight):
        raise ValueError(f"guidance weight must be a real number, got {weight!r}")
    weight = jnp.asarray(weight)
    if weight.ndim > 1:
        raise ValueError(f"guidance weight must be a number or one a sample, got shape {weight.shape}")
    if weight.ndim:
        weight = _repeat(weight, batch, "guidance weight")
    low, high = paired(velocity, z, t, null, condition)
    return jax.tree.map(lambda a, b: a + per_sample(weight, a) * (b - a), low, high)


def _repeat(leaf: Any, batch: int, name: str) -> jax.Array:
    """Rows repeated to a batch, which is a multiple of theirs where a caller compares conditions in one call."""
    rows = np.shape(leaf)[0] if np.ndim(leaf) else 0
    if rows == batch:
        return jnp.asarray(leaf)
    if not rows or batch % rows:
        raise ValueError(f"{name} must have the leading size {batch} of the latents or a divisor, got {np.shape(leaf)}")
    return jnp.concatenate([jnp.asarray(leaf)] * (batch // rows)) if batch else jnp.asarray(leaf)[:0]


def _checked(velocity: Velocity, z: Any, t: Any, condition: Any) -> Any:
    found = velocity(z, t, condition)
    for what, tree, aside in (("latents", z, ""), ("the velocity", found, ", its latents are")):
        for path, leaf in jax.tree.leaves_with_path(tree):
            verb = "are" if what == "latents" else "is"
            message = f"{what}{_escape(path)} {verb} not finite at time {{t}}{aside}"
            checkify.check(jnp.isfinite(leaf).all(), message, t=jnp.asarray(t))
    return found


def _escape(path: Any) -> str:
    """A path in a tree, as text for ``str.format``."""
    return jax.tree_util.keystr(path).replace("{", "{{").replace("}", "}}")
