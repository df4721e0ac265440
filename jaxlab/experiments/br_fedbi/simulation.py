"""Many simulated federated runs in one compiled program.

What distinguishes runs is traced: the attack and the aggregator (``lax.switch``), who is Byzantine, step size, momentum
and data. Plain BR-FedBi is momentum with beta = 0. So three programs, of momentum, PAGE and sub-loops, serve every
combination, and compile once each.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxlab.data.partition import gamma_similarity_partition
from jaxlab.optim import attacks, bilevel, robust
from jaxlab.optim.aggregation import Aggregator

__all__ = ["LABEL_FLIP", "METHODS", "Method", "Scenario", "attack_named", "optimizer_for", "share_out", "stepper_for"]

# An attack on data, not on messages.
LABEL_FLIP = "label_flip"


class Method(NamedTuple):
    """How a method of the comparison is made.

    Attributes:
      label: for tables and plots.
      program: ``momentum``, ``page`` or ``sub_loops``.
      beta: decay of the momentum.
      messages: vectors a client sends in a round.
      single_level: whether z is held at 0.
    """

    label: str
    program: str
    beta: float
    messages: int
    single_level: bool = False


METHODS = {
    "br_fedbi": Method("BR-FedBi", "momentum", 0.0, 3),
    "br_fedbi_m": Method("BR-FedBiM", "momentum", 0.5, 3),
    "br_fedbi_p": Method("BR-FedBiP", "page", 0.0, 3),
    "bilantine": Method("BILANTINE", "sub_loops", 0.0, 8),
    "sgd": Method("single-level SGD", "momentum", 0.0, 2, True),
    "sgd_m": Method("single-level momentum", "momentum", 0.5, 2, True),
}


class Scenario(NamedTuple):
    """What a run is up against; all of it may be traced.

    Attributes:
      attack: index among the attacks.
      aggregator: index among the aggregators.
      byzantine: ``[n]``, who is.
      learning_rate: of the upper variable; the others follow by fixed ratios.
      beta: decay of the momentum.
      key: of the attack's random numbers.
    """

    attack: Int[Array, ""]
    aggregator: Int[Array, ""]
    byzantine: Bool[Array, " n"]
    learning_rate: Float[Array, ""]
    beta: Float[Array, ""]
    key: Key[Array, ""]


@dataclasses.dataclass(frozen=True, eq=False)
class _Chosen(Aggregator):
    """One of several aggregators, by a traced index. None of them may keep a state."""

    index: Int[Array, ""]
    rules: Sequence[Aggregator]

    def apply(self, stacked, state, *, key=None, axis_name=None):
        return lax.switch(
            self.index, [functools.partial(_apply, rule, axis_name) for rule in self.rules], stacked
        ), state

    def tolerates(self, n: int) -> int:
        return min(rule.tolerates(n) for rule in self.rules)

    def kappa(self, n: int, f: int | None = None) -> float:
        return max(rule.kappa(n, f) for rule in self.rules)

    def _apply(self, layout, stacked, state, key):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class _Attacked(attacks.Attack):
    """One of several attacks, by a traced index."""

    index: Int[Array, ""]
    choices: Sequence[attacks.Attack]

    stochastic = True

    def apply(self, stacked, byzantine, *, key=None, axis_name=None):
        return attacks.switch(self.index, self.choices, stacked, byzantine, key=key, axis_name=axis_name)

    def _craft(self, honest, key):
        raise NotImplementedError


def attack_named(name: str) -> attacks.Attack:
    """The attack at the strength of the comparison.

    Raises:
      ValueError: for an unknown name.
    """
    if name == LABEL_FLIP:
        return attacks.NoAttack()
    strengths: dict[str, dict[str, Any]] = {
        # Beyond 18 / 7 a mean of 18 honest and 7 Byzantine clients points backwards.
        "inner_product": {"scale": 3.0},
        "alie": {"scale": -1.5},
        "gaussian": {"deviation": 20.0, "relative": True},
    }
    return attacks.make_attack(name, **strengths.get(name, {}))


def share_out(
    labels: np.ndarray, examples: np.ndarray, *, clients: int, gamma: float, seed: int
) -> Int[np.ndarray, "clients m"]:
    """Some of the examples for every client, equally many, with gamma-similarity.

    Raises:
      ValueError: if the clients would get fewer than 5.
    """
    parts = gamma_similarity_partition(labels[examples], clients, gamma=gamma, seed=seed)
    each = min(map(len, parts))
    if each < 5:
        raise ValueError(f"{len(examples)} examples are too few for {clients} clients, who need 5 each")
    random = np.random.default_rng(seed)
    # Clients in random order: the last ones, which will be Byzantine, must not be those with the last classes.
    return np.stack([examples[random.permutation(parts[i])[:each]] for i in random.permutation(clients)])


def optimizer_for(
    method: Method,
    scenario: Scenario,
    *,
    aggregators: Sequence[Aggregator],
    attack_names: Sequence[str],
    ratios: tuple[float, float],
    radius: Any = 10.0,
    server: bilevel.BilevelPoint | None = None,
) -> Any:
    """The optimiser of a single-loop method, or a function from a problem to the stepper of the one with sub-loops."""
    n = scenario.byzantine.shape[0]
    strike = robust.simulate_attack(
        _Attacked(scenario.attack, tuple(map(attack_named, attack_names))), scenario.byzantine, key=scenario.key
    )
    rule = _Chosen(scenario.aggregator, tuple(aggregators))
    options: dict[str, Any] = {"ratios": ratios, "radius": radius, "attack": strike, "server": server}
    if method.program == "sub_loops":
        return lambda problem: bilevel.bilantine(problem, rule, scenario.learning_rate, **options)
    estimator = robust.page(n) if method.program == "page" else robust.client_momentum(n, scenario.beta)
    return bilevel.br_fedbi(rule, scenario.learning_rate, estimator=estimator, **options)


def stepper_for(
    method: Method,
    problem: bilevel.BilevelProblem,
    scenario: Scenario,
    *,
    refresh_probability: float = 0.5,
    **options: Any,
) -> bilevel.BilevelStepper:
    """Rounds of a method; options as in `optimizer_for`."""
    made = optimizer_for(method, scenario, **options)
    if method.program == "sub_loops":
        return made(problem)
    probability = refresh_probability if method.program == "page" else None
    return bilevel.make_bilevel_step(problem, made, refresh_probability=probability)


def _apply(rule: Aggregator, axis_name: str | None, stacked: PyTree) -> PyTree:
    return rule.aggregate(stacked, axis_name=axis_name)
