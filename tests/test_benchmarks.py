"""The benchmarks: finite numbers in the table and the file, and work that is checked to be the same. No times."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
NUMBERS = ("steps_per_second", "steps_per_second_std", "compile_seconds", "difference")


@pytest.fixture
def load(monkeypatch):
    """Import a module of the folder as its scripts do."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("COLUMNS", "80")
    return importlib.import_module


@pytest.fixture
def gt_nsgdm(load):
    return load("optim_gt_nsgdm")


@pytest.fixture
def torch_gt_nsgdm(load):
    pytest.importorskip("torch", reason="needs the peers extra: torch")
    return load("torch_gt_nsgdm")


@pytest.fixture
def dynamics_metric(load):
    return load("dynamics_metric")


@pytest.fixture
def pot():
    pytest.importorskip("ot.sgot", reason="needs the peers extra: POT 0.9.7 or newer")


@pytest.fixture
def without_pot(monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    monkeypatch.setitem(sys.modules, "ot.sgot", None)


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch_gt_nsgdm", raising=False)


def tiny(nodes: int, *more: str) -> list[str]:
    sizes = {"--nodes": nodes, "--steps": 4, "--peer-steps": 2, "--repeats": 1, "--problems": "regression"}
    return [*(str(word) for option in sizes.items() for word in option), *more]


def test_a_script_starts_from_any_folder(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "optim_gt_nsgdm.py"), "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert "--nodes" in shown


def test_every_row_did_the_same_work_and_has_numbers(gt_nsgdm, torch_gt_nsgdm, capsys, tmp_path):
    gt_nsgdm.main(tiny(4, "--out", str(tmp_path / "result.json")))
    result = json.loads((tmp_path / "result.json").read_text())
    rows = result["rows"]
    assert [(row["implementation"].split()[-1], row["devices"]) for row in rows] == [
        (torch_gt_nsgdm.DEVICE, 1),
        ("dense", 1),
        ("sparse", 1),
        ("neighbours", 4),
        ("all_gather", 4),
        ("mean", 1),
        ("mean", 4),
    ]
    for row in rows:
        assert (row["problem"], row["nodes"]) == ("regression", 4)
        assert all(math.isfinite(row[name]) and row[name] >= 0 for name in NUMBERS)
        assert row["steps_per_second"] > 0
        assert row["difference"] <= result["tolerance"]
        assert row["times_torch"] == pytest.approx(row["steps_per_second"] / rows[0]["steps_per_second"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(" 4 " in line for line in lines) == len(rows)


@pytest.mark.usefixtures("without_torch")
def test_without_torch_jaxlab_is_measured_alone(gt_nsgdm, capsys, tmp_path):
    gt_nsgdm.main(tiny(3, "--out", str(tmp_path / "result.json")))
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line == "torch is not installed (extra 'peers'): only jaxlab is measured"
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["jaxlab, dense", "jaxlab, sparse"]
    assert not any("times_torch" in row for row in rows)


def test_a_peer_that_does_not_communicate_is_found_out(gt_nsgdm, torch_gt_nsgdm, monkeypatch):
    monkeypatch.setattr(torch_gt_nsgdm.TorchNetwork, "_exchange", lambda self, of_nodes: of_nodes)
    with pytest.raises(SystemExit, match=r"regression on 3 nodes, torch on \w+: differs by .* of the distance gone"):
        gt_nsgdm.main(tiny(3))


@pytest.mark.parametrize("wrong", [1.0 + 1e-3, np.nan], ids=["off by a thousandth", "not a number"])
def test_parity_check_bites(gt_nsgdm, wrong):
    start = {"a": np.zeros((2, 3)), "b": np.zeros(2)}
    expected = {"a": np.ones((2, 3)), "b": np.full(2, 2.0)}
    assert gt_nsgdm.check_same_work("peer", expected, expected, start) == 0
    nearly = {name: leaf * (1 + 1e-6) for name, leaf in expected.items()}
    assert gt_nsgdm.check_same_work("peer", nearly, expected, start) == pytest.approx(1e-6)
    with pytest.raises(SystemExit, match="peer: differs by"):
        gt_nsgdm.check_same_work("peer", expected | {"b": expected["b"] * wrong}, expected, start)


@pytest.mark.parametrize("make", ["regression_problem", "decoder_problem"])
def test_peer_has_the_same_gradient(gt_nsgdm, torch_gt_nsgdm, make):
    """To 1e-5 of its norm: float32 sums of some hundred terms in another order."""
    problem = getattr(gt_nsgdm, make)(2, 1)
    node = 1
    params = jax.tree.map(lambda leaf: leaf[node] + 0.1, problem.start)
    batch = {name: leaf[node] for name, leaf in problem.fixed.items()} | {
        name: leaf[0, node] for name, leaf in problem.streamed.items()
    }
    ours = gt_nsgdm._flat(jax.jit(jax.grad(problem.loss))(params, batch, jax.random.key(0)))
    theirs = problem.torch_gradient(torch_gt_nsgdm)(
        *(torch_gt_nsgdm._to_torch(gt_nsgdm._flat(tree), ...) for tree in (params, batch))
    )
    norm = math.sqrt(sum(np.square(leaf).sum() for leaf in ours.values()))
    assert norm > 0
    for name, leaf in ours.items():
        np.testing.assert_allclose(theirs[name].numpy(force=True), leaf, rtol=0, atol=1e-5 * norm, err_msg=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "5"], "--peer-steps must divide --steps, got 2 and 5"),
        (["--nodes", "8", "0"], "--nodes must be at least 1, got 0"),
        (["--peer-steps", "0"], "--peer-steps must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
    ],
)
def test_bad_options_end_with_one_line(gt_nsgdm, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        gt_nsgdm.main(tiny(4, *arguments))
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


METRIC = ["--systems", "4", "--rank", "2", "--repeats", "2"]


@pytest.mark.usefixtures("pot")
def test_both_distance_matrices_are_the_same(dynamics_metric, capsys, tmp_path):
    dynamics_metric.main([*METRIC, "--out", str(tmp_path / "result.json")])
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["benchmark"], result["systems"], result["rank"], result["pairs"]) == ("dynamics_metric", 4, 2, 6)
    assert 0 <= result["largest_difference"] <= result["tolerance"] == 1e-10
    assert [(row["implementation"], len(row["seconds"])) for row in result["rows"]] == [("POT", 1), ("jaxlab", 2)]
    for row in result["rows"]:
        assert all(math.isfinite(seconds) and seconds > 0 for seconds in row["seconds"])
        assert math.isfinite(row["compile_seconds"])
        assert row["compile_seconds"] >= 0
    pot, ours = (np.mean(row["seconds"]) for row in result["rows"])
    assert [row["times_faster"] for row in result["rows"]] == [1.0, pytest.approx(pot / ours)]
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "6 pairs of systems, rank 2" in " ".join(shown.split())
    assert not jax.config.jax_enable_x64  # double precision stays inside the script


@pytest.mark.usefixtures("without_pot")
def test_without_pot_jaxlab_is_measured_alone(dynamics_metric, capsys, tmp_path):
    dynamics_metric.main([*METRIC, "--out", str(tmp_path / "result.json")])
    shown = capsys.readouterr().out
    assert "POT 0.9.7 or newer is not installed (extra 'peers'): only jaxlab is measured" in shown.splitlines()
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["implementation"] for row in result["rows"]] == ["jaxlab"]
    assert "times_faster" not in result["rows"][0]
    assert "largest_difference" not in result


