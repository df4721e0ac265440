"""``jaxlab fairness report``: how the rates of a classifier differ between groups, from a file of its predictions.

The file is a CSV with a row a person: a column of true labels (0 or 1), one of predictions (0 or 1, or scores), and one
or more that say which group the person is in. Rates, differences and their bootstrap intervals are those of
`jaxlab.editing.fairness` (arXiv 2505.24262); differences are what fairlearn calls by the same names.
"""

import argparse
import csv
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxlab.editing.fairness import (
    GroupStatistics,
    concerns,
    demographic_parity_difference,
    equal_opportunity_difference,
    equalized_odds_difference,
    group_statistics,
    one_vs_rest,
    resample,
)

__all__ = ["main", "read_predictions", "report"]

_RATES = ("positive_rate", "true_positive_rate", "false_positive_rate", "accuracy")
_DIFFERENCES = {
    "demographic_parity_difference": demographic_parity_difference,
    "equal_opportunity_difference": equal_opportunity_difference,
    "equalized_odds_difference": equalized_odds_difference,
}
_MOST_GROUPS = 50
_ONE_CLASS = 0.99


def main(arguments: Sequence[str]) -> int:
    """Parse the words after ``jaxlab fairness``, report, write two files and print the tables.

    Raises:
      ValueError: bad input, one line.
    """
    parser = _parser()
    try:
        options = parser.parse_args(arguments or ["--help"])
    except SystemExit:  # the help was printed
        return 0
    if any(folder.exists() and not folder.is_dir() for folder in (options.out, *options.out.parents)):
        raise ValueError(f"--out {options.out}: a file is in the way of that folder")
    if options.bootstrap < 1:
        raise ValueError(f"--bootstrap must be at least 1, got {options.bootstrap}")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed must be between 0 and {2**32 - 1}, got {options.seed}")
    if twice := [name for i, name in enumerate(options.group) if name in options.group[:i]]:
        raise ValueError(f"--group names the column {twice[0]!r} twice")
    labels, scores, groups = read_predictions(
        options.predictions, label=options.label, prediction=options.prediction, groups=options.group
    )
    predictions = _decide(scores, options.threshold, options.prediction)
    if options.combine == "intersection" and len(groups) > 1:
        joined = [" & ".join(cells) if all(cells) else "" for cells in zip(*groups.values(), strict=True)]
        groups = {" & ".join(groups): joined}
    found = {
        name: report(
            labels,
            predictions,
            cells,
            name=name,
            undefined=options.undefined,
            resamples=options.bootstrap,
            level=options.level,
            seed=options.seed,
        )
        for name, cells in groups.items()
    }
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {"rows": len(labels), "threshold": options.threshold, "resamples": options.bootstrap}
    settings |= {"level": options.level, "seed": options.seed, "undefined": options.undefined}
    text = json.dumps(settings | {"attributes": found}, indent=2, allow_nan=False, ensure_ascii=False)
    (options.out / "report.json").write_text(text + "\n", encoding="utf-8")
    _plot(options.out / "report.png", found)
    for name, numbers in found.items():
        _print(name, numbers, level=options.level)
    for file in ("report.json", "report.png"):
        print(options.out / file)
    return 0


def report(
    labels: np.ndarray,
    predictions: np.ndarray,
    groups: Sequence[str],
    *,
    name: str = "group",
    undefined: str = "zero",
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Any]:
    """Rates, differences and intervals of one attribute.

    Args:
      labels: ``[n]``, 0 or 1.
      predictions: ``[n]``, 0 or 1.
      groups: the group of each row; rows of an empty one are in none and count in the overall rates only.
      name: of the attribute, for errors.
      undefined: what a rate without rows counts as, "zero" or "skip".
      resamples: of the bootstrap.
      level: of the intervals.
      seed: of the bootstrap.

    Returns:
      ``overall``, ``groups`` (by name), ``differences``: rates with their intervals; ``warnings``. A number that is
      undefined is None.

    Raises:
      ValueError: fewer than two groups or more than 50, a level outside (0, 1), an unknown ``undefined``.
    """
    names = sorted({group for group in groups if group})
    if len(names) < 2:
        raise ValueError(f"column {name!r} needs at least two groups, got {', '.join(names) or 'none'}")
    if len(names) > _MOST_GROUPS:
        raise ValueError(f"column {name!r} has {len(names)} groups, more than {_MOST_GROUPS}: is it a number?")
    if not 0 < level < 1:
        raise ValueError(f"the level must lie in (0, 1), got {level}")
    membership = np.array(groups)[:, None] == np.array(names)
    options: Any = {"undefined": undefined}

    def metrics(statistics: GroupStatistics) -> dict[str, Any]:
        of_groups = {rate: getattr(statistics.groups, rate) for rate in _RATES}
        overall = {rate: getattr(statistics.overall, rate) for rate in (*_RATES, "balanced_accuracy")}
        differences = {of: function(statistics, **options) for of, function in _DIFFERENCES.items()}
        return {"groups": of_groups, "overall": overall, "differences": differences}

    # Under jit, where nothing is warned of: what there is to say stands in the report.
    statistics = jax.jit(group_statistics)(predictions, labels, membership)
    drawn = resample(jax.random.key(seed), predictions, labels, membership, resamples=resamples)
    tails = jnp.array([(1 - level) / 2, (1 + level) / 2])
    values = jax.jit(metrics)(statistics)
    intervals = jax.jit(lambda s: jax.tree.map(lambda v: jnp.nanquantile(v, tails, axis=0), jax.vmap(metrics)(s)))(
        drawn
    )
    against_rest = one_vs_rest(statistics, **options)

    def of(part: str, rate: str, index: tuple[int, ...] = ()) -> dict[str, float | None]:
        low, high = (intervals[part][rate][(end, *index)] for end in (0, 1))
        return {"value": _number(values[part][rate][index]), "low": _number(low), "high": _number(high)}

    def counts(rates: Any, index: Any) -> dict[str, int]:
        return {key: round(float(getattr(rates, key)[index])) for key in ("rows", "positives", "negatives")}

    return {
        "overall": counts(statistics.overall, ()) | {rate: of("overall", rate) for rate in values["overall"]},
        "groups": {
            group: counts(statistics.groups, i)
            | {rate: of("groups", rate, (i,)) for rate in _RATES}
            | {f"{metric}_to_rest": _number(of_groups[i]) for metric, of_groups in against_rest.items()}
            for i, group in enumerate(names)
        },
        "differences": {metric: of("differences", metric) for metric in _DIFFERENCES},
        "warnings": [*concerns(statistics, names=names), *_collapse(statistics, sum(not group for group in groups))],
    }


