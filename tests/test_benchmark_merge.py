"""The benchmark of merging: finite numbers in table and file, and results that are checked to be the same. No times."""

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def benchmark(monkeypatch):
    """The script, imported as it runs."""
    pytest.importorskip("torch", reason="needs the peers extra: torch")
    pytest.importorskip("mergekit", reason="needs mergekit (pip install --no-deps)")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    monkeypatch.setenv("COLUMNS", "80")
    return importlib.import_module("editing_merge")


def test_both_make_the_same_model(benchmark, capsys, tmp_path):
    sizes = ["--hidden", "32", "--layers", "1", "--experts", "2", "--repeats", "1", "--dtypes", "float32"]
    benchmark.main([*sizes, "--methods", "ties", "dare_linear", "--out", str(tmp_path / "result.json")])
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [(row["from"], row["method"]) for row in rows] == [("memory", "ties"), ("memory", "dare_linear")]
    for row in rows:
        assert row["gigabytes_per_second"] > 0
        assert row["peer_gigabytes_per_second"] > 0
        assert math.isfinite(row["difference"])
    assert rows[0]["difference"] <= 1e-6
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_other_results_are_found_out(benchmark):
    random = np.random.default_rng(0)
    base, got, other = ({"w": random.normal(size=(400, 300)).astype(np.float32)} for _ in range(3))
    assert benchmark.check_alike("ties", base, got, got, exact=True) == 0
    assert benchmark.check_alike("dare_ties", base, got, got, exact=False) == 0
    with pytest.raises(SystemExit, match="ties: w differs by"):
        benchmark.check_alike("ties", base, got, other, exact=True)
    with pytest.raises(SystemExit, match=r"dare_ties: changes of w differ by .* % in size"):
        benchmark.check_alike("dare_ties", base, got, {"w": 2 * other["w"]}, exact=False)
