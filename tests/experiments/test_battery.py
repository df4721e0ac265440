"""Every experiment through the same promises, at ``smoke``.

A new method joins by being working in the registry; the tiny experiment stands in for what no real one does on purpose.
"""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib.image
import pytest

from jaxlab import cli
from jaxlab.experiments import registry
from jaxlab.experiments.base import PRESETS, Experiment, Progress
from jaxlab.experiments.outcome import Outcome, execute
from tests.experiments.tiny import METHOD

METHODS = [METHOD, *(method for method in registry.METHODS if method.state == "working")]


@pytest.fixture(autouse=True)
def _with_tiny(monkeypatch):
    monkeypatch.setattr(registry, "METHODS", tuple(METHODS))


class Chunks(Progress):
    """Counts finished chunks, and is a user who presses Ctrl-C after one of them."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.total = self.planned = 0.0
        self.computed = self.restored = 0
        self._stop_after = stop_after

    def plan(self, total_cost: float) -> None:
        self.planned = total_cost

    def advance(self, name: str, done: int, length: int, cost: float, restored: bool) -> None:
        self.total += cost
        self.restored += restored
        self.computed += not restored
        if self.computed == self._stop_after:
            raise KeyboardInterrupt


class Finished(NamedTuple):
    experiment: Experiment
    outcome: Outcome
    chunks: Chunks


@pytest.fixture(scope="module", params=METHODS, ids=lambda method: method.name)
def finished(request, tmp_path_factory) -> Finished:
    """One uninterrupted run, shared by the tests of an experiment."""
    experiment = importlib.import_module(request.param.experiment).EXPERIMENT
    chunks = Chunks()
    out = tmp_path_factory.mktemp(experiment.name) / "run"
    return Finished(experiment, execute(experiment, preset="smoke", seed=3, out=out, progress=chunks), chunks)


def comparable(out: Path) -> dict:
    """Everything in ``result.json`` that must not depend on how often the run was interrupted."""
    return {key: value for key, value in json.loads((out / "result.json").read_text()).items() if key != "seconds"}


def test_files(finished):
    experiment, outcome, _ = finished
    config = json.loads((outcome.out / "config.json").read_text())
    assert (config["experiment"], config["preset"], config["seed"]) == (outcome.result["experiment"], "smoke", 3)
    assert config["fields"].keys() == {field.name for field in dataclasses.fields(experiment.presets["smoke"])}
    lines = [json.loads(line) for line in (outcome.out / "metrics.jsonl").read_text().splitlines()]
    assert lines
    assert all({"loop", "chunk"} <= line.keys() for line in lines)
    assert (outcome.out / "checkpoint").is_dir()
    assert not list(outcome.out.glob("**/*.partial"))


def test_result_schema(finished):
    experiment, outcome, _ = finished
    result = json.loads((outcome.out / "result.json").read_text())
    assert list(result) == [
        *("experiment", "preset", "seed", "versions", "device", "seconds", "table", "claims", "skipped", "notes")
    ]
    assert result["experiment"] == experiment.name.replace("-", "_")
    assert result["versions"].keys() == {"jaxlab", "jax"}
    assert result["device"] == jax.default_backend()
    assert result["table"]
    for row in result["table"]:
        assert isinstance(row.pop("method"), str)
        assert row
        assert all(
            isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity") for value in row.values()
        )
    assert result["claims"] == []
    assert [claim["id"] for claim in result["skipped"]] == [claim.id for claim in experiment.claims]
    assert all(claim["preset"] in PRESETS[1:] and claim["reason"] for claim in result["skipped"])
    assert outcome.exit_status == 0


def test_plots_show_something(finished):
    assert finished.outcome.figures
    for path in finished.outcome.figures:
        pixels = matplotlib.image.imread(path)[..., :3]
        assert min(pixels.shape[:2]) >= 200
        assert pixels.std() > 0.01


def test_plan_is_the_sum_of_the_costs(finished):
    assert finished.chunks.total == pytest.approx(finished.chunks.planned)


def test_resume_equals_uninterrupted(finished, tmp_path):
    experiment, outcome, chunks = finished
    half = max(1, chunks.computed // 2)
    broken = execute(experiment, preset="smoke", seed=3, out=tmp_path, progress=Chunks(stop_after=half))
    assert broken.exit_status == 130
    assert json.loads((tmp_path / "result.json").read_text())["interrupted"] is True
    rest = Chunks()
    execute(experiment, preset="smoke", seed=3, out=tmp_path, resume=True, progress=rest)
    assert (rest.restored, rest.computed) == (half, chunks.computed - half)
    assert comparable(tmp_path) == comparable(outcome.out)
    assert (tmp_path / "metrics.jsonl").read_bytes() == (outcome.out / "metrics.jsonl").read_bytes()


def test_resume_with_another_config_is_refused(finished, capsys):
    experiment, outcome, _ = finished
    before = comparable(outcome.out)
    run = ["run", experiment.name, "--out", str(outcome.out), "--resume"]
    assert cli.main([*run, "--preset", "quick", "--seed", "3"]) == 2
    assert cli.main([*run, "--preset", "smoke", "--seed", "4"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.rpartition("was run with ")[2] for line in err.splitlines()] == [
        "preset 'smoke', now it is 'quick'",
        "seed 3, now it is 4",
    ]
    assert comparable(outcome.out) == before


def test_unknown_field_is_refused(finished, capsys, tmp_path):
    assert cli.main(["run", finished.experiment.name, "--no-such-field", "1", "--out", str(tmp_path / "x")]) == 2
    _, err = capsys.readouterr()
    assert err.startswith("jaxlab: unknown option '--no-such-field'")
    assert err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_wrong_values_are_refused(finished, capsys, tmp_path):
    """Every number of the config is refused as a word, in one line that names the option."""
    config = finished.experiment.presets["smoke"]
    numbers = [f.name for f in dataclasses.fields(config) if type(getattr(config, f.name)) in (int, float)]
    assert numbers
    for name in numbers:
        option = "--" + name.replace("_", "-")
        assert cli.main(["run", finished.experiment.name, option, "many", "--out", str(tmp_path / "x")]) == 2
        _, err = capsys.readouterr()
        assert option in err
        assert "'many'" in err
        assert err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_help_fits_eighty_columns(finished, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["run", finished.experiment.name, "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for field in dataclasses.fields(finished.experiment.presets["quick"]):
        assert "--" + field.name.replace("_", "-") in out


def test_paper_preset_builds(finished):
    shapes = jax.tree.leaves(finished.experiment.shapes(finished.experiment.presets["paper"]))
    assert shapes
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in shapes)


def test_every_claim_and_the_summary_is_a_sentence(finished):
    for claim in finished.experiment.claims:
        assert claim.id == claim.id.lower().replace("-", "_")
        assert claim.claim[0].isupper()
        assert claim.claim.endswith(".")
    assert finished.experiment.summary[0].isupper()
    assert finished.experiment.summary.endswith(".")
