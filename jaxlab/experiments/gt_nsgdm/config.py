"""The sizes of the experiment on GT-NSGDm, at every preset."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxlab.experiments.gt_nsgdm import bias, language_model, rates, regression
from jaxlab.experiments.gt_nsgdm.methods import METHODS, select
from jaxlab.optim import topology

__all__ = ["PRESETS", "TOPOLOGIES", "Config"]

_ALL_METHODS = tuple(METHODS)

TOPOLOGIES: Mapping[str, Callable[[int], np.ndarray]] = {
    "ring": topology.ring,
    "exponential": topology.directed_exponential,
    "complete": topology.complete,
}


@dataclass(frozen=True)
class Config:
    """Sizes of all parts."""

    bias_steps: int = 10_000
    """steps of the three-node example, a multiple of 50"""
    regression_methods: tuple[str, ...] = _ALL_METHODS
    """methods of the regression:
    dsgd, gt_dsgd, dsgd_gclip, dsgd_cclip, dsgd_clip,
    sclip_ef_network, qg_dsgdm, gt_adam, nsgd, nsgdm, gt_nsgd, gt_nsgdm"""
    noises: tuple[str, ...] = ("gaussian", "student_t", "stable")
    """gradient noise of the regression: gaussian, student_t, stable"""
    regression_steps: int = 10_000
    """steps of the regression, a multiple of 100"""
    regression_step_sizes: int = 13
    """step sizes between 0.001 and 10 that a method is tuned on, at three values of its second hyperparameter"""
    regression_seeds: int = 5
    """fresh noise streams that a tuned method is judged on"""
    horizons: tuple[int, ...] = (256, 1024, 4096, 16_384, 65_536)
    """numbers of steps between which the rate is measured, increasing multiples of 256"""
    networks: tuple[int, ...] = (2, 4, 8, 16, 32)
    """numbers of nodes, increasing, between which the speed-up is measured"""
    speedup_steps: int = 4096
    """steps of the speed-up runs, a multiple of 256"""
    trials: int = 8
    """noise streams of the rate and speed-up runs"""
    lm_methods: tuple[str, ...] = tuple(name for name in METHODS if name != "gt_nsgd")
    """methods of the language model, of the same"""
    topologies: tuple[str, ...] = ("ring", "exponential", "complete")
    """graphs of the language model: ring, exponential, complete; methods are tuned on the first"""
    topology_methods: tuple[str, ...] = ("gt_nsgdm",)
    """those of lm_methods that train on the other graphs too"""
    corpora: tuple[str, ...] = ("python-topics", "python-source")
    """texts, one after the other:
    a file, a folder of $JAXLAB_DATA, python-topics (reference manual), python-source (standard library),
    hf:OWNER/NAME[:COLUMN] or tfds:NAME[:FEATURE]"""
    corpus_split: str | None = None
    """split of the corpora, where they have several"""
    vocabulary: int = 512
    """words known to the language model"""
    sharding: Literal["contiguous", "iid"] = "contiguous"
    """contiguous parts of the text (nodes differ) or shuffled chunks (nodes are alike)"""
    leaky_attention: bool = False
    """let tokens see later ones, as the published script does; its losses of 0.25 nats come from there"""
    nodes: int = 8
    """nodes of the language model"""
    hidden: int = 32
    """width of the decoder"""
    layers: int = 1
    """blocks of the decoder"""
    heads: int = 4
    """attention heads"""
    context: int = 16
    """tokens a prediction can look at"""
    batch: int = 8
    """sequences per node and step"""
    lm_steps: int = 320
    """training steps"""
    lm_evaluations: int = 8
    """times the held-out loss is looked at, a divisor of lm_steps"""
    held_out_windows: int = 320
    """windows of held-out text, at most, to choose hyperparameters on, and as many to judge on"""
    lm_step_sizes: int = 6
    """step sizes over two and a half decades that a method is tuned on, at two values of its second hyperparameter"""
    lm_seeds: int = 3
    """fresh seeds that a tuned method is judged on; as many configurations are tuned at once"""
    tail_draws: int = 256
    """minibatches a node from which the tail of the gradient noise is estimated, at least 20; 0 leaves that out"""
    devices: int = 1
    """devices over which the nodes of the language model are spread"""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == ():
                raise ValueError(f"{field.name} must not be empty")
            for number in value if isinstance(value, tuple) else (value,):
                least = 0 if field.name == "tail_draws" else 1
                if isinstance(number, int) and not isinstance(number, bool) and number < least:
                    raise ValueError(f"{field.name} must be at least {least}, got {number}")
        if 0 < self.tail_draws < 20:  # the estimate is made from the largest 5 %
            raise ValueError(f"tail_draws must be 0 or at least 20, got {self.tail_draws}")
        select(self.regression_methods)
        select((*self.lm_methods, *self.topology_methods))
        for name, values, known in (
            ("noises", self.noises, regression.NOISES),
            ("topologies", self.topologies, TOPOLOGIES),
        ):
            if any(value not in known for value in values):
                raise ValueError(f"{name} must be some of {', '.join(known)}, got {', '.join(values)}")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must differ, got {', '.join(values)}")
        for name, value, unit in (
            ("bias_steps", self.bias_steps, bias.EVERY),
            ("regression_steps", self.regression_steps, 100),
            ("lm_steps", self.lm_steps, self.lm_evaluations),
            ("speedup_steps", self.speedup_steps, rates.BLOCK),
            *(("horizons", horizon, rates.BLOCK) for horizon in self.horizons),
        ):
            if value % unit:
                raise ValueError(f"{name} must be a multiple of {unit}, got {value}")
        for name, sizes in (("horizons", self.horizons), ("networks", self.networks)):
            if len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} must be two numbers or more, in increasing order, got {sizes}")
        if self.nodes % self.devices:
            raise ValueError(f"devices must divide the {self.nodes} nodes, got {self.devices}")
        _ = self.language_model.decoder  # raises for sizes that do not fit

    @property
    def language_model(self) -> language_model.LanguageModelConfig:
        """The part on the language model."""
        return language_model.LanguageModelConfig(
            corpora=self.corpora,
            split=self.corpus_split,
            vocabulary=self.vocabulary,
            sharding=self.sharding,
            leaky_attention=self.leaky_attention,
            nodes=self.nodes,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            context=self.context,
            batch=self.batch,
            steps=self.lm_steps,
            evaluations=self.lm_evaluations,
            held_out_windows=self.held_out_windows,
            step_sizes=self.lm_step_sizes,
            seeds=self.lm_seeds,
            devices=self.devices,
        )


PRESETS: Mapping[str, Config] = {
    "smoke": Config(
        bias_steps=100,
        regression_methods=("gt_nsgdm",),
        noises=("stable",),
        regression_steps=200,
        regression_step_sizes=3,
        regression_seeds=2,
        horizons=(256, 512),
        networks=(2, 8),
        speedup_steps=256,
        trials=2,
        lm_methods=("gt_nsgdm",),
        topologies=("ring",),
        vocabulary=32,
        hidden=16,
        heads=2,
        context=8,
        batch=2,
        lm_steps=4,
        lm_evaluations=2,
        held_out_windows=16,
        lm_step_sizes=2,
        lm_seeds=4,
        tail_draws=0,
    ),
    "quick": Config(
        regression_methods=("dsgd", "dsgd_gclip", "gt_nsgd", "gt_nsgdm"),
        noises=("stable",),
        regression_step_sizes=9,
        horizons=(256, 1024, 4096),
        networks=(2, 32),
        lm_methods=("dsgd_gclip", "nsgdm", "gt_nsgdm"),
        topologies=("ring",),
        batch=4,
        lm_steps=100,
        lm_evaluations=2,
        held_out_windows=256,
        lm_step_sizes=4,
        lm_seeds=4,
        tail_draws=64,
    ),
    "cpu": Config(),
    "paper": Config(
        corpora=("hf:bentrevett/multi30k:en",),
        sharding="iid",
        lm_methods=_ALL_METHODS,
        topology_methods=_ALL_METHODS,
        vocabulary=10_000,
        hidden=128,
        layers=2,
        context=64,
        batch=64,
        lm_steps=1200,
        lm_evaluations=12,
        lm_seeds=5,
        devices=8,
    ),
}