def read_predictions(
    path: Path, *, label: str, prediction: str, groups: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, dict[str, list[str]]]:
    """Labels, predictions and the cells of the columns of groups of a CSV file.

    Raises:
      ValueError: a file that is no CSV in UTF-8, a column that is missing or there twice, a label other than 0 and 1, a
        prediction that is no number, no row.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark in front
            reader = csv.DictReader(file, skipinitialspace=True)
            names = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
            for name in (label, prediction, *groups):
                if names.count(name) != 1:
                    problem = "more than one column" if name in names else "no column"
                    raise ValueError(f"{path} has {problem} {name!r}; found {', '.join(names) or 'an empty file'}")
            columns: dict[str, list[str]] = {name: [] for name in groups}
            labels, scores = [], []
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                labels.append(_binary(where, label, row[label]))
                scores.append(_finite(where, prediction, row[prediction]))
                for name in groups:
                    columns[name].append((row[name] or "").strip())
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8: {error.reason} at byte {error.start}") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    if not labels:
        raise ValueError(f"{path} has no rows")
    return np.array(labels, np.int32), np.array(scores), columns


def _binary(where: str, name: str, cell: str | None) -> int:
    value = _finite(where, name, cell)
    if value not in (0, 1):
        raise ValueError(f"{where}: label {name} must be 0 or 1, got {cell!r}")
    return int(value)


def _finite(where: str, name: str, cell: str | None) -> float:
    try:
        value = float(cell or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{where}: {name} must be a number, got {cell!r}")
    return value


def _decide(scores: np.ndarray, threshold: float | None, name: str) -> np.ndarray:
    if threshold is None:
        outside = (scores < 0) | (scores > 1)
        if outside.any():
            raise ValueError(f"{name} has {scores[outside][0]:g}, which is no score in [0, 1]; give a --threshold")
        threshold = 0.5
    elif not math.isfinite(threshold):
        raise ValueError(f"--threshold must be finite, got {threshold}")
    return (scores > threshold).astype(np.int32)


def _collapse(statistics: GroupStatistics, without: int) -> list[str]:
    found = []
    rate = float(statistics.overall.positive_rate)
    if max(rate, 1 - rate) > _ONE_CLASS:
        found.append(
            f"one class is predicted for {100 * max(rate, 1 - rate):.1f} % of the rows: differences are small for that "
            "reason alone"
        )
    if without:
        found.append(f"{without} rows have no group: they count in the overall rates only")
    return found


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; see jaxlab fairness report --help")

    parser = Parser(prog="jaxlab fairness", description="Group fairness of a classifier.")
    verbs = parser.add_subparsers(required=True, metavar="report", parser_class=Parser)
    verb = verbs.add_parser("report", help="rates of groups and their differences, with intervals, from predictions")
    verb.add_argument("predictions", type=Path, help="CSV file with a row a person")
    verb.add_argument("--label", required=True, help="column of the true labels, 0 or 1")
    verb.add_argument("--prediction", required=True, help="column of predictions, 0 or 1, or of scores")
    verb.add_argument("--group", required=True, nargs="+", help="columns that name the groups; empty cells: no group")
    verb.add_argument(
        "--combine",
        choices=("each", "intersection"),
        default="each",
        help="several columns: a table each (default), or groups of their combinations",
    )
    verb.add_argument("--threshold", type=float, help="scores above it are positive (default 0.5 for scores in [0, 1])")
    verb.add_argument(
        "--undefined",
        choices=("zero", "skip"),
        default="zero",
        help="a rate without rows counts as 0, as in fairlearn (default), or is left out",
    )
    verb.add_argument("--bootstrap", type=int, default=1000, help="resamples for the intervals (default 1000)")
    verb.add_argument("--level", type=float, default=0.95, help="of the intervals (default 0.95)")
    verb.add_argument("--seed", type=int, default=0, help="of the resamples (default 0)")
    verb.add_argument("--out", type=Path, default=Path("fairness"), help="folder to write (default ./fairness)")
    return parser


def _print(name: str, numbers: Mapping[str, Any], *, level: float) -> None:
    console = Console(width=min(Console().width, 80))
    table = Table(
        box=None, pad_edge=False, padding=(0, 1, 0, 0), title=Text(_printable(name), style="bold"), title_justify="left"
    )
    table.add_column("group", overflow="fold", max_width=14)
    for heading in ("rows", "base", "positive rate", "true positive", "false positive", "accuracy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group, of in _rows(numbers):
        base = of["positives"] / of["rows"] if of["rows"] else math.nan
        cells = [_interval(of[rate]) for rate in _RATES[:3]]
        table.add_row(
            Text(_printable(group)), str(of["rows"]), f"{base:.2f}", *cells, _interval(of["accuracy"], ends=False)
        )
    console.print(table)
    differences = Table(box=None, pad_edge=False, padding=(0, 1))
    differences.add_column("difference between groups")
    for heading in ("value", f"{100 * level:g} % interval"):
        differences.add_column(heading, justify="right")
    for metric, of in numbers["differences"].items():
        ends = "-" if of["low"] is None else f"{of['low']:.3f} to {of['high']:.3f}"
        value = "-" if of["value"] is None else f"{of['value']:.3f}"
        differences.add_row(metric.removesuffix("_difference").replace("_", " "), value, ends)
    console.print(differences)
    overall = numbers["overall"]
    rates = {of: _interval(overall[of], ends=False) for of in ("accuracy", "balanced_accuracy", "positive_rate")}
    console.print(
        Text(
            f"accuracy {rates['accuracy']}, balanced accuracy {rates['balanced_accuracy']}, "
            f"positive rate {rates['positive_rate']}"
        )
    )
    for warning in numbers["warnings"]:
        console.print(Text(_printable(f"warning: {warning}")))
    console.print()


def _rows(numbers: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """What is shown: the groups, and all rows under a name that no group has."""
    return [*numbers["groups"].items(), ("all" if "all" not in numbers["groups"] else "(all rows)", numbers["overall"])]


def _printable(name: str) -> str:
    """A name from a file, without what would move the cursor of a terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def _interval(of: Mapping[str, float | None], *, ends: bool = True) -> str:
    if of["value"] is None:
        return "-"
    if not ends or of["low"] is None:
        return f"{of['value']:.2f}"
    return f"{of['value']:.2f} {of['low']:.2f}-{of['high']:.2f}"


