"""Steps per second of the three latent propagators: jaxlab's scanned rollout against a PyTorch loop over steps.

    python benchmarks/dynamics_rollout.py [--replicas 1 64] [--steps 10000] [--width 20] [--hidden 512] [--stride 5]
        [--propagators koopman neural langevin] [--repeats 3] [--out FILE]

Both sides have the same matrices and networks (random, of the paper's sizes), draw their own noise, and keep every
state. torch is timed batched over the replicas and, as the published programs do it, one replica after another: a
row "torch, one by one", which is extrapolated from a single replica. That both do the same work is checked on 20 steps
with the same noise; if it is not the same, the script ends with an error. The table also says what the matrix products
of a step cost alone (``products``), as many of them in one scan without noise or bookkeeping: no rollout on the same
device can be faster than that. Compile time is apart.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Timing, device_name, measure, print_table, write_json

from jaxlab.dynamics import latent
from jaxlab.dynamics.latent import DiffusionSettings, KoopmanPropagator, NeuralPropagator, NeuralSettings, Propagator
from jaxlab.dynamics.reduced_rank import LowRankOperator

__all__ = ["TOLERANCE", "check_same_work", "main"]

# Largest difference of a state over the range of the states, after 20 steps in float32.
TOLERANCE = 1e-4
PROPAGATORS = ("koopman", "neural", "langevin")
_LEVEL = 400
_DT = 0.01


def propagators(width: int, hidden: int, stride: int) -> dict[str, Propagator]:
    """One of each, with weights drawn so that rollouts stay bounded."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(width, width))
    matrix *= 0.9 / np.abs(np.linalg.eigvals(matrix)).max()
    factor = jnp.asarray(0.3 * np.eye(width) + 0.02 * rng.normal(size=(width, width)), jnp.float32)
    settings = NeuralSettings(hidden_size=hidden)
    params = latent.start_neural(jax.random.key(0), width, settings).best_params
    params[-1]["kernel"] = -0.5 * params[0]["kernel"].T[:, :width] / max(hidden, 1)
    pairs = (np.eye(width, dtype=np.float32),) * 2
    state = latent.start_neural(jax.random.key(0), width, settings, params=params)
    neural = latent.finish_neural(state._replace(best_loss=jnp.ones(())), pairs, pairs, settings)
    assert isinstance(neural, NeuralPropagator)
    diffusion = DiffusionSettings(hidden_size=hidden)
    score = latent.start_diffusion(jax.random.key(1), width, diffusion).params
    schedule = latent.DiffusionSchedule.linear()
    return {
        "koopman": KoopmanPropagator(
            operator=LowRankOperator(jnp.asarray(matrix.T, jnp.float32), jnp.eye(width)), noise=factor
        ),
        "neural": neural.replace(noise=factor),
        "langevin": latent.langevin_propagator(
            latent.denoising_score(diffusion), latent.score_parameters(score, schedule, _LEVEL), dt=_DT, stride=stride
        ),
    }


def torch_step(peer: ModuleType, name: str, propagator: Any) -> Callable:
    """The same propagator in torch."""
    if name == "koopman":
        return peer.koopman(np.asarray(propagator.operator.matrix.T), np.asarray(propagator.noise))
    if name == "neural":
        return peer.neural(propagator.params, np.asarray(propagator.noise))
    params = propagator.params
    return peer.langevin(params["network"], time=float(params["time"]), level=float(params["noise"]), dt=_DT)


def products(name: str, propagator: Any, start: np.ndarray, steps: int) -> Callable[[], Any]:
    """The matrix products of a rollout and nothing else."""
    network = {"koopman": lambda z: propagator.mean(z), "neural": lambda z: propagator.mean(z)}.get(
        name, lambda z: z + propagator.drift(z)
    )
    run = jax.jit(lambda z: jax.lax.scan(lambda z, _: (network(z), None), z, length=steps * propagator.draws)[0])
    return lambda: run(jnp.asarray(start))


