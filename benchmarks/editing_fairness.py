"""Seconds of fairness metrics under a bootstrap, and of a sweep over coefficients: jaxlab against the usual loops.

    python benchmarks/editing_fairness.py [--rows 8000] [--groups 2 5] [--resamples 1000] [--peer-resamples 100]
        [--scales 11 121] [--repeats 3] [--out FILE]

*Bootstrap*: demographic parity and equalized odds difference of hard predictions, drawn anew with replacement. The peer
is `fairlearn.metrics.MetricFrame` with the three rates that both need, built once a resample, as its users do; it is
timed on ``--peer-resamples`` of them and scaled up. *Scores* is the same with soft predictions, where jaxlab cannot
draw equal rows together. On the rows as they are both must give the same numbers to 1e-6, and the means over resamples
must agree to the noise of the draws; if not, the script ends with an error.

*Sweep*: θ₀ + λ Σ Δ for all λ. The peer does what the paper's script does: for each λ add up the weights, write a file,
read it back, and run the model on all rows in batches. Its loop is run once with PyTorch and once with the same jitted
model as ours, so that what a framework gains is told from what the single program gains. Predictions must agree but for
one in a thousand (logits at zero).
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import device_name, measure, print_table, write_json

from jaxlab.editing.fairness import (
    demographic_parity_difference,
    equalized_odds_difference,
    group_statistics,
    lambda_sweep,
    membership_from_ids,
    resample,
)

__all__ = ["bootstrap_rows", "check_close", "main", "sweep_rows"]

_WIDTH, _FEATURES, _BATCH = 128, 98, 256


def both(statistics: Any) -> jax.Array:
    """Demographic parity and equalized odds difference."""
    return jnp.stack([demographic_parity_difference(statistics), equalized_odds_difference(statistics)])


def frame_differences(labels: np.ndarray, predictions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The same two from one `MetricFrame`."""
    from fairlearn.metrics import MetricFrame, false_positive_rate, selection_rate, true_positive_rate

    metrics = {"selection": selection_rate, "true": true_positive_rate, "false": false_positive_rate}
    frame = MetricFrame(metrics=metrics, y_true=labels, y_pred=predictions, sensitive_features=ids)
    gaps = frame.difference(method="between_groups")
    return np.array([gaps["selection"], max(gaps["true"], gaps["false"])])


def check_close(name: str, ours: Any, theirs: Any, tolerance: float) -> float:
    """The largest difference.

    Raises:
      SystemExit: if it is above the tolerance.
    """
    difference = float(np.abs(np.asarray(ours) - np.asarray(theirs)).max())
    if not difference <= tolerance:
        raise SystemExit(f"{name}: results differ by {difference:.1e}, more than {tolerance:.1e}")
    return difference


def bootstrap_rows(rows: int, groups: int, resamples: int, peer_resamples: int, repeats: int) -> list[dict[str, Any]]:
    """Both kinds of predictions against the loop over `MetricFrame`."""
    random = np.random.default_rng(0)
    ids = random.integers(0, groups, rows)
    labels = (random.uniform(size=rows) < 0.3 + 0.1 * ids / groups).astype(int)
    scores = np.clip(random.normal(0.35 + 0.3 * labels, 0.2), 0, 1)
    predictions = (scores > 0.5).astype(int)
    membership = membership_from_ids(ids, groups)
    once = check_close(
        "metrics",
        both(group_statistics(predictions, labels, membership)),
        frame_differences(labels, predictions, ids),
        1e-6,
    )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        theirs = []
        for _ in range(peer_resamples):
            chosen = random.integers(0, rows, rows)
            theirs.append(frame_differences(labels[chosen], predictions[chosen], ids[chosen]))
        peer = (time.perf_counter() - start) * resamples / peer_resamples

    metric = jax.jit(jax.vmap(both))
    found = []
    for kind, values in (("hard", predictions), ("scores", scores)):
        timing, drawn = measure(
            lambda values=values: metric(resample(jax.random.key(1), values, labels, membership, resamples=resamples)),
            repeats=repeats,
        )
        if kind == "hard":
            # Means of two bootstraps differ by their noise: six standard errors of the smaller one.
            noise = 6 * np.std(theirs, axis=0).max() / np.sqrt(peer_resamples) + 1e-3
            check_close("bootstrap", np.mean(drawn, axis=0), np.mean(theirs, axis=0), noise)
        found.append(
            {
                "work": f"{resamples} x {rows} rows, {groups} groups, {kind}",
                "peer": "MetricFrame",
                "compile": timing.compile,
                "seconds": timing.mean,
                "peer_seconds": peer,
                "times_faster": peer / timing.mean,
                "difference": once,
            }
        )
    return found


