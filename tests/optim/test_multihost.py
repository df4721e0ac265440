"""Two real processes on the loopback interface train together; one of them dies; its checkpoint lives on."""

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

WORKER = Path(__file__).with_name("multihost_worker.py")
# Far more than a loaded machine needs: what would pass it hangs.
PATIENCE = 240.0

_spec = importlib.util.spec_from_file_location("multihost_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


@contextlib.contextmanager
def two_processes(folder: Path, steps: int) -> Iterator[list[subprocess.Popen]]:
    """Both with two of the four nodes; ended on the way out if they still run. What they print lies in ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join([str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    processes = []
    with contextlib.ExitStack() as logs:
        for process in range(2):
            log = logs.enter_context((folder / f"process{process}.log").open("w"))
            command = [sys.executable, str(WORKER), f"--coordinator={coordinator}", f"--process={process}"]
            command += ["--processes=2", f"--steps={steps}", f"--checkpoints={folder / 'checkpoints'}"]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()


def log_of(folder: Path, process: int) -> str:
    return (folder / f"process{process}.log").read_text()


def stacked(carry, first: int, last: int):
    """Steps ``first + 1 .. last`` in this process, all nodes on one device."""
    step, _, _, batch = worker.problem(None)
    step = jax.jit(step)
    params, state = carry
    for t in range(first, last):
        params, state, _ = step(params, state, batch, jax.random.key(t))
    return params, state


def last_checkpoint(folder: Path):
    """The step of the last complete checkpoint, and it as arrays on one device of this process."""
    _, _, carry, _ = worker.problem(None)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), carry)
    with worker.checkpoints(str(folder / "checkpoints")) as manager:
        step = manager.latest_step()
        return step, manager.restore(step, args=ocp.args.StandardRestore(target))


def assert_same(got, expected) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        if jax.dtypes.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_two_processes_equal_one(tmp_path: Path) -> None:
    with two_processes(tmp_path, steps=4) as processes:
        for number, process in enumerate(processes):
            assert process.wait(PATIENCE) == 0, log_of(tmp_path, number)
    step, carry = last_checkpoint(tmp_path)
    assert step == 4
    assert_same(carry, stacked(worker.problem(None)[2], 0, 4))


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_dies_the_other_ends_with_an_error_and_the_checkpoint_continues(tmp_path: Path, victim: int) -> None:
    with two_processes(tmp_path, steps=100_000) as processes:
        deadline = time.monotonic() + PATIENCE
        # A checkpoint that is still being written has a longer name.
        while not any(int(path.name) >= 3 for path in (tmp_path / "checkpoints").glob("*") if path.name.isdigit()):
            assert time.monotonic() < deadline, "no third checkpoint"
            for number, process in enumerate(processes):
                assert process.poll() is None, log_of(tmp_path, number)
            time.sleep(0.05)
        os.kill(processes[victim].pid, signal.SIGKILL)
        status = processes[1 - victim].wait(PATIENCE)  # raises if it hangs
    assert status != 0
    # Which of them comes first depends on where the survivor waited: in an exchange, at a barrier, for the coordinator.
    assert re.search("JaxRuntimeError|coordination service|Connection closed by peer", log_of(tmp_path, 1 - victim))
    step, carry = last_checkpoint(tmp_path)
    assert step >= 3
    assert_same(carry, stacked(worker.problem(None)[2], 0, step))
    assert_same(stacked(carry, step, step + 3), stacked(worker.problem(None)[2], 0, step + 3))
