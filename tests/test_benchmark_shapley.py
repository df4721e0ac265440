"""The benchmark of layer pruning: finite numbers in table and file, and losses that are checked to be the same."""

import importlib
import json
import math
from pathlib import Path

import pytest

SIZES = ["--masks", "4", "--blocks", "6", "--width", "16", "--tokens", "2x8", "--players", "6", "--queries", "300"]


@pytest.fixture
def benchmark(monkeypatch):
    """The script, imported as it is run."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    monkeypatch.setenv("COLUMNS", "80")
    return importlib.import_module("compress_shapley")


def test_both_sides_do_the_same(benchmark, capsys, tmp_path):
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=f"needs the peers extra: {package}")
    parts = ["evaluation", "estimator"]
    benchmark.main([*SIZES, "--repeats", "1", "--parts", *parts, "--out", str(tmp_path / "result.json")])
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    names = [(row["part"], row["implementation"].split(",")[0]) for row in rows]
    assert names == [("evaluation", "PyTorch"), *[("evaluation", "jaxlab")] * 3, ("estimator", "PyTorch"), names[-1]]
    assert names[-1] == ("estimator", "jaxlab")
    for row in rows:
        assert math.isfinite(row["mean"])
        assert row["mean"] > 0
        assert row["difference"] < benchmark.TOLERANCE
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_other_losses_are_found_out(benchmark, monkeypatch):
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=f"needs the peers extra: {package}")
    losses = benchmark.compress.StackUtility.losses
    monkeypatch.setattr(benchmark.compress.StackUtility, "losses", lambda self, masks: losses(self, masks) + 0.01)
    with pytest.raises(SystemExit, match=r"gather: losses differ by 1\.0e-02 nats"):
        benchmark.main([*SIZES, "--repeats", "1", "--parts", "evaluation"])
