r"""Building blocks of decentralised optimisers, as optax transformations.

Updates, parameters and states are trees whose leaves carry a leading node axis (``[n, ...]`` stacked on one device,
``[n / devices, ...]`` inside ``jax.shard_map``). Only a :class:`~jaxlab.optim.mixing.Mixer` communicates; everything
else acts on each node by itself. Chain them with any optax transformation that works coordinate by coordinate, and put
one that takes global statistics (``optax.clip_by_global_norm``, ...) under :func:`vmap_nodes`.

States are NamedTuples of arrays: orbax stores them, ``jax.lax.scan`` carries them. Accumulators are kept in float32
for 16-bit parameters, and updates leave in the accumulator's dtype: ``optax.apply_updates`` casts once, at the end.

Transformations that communicate take the extra argument ``mixing=``, a mixer to use in this step instead of their own
(a graph drawn at random inside the compiled step).
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxlab.optim.mixing import Mixer

__all__ = [
    "GossipState",
    "MomentumTrackingState",
    "SmoothClipState",
    "TrackingState",
    "clip_per_node",
    "gossip",
    "momentum_tracking",
    "normalize_per_node",
    "per_node_norm",
    "smooth_clip_error_feedback",
    "track_gradients",
    "vmap_nodes",
    "widened",
]

Scalar = int | float | np.number | Float[Array, ""]
ScalarOrSchedule = Scalar | optax.Schedule


class TrackingState(NamedTuple):
    """State of :func:`track_gradients`.

    Attributes:
      count: exchanges so far.
      tracker: ``Y``; its average over nodes is the average of the last updates.
      previous: the updates of the step before.
    """

    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count is not missed
    tracker: optax.Updates
    previous: optax.Updates


class MomentumTrackingState(NamedTuple):
    """State of :func:`momentum_tracking`.

    Attributes:
      count: exchanges so far.
      momentum: ``V``, each node's exponential moving average of its gradients.
      tracker: ``Y``; its average over nodes is the average of ``V``.
      skipped: ``[n]``, how many gradients of each node were left out because they were not finite.
    """

    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count is not missed
    momentum: optax.Updates
    tracker: optax.Updates
    skipped: Int[Array, " n"]


class GossipState(NamedTuple):
    """State of :func:`gossip`: exchanges so far."""

    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count is not missed


class SmoothClipState(NamedTuple):
    """State of :func:`smooth_clip_error_feedback`: steps so far and each node's gradient estimate."""

    count: Int[Array, ""]  # type: ignore[assignment]  # tuple.count is not missed
    estimate: optax.Updates


def track_gradients(mixer: Mixer) -> optax.GradientTransformationExtraArgs:
    r"""Replace each node's update by a running estimate of the network's average update.

    .. math:: Y[t] = W (Y[t-1] + G[t] - G[t-1]), \qquad Y[-1] = G[-1] = 0

    The average of ``Y`` over nodes equals the average of ``G`` at every step, exactly but for rounding.
    """

    def init(params: optax.Params) -> TrackingState:
        return TrackingState(jnp.zeros([], jnp.int32), zeros_for(params), zeros_for(params))

    def update(updates, state, params=None, *, mixing: Mixer | None = None, **extra_args):
        del params, extra_args
        corrected = jax.tree.map(lambda y, g, previous: y + (g - previous), state.tracker, updates, state.previous)
        tracker = (mixing or mixer).mix(corrected, step=state.count)
        previous = jax.tree.map(lambda g, y: g.astype(y.dtype), updates, tracker)
        return tracker, TrackingState(optax.safe_increment(state.count), tracker, previous)

    return optax.GradientTransformationExtraArgs(init, update)


