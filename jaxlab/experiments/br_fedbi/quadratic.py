r"""The quadratic whose solution is known: convergence, the floors, and what momentum does to them.

.. math:: g_i = \tfrac12 y^\top A_i y - y^\top (B_i x + c_i), \qquad
    f_i = \tfrac12 \lVert y - t_i \rVert^2 + \tfrac\lambda2 \lVert x \rVert^2

Everything runs in double precision, since the claims are about exact recovery.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxlab.experiments.br_fedbi.simulation import METHODS, Scenario, stepper_for
from jaxlab.optim import bilevel, make_aggregator
from jaxlab.optim.bilevel import BilevelPoint, BilevelProblem, ClientBatches

__all__ = ["BYZANTINE", "HONEST", "Clients", "floor", "path", "refuses_half", "relative_variances"]

RIDGE = 0.1
HONEST, BYZANTINE = 8, 3
LEARNING_RATE, RATIOS = 0.05, (4.0, 4.0)
# With the number of Byzantine clients they assume: what there is, and the largest minority.
AGGREGATORS = (("mean", 0), ("trimmed_mean", BYZANTINE), ("trimmed_mean", (HONEST + BYZANTINE - 1) // 2))
ATTACKS = ("none", "inner_product", "alie")
_X, _Y = 3, 4
# Those that know how many Byzantine clients to tolerate.
_COUNTING_RULES = (
    "trimmed_mean",
    "mean_around_median",
    "krum",
    "multi_krum",
    "monna",
    "nnm+trimmed_mean",
    "nnm+coordinate_median",
    "nnm+geometric_median",
)


class Clients(NamedTuple):
    """Coefficients of the clients, on the leading axis."""

    a: Float[Array, "n y y"]
    b: Float[Array, "n y x"]
    c: Float[Array, "n y"]
    target: Float[Array, "n y"]

    @classmethod
    def draw(cls, key: Key[Array, ""], alike: Bool[Array, ""]) -> "Clients":
        """Honest clients; all of them the average one where ``alike``."""
        sizes = (_Y * _Y, _Y * _X, _Y, _Y)
        numbers = jnp.split(jax.random.normal(key, (HONEST, sum(sizes))), np.cumsum(sizes)[:-1], axis=1)
        m, b, c, target = numbers
        m, b = m.reshape(HONEST, _Y, _Y), b.reshape(HONEST, _Y, _X)
        made = cls(1.5 * jnp.eye(_Y) + 0.1 * (m + m.swapaxes(1, 2)), 0.5 * b, c, target)
        return cls(*(jnp.where(alike, v.mean(0), v) for v in made))

    def with_average_ones(self) -> "Clients":
        """And clients at the end, for attackers to speak for, which compute what the average client would."""
        return Clients(*(jnp.concatenate([v, jnp.broadcast_to(v.mean(0), (BYZANTINE, *v.shape[1:]))]) for v in self))

    def solution(self) -> tuple[Array, Array, Array]:
        """x*, y*, z* of the averages."""
        a, b, c, target = (v.mean(0) for v in self)
        slope, offset = jnp.linalg.solve(a, b), jnp.linalg.solve(a, c) - target
        x = -jnp.linalg.solve(RIDGE * jnp.eye(_X) + slope.T @ slope, slope.T @ offset)
        y = jnp.linalg.solve(a, b @ x + c)
        return x, y, -jnp.linalg.solve(a, y - target)

    def hypergradient(self, x: Array) -> Array:
        """Of the averages, exactly."""
        a, b, c, target = (v.mean(0) for v in self)
        y = jnp.linalg.solve(a, b @ x + c)
        return RIDGE * x + b.T @ jnp.linalg.solve(a, y - target)


def _upper(x: Array, y: Array, batch: dict[str, Array]) -> Array:
    noise = batch["noise_x"] @ x + batch["noise_y"] @ y
    return 0.5 * jnp.sum((y - batch["target"]) ** 2) + RIDGE / 2 * jnp.sum(x**2) + noise


def _lower(x: Array, y: Array, batch: dict[str, Array]) -> Array:
    return 0.5 * y @ batch["a"] @ y - y @ (batch["b"] @ x + batch["c"]) + batch["noise"] @ y


PROBLEM = BilevelProblem(_upper, _lower)


@functools.partial(jax.jit, static_argnames="rounds")
def path(
    problem: Key[Array, ""],
    alike: Bool[Array, ""],
    beta: Float[Array, ""],
    noise: Float[Array, ""],
    aggregator: Int[Array, ""],
    attack: Int[Array, ""],
    byzantine: Int[Array, ""],
    key: Key[Array, ""],
    *,
    rounds: int,
) -> dict[str, Float[Array, " rounds"]]:
    """Error and exact hypergradient norm after every round.

    Args:
      problem: that the honest clients are drawn with.
      alike: whether they are.
      beta: of the momentum; 0 is plain.
      noise: standard deviation of every component of every direction.
      aggregator, attack: indices among `AGGREGATORS` and `ATTACKS`.
      byzantine: clients that lie, from the end. Beyond the three extra ones, honest clients turn.
      key: of the noise.
      rounds: to run.
    """
    honest = Clients.draw(problem, alike)
    clients = honest.with_average_ones()
    n = HONEST + BYZANTINE
    scenario = Scenario(attack, aggregator, jnp.arange(n) >= n - byzantine, jnp.asarray(LEARNING_RATE), beta, key)
    init, step = stepper_for(
        METHODS["br_fedbi_m"],
        PROBLEM,
        scenario,
        aggregators=[make_aggregator(name, f=f) for name, f in AGGREGATORS],
        attack_names=ATTACKS,
        ratios=RATIOS,
        radius=1e300,  # here z diverges where it wants to
    )
    x, y, z = honest.solution()
    draws = noise * jax.random.normal(key, (rounds, n, _X + 2 * _Y))

    def one_round(state, draw):
        lower = {"a": clients.a, "b": clients.b, "c": clients.c, "noise": draw[:, :_Y]}
        upper = {"target": clients.target, "noise_x": draw[:, _Y : _Y + _X], "noise_y": draw[:, _Y + _X :]}
        state, _ = step(key, state, ClientBatches(lower, upper))
        off = BilevelPoint(state.point.upper - x, state.point.lower - y, state.point.auxiliary - z)
        error = jnp.stack([jnp.abs(leaf).max() for leaf in off]).max()
        # Past the largest double everything is NaN, and a run that got there must count as the worst.
        error = jnp.where(jnp.isnan(error), jnp.inf, error)
        return state, {"error": error, "norm": jnp.linalg.norm(honest.hypergradient(state.point.upper))}

    start = bilevel.bilevel_point(jnp.zeros_like(x), jnp.zeros_like(y))
    return jax.lax.scan(one_round, init(start), draws)[1]


def floor(norms: Float[np.ndarray, " rounds"]) -> float:
    """Where a path comes to rest: root mean square over its second half."""
    return float(np.sqrt(np.mean(np.square(norms[len(norms) // 2 :]))))


def refuses_half(n: int) -> dict[str, bool]:
    """Whether every robust rule takes the largest minority of ``n`` clients and refuses one Byzantine client more."""
    messages = jnp.zeros((n, 1))
    most = (n - 1) // 2

    def takes(name: str, f: int) -> bool:
        try:
            make_aggregator(name, f=f).aggregate(messages)
        except ValueError:
            return False
        return True

    return {name: takes(name, most) and not takes(name, most + 1) for name in _COUNTING_RULES}


def relative_variances(betas: np.ndarray) -> np.ndarray:
    """Variance of an exponential moving average of white noise, as a share of the noise's."""
    return (1 - betas) / (1 + betas)
