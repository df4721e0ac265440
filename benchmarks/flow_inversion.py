"""Images per second of an edit by Uni-Inv and Uni-Edit: jaxlab against a PyTorch loop.

    python benchmarks/flow_inversion.py [--batches 1 16 64] [--hidden 128] [--layers 4] [--repeats 5] [--out FILE]

The network is the class-conditional DiT of ``jaxlab run uniedit``, with random weights; an edit is 15 steps at a delay
rate of 0.6, 28 calls of the network. The peer (`torch_flow_inversion.py`; extra ``peers``) has the same weights, images
and conditions, PyTorch's own attention, and as many threads as torch takes by default; like published programs it makes
each step's modulation at that step, which jaxlab does ahead where the batch is small (`jaxlab.flow.stages`). The edits
of both must agree; if they do not, the script ends with an error. Both compute in full float32 and are measured in
turns; "times torch" is the median over turns.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import Timing, device_name, measure, print_table, write_json

from jaxlab import flow
from jaxlab.nn.dit import DiT, DiTConfig

__all__ = ["TOLERANCE", "check_same_work", "main"]

# Largest difference of a pixel over the range of the edits. Rounding of float32 sums in another order through 28 calls
# comes to 1e-5; a mask of ones or an Euler inversion to 0.01 and more.
TOLERANCE = 5e-4

_STEPS, _DELAY_RATE, _STRENGTH = 15, 0.6, 0.5


def network(hidden: int, layers: int, *, seed: int = 0) -> DiT:
    """The network on pairs of 14 x 14 pictures, all weights drawn: a fresh one would be zero everywhere."""
    config = DiTConfig(
        image_shape=(14, 28, 1), patch_size=7, num_classes=(10, 10), hidden_size=hidden, num_layers=layers
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)

    def draw(leaf: Any) -> jax.Array:
        scale = 0.5 / np.sqrt(max(leaf.shape[-2:])) if len(leaf.shape) > 1 else 0.02
        return jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype)

    return nnx.merge(graph, jax.tree.map(draw, state))


def examples(batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, source and target labels."""
    rng = np.random.default_rng(batch)
    source = rng.integers(10, size=(batch, 2)).astype(np.int32)
    target = source.copy()
    target[:, 1] = (source[:, 1] + 1) % 10
    return rng.uniform(-1, 1, (batch, 14, 28, 1)).astype(np.float32), source, target


def check_same_work(batch: int, found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the range of what is expected; stops the script if that is above the tolerance."""
    difference = float(np.abs(found - expected).max() / np.ptp(expected))
    if not difference <= TOLERANCE:
        raise SystemExit(f"batch {batch}: the edits of jaxlab and torch differ by {difference:.1e} of their range")
    return difference


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison, print a table, write the JSON file."""
    options = _parse(arguments)
    peer = _peer()
    model = network(options.hidden, options.layers)
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        rows += _compare(model, batch, peer, options.repeats)
    print_table(
        f"Uni-Inv and Uni-Edit, 28 calls, on {device_name()}",
        ("", "batch", "compile s", "images/s", "± ", "times torch", "difference"),
        [_cells(row) for row in rows],
    )
    if options.out:
        write_json(
            options.out,
            "flow_inversion",
            rows=rows,
            hidden_size=options.hidden,
            num_layers=options.layers,
            tolerance=TOLERANCE,
        )


def _compare(model: DiT, batch: int, peer: ModuleType | None, repeats: int) -> list[dict[str, Any]]:
    images, source, target = examples(batch)
    grid = flow.time_grids.uniform(_STEPS)
    steps = flow.delayed_steps(grid, _DELAY_RATE)

    @jax.jit
    def edit(velocity: Any, images: Any, source: Any, target: Any) -> Any:
        options = {"source": source, "target": target, "inversion": source, "strength": _STRENGTH}
        return flow.uni_edit(velocity, images, grid, delay_rate=_DELAY_RATE, **options).z

    arguments = (flow.from_nnx(model, stages=("prepare", "apply")), *map(jnp.asarray, (images, source, target)))

    def work() -> Any:
        return edit(*arguments)

    if peer is None:
        return [_row("jaxlab", batch, measure(work, repeats=repeats)[0])]
    import torch

    leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    weights = {jax.tree_util.keystr(path, simple=True, separator="/"): np.array(leaf) for path, leaf in leaves}
    network = peer.TorchDiT(model.config, weights)
    of_torch = [torch.tensor(array, device=peer.DEVICE) for array in (images, source, target)]

    def loop() -> np.ndarray:
        z, source, target = of_torch
        return peer.uni_edit(
            network, z, grid, source=source, target=target, strength=_STRENGTH, steps=steps
        ).cpu().numpy()  # fmt: skip

    # In turns, so that what else the machine does meets both.
    turns = [(measure(loop, repeats=1), measure(work, repeats=1)) for _ in range(repeats)]
    theirs, ours = (
        Timing(side[0][0].first, tuple(timing.mean for timing, _ in side)) for side in zip(*turns, strict=True)
    )
    rows = [_row(f"torch on {peer.DEVICE}", batch, theirs, compiles=False), _row("jaxlab", batch, ours)]
    (_, expected), (_, found) = turns[-1]
    rows[1]["difference"] = check_same_work(batch, np.asarray(found), expected)
    rows[1]["times_torch"] = statistics.median(a / b for a, b in zip(theirs.runs, ours.runs, strict=True))
    return rows


def _row(name: str, batch: int, timing: Timing, *, compiles: bool = True) -> dict[str, Any]:
    mean, deviation = timing.rate(batch)
    return {
        "implementation": name,
        "batch": batch,
        "compile_seconds": timing.compile if compiles else 0.0,
        "images_per_second": mean,
        "images_per_second_std": deviation,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["implementation"],
        str(row["batch"]),
        f"{row['compile_seconds']:.2f}" if row["compile_seconds"] else "",
        f"{row['images_per_second']:.1f}",
        f"{row['images_per_second_std']:.1f}",
        f"{row['times_torch']:.2f}" if "times_torch" in row else "",
        f"{row['difference']:.0e}" if "difference" in row else "",
    )


def _peer() -> ModuleType | None:
    try:
        import torch_flow_inversion
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("torch is not installed (extra 'peers'): only jaxlab is measured")
        return None
    return torch_flow_inversion


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--hidden", type=int, default=128, help="width of the network, a multiple of 4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    for name, value in (("batches", min(options.batches)), ("layers", options.layers), ("repeats", options.repeats)):
        if value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if options.hidden < 4 or options.hidden % 4:
        parser.error(f"--hidden must be a multiple of 4, got {options.hidden}")
    return options


if __name__ == "__main__":
    main()
