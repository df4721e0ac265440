"""What a person sees of a run: progress while it lasts, then the table, the claims, and where the files are."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from jaxlab.experiments.execute import Outcome
from jaxlab.experiments.registry import Method

__all__ = ["Watch", "list_methods", "show"]

_LINE_SECONDS = 10.0


class Watch:
    """Progress on stderr: one bar with an ETA on a terminal, a plain line now and then elsewhere.

    The remaining time is the pace of the chunks computed so far, restored ones left out, over the cost to come.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", table_column=None),
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

    def plan(self, total_cost: float) -> None:
        """The costs of all loops to come add up to ``total_cost``."""
        self._total = total_cost

    def advance(self, name: str, done: int, length: int, cost: float, restored: bool) -> None:
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
    about = f"{result['experiment']}, {result['preset']}, seed {result['seed']}, {result['device']}"
    _say(console, f"{about}, {result['seconds']} s")
    for table in _tables(console, result["table"]):
        console.print(table)
    for claim in result["claims"]:
        bound = claim["bound"]
        limit = f"[{_number(bound[0])}, {_number(bound[1])}]" if claim["relation"] == "in" else _number(bound)
        mark, style = ("✓", "green") if claim["holds"] else ("✗", "red")
        verdict = f"{_number(claim['measured'])} {claim['relation']} {limit}"
        _say(
            console,
            f"{_safe(console, mark, 'ok  ' if claim['holds'] else 'FAIL')} {claim['id']}: {verdict}",
            style=style,
        )
        _say(console, claim["claim"], indent=4)
        if "known_gap" in claim:
            _say(console, f"known gap: {claim['known_gap']}", indent=4)
    for claim in result["skipped"]:
        _say(console, f"- {claim['id']}: skipped, see --preset {claim['preset']} ({claim['reason']})")
    for note in result["notes"]:
        _say(console, note)
    for path in [*outcome.figures, outcome.out / "result.json"]:
        _say(console, str(path))


def list_methods(console: Console, methods: Sequence[Method]) -> None:
    """Print the methods and their state."""
    table = _table(console)
    for heading in ("name", "state", "module", "arXiv"):
        table.add_column(heading, no_wrap=True)
    table.add_column("paper")
    for method in methods:
        table.add_row(method.name, method.state, method.module, method.arxiv or "-", method.title)
    console.print(table)


def _tables(console: Console, rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """The rows as one table, or as several one under the other where the columns do not fit."""
    plus_minus = _safe(console, " ± ", " +- ")
    cells: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in rows for name in row if name != "method"):
        base, _, kind = name.rpartition("_")
        spread = f"{base}_std"
        if kind == "std" and any(f"{base}_mean" in row for row in rows):
            continue
        paired = kind == "mean" and any(spread in row for row in rows)
        cells[base if paired else name] = [
            ""
            if name not in row
            else _number(row[name]) + (plus_minus + _number(row[spread], 2) if spread in row and paired else "")
            for row in rows
        ]
    methods = [row["method"] for row in rows]
    room = console.width - max((len(method) for method in ["method", *methods]), default=0) - 2
    while cells:
        table, width = _table(console), 0
        table.add_column("method", no_wrap=True)
        shown = []
        for name, column in list(cells.items()):
            width += max(map(len, [name, *column])) + 2
            if shown and width > room:
                break
            table.add_column(name, justify="right")
            shown.append(cells.pop(name))
        for method, *numbers in zip(methods, *shown, strict=True):
            table.add_row(Text(method), *numbers)
        yield table


def _table(console: Console) -> Table:
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))


def _say(console: Console, text: str, *, indent: int = 0, style: str = "") -> None:
    console.print(Padding(Text(text, style=style), (0, 0, 0, indent)))


def _number(value: Any, digits: int = 4) -> str:
    return f"{float(value):.{digits}g}"


def _safe(console: Console, text: str, plain: str) -> str:
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return plain
    return text


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