def momentum_tracking(
    beta: Scalar, mixer: Mixer, *, skip_nonfinite: bool = False, model_axes: tuple[str, ...] = ()
) -> optax.GradientTransformationExtraArgs:
    r"""Momentum and tracking of it in one transformation that stores the momentum once.

    .. math::
        V[t] &= \beta V[t-1] + (1 - \beta) G[t], \qquad V[-1] = 0 \\
        Y[t] &= W (Y[t-1] + V[t] - V[t-1]), \qquad Y[-1] = 0

    Same numbers as ``optax.chain(optax.ema(beta, debias=False), track_gradients(mixer))`` with one copy of the
    parameters less in memory.

    Args:
      beta: decay of the moving average, in [0, 1); may be traced.
      mixer: who hears whom.
      skip_nonfinite: a node whose gradient holds a NaN or an infinity keeps its momentum for that step (as if the
        gradient had been ``V[t-1]``), and the step is counted in the state. Without it, one such gradient reaches
        every node through the exchanges, and all parameters are NaN after at most as many steps as the graph is wide
        (at once where a mixer multiplies with the whole matrix, since ``0 * nan`` is ``nan``).
      model_axes: mesh axes over which a node's parameters are sharded; its devices skip a gradient together.

    Raises:
      ValueError: if ``beta`` is outside [0, 1).
    """
    check_decay("beta", beta)

    def init(params: optax.Params) -> MomentumTrackingState:
        skipped = jnp.zeros(_n_local(params), jnp.int32)
        return MomentumTrackingState(jnp.zeros([], jnp.int32), zeros_for(params), zeros_for(params), skipped)

    def update(updates, state, params=None, *, mixing: Mixer | None = None, **extra_args):
        del params, extra_args
        skipped = state.skipped
        if skip_nonfinite:
            finite = _finite_nodes(updates, model_axes)
            updates = jax.tree.map(lambda g, v: jnp.where(_per_node(finite, g), g, v), updates, state.momentum)
            skipped += ~finite
        momentum = jax.tree.map(
            lambda v, g: (beta * v + (1 - beta) * g.astype(v.dtype)).astype(v.dtype), state.momentum, updates
        )
        corrected = jax.tree.map(lambda y, v, previous: y + (v - previous), state.tracker, momentum, state.momentum)
        tracker = (mixing or mixer).mix(corrected, step=state.count)
        return tracker, MomentumTrackingState(optax.safe_increment(state.count), momentum, tracker, skipped)

    return optax.GradientTransformationExtraArgs(init, update)


def per_node_norm(
    tree: PyTree, *, model_axes: tuple[str, ...] = (), replicated_mask: PyTree | None = None
) -> Float[Array, " n"]:
    """Euclidean norm of each node's part of the tree, over all leaves together: ``[n]``, float32 or wider.

    Entries are scaled by the node's largest before they are squared, so that a norm near the largest or smallest
    float does not overflow or vanish.

    Args:
      tree: leaves ``[n, ...]``.
      model_axes: mesh axes over which a node's parameters are themselves sharded; the squares are summed over them.
      replicated_mask: prefix tree of bools, True for leaves that are whole on every device of ``model_axes`` and must
        be counted once.
    """
    leaves = jax.tree.leaves(tree)
    if _n_local(tree) == 0:  # what optax.multi_transform hands to a transformation whose label no leaf has
        return jnp.zeros(0)
    replicated = [False] * len(leaves)
    if replicated_mask is not None:
        replicated = jax.tree.leaves(jax.tree.broadcast(replicated_mask, tree))
    magnitudes = [jnp.abs(leaf.astype(_wide(leaf))) for leaf in leaves]
    largest = jnp.stack(
        [_reduce_node(functools.partial(jnp.max, initial=0), magnitude) for magnitude in magnitudes]
    ).max(0)
    if model_axes:
        largest = lax.pmax(largest, model_axes)
    # An infinite or zero scale would make 0/0 or inf/inf; unscaled, the sum gives the right answer there.
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    squares = [_reduce_node(jnp.sum, jnp.square(magnitude / _per_node(scale, magnitude))) for magnitude in magnitudes]
    total = sum((square for square, whole in zip(squares, replicated, strict=True) if not whole), jnp.zeros_like(scale))
    if model_axes:
        total = lax.psum(total, model_axes)
    total += sum((square for square, whole in zip(squares, replicated, strict=True) if whole), jnp.zeros_like(scale))
    return scale * jnp.sqrt(total)


