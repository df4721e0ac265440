"""The benchmark: the same work in both implementations, numbers in the table and the file. No times."""

import importlib
import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    pytest.importorskip("torch", reason="needs the peers extra: torch")
    pytest.importorskip("evosax", reason="needs the peers extra: evosax")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("COLUMNS", "80")
    return importlib.import_module("blackbox_abom")


def test_every_row_has_numbers_and_the_work_is_the_same(benchmark, capsys, tmp_path) -> None:
    sizes = {"functions": 1, "seeds": 8, "evaluations": 80, "dimension": 4, "large-dimension": 6, "peer-generations": 2}
    arguments = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    benchmark.main([*arguments, "--out", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert [(row["implementation"], row["devices"]) for row in result["rows"]] == [
        ("torch, loop", 1),
        ("evosax, CMA-ES", 1),
        ("jaxlab", 1),
        ("jaxlab", 8),
    ]
    for row in result["rows"]:
        assert math.isfinite(row["generations_per_second"])
        assert row["generations_per_second"] > 0
    assert 0 <= result["difference"] <= result["tolerance"]
    assert result["large_program_mebibytes"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80


def test_bad_options_end_with_one_line(benchmark, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(["--seeds", "0"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("--seeds must be at least 1, got 0")
