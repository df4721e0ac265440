"""What an ensemble of frames is compared with, and by which numbers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.dynamics import latent, molecules
from jaxlab.dynamics.latent import Rollout, Standardizer
from jaxlab.dynamics.molecules import Autoencoder, Trajectory
from jaxlab.experiments.gldp.config import Config

__all__ = ["BINS", "METRICS", "ROLLOUT_METRICS", "Reference", "Setting", "cut", "judge_frames", "judge_rollout"]

BINS = 36
METRICS = ("jsd", "jsd_phi", "jsd_psi", "jsd_backbone", "jsd_other", "rmsf_ratio")
ROLLOUT_METRICS = (*METRICS, "finite", "lddt", "failure", "t1", "decorrelation")
_EDGES = np.linspace(-np.pi, np.pi, BINS + 1)


@dataclass(frozen=True)
class Reference:
    """The recorded trajectory.

    Attributes:
      trajectory: its frames.
      aligned: on the reference frame of the autoencoder.
      angles: phi and psi of every frame, radians.
      fluctuation: of each atom.
      lag: of the TICA, in frames.
      lags: of the autocorrelation, in frames.
    """

    trajectory: Trajectory
    aligned: np.ndarray
    lag: int
    lags: int
    angles: np.ndarray = field(init=False)
    fluctuation: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "angles", angles(self.trajectory, self.trajectory.frames))
        object.__setattr__(self, "fluctuation", np.asarray(molecules.root_mean_square_fluctuation(self.aligned)))


@dataclass(frozen=True)
class Setting:
    """Everything that rollouts start from."""

    config: Config
    reference: Reference
    autoencoder: Autoencoder
    standard: Standardizer
    white: Standardizer
    pieces: dict[str, list[slice]]
    z: np.ndarray

    def pairs(self, part: str, skip: int) -> tuple[Any, Any]:
        """Pairs of standardised latents of a part of the trajectory."""
        u = np.asarray(self.standard.forward(self.z))
        return latent.snapshot_pairs([u[piece] for piece in self.pieces[part]], skip=skip)

    def start(self, standardizer: Standardizer, replicas: int, *, part: str = "test") -> np.ndarray:
        """Held-out frames, evenly spaced."""
        frames = np.concatenate([self.z[piece] for piece in self.pieces[part]])
        chosen = np.linspace(0, len(frames) - 1, replicas).astype(int)
        return np.asarray(standardizer.forward(frames[chosen]))

    def judge(self, found: Rollout, standardizer: Standardizer, *, skip: int) -> dict[str, np.ndarray]:
        """Of a rollout."""
        return judge_rollout(self.reference, self.autoencoder, standardizer, found, skip=skip, every=self._every(found))

    def divergences(self, found: Rollout, standardizer: Standardizer) -> dict[str, np.ndarray]:
        """Of the (phi, psi) map of a rollout from that of the validation frames, and from that of all."""
        states = found.states()[:: self._every(found)]
        frames = molecules.decode(self.autoencoder, np.asarray(standardizer.inverse(states)))
        rolled = angles(self.reference.trajectory, frames)
        targets = {"validation": self.angles("validation"), "all": self.reference.angles}
        return {
            name: np.asarray(latent.histogram_divergence_2d(rolled, target, bins=BINS))
            for name, target in targets.items()
        }

    def angles(self, part: str) -> np.ndarray:
        """Phi and psi of a part of the trajectory."""
        return np.concatenate([self.reference.angles[piece] for piece in self.pieces[part]])

    def _every(self, found: Rollout) -> int:
        return max(1, found.path.shape[0] * found.path.shape[1] // self.config.decoded)


def cut(lengths: Sequence[int], begin: int, end: int) -> list[slice]:
    """The frames from ``begin`` to ``end`` as pieces that no file boundary crosses."""
    edges = np.concatenate([[0], np.cumsum(lengths)])
    pieces = [slice(max(begin, int(a)), min(end, int(b))) for a, b in itertools.pairwise(edges)]
    return [piece for piece in pieces if piece.start < piece.stop]


def angles(trajectory: Trajectory, frames: np.ndarray) -> np.ndarray:
    """Phi and psi, ``[frame, 2]``."""
    quadruples = np.concatenate([trajectory.dihedrals[kind] for kind in ("phi", "psi")])
    return np.asarray(molecules.dihedrals(frames, quadruples))


def sampling_floor(found: np.ndarray, *, resamples: int = 64) -> float:
    """Mean divergence of as many independent draws from samples of (phi, psi) from the samples themselves."""
    counts, _, _ = np.histogram2d(found[:, 0], found[:, 1], bins=[_EDGES, _EDGES])
    drawn = np.random.default_rng(0).multinomial(len(found), counts.ravel() / counts.sum(), size=resamples)
    pairs = jax.vmap(latent.jensen_shannon, in_axes=(0, None))
    return float(pairs(jnp.asarray(drawn, jnp.float32), jnp.asarray(counts.ravel(), jnp.float32)).mean())


def judge_frames(reference: Reference, frames: np.ndarray, target: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Ensemble metrics of frames without a time order.

    Args:
      reference: the recorded trajectory.
      frames: aligned frames.
      target: angles to compare with; ``None`` takes all of the reference.
    """
    trajectory = reference.trajectory
    target = reference.angles if target is None else target
    found = angles(trajectory, frames)
    full = (-np.pi, np.pi)
    backbone = trajectory.backbone
    fluctuation = np.asarray(molecules.root_mean_square_fluctuation(frames))
    counts, _, _ = np.histogram2d(found[:, 0], found[:, 1], bins=[_EDGES, _EDGES])
    return {
        "jsd": np.asarray(latent.histogram_divergence_2d(found, target, bins=BINS)),
        "jsd_phi": np.asarray(latent.histogram_divergence(found[:, 0], target[:, 0], range=full)),
        "jsd_psi": np.asarray(latent.histogram_divergence(found[:, 1], target[:, 1], range=full)),
        "jsd_backbone": np.asarray(latent.coordinate_divergence(frames[:, backbone], reference.aligned[:, backbone])),
        "jsd_other": np.asarray(latent.coordinate_divergence(frames[:, ~backbone], reference.aligned[:, ~backbone])),
        "rmsf_ratio": np.asarray(np.mean(fluctuation) / np.mean(reference.fluctuation)),
        "counts": counts,
    }


