"""The nineteen methods: paper, module, state.

Nothing here imports jax, so that ``jaxlab list`` answers at once; an experiment is imported when it is asked for.
"""

import difflib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jaxlab.experiments.base import Experiment

__all__ = ["METHODS", "Method", "find", "load"]


@dataclass(frozen=True)
class Method:
    """One line of the list.

    Attributes:
      name: kebab case; what ``jaxlab run`` takes.
      title: of the paper.
      arxiv: id of the paper, None where it has none.
      module: where the method lives, or will.
      experiment: module whose attribute ``EXPERIMENT`` measures the paper's claims; None until it works.
    """

    name: str
    title: str
    arxiv: str | None
    module: str
    experiment: str | None = None

    @property
    def state(self) -> Literal["working", "planned"]:
        """Only what has an experiment is called working."""
        return "working" if self.experiment else "planned"


METHODS: tuple[Method, ...] = (
    Method(
        "gt-nsgdm",
        "Decentralized Nonconvex Optimization under Heavy-Tailed Noise: Normalization and Optimal Convergence",
        "2505.03736",
        "jaxlab.optim",
        experiment="jaxlab.experiments.gt_nsgdm",
    ),
    Method(
        "br-fedbi",
        "Single-Loop Byzantine-Resilient Federated Bilevel Optimization",
        None,
        "jaxlab.optim",
        experiment="jaxlab.experiments.br_fedbi",
    ),
    Method(
        "abom",
        "Task-free Adaptive Meta Black-box Optimization",
        "2601.21475",
        "jaxlab.blackbox",
        experiment="jaxlab.experiments.abom",
    ),
    Method(
        "l2fob",
        "Towards Safe and Optimal Online Bidding: A Modular Look-ahead Lyapunov Framework",
        None,
        "jaxlab.bidding",
        experiment="jaxlab.experiments.l2fob",
    ),
    Method(
        "koopman-ot",
        "A Spectral-Grassmann Wasserstein metric for operator representations of dynamical systems",
        "2509.24920",
        "jaxlab.dynamics",
        experiment="jaxlab.experiments.koopman_ot",
    ),
    Method(
        "gldp",
        "Beyond Ensembles: Simulating All-Atom Protein Dynamics in a Learned Latent Space",
        "2509.02196",
        "jaxlab.dynamics",
        experiment="jaxlab.experiments.gldp",
    ),
    Method(
        "task-arithmetic-fairness",
        "On Fairness of Task Arithmetic: The Role of Task Vectors",
        "2505.24262",
        "jaxlab.editing",
        experiment="jaxlab.experiments.task_arithmetic_fairness",
    ),
    Method(
        "expert-merging",
        "Expert Merging: Model Merging with Unsupervised Expert Alignment and Importance-Guided Layer Chunking",
        "2509.25712",
        "jaxlab.editing",
        experiment="jaxlab.experiments.expert_merging",
    ),
    Method(
        "reasoning-qat",
        "Towards Quantization-Aware Training for Ultra-Low-Bit Reasoning LLMs",
        None,
        "jaxlab.compress",
    ),
    Method(
        "shapley-pruning",
        "Pruning as a Cooperative Game: Surrogate-Assisted Layer Contribution Estimation for Large Language Models",
        "2602.07804",
        "jaxlab.compress",
        experiment="jaxlab.experiments.shapley_pruning",
    ),
    Method(
        "uniedit",
        "UniEdit-Flow: Unleashing Inversion and Editing in the Era of Flow Models",
        "2504.13109",
        "jaxlab.flow",
        experiment="jaxlab.experiments.uniedit",
    ),
    Method(
        "uniflow",
        "UniFlow: A Unified Pixel Flow Tokenizer for Visual Understanding and Generation",
        "2510.10575",
        "jaxlab.flow",
    ),
    Method("wow-seg", "WOW-Seg: A Word-free Open World Segmentation Model", "2605.16903", "jaxlab.vision"),
    Method(
        "scene-dynamic-field",
        "Beyond Static Vision: Scene Dynamic Field Unlocks Intuitive Physics Understanding in Multi-modal Large "
        "Language Models",
        "2604.03302",
        "jaxlab.vision",
    ),
    Method(
        "tensor-completion",
        "Recover Cell Tensor: Diffusion-Equivalent Tensor Completion for Fluorescence Microscopy Imaging",
        "2601.19169",
        "jaxlab.vision",
    ),
    Method(
        "sir-snc",
        "Neural Compression of 3D Meshes using Sparse Implicit Representation",
        None,
        "jaxlab.mesh",
    ),
    Method(
        "tampo",
        "Temperature as a Meta-Policy: Adaptive Temperature in LLM Reinforcement Learning",
        "2602.11779",
        "jaxlab.alignment",
    ),
    Method(
        "plus",
        "Learning to summarize user information for personalized reinforcement learning from human feedback",
        "2507.13579",
        "jaxlab.alignment",
    ),
    Method(
        "learned-nonlinearities",
        "Can Transformers Really Do It All? On the Compatibility of Inductive Biases Across Tasks",
        "2607.17624",
        "jaxlab.nn",
    ),
)


def find(name: str) -> Method:
    """The method of that name.

    Raises:
      ValueError: there is none; the message suggests the nearest.
    """
    names = [method.name for method in METHODS]
    if name in names:
        return METHODS[names.index(name)]
    near = difflib.get_close_matches(name.replace("_", "-").lower(), names, n=1)
    raise ValueError(
        f"unknown experiment {name!r}; " + (f"did you mean {near[0]!r}? see jaxlab list" if near else "see jaxlab list")
    )


def load(name: str) -> "Experiment":
    """The experiment of that name.

    Raises:
      ValueError: there is no such method, or it has no experiment yet.
    """
    method = find(name)
    if method.experiment is None:
        raise ValueError(f"{name} is planned and has no experiment yet; see jaxlab list")
    return importlib.import_module(method.experiment).EXPERIMENT
