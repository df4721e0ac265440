r"""Decentralised optimisers: GT-NSGDm and the methods it is compared with.

``n`` nodes hold private losses :math:`f_i` and talk to graph neighbours only. They look for a stationary point of
:math:`f(x) = \frac1n \sum_i f_i(x)` from stochastic gradients :math:`g_i` whose noise may be heavy-tailed: only
:math:`E \lVert g_i - \nabla f_i \rVert^p \le \sigma^p` for some :math:`p \in (1, 2]`, no finite variance needed.

GT-NSGDm (normalised SGD with momentum and gradient tracking). With ``W`` the mixing matrix, ``G[t]`` the stacked
gradients, each at its node's own parameters, and :math:`N(Y)_i = Y_i / \lVert Y_i \rVert_2` over all leaves together:

.. math::
    V[t] &= \beta V[t-1] + (1 - \beta) G[t] \\
    Y[t] &= W (Y[t-1] + V[t] - V[t-1]) \\
    X[t+1] &= W (X[t] - \alpha N(Y[t])), \qquad V[-1] = Y[-1] = 0

Normalising local gradients alone would move the average along :math:`\sum_i \nabla f_i / \lVert \nabla f_i \rVert`,
whose zeros are not the stationary points of ``f``. Tracking makes every node divide by nearly the same norm; momentum
averages the noise out before the nonlinearity.

Every function returns an ``optax.GradientTransformationExtraArgs`` over trees with a leading node axis, to be used with
``params`` in ``update``. All take schedules for ``learning_rate``, chain, mask, scan and checkpoint as optax
transformations do, and combine the same way (adapt then combine). Communication: the methods with tracking exchange
two trees the size of the parameters per step, the others one. Memory beside parameters and gradients: GT-NSGDm keeps
two copies (``V``, ``Y``).

Nodes may start from different parameters; the effective start is then their average. A decreasing ``learning_rate``
ends lower than a constant one, since the error floor is proportional to it.

Reference: Yu, Jakovetic, Kar, *Decentralized Nonconvex Optimization under Heavy-Tailed Noise: Normalization and Optimal
Convergence*, ICLR 2026, arXiv 2505.03736.

Deviations from the paper:
  1. The paper's theorem fixes the step size only up to constants; :func:`gt_nsgdm_hyperparameters` minimises the
     leading terms of its bound (see there).
  2. ``weight_decay`` is not in the paper. It is decoupled: added after normalisation.
  3. ``skip_nonfinite`` is not in the paper.

Example:
  >>> import jax, jax.numpy as jnp, optax
  >>> from jaxlab.optim import gt_nsgdm, make_mixer, topology
  >>> targets = jnp.array([[0.0], [0.0], [9.0]])  # three nodes, f_i(x) = (x - target_i)^2 / 2
  >>> optimizer = gt_nsgdm(0.01, make_mixer(topology.ring(3)))
  >>> params = jnp.full((3, 1), 5.0)
  >>> def step(carry, _):
  ...     params, state = carry
  ...     updates, state = optimizer.update(params - targets, state, params)
  ...     return (optax.apply_updates(params, updates), state), None
  >>> (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), length=1000)
  >>> bool(jnp.abs(params - 3.0).max() < 0.02)  # the average target, not the median
  True
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from jaxlab.optim import transforms
from jaxlab.optim.mixing import Mixer
from jaxlab.optim.transforms import Scalar, ScalarOrSchedule, check_positive, widened, zeros_for

__all__ = [
    "GTNSGDmHyperparameters",
    "QuasiGlobalState",
    "decentralize",
    "dsgd",
    "dsgd_cclip",
    "dsgd_clip",
    "dsgd_gclip",
    "gt_adam",
    "gt_dsgd",
    "gt_nsgdm",
    "gt_nsgdm_hyperparameters",
    "nsgd",
    "nsgdm",
    "qg_dsgdm",
    "sclip_ef_network",
]


class GTNSGDmHyperparameters(NamedTuple):
    """What :func:`gt_nsgdm_hyperparameters` returns."""

    learning_rate: float
    beta: float


class QuasiGlobalState(NamedTuple):
    """State of :func:`qg_dsgdm`: steps so far and each node's quasi-global momentum."""

    count: Int[Array, ""]
    momentum: optax.Updates


