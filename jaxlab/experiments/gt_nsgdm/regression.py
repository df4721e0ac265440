r"""Robust regression under heavy-tailed gradient noise (the paper's synthetic experiment).

Twenty nodes fit :math:`y = X w^*` on binary features with Tukey's biweight loss. Each uses its full local gradient plus
noise that is drawn for every coordinate, node and step. All methods see the same draws.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from jaxlab.experiments.gt_nsgdm.methods import Method, configurations
from jaxlab.optim import DenseMixer, noise, topology

__all__ = ["NOISES", "Problem", "Sweep", "make_problem", "simulate", "tune"]

N_NODES = 20
_DIMENSION = 20
_ROWS = 1000
_TUKEY_CONSTANT = 4.6851  # 95 % efficiency on normal errors, the usual choice

# Noise per coordinate, as in the paper's figures.
NOISES: Mapping[str, noise.Sampler] = {
    "gaussian": lambda key, shape: 3.0 * jax.random.normal(key, shape),
    "student_t": lambda key, shape: jax.random.t(key, 1.5, shape),
    "stable": functools.partial(noise.alpha_stable, alpha=1.5, beta=0.5),
}

# The published grid spans 0.001 to 10; second hyperparameters at three values a method.
_GRID = {"low": 1e-3, "high": 10.0, "points": 13}
_SECOND = {
    "beta": (0.5, 0.9, 0.99),
    "max_norm": (1.0, 10.0, 100.0),
    "max_value": (1.0, 10.0, 100.0),
    "scale": (1.0, 10.0, 100.0),
}


class Problem(NamedTuple):
    """Rows and labels of every node, and the weights that made them."""

    features: Float[Array, "n rows d"]
    labels: Float[Array, "n rows"]
    target: Float[Array, " d"]


class Trace(NamedTuple):
    """What runs report: ``[runs, evaluations]`` each.

    Attributes:
      error: average over nodes of the distance to the true weights.
      motion: largest displacement of the nodes' average since the last evaluation, in units of the step size.
      spread: largest distance of the stacked parameters from their average, in units of the step size.
    """

    error: Float[Array, "runs evaluations"]
    motion: Float[Array, "runs evaluations"]
    spread: Float[Array, "runs evaluations"]


@dataclass(frozen=True)
class Sweep:
    """A tuned method.

    Attributes:
      configurations: ``[c, 2]`` rows (learning rate, second hyperparameter).
      tuning_errors: ``[c]`` errors at the end of the tuning runs, infinite where they diverged.
      best: the chosen row.
      final: traces of the chosen row on fresh noise.
    """

    configurations: np.ndarray
    tuning_errors: np.ndarray
    best: np.ndarray
    final: dict[str, np.ndarray]

    @property
    def errors(self) -> np.ndarray:
        """Final error of every fresh run, ``[seeds]``."""
        return last_tenth(self.final["error"])

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Step sizes, and the error at each with the second hyperparameter tuned for it."""
        rates = np.unique(self.configurations[:, 0])
        return rates, np.array([self.tuning_errors[self.configurations[:, 0] == rate].min() for rate in rates])

    def plateau(self, factor: float = 2.0) -> float:
        """Decades of step sizes whose error is within ``factor`` of the method's own best, interpolated."""
        rates, errors = self.curve()
        fine = np.linspace(np.log10(rates[0]), np.log10(rates[-1]), 2001)
        curve = np.interp(fine, np.log10(rates), np.log(np.minimum(errors, 1e30)))
        return float((curve <= np.log(errors.min() * factor)).mean() * (fine[-1] - fine[0]))


def make_problem(key: Key[Array, ""]) -> Problem:
    """Draw features (frequent, even and rare binary tokens), true weights and noise-free labels."""
    feature_key, target_key = jax.random.split(key)
    frequency = np.concatenate([np.full(2, 0.9), np.full(2, 0.5), np.full(_DIMENSION - 4, 0.1)])
    features = jax.random.bernoulli(feature_key, frequency, (_ROWS, _DIMENSION)).astype(jnp.float32)
    target = jax.random.normal(target_key, (_DIMENSION,))
    per_node = features.reshape(N_NODES, -1, _DIMENSION)
    return Problem(per_node, per_node @ target, target)


