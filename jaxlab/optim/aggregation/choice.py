"""Aggregators by name."""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from jaxlab.optim.aggregation.aggregator import Aggregator, PreAggregator, compose
from jaxlab.optim.aggregation.centred_clipping import CentredClipping
from jaxlab.optim.aggregation.coordinatewise import CoordinateMedian, Mean, MeanAroundMedian, TrimmedMean
from jaxlab.optim.aggregation.distance_based import GeometricMedian, Krum, MinimumDiameterAveraging, Monna, MultiKrum
from jaxlab.optim.aggregation.preaggregation import (
    AdaptiveClipping,
    Bucketing,
    NearestNeighbourMixing,
    StaticClipping,
)
from jaxlab.optim.aggregation.spectral import MinimumEigenvalueAveraging

__all__ = ["AGGREGATORS", "PRE_AGGREGATORS", "make_aggregator"]

AGGREGATORS: MappingProxyType[str, Callable[..., Aggregator]] = MappingProxyType(
    {
        "mean": Mean,
        "coordinate_median": CoordinateMedian,
        "trimmed_mean": TrimmedMean,
        "mean_around_median": MeanAroundMedian,
        "geometric_median": GeometricMedian,
        "krum": Krum,
        "multi_krum": MultiKrum,
        "centred_clipping": CentredClipping,
        "minimum_diameter_averaging": MinimumDiameterAveraging,
        "monna": Monna,
        "minimum_eigenvalue_averaging": MinimumEigenvalueAveraging,
    }
)
PRE_AGGREGATORS: MappingProxyType[str, Callable[..., PreAggregator]] = MappingProxyType(
    {
        "nnm": NearestNeighbourMixing,
        "bucketing": Bucketing,
        "static_clipping": StaticClipping,
        "arc": AdaptiveClipping,
    }
)
# Bucketing's size in its paper's experiments (arXiv 2006.09365).
_BUCKET_SIZE = 2


def make_aggregator(name: str, *, f: int = 0, **options: Any) -> Aggregator:
    """An aggregator by name, with pre-aggregation in front: ``"krum"``, ``"nnm+trimmed_mean"``, ``"arc+nnm+krum"``.

    Args:
      name: a rule, after the pre-aggregators in the order they act, joined by ``+``.
      f: Byzantine workers to tolerate, for every part that has such a number.
      options: of the rule. Pre-aggregators have their defaults (bucketing: groups of 2); `compose` sets others.

    Raises:
      ValueError: for an unknown name, listing the known ones.
      TypeError: for an option that the rule does not have.
    """
    *before, rule = name.split("+")
    for part, known in [*((part, PRE_AGGREGATORS) for part in before), (rule, AGGREGATORS)]:
        if part not in known:
            kind = "rules" if known is AGGREGATORS else "pre-aggregators"
            raise ValueError(f"unknown name {part!r} in {name!r}; the {kind} are {', '.join(known)}")
    stages = [Bucketing(_BUCKET_SIZE) if part == "bucketing" else _with_f(PRE_AGGREGATORS[part], f) for part in before]
    return compose(*stages, _with_f(AGGREGATORS[rule], f, **options))


def _with_f(make: Callable[..., Any], f: int, **options: Any) -> Any:
    has_f = any(field.name == "f" for field in dataclasses.fields(make))  # type: ignore[arg-type]
    return make(f=f, **options) if has_f else make(**options)