def test_another_metric_is_found_out(dynamics_metric, monkeypatch, tmp_path):
    monkeypatch.setattr(dynamics_metric, "pot_distance", lambda: lambda *systems: 1.0)
    with pytest.raises(SystemExit, match=r"the matrices of jaxlab and POT differ by \S+, more than 1e-10"):
        dynamics_metric.main([*METRIC, "--out", str(tmp_path / "result.json")])
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("wrong", [1e-9, np.nan], ids=["off by a billionth", "not a number"])
def test_comparison_of_matrices_bites(dynamics_metric, wrong):
    matrix = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert dynamics_metric.check_same_work(matrix, matrix) == 0
    assert dynamics_metric.check_same_work(matrix, matrix + 1e-12) == pytest.approx(1e-12, rel=1e-3)
    with pytest.raises(SystemExit, match="the matrices of jaxlab and POT differ by"):
        dynamics_metric.check_same_work(matrix, matrix + np.array([[0.0, wrong], [0.0, 0.0]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "1"], "--systems must be at least 2, got 1"),
        (["--rank", "0"], "--rank must be in [1, 24], got 0"),
        (["--rank", "25"], "--rank must be in [1, 24], got 25"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--systems", "many"], "invalid int value: 'many'"),
    ],
)
def test_bad_options_of_the_metric_end_with_one_line(dynamics_metric, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        dynamics_metric.main([*METRIC, *arguments])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


def test_compilation_is_apart_and_short_work_is_repeated(load, monkeypatch):
    harness = load("harness")
    now, calls = 0.0, 0

    def work() -> int:
        nonlocal now, calls
        calls += 1
        now += 5.0 if calls == 1 else 0.125
        return calls

    monkeypatch.setattr(harness.time, "perf_counter", lambda: now)
    timing, last = harness.measure(work, repeats=3, seconds=0.25)
    assert timing == harness.Timing(first=5.0, runs=(0.125,) * 3)
    assert timing.compile == 4.875
    assert timing.rate(items=10) == (80.0, 0.0)
    assert last == calls == 1 + 1 + 3 * 2
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        harness.measure(work, repeats=0)
