"""GB/s of merging experts into one model: jaxlab against mergekit (PyTorch), on the same state dicts and files.

    python benchmarks/editing_merge.py [--hidden 1024] [--layers 8] [--experts 3] [--dtypes bfloat16 float32]
        [--methods task_arithmetic ties dare_linear dare_ties] [--files] [--repeats 3] [--threads 2] [--out FILE]

The state dicts are those of a Llama with so many blocks. *Memory* is from dict to dict: `merge_tensors` against
`merge_state_dicts` of mergekit. *Files* is from folders to a folder: `merge_checkpoints` against its `run_merge`. Both
merge all tensors, trim each tensor of TIES by itself and elect as mergekit does; jaxlab also measures the norms of all
task vectors meanwhile. GB are those that are read and written once: base, experts and result, however often they are
gone over. Peak memory is the largest growth of the anonymous memory of the process during a warm call, the result
included.

In float32 results must be the same to 1e-6, those of TIES but for one number in ten thousand, where magnitudes are
equal. In bfloat16, in which mergekit also computes, and for DARE, whose draws differ, the mean magnitude of the change
and its standard deviation must agree to 2 %. If not, the script ends with an error. Set the number of threads before
Python starts where the machine has more cores: ``taskset -c 0,1 python ...``.
"""

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Timing, device_name, print_table, write_json

from jaxlab.editing import merging
from jaxlab.editing.merging import make_method

__all__ = ["METHODS", "check_alike", "main", "state_dicts"]

METHODS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {"weight": 0.3},
    "ties": {"weight": 1.0, "density": 0.2},
    "dare_linear": {"weight": 0.3, "density": 0.8, "rescale": False},
    "dare_ties": {"weight": 0.3, "density": 0.8, "rescale": False},
}


def ours(name: str) -> merging.MergeMethod:
    """The method with the parameters above."""
    if name == "task_arithmetic":
        return make_method(name, scale=1.0, weights=0.3)
    if name == "ties":
        return make_method(name, density=0.2, scope="tensor", election="mergekit")
    options = {"drop": 0.2, "rescale": "none", "scale": 1.0, "weights": 0.3, "normalize": False}
    return make_method(name.removesuffix("_linear"), **options)


