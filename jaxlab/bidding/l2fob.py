r"""L2FOB: online bidding under a budget and a return target, steered by look-ahead virtual queues.

In every round an agent sees a context :math:`v`, picks one of :math:`K` candidates :math:`b` (bids, arms or policies)
and gets a reward :math:`r` for a cost :math:`c`. It wants the largest total reward with :math:`\sum c \le B` (hard)
and :math:`\sum r \ge \gamma \sum c` (return on investment, ROI; measured at every round). An estimator gives an
optimistic reward :math:`\hat r` and a lower bound :math:`\check c` of the cost. With :math:`\rho = B / T`, one virtual
queue a constraint is advanced *before* deciding, for every candidate:

.. math::
    Q_\rho(t, b) &= Q_\rho(t-1) + \eta_\rho\, (E_v[\check c(v, b)] - \rho)^+, \\
    Q_\gamma(t, b) &= Q_\gamma(t-1) + \eta_\gamma\, (E_v[\gamma \check c(v, b) - \hat r(v, b)])^+, \\
    b_t &= \arg\max_b \hat r(v_t, b) - \Phi'(Q_\rho(t, b))\, \eta_\rho\, (E_v[\check c] - \rho)^+
           - \Phi'(Q_\gamma(t, b))\, \eta_\gamma\, (E_v[\gamma \check c - \hat r])^+,

and the queues become those of :math:`b_t`. With :math:`\Phi(q) = q^2` the drift of :math:`\Phi(Q_\rho) +
\Phi(Q_\gamma)` plus the regret is bounded by the widths of the estimator, so that regret and violation are
:math:`O(\sqrt T)` for any step :math:`\eta` between :math:`\Theta(1)` and :math:`\Theta(T)`, without a policy that
keeps the constraints strictly. The queues never shrink, which makes large steps all alike: the penalty of a candidate
that breaks a constraint becomes infinite, and the best one that breaks none is taken.

Everything here is pure and knows neither auctions nor estimators: `decide` takes rewards and costs of the candidates
now and in expectation. `jaxlab.bidding.agents` has the three ways to form that expectation. One decision by hand::

    import jax.numpy as jnp
    from jaxlab.bidding import Prediction, Settings, decide, empty_queues

    bids, win_rate = jnp.array([0.0, 0.3, 0.6]), jnp.array([0.0, 0.25, 1.0])
    now = Prediction.point(reward=(0.6 - bids) * win_rate, cost=bids * win_rate)
    decision = decide(Settings(budget_rate=0.05, roi=1.0, budget_step=1.0, roi_step=1.0), empty_queues(), now)
    assert decision.index == 1  # bids 0.3; decision.queues are those to go on with

Reference: Guo et al., "Towards Safe and Optimal Online Bidding: A Modular Look-ahead Lyapunov Framework", ICLR 2026.

Deviations and additions:

1. ``roi_margin`` tightens the target to :math:`\gamma + \delta`: with a policy that can keep it, the violation becomes
   zero rather than :math:`O(\sqrt T)`.
2. ``queue_decay`` lets queues forget, for markets that drift; off by default, and without the paper's guarantee.
3. Where an estimate is not finite, nothing is raised under jit: the first candidate is taken, the queues stay, and
   ``Decision.valid`` is false.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

__all__ = [
    "Decision",
    "Potential",
    "Prediction",
    "Queues",
    "Settings",
    "Violations",
    "decide",
    "empty_queues",
    "look_ahead",
    "potential",
    "violations",
]

Scalar = int | float | Real[Array, ""]

PAPER_STEP = 0.6  # both step sizes of the paper's experiments


class Settings(NamedTuple):
    """Constraints and step sizes; every field may be traced, so that `jax.vmap` sweeps them.

    Attributes:
      budget_rate: :math:`\\rho`, budget a round, in the unit of cost.
      roi: :math:`\\gamma`, reward wanted for each unit of cost, at least 0.
      budget_step, roi_step: step sizes :math:`\\eta_\\rho, \\eta_\\gamma`, at least 0; 0.6 in the paper's experiments,
        the square root of the number of rounds in its theory.
      roi_margin: :math:`\\delta`, added to ``roi`` where violations are predicted.
      queue_decay: share of the queues forgotten in each round, in [0, 1).
    """

    budget_rate: Scalar
    roi: Scalar
    budget_step: Scalar = PAPER_STEP
    roi_step: Scalar = PAPER_STEP
    roi_margin: Scalar = 0.0
    queue_decay: Scalar = 0.0

    def check(self) -> "Settings":
        """These settings, if they make sense; traced values are let through.

        Raises:
          ValueError: a value that is negative or not finite, ``budget_rate`` of 0, ``queue_decay`` of 1 or more.
        """
        for name, value in self._asdict().items():
            if not is_concrete(value):
                continue
            least = "positive" if name == "budget_rate" else "at least 0"
            if not np.isfinite(value) or value < 0 or (name == "budget_rate" and value == 0):
                raise ValueError(f"{name} must be finite and {least}, got {value}")
            if name == "queue_decay" and value >= 1:
                raise ValueError(f"queue_decay must be below 1, got {value}")
        return self


class Queues(NamedTuple):
    """Virtual queues of the two constraints, one number each or one for every candidate."""

    budget: Float[Array, "*candidates"]
    roi: Float[Array, "*candidates"]


class Violations(NamedTuple):
    """Predicted violation of the two constraints by every candidate, at least 0."""

    budget: Float[Array, " k"]
    roi: Float[Array, " k"]


class Prediction(NamedTuple):
    """What an estimator says of the candidates.

    Attributes:
      reward: optimistic reward of each in the present context.
      mean_reward: the same in expectation over contexts.
      mean_cost: lower bound of the cost in expectation over contexts.
    """

    reward: Float[Array, " k"]
    mean_reward: Float[Array, " k"]
    mean_cost: Float[Array, " k"]

    @classmethod
    def point(cls, reward: Float[Array, " k"], cost: Float[Array, " k"]) -> "Prediction":
        """The present context stands for the expectation, as in the paper's experiments."""
        return cls(reward, reward, cost)


