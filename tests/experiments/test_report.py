"""What is shown while a run lasts, and of its table."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from jaxlab.experiments import report
from jaxlab.experiments.outcome import Outcome


@pytest.fixture
def clock(monkeypatch):
    """The watch's clock, in seconds, moved by hand."""
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_now_and_then(clock):
    """Elsewhere than on a terminal: a line every ten seconds, the time left at the pace of what was computed."""
    console = Console(file=io.StringIO(), width=80)
    with report.Watch(console) as watch:
        watch.plan(10.0)
        for chunk in range(4):
            watch.advance("tuning", chunk + 1, 4, 1.0, True)
        clock[0] = 5.0
        watch.advance("descent", 1, 5, 1.0, False)
        clock[0] = 20.0
        watch.advance("descent", 2, 5, 1.0, False)
        clock[0] = 29.0
        watch.advance("descent", 3, 5, 1.0, False)
        clock[0] = 4 * 3000.0
        watch.advance("plot", 1, 1, 1.0, False)
    # Two units took 20 s and four remain; four units took 12,000 s and two remain.
    assert console.file.getvalue() == "60% descent 2/5 ETA 0:40\n80% plot ETA 1:40:00\n"


def test_bar_on_a_terminal(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with report.Watch(console) as watch:
        watch.plan(2.0)
        clock[0] = 30.0
        watch.advance("descent", 1, 2, 1.0, False)
        watch._bar.refresh()
    assert "descent 1/2" in console.file.getvalue()
    assert "50% ETA 0:30" in console.file.getvalue()


def test_unplanned_run_shows_no_guess(clock):
    console = Console(file=io.StringIO(), width=80)
    with report.Watch(console) as watch:
        clock[0] = 11.0
        watch.advance("descent", 1, 2, 1.0, False)
    assert console.file.getvalue() == "descent 1/2\n"


def test_wide_table_is_cut_into_several():
    """Every column appears once, mean and spread in one, the methods are repeated, and no line is longer than 80."""
    names = [f"loss_under_noise_{i}" for i in range(8)]
    rows = [
        {"method": method}
        | {f"{n}_mean": 12.345678 * i for i, n in enumerate(names)}
        | {f"{n}_std": 0.1234 for n in names}
        for method in ("ours", "theirs")
    ]
    rows.append({"method": "untuned", "diverged_at": float("inf")})
    result = {"experiment": "x", "preset": "cpu", "seed": 0, "device": "cpu", "seconds": 61.2}
    result |= {"table": rows, "claims": [], "skipped": [], "notes": []}
    console = Console(file=io.StringIO(), width=80)
    report.show(console, Outcome(result, Path("here"), []))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    headings = [line.split()[1:] for line in text.splitlines() if line.startswith("method")]
    assert len(headings) > 1
    assert [name for heading in headings for name in heading] == [*names, "diverged_at"]
    assert [text.count(method) for method in ("ours", "theirs", "untuned")] == [len(headings)] * 3
    assert "37.04 ± 0.12" in text
    assert "inf" in text
    assert "x at cpu, seed 0, on cpu, took 1:02" in text


def test_what_runs_on_is_indented():
    """So that one sees where the next claim or note begins."""
    result = {
        "experiment": "x",
        "preset": "smoke",
        "seed": 0,
        "device": "cpu",
        "seconds": 1.0,
        "table": [],
        "claims": [],
    }
    result["skipped"] = [{"id": f"claim_{i}", "preset": "cpu", "reason": "too short a run to tell"} for i in range(2)]
    result["notes"] = ["A note of more than forty characters, which runs on."]
    console = Console(file=io.StringIO(), width=40)
    report.show(console, Outcome(result, Path("here"), []))
    lines = console.file.getvalue().splitlines()
    begin = [line for line in lines[: lines.index("")] if not line.startswith("    ")]
    assert [line.split()[0] for line in begin] == ["-", "-", "A"]
    assert max(map(len, lines)) <= 40
