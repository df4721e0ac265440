"""``jaxlab molecule simulate``: a surrogate trajectory of a molecule, learnt from a recorded one.

Reads a topology and trajectories, trains an LD-FPG autoencoder and one propagator of its latents (arXiv 2509.02196),
and writes a rollout from the last recorded frame as DCD with a PDB beside it, metrics as JSON and a figure. Heavy atoms
only. The run shows its progress and goes on from where it was stopped with ``--resume``.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxlab.dynamics import latent, molecules
from jaxlab.dynamics.latent import DiffusionSchedule, DiffusionSettings, NeuralSettings, Propagator
from jaxlab.dynamics.molecules import Autoencoder, AutoencoderSettings, Trajectory
from jaxlab.experiments.base import PRESETS, Experiment, Run
from jaxlab.experiments.gldp.judging import cut, kinetics
from jaxlab.experiments.gldp.training import train_autoencoder, train_network, train_score
from jaxlab.experiments.outcome import execute
from jaxlab.experiments.report import Watch

__all__ = ["main"]

_FILES = ("rollout.dcd", "rollout.pdb", "metrics.json", "simulation.png")
_ROLLOUT_CHUNK = 1000  # steps in one call
_JUDGED = 2000  # frames of the figure's curves, at most
_LEVEL = 0.37  # noise level of the score
_STILL = 1e-3  # angstrom, the precision of XTC


@dataclass(frozen=True)
class Config:
    """What a simulation is made of; stored in ``config.json``, so that ``--resume`` continues the same one."""

    top: str = ""
    traj: tuple[str, ...] = ()
    propagator: Literal["neural", "koopman", "langevin"] = "neural"
    frames: int = 10000
    skip: int = 1
    stride: int = 1
    pool: tuple[int, int] = (50, 2)
    residues: bool = False
    width: int = 128
    encoder_steps: int = 3000
    decoder_steps: int = 4000
    network: int = 512
    epochs: int = 50
    score_steps: int = 6000
    noise_level: float = _LEVEL


def main(arguments: Sequence[str]) -> int:
    """Parse the words after ``jaxlab molecule``, train, simulate, write four files.

    Raises:
      OSError: a file that cannot be read.
      ValueError: bad input, one line.
    """
    parser = _parser()
    try:
        options = parser.parse_args(arguments or ["--help"])
    except SystemExit:  # the help was printed
        return 0
    config = Config(
        top=str(options.top),
        traj=tuple(map(str, options.traj)),
        **{
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(Config)
            if field.name not in ("top", "traj", "pool")
        },
        pool=tuple(options.pool or ((1, 3) if options.residues else (50, 2))),
    )
    _check(config)
    work = Experiment(
        name="molecule-simulate",
        summary="A surrogate trajectory.",
        claims=(),
        presets=dict.fromkeys(PRESETS, config),
        run=_simulate,
        shapes=lambda config: (),
    )
    with Watch(Console(stderr=True)) as watch:
        outcome = execute(
            work,
            config=config,
            seed=options.seed,
            out=options.out,
            resume=options.resume,
            overwrite=options.overwrite,
            progress=watch,
        )
    if outcome.exit_status == 130:
        print("jaxlab: interrupted; to continue: the same command with --resume", file=sys.stderr)
        return 130
    columns = min(shutil.get_terminal_size().columns, 120)
    for note in outcome.result["notes"]:
        print(textwrap.fill(note, columns, break_long_words=False))
    for name in _FILES:
        print(options.out / name)
    return 0


def _check(config: Config) -> None:
    sizes = ("frames", "skip", "stride", "width", "encoder_steps", "decoder_steps", "network", "epochs", "score_steps")
    for name in sizes:
        if getattr(config, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(config, name)}")
    if min(config.pool) < 1:
        raise ValueError(f"--pool takes two sizes of at least 1, got {config.pool[0]} {config.pool[1]}")
    if not 0 < config.noise_level < 1:
        raise ValueError(f"--noise-level must be in (0, 1), got {config.noise_level}")


def _simulate(config: Config, run: Run) -> None:
    trajectory = molecules.read_trajectory(config.top, config.traj, stride=config.stride)
    total, atoms = trajectory.frames.shape[:2]
    pieces = _split(trajectory, config.skip)
    settings = AutoencoderSettings(
        hidden_size=8,
        # No more bins than there are places.
        pooled=(config.pool[0] if config.residues else min(config.pool[0], atoms), min(config.pool[1], 8)),
        pooling="residue" if config.residues else "blind",
        decoder_layers=6,
        decoder_width=config.width,
        encoder_learning_rate=2e-3,
        decoder_learning_rate=1e-3,
        # About as many rows in a batch whatever the molecule.
        batch_size=max(2, min(64, 20_000 // atoms)),
    )
    rows = settings.batch_size * atoms
    costs = {
        "encoder": 4e-6 * rows * config.encoder_steps,
        "decoder": 4e-10 * rows * config.width**2 * config.decoder_steps,
        "fit": {
            "neural": 4e-8 * config.network**2 * config.epochs * total / 100,
            "langevin": 4e-8 * 256**2 * config.score_steps,
            "koopman": 0.0,
        }[config.propagator],
        "rollout": 1e-3 * config.frames,
    }
    run.plan(sum(costs.values()))
    keys = dict(zip(costs, jax.random.split(run.key, len(costs)), strict=True))
    training = np.concatenate([trajectory.frames[piece] for piece in pieces["train"]])
    molecule = molecules.prepare_frames(training, residues=trajectory.residues, settings=settings)
    if float(molecules.root_mean_square_fluctuation(molecule.x).max()) < _STILL:
        raise ValueError(
            f"no atom moves by {_STILL} A in the {len(training)} training frames: there is nothing to learn"
        )
    autoencoder = train_autoencoder(
        run,
        molecule,
        settings,
        encoder_steps=config.encoder_steps,
        decoder_steps=config.decoder_steps,
        keys=(keys["encoder"], keys["decoder"]),
        costs=(costs["encoder"], costs["decoder"]),
    )
    del molecule, training
    z = molecules.encode(autoencoder, trajectory.frames)
    whiten = config.propagator == "langevin"
    train = np.concatenate([z[piece] for piece in pieces["train"]])
    standardizer = latent.fit_standardizer(train, mode="whiten" if whiten else "standard")
    u = np.asarray(standardizer.forward(z))
    propagator = _fit(config, run, u, pieces, keys["fit"], costs["fit"])
    path = _roll(config, run, propagator, u[-1:], keys["rollout"], costs["rollout"])
    if len(path) == 0:
        raise ValueError("the rollout diverged in its first step; take another --propagator, or more frames")
    frames = molecules.decode(autoencoder, np.asarray(standardizer.inverse(path)))
    molecules.write_trajectory(run.out / _FILES[0], trajectory, frames)
    _judge(config, run, trajectory, autoencoder, z, frames)


def _split(trajectory: Trajectory, skip: int) -> dict[str, list[slice]]:
    total = len(trajectory.frames)
    bounds = {"train": (0, round(0.8 * total)), "validation": (round(0.8 * total), total)}
    pieces = {part: cut(trajectory.lengths, *ends) for part, ends in bounds.items()}
    for part, slices in pieces.items():
        longest = max((piece.stop - piece.start for piece in slices), default=0)
        # Two pairs at least: noise is calibrated on them.
        if longest < skip + 2:
            raise ValueError(
                f"steps of {skip} frames need at least {skip + 2} frames in one piece for {part}, there are {longest} "
                f"of {total}: give a longer trajectory or a smaller --skip"
            )
    return pieces


def _fit(config: Config, run: Run, u: np.ndarray, pieces: dict[str, list[slice]], key: Any, cost: float) -> Propagator:
    cuts = [[u[piece] for piece in pieces[part]] for part in ("train", "validation")]
    train, held_out = (latent.snapshot_pairs(cut, skip=config.skip) for cut in cuts)
    if config.propagator == "koopman":
        return latent.stabilize(latent.fit_koopman(*train, held_out=held_out))
    if config.propagator == "neural":
        settings = NeuralSettings(hidden_size=config.network, learning_rate=1e-3, batch_size=256, epochs=config.epochs)
        decay = config.epochs * max(1, len(train[0]) // settings.batch_size)
        settings = dataclasses.replace(settings, decay_steps=decay)
        state = train_network(run, "neural", train, held_out, settings, key=key, cost=cost)
        return latent.finish_neural(state, train, held_out, settings, clip=1.2)
    schedule = DiffusionSchedule.linear()
    score = DiffusionSettings(hidden_size=256, learning_rate=1e-3, batch_size=256)
    rows = np.concatenate([u[piece] for piece in pieces["train"]])
    params = train_score(run, rows, schedule, score, steps=config.score_steps, key=key, cost=cost)
    level = int(np.abs(np.asarray(schedule.noise) - config.noise_level).argmin())
    return latent.langevin_propagator(
        latent.denoising_score(score),
        latent.score_parameters(params, schedule, level),
        dt=0.01,
        stride=20,
        smallest_variance=1.0,
    )


def _roll(config: Config, run: Run, propagator: Propagator, start: np.ndarray, key: Any, cost: float) -> np.ndarray:
    sizes = [min(_ROLLOUT_CHUNK, config.frames - done) for done in range(0, config.frames, _ROLLOUT_CHUNK)]

    def body(carry: Any, i: int) -> tuple[Any, dict]:
        # A rollout that has stopped starts again from a frozen state; what it gives is cut off below.
        found = latent.rollout(propagator, carry, sizes[i], key=jax.random.fold_in(key, i), guard=1e3)
        length = found.lengths[0]
        padded = jnp.full((_ROLLOUT_CHUNK, start.shape[1]), jnp.nan).at[: sizes[i]].set(found.path[0])
        last = jnp.where(length == sizes[i], found.path[:, -1], carry)
        return last, {"path": padded, "length": length}

    _, found = run.loop(
        "rollout",
        body,
        jnp.asarray(start),
        len(sizes),
        cost=cost,
        log=lambda i, o: {"part": "rollout", "steps": o["length"]},
    )
    pieces = []
    for size, part, length in zip(sizes, found["path"], found["length"], strict=True):
        pieces.append(part[: int(length)])
        if length < size:
            break
    return np.concatenate(pieces)


def _judge(
    config: Config, run: Run, trajectory: Trajectory, autoencoder: Autoencoder, z: np.ndarray, frames: np.ndarray
) -> None:
    """Metrics and the figure, of at most so many frames of each."""
    total = len(trajectory.frames)
    test = np.arange(round(0.8 * total), total)[:: max(1, total // 5 // _JUDGED)]
    recorded = np.asarray(molecules.align(trajectory.frames[test], autoencoder.reference))
    decoded = molecules.decode(autoencoder, z[test])
    numbers: dict[str, Any] = {
        "propagator": config.propagator,
        "frames": len(frames),
        "finite": len(frames) == config.frames,
        "reconstruction_rmsd": float(molecules.root_mean_square_deviation(decoded, recorded).mean()),
    }
    real = trajectory.frames[:: max(1, total // _JUDGED)]
    some = slice(None, None, max(1, len(frames) // _JUDGED))
    rolled = np.asarray(molecules.align(frames[some], autoencoder.reference))
    real = np.asarray(molecules.align(real, autoencoder.reference))
    backbone = trajectory.backbone
    for name, chosen in (("backbone", backbone), ("other", ~backbone)):
        if chosen.any():
            apart = latent.coordinate_divergence(rolled[:, chosen], real[:, chosen])
            numbers[f"coordinate_divergence_{name}"] = float(apart)
    fluctuation = [np.asarray(molecules.root_mean_square_fluctuation(x)).mean() for x in (rolled, real)]
    numbers["rmsf_ratio"] = float(fluctuation[0] / fluctuation[1])
    numbers["contact_correlation"] = molecules.contact_correlation(rolled, real, trajectory.residues)
    scores = np.asarray(molecules.lddt(rolled, trajectory.frames[-1]))
    numbers["lddt_smallest"], numbers["failure_step"] = float(scores.min()), molecules.failure_step(scores) * some.step
    # A molecule without backbone dihedrals is followed by the distances of its atoms from the centre.
    kinds = [kind for kind in ("phi", "psi") if kind in trajectory.dihedrals]
    maps: dict[str, np.ndarray] = {}
    if len(kinds) == 2:
        quadruples = np.concatenate([trajectory.dihedrals[kind] for kind in kinds])
        angles = {"MD": trajectory.frames, config.propagator: frames}
        angles = {name: np.asarray(molecules.dihedrals(x, quadruples)) for name, x in angles.items()}
        pairs = min(len(trajectory.dihedrals[kind]) for kind in kinds)
        for name, values in angles.items():
            phi, psi = np.split(values, [len(trajectory.dihedrals["phi"])], axis=1)
            maps[name] = np.stack([phi[:, :pairs].ravel(), psi[:, :pairs].ravel()], axis=1)
        numbers["phi_psi_divergence"] = float(latent.histogram_divergence_2d(*maps.values()))
        features = {
            name: np.asarray(molecules.periodic_features(jnp.asarray(values))) for name, values in angles.items()
        }
    else:
        features = {
            name: np.linalg.norm(x - x.mean(1, keepdims=True), axis=2)
            for name, x in (("MD", trajectory.frames), (config.propagator, frames))
        }
    curves = {}
    for name, step in (("MD", 1), (config.propagator, config.skip)):
        pieces = np.split(features[name], np.cumsum(trajectory.lengths)[:-1]) if name == "MD" else [features[name]]
        found = kinetics(pieces, lag=max(1, total // 1000 // step), lags=max(2, total // 20 // step))
        key = "md" if name == "MD" else "rollout"
        numbers[f"t1_{key}"], numbers[f"decorrelation_{key}"] = (
            float(found[what]) * step for what in ("t1", "decorrelation")
        )
        curves[name] = np.asarray(found["correlation"])
    text = {name: None if isinstance(v, float) and not np.isfinite(v) else v for name, v in numbers.items()}
    (run.out / _FILES[2]).write_text(json.dumps(text, indent=2, allow_nan=False) + "\n")
    _plot(run.out / _FILES[3], maps, scores, curves, some.step, total // 20)
    if len(frames) < config.frames:
        run.note(f"The rollout diverged after {len(frames)} of {config.frames} steps; the files hold those.")
    run.note(
        f"{len(frames)} frames by {config.propagator}; reconstruction {numbers['reconstruction_rmsd']:.3f} A, "
        f"RMSF {numbers['rmsf_ratio']:.2f} of the recorded, slowest time {numbers['t1_rollout']:.3g} against "
        f"{numbers['t1_md']:.3g} recorded frames" + (" (its own clock)." if config.propagator == "langevin" else ".")
    )


def _plot(
    path: Path,
    maps: dict[str, np.ndarray],
    scores: np.ndarray,
    curves: dict[str, np.ndarray],
    every: int,
    span: int,
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * (len(maps) + 2), 3), layout="constrained")
    *panels, local, correlation = figure.subplots(ncols=len(maps) + 2)
    for panel, (name, angles) in zip(panels, maps.items(), strict=True):
        edges = np.linspace(-180, 180, 49)
        phi, psi = np.degrees(angles).T
        counts, _, _ = np.histogram2d(phi, psi, bins=[edges, edges])
        with np.errstate(divide="ignore"):
            energy = np.log(counts.max()) - np.log(counts.T)
        shown = np.where(np.isfinite(energy), energy, np.nan)
        panel.imshow(shown, origin="lower", extent=(-180, 180, -180, 180), vmin=0, vmax=8)
        panel.set_title(f"{name}: free energy")
        panel.set_xlabel("phi (degrees)")
        panel.set_ylabel("psi (degrees)")
    local.plot(every * np.arange(len(scores)), scores, linewidth=0.7)
    local.axhline(0.65, color="black", linestyle="--", linewidth=1)
    local.set_xlabel("step")
    local.set_ylabel("lDDT to the starting frame")
    for name, curve in curves.items():
        correlation.plot(np.linspace(0, span, len(curve)), curve, label=name)
    correlation.axhline(np.exp(-1), color="black", linestyle="--", linewidth=1)
    correlation.set_xlabel("lag (recorded frames)")
    correlation.set_ylabel("autocorrelation of TIC 1")
    correlation.legend(fontsize=8)
    FigureCanvasAgg(figure).print_figure(path, dpi=150)


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; see jaxlab molecule simulate --help")

    parser = Parser(prog="jaxlab molecule", description="Learn the dynamics of a molecule.")
    verbs = parser.add_subparsers(required=True, metavar="simulate", parser_class=Parser)
    verb = verbs.add_parser("simulate", help="a surrogate trajectory, from a recorded one")
    verb.add_argument("--top", type=Path, required=True, help="topology: .pdb or .psf")
    verb.add_argument("--traj", type=Path, nargs="+", required=True, help="trajectories in time order: .dcd, .xtc")
    verb.add_argument("--propagator", choices=("neural", "koopman", "langevin"), default="neural")
    verb.add_argument("--frames", type=int, default=10000, help="frames to simulate (default 10000)")
    verb.add_argument("--out", type=Path, default=Path("simulation"), help="folder to write (default ./simulation)")
    verb.add_argument("--skip", type=int, default=1, help="recorded frames that one step spans (default 1)")
    verb.add_argument("--stride", type=int, default=1, help="read every so many frames (default 1)")
    verb.add_argument("--pool", type=int, nargs=2, help="rows and columns of a latent (default 50 2)")
    verb.add_argument(
        "--residues", action="store_true", help="pool each residue apart; --pool is of one residue then (default 1 3)"
    )
    verb.add_argument("--width", type=int, default=128, help="of the decoder (default 128)")
    verb.add_argument("--encoder-steps", type=int, default=3000, help="training steps (default 3000)")
    verb.add_argument("--decoder-steps", type=int, default=4000, help="training steps (default 4000)")
    verb.add_argument("--network", type=int, default=512, help="width of --propagator neural (default 512)")
    verb.add_argument("--epochs", type=int, default=50, help="of --propagator neural (default 50)")
    verb.add_argument("--score-steps", type=int, default=6000, help="of --propagator langevin (default 6000)")
    verb.add_argument("--noise-level", type=float, default=_LEVEL, help=f"of its score (default {_LEVEL})")
    verb.add_argument("--seed", type=int, default=0)
    verb.add_argument("--resume", action="store_true", help="continue the run in --out")
    verb.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    return parser
