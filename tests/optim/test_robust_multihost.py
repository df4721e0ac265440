"""Two real processes on the loopback interface train together, single-level and bilevel, and one is Byzantine."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

WORKER = Path(__file__).with_name("robust_multihost_worker.py")
# Far more than a loaded machine needs: what would pass it hangs.
PATIENCE = 240.0

_spec = importlib.util.spec_from_file_location("robust_multihost_worker", WORKER)
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


def test_a_byzantine_process_does_no_harm_and_two_processes_equal_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    processes = []
    try:
        for process, workers in enumerate((3, 2)):
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={workers}",
                "PYTHONPATH": os.pathsep.join([str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")]),
            }
            command = [sys.executable, str(WORKER), f"--coordinator={coordinator}", f"--process={process}"]
            command += [f"--out={tmp_path / 'params'}"]
            with (tmp_path / f"process{process}.log").open("w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        for process, running in enumerate(processes):
            assert running.wait(PATIENCE) == 0, (tmp_path / f"process{process}.log").read_text()
    finally:
        for running in processes:
            if running.poll() is None:
                running.kill()
            running.wait()
    honest, byzantine = (np.load(tmp_path / f"params{process}.npz") for process in range(2))
    step, state = worker.bilevel(None)
    stacked = {
        "w": jax.jit(lambda x: worker.train(x, None))(worker.batches()),
        "x": jax.jit(lambda wanted: worker.iterate(step, state, wanted))(worker.targets()),
    }
    for name, expected in stacked.items():
        np.testing.assert_array_equal(honest[name], byzantine[name])
        np.testing.assert_allclose(honest[name], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(honest[name], worker.SOLUTION, atol=1e-3)
