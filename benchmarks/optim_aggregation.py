"""Seconds of one robust aggregation: jaxlab against byzfl (PyTorch) on the same messages.

    python benchmarks/optim_aggregation.py [--sizes 64x1000000x16 16x10000000x4] [--rules ...] [--repeats 3]
        [--threads 2] [--out FILE]

A size is workers x parameters x Byzantine workers that the rules are made for; of so many the messages are shifted by
three standard deviations. Both libraries work on float32 on the same device with the same number of threads, take
turns, and their results, of the very calls that are timed, must agree; if not, the script ends with an error. The
geometric median is byzfl's (3 iterations from zero) for both; `geometric median, 32` is jaxlab's default against 32
iterations there. Beyond the messages jaxlab's temporary memory is what the compiler says; byzfl's is the largest growth
of the process while it runs (on a GPU, of PyTorch's allocator), for which its first call counts.

Set the number of threads before Python starts where the machine has more cores: ``taskset -c 0,1 python ...``.
"""

import argparse
import functools
import importlib
import importlib.util
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from harness import Timing, device_name, measure, print_table, write_json

from jaxlab.optim import aggregation

__all__ = ["TOLERANCE", "main", "rules"]

# Largest difference over the largest number of the result. Squared norms of 1e7 float32 numbers are wrong by 7e-4
# in PyTorch's `linalg.norm` on a CPU (by 1e-6 here), and the geometric median passes half of that on.
TOLERANCE = 1e-3


@functools.cache
def import_byzfl() -> tuple[types.ModuleType, types.ModuleType]:
    """Its aggregators and pre-aggregators, without the benchmarks that the package imports with torchvision."""
    found = importlib.util.find_spec("byzfl")
    if found is None:
        raise SystemExit("byzfl is not installed: pip install --no-deps byzfl scipy torch")
    package = types.ModuleType("byzfl")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules.setdefault("byzfl", package)
    names = ("byzfl.aggregators.aggregators", "byzfl.aggregators.preaggregators")
    return tuple(importlib.import_module(name) for name in names)


def rules(f: int) -> dict[str, tuple[aggregation.Aggregator, Callable[[Any], Any]]]:
    """Name to the rule of jaxlab and of byzfl."""
    theirs, pre = import_byzfl()
    nnm, trimmed = pre.NNM(f), theirs.TrMean(f)
    return {
        "mean": (aggregation.Mean(), theirs.Average()),
        "median": (aggregation.CoordinateMedian(), theirs.Median()),
        "trimmed mean": (aggregation.TrimmedMean(f), trimmed),
        "geometric median": (aggregation.GeometricMedian(0.1, 3, "byzfl"), theirs.GeometricMedian(0.1, 3)),
        "geometric median, 32": (aggregation.GeometricMedian(), theirs.GeometricMedian(1e-6, 32)),
        "Krum": (aggregation.Krum(f), theirs.Krum(f)),
        "Multi-Krum": (aggregation.MultiKrum(f), theirs.MultiKrum(f)),
        "MeaMed": (aggregation.MeanAroundMedian(f), theirs.Meamed(f)),
        "NNM + trimmed mean": (
            aggregation.compose(aggregation.NearestNeighbourMixing(f), aggregation.TrimmedMean(f)),
            lambda x: trimmed(nnm(x)),
        ),
    }


def compare(name: str, n: int, d: int, f: int, repeats: int, ours: Any, theirs: Any) -> tuple[dict[str, Any], ...]:
    """Rows of the table for both libraries on one size.

    Raises:
      SystemExit: if their results differ.
    """
    messages, tensor = ours
    rule, peer = theirs
    compiled_start = time.perf_counter()
    compiled = jax.jit(rule.aggregate).lower(messages).compile()
    compile_seconds = time.perf_counter() - compiled_start
    timing, result = measure(lambda: compiled(messages), repeats=repeats)
    (peer_timing, peer_result), peak = _with_peak(lambda: measure(lambda: _finished(peer(tensor)), repeats=repeats))
    got, expected = np.asarray(result), peer_result.cpu().numpy()
    difference = float(np.abs(got - expected).max() / np.abs(expected).max())
    if not difference < TOLERANCE:
        raise SystemExit(f"{name} with {n} workers: results differ by {difference:.1e} of the largest number")
    facts = {"rule": name, "workers": n, "parameters": d, "f": f, "difference": difference}
    memory = compiled.memory_analysis()
    own = (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20
    return (
        facts | _row("jaxlab", timing, compile_seconds, own),
        facts | _row("byzfl", peer_timing, 0.0, peak / 2**20),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print one table, write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["64x1000000x16", "16x10000000x4"])
    parser.add_argument("--rules", nargs="+", default=None, help="names of the table")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch; XLA takes all cores it may use")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)

    import torch

    torch.set_num_threads(options.threads)
    on_gpu = jax.devices()[0].platform == "gpu" and torch.cuda.is_available()
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        n, d, f = (int(number) for number in size.split("x"))
        random = np.random.default_rng(0)
        messages = random.standard_normal((n, d), dtype=np.float32)
        messages[n - f :] += 3.0
        both = (jax.device_put(messages), torch.from_numpy(messages).to("cuda" if on_gpu else "cpu"))
        for name, pair in rules(f).items():
            if options.rules is None or name in options.rules:
                rows += compare(name, n, d, f, options.repeats, both, pair)
                print(f"{size} {name}: {rows[-2]['mean']:.3f} s, byzfl {rows[-1]['mean']:.3f} s", flush=True)
    table = []
    for own, peer in zip(rows[::2], rows[1::2], strict=True):
        name = f"{own['workers']} x {own['parameters']:.0e} {own['rule']}"
        seconds = [f"{own['compile']:.2f}", f"{own['mean']:.3f}", f"{peer['mean']:.3f}"]
        memory = [f"{row['memory_mib']:.0f}" for row in (own, peer)]
        table.append((name, *seconds, f"{peer['mean'] / own['mean']:.1f}", *memory))
    headings = ("", "compile s", "jaxlab s", "byzfl s", "times", "MiB", "MiB byzfl")
    print_table(f"One aggregation on {device_name()}", headings, table)
    if options.out is not None:
        write_json(options.out, "optim_aggregation", rows=rows, threads=options.threads)


def _row(implementation: str, timing: Timing, compile_seconds: float, memory: float) -> dict[str, Any]:
    return {
        "implementation": implementation,
        "compile": compile_seconds,
        "seconds": timing.runs,
        "mean": timing.mean,
        "memory_mib": memory,
    }


def _finished(tensor: Any) -> Any:
    if tensor.is_cuda:
        import torch

        torch.cuda.synchronize()
    return tensor


def _with_peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What ``work`` returns, and by how many bytes memory grew at most meanwhile."""
    import torch

    if jax.devices()[0].platform == "gpu" and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        return result, torch.cuda.max_memory_allocated() - before
    before, largest, done = _resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.005):
            largest = max(largest, _resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
    finally:
        done.set()
        watcher.join()
    return result, largest


def _resident() -> int:
    """Bytes of this process in memory (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