def _network(params: Any, x: jax.Array) -> jax.Array:
    for i in range(3):
        x = jax.nn.relu(x @ params[f"layer{i}"])
    return (x @ params["head"])[:, 0]


def sweep_rows(rows: int, groups: int, scales: int, repeats: int) -> list[dict[str, Any]]:
    """One program against writing, reading and running each model, with PyTorch and with JAX."""
    import torch

    random = np.random.default_rng(0)
    sizes = [_FEATURES, _WIDTH, _WIDTH, _WIDTH]
    shapes = {f"layer{i}": (sizes[i], sizes[i + 1]) for i in range(3)} | {"head": (_WIDTH, 1)}
    base = {name: random.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    vectors = {name: random.normal(0, 0.02, (groups, *shape)).astype(np.float32) for name, shape in shapes.items()}
    x = random.normal(size=(rows, _FEATURES)).astype(np.float32)
    labels, ids = random.integers(0, 2, rows), random.integers(0, groups, rows)
    membership = membership_from_ids(ids, groups)
    values = np.linspace(0, 1, scales).astype(np.float32)
    device = [jax.tree.map(jnp.asarray, part) for part in (base, vectors, x)]
    timing, table = measure(
        lambda: lambda_sweep(_network, device[0], device[1], values, device[2], labels, membership, models_at_once=1),
        repeats=repeats,
    )
    expected = np.asarray(table.logits > 0)
    one = jax.jit(_network)

    def with_torch(path: Path, merged: dict[str, np.ndarray]) -> np.ndarray:
        torch.save({name: torch.from_numpy(leaf) for name, leaf in merged.items()}, path)
        weights = torch.load(path)
        batches = []
        with torch.no_grad():
            for batch in torch.from_numpy(x).split(_BATCH):
                for i in range(3):
                    batch = torch.relu(batch @ weights[f"layer{i}"])
                batches.append((batch @ weights["head"])[:, 0])
        return torch.cat(batches).numpy() > 0

    def with_jax(path: Path, merged: dict[str, np.ndarray]) -> np.ndarray:
        np.savez(path, **merged)
        with np.load(path) as weights:
            params = dict(weights)
        batches = [np.asarray(one(params, x[i : i + _BATCH])) for i in range(0, rows, _BATCH)]
        return np.concatenate(batches) > 0

    def loop(run: Any) -> np.ndarray:
        made = []
        with tempfile.TemporaryDirectory() as folder:
            for i, scale in enumerate(values):
                merged = {name: leaf + scale * vectors[name].sum(0) for name, leaf in base.items()}
                predicted = run(Path(folder) / f"{i}.npz", merged)
                frame_differences(labels, predicted.astype(int), ids)
                made.append(predicted)
        return np.stack(made)

    found = []
    for name, run in (("reload, PyTorch", with_torch), ("reload, jit", with_jax)):
        peer, predictions = measure(partial(loop, run), repeats=repeats)
        differing = check_close(f"sweep, {name}", np.mean(predictions != expected), 0.0, 1e-3)
        found.append(
            {
                "work": f"{scales} scales, {rows} rows, {groups} groups",
                "peer": name,
                "compile": timing.compile,
                "seconds": timing.mean,
                "peer_seconds": peer.mean,
                "times_faster": peer.mean / timing.mean,
                "difference": differing,
            }
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print one table, write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 5])
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--peer-resamples", type=int, default=100, help="that the peer is timed on")
    parser.add_argument("--scales", type=int, nargs="+", default=[11, 121])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    for name in ("rows", "resamples", "peer_resamples", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    rows: list[dict[str, Any]] = []
    for groups in options.groups:
        rows += bootstrap_rows(options.rows, groups, options.resamples, options.peer_resamples, options.repeats)
    for scales in options.scales:
        rows += sweep_rows(options.rows, options.groups[0], scales, options.repeats)
    table = [
        (
            row["work"],
            row["peer"],
            f"{row['compile']:.2f}",
            f"{row['seconds']:.4f}",
            f"{row['peer_seconds']:.2f}",
            f"{row['times_faster']:.0f}",
        )
        for row in rows
    ]
    headings = ("", "peer", "compile s", "jaxlab s", "peer s", "times")
    print_table(f"Group fairness on {device_name()}", headings, table)
    if options.out is not None:
        write_json(options.out, "editing_fairness", rows=rows, peer_resamples=options.peer_resamples)


if __name__ == "__main__":
    main()