def draw_noise(key: Key[Array, ""], sampler: noise.Sampler, *, runs: int, steps: int) -> Float[Array, "steps runs n d"]:
    """The gradient noise of every run, one step after the other so that the draws stay small."""
    keys = jax.random.split(key, steps)
    return jax.lax.map(lambda k: sampler(k, (runs, N_NODES, _DIMENSION)), keys, batch_size=100)


@functools.partial(jax.jit, static_argnames=("method", "every"))
def simulate(
    method: Method,
    hyperparameters: Float[Array, "runs 2"],
    which_noise: Int[Array, " runs"],
    gradient_noise: Float[Array, "steps draws n d"],
    mixing_matrix: Float[Array, "n n"],
    problem: Problem,
    *,
    every: int,
) -> Trace:
    """Run a method for every row of hyperparameters from zero, and look at it every ``every`` steps."""
    mixer = DenseMixer(mixing_matrix)

    def one_run(rates: Float[Array, " 2"], draw: Int[Array, ""]) -> Trace:
        optimizer = method.make(rates[0], rates[1], mixer)

        def step(carry: Any, noise_of_step: Float[Array, "draws n d"]):
            params, state = carry
            gradient = jax.grad(_sum_of_losses)(params, problem) + noise_of_step[draw]
            updates, state = optimizer.update(gradient, state, params)
            moved = optax.apply_updates(params, updates)
            motion = jnp.linalg.norm(moved.mean(0) - params.mean(0)) / rates[0]
            spread = jnp.linalg.norm(moved - moved.mean(0)) / rates[0]
            return (moved, state), (motion, spread)

        def stretch(carry: Any, noise_of_stretch: Float[Array, "every draws n d"]):
            carry, (motion, spread) = jax.lax.scan(step, carry, noise_of_stretch)
            error = jnp.linalg.norm(carry[0] - problem.target, axis=1).mean()
            return carry, Trace(error, motion.max(), spread.max())

        start = jnp.zeros((N_NODES, _DIMENSION))
        stretches = gradient_noise.reshape(-1, every, *gradient_noise.shape[1:])
        return jax.lax.scan(stretch, (start, optimizer.init(start)), stretches)[1]

    return jax.vmap(one_run)(hyperparameters, which_noise)


def tune(
    method: Method,
    problem: Problem,
    tuning_noise: Float[Array, "steps 1 n d"],
    fresh_noise: Float[Array, "steps seeds n d"],
    *,
    mixing_matrix: np.ndarray | None = None,
    every: int = 100,
) -> Sweep:
    """Choose hyperparameters on one stream of noise, and run the choice on others."""
    matrix = jnp.asarray(topology.ring(N_NODES, degree=2) if mixing_matrix is None else mixing_matrix, jnp.float32)
    grid = configurations(method, second=_SECOND, **_GRID)
    trace = simulate(
        method, jnp.asarray(grid), jnp.zeros(len(grid), jnp.int32), tuning_noise, matrix, problem, every=every
    )
    errors = np.nan_to_num(last_tenth(np.asarray(trace.error)), nan=np.inf)
    best = grid[errors.argmin()]
    seeds = fresh_noise.shape[1]
    final = simulate(
        method, jnp.tile(jnp.asarray(best), (seeds, 1)), jnp.arange(seeds), fresh_noise, matrix, problem, every=every
    )
    return Sweep(grid, errors, best, {name: np.asarray(values) for name, values in final._asdict().items()})


def last_tenth(errors: np.ndarray) -> np.ndarray:
    """Average over the last tenth of the evaluations: ``[runs, evaluations]`` to ``[runs]``."""
    return errors[:, -max(1, errors.shape[1] // 10) :].mean(1)


def _sum_of_losses(params: Float[Array, "n d"], problem: Problem) -> Float[Array, ""]:
    """Sum over nodes of each node's mean loss: its gradient has every node's own gradient in that node's row."""
    residual = jnp.einsum("nrd,nd->nr", problem.features, params) - problem.labels
    inside = 1.0 - jnp.minimum((residual / _TUKEY_CONSTANT) ** 2, 1.0)
    return (_TUKEY_CONSTANT**2 / 6.0 * (1.0 - inside**3)).mean(1).sum()
