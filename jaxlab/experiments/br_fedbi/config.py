"""The sizes of the experiment on BR-FedBi, at every preset."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from jaxlab.experiments.br_fedbi.hyper_representation import Setting
from jaxlab.experiments.br_fedbi.simulation import METHODS, attack_named
from jaxlab.optim import make_aggregator

__all__ = ["PRESETS", "Config"]

_AGGREGATORS = ("mean", "coordinate_median", "trimmed_mean", "geometric_median", "nnm+trimmed_mean")
_ATTACKS = ("none", "alie", "inner_product", "bit_flip", "gaussian", "mimic", "label_flip")


@dataclass(frozen=True)
class Config:
    """Sizes of all parts."""

    quadratic_rounds: int = 4000
    """rounds of the quadratic, a multiple of 40"""
    betas: tuple[float, ...] = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
    """momentum decays, increasing, between which the slope of the noise floor is measured"""
    floor_runs: int = 4
    """noise streams and problems that the slope is averaged over"""
    data: str = "digits"
    """images: digits, or hf:OWNER/NAME"""
    held_out: int = 297
    """images held out, half to choose step sizes on and half to judge on"""
    clients: int = 25
    """clients of the hyper-representation"""
    byzantine: int = 7
    """how many of them lie, and as many the aggregators assume"""
    gamma: float = 0.5
    """share of a client's images that is drawn alike for all, the rest is sorted by class"""
    skewed_gamma: float = 0.3
    """the same where clients are to differ much"""
    methods: tuple[str, ...] = ("br_fedbi", "br_fedbi_m", "br_fedbi_p", "bilantine", "sgd_m")
    """methods: br_fedbi, br_fedbi_m, br_fedbi_p, bilantine, sgd, sgd_m (single-level)"""
    aggregators: tuple[str, ...] = _AGGREGATORS
    """aggregators by name, pre-aggregation joined by +"""
    attacks: tuple[str, ...] = _ATTACKS
    """attacks: none, alie, inner_product, bit_flip, gaussian, mimic,
    label_flip, sign_flip, zero, nan, inf, min_max, min_sum"""
    rounds: int = 320
    """communication rounds, a multiple of blocks"""
    blocks: int = 40
    """blocks of rounds that accuracy is averaged over, a multiple of 8"""
    batch: int = 8
    """images of a batch"""
    big_batch: int = 32
    """images of a batch that PAGE refreshes with"""
    refresh_probability: float = 0.5
    """of PAGE"""
    hidden: int = 32
    """width of the hidden layer"""
    ridge: float = 0.01
    """on the last layer"""
    learning_rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    """step sizes of the upper variable that every method is tuned on, for every aggregator"""
    ratios: tuple[float, float] = (2.5, 1.0)
    """step sizes of lower and auxiliary variable, as multiples"""
    radius: float = 10.0
    """of the ball that the auxiliary variable stays in"""
    tuning_seeds: int = 2
    """partitions, starts and batches that step sizes are chosen on, all on the first and the better two on the others:
    what is stable on one may not be on another"""
    seeds: int = 2
    """fresh partitions, starts and batches that a tuned method is judged on"""
    sweep: tuple[int, ...] = (0, 3, 5, 7, 10, 12)
    """numbers of Byzantine clients that BR-FedBiM meets"""
    cleaning_examples: int = 300
    """public training images of the hyper-cleaning"""
    cleaning_wrong: float = 0.4
    """share of them with a wrong label"""
    cleaning_clients: int = 10
    """clients with clean validation images"""
    cleaning_byzantine: int = 3
    """how many of them lie"""
    cleaning_rounds: int = 400
    """communication rounds of the hyper-cleaning"""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == ():
                raise ValueError(f"{field.name} must not be empty")
            least = (
                0 if field.name in ("byzantine", "cleaning_byzantine", "sweep", "betas", "gamma", "skewed_gamma") else 1
            )
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int) and number < least:
                    raise ValueError(f"{field.name} must be at least {least}, got {number}")
                if isinstance(number, float) and (number < 0 or (least and not number > 0)):
                    raise ValueError(f"{field.name} must be positive, got {number}")
        for name, known in (("methods", METHODS),):
            unknown = [value for value in getattr(self, name) if value not in known]
            if unknown:
                raise ValueError(f"{name} must be some of {', '.join(known)}, got {', '.join(unknown)}")
        for attack in self.attacks:
            attack_named(attack)
        for name in ("methods", "aggregators", "attacks"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name} must differ, got {', '.join(getattr(self, name))}")
        for name in self.aggregators:
            rule = make_aggregator(name, f=self.byzantine)
            rule.check(self.clients)
            if rule.stochastic or jax.tree.leaves(rule.init(0.0)):
                raise ValueError(f"aggregators that draw at random or remember something are not compared, got {name}")
            make_aggregator(name, f=self.cleaning_byzantine).check(self.cleaning_clients)
        if set(self.attacks) == {"none"}:
            raise ValueError("attacks must hold one beside none")
        if max(self.sweep) * 2 >= self.clients:
            raise ValueError(f"sweep must stay below half of the {self.clients} clients, got {max(self.sweep)}")
        if len(self.betas) < 2 or list(self.betas) != sorted(set(self.betas)) or self.betas[-1] >= 1:
            raise ValueError(f"betas must be two or more in [0, 1), in increasing order, got {self.betas}")
        for name in ("gamma", "skewed_gamma", "refresh_probability", "cleaning_wrong"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, got {getattr(self, name)}")
        for name, value, unit in (
            ("blocks", self.blocks, 8),  # with 3/8 of the rounds the method with sub-loops has sent as much
            ("rounds", self.rounds, self.blocks),
            ("quadratic_rounds", self.quadratic_rounds, 40),
        ):
            if value % unit:
                raise ValueError(f"{name} must be a multiple of {unit}, got {value}")

    def setting(self, classes: int) -> Setting:
        """What is compiled into the programs of the hyper-representation."""
        return Setting(
            clients=self.clients,
            byzantine=self.byzantine,
            aggregators=self.aggregators,
            attacks=self.attacks,
            rounds=self.rounds,
            blocks=self.blocks,
            batch=self.batch,
            big_batch=self.big_batch,
            refresh_probability=self.refresh_probability,
            classes=classes,
            hidden=self.hidden,
            ridge=self.ridge,
            ratios=self.ratios,
            radius=self.radius,
        )


PRESETS: Mapping[str, Config] = {
    "smoke": Config(
        quadratic_rounds=40,
        betas=(0.0, 0.9),
        floor_runs=1,
        methods=("br_fedbi", "br_fedbi_m"),
        aggregators=("trimmed_mean",),
        attacks=("inner_product",),
        rounds=8,
        blocks=8,
        learning_rates=(0.4,),
        tuning_seeds=1,
        seeds=1,
        sweep=(0, 7),
        cleaning_examples=50,
        cleaning_rounds=2,
    ),
    "quick": Config(
        betas=(0.0, 0.5, 0.9, 0.99),
        floor_runs=2,
        methods=("br_fedbi", "br_fedbi_m", "br_fedbi_p", "bilantine"),
        aggregators=("coordinate_median", "trimmed_mean", "nnm+trimmed_mean"),
        attacks=("none", "alie", "inner_product"),
        rounds=240,
        learning_rates=(0.2, 0.4),
        tuning_seeds=1,
        seeds=1,
        sweep=(0, 5, 12),
    ),
    "cpu": Config(),
    "paper": Config(
        data="hf:ylecun/mnist",
        held_out=10_000,
        methods=tuple(METHODS),
        attacks=(
            "none",
            "alie",
            "inner_product",
            "bit_flip",
            "gaussian",
            "mimic",
            "sign_flip",
            "min_max",
            "label_flip",
        ),
        hidden=200,
        batch=32,
        big_batch=128,
        rounds=9000,  # 200 epochs
        blocks=200,
        learning_rates=(0.005, 0.01, 0.02, 0.04),
        ratios=(10.0, 2.0),
        seeds=5,
        cleaning_examples=5000,
    ),
}
