"""The methods that are compared, each with one number that is tuned, and the value that its theory names."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxlab import bidding
from jaxlab.bidding import Agent, Expectation, Settings
from jaxlab.bidding.l2fob import PAPER_STEP, Scalar
from jaxlab.experiments.l2fob.settings import Setting

__all__ = ["METHODS", "Method", "select"]


@dataclass(frozen=True)
class Method:
    """A way to bid.

    Attributes:
      make: ``make(setting, step, buffer)``.
      theory: the step of its theory for a number of rounds, None where there is none.
      grid: what is tuned over, None for the step sizes of the config, empty where there is nothing to tune.
      bids: whether candidates must be bids of an auction, in ascending order.
    """

    make: Callable[[Setting, Scalar, int], Agent]
    theory: Callable[[int], float] | None = None
    grid: tuple[float, ...] | None = None
    bids: bool = False

    def steps(self, step_sizes: Sequence[float], rounds: int) -> tuple[float, ...]:
        """The grid with the theoretical step behind it, which is not tuned over."""
        grid = tuple(step_sizes) if self.grid is None else self.grid or (1.0,)
        return grid if self.theory is None else (*grid, self.theory(rounds))


def _l2fob(
    setting: Setting, step: Scalar, buffer: int, *, expectation: Expectation, budget_step: float | None = None
) -> Agent:
    return bidding.make_l2fob(
        setting.estimator,
        Settings(setting.budget_rate, setting.roi, step if budget_step is None else budget_step, step),
        expectation=expectation,
        buffer=buffer,
        explore_rounds=setting.explore_rounds,
    )


def _dual(setting: Setting, step: Scalar, buffer: int, *, make: Callable[..., Agent], **options: str) -> Agent:
    roi = {} if make is bidding.budget_dual else {"roi": setting.roi}
    bounds = "optimistic" if setting.optimistic else "mean"
    return make(setting.estimator, budget_rate=setting.budget_rate, step=step, bounds=bounds, **roi, **options)


METHODS: Mapping[str, Method] = {
    "l2fob_point": Method(partial(_l2fob, expectation="point"), math.sqrt),
    "l2fob_policy": Method(partial(_l2fob, expectation="policy"), math.sqrt),
    "l2fob_sample": Method(partial(_l2fob, expectation="sample"), math.sqrt),
    # The paper's study of step sizes: that of the budget stays, that of the target moves.
    "l2fob_roi_step": Method(
        partial(_l2fob, expectation="point", budget_step=PAPER_STEP), grid=(0.06, 0.6, 6.0, 60.0, 600.0)
    ),
    "budget_dual": Method(partial(_dual, make=bidding.budget_dual), lambda rounds: rounds**-0.5),
    "two_multiplier_dual": Method(partial(_dual, make=bidding.two_multiplier_dual), lambda rounds: rounds**-0.5),
    "multiplicative_dual": Method(
        partial(_dual, make=bidding.two_multiplier_dual, update="multiplicative"), lambda rounds: rounds**-0.5
    ),
    "min_pacing": Method(partial(_dual, make=bidding.min_pacing), lambda rounds: rounds**-0.5, bids=True),
    "optimistic_mirror": Method(
        lambda setting, step, _: bidding.optimistic_mirror(
            setting.estimator, budget_rate=setting.budget_rate, roi=setting.roi, alpha=step
        ),
        lambda _: 2.0,
        grid=(0.5, 2.0, 8.0, 32.0),
    ),
    "pid_pacing": Method(
        lambda setting, step, _: bidding.pid_pacing(
            setting.estimator, setting.bids, budget_rate=setting.budget_rate, gain=step
        ),
        grid=(0.0003, 0.001, 0.003, 0.01),
        bids=True,
    ),
    "constant_shading": Method(
        lambda setting, step, _: bidding.constant_shading(setting.estimator, setting.bids, share=step),
        grid=(0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5),
        bids=True,
    ),
    "throttling": Method(
        lambda setting, step, _: bidding.throttling(setting.estimator, budget_rate=setting.budget_rate), grid=()
    ),
    "greedy": Method(lambda setting, step, _: bidding.greedy(setting.estimator), grid=()),
}


def select(names: Sequence[str]) -> dict[str, Method]:
    """The methods of these names, in the table's order.

    Raises:
      ValueError: an unknown name.
    """
    if unknown := [name for name in names if name not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}; there are {', '.join(METHODS)}")
    return {name: method for name, method in METHODS.items() if name in names}
