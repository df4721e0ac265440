"""The command: what it prints, where, and with which exit status."""

import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxlab
from jaxlab import cli
from jaxlab.experiments import base, registry
from jaxlab.experiments.base import Claim
from jaxlab.experiments.registry import Method
from tests.experiments import tiny


@pytest.fixture(autouse=True)
def _methods(monkeypatch, tmp_path):
    planned = Method("far-away", "A Method of the Future", "2601.00001", "jaxlab.optim")
    monkeypatch.setattr(registry, "METHODS", (tiny.METHOD, planned))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def only_line(capsys) -> str:
    """The one line on stderr of a command that printed nothing else."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("jaxlab: ")
    return err.removeprefix("jaxlab: ").strip()


def test_run_prints_table_claims_and_paths(capsys, tmp_path):
    assert cli.main(["run", "tiny", "--seed", "1", "--chunks", "5", "--out", "here"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].split() == ["method", "loss", "last"]
    assert re.fullmatch(r"exact +\S+ (±|\+-) \S+ +\S+", lines[1])
    assert [line.split()[1] for line in lines if re.match("(✓|ok) ", line)] == ["contracts:", "noise_has_a_floor:"]
    assert [line.split()[1] for line in lines if re.match("(✗|FAILS) ", line)] == ["beats_newton:"]
    assert "    known gap: Only Newton's method is; the learning rate was varied." in lines
    assert "- scales: skipped, --preset paper shows it (needs a million dimensions)" in lines
    assert "Both runs start at the same point." in lines
    assert "here/loss.png" in lines
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in out
    assert json.loads((tmp_path / "here/config.json").read_text())["fields"]["chunks"] == 5


def test_json_is_the_result_and_nothing_else(capsys, tmp_path):
    assert cli.main(["run", "tiny", "--preset", "smoke", "--out", "here", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "here/result.json").read_text())


@pytest.mark.parametrize(("gap", "status"), [(None, 1), ("understood", 0)])
def test_failing_claim_decides_the_exit_status_unless_the_gap_is_known(monkeypatch, capsys, gap, status):
    claims = [Claim(claim.id, claim.claim, ">", 1e9, gap) for claim in tiny.EXPERIMENT.claims]
    monkeypatch.setattr(tiny, "EXPERIMENT", dataclasses.replace(tiny.EXPERIMENT, claims=tuple(claims)))
    assert cli.main(["run", "tiny", "--out", "here", "--json"]) == status
    result = json.loads(capsys.readouterr().out)
    assert [claim["holds"] for claim in result["claims"]] == [False] * 3
    assert [claim.get("known_gap") for claim in result["claims"]] == [gap] * 3


def test_default_directory_and_resume(capsys, tmp_path):
    """Without --out, a run goes to a directory named after it, and --resume takes the newest of those."""
    assert cli.main(["run", "tiny", "--preset", "smoke", "--seed", "2"]) == 0
    (made,) = (tmp_path / "runs" / "tiny").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-smoke-seed2", made.name)
    first = json.loads((made / "result.json").read_text())
    capsys.readouterr()
    assert cli.main(["run", "tiny", "--preset", "smoke", "--seed", "2", "--resume", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [*(tmp_path / "runs" / "tiny").iterdir()] == [made]
    assert again | {"seconds": 0} == first | {"seconds": 0}
    assert again["seconds"] >= first["seconds"]
    assert cli.main(["run", "tiny", "--preset", "smoke", "--seed", "3", "--resume"]) == 2
    assert only_line(capsys) == "nothing to resume: no run of tiny with preset smoke and seed 3 in runs/tiny"


def test_directory_that_is_taken(capsys, tmp_path):
    """A run is never written over another unasked, and --overwrite removes nothing that a run did not write."""
    run = ["run", "tiny", "--preset", "smoke", "--out", "here"]
    assert cli.main(run) == 0
    (tmp_path / "here" / "thesis.tex").write_text("mine")
    before = (tmp_path / "here" / "result.json").read_bytes()
    capsys.readouterr()
    assert cli.main(run) == 2
    assert only_line(capsys).startswith("here already holds a run; give --resume to continue it or --overwrite")
    assert cli.main([*run, "--resume", "--overwrite"]) == 2
    assert only_line(capsys) == "give --resume or --overwrite, not both"
    assert cli.main([*run, "--resume", "--chunks", "9"]) == 2
    assert only_line(capsys) == "cannot resume here: it was run with chunks 4, now it is 9"
    assert (tmp_path / "here" / "result.json").read_bytes() == before
    assert cli.main([*run, "--overwrite", "--chunks", "2"]) == 0
    assert (tmp_path / "here" / "thesis.tex").read_text() == "mine"
    assert len((tmp_path / "here" / "metrics.jsonl").read_text().splitlines()) == 4


def test_bad_input_leaves_directories_as_they_were(monkeypatch, capsys, tmp_path):
    """Neither a directory of the user's, nor the run that was to be replaced, nor the working directory changes."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("mine")
    assert cli.main(["run", "tiny", "--preset", "smoke", "--out", "ours"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    for words in (["--out", "theirs"], ["--out", "ours", "--overwrite"]):
        assert cli.main(["run", "tiny", "--preset", "smoke", "--corpus", "gone.txt", *words]) == 2
        assert only_line(capsys) == "corpus 'gone.txt' does not exist"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert cli.main(["run", "tiny", "--corpus", "gone.txt", "--out", "."]) == 2
    assert only_line(capsys) == "corpus 'gone.txt' does not exist"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert cli.main(["run", "tiny", "--preset", "smoke", "--out", str(ours), "--overwrite", "--chunks", "2"]) == 0
    assert not (ours / "replaced").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], "unknown command 'rum'; did you mean 'run'? see jaxlab --help"),
        (["run"], "jaxlab run needs the name of an experiment; see jaxlab list"),
        (["run", "--preset", "cpu"], "jaxlab run needs the name of an experiment; see jaxlab list"),
        (["run", "tinny"], "unknown experiment 'tinny'; did you mean 'tiny'? see jaxlab list"),
        (["run", "far_away"], "unknown experiment 'far_away'; did you mean 'far-away'? see jaxlab list"),
        (["run", "qqqq"], "unknown experiment 'qqqq'; see jaxlab list"),
        (["run", "far-away"], "far-away is planned and has no experiment yet; see jaxlab list"),
        (
            ["run", "tiny", "--chunk", "3"],
            "unknown option '--chunk'; did you mean '--chunks'? see jaxlab run tiny --help",
        ),
        (["run", "tiny", "quick"], "unknown option 'quick'; see jaxlab run tiny --help"),
        (["run", "tiny", "--chunks", "few"], "Error parsing --chunks: invalid literal for int() with base 10: 'few'"),
        (["run", "tiny", "--chunks"], "Missing value for argument '--chunks'. Expected 1 values."),
        (["run", "tiny", "--learning-rate", "3"], "learning_rate must be in (0, 2), got 3.0"),
        (["run", "tiny", "--seed", "-1"], "seed must be between 0 and 2**32 - 1, got -1"),
        (["run", "tiny", "--corpus", "gone.txt"], "corpus 'gone.txt' does not exist"),
        (["run", "tiny", "--out", "here", "--resume"], "nothing to resume: here/config.json does not exist"),
        (["list", "--jsn"], "unknown option '--jsn'; jaxlab list takes --json only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(capsys, tmp_path, arguments, message):
    assert cli.main(arguments) == 2
    assert only_line(capsys) == message
    assert not list(tmp_path.rglob("*.json*"))


def test_unknown_preset_names_the_known(capsys):
    assert cli.main(["run", "tiny", "--preset", "fast"]) == 2
    assert re.search(r"'fast'.*'smoke', 'quick', 'cpu', 'paper'", only_line(capsys))


def test_output_that_is_a_file(capsys, tmp_path):
    (tmp_path / "here").write_text("mine")
    assert cli.main(["run", "tiny", "--out", "here"]) == 2
    assert "here" in only_line(capsys)
    assert (tmp_path / "here").read_text() == "mine"


def test_config_that_is_damaged(capsys, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text('{"experiment": "ti')
    assert cli.main(["run", "tiny", "--out", "here", "--resume"]) == 2
    assert only_line(capsys).startswith("here/config.json is not valid JSON")
    (tmp_path / "here" / "config.json").write_text("[1]")
    assert cli.main(["run", "tiny", "--out", "here", "--resume"]) == 2
    assert only_line(capsys) == "here/config.json is not the config of a run"


def test_checkpoint_that_is_damaged(capsys, caplog, tmp_path):
    """One line, although orbax logs what it cannot parse before it is told that the files have changed."""
    run = ["run", "tiny", "--preset", "smoke", "--out", "here"]
    assert cli.main(run) == 0
    (metadata,) = (tmp_path / "here" / "checkpoint" / "start").glob("*/_CHECKPOINT_METADATA")
    metadata.write_text("{")
    capsys.readouterr()
    caplog.clear()
    assert cli.main([*run, "--resume"]) == 2
    assert re.match(r"checkpoint .*/here/checkpoint/start cannot be restored; remove that directory", only_line(capsys))
    assert not caplog.records


def test_mistake_in_an_experiment_shows_its_traceback(monkeypatch):
    broken = dataclasses.replace(tiny.EXPERIMENT, run=lambda config, run: run.measure("no_such_claim", 1.0))
    monkeypatch.setattr(tiny, "EXPERIMENT", broken)
    with pytest.raises(RuntimeError, match="no_such_claim"):
        cli.main(["run", "tiny", "--out", "here"])


def test_help_shows_fields_with_their_documentation_and_the_defaults_of_the_preset(capsys):
    assert cli.main(["run", "tiny", "--preset", "cpu", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Gradient descent on a quadratic." in out
    assert "Defaults are those of preset cpu." in out
    assert "--chunks INT chunks of ten steps (default: 50)" in out
    assert "--learning-rate FLOAT step size, in (0, 2) (default: 0.01)" in out
    assert "--resume" in out


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"], ["list", "-h"]])
def test_usage(capsys, arguments):
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: jaxlab ")
    assert max(map(len, out.splitlines())) <= 80


def test_reader_that_has_seen_enough():
    """``jaxlab list | head -1`` says nothing of a broken pipe."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxlab", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(jaxlab.__file__).parents[1],
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxlab {jaxlab.__version__}\n"


def test_list(capsys):
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].split() == ["far-away", "planned", "jaxlab.optim", "arXiv", "2601.00001"]
    assert max(map(len, out.splitlines())) <= 80
    assert cli.main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"name": "tiny", "title": "Gradient descent", "arxiv": None, "module": "tests", "state": "working"},
        {
            "name": "far-away",
            "title": "A Method of the Future",
            "arxiv": "2601.00001",
            "module": "jaxlab.optim",
            "state": "planned",
        },
    ]


def test_terminal_that_knows_ascii_only(monkeypatch):
    """Ticks and plus-minus signs are spelt out, and what the experiment itself says is replaced, not refused."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    claims = (dataclasses.replace(tiny.EXPERIMENT.claims[0], claim="‖x‖ contracts."), *tiny.EXPERIMENT.claims[1:])
    monkeypatch.setattr(tiny, "EXPERIMENT", dataclasses.replace(tiny.EXPERIMENT, claims=claims))
    assert cli.main(["run", "tiny", "--out", "here"]) == 0
    text = out.buffer.getvalue().decode("ascii")
    assert "\nok contracts: 1 in [0.999, 1.001]\n" in text
    assert "\nFAILS beats_newton: " in text
    assert "?x? contracts." in text
    assert " +- " in text


def test_interrupt_names_the_command_that_continues(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(base.Run, "note", _interrupt)
    assert cli.main(["run", "tiny", "--preset", "smoke", "--seed", "5"]) == 130
    (made,) = (tmp_path / "runs" / "tiny").iterdir()
    err = capsys.readouterr().err.splitlines()[-1]
    prefix, _, command = err.partition("jaxlab run ")
    assert prefix == "jaxlab: interrupted; to continue: "
    assert command == f"tiny --preset smoke --seed 5 --out runs/tiny/{made.name} --resume"
    monkeypatch.undo()
    monkeypatch.setattr(registry, "METHODS", (tiny.METHOD,))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *command.split()]) == 0
    assert "interrupted" not in json.loads((made / "result.json").read_text())


def _interrupt(*_):
    raise KeyboardInterrupt


def test_installed_entry_point_and_module_are_the_same_command():
    """``python -m jaxlab list`` answers without importing jax."""
    code = "import sys, runpy; sys.argv = ['jaxlab', 'list', '--json']\n"
    code += "try: runpy.run_module('jaxlab', run_name='__main__')\n"
    code += "except SystemExit as end: assert end.code == 0, end.code\n"
    code += "assert 'jax' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(jaxlab.__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr
    methods = json.loads(done.stdout)
    assert len({method["name"] for method in methods}) == 19
    assert {method["state"] for method in methods} <= {"working", "planned"}
