"""Real signals to a real process: what they leave on disk, and that the run continues to the same result."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxlab.experiments import interrupt
from jaxlab.experiments.interrupt import Interrupts
from jaxlab.experiments.outcome import Outcome, execute
from tests.experiments import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Outcome:
    """The run that nobody interrupts."""
    return execute(tiny.EXPERIMENT, preset="quick", out=tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_signal_in_the_middle(tmp_path, whole, number):
    """In the second of two loops: the first one's result and the finished chunks survive, and the rest is as ever."""
    command = [sys.executable, tiny.__file__, "run", "tiny", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TINY_HANGS_IN": "noisy 3"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 9:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate()

    lines = (whole.out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert metrics.read_bytes() == b"".join(lines[:9])
    stored = {"start": 1, "exact": 6}
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "result.json").exists()
    else:
        assert process.returncode == 130
        stored["noisy"] = 3
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["interrupted"] is True
        assert result["table"] == whole.result["table"][:1]
        assert "exact" in stdout
        assert stderr == f"jaxlab: interrupted; to continue: jaxlab run tiny --out {tmp_path} --resume\n"
    steps = [path for path in (tmp_path / "checkpoint").glob("*/*") if path.is_dir()]
    assert {path.parent.name: int(path.name) for path in steps} == stored

    resumed = execute(tiny.EXPERIMENT, preset="quick", out=tmp_path, resume=True)
    assert resumed.result | {"seconds": 0} == whole.result | {"seconds": 0}
    assert metrics.read_bytes() == b"".join(lines)
    assert (tmp_path / "loss.png").read_bytes() == (whole.out / "loss.png").read_bytes()


def test_section_that_must_not_be_torn():
    """A signal in a shielded section is raised at its end, and once it is served no later section raises it again."""
    with Interrupts() as interrupts:
        reached = []
        with pytest.raises(KeyboardInterrupt), interrupts.shield(), interrupts.shield():
            reached.append(os.kill(os.getpid(), signal.SIGINT))
        assert reached == [None]
        with pytest.raises(KeyboardInterrupt), interrupts.shield():
            pass
        interrupts.accept()
        with interrupts.shield():
            pass


def test_second_signal_ends_the_process(monkeypatch):
    """Not at once after the first, which timeout(1) may deliver twice, but when the user asks again."""
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    with Interrupts():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ends == []
        monkeypatch.setattr(interrupt, "_SAME_REQUEST_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert ends == [130]


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts():
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] != before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
