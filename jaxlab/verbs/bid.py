"""``jaxlab bid replay``: what L2FOB would have bid on a recorded log of auctions, and what would have come of it.

The log is a CSV file with columns ``value`` (what winning is worth), ``price`` (the bid to beat) and, optionally,
``click`` (0 or 1). Rounds are met in their order and the agent learns from them as it goes (Guo et al., ICLR 2026).
"""

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import linprog

from jaxlab import bidding
from jaxlab.bidding import Auction, Settings
from jaxlab.bidding.l2fob import PAPER_STEP

__all__ = ["Replay", "clairvoyant_optimum", "main", "read_log", "replay", "stationary_optimum"]

_SHOWN = 10  # rows of the table over time
_QUANTILES = 51
_POLICY_STEP = 6.0  # where policies are compared the paper's step violates early; from 6 on steps are alike


@dataclass(frozen=True)
class Replay:
    """What came of a log, in its own units.

    Attributes:
      bid, won, reward, cost: of every round.
      optimum: reward of the best stationary policy in hindsight, which knows the distributions of values and prices.
      clairvoyant: reward of one who had known every price, see `clairvoyant_optimum`.
      stopped: rounds until the budget was spent, all of them where it was not.
    """

    bid: np.ndarray
    won: np.ndarray
    reward: np.ndarray
    cost: np.ndarray
    optimum: float
    clairvoyant: float
    stopped: int


