"""The methods that are compared, each with its hyperparameters and the grid they are tuned on.

Every method gets the same number of configurations. One with a single hyperparameter, the step size, gets a finer grid of
step sizes over the same range.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

from jaxlab import optim
from jaxlab.optim import Mixer

__all__ = ["METHODS", "Method", "configurations", "select"]


@dataclass(frozen=True)
class Method:
    """A decentralised optimiser with one or two tuned hyperparameters.

    Attributes:
      make: ``make(learning_rate, second, mixer)``; ``second`` is ignored by methods without a second hyperparameter.
      second: name of the second hyperparameter, None if there is none.
      scale: what the step is proportional to, which decides the range of useful step sizes: "gradient", "clipped" (the
        gradient or a threshold), "unit" (steps of fixed length) or "coordinate" (fixed length in every coordinate).
    """

    make: Callable[[Any, Any, Mixer], optax.GradientTransformation]
    second: str | None
    scale: str


METHODS: Mapping[str, Method] = {
    "dsgd": Method(lambda lr, _, mixer: optim.dsgd(lr, mixer), None, "gradient"),
    "gt_dsgd": Method(lambda lr, _, mixer: optim.gt_dsgd(lr, mixer), None, "gradient"),
    "dsgd_gclip": Method(lambda lr, tau, mixer: optim.dsgd_gclip(lr, mixer, tau), "max_norm", "clipped"),
    "dsgd_cclip": Method(lambda lr, tau, mixer: optim.dsgd_cclip(lr, mixer, tau), "max_value", "clipped"),
    "dsgd_clip": Method(lambda lr, tau, mixer: optim.dsgd_clip(lr, mixer, tau), "max_norm", "clipped"),
    "sclip_ef_network": Method(lambda lr, phi, mixer: optim.sclip_ef_network(lr, mixer, scale=phi), "scale", "clipped"),
    "qg_dsgdm": Method(lambda lr, beta, mixer: optim.qg_dsgdm(lr, mixer, beta), "beta", "gradient"),
    "gt_adam": Method(lambda lr, beta, mixer: optim.gt_adam(lr, mixer, b1=beta), "beta", "coordinate"),
    "nsgd": Method(lambda lr, _, mixer: optim.nsgd(lr, mixer), None, "unit"),
    "nsgdm": Method(lambda lr, beta, mixer: optim.nsgdm(lr, mixer, beta), "beta", "unit"),
    "gt_nsgd": Method(lambda lr, _, mixer: optim.gt_nsgdm(lr, mixer, 0.0), None, "unit"),
    "gt_nsgdm": Method(lambda lr, beta, mixer: optim.gt_nsgdm(lr, mixer, beta), "beta", "unit"),
}


def select(names: Sequence[str]) -> dict[str, Method]:
    """The methods of these names, in the table's order.

    Raises:
      ValueError: for a name that is not in :data:`METHODS`.
    """
    if unknown := [name for name in names if name not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}; there are {', '.join(METHODS)}")
    return {name: method for name, method in METHODS.items() if name in names}


def configurations(
    method: Method, *, low: float, high: float, points: int, second: Mapping[str, Sequence[float]]
) -> np.ndarray:
    """The grid of a method: rows ``(learning_rate, second)``, as many for every method.

    Args:
      method: whose grid.
      low: the smallest step size.
      high: the largest.
      points: step sizes of a method with two hyperparameters, evenly spaced on the logarithmic scale.
      second: values of the second hyperparameter by its name; all of one length.
    """
    per_rate = len(next(iter(second.values())))
    if method.second is None:
        return np.array([(rate, 0.0) for rate in np.geomspace(low, high, points * per_rate)])
    return np.array(list(itertools.product(np.geomspace(low, high, points), second[method.second])))
