"""Campaigns of one method at every step size and seed in one program, their summary, and the choice of a step."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxlab import bidding
from jaxlab.bidding import Agent, Environment, Outcome, Settings, Trace
from jaxlab.experiments.l2fob.methods import Method
from jaxlab.experiments.l2fob.settings import Setting

__all__ = ["Sweep", "best_step", "growth", "overspend_at_any_costs", "sweep"]

POINTS = 100  # of a curve over rounds
SLACK = 0.98  # a step keeps the target if it returns this share of it


class Sweep(NamedTuple):
    """What came of the campaigns of one method in one setting.

    Attributes:
      steps: ``[step]``.
      reward, spend, violation, stop, overspend: ``[step, seed]``: totals, largest violation, rounds, and spend above
        the budget as a share of it.
      curves: reward so far, return so far and violation, ``[3, step, seed, point]``.
    """

    steps: np.ndarray
    reward: np.ndarray
    spend: np.ndarray
    violation: np.ndarray
    stop: np.ndarray
    overspend: np.ndarray
    curves: np.ndarray

    @property
    def roi(self) -> np.ndarray:
        """Return on what was spent, 0 where nothing was."""
        return np.where(self.spend > 0, self.reward / np.maximum(self.spend, 1e-9), 0.0)

    def at(self, step: float) -> int:
        """Place of a step size.

        Raises:
          ValueError: it was not among those swept.
        """
        found = np.flatnonzero(np.isclose(self.steps, step))
        if not found.size:
            raise ValueError(f"step size {step} was not swept, only {self.steps.tolist()}")
        return int(found[0])


def sweep(
    setting: Setting,
    method: Method,
    steps: tuple[float, ...],
    key: Key[Array, ""],
    *,
    seeds: int,
    rounds: int,
    buffer: int,
) -> dict[str, np.ndarray]:
    """Run every step size on the same seeds; the fields of `Sweep`."""
    budget = setting.budget_rate * rounds
    thin = np.unique(np.linspace(0, rounds - 1, min(POINTS, rounds)).astype(int))

    def campaign(step: Array, key: Key[Array, ""]) -> dict[str, Array]:
        agent = method.make(setting, step, buffer)
        round_key, chance_key = jax.random.split(key)
        drawn = setting.environment.draw(round_key, rounds)
        chances = jax.random.uniform(chance_key, (rounds,))
        campaign, trace = bidding.advance(setting.environment, agent, bidding.start(agent), drawn, chances, budget)
        reward, spend = jnp.cumsum(trace.reward), jnp.cumsum(trace.cost)
        violation = bidding.violation(trace.reward, trace.cost, roi=setting.roi)
        roi = bidding.return_on_investment(trace.reward, trace.cost)
        return {
            "reward": reward[-1],
            "spend": spend[-1],
            "violation": jnp.maximum(violation.max(), 0),
            "stop": bidding.stop_round(trace.alive),
            "overspend": ((campaign.ledger.spend - budget) + campaign.ledger.spend_error) / budget,
            "curves": jnp.stack([reward, jnp.where(spend > 0, roi, jnp.nan), violation])[:, thin],
        }

    over_seeds = jax.vmap(campaign, in_axes=(None, 0))
    found = jax.jit(jax.vmap(over_seeds, in_axes=(0, None)))(jnp.asarray(steps), jax.random.split(key, seeds))
    found["curves"] = jnp.moveaxis(found["curves"], 2, 0)
    return {"steps": np.asarray(steps)} | {name: np.asarray(values) for name, values in found.items()}


def best_step(found: Sweep, *, roi: float, tuning_seeds: int, candidates: int) -> int:
    """The step of the most reward among those that keep the target (to 2 %), or else of the highest return.

    Args:
      found: the sweep.
      roi: the target.
      tuning_seeds: the first seeds, on which it is chosen; the others are for the report.
      candidates: the first steps, which may be chosen.
    """
    reward = found.reward[:candidates, :tuning_seeds].mean(1)
    returned = found.roi[:candidates, :tuning_seeds].mean(1)
    keeps = returned >= SLACK * roi
    return int(np.argmax(np.where(keeps, reward, -np.inf))) if keeps.any() else int(np.argmax(returned))


def growth(
    setting: Setting, key: Key[Array, ""], *, step: float, seeds: int, rounds: int, first: int
) -> dict[str, np.ndarray]:
    """The largest violation so far along one long campaign of L2FOB, at horizons from ``first`` on: ``[seed, h]``."""
    horizons = np.unique(np.geomspace(first, rounds, 9).astype(int))
    agent = bidding.make_l2fob(
        setting.estimator, Settings(setting.budget_rate, setting.roi, step, step), expectation="point"
    )

    def campaign(key: Key[Array, ""]) -> Array:
        trace = bidding.simulate(setting.environment, agent, key, rounds, setting.budget_rate * rounds)
        violation = bidding.violation(trace.reward, trace.cost, roi=setting.roi)
        return jax.lax.cummax(jnp.maximum(violation, 0))[horizons - 1]

    violation = jax.jit(jax.vmap(campaign))(jax.random.split(key, seeds))
    return {"horizons": horizons, "violation": np.asarray(violation)}


def overspend_at_any_costs(key: Key[Array, ""], *, campaigns: int, rounds: int) -> np.ndarray:
    """Spend above the budget as a share of it, summed in double precision, when costs are anything in [0, 1].

    A quarter of the campaigns each has uniform costs, tenths (whose sum can be the budget exactly), costs of 1e-7 to 1
    in equal ratios, and costs that are 0 or 1. The agent buys in every round.
    """
    uniform = jax.random.uniform(key, (rounds * campaigns,)).reshape(rounds, campaigns)
    kinds = jnp.stack([uniform, jnp.round(10 * uniform) / 10, 10 ** (-7 * uniform), jnp.round(uniform)])
    costs = kinds[jnp.arange(campaigns) % 4, :, jnp.arange(campaigns)]
    budgets = jnp.asarray(np.tile([0.3, 1.0, 7.7, 100.0], campaigns // 4 + 1)[:campaigns], jnp.float32)
    found = jax.jit(jax.vmap(partial(_buy_everything, rounds=rounds)))(costs, budgets)
    spend, most = np.asarray(found.cost, np.float64).sum(1), np.asarray(budgets, np.float64)
    return (spend - most) / most


def _buy_everything(costs: Array, budget: Array, *, rounds: int) -> Trace:
    shop = Environment(
        draw=lambda key, rounds: costs,
        context=lambda cost: (jnp.ones(1), cost[None]),
        outcome=lambda cost, index: Outcome(jnp.asarray(True), jnp.ones(()), cost, cost),
    )
    agent: Agent = bidding.greedy(bidding.external_estimator(1))
    return bidding.simulate(shop, agent, jax.random.key(0), rounds, budget)
