r"""Latent propagators on alanine dipeptide: what the paper promises, measured.

Sengar et al., arXiv 2509.02196. An LD-FPG autoencoder is trained on 70 % of a trajectory; three propagators are fitted
on its latents, with a further 10 % to stop, to calibrate noise and to choose what is chosen (Koopman's rank, the
network's width and epochs, the noise level of the score: `jaxlab.experiments.gldp.choosing`); long rollouts from frames
of the last 20 % are decoded and compared with all of the simulation. The trajectory is the one in
``$JAXLAB_DATA/alanine_dipeptide`` (20 000 frames, 1 ps apart, 300 K), and otherwise simulated with OpenMM (0.2 ps, 350
K).

Choices that the paper does not make:

1. All rollouts have full calibrated noise and all frames are the reference; the divergence of the two halves of the
   trajectory is the noise floor of a rollout.
2. The floor of the autoencoder is another one. It is given the test frames and returns each of them, so that a perfect
   one has a divergence of zero from them, and what slow motion makes of their populations is in both maps alike: a
   floor made of other frames (the halves, the training frames) would hold that difference, which the autoencoder never
   sees, and be too lenient. What remains is the number of frames: a perfect sampler of the ensemble of the test frames,
   asked for as many, draws n of them independently. Its counts are multinomial, and over the K bins of any probability

   .. math::
       E\, \mathrm{JSD}(p, \hat p_n) = \frac{1}{8} \sum_i \frac{\mathrm{Var}\, \hat p_i}{p_i} + O(n^{-2})
       = \frac{K - 1}{8 n} + O(n^{-2}),

   the smallest error that any n frames but the test frames themselves show; of two finite samples it would be twice
   that, of frames correlated in time more. The claim is that the autoencoder loses less than sampling does. Since bins
   of a few frames do not follow the expansion, the mean over resamples is taken and not the formula.
3. The network's learning rate decays, for at a constant one the populations of the two basins differ by more between
   seeds than between methods. A decaying rate of the autoencoder was tried at ``quick`` and is worse there.
4. The network's states are kept in a box of 1.2 times the training range: what it was never shown it extrapolates, and
   one training in some then runs away. Linear and Langevin dynamics have no such guard.
5. Times are in frames of the trajectory; Langevin's clock is arbitrary and only its ensemble is judged.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.dynamics import latent, molecules
from jaxlab.dynamics.latent import (
    DiffusionSchedule,
    NeuralState,
    Propagator,
    Standardizer,
)
from jaxlab.dynamics.molecules.alanine_dipeptide import load_alanine_dipeptide
from jaxlab.experiments.base import Experiment, Run
from jaxlab.experiments.gldp.choosing import (
    choose_level,
    choose_network,
    choose_rank,
    koopman,
    network,
    network_state,
)
from jaxlab.experiments.gldp.config import CLAIMS, PRESETS, Config
from jaxlab.experiments.gldp.judging import (
    BINS,
    METRICS,
    ROLLOUT_METRICS,
    Reference,
    Setting,
    angles,
    cut,
    judge_frames,
    kinetics,
    sampling_floor,
)
from jaxlab.experiments.gldp.reporting import Choices, report
from jaxlab.experiments.gldp.training import train_autoencoder, train_score

__all__ = ["EXPERIMENT", "Config"]

_COLLAPSED = 0.01  # a standard deviation of the released code


def run(config: Config, run: Run) -> None:
    """Measure every claim."""
    trajectory, spacing = load_alanine_dipeptide(config.frames, seed=0)
    costs = _costs(config)
    run.plan(sum(costs.values()))
    keys = dict(zip(costs, jax.random.split(run.key, len(costs)), strict=True))
    total = len(trajectory.frames)
    bounds = {"train": (0, 0.7), "validation": (0.7, 0.8), "test": (0.8, 1.0)}
    pieces = {
        part: cut(trajectory.lengths, round(begin * total), round(end * total)) for part, (begin, end) in bounds.items()
    }
    training = np.concatenate([trajectory.frames[piece] for piece in pieces["train"]])
    molecule = molecules.prepare_frames(training, residues=trajectory.residues, settings=config.autoencoder)
    autoencoder = train_autoencoder(
        run,
        molecule,
        config.autoencoder,
        encoder_steps=config.encoder_steps,
        decoder_steps=config.decoder_steps,
        keys=(keys["encoder"], keys["decoder"]),
        costs=(costs["encoder"], costs["decoder"]),
    )
    z = molecules.encode(autoencoder, trajectory.frames)
    train = np.concatenate([z[piece] for piece in pieces["train"]])
    lags = max(4, min(round(400 / spacing), total // 20))
    reference = Reference(
        trajectory=trajectory,
        aligned=np.asarray(molecules.align(trajectory.frames, autoencoder.reference)),
        lag=max(1, min(round(10 / spacing), total // 100)),
        lags=lags,
    )
    setting = Setting(
        config=config,
        reference=reference,
        autoencoder=autoencoder,
        standard=latent.fit_standardizer(train),
        white=latent.fit_standardizer(train, mode="whiten"),
        pieces=pieces,
        z=z,
    )
    recorded = _recorded(setting)
    _judge_autoencoder(run, setting, recorded)
    _, rank = choose_rank(setting, run, key=keys["ranks"], cost=costs["ranks"])
    _, size = choose_network(
        setting, run, key=keys["networks"], cost=lambda width, epochs: _training_cost(config, width, epochs)
    )
    share = costs["neural"] / config.seeds
    states = [
        network_state(
            setting, run, f"neural-{k}", size, config.skip, key=jax.random.fold_in(keys["neural"], k), cost=share
        )
        for k in range(config.seeds)
    ]
    schedule = DiffusionSchedule.linear()
    score = train_score(
        run,
        np.asarray(setting.white.forward(train)),
        schedule,
        config.diffusion,
        steps=config.score_steps,
        key=keys["score"],
        cost=costs["score"],
    )
    sweep, level, langevin = choose_level(setting, run, score, schedule, key=keys["levels"], cost=costs["levels"])
    choices = Choices(rank=rank, network=size, level=level, sweep=sweep)
    found = _rollouts(setting, run, choices, states, langevin, keys["rollouts"], costs["rollouts"])
    independent = _independent(setting, score, schedule, train, keys["independent"])
    search = _search(setting, run, choices, keys["search"], costs["search"]) if config.skips else {}
    report(setting, run, recorded, found, independent, choices, search, spacing)


def _training_cost(config: Config, width: int, epochs: int) -> float:
    return 1 + 4e-8 * width**2 * epochs * config.frames / 100


def _costs(config: Config) -> dict[str, float]:
    """Seconds of a quiet core, roughly."""
    rows = config.replicas * config.steps
    largest = _training_cost(config, max(config.widths), max(config.epochs))
    costs = {
        "encoder": 0.003 * config.encoder_steps,
        "decoder": 0.01 * config.decoder_steps,
        "ranks": 0.5 * len(config.ranks),
        "networks": sum(_training_cost(config, *size) for size in config.networks),
        "neural": config.seeds * largest,
        "score": 4e-8 * config.score_network**2 * config.score_steps,
        "levels": 2e-5 * config.steps * config.stride * len(config.noise_levels) / 8,
        "rollouts": (config.seeds + 3) * (3 + 1e-5 * rows) + 2e-5 * config.steps * config.stride,
        "independent": 0.0,
    }
    if config.skips:
        costs["search"] = len(config.skips) * (3 + largest)
    return costs


def _recorded(setting: Setting) -> dict[str, Any]:
    """The simulation itself: its kinetics, and how far its halves are apart."""
    reference = setting.reference
    features = [
        np.asarray(molecules.periodic_features(jnp.asarray(reference.angles[piece])))
        for piece in cut(reference.trajectory.lengths, 0, len(reference.angles))
    ]
    first, second = latent.halves(reference.angles)
    return {
        "halves": float(latent.histogram_divergence_2d(first, second)),
        "kinetics": kinetics(features, lag=reference.lag, lags=reference.lags),
        "lddt": np.asarray(molecules.lddt(reference.aligned[: setting.config.steps], reference.aligned[0])),
        "metrics": judge_frames(reference, reference.aligned),
    }


def _judge_autoencoder(run: Run, setting: Setting, recorded: dict[str, Any]) -> None:
    test = np.concatenate([np.arange(piece.start, piece.stop) for piece in setting.pieces["test"]])
    decoded = molecules.decode(setting.autoencoder, setting.z)
    error = float(molecules.root_mean_square_deviation(decoded[test], setting.reference.aligned[test]).mean())
    floor = sampling_floor(setting.reference.angles[test])
    found = judge_frames(setting.reference, decoded)
    recorded["reconstruction"] = found
    divergence = float(
        latent.histogram_divergence_2d(
            angles(setting.reference.trajectory, decoded[test]), setting.angles("test"), bins=BINS
        )
    )
    run.measure("autoencoder_is_faithful", max(error / 0.2, divergence / floor))
    run.row("reconstruction", rmsd=error, **{name: float(found[name]) for name in METRICS})
    run.note(
        f"Autoencoder on test frames: {error:.3f} A, divergence {divergence:.4f} against {floor:.4f} of a "
        "perfect sampler."
    )


def _rollouts(
    setting: Setting,
    run: Run,
    choices: Choices,
    states: Sequence[NeuralState],
    langevin: Propagator,
    key: Any,
    cost: float,
) -> dict[str, dict[str, np.ndarray]]:
    """Every propagator, and two of them with the small noise of the released code."""
    config = setting.config
    skip, standard, fixed = config.skip, setting.standard, {"noise": "fixed", "sigma": _COLLAPSED}
    jobs: list[tuple[str, Propagator, Standardizer]] = [
        ("koopman", koopman(setting, choices.rank, skip), standard),
        *((f"neural_{k}", network(setting, state, choices.network, skip), standard) for k, state in enumerate(states)),
        ("langevin", langevin, setting.white),
        ("koopman_small_noise", koopman(setting, choices.rank, skip, **fixed), standard),
        ("neural_small_noise", network(setting, states[0], choices.network, skip, **fixed), standard),
    ]

    def body(carry: tuple, i: int) -> tuple[tuple, dict]:
        _name, propagator, standardizer = jobs[i]
        start = setting.start(standardizer, config.replicas)
        # Two independent rollouts of Koopman would differ by less than its distance to the others.
        found = latent.rollout(propagator, start, config.steps, key=jax.random.fold_in(key, i), guard=1e3)
        return carry, setting.judge(found, standardizer, skip=skip)

    _, found = run.loop(
        "rollouts",
        body,
        (),
        len(jobs),
        cost=cost,
        log=lambda i, o: {"propagator": jobs[i][0], **{name: o[name] for name in ROLLOUT_METRICS}},
    )
    return {name: {metric: values[i] for metric, values in found.items()} for i, (name, _, _) in enumerate(jobs)}


def _independent(
    setting: Setting, score: Any, schedule: DiffusionSchedule, train: np.ndarray, key: Any
) -> dict[str, dict[str, np.ndarray]]:
    """Ensembles without dynamics: a Gaussian, and the diffusion model itself."""
    count = min(setting.config.decoded, 2000)
    of_gaussian, of_diffusion = jax.random.split(key)
    u = np.asarray(setting.white.forward(train))
    samples = {
        "gaussian_samples": latent.gaussian_samples(of_gaussian, u, count),
        "diffusion_samples": latent.ancestral_samples(
            of_diffusion, score, schedule, count, u.shape[1], setting.config.diffusion
        ),
    }
    found = {}
    for name, drawn in samples.items():
        frames = molecules.decode(setting.autoencoder, np.asarray(setting.white.inverse(drawn)))
        found[name] = judge_frames(
            setting.reference, np.asarray(molecules.align(frames, setting.autoencoder.reference))
        )
    return found


def _search(setting: Setting, run: Run, choices: Choices, key: Any, cost: float) -> dict[str, np.ndarray]:
    """The slowest time of rollouts whose step spans more and more frames, with the sizes chosen for one step."""
    config = setting.config
    longest = min(piece.stop - piece.start for piece in setting.pieces["validation"])
    skips = [skip for skip in config.skips if skip < longest]
    share = cost / max(1, len(config.skips))
    half = share / 2
    results: dict[str, list[np.ndarray]] = {"koopman": [], "neural": [], "jsd_koopman": [], "jsd_neural": []}
    for skip in config.skips:
        if skip not in skips:
            raise ValueError(f"skips must be below the {longest} validation frames, got {skip}")
        of_skip = jax.random.fold_in(key, skip)
        state = network_state(setting, run, f"search-{skip}", choices.network, skip, key=of_skip, cost=half)

        def body(skip: int = skip, state: NeuralState = state) -> dict[str, np.ndarray]:
            out: dict[str, np.ndarray] = {}
            for name, propagator in (
                ("koopman", koopman(setting, choices.rank, skip)),
                ("neural", network(setting, state, choices.network, skip)),
            ):
                start = setting.start(setting.standard, config.replicas)
                steps = max(10, config.steps // 4)
                found = latent.rollout(propagator, start, steps, key=jax.random.fold_in(key, skip), guard=1e3)
                judged = setting.judge(found, setting.standard, skip=skip)
                out |= {name: judged["t1"], f"jsd_{name}": judged["jsd"]}
            return out

        def log(_: int, found: dict[str, np.ndarray], skip: int = skip) -> dict[str, Any]:
            return {"skip": skip, **{name: found[name] for name in results}}

        found = run.stage(f"kinetics-{skip}", body, cost=share - half, log=log)
        for name, values in results.items():
            values.append(found[name])
    return {name: np.array(values) for name, values in results.items()}


def _shapes(config: Config) -> Any:
    """Latents, the states of the trainings, and a rollout of a protein's size."""
    atoms = 2300
    settings = config.autoencoder

    def build(key: Any) -> Any:
        from jaxlab.dynamics.molecules.autoencoder import decode_frames, init_decoder, init_encoder

        params, statistics = init_decoder(key, settings, settings.pooled[0] * settings.pooled[1])
        z = jnp.zeros((config.batch, settings.pooled[0] * settings.pooled[1]))
        frames, _ = decode_frames(params, statistics, z, jnp.zeros((atoms, config.hidden)))
        state = latent.start_neural(key, z.shape[1], config.neural(config.frames, *config.networks[-1]))
        score = latent.start_diffusion(key, z.shape[1], config.diffusion)
        return {"encoder": init_encoder(key, settings), "frames": frames, "neural": state, "score": score.params}

    return jax.eval_shape(build, jax.random.key(0))


EXPERIMENT = Experiment(
    name="gldp",
    summary="Three latent propagators of alanine dipeptide against its simulation.",
    claims=CLAIMS,
    presets=PRESETS,
    run=run,
    shapes=_shapes,
)
