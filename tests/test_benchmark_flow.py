"""The benchmark of flow inversion: finite numbers in table and file, and work that is checked to be the same."""

import importlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

SIZES = ["--batches", "1", "2", "--hidden", "8", "--layers", "2", "--repeats", "1"]


@pytest.fixture
def load(monkeypatch):
    """Import a module of the folder as its scripts do."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    monkeypatch.setenv("COLUMNS", "80")
    return importlib.import_module


def test_both_sides_make_the_same_edits(load, capsys, tmp_path) -> None:
    pytest.importorskip("torch", reason="needs the peers extra: torch")
    load("flow_inversion").main([*SIZES, "--out", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    rows = result["rows"]
    assert [(row["implementation"].split()[0], row["batch"]) for row in rows] == [
        ("torch", 1),
        ("jaxlab", 1),
        ("torch", 2),
        ("jaxlab", 2),
    ]
    for row in rows:
        assert math.isfinite(row["images_per_second"])
        assert row["images_per_second"] > 0
    for row in rows[1::2]:
        assert 0 < row["difference"] <= result["tolerance"]
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_another_mask_is_found_out(load, monkeypatch) -> None:
    torch = pytest.importorskip("torch", reason="needs the peers extra: torch")
    peer = load("torch_flow_inversion")
    monkeypatch.setattr(torch.Tensor, "amax", lambda self, *args, **kwargs: self.mean(*args, **kwargs))
    assert peer.uni_edit is load("torch_flow_inversion").uni_edit
    with pytest.raises(SystemExit, match="batch 1: the edits of jaxlab and torch differ by"):
        load("flow_inversion").main(SIZES)


def test_parity_check_bites(load) -> None:
    check = load("flow_inversion").check_same_work
    expected = np.linspace(-1, 1, 10)
    assert check(1, expected, expected) == 0
    for wrong in (expected + 0.01, expected * np.nan):
        with pytest.raises(SystemExit, match="differ by"):
            check(1, wrong, expected)
