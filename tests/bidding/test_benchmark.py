"""The benchmark at a tiny size: the same bids, finite numbers, and a check that bites. No times."""

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--rounds", "60", "--campaigns", "3", "--chunk", "30", "--peer-rounds", "40", "--requests", "5"]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("COLUMNS", "80")
    return importlib.import_module("bidding_l2fob")


def test_all_rows_made_the_same_bids(benchmark, tmp_path, capsys):
    benchmark.main([*TINY, "--out", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["implementation"] for row in result["rows"]] == [
        "NumPy, one campaign",
        "NumPy, all campaigns",
        "jaxlab",
        "jaxlab, one request",
    ]
    for row in result["rows"]:
        assert all(math.isfinite(row[name]) and row[name] > 0 for name in ("seconds_per_decision", "times_faster"))
    assert result["differing"] <= result["tolerance"]
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_the_check_bites(benchmark, monkeypatch):
    bids = np.arange(1000)
    wrong = bids.copy()
    wrong[:11] += 1
    with pytest.raises(SystemExit, match=r"peer: 1\.1% of the bids differ"):
        benchmark.check_same_work("peer", wrong, bids)
    rng = np.random.default_rng(0)
    values, prices = (np.clip(rng.normal(mean, 0.1, (400, 2)), 0, 1).astype(np.float32) for mean in (0.6, 0.4))
    grid = np.linspace(0, 1, 101)
    right = benchmark.numpy_bids(values, prices, grid)
    monkeypatch.setattr(benchmark, "STEP", 1.2)
    assert np.mean(right != benchmark.numpy_bids(values, prices, grid)) > 10 * benchmark.TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "50", "--chunk", "20"], "--chunk must divide --rounds"),
        (["--campaigns", "0"], "--campaigns must be at least 1, got 0"),
    ],
)
def test_bad_options_end_with_one_line(benchmark, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