def _plot(path: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = {"positive_rate": "positive rate", "true_positive_rate": "true positive rate"}
    labels |= {"false_positive_rate": "false positive rate", "accuracy": "accuracy"}
    most = max(len(numbers["groups"]) for numbers in found.values())
    figure = Figure(figsize=(11, (1.2 + 0.32 * (most + 1)) * len(found)), layout="constrained")
    axes = figure.subplots(nrows=len(found), ncols=len(labels), squeeze=False, sharex="col")
    for row, (name, numbers) in zip(axes, found.items(), strict=True):
        shown = _rows(numbers)
        places = np.arange(len(shown))[::-1]
        for axis, (rate, title) in zip(row, labels.items(), strict=True):
            for i, (place, (_, of)) in enumerate(zip(places, shown, strict=True)):
                if of[rate]["value"] is None:
                    continue
                ends = [of[rate]["low"] or 0.0, of[rate]["high"] if of[rate]["high"] is not None else 1.0]
                colour = "k" if i == len(shown) - 1 else "C0"
                axis.plot(ends, [place, place], "-", color=colour, lw=2, alpha=0.5)
                axis.plot(of[rate]["value"], place, "o", color=colour, ms=5)
            axis.axvline(numbers["overall"][rate]["value"] or 0.0, color="k", lw=0.6, ls=":")
            axis.set_yticks(places, ["" for _ in places])
            axis.set_ylim(-0.6, len(shown) - 0.4)
            axis.set_title(title, fontsize=10)
        names = [group if len(group) <= 32 else f"{group[:31]}…" for group in (_printable(of) for of, _ in shown)]
        names = [f"{group} ({of['rows']})" for group, (_, of) in zip(names, shown, strict=True)]
        row[0].set_yticks(places, names, parse_math=False)
        row[0].set_ylabel(_printable(name), parse_math=False)
    with warnings.catch_warnings():  # letters that the font lacks are drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasAgg(figure).print_figure(path, dpi=150)
