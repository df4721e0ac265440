"""Federated bilevel optimisation whose server some of the clients may lie to.

* :mod:`~jaxlab.optim.bilevel.hypergradient`: problems, directions, and the exact hypergradient.
* :mod:`~jaxlab.optim.bilevel.br_fedbi`: the single-loop method, plain, with momentum or with PAGE.
* :mod:`~jaxlab.optim.bilevel.bilantine`: the method with sub-loops it is compared with.
* :mod:`~jaxlab.optim.bilevel.rounds`: rounds of either, on one device and over a mesh.
"""

from jaxlab.optim.bilevel.bilantine import bilantine
from jaxlab.optim.bilevel.br_fedbi import BRFedBiState, RobustDescentState, br_fedbi
from jaxlab.optim.bilevel.hypergradient import (
    BilevelPoint,
    BilevelProblem,
    HypergradientSolution,
    bilevel_point,
    directions,
    exact_hypergradient,
)
from jaxlab.optim.bilevel.rounds import (
    BilevelInfo,
    BilevelState,
    BilevelStepper,
    ClientBatches,
    make_bilevel_step,
    put_bilevel_state,
    shard_bilevel_step,
)

__all__ = [
    "BRFedBiState",
    "BilevelInfo",
    "BilevelPoint",
    "BilevelProblem",
    "BilevelState",
    "BilevelStepper",
    "ClientBatches",
    "HypergradientSolution",
    "RobustDescentState",
    "bilantine",
    "bilevel_point",
    "br_fedbi",
    "directions",
    "exact_hypergradient",
    "make_bilevel_step",
    "put_bilevel_state",
    "shard_bilevel_step",
]