class Decision(NamedTuple):
    """A decision and everything that a user would plot of it.

    Attributes:
      index: the candidate taken; the first of equals.
      queues: the queues to go on with.
      violation: predicted violation of the candidate taken.
      scores: the objective of all candidates.
      valid: whether all estimates were finite.
    """

    index: Int[Array, ""]  # type: ignore[assignment]  # tuple.index is not missed
    queues: Queues
    violation: tuple[Float[Array, ""], Float[Array, ""]]
    scores: Float[Array, " k"]
    valid: Bool[Array, ""]


class Potential(NamedTuple):
    """A Lyapunov function and its slope, which must be nondecreasing and at least 0 for arguments at least 0."""

    value: Callable[[Array], Array]
    slope: Callable[[Array], Array]


def potential(name: str) -> Potential:
    """The Lyapunov function of that name: ``quadratic`` (the paper's), ``power:k`` with ``k >= 1``, or ``exp``.

    Raises:
      ValueError: another name, or a power below 1, whose slope would fall.
    """
    if name == "quadratic":
        return Potential(jnp.square, lambda q: 2 * q)
    if name == "exp":
        return Potential(jnp.expm1, jnp.exp)
    kind, _, exponent = name.partition(":")
    try:
        power = float(exponent) if kind == "power" else 0.0
    except ValueError:
        power = 0.0
    if not 1 <= power < np.inf:
        raise ValueError(f"potential must be 'quadratic', 'exp' or 'power:k' with k >= 1, got {name!r}")
    return Potential(lambda q: q**power, lambda q: power * q ** (power - 1))


def empty_queues() -> Queues:
    """The queues before the first round."""
    return Queues(jnp.zeros(()), jnp.zeros(()))


def violations(settings: Settings, mean_reward: Float[Array, " k"], mean_cost: Float[Array, " k"]) -> Violations:
    """How far every candidate is predicted to break either constraint; clipped after the expectation."""
    target = settings.roi + settings.roi_margin
    return Violations(
        budget=jnp.maximum(mean_cost - settings.budget_rate, 0),
        roi=jnp.maximum(target * mean_cost - mean_reward, 0),
    )


def look_ahead(settings: Settings, queues: Queues, predicted: Violations) -> Queues:
    """The queues after this round, for every candidate."""
    kept = 1 - settings.queue_decay
    return Queues(
        budget=kept * queues.budget + settings.budget_step * predicted.budget,
        roi=kept * queues.roi + settings.roi_step * predicted.roi,
    )


def decide(
    settings: Settings,
    queues: Queues,
    prediction: Prediction,
    *,
    potential: Potential | None = None,
    handicap: Float[Array, " k"] | None = None,
) -> Decision:
    """Take the candidate with the best reward less the penalties of the queues it would lead to.

    Args:
      settings: constraints and step sizes.
      queues: of the last round.
      prediction: rewards and costs of the candidates, now and in expectation.
      potential: Lyapunov function, `potential`; None is the paper's square.
      handicap: subtracted from the scores, to break ties otherwise than for the first candidate.

    Raises:
      ValueError: no candidate, or rewards and costs of different numbers of them.
    """
    shapes = {np.shape(of) for of in prediction}
    if len(shapes) > 1 or len(shape := shapes.pop()) != 1 or not shape[0]:
        raise ValueError(
            "reward, mean_reward and mean_cost must each have one entry a candidate, got shapes "
            + ", ".join(str(np.shape(of)) for of in prediction)
        )
    predicted = violations(settings, prediction.mean_reward, prediction.mean_cost)
    ahead = look_ahead(settings, queues, predicted)
    slope = (potential or _QUADRATIC).slope
    scores = (
        prediction.reward
        - slope(ahead.budget) * (settings.budget_step * predicted.budget)
        - slope(ahead.roi) * (settings.roi_step * predicted.roi)
    )
    if handicap is not None:
        scores = scores - handicap
    # A NaN or an infinity reaches the sum, so that one reduction tells of all.
    valid = jnp.isfinite(jnp.sum(prediction.reward + prediction.mean_reward + prediction.mean_cost))
    index = jnp.where(valid, jnp.argmax(scores), 0)
    return Decision(
        index=index,
        queues=jax.tree.map(lambda new, old: jnp.where(valid, new[index], old), ahead, queues),
        violation=(predicted.budget[index], predicted.roi[index]),
        scores=scores,
        valid=valid,
    )


def is_concrete(value: object) -> bool:
    """Whether a value can be looked at, that is, whether a check can raise."""
    return not isinstance(value, jax.core.Tracer)


_QUADRATIC = potential("quadratic")
