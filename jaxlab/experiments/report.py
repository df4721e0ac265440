"""What a person sees of a run: progress while it lasts, then the table, the claims, and where the files are."""

import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.table import Table
from rich.text import Text

from jaxlab.experiments.base import Progress
from jaxlab.experiments.outcome import Outcome

__all__ = ["Watch", "show"]

_LINE_SECONDS = 10.0
_GAP = 2


class Watch(Progress):
    """Progress on stderr: one bar with an ETA on a terminal, a plain line now and then elsewhere.

    The remaining time is the pace of the chunks computed so far, restored ones left out, over the cost to come.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = rich.progress.Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[percent]}"),
            TextColumn("{task.fields[eta]}"),
            console=console,
            transient=True,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, percent="", eta="")
        self._total: float | None = None
        self._done = self._computed = 0.0
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> "Watch":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def plan(self, total_cost: float | int) -> None:
        """The costs of all loops to come add up to ``total_cost``."""
        self._total = total_cost

    def advance(self, name: str, done: int, length: int, cost: float | int, restored: bool) -> None:
        """One chunk of the loop ``name`` is finished, ``done`` of ``length``."""
        now = time.monotonic()
        self._done += cost
        self._computed += 0.0 if restored else cost
        percent = eta = ""
        if self._total:
            percent = f"{min(1.0, self._done / self._total):4.0%}"
            if self._computed:
                left = max(0.0, self._total - self._done) * (now - self._start) / self._computed
                eta = f"ETA {_clock(left)}"
        step = f"{name} {done}/{length}" if length > 1 else name
        self._bar.update(
            self._task, description=step, total=self._total, completed=self._done, percent=percent, eta=eta
        )
        if not self._console.is_terminal and now - self._last_line > _LINE_SECONDS:
            self._last_line = now
            self._console.print(" ".join(filter(None, [percent.strip(), step, eta])), markup=False, highlight=False)


def show(console: Console, outcome: Outcome) -> None:
    """Print the table, the claims, the notes and the paths."""
    result = outcome.result
    for table in _tables(console, result["table"]):
        console.print(table)
        console.print()
    for claim in result["claims"]:
        mark, plain, style = ("✓", "ok", "green") if claim["holds"] else ("✗", "FAILS", "red")
        bound = claim["bound"]
        limit = f"[{_number(bound[0])}, {_number(bound[1])}]" if claim["relation"] == "in" else _number(bound)
        verdict = f"{claim['id']}: {_number(claim['measured'])} {claim['relation']} {limit}"
        _say(console, f"{_safe(console, mark, plain)} {verdict}", style=style)
        _say(console, claim["claim"], indent=4)
        if "known_gap" in claim:
            _say(console, f"known gap: {claim['known_gap']}", indent=4)
    for claim in result["skipped"]:
        _say(console, f"- {claim['id']}: skipped, --preset {claim['preset']} shows it ({claim['reason']})", hang=4)
    for note in result["notes"]:
        _say(console, note, hang=4)
    console.print()
    for path in [*outcome.figures, outcome.out / "result.json"]:
        _say(console, str(path))
    about = f"{result['experiment']} at {result['preset']}, seed {result['seed']}, on {result['device']}"
    _say(console, f"{about}, took {_clock(result['seconds'])}")


def _tables(console: Console, rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """The rows as one table, or as several one under the other where the columns do not fit."""
    methods = [row["method"] for row in rows]
    columns = list(_columns(rows, _safe(console, " ± ", " +- ")).items())
    while columns:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
        table.add_column("method", no_wrap=True)
        room = console.width - max(map(len, ["method", *methods]))
        shown: list[list[str]] = []
        while columns:
            name, cells = columns[0]
            room -= _GAP + max(map(len, [name, *cells]))
            if shown and room < 0:
                break
            table.add_column(Text(name), justify="right")
            shown.append(cells)
            columns.pop(0)
        for method, *numbers in zip(methods, *shown, strict=True):
            table.add_row(Text(method), *numbers)
        yield table


def _columns(rows: Sequence[Mapping[str, Any]], plus_minus: str) -> dict[str, list[str]]:
    """The numbers as text, ``x_mean`` and ``x_std`` in one column ``x``."""
    names = dict.fromkeys(name for row in rows for name in row if name != "method")
    columns = {}
    for name in names:
        base = name.removesuffix("_mean")
        spread = f"{base}_std"
        if base != name and spread in names:
            pairs = [(row.get(name), row.get(spread)) for row in rows]
            columns[base] = [
                _number(mean) + (plus_minus + _number(std, 2) if std is not None else "") for mean, std in pairs
            ]
        elif not (name.endswith("_std") and f"{name.removesuffix('_std')}_mean" in names):
            columns[name] = [_number(row.get(name)) for row in rows]
    return columns


def _say(console: Console, text: str, *, indent: int = 0, hang: int = 0, style: str = "") -> None:
    lines = textwrap.wrap(
        text,
        console.width,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hang),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        console.print(Text(line, style=style), soft_wrap=True)


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def _safe(console: Console, text: str, plain: str) -> str:
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return plain
    return text


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