def normalize_per_node(
    *, eps: Scalar = 1e-12, model_axes: tuple[str, ...] = (), replicated_mask: PyTree | None = None
) -> optax.GradientTransformation:
    r"""Scale each node's update to unit Euclidean norm over all its leaves together.

    :math:`N(Y)_i = Y_i / \max(\lVert Y_i \rVert_2, \epsilon)`, and so a zero update stays zero.

    Args:
      eps: positive; norms below it are not scaled up to one.
      model_axes, replicated_mask: as in :func:`per_node_norm`.

    Raises:
      ValueError: if ``eps`` is not positive.
    """
    check_positive("eps", eps)

    def scale(updates: optax.Updates) -> optax.Updates:
        norm = per_node_norm(updates, model_axes=model_axes, replicated_mask=replicated_mask)
        return _scale_nodes(updates, 1 / jnp.maximum(norm, eps))

    return optax.stateless(lambda updates, params: scale(updates))


def clip_per_node(max_norm: ScalarOrSchedule, *, model_axes: tuple[str, ...] = ()) -> optax.GradientTransformation:
    """Scale down each node's update whose Euclidean norm exceeds ``max_norm`` (a positive number or a schedule)."""
    if not callable(max_norm):
        check_positive("max_norm", max_norm)

    def clip(updates: optax.Updates, limit: Any) -> optax.Updates:
        norm = per_node_norm(updates, model_axes=model_axes)
        return _scale_nodes(updates, jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny)))

    if not callable(max_norm):
        return optax.stateless(lambda updates, params: clip(updates, max_norm))

    def update(updates, state, params=None):
        del params
        clipped = clip(updates, max_norm(state.count))  # type: ignore[misc]
        return clipped, optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformation(lambda params: optax.ScaleByScheduleState(jnp.zeros([], jnp.int32)), update)


def smooth_clip_error_feedback(
    *, scale: Scalar = 1.0, threshold: Scalar = 1.0, memory: Scalar = 1.0
) -> optax.GradientTransformation:
    r"""Smoothed clipping of the innovation with weighted error feedback (SClip-EF; Yu, Jakovetic, Kar 2023).

    .. math::
        M_{t+1} = \beta_t M_t + (1 - \beta_t) \Psi_t(G_t - M_t), \qquad
        \Psi_t(u) = \frac{\varphi_t u}{\sqrt{u^2 + \tau_t}}

    component by component, with :math:`\beta_t = b / \sqrt{t + 1}` (``memory`` is b), :math:`\varphi_t = \varphi /
    \sqrt{t + 1}` (``scale``) and :math:`\tau_t = \tau (t + 1)^{3/5}` (``threshold``). The update is ``M``.
    """
    for name, value in (("scale", scale), ("threshold", threshold), ("memory", memory)):
        check_positive(name, value)

    def init(params: optax.Params) -> SmoothClipState:
        return SmoothClipState(jnp.zeros([], jnp.int32), zeros_for(params))

    def update(updates, state, params=None):
        del params
        t = state.count + 1.0
        weight = memory / jnp.sqrt(t)

        def new_estimate(m: Array, g: Array) -> Array:
            innovation = g.astype(m.dtype) - m
            clipped = scale / jnp.sqrt(t) * innovation / jnp.sqrt(innovation**2 + threshold * t**0.6)
            return (weight * m + (1 - weight) * clipped).astype(m.dtype)

        estimate = jax.tree.map(new_estimate, state.estimate, updates)
        return estimate, SmoothClipState(optax.safe_increment(state.count), estimate)

    return optax.GradientTransformation(init, update)


