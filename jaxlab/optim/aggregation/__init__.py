r"""Byzantine-robust aggregation: one message of many, some of which may be arbitrary.

Every leaf of a tree of messages has a leading *worker axis*. An :class:`Aggregator` makes one tree without that axis,
close to the mean of the honest messages whatever up to ``f`` others send: garbage, NaN, or what an adversary who
sees all messages computed. There are two backends with the same numbers:

* **stacked**: leaves are ``[n, ...]`` on one device;
* **sharded**: inside :func:`jax.shard_map`, with ``axis_name=``, leaves are ``[n / devices, ...]``. ``all_to_all``
  gives each device its share of the numbers of all workers, and ``all_gather`` puts the aggregate together: a device
  sends and receives two models, not ``n``.

================================ ========================================================= =========== =============
rule                             :math:`\kappa`, with r = f / (n - 2f), h = n - f           memory      state
================================ ========================================================= =========== =============
`Mean`                           none                                                      1 model     none
`CoordinateMedian`               4 (1 + r)^2                                               1 model     none
`TrimmedMean`                    6 r (1 + r)                                               1 model     none
`MeanAroundMedian`               4 f (1 + 4 (1 + r)^2) / h                                 1 model     none
`GeometricMedian`                4 (1 + r)^2                                               1 model     none
`Krum`, `MultiKrum`              6 (1 + r)                                                 1 model     none
`CentredClipping`                none                                                      1 model     last result
`MinimumDiameterAveraging`       8 f^2 / h                                                 1 model     none
`Monna`                          4 f (h + 1) / h, if the trusted worker is honest          1 model     none
`MinimumEigenvalueAveraging`     4 r                                                       1 model     none
================================ ========================================================= =========== =============

``F`` is :math:`(f, \kappa)`-robust if :math:`\lVert F - \bar v_S \rVert^2 \le \kappa\, \mathrm{mean}_{i \in S}
\lVert v_i - \bar v_S \rVert^2` for every set S of n - f messages (Allouah et al. 2023, arXiv 2302.01772). Memory is
beyond the messages. In front of any rule, in any order, `compose` puts :class:`NearestNeighbourMixing`,
:class:`Bucketing`, :class:`StaticClipping`, :class:`AdaptiveClipping`; they make no copy of the messages. With workers
whose data differ, coordinate-wise rules alone can fail; nearest-neighbour mixing and the trimmed mean behind momentum
is a good default.

A message with a NaN or an infinity counts as one of the f: coordinate-wise rules rank it as an extreme value, rules
that use distances see it infinitely far away (so, too, one whose squared norm overflows), clipping replaces it by zero,
nearest-neighbour mixing by the middle message. :class:`Mean` passes it on. With more of them than a rule tolerates the
result is NaN or infinite. Distances are squared in float32 (float64 for such messages): lengths from about 1e19 on
count as infinite, and points closer than about 1e-19 as one. Scale messages of such sizes first.

Deviations:
  1. Distances come from a Gram matrix about one of the messages in the middle, recomputed only where it is needed, and
     not about the coordinate-wise median, which would cost more than the distances.
  2. The geometric median starts in the affine hull of the messages, not at their coordinate-wise median.

Example:
  >>> import jax.numpy as jnp
  >>> from jaxlab.optim import aggregation
  >>> messages = {"w": jnp.array([1.0, 2.0, 3.0, 1e9, jnp.nan])}
  >>> aggregation.TrimmedMean(2).aggregate(messages)["w"].item()
  3.0
  >>> rule = aggregation.compose(aggregation.NearestNeighbourMixing(2), aggregation.TrimmedMean(2))
  >>> rule.aggregate(messages)["w"].item()
  2.0
"""

from jaxlab.optim.aggregation.aggregator import Aggregator, PreAggregated, PreAggregator, compose
from jaxlab.optim.aggregation.centred_clipping import CentredClipping
from jaxlab.optim.aggregation.choice import AGGREGATORS, PRE_AGGREGATORS, make_aggregator
from jaxlab.optim.aggregation.coordinatewise import CoordinateMedian, Mean, MeanAroundMedian, TrimmedMean
from jaxlab.optim.aggregation.distance_based import GeometricMedian, Krum, MinimumDiameterAveraging, Monna, MultiKrum
from jaxlab.optim.aggregation.preaggregation import (
    AdaptiveClipping,
    Bucketing,
    NearestNeighbourMixing,
    StaticClipping,
)
from jaxlab.optim.aggregation.spectral import MinimumEigenvalueAveraging

__all__ = [
    "AGGREGATORS",
    "PRE_AGGREGATORS",
    "AdaptiveClipping",
    "Aggregator",
    "Bucketing",
    "CentredClipping",
    "CoordinateMedian",
    "GeometricMedian",
    "Krum",
    "Mean",
    "MeanAroundMedian",
    "MinimumDiameterAveraging",
    "MinimumEigenvalueAveraging",
    "Monna",
    "MultiKrum",
    "NearestNeighbourMixing",
    "PreAggregated",
    "PreAggregator",
    "StaticClipping",
    "TrimmedMean",
    "compose",
    "make_aggregator",
]
