"""What the benchmarks share: timing with compilation apart, one table, one JSON file.

A script in this folder runs jaxlab and what a user would run instead on the same work::

    timing, result = measure(lambda: train(params, batches), repeats=5)
    print_table("Training", ("", "compile s", "run s"), [("jaxlab", f"{timing.compile:.2f}", f"{timing.mean:.3f}")])
    write_json(path, "field_method", rows=[{"implementation": "jaxlab", "seconds": timing.runs}])
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["Timing", "device_name", "measure", "print_table", "write_json"]

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one piece of work.

    Attributes:
      first: the first call, with compilation.
      runs: a warm call, one entry a repeat.
    """

    first: float
    runs: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Seconds of a warm call."""
        return statistics.mean(self.runs)

    @property
    def compile(self) -> float:
        """What the first call took longer than a warm one; 0 where that is less than the noise."""
        return max(self.first - self.mean, 0.0)

    def rate(self, items: int) -> tuple[float, float]:
        """Mean and standard deviation over the calls of ``items`` per second."""
        rates = [items / seconds for seconds in self.runs]
        return statistics.mean(rates), statistics.stdev(rates) if len(rates) > 1 else 0.0


def measure(work: Callable[[], T], *, repeats: int, seconds: float = 0.2) -> tuple[Timing, T]:
    """Time ``work``, each call until its arrays are computed.

    Args:
      work: what to call.
      repeats: how often to measure a warm call.
      seconds: a repeat makes as many calls as this takes, at least one, and reports their average.

    Returns:
      The timing, and what the last call returned.

    Raises:
      ValueError: if ``repeats`` is below one.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")

    def average_of(calls: int) -> tuple[float, T]:
        start = time.perf_counter()
        for _ in range(calls):
            result = jax.block_until_ready(work())
        return (time.perf_counter() - start) / calls, result

    first, _ = average_of(1)
    calls = math.ceil(max(seconds / average_of(1)[0], 1))
    runs, results = zip(*(average_of(calls) for _ in range(repeats)), strict=True)
    return Timing(first, runs), results[-1]


def device_name() -> str:
    """Kind and number of the devices that jax computes on, and of CPU cores where they are CPUs."""
    devices = jax.devices()
    name = f"{len(devices)} x {devices[0].device_kind}" if len(devices) > 1 else devices[0].device_kind
    return f"{name} ({os.cpu_count()} cores)" if devices[0].platform == "cpu" else name


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of text, first column to the left, at most 80 columns wide."""
    console = Console()
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for heading, justify in zip(headings, ("left", *["right"] * (len(headings) - 1)), strict=True):
        table.add_column(heading, justify=justify)
    for row in rows:
        table.add_row(*row)
    console.print(table, width=min(console.width, 80))


def write_json(path: Path, benchmark: str, *, rows: Sequence[Mapping[str, Any]], **facts: Any) -> None:
    """Write the rows with the device and the versions they were measured on.

    Args:
      path: the file.
      benchmark: name of the script.
      rows: one mapping a row of the table.
      facts: whatever else is true of all rows.
    """
    versions = {package: metadata.version(package) for package in ("jax", "jaxlib")}
    result = {"benchmark": benchmark, "device": device_name(), "versions": versions, **facts, "rows": list(rows)}
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
