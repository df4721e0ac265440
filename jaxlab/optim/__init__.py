"""Training with many workers: decentralised and Byzantine-robust optimisers as optax transformations.

* :mod:`~jaxlab.optim.topology`: communication graphs and their mixing matrices.
* :mod:`~jaxlab.optim.mixing`: averaging with neighbours, stacked on one device or over a mesh axis.
* :mod:`~jaxlab.optim.transforms`: gradient tracking, per-node normalisation and clipping, gossip.
* :mod:`~jaxlab.optim.decentralized`: GT-NSGDm and the methods it is compared with.
* :mod:`~jaxlab.optim.aggregation`: one message of many of which some are Byzantine, stacked or over a mesh axis.
* :mod:`~jaxlab.optim.attacks`: what Byzantine workers send.
* :mod:`~jaxlab.optim.robust`: both as transformations: momentum of every worker, PAGE, attack, aggregation.
* :mod:`~jaxlab.optim.bilevel`: BR-FedBi, federated bilevel optimisation on top of both, and hypergradients.
* :mod:`~jaxlab.optim.training`: per-node gradients, train steps on one device and over a mesh.
* :mod:`~jaxlab.optim.noise`: heavy-tailed gradient noise.
"""

from jaxlab.optim import (
    aggregation,
    attacks,
    bilevel,
    decentralized,
    mixing,
    noise,
    robust,
    topology,
    training,
    transforms,
)
from jaxlab.optim.aggregation import *  # noqa: F403
from jaxlab.optim.bilevel import *  # noqa: F403
from jaxlab.optim.decentralized import *  # noqa: F403
from jaxlab.optim.mixing import *  # noqa: F403
from jaxlab.optim.robust import *  # noqa: F403
from jaxlab.optim.training import *  # noqa: F403
from jaxlab.optim.transforms import *  # noqa: F403

__all__ = [
    *aggregation.__all__,
    *bilevel.__all__,
    *decentralized.__all__,
    *mixing.__all__,
    *robust.__all__,
    *training.__all__,
    *transforms.__all__,
    "aggregation",
    "attacks",
    "bilevel",
    "decentralized",
    "mixing",
    "noise",
    "robust",
    "topology",
    "training",
    "transforms",
]
