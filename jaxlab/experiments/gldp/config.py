"""What a run is made of, and what it claims."""

import dataclasses
import itertools
from dataclasses import dataclass

from jaxlab.dynamics.latent import DiffusionSettings, NeuralSettings
from jaxlab.dynamics.molecules import AutoencoderSettings
from jaxlab.experiments.base import Claim

__all__ = ["CLAIMS", "PRESETS", "Config"]


@dataclass(frozen=True)
class Config:
    """Autoencoder, propagators, rollouts."""

    frames: int = 20000
    """of the trajectory, at most"""
    hidden: int = 8
    """channels of the encoder"""
    pooled: tuple[int, int] = (5, 4)
    """rows and columns of the pooled embedding"""
    decoder_layers: int = 6
    """linear layers of the decoder"""
    decoder_width: int = 128
    """width of the decoder"""
    encoder_steps: int = 3000
    """training steps of the encoder"""
    decoder_steps: int = 12000
    """training steps of the decoder"""
    batch: int = 64
    """frames of a batch of the autoencoder"""
    skip: int = 1
    """frames that one step spans"""
    ranks: tuple[int, ...] = (5, 10, 15, 20)
    """of Koopman, tried on validation frames"""
    widths: tuple[int, ...] = (128, 512)
    """of the network's two hidden layers, tried on validation frames"""
    epochs: tuple[int, ...] = (5, 15)
    """of the network's training, each tried with each width"""
    learning_rate: float = 1e-3
    """of the propagator, at its highest"""
    dropout: float = 0.1
    """of the propagator"""
    seeds: int = 3
    """trainings of the propagator"""
    score_network: int = 256
    """width of the score's hidden layers"""
    score_steps: int = 6000
    """training steps of the score"""
    noise_levels: tuple[float, ...] = (0.01, 0.07, 0.2, 0.37, 0.5, 0.6, 0.7, 0.85, 0.95, 0.99)
    """of the score, tried on validation frames; the first stands for the paper's t* near 0"""
    langevin_step: float = 0.01
    """time step in whitened latents"""
    stride: int = 20
    """time steps between saved states"""
    replicas: int = 8
    """rollouts of each propagator"""
    steps: int = 10000
    """steps of a rollout"""
    decoded: int = 20000
    """states of a rollout that are decoded and judged"""
    skips: tuple[int, ...] = (2, 5, 10, 20, 50)
    """further times of one step, searched for the kinetics"""

    def __post_init__(self) -> None:
        for name in ("encoder_steps", "decoder_steps", "seeds", "score_steps", "replicas", "skip", "decoded"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.frames < 100:
            raise ValueError(f"frames must be at least 100, got {self.frames}")
        if self.steps < 10:
            raise ValueError(f"steps must be at least 10, got {self.steps}")
        if len(self.noise_levels) < 2 or not 0 < min(self.noise_levels) <= max(self.noise_levels) < 1:
            raise ValueError(f"noise_levels must be two or more in (0, 1), got {self.noise_levels}")
        if self.skips and min(self.skips) < 1:
            raise ValueError(f"skips must be at least 1, got {self.skips}")
        DiffusionSettings(hidden_size=self.score_network)
        width = self.autoencoder.pooled[0] * self.autoencoder.pooled[1]
        if not self.ranks or not 1 <= min(self.ranks) <= max(self.ranks) <= width:
            raise ValueError(f"ranks must be one or more in [1, {width}], the width of a latent, got {self.ranks}")
        if not self.widths or not self.epochs:
            raise ValueError(f"widths and epochs must be one or more, got {self.widths} and {self.epochs}")
        for chosen in self.networks:
            self.neural(1, *chosen)

    @property
    def autoencoder(self) -> AutoencoderSettings:
        """Of the autoencoder."""
        return AutoencoderSettings(
            hidden_size=self.hidden,
            pooled=self.pooled,
            decoder_layers=self.decoder_layers,
            decoder_width=self.decoder_width,
            encoder_learning_rate=2e-3,
            decoder_learning_rate=1e-3,
            batch_size=self.batch,
        )

    @property
    def networks(self) -> tuple[tuple[int, int], ...]:
        """Widths and epochs that are tried."""
        return tuple(itertools.product(self.widths, self.epochs))

    def neural(self, pairs: int, width: int, epochs: int) -> NeuralSettings:
        """Of the autoregressive network, with the learning rate decaying over all epochs."""
        settings = NeuralSettings(
            hidden_size=width,
            learning_rate=self.learning_rate,
            dropout=self.dropout,
            batch_size=256,
            epochs=epochs,
        )
        return dataclasses.replace(settings, decay_steps=epochs * max(1, pairs // settings.batch_size))

    @property
    def diffusion(self) -> DiffusionSettings:
        """Of the score."""
        return DiffusionSettings(hidden_size=self.score_network, learning_rate=1e-3, batch_size=256)


CLAIMS = (
    Claim(
        "autoencoder_is_faithful",
        "Held-out frames are decoded to within 0.2 A and their (phi, psi) map to within what a perfect sampler of "
        "these frames, asked for as many, would miss it by (the larger share of the two bounds).",
        "<",
        1.0,
        known_gap=(
            "coordinates are well within (0.074 A at cpu), the map is not: 0.016 to 0.018 at cpu and 0.020 to 0.023 at "
            "quick from that of 4000 frames, of which a perfect sampler misses 0.0094 (two independent ones 0.019); "
            "decoded phi and psi are 4 and 3 degrees off in bins of 10, which moves many frames into the next bin; "
            "tried: 4000 to 20000 steps of the decoder (0.030 to 0.019), a decaying rate (0.027 at quick), the loss on "
            "dihedrals (0.018 to 0.024 from 8000 steps on)"
        ),
    ),
    Claim(
        "neural_beats_koopman_on_ensemble",
        "The network's (phi, psi) map is nearer to the simulation than Koopman's (mean ratio of divergences).",
        "<",
        1.0,
        known_gap=(
            "no gap: 1.16 and 0.93 at cpu (seeds 0 and 1, three trainings each) and 1.06 to 1.55 at quick where the "
            "paper has 0.44, and 0.88 +- 0.07 at cpu with another autoencoder and sizes that were not chosen on "
            "validation frames, so that it is within the spread of both; at seed 0 phi is level (1.01), psi is not "
            "(1.36): noise is the same in all states and blurs both basins of psi, which exchange once in 180 steps, "
            "so that their populations hang on a drift far below the noise of a step; tried: 128 to 512 wide, 5 to 15 "
            "epochs, dropout 0.1 and 0.3, constant and decaying rates, steps of 1 to 50 frames, standardised and "
            "whitened latents, Koopman of rank 5 to 20"
        ),
    ),
    Claim(
        "koopman_damps",
        "The linear propagator fluctuates less than the simulation (ratio of RMSF).",
        "<",
        0.95,
    ),
    Claim(
        "langevin_needs_the_right_noise_level",
        "The noise level chosen on validation frames gives a better (phi, psi) map than one near zero (ratio of "
        "divergences).",
        "<",
        0.5,
    ),
    Claim(
        "calibrated_noise_prevents_collapse",
        "Noise calibrated on residuals gives a better (phi, psi) map than noise of 0.01 (largest ratio of "
        "divergences).",
        "<",
        0.5,
    ),
    Claim(
        "long_rollouts_stay_finite",
        "No rollout of any propagator diverges (smallest share of its steps that is finite).",
        ">=",
        1.0,
        known_gap=(
            "in one of two trainings at cpu (seed 1, noise level 0.37) a replica of Langevin's leaves where the score "
            "was trained after 15 % of the rollout; the network is kept in a box, linear and Langevin dynamics are not"
        ),
    ),
)

PRESETS = {
    "smoke": Config(
        frames=200,
        pooled=(5, 2),
        decoder_layers=3,
        decoder_width=16,
        encoder_steps=4,
        decoder_steps=4,
        batch=8,
        ranks=(5, 10),
        widths=(8,),
        epochs=(1,),
        seeds=1,
        score_network=8,
        score_steps=4,
        noise_levels=(0.2, 0.5),
        stride=2,
        replicas=2,
        # Frames of all rollouts come in arrays of the same shapes, each of which is compiled once.
        steps=10,
        decoded=20,
        skips=(2,),
    ),
    "quick": Config(
        encoder_steps=2000,
        decoder_steps=2500,
        decoder_layers=4,
        ranks=(10, 20),
        widths=(128, 256),
        epochs=(12,),
        seeds=2,
        score_network=128,
        score_steps=2000,
        noise_levels=(0.01, 0.2, 0.37, 0.5, 0.7, 0.95),
        steps=2000,
        decoded=8000,
        skips=(10,),
    ),
    "cpu": Config(),
    "paper": Config(
        frames=10000,
        pooled=(50, 2),
        decoder_layers=12,
        encoder_steps=2_500_000,
        decoder_steps=2_500_000,
        batch=16,
        ranks=(10, 20),
        widths=(512,),
        epochs=(200,),
        learning_rate=1e-4,
        seeds=5,
        score_network=1024,
        score_steps=7_000_000,
    ),
}
