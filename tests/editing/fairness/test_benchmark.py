"""The benchmark at a tiny size: the same numbers as the peers, and a check that bites. No times."""

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
TINY = [
    "--rows",
    "300",
    "--groups",
    "2",
    "--resamples",
    "20",
    "--peer-resamples",
    "5",
    "--scales",
    "3",
    "--repeats",
    "1",
]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("COLUMNS", "80")
    return importlib.import_module("editing_fairness")


def test_all_rows_are_there_and_agree(benchmark, tmp_path, capsys):
    pytest.importorskip("fairlearn", reason="compares with fairlearn")
    pytest.importorskip("torch", reason="compares with PyTorch")
    benchmark.main([*TINY, "--out", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["peer"] for row in result["rows"]] == ["MetricFrame", "MetricFrame", "reload, PyTorch", "reload, jit"]
    for row in result["rows"]:
        assert all(math.isfinite(row[name]) and row[name] > 0 for name in ("seconds", "peer_seconds", "times_faster"))
        assert row["difference"] <= 1e-3
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_the_check_bites(benchmark):
    with pytest.raises(SystemExit, match=r"peer: results differ by 2\.0e-01, more than 1\.0e-01"):
        benchmark.check_close("peer", np.array([0.1, 0.4]), np.array([0.1, 0.2]), 0.1)
    with pytest.raises(SystemExit, match="peer: results differ by nan"):
        benchmark.check_close("peer", np.nan, 0.0, 0.1)


def test_bad_options_end_with_one_line(benchmark, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(["--rows", "0"])
    assert stopped.value.code == 2
    assert "--rows must be at least 1, got 0" in capsys.readouterr().err.splitlines()[-1]
