"""The benchmark of rollouts: finite numbers, the same work on both sides, bad options. No times."""

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

TINY = ["--replicas", "1", "3", "--steps", "5", "--width", "3", "--hidden", "8", "--stride", "2", "--repeats", "1"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setenv("COLUMNS", "80")
    return importlib.import_module("dynamics_rollout")


def test_every_row_did_the_same_work(script, tmp_path, capsys):
    pytest.importorskip("torch", reason="needs the peers extra: torch")
    script.main([*TINY, "--out", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    of_one = ["torch on", "jaxlab", "products"]
    of_many = ["torch on", "torch, one by one", "jaxlab", "products"]
    expected = [(name, word) for name in script.PROPAGATORS for word in (*of_one, *of_many)]
    assert len(result["rows"]) == len(expected)
    for row, (name, word) in zip(result["rows"], expected, strict=True):
        assert row["propagator"] == name
        assert row["implementation"].startswith(word)
        assert math.isfinite(row["seconds_per_step"])
        assert row["seconds_per_step"] > 0
        assert row.get("difference", 0) <= result["tolerance"]
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_other_work_is_found_out(script):
    assert script.check_same_work("one", np.array([0.0, 1.0]), np.array([0.0, 1.0])) == 0
    with pytest.raises(SystemExit, match=r"one: the rollouts of jaxlab and torch differ by 1\.0e-03 of their range"):
        script.check_same_work("one", np.array([0.0, 1.001]), np.array([0.0, 1.0]))
    with pytest.raises(SystemExit, match="differ by nan"):
        script.check_same_work("one", np.array([0.0, np.nan]), np.array([0.0, 1.0]))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--replicas", "2", "0"], "--replicas must be at least 1, got 0"),
        (["--hidden", "2"], "--hidden must be at least --width, got 2 and 3"),
    ],
)
def test_bad_options_end_with_one_line(script, capsys, option, message):
    with pytest.raises(SystemExit) as stopped:
        script.main([*TINY, *option])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)
