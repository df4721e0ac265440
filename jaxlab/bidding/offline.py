r"""The best stationary policy when everything is known, by linear programming: the yardstick of regret.

With contexts :math:`v` of probability :math:`p_v`, means :math:`r(v, b), c(v, b)` and occupancies :math:`x(v, b) \ge
0, \sum_b x(v, b) = p_v`,

.. math:: \nu^* = \max_x \sum x r \quad \text{s.t.} \quad \sum x c \le \rho, \quad \sum x (\gamma c - r) \le 0,

solved by HiGHS (`scipy.optimize.linprog`) in double precision on the host. The optimum of the paper's first-price
experiment (budget 0.01 a round, target 1.8)::

    import numpy as np
    from scipy.stats import norm
    from jaxlab.bidding import auction_tables, linear_programme_optimum

    values = np.clip(0.6 + 0.1 * norm.ppf((np.arange(51) + 0.5) / 51), 0, 1)
    bids = np.linspace(0, 1, 101)
    reward, cost = auction_tables(values, bids, norm.cdf(bids, 0.4, 0.1))
    optimum = linear_programme_optimum(reward, cost, budget_rate=0.01, roi=1.8)
    print(1e4 * optimum.reward)  # about 172 over the ten thousand rounds of the paper
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import sparse
from scipy.optimize import linprog

from jaxlab.bidding.auctions import Reward, check_choice
from jaxlab.bidding.estimators import PriceRule

__all__ = ["Optimum", "auction_tables", "linear_programme_optimum"]


class Optimum(NamedTuple):
    """A solved programme.

    Attributes:
      reward: of a round, :math:`\\nu^*`.
      spend: of a round.
      policy: probability of each candidate in each context.
      budget_price, roi_price: dual multipliers, the reward that one unit more of either constraint would bring.
    """

    reward: float
    spend: float
    policy: Float[np.ndarray, "v k"]
    budget_price: float
    roi_price: float


def linear_programme_optimum(
    reward: Float[np.ndarray, "_ _"],
    cost: Float[np.ndarray, "_ _"],
    probability: Float[np.ndarray, " _"] | None = None,
    *,
    budget_rate: float,
    roi: float,
) -> Optimum:
    """The best stationary policy.

    Args:
      reward, cost: mean of each candidate in each context.
      probability: of the contexts, None where they are equally likely.
      budget_rate, roi: the constraints.

    Raises:
      ValueError: shapes that do not match, values that are not finite, probabilities that do not sum to 1, constraints
        that no policy satisfies.
    """
    reward, cost = np.asarray(reward, float), np.asarray(cost, float)
    if reward.ndim != 2 or reward.shape != cost.shape:
        raise ValueError(f"reward and cost must be [contexts, candidates], got {reward.shape} and {cost.shape}")
    contexts, candidates = reward.shape
    weight = np.full(contexts, 1 / contexts) if probability is None else np.asarray(probability, float)
    if weight.shape != (contexts,) or np.any(weight < 0) or not abs(weight.sum() - 1) <= 1e-6:
        raise ValueError(
            f"probability must hold {contexts} numbers that sum to 1, got shape {weight.shape}, sum {weight.sum():.6g}"
        )
    if not (np.all(np.isfinite(reward)) and np.all(np.isfinite(cost))):
        raise ValueError("reward and cost must be finite")
    if not budget_rate >= 0 or not 0 <= roi < np.inf:
        raise ValueError(f"budget_rate and roi must be at least 0, roi finite, got {budget_rate} and {roi}")
    # The variables are probabilities of candidates given a context, so that rare contexts are not rounded away.
    gain, price = weight[:, None] * reward, weight[:, None] * cost
    solved = linprog(
        -gain.ravel(),
        A_ub=np.stack([price.ravel(), (roi * price - gain).ravel()]),
        b_ub=[budget_rate, 0.0],
        A_eq=sparse.kron(sparse.eye(contexts), np.ones((1, candidates)), format="csr"),
        b_eq=np.ones(contexts),
        method="highs",
    )
    if solved.status == 2:
        raise ValueError("no feasible policy: add a zero bid or lower the return target")
    if solved.status != 0:
        raise ValueError(f"the linear programme was not solved: {solved.message}")
    policy = solved.x.reshape(contexts, candidates)
    budget_price, roi_price = -solved.ineqlin.marginals
    return Optimum(0.0 - solved.fun, float((policy * price).sum()), policy, float(budget_price), float(roi_price))


def auction_tables(
    values: Float[np.ndarray, " v"],
    bids: Float[np.ndarray, " k"],
    win_probability: Float[np.ndarray, " _"],
    *,
    price: PriceRule = "first",
    reward: Reward = "utility",
) -> tuple[Float[np.ndarray, "v k"], Float[np.ndarray, "v k"]]:
    """Mean reward and cost of each bid at each value.

    Args:
      values: of winning.
      bids: the candidates, ascending.
      win_probability: of each.
      price: what the winner pays; in second-price auctions the prices between two bids are taken as their mean.
      reward: whether the payment is subtracted from the value.

    Raises:
      ValueError: probabilities that do not match the bids, an unknown word.
    """
    check_choice("price", price, PriceRule)
    check_choice("reward", reward, Reward)
    values, bids, win_probability = (np.asarray(array, float) for array in (values, bids, win_probability))
    if win_probability.shape != bids.shape:
        raise ValueError(f"{bids.size} bids need as many probabilities of winning, got shape {win_probability.shape}")
    if price == "first":
        payment = bids * win_probability
    else:
        middles = np.concatenate([bids[:1], (bids[1:] + bids[:-1]) / 2])
        payment = np.cumsum(middles * np.diff(win_probability, prepend=0))
    cost = np.broadcast_to(payment, (values.size, bids.size))
    return values[:, None] * win_probability - (cost if reward == "utility" else 0), cost