def state_dicts(hidden: int, layers: int, experts: int, dtype: str) -> list[dict[str, np.ndarray]]:
    """A base and its experts, with the names of a Llama."""
    wide, random = hidden * 11 // 4, np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (1000, hidden), "model.norm.weight": (hidden,)}
    for block in range(layers):
        of_block = dict.fromkeys((f"self_attn.{part}_proj" for part in "qkvo"), (hidden, hidden))
        of_block |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
        of_block |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
        shapes |= {f"model.layers.{block}.{part}.weight": shape for part, shape in of_block.items()}
    shapes["lm_head.weight"] = (1000, hidden)
    base = {name: 0.02 * random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    kept = jnp.dtype(dtype)
    made = [{name: tensor.astype(kept) for name, tensor in base.items()}]
    for _ in range(experts):
        made.append(
            {
                name: (tensor + 0.002 * random.standard_normal(tensor.shape, np.float32)).astype(kept)
                for name, tensor in base.items()
            }
        )
    return made


def check_alike(name: str, base: Any, got: Any, expected: Any, *, exact: bool) -> float:
    """The largest difference, or the relative one of moments.

    Raises:
      SystemExit: if results differ by more than is said above.
    """
    largest = 0.0
    for tensor in base:
        start, a, b = (np.asarray(of[tensor], np.float32) for of in (base, got, expected))
        if exact:
            off = np.abs(a - b)
            few = 1e-4 if name == "ties" else 0.0
            if not (off > 1e-6).mean() <= few:
                raise SystemExit(f"{name}: {tensor} differs by {off.max():.1e}")
            largest = max(largest, float(np.quantile(off, 1 - few)))
        elif a.size > 100_000:
            first, second = (np.array([np.abs(x - start).mean(), (x - start).std()]) for x in (a, b))
            off = float(np.abs(first / second - 1).max())
            if not off < 0.02:
                raise SystemExit(f"{name}: changes of {tensor} differ by {100 * off:.1f} % in size")
            largest = max(largest, off)
    return largest


def compare(name: str, dicts: Sequence[Any], dtype: str, repeats: int) -> dict[str, Any]:
    """A row of the table: from dict to dict."""
    import torch
    from mergekit.merge_methods import merge_state_dicts

    def as_torch(tensor: np.ndarray) -> Any:
        if tensor.dtype == jnp.bfloat16:
            return torch.from_numpy(tensor.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(tensor)

    def as_numpy(tensor: Any) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()

    base, *experts = dicts
    models = {str(k): {n: as_torch(t) for n, t in of.items()} for k, of in enumerate(dicts)}
    methods, key = dict.fromkeys(base, ours(name)), jax.random.key(0)
    key = key if methods["lm_head.weight"].needs_key else None
    timing, peak, got = _timed(lambda: merging.merge_tensors(base, experts, methods, key=key), repeats)
    peer, peer_peak, expected = _timed(
        lambda: merge_state_dicts(models, name, base="0", parameters=METHODS[name]), repeats, warm=False
    )
    expected = {tensor: as_numpy(value) for tensor, value in expected.items()}
    exact = dtype == "float32" and not name.startswith("dare")
    difference = check_alike(name, base, got, expected, exact=exact)
    return _row("memory", name, dtype, dicts, timing, peak, peer, peer_peak, difference)


def compare_files(name: str, dicts: Sequence[Any], dtype: str, repeats: int) -> dict[str, Any]:
    """A row of the table: from folders to a folder."""
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge
    from transformers import LlamaConfig

    from jaxlab.nn.checkpoints import TensorWriter, open_tensors

    base = dicts[0]
    layers = sum(tensor.endswith("q_proj.weight") for tensor in base)
    wide, hidden = base["model.layers.0.mlp.up_proj.weight"].shape
    with tempfile.TemporaryDirectory() as directory:
        folders = [Path(directory) / str(k) for k in range(len(dicts))]
        for folder, tensors in zip(folders, dicts, strict=True):
            specs = {n: jax.ShapeDtypeStruct(t.shape, t.dtype) for n, t in tensors.items()}
            with TensorWriter(folder, specs) as writer:
                for tensor, value in tensors.items():
                    writer.write(tensor, value)
            sizes = {
                "vocab_size": 1000,
                "hidden_size": hidden,
                "intermediate_size": wide,
                "dtype": dtype,
                "num_attention_heads": 8,
            }
            LlamaConfig(**sizes, num_hidden_layers=layers, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        parameters = METHODS[name]
        models = [{"model": str(folder), "parameters": dict(parameters)} for folder in folders[1:]]
        shared = {key: parameters[key] for key in parameters if key == "rescale"}
        for model in models:
            model["parameters"].pop("rescale", None)
        config = {"merge_method": name, "base_model": str(folders[0]), "models": models, "parameters": shared}
        file = Path(directory) / "config.yml"
        file.write_text(yaml.safe_dump({**config, "dtype": dtype}))
        options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)

        def work() -> None:
            shutil.rmtree(Path(directory) / "ours", ignore_errors=True)
            read = merging.read_mergekit(file)
            opened = merging.open_base(read.base)
            experts = [merging.open_expert(expert, opened) for expert in read.experts]
            methods = read.methods(merging.merged_names(opened, exclude=()), layers)
            key = jax.random.key(0) if name.startswith("dare") else None
            merging.merge_checkpoints(opened, experts, Path(directory) / "ours", methods, dtype=read.dtype, key=key)

        def peer_work() -> None:
            shutil.rmtree(Path(directory) / "theirs", ignore_errors=True)
            settings = MergeConfiguration.model_validate(yaml.safe_load(file.read_text()))
            run_merge(settings, str(Path(directory) / "theirs"), options)

        timing, peak, _ = _timed(work, repeats)
        peer, peer_peak, _ = _timed(peer_work, repeats, warm=False)
        got, expected = (dict(open_tensors(Path(directory) / out)) for out in ("ours", "theirs"))
        exact = dtype == "float32" and not name.startswith("dare")
        difference = check_alike(name, base, got, expected, exact=exact)
        return _row("files", name, dtype, dicts, timing, peak, peer, peer_peak, difference)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print one table, write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument("--files", action="store_true", help="from folders to a folder, too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch; XLA takes all cores it may use")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    for name in ("hidden", "layers", "experts", "repeats", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    try:
        import mergekit  # noqa: F401
        import torch
    except ImportError as error:
        raise SystemExit(f"{error}: pip install --no-deps mergekit immutables tqdm, and torch") from error
    torch.set_num_threads(options.threads)
    rows = []
    for dtype in options.dtypes:
        dicts = state_dicts(options.hidden, options.layers, options.experts, dtype)
        for name in options.methods:
            for measured in (compare, compare_files) if options.files else (compare,):
                rows.append(row := measured(name, dicts, dtype, options.repeats))
                speeds = f"{row['gigabytes_per_second']:.2f} GB/s, mergekit {row['peer_gigabytes_per_second']:.2f}"
                print(f"{row['from']} {name} {dtype}: {speeds}", flush=True)
    table = [
        (
            f"{row['from']} {row['method']} {row['dtype']}",
            f"{row['compile']:.1f}",
            f"{row['gigabytes_per_second']:.2f}",
            f"{row['peer_gigabytes_per_second']:.2f}",
            f"{row['times_faster']:.1f}",
            f"{row['memory_mib']:.0f}",
            f"{row['peer_memory_mib']:.0f}",
        )
        for row in rows
    ]
    headings = ("", "compile s", "GB/s", "mergekit", "times", "MiB", "mergekit")
    print_table(f"Merging {options.experts} experts on {device_name()}", headings, table)
    if options.out is not None:
        write_json(options.out, "editing_merge", rows=rows, threads=options.threads)


def _row(
    source: str,
    name: str,
    dtype: str,
    dicts: Sequence[Any],
    timing: Timing,
    peak: int,
    peer: Timing,
    peer_peak: int,
    difference: float,
) -> dict[str, Any]:
    size = sum(tensor.nbytes for tensor in dicts[0].values()) * (len(dicts) + 1) / 1e9
    return {
        "from": source,
        "method": name,
        "dtype": dtype,
        "gigabytes": size,
        "compile": timing.compile,
        "seconds": timing.runs,
        "peer_seconds": peer.runs,
        "gigabytes_per_second": size / timing.mean,
        "peer_gigabytes_per_second": size / peer.mean,
        "times_faster": peer.mean / timing.mean,
        "memory_mib": peak / 2**20,
        "peer_memory_mib": peer_peak / 2**20,
        "difference": difference,
    }


def _timed(work: Callable[[], Any], repeats: int, *, warm: bool = True) -> tuple[Timing, int, Any]:
    """Times, the largest growth of memory in the last call, and what it returned; a first call where things compile."""
    start = time.perf_counter()
    if warm:
        work()
    first, runs, result, peak = time.perf_counter() - start, [], None, 0
    for _ in range(repeats):
        result = None
        before, done = _anonymous(), threading.Event()
        found = [before]

        def watch(done: threading.Event = done, found: list[int] = found) -> None:
            while not done.wait(0.01):
                found[0] = max(found[0], _anonymous())

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        result = work()
        runs.append(time.perf_counter() - start)
        done.set()
        watcher.join()
        peak = max(found[0], _anonymous()) - before
    return Timing(first if warm else runs[0], tuple(runs)), peak, result


def _anonymous() -> int:
    """Bytes of this process in memory that are no mapped files (Linux); 0 elsewhere."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


if __name__ == "__main__":
    main()