def judge_rollout(
    reference: Reference,
    autoencoder: Autoencoder,
    standardizer: Standardizer,
    found: Rollout,
    *,
    skip: int,
    every: int = 1,
    target: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Ensemble, kinetics and structure of a rollout, decoded every so many steps; times are in frames.

    A replica that stopped counts with the states it has. Kinetics need as many decoded states of a replica as twice the
    largest lag, and are NaN without.
    """
    lengths = np.asarray(found.lengths)
    kept = [np.asarray(path)[:length:every] for path, length in zip(found.path, lengths, strict=True)]
    trajectories = [
        np.asarray(
            molecules.align(molecules.decode(autoencoder, np.asarray(standardizer.inverse(one))), autoencoder.reference)
        )
        for one in kept
        if len(one)
    ]
    if not trajectories:
        trajectories = [np.asarray(autoencoder.reference)[None]]
    frames = np.concatenate(trajectories)
    spacing = skip * every
    features = [
        np.asarray(molecules.periodic_features(jnp.asarray(angles(reference.trajectory, one)))) for one in trajectories
    ]
    scores = np.asarray(molecules.lddt(trajectories[0], trajectories[0][0]))
    times = kinetics(features, lag=max(1, round(reference.lag / spacing)), lags=max(1, reference.lags // spacing))
    curve = np.full(256, np.nan)
    places = np.linspace(0, len(scores) - 1, min(256, len(scores))).astype(int)
    curve[: len(places)] = scores[places]
    correlation = np.interp(np.linspace(0, 1, 129), np.linspace(0, 1, len(times["correlation"])), times["correlation"])
    return judge_frames(reference, frames, target) | {
        "finite": np.asarray(lengths.min() / found.path.shape[1]),
        "lddt": np.asarray(scores.min()),
        "failure": np.asarray(min(molecules.failure_step(scores) * every, int(lengths[0]))),
        "lddt_curve": curve,
        "t1": np.asarray(times["t1"] * spacing),
        "decorrelation": np.asarray(times["decorrelation"] * spacing),
        "correlation": correlation,
    }


def kinetics(features: Sequence[np.ndarray], *, lag: int, lags: int) -> dict[str, Any]:
    """Slowest time, decorrelation time of its component and its autocorrelation, in steps of the features."""
    long = [one for one in features if len(one) > 2 * max(lag, lags)]
    nothing = {"t1": np.nan, "decorrelation": np.nan, "correlation": np.full(2, np.nan)}
    if not long:
        return nothing
    try:
        found = latent.tica(long, lag=lag)
        slow = [np.asarray(found.transform(one)[:, 0]) for one in long]
        correlation = np.asarray(latent.autocorrelation(slow, lags=lags))
    except ValueError:  # a rollout that has collapsed onto a point does not vary
        return nothing
    return {
        "t1": float(found.timescales[0]),
        "decorrelation": latent.decorrelation_time(correlation),
        "correlation": correlation,
    }


__all__ += ["angles", "kinetics", "sampling_floor"]
