"""Optimisation without gradients: ABOM, a search whose operators are learnt while it searches, and what it is compared
with.

`minimize` runs a search as one scan, `ask` and `tell` run it step by step, `minimize_host` drives a function outside
jax. Problems are in `jaxlab.blackbox.problems`, evosax's algorithms and ABOM for evosax in `jaxlab.blackbox.evosax`.
"""

from jaxlab.blackbox.abom import Info, Result, State, advance, ask, init, minimize, minimize_host, tell
from jaxlab.blackbox.baselines import (
    Found,
    Search,
    differential_evolution,
    particle_swarm,
    random_search,
    run_search,
)
from jaxlab.blackbox.operators import (
    Masks,
    Parameters,
    Structure,
    crossover,
    draw_masks,
    gene_attention,
    initial_parameters,
    latin_hypercube,
    mutate,
    mutation_matrix,
    reproduce,
    selection_matrix,
    variable_swap,
)
from jaxlab.blackbox.pretraining import Transitions, collect, pretrain
from jaxlab.blackbox.settings import ABOM

__all__ = [
    "ABOM",
    "Found",
    "Info",
    "Masks",
    "Parameters",
    "Result",
    "Search",
    "State",
    "Structure",
    "Transitions",
    "advance",
    "ask",
    "collect",
    "crossover",
    "differential_evolution",
    "draw_masks",
    "gene_attention",
    "init",
    "initial_parameters",
    "latin_hypercube",
    "minimize",
    "minimize_host",
    "mutate",
    "mutation_matrix",
    "particle_swarm",
    "pretrain",
    "random_search",
    "reproduce",
    "run_search",
    "selection_matrix",
    "tell",
    "variable_swap",
]