def gt_nsgdm(
    learning_rate: ScalarOrSchedule,
    mixer: Mixer,
    beta: Scalar = 0.8,
    *,
    eps: Scalar = 1e-12,
    weight_decay: Scalar = 0.0,
    mask: PyTree | None = None,
    skip_nonfinite: bool = False,
    model_axes: tuple[str, ...] = (),
    replicated_mask: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Normalised SGD with momentum and gradient tracking (GT-NSGDm), the method of the module's docstring.

    The average of the nodes moves by at most ``learning_rate`` a step whatever the gradients, and the stacked
    parameters stay within :math:`\rho \alpha \sqrt n / (1 - \rho)` of their average.

    Args:
      learning_rate: :math:`\alpha > 0`, the length of a step, or a schedule. In the paper's language models 0.03 to
        0.1.
      mixer: who hears whom.
      beta: decay of the momentum in [0, 1). 0.8 is what the published language-model runs use.
      eps: norms of ``Y`` below it count as zero.
      weight_decay: decoupled, scaled by the learning rate.
      mask: tree or callable that says which leaves are decayed, as in ``optax.add_decayed_weights``.
      skip_nonfinite: leave out gradients that are not finite, see :func:`~jaxlab.optim.transforms.momentum_tracking`.
      model_axes: mesh axes over which one node's parameters are sharded.
      replicated_mask: leaves that are whole on every device of ``model_axes``.

    Raises:
      ValueError: for a learning rate or ``eps`` that is not positive, ``beta`` outside [0, 1), negative weight decay.
    """
    _check_step(learning_rate, beta)
    if not isinstance(weight_decay, jax.core.Tracer) and weight_decay < 0:
        raise ValueError(f"weight_decay must be nonnegative, got {weight_decay}")
    no_decay = isinstance(weight_decay, int | float) and weight_decay == 0
    return optax.chain(
        transforms.momentum_tracking(beta, mixer, skip_nonfinite=skip_nonfinite),
        transforms.normalize_per_node(eps=eps, model_axes=model_axes, replicated_mask=replicated_mask),
        optax.identity() if no_decay else optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
        transforms.gossip(mixer),
    )


def gt_nsgdm_hyperparameters(
    steps: int,
    *,
    tail_index: float | None = None,
    rho: float = 0.0,
    smoothness: float = 1.0,
    initial_gap: float = 1.0,
) -> GTNSGDmHyperparameters:
    r"""Step size and momentum for a horizon of ``steps``, at the paper's optimal order.

    .. math::
        1 - \beta = T^{-p / (3p - 2)} \text{ or, without } p, \; T^{-1/2}; \qquad
        \alpha = \sqrt{\Delta_0 (1 - \rho) (1 - \beta) / (L T)}

    :math:`\alpha` minimises :math:`\Delta_0 / (\alpha T) + \alpha L / ((1 - \rho)(1 - \beta))`, the terms of the
    bound that
    depend on it, and so has the order of the theorem: :math:`T^{-(2p-1)/(3p-2)}`, or :math:`T^{-3/4}` without ``p``.
      The average gradient norm then falls like :math:`T^{-(p-1)/(3p-2)}`, or :math:`T^{-(p-1)/(2p)}` without ``p``.

    Args:
      steps: T, at least 1.
      tail_index: p in (1, 2], the moment of the noise that is finite; None when it is not known.
      rho: spectral norm of ``W - 11'/n``, in [0, 1).
      smoothness: L, the Lipschitz constant of the gradients.
      initial_gap: :math:`\Delta_0 = f(x_0) - \inf f`.

    Raises:
      ValueError: for a value outside the ranges above.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if tail_index is not None and not 1.0 < tail_index <= 2.0:
        raise ValueError(f"tail_index must be in (1, 2], got {tail_index}")
    if not 0.0 <= rho < 1.0:
        raise ValueError(f"rho must be in [0, 1), got {rho}")
    check_positive("smoothness", smoothness)
    check_positive("initial_gap", initial_gap)
    exponent = 0.5 if tail_index is None else tail_index / (3.0 * tail_index - 2.0)
    # The theorem asks for beta >= 1/10; only horizons of a few steps come near.
    momentum_weight = min(float(steps) ** -exponent, 0.9)
    learning_rate = (initial_gap * (1.0 - rho) * momentum_weight / (smoothness * steps)) ** 0.5
    return GTNSGDmHyperparameters(learning_rate, 1.0 - momentum_weight)


def decentralize(
    inner: optax.GradientTransformation, mixer: Mixer, *, tracking: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Make a decentralised optimiser of any optax optimiser.

    Every node runs ``inner`` by itself (with its own norms and counters) and then averages parameters with its
    neighbours.

    Args:
      inner: a complete optimiser, learning rate included, for one node's parameters.
      mixer: who hears whom.
      tracking: feed ``inner`` a tracked estimate of the network's average gradient in place of the local gradient.
    """
    head = transforms.track_gradients(mixer) if tracking else optax.identity()
    return optax.chain(head, transforms.vmap_nodes(inner), transforms.gossip(mixer))


def dsgd(learning_rate: ScalarOrSchedule, mixer: Mixer) -> optax.GradientTransformationExtraArgs:
    r"""Decentralised SGD: :math:`X \leftarrow W (X - \alpha G)`."""
    return _adapt_then_combine(learning_rate, mixer)


def dsgd_gclip(learning_rate: ScalarOrSchedule, mixer: Mixer, max_norm: ScalarOrSchedule):
    """DSGD with each node's gradient clipped to the Euclidean norm ``max_norm``."""
    return _adapt_then_combine(learning_rate, mixer, transforms.clip_per_node(max_norm))


def dsgd_cclip(learning_rate: ScalarOrSchedule, mixer: Mixer, max_value: Scalar):
    """DSGD with every component of the gradient clipped to ``[-max_value, max_value]``."""
    check_positive("max_value", max_value)
    return _adapt_then_combine(learning_rate, mixer, optax.clip(max_value))


def dsgd_clip(learning_rate: Scalar, mixer: Mixer, max_norm: Scalar, *, clip_power: float = 0.4):
    r"""DSGD with decreasing steps and growing clipping thresholds (Sun and Chen 2024, arXiv 2312.15847).

    Step :math:`a / (t + 1)` with ``learning_rate`` = a; per-node Euclidean clipping at :math:`\tau (t + 1)^q` with
    ``max_norm`` = tau and ``clip_power`` = q. One published script uses q = -2/5, with which the method stalls; 2/5
    is the paper's.
    """
    _check_step(learning_rate)
    check_positive("max_norm", max_norm)
    return _adapt_then_combine(
        lambda count: learning_rate / (count + 1.0),
        mixer,
        transforms.clip_per_node(lambda count: max_norm * (count + 1.0) ** clip_power),
    )


def nsgd(learning_rate: ScalarOrSchedule, mixer: Mixer, *, eps: Scalar = 1e-12):
    r"""Normalised decentralised SGD without tracking, :math:`X \leftarrow W (X - \alpha N(G))` (biased)."""
    return _adapt_then_combine(learning_rate, mixer, transforms.normalize_per_node(eps=eps))


def nsgdm(learning_rate: ScalarOrSchedule, mixer: Mixer, beta: Scalar = 0.8, *, eps: Scalar = 1e-12):
    r"""Normalised decentralised SGD with momentum and without tracking: :math:`X \leftarrow W (X - \alpha N(V))`."""
    _check_step(learning_rate, beta)
    return _adapt_then_combine(
        learning_rate, mixer, widened(optax.ema(beta, debias=False)), transforms.normalize_per_node(eps=eps)
    )


def gt_dsgd(learning_rate: ScalarOrSchedule, mixer: Mixer):
    r"""DSGD with gradient tracking: :math:`Y \leftarrow W (Y + G - G^-)`, :math:`X \leftarrow W (X - \alpha Y)`."""
    return _adapt_then_combine(learning_rate, mixer, transforms.track_gradients(mixer))


def gt_adam(learning_rate: ScalarOrSchedule, mixer: Mixer, *, b1: Scalar = 0.9, b2: Scalar = 0.999, eps: Scalar = 1e-8):
    """Adam on tracked gradients (Carnevale et al., arXiv 2009.01745), with Adam's customary constants."""
    return _adapt_then_combine(
        learning_rate, mixer, transforms.track_gradients(mixer), widened(optax.scale_by_adam(b1=b1, b2=b2, eps=eps))
    )


def sclip_ef_network(
    learning_rate: Scalar, mixer: Mixer, *, scale: Scalar = 1.0, threshold: Scalar = 1.0, memory: Scalar = 1.0
):
    r"""DSGD on smoothly clipped gradient differences with error feedback (SClip-EF-Network).

    Step :math:`a / (t + 1)^{1/5}` with ``learning_rate`` = a; the other arguments are those of
    :func:`~jaxlab.optim.transforms.smooth_clip_error_feedback`.
    """
    _check_step(learning_rate)
    return _adapt_then_combine(
        lambda count: learning_rate / (count + 1.0) ** 0.2,
        mixer,
        transforms.smooth_clip_error_feedback(scale=scale, threshold=threshold, memory=memory),
    )


def qg_dsgdm(
    learning_rate: ScalarOrSchedule, mixer: Mixer, beta: Scalar = 0.9
) -> optax.GradientTransformationExtraArgs:
    r"""DSGD with quasi-global momentum (Lin et al. 2021, arXiv 2102.04761).

    .. math::
        X^+ = W (X - \alpha (\beta M + G)), \qquad M \leftarrow \beta M + (1 - \beta) (X - X^+) / \alpha

    The momentum is made of how far the mixed parameters moved, which holds the neighbours' gradients too.
    """
    _check_step(learning_rate, beta)
    combine = transforms.gossip(mixer)

    def init(params: optax.Params) -> QuasiGlobalState:
        return QuasiGlobalState(jnp.zeros([], jnp.int32), zeros_for(params))

    def update(updates, state, params=None, **extra_args: Any):
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        step = jax.tree.map(lambda g, m: -rate * (beta * m + g.astype(m.dtype)), updates, state.momentum)
        moved, combined = combine.update(step, transforms.GossipState(state.count), params, **extra_args)
        momentum = jax.tree.map(
            lambda m, u: (beta * m - (1 - beta) * u.astype(m.dtype) / rate).astype(m.dtype), state.momentum, moved
        )
        return moved, QuasiGlobalState(combined.count, momentum)

    return optax.GradientTransformationExtraArgs(init, update)


def _adapt_then_combine(
    learning_rate: ScalarOrSchedule, mixer: Mixer, *direction: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    _check_step(learning_rate)
    return optax.chain(*direction, optax.scale_by_learning_rate(learning_rate), transforms.gossip(mixer))


def _check_step(learning_rate: ScalarOrSchedule, beta: Scalar = 0.0) -> None:
    if not callable(learning_rate):
        check_positive("learning_rate", learning_rate)
    if not isinstance(beta, jax.core.Tracer) and not 0.0 <= beta < 1.0:
        raise ValueError(f"beta must be in [0, 1), got {beta}")