def check_same_work(name: str, found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the range of what is expected; stops the script if that is above the tolerance."""
    difference = float(np.abs(found - expected).max() / np.ptp(expected))
    if not difference <= TOLERANCE:
        raise SystemExit(f"{name}: the rollouts of jaxlab and torch differ by {difference:.1e} of their range")
    return difference


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison, print a table, write the JSON file."""
    options = _parse(arguments)
    peer = _peer()
    rows: list[dict[str, Any]] = []
    for name, propagator in propagators(options.width, options.hidden, options.stride).items():
        if name in options.propagators:
            for replicas in options.replicas:
                rows += _compare(name, propagator, replicas, options, peer)
    print_table(
        f"{options.steps} steps, {options.width} latents, on {device_name()}",
        ("", "replicas", "compile s", "us/step", "± ", "times torch"),
        [_cells(row) for row in rows],
    )
    if options.out:
        facts = {name: getattr(options, name) for name in ("steps", "width", "hidden", "stride")}
        write_json(options.out, "dynamics_rollout", rows=rows, tolerance=TOLERANCE, **facts)


def _compare(
    name: str, propagator: Propagator, replicas: int, options: argparse.Namespace, peer: ModuleType | None
) -> list[dict[str, Any]]:
    start = np.random.default_rng(replicas).normal(size=(replicas, options.width)).astype(np.float32)
    key = jax.random.key(0)
    steps = options.steps

    def row(implementation: str, timing: Timing, *, compiles: bool = True, factor: int = 1) -> dict[str, Any]:
        seconds = factor * np.array(timing.runs) / steps
        return {
            "implementation": implementation,
            "propagator": name,
            "replicas": replicas,
            "compile_seconds": timing.compile if compiles else 0.0,
            "seconds_per_step": float(seconds.mean()),
            "seconds_per_step_std": float(seconds.std()),
        }

    timing, _ = measure(lambda: latent.rollout(propagator, start, steps, key=key).path, repeats=options.repeats)
    ours = row("jaxlab", timing)
    floor, _ = measure(products(name, propagator, start, steps), repeats=options.repeats)
    rows = [ours, row("products", floor)]
    if peer is None:
        return rows
    step = torch_step(peer, name, propagator)
    noise = np.random.default_rng(1).normal(size=(20, propagator.draws, *start.shape)).astype(np.float32)
    z, path = jnp.asarray(start), []
    for drawn in noise:
        z = propagator.step(z, jnp.asarray(drawn))
        path.append(np.asarray(z))
    ours["difference"] = check_same_work(
        name, np.stack(path, axis=1), peer.roll(step, start, 20, propagator.draws, noise)
    )
    timing, _ = measure(lambda: peer.roll(step, start, steps, propagator.draws), repeats=options.repeats)
    rows.insert(0, row(f"torch on {peer.DEVICE}", timing, compiles=False))
    ours["times_torch"] = rows[0]["seconds_per_step"] / ours["seconds_per_step"]
    if replicas > 1:
        one, _ = measure(lambda: peer.roll(step, start[:1], steps, propagator.draws), repeats=options.repeats)
        rows.insert(1, row("torch, one by one", one, compiles=False, factor=replicas))
        ours["times_torch_one_by_one"] = rows[1]["seconds_per_step"] / ours["seconds_per_step"]
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['propagator']}, {row['implementation']}",
        str(row["replicas"]),
        f"{row['compile_seconds']:.2f}" if row["compile_seconds"] else "",
        f"{1e6 * row['seconds_per_step']:.1f}",
        f"{1e6 * row['seconds_per_step_std']:.1f}",
        " / ".join(f"{row[n]:.1f}" for n in ("times_torch", "times_torch_one_by_one") if n in row),
    )


def _peer() -> ModuleType | None:
    try:
        import torch_rollout
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("torch is not installed (extra 'peers'): only jaxlab is measured")
        return None
    return torch_rollout


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=20, help="of a latent")
    parser.add_argument("--hidden", type=int, default=512, help="width of both networks")
    parser.add_argument("--stride", type=int, default=5, help="Langevin steps in one")
    parser.add_argument("--propagators", nargs="+", choices=PROPAGATORS, default=list(PROPAGATORS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    for name, value in (
        ("replicas", min(options.replicas)),
        *((name, getattr(options, name)) for name in ("steps", "width", "hidden", "stride", "repeats")),
    ):
        if value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if options.hidden < options.width:
        parser.error(f"--hidden must be at least --width, got {options.hidden} and {options.width}")
    return options


if __name__ == "__main__":
    main()
