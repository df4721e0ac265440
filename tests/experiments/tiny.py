"""A small honest experiment: gradient descent on a quadratic, whose every iterate is known in closed form.

``python tiny.py run tiny ...`` is the ``jaxlab`` command with this experiment in the list of methods; with
``TINY_HANGS_IN="noisy 3"`` it waits in that chunk for a signal.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.experiments.base import Claim, Experiment, Run
from jaxlab.experiments.registry import Method


@dataclass(frozen=True)
class Config:
    """Minimise half a squared norm, with and without noise in the gradient."""

    chunks: int = 4
    """chunks of ten steps"""
    learning_rate: float = 0.1
    """step size, in (0, 2)"""
    corpus: str | None = None
    """a text file; none is needed"""

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < 2:
            raise ValueError(f"learning_rate must be in (0, 2), got {self.learning_rate}")


def descend(key: jax.Array, x: jax.Array, *, learning_rate: float, noise: float) -> tuple[jax.Array, jax.Array]:
    """Ten steps."""

    def step(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x - learning_rate * (x + noise * jax.random.normal(key, x.shape))
        return x, jnp.vdot(x, x) / 2

    return jax.lax.scan(step, x, jax.random.split(key, 10))


def run(config: Config, run: Run) -> None:
    """Measure the contraction and the noise floor."""
    if config.corpus is not None:
        raise ValueError(f"corpus {config.corpus!r} does not exist")
    run.plan(2.0 * config.chunks + 1.0)
    start = run.stage("start", lambda: {"x": jax.random.normal(run.key, (3,))})["x"]
    curves = {}
    for name, noise in (("exact", 0.0), ("noisy", 1.0)):
        chunk = jax.jit(lambda key, x, noise=noise: descend(key, x, learning_rate=config.learning_rate, noise=noise))

        def body(carry: dict, i: int, name: str = name, chunk: Callable = chunk) -> tuple[dict, dict]:
            if os.environ.get("TINY_HANGS_IN") == f"{name} {i}":
                time.sleep(600)
            key, now = jax.random.split(carry["key"])
            x, loss = chunk(now, carry["x"])
            return {"key": key, "x": x}, {"loss": loss, "last": (loss[-1],)}

        carry, outputs = run.loop(
            name,
            body,
            {"key": run.key, "x": jnp.asarray(start)},
            config.chunks,
            cost=config.chunks,
            log=lambda i, output: [{"step": 10 * i + 9, "loss": output["last"][0]}],
        )
        curves[name] = outputs["loss"].ravel()
        run.row(name, loss_mean=curves[name].mean(), loss_std=curves[name].std(), last=carry["x"][0])
    # Every step multiplies x by 1 - learning_rate.
    predicted = (1 - config.learning_rate) ** (2 * len(curves["exact"]) - 2)
    run.measure("contracts", curves["exact"][-1] / curves["exact"][0] / predicted)
    run.measure("noise_has_a_floor", curves["noisy"][-5:].min())
    run.measure("beats_newton", curves["exact"][-1])
    run.skip("scales", "paper", "needs a million dimensions")
    run.note("Both runs start at the same point.")
    with run.figure("loss", figsize=(4, 3)) as (_, axes):
        for name, curve in curves.items():
            axes.semilogy(np.maximum(curve, 1e-30), label=name)
        axes.legend()


EXPERIMENT = Experiment(
    name="tiny",
    summary="Gradient descent on a quadratic.",
    claims=(
        Claim("contracts", "Gradient descent contracts at the rate of theory.", "in", (0.999, 1.001)),
        Claim("noise_has_a_floor", "With noise in the gradient the loss stays away from zero.", ">", 1e-6),
        Claim(
            "beats_newton",
            "Gradient descent is exact after one step.",
            "<=",
            0.0,
            known_gap="Only Newton's method is; the learning rate was varied.",
        ),
        Claim("scales", "The rate does not depend on the dimension.", "<", 1.0),
    ),
    presets={
        "smoke": Config(),
        "quick": Config(6),
        "cpu": Config(50, learning_rate=0.01),
        "paper": Config(10**6),
    },
    run=run,
    shapes=lambda config: jax.eval_shape(lambda key: jax.random.normal(key, (config.chunks,)), jax.random.key(0)),
)

METHOD = Method("tiny", "Gradient descent", None, "tests", experiment=__name__)

if __name__ == "__main__":
    from jaxlab import cli
    from jaxlab.experiments import registry

    registry.METHODS = (METHOD,)
    sys.exit(cli.main())