def main(arguments: Sequence[str]) -> int:
    """Parse the words after ``jaxlab bid``, replay, write three files and print the course of the campaign.

    Raises:
      ValueError: bad input, one line.
    """
    parser = _parser()
    try:
        options = parser.parse_args(arguments or ["--help"])
    except SystemExit:  # the help was printed
        return 0
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out must be a folder, {options.out} is a file")
    value, price, click = read_log(options.log)
    found = replay(
        value,
        price,
        budget=options.budget,
        roi=options.roi,
        auction=options.auction,
        reward=options.reward,
        expectation=options.expectation,
        step=options.step,
        bids=options.bids,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    numbers = _summary(found, click, budget=options.budget, roi=options.roi)
    (options.out / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n")
    course = _course(found, roi=options.roi)
    with (options.out / "rounds.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["round", "bid", "won", *course])
        columns = [found.bid, found.won.astype(int), *course.values()]
        writer.writerows([t + 1, *(column[t].item() for column in columns)] for t in range(len(value)))
    _plot(options.out / "campaign.png", course, budget=options.budget, roi=options.roi)
    _print(numbers, course)
    for name in ("summary.json", "rounds.csv", "campaign.png"):
        print(options.out / name)
    return 0


def replay(
    value: np.ndarray,
    price: np.ndarray,
    *,
    budget: float,
    roi: float,
    auction: str = "first",
    reward: str = "utility",
    expectation: str = "policy",
    step: float | None = None,
    bids: int = 101,
) -> Replay:
    """Bid on a log, round by round.

    Args:
      value, price: of each round, in one unit of money.
      budget: the most that may be spent.
      roi: reward wanted for each unit spent.
      auction: ``first`` or ``second`` price.
      reward: ``utility`` (value less payment) or ``value``.
      expectation: of L2FOB, ``point``, ``sample`` or ``policy``.
      step: both step sizes; None is 6 with policies and else the paper's 0.6.
      bids: size of the grid of bids, from 0 to the highest value.

    Raises:
      ValueError: a budget that is not positive, a negative target or step, fewer than two bids, no round with a value.
    """
    if not budget > 0:
        raise ValueError(f"the budget must be positive, got {budget}")
    if not value.max() > 0:
        raise ValueError("no round of the log has a positive value")
    rounds, scale = len(value), float(value.max())
    grid = bidding.bid_grid(bids)
    make: Any = bidding.first_price if auction == "first" else bidding.second_price
    # Money is counted in units of the highest value, so that step sizes mean what they mean in the paper. No bid beats
    # a price above it, however high: one absurd price must not change the campaign.
    log = Auction(jnp.asarray(value / scale, jnp.float32), jnp.asarray(np.minimum(price / scale, 2.0), jnp.float32))
    sampler = bidding.clipped_normal(0.0, 0.0)
    market = bidding.replay(make(grid, values=sampler, prices=sampler, reward=reward), log)
    if step is None:
        step = _POLICY_STEP if expectation == "policy" else PAPER_STEP
    constraints: Any = Settings(budget / scale / rounds, roi, step, step)
    options: Any = {"price": auction, "reward": reward}
    estimator = bidding.auction_estimator(grid, log_confidence=float(np.log(max(rounds, 2))), **options)
    mode: Any = expectation
    agent = bidding.make_l2fob(estimator, constraints, expectation=mode)
    trace = jax.jit(lambda key: bidding.simulate(market, agent, key, rounds, budget / scale))(jax.random.key(0))
    payment = np.asarray(trace.cost, float) * scale
    won = np.asarray(trace.won)
    return Replay(
        bid=np.asarray(grid, float)[np.asarray(trace.index)] * scale,
        won=won,
        reward=np.where(won, value, 0.0) - (payment if reward == "utility" else 0.0),
        cost=payment,
        optimum=stationary_optimum(
            value, price, np.asarray(grid, float) * scale, budget=budget, roi=roi, auction=auction, reward=reward
        ),
        clairvoyant=clairvoyant_optimum(value, price, budget=budget, roi=roi, reward=reward),
        stopped=int(bidding.stop_round(trace.alive)),
    )


def stationary_optimum(
    value: np.ndarray,
    price: np.ndarray,
    bids: np.ndarray,
    *,
    budget: float,
    roi: float,
    auction: str,
    reward: str,
) -> float:
    """The paper's yardstick: the most that bids depending on the value alone earn on average, over the whole log.

    Values (at most 51 quantiles of them) and prices are taken as independent.
    """
    values = np.quantile(value, (np.arange(_QUANTILES) + 0.5) / _QUANTILES) if len(value) > _QUANTILES else value
    win = np.searchsorted(np.sort(price), bids, side="right") / len(price)
    options: Any = {"price": auction, "reward": reward}
    tables = bidding.auction_tables(values, bids, win, **options)
    found = bidding.linear_programme_optimum(*tables, budget_rate=budget / len(value), roi=roi)
    return len(value) * found.reward


def clairvoyant_optimum(value: np.ndarray, price: np.ndarray, *, budget: float, roi: float, reward: str) -> float:
    """The most a bidder could earn that knows every price: it pays the price and no more, in part if need be.

    No bidder in either kind of auction can earn more within the constraints.
    """
    gain = value - price if reward == "utility" else value
    solved = linprog(
        -gain, A_ub=np.stack([price, roi * price - gain]), b_ub=[budget, 0.0], bounds=(0.0, 1.0), method="highs"
    )
    return float(0.0 - solved.fun)


def read_log(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Columns ``value``, ``price`` and, if there is one, ``click`` of a CSV file.

    Raises:
      ValueError: a file that is no CSV in UTF-8, a column that is missing or there twice, more cells in a row than
        columns, a cell that is no number at least 0, a click other than 0 or 1, no row.
    """
    try:
        wanted, rows = _read_rows(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8: {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    if not rows:
        raise ValueError(f"{path} has no rows")
    columns = dict(zip(wanted, np.array(rows).T, strict=True))
    click = columns.get("click")
    if click is not None and not np.isin(click, (0, 1)).all():
        raise ValueError(f"{path}: click must be 0 or 1, got {click[~np.isin(click, (0, 1))][0]:g}")
    return columns["value"], columns["price"], click


def _read_rows(path: Path) -> tuple[list[str], list[list[float]]]:
    with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark in front
        reader = csv.DictReader(file, skipinitialspace=True)
        names = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
        if missing := [name for name in ("value", "price") if name not in names]:
            raise ValueError(f"{path} has no column {missing[0]!r}; found {', '.join(names) or 'an empty file'}")
        wanted: list[str] = [name for name in ("value", "price", "click") if name in names]
        if twice := [name for name in wanted if names.count(name) > 1]:
            raise ValueError(f"{path} has more than one column {twice[0]!r}")
        rows = []
        for row in reader:
            if None in row:  # a decimal comma, most likely
                raise ValueError(f"{path}, line {reader.line_num}: more cells than the {len(names)} columns")
            rows.append([_number(path, reader.line_num, name, row[name]) for name in wanted])
    return wanted, rows


def _number(path: Path, line: int, name: str, cell: str | None) -> float:
    try:
        number = float(cell or "")
    except ValueError:
        number = np.nan
    if not (np.isfinite(number) and number >= 0):
        raise ValueError(f"{path}, line {line}: {name} must be a number at least 0, got {cell!r}")
    return number


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; see jaxlab bid replay --help")

    parser = Parser(prog="jaxlab bid", description="Online bidding under a budget and a return target.")
    verbs = parser.add_subparsers(required=True, metavar="replay", parser_class=Parser)
    verb = verbs.add_parser("replay", help="replay a log of auctions: spend, value, return, violation, regret")
    verb.add_argument("log", type=Path, help="CSV file with columns value, price (the bid to beat), optionally click")
    verb.add_argument("--budget", type=float, required=True, help="the most that may be spent")
    verb.add_argument("--roi", type=float, required=True, help="reward wanted for each unit spent")
    verb.add_argument("--auction", choices=("first", "second"), default="first", help="price rule (default first)")
    verb.add_argument(
        "--reward", choices=("utility", "value"), default="value", help="value less payment, or value (default)"
    )
    verb.add_argument(
        "--expectation",
        choices=("point", "sample", "policy"),
        default="policy",
        help="over contexts, in the queues (default policy; the paper: point)",
    )
    verb.add_argument("--step", type=float, help="step sizes (default: 6 with policies, else the paper's 0.6)")
    verb.add_argument("--bids", type=int, default=101, help="size of the grid of bids (default 101)")
    verb.add_argument("--out", type=Path, default=Path("replay"), help="folder to write (default ./replay)")
    return parser


def _course(found: Replay, *, roi: float) -> dict[str, np.ndarray]:
    spend, reward = np.cumsum(found.cost), np.cumsum(found.reward)
    share = np.arange(1, len(spend) + 1) / len(spend)
    return {
        "spend": spend,
        "value": reward,
        "roi": np.divide(reward, spend, out=np.zeros_like(spend), where=spend > 0),
        "violation": roi * spend - reward,
        "regret": found.optimum * share - reward,
    }


def _summary(found: Replay, click: np.ndarray | None, *, budget: float, roi: float) -> dict[str, Any]:
    course = _course(found, roi=roi)
    numbers: dict[str, Any] = {
        "rounds": len(found.cost),
        "rounds_until_stop": found.stopped,
        "wins": int(found.won.sum()),
        "budget": budget,
        "target_roi": roi,
        **{name: float(of_rounds[-1]) for name, of_rounds in course.items()},
        "largest_violation": float(max(course["violation"].max(), 0.0)),
        "offline_optimum": found.optimum,
        "clairvoyant_optimum": found.clairvoyant,
    }
    if click is not None:
        clicks = int(click[found.won].sum())
        numbers |= {"clicks": clicks, "cost_per_click": numbers["spend"] / clicks if clicks else None}
    return numbers


def _plot(path: Path, course: dict[str, np.ndarray], *, budget: float, roi: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3.6), layout="constrained")
    axes = figure.subplots(ncols=4)
    rounds = np.arange(1, len(course["spend"]) + 1)
    lines = {"spend": budget, "roi": roi, "violation": 0.0, "regret": 0.0}
    titles = {"spend": "spend and value so far", "roi": "return so far", "regret": "regret to the offline optimum"}
    for axis, (name, line) in zip(axes, lines.items(), strict=True):
        axis.plot(rounds, course[name], label=name)
        axis.axhline(line, color="k", ls="--", lw=1, label="budget" if name == "spend" else None)
        axis.set(xlabel="round", title=titles.get(name, name))
    axes[0].plot(rounds, course["value"], label="value")
    axes[0].legend()
    axes[1].set_ylim(0, max(2 * roi, 1.1 * course["roi"][-1]))
    FigureCanvasAgg(figure).print_figure(path, dpi=150)


def _print(numbers: dict[str, Any], course: dict[str, np.ndarray]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("round", *course):
        table.add_column(heading, justify="right")
    for t in np.unique(np.linspace(0, numbers["rounds"], _SHOWN + 1).astype(int)[1:]).clip(1) - 1:
        table.add_row(str(t + 1), *(f"{of_rounds[t]:.4g}" for of_rounds in course.values()))
    Console().print(table)
    kept = "kept" if numbers["violation"] <= 1e-9 * numbers["spend"] else "missed"
    print(
        f"{numbers['wins']} wins; spent {numbers['spend']:.4g} of {numbers['budget']:.4g}; "
        f"return {numbers['roi']:.4g}, target {numbers['target_roi']:.4g} {kept}\n"
        f"largest violation {numbers['largest_violation']:.4g}; {numbers['value']:.4g} of the "
        f"{numbers['offline_optimum']:.4g} of the best stationary policy in hindsight"
    )
    if "clicks" in numbers:
        each = numbers["cost_per_click"]
        print(f"{numbers['clicks']} clicks" + (f", {each:.4g} each" if each else ""))
    if numbers["rounds_until_stop"] < numbers["rounds"]:
        print(f"the budget was spent after round {numbers['rounds_until_stop']}")