def gossip(mixer: Mixer, *, order: Literal["atc", "cta"] = "atc") -> optax.GradientTransformationExtraArgs:
    r"""Average the parameters with the neighbours; the last link of a chain.

    The update it returns takes the parameters ``X`` to :math:`W (X + U)` (``"atc"``, adapt then combine) or to
    :math:`W X + U` (``"cta"``, combine then adapt) when ``optax.apply_updates`` adds it. For 16-bit parameters the
    average is taken in float32.

    Raises:
      ValueError: for an unknown order; when ``update`` is called without ``params``.
      TypeError: if ``mixer`` is no mixer.
    """
    _check_mixer(mixer)
    if order not in ("atc", "cta"):
        raise ValueError(f"order must be 'atc' (W(x+u)) or 'cta' (Wx+u), got {order!r}")

    def update(updates, state, params=None, *, mixing: Mixer | None = None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError("gossip averages parameters: call update(grads, state, params) with params")
        wide = _widen(params)
        start = optax.apply_updates(wide, updates) if order == "atc" else wide
        mixed = (mixing or mixer).mix(start, step=state.count)
        if order == "cta":
            mixed = optax.apply_updates(mixed, updates)
        return optax.tree.sub(mixed, wide), GossipState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(lambda params: GossipState(jnp.zeros([], jnp.int32)), update)


def vmap_nodes(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run a transformation on every node by itself, so that its statistics (norms, counters) are each node's own.

    State leaves get the leading node axis. Extra arguments are passed to every node unchanged.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        # A tree without leaves has no node axis to take the size from; its state gets one row.
        return jax.vmap(inner.init, axis_size=_n_local(params) or 1)(params)

    def update(updates, state, params=None, **extra_args):
        def one_node(u, s, p):
            return inner.update(u, s, p, **extra_args)

        in_axes = (0, 0, None if params is None else 0)
        return jax.vmap(one_node, in_axes, axis_size=_n_local(updates) or 1)(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)


def widened(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run a transformation on float32 copies of 16-bit trees, so that its accumulators are float32."""
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        return inner.update(_widen(updates), state, None if params is None else _widen(params), **extra_args)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(_widen(params)), update)


def _check_mixer(mixer: object) -> None:
    if not isinstance(mixer, Mixer):
        raise TypeError(f"expected a mixer, got {type(mixer).__name__}; make_mixer(matrix) makes one of a matrix")


def check_positive(name: str, value: Any) -> None:
    """Raise for a value that is known and not positive; one that is traced cannot be looked at."""
    if not isinstance(value, jax.core.Tracer) and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


def check_decay(name: str, value: Any) -> None:
    """Raise for a value that is known and outside [0, 1)."""
    if not isinstance(value, jax.core.Tracer) and not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {value}")


def zeros_for(params: optax.Params) -> optax.Updates:
    """Accumulators of zero in the shape of the parameters, in float32 or wider."""
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=_wide(p)), params)


def _wide(x: Array | np.ndarray) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _widen(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(_wide(x)), tree)


def _n_local(tree: PyTree) -> int:
    """Rows of the node axis that all leaves share; 0 without leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sizes = [jnp.shape(leaf)[:1] for _, leaf in leaves]
    for (key_path, leaf), size in zip(leaves, sizes, strict=True):
        if not size or size != sizes[0]:
            name = jax.tree_util.keystr(key_path) or "the tree"
            raise ValueError(
                f"every leaf needs the same leading axis of nodes; {name} has shape {jnp.shape(leaf)}, "
                f"the first leaf {jnp.shape(leaves[0][1])}"
            )
    return sizes[0][0] if sizes else 0


def _reduce_node(reduction: Any, leaf: Array) -> Array:
    return reduction(leaf, axis=tuple(range(1, leaf.ndim)))


def _per_node(values: Array, like: Array) -> Array:
    """``[n]`` shaped so that it broadcasts against ``[n, ...]``."""
    return values.reshape(-1, *([1] * (like.ndim - 1)))


def _scale_nodes(updates: optax.Updates, factor: Float[Array, " n"]) -> optax.Updates:
    return jax.tree.map(lambda u: u * _per_node(factor, u).astype(_wide(u)), updates)


def _finite_nodes(updates: optax.Updates, model_axes: tuple[str, ...]) -> Bool[Array, " n"]:
    finite = jnp.ones(_n_local(updates), bool)
    for leaf in jax.tree.leaves(updates):
        finite &= _reduce_node(jnp.all, jnp.isfinite(leaf))
    # All devices of a node must agree, or its momentum would be half old and half new.
    return lax.pmin(finite.astype(jnp.int32), model_axes) > 0 if model_axes else finite
