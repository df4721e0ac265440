"""What is chosen on validation frames: Koopman's rank, the network's width and epochs, Langevin's noise level.

One rule for all three: the candidate whose rollout from validation frames has the (phi, psi) map nearest to that of the
validation frames. No frame of the test part is looked at. Koopman and the networks are chosen by rollouts of the same
length; networks are trained again for what is judged, so that no training is kept for its luck.

The rule is noisy, and is kept because what is judged must not choose: psi changes its basin about once in 180 frames,
so that the 2000 validation frames hold about ten exchanges, and their map is 0.1 from that of all frames where
candidates differ by 0.01. ``metrics.jsonl`` has both divergences of every candidate.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.dynamics import latent
from jaxlab.dynamics.latent import DiffusionSchedule, KoopmanPropagator, NeuralState, Propagator
from jaxlab.dynamics.reduced_rank import LowRankOperator
from jaxlab.experiments.base import Run
from jaxlab.experiments.gldp.judging import Setting
from jaxlab.experiments.gldp.training import train_network

__all__ = ["choose_level", "choose_network", "choose_rank", "koopman", "network", "network_state"]

_CLIP = 1.2  # of the training range


def koopman(setting: Setting, rank: int, skip: int, **noise: Any) -> KoopmanPropagator:
    """The linear propagator, as a dense matrix: one compiled rollout serves all ranks."""
    train, held_out = setting.pairs("train", skip), setting.pairs("validation", skip)
    found = latent.stabilize(latent.fit_koopman(*train, rank=rank, held_out=held_out, **noise))
    dense = LowRankOperator(found.operator.matrix, jnp.eye(len(found.noise)))
    return dataclasses.replace(found, operator=dense)


def network_state(
    setting: Setting, run: Run, name: str, chosen: tuple[int, int], skip: int, *, key: Any, cost: float
) -> NeuralState:
    """A training of the network of a width for so many epochs."""
    train, held_out = setting.pairs("train", skip), setting.pairs("validation", skip)
    settings = setting.config.neural(len(train[0]), *chosen)
    return train_network(run, name, train, held_out, settings, key=key, cost=cost)


def network(setting: Setting, state: NeuralState, chosen: tuple[int, int], skip: int, **noise: Any) -> Propagator:
    """What was trained, as a propagator."""
    train, held_out = setting.pairs("train", skip), setting.pairs("validation", skip)
    settings = setting.config.neural(len(train[0]), *chosen)
    return latent.finish_neural(state, train, held_out, settings, clip=_CLIP, **noise)


def choose_rank(setting: Setting, run: Run, *, key: Any, cost: float) -> tuple[dict[str, np.ndarray], int]:
    """Divergences of every rank, and the rank of the smallest on validation frames."""
    config = setting.config

    def body(carry: tuple, i: int) -> tuple[tuple, dict]:
        return carry, _judge(setting, koopman(setting, config.ranks[i], config.skip), jax.random.fold_in(key, i))

    _, found = run.loop(
        "ranks",
        body,
        (),
        len(config.ranks),
        cost=cost,
        log=lambda i, o: {"rank": config.ranks[i], **_line(o)},
    )
    return found, config.ranks[int(np.argmin(found["validation"]))]


def choose_network(
    setting: Setting, run: Run, *, key: Any, cost: Callable[[int, int], float]
) -> tuple[dict[str, np.ndarray], tuple[int, int]]:
    """Divergences of every width and number of epochs, and the pair with the smallest on validation frames."""
    config = setting.config
    found = []
    for i, chosen in enumerate(config.networks):
        of_training, of_rollout = jax.random.split(jax.random.fold_in(key, i))
        name = "choice-{}-{}".format(*chosen)
        half = cost(*chosen) / 2
        state = network_state(setting, run, name, chosen, config.skip, key=of_training, cost=half)

        def body(
            state: NeuralState = state, chosen: tuple[int, int] = chosen, key: Any = of_rollout
        ) -> dict[str, np.ndarray]:
            return _judge(setting, network(setting, state, chosen, config.skip), key)

        def log(_: int, judged: Any, chosen: tuple[int, int] = chosen) -> dict[str, Any]:
            return {"width": chosen[0], "epochs": chosen[1], **_line(judged)}

        found.append(run.stage(f"{name}-judged", body, cost=half, log=log))
    together = {name: np.array([one[name] for one in found]) for name in found[0]}
    return together, config.networks[int(np.argmin(together["validation"]))]


def choose_level(
    setting: Setting, run: Run, score: Any, schedule: DiffusionSchedule, *, key: Any, cost: float
) -> tuple[dict[str, np.ndarray], int, Propagator]:
    """Divergences of every noise level, the place of the smallest on validation frames, and Langevin at that level."""
    config = setting.config
    noise = np.asarray(schedule.noise)
    levels = [int(np.abs(noise - wanted).argmin()) for wanted in config.noise_levels]

    def propagator(level: int) -> Propagator:
        return latent.langevin_propagator(
            latent.denoising_score(config.diffusion),
            latent.score_parameters(score, schedule, level),
            dt=config.langevin_step,
            stride=config.stride,
            smallest_variance=1.0,
        )

    start = setting.start(setting.white, 4 * config.replicas, part="validation")
    steps = max(10, config.steps // 10)

    def body(carry: tuple, i: int) -> tuple[tuple, dict]:
        found = latent.rollout(propagator(levels[i]), start, steps, key=jax.random.fold_in(key, i), guard=1e3)
        return carry, setting.divergences(found, setting.white)

    _, sweep = run.loop(
        "noise-levels",
        body,
        (),
        len(levels),
        cost=cost,
        log=lambda i, o: {"noise_level": float(noise[levels[i]]), **_line(o)},
    )
    chosen = int(np.argmin(sweep["validation"]))
    return sweep, chosen, propagator(levels[chosen])


def _line(judged: dict[str, Any]) -> dict[str, Any]:
    # In one order: what is restored from a checkpoint comes sorted.
    return {name: judged[name] for name in ("validation", "all")}


def _judge(setting: Setting, propagator: Propagator, key: Any) -> dict[str, np.ndarray]:
    start = setting.start(setting.standard, setting.config.replicas, part="validation")
    found = latent.rollout(propagator, start, max(10, setting.config.steps // 4), key=key, guard=1e3)
    return setting.divergences(found, setting.standard)
