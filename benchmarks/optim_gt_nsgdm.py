"""Steps per second of GT-NSGDm on a simulated network: jaxlab against a PyTorch loop over the nodes.

    python benchmarks/optim_gt_nsgdm.py [--nodes 8 32 128] [--steps 250] [--repeats 5] [--out FILE]

Two problems on a ring: the paper's robust regression under stable noise at each number of nodes, and a small decoder on
real text at the smallest of them. The peer (`torch_gt_nsgdm.py`; extra ``peers``) has the same start, data, mixing
matrix and hyperparameters. It takes fewer steps per repeat, and the parameters jaxlab had after as many steps, in the
very run that is timed, must agree with the peer's; if they do not, the script ends with an error. Both compute in full
float32. jaxlab runs all steps of a repeat in one ``lax.scan``. Its rows:

* one device, all nodes stacked: ``dense`` and ``sparse`` mixing;
* all devices that divide the nodes, where there are several: ``neighbours`` (``ppermute``) and ``all_gather``, and
  ``mean`` (``pmean``), which is exact averaging and is checked against the same on one device.

To see the sharded rows on one CPU: ``XLA_FLAGS=--xla_force_host_platform_device_count=8``.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Timing, device_name, measure, print_table, write_json
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlab import optim
from jaxlab.data import Vocabulary, load_text, sample_crops, shard_tokens, split_words
from jaxlab.nn import DecoderConfig, decoder, next_token_loss
from jaxlab.optim import noise, topology

__all__ = ["TOLERANCE", "Problem", "check_same_work", "decoder_problem", "main", "regression_problem"]

# Distance between two results over the distance either has gone from the start. Rounding of float32 sums in another
# order, which normalisation passes on, comes to 1e-6; a step size that is 1 % longer to 0.01, no tracking to 0.4.
TOLERANCE = 1e-4

_TUKEY_CONSTANT = 4.6851
_DECODER = DecoderConfig(
    vocab_size=512, hidden_size=32, intermediate_size=128, num_layers=1, num_heads=4, tie_embeddings=True
)


@dataclass(frozen=True)
class Problem:
    """Work for a network of nodes.

    Attributes:
      name: for the table.
      learning_rate, beta: of GT-NSGDm.
      start: parameters, the same on every node, leaves ``[n, ...]``.
      fixed: data of every node that each step uses, ``[n, ...]`` each.
      streamed: data of every step and node, ``[steps, n, ...]`` each.
      loss: of one node, for `jaxlab.optim.make_train_step`; its batch is ``fixed`` and one step of ``streamed``.
      torch_gradient: from the peer's module to its gradient of the same loss.
    """

    name: str
    learning_rate: float
    beta: float
    start: Any
    fixed: Mapping[str, np.ndarray]
    streamed: Mapping[str, np.ndarray]
    loss: Callable[[Any, Any, jax.Array], jax.Array]
    torch_gradient: Callable[[ModuleType], Callable[..., Any]]

    @property
    def steps(self) -> int:
        """Steps there is data for."""
        return len(next(iter(self.streamed.values())))


def regression_problem(nodes: int, steps: int) -> Problem:
    """Robust regression: 50 binary rows of 20 features a node, Tukey's loss, stable noise on every gradient."""
    feature_key, target_key, noise_key = jax.random.split(jax.random.key(0), 3)
    frequency = np.concatenate([np.full(2, 0.9), np.full(2, 0.5), np.full(16, 0.1)])
    features = jax.random.bernoulli(feature_key, frequency, (nodes, 50, 20)).astype(jnp.float32)
    labels = features @ jax.random.normal(target_key, (20,))
    gradient_noise = noise.alpha_stable(noise_key, (steps, nodes, 20), alpha=1.5, beta=0.5)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        residual = batch["features"] @ params["weights"] - batch["labels"]
        inside = 1 - jnp.minimum((residual / _TUKEY_CONSTANT) ** 2, 1)
        # The gradient of the second term is the noise.
        return (_TUKEY_CONSTANT**2 / 6 * (1 - inside**3)).mean() + batch["noise"] @ params["weights"]

    return Problem(
        name="regression",
        learning_rate=0.01,
        beta=0.9,
        start={"weights": np.zeros((nodes, 20), np.float32)},
        fixed={"features": np.asarray(features), "labels": np.asarray(labels)},
        streamed={"noise": np.asarray(gradient_noise)},
        loss=loss,
        torch_gradient=lambda peer: peer.regression_gradient(_TUKEY_CONSTANT),
    )


def decoder_problem(nodes: int, steps: int) -> Problem:
    """A decoder of 30,000 parameters on the texts of ``help()``: four crops of 17 words a node and step."""
    words = split_words(load_text("python-topics"))
    shards = shard_tokens(Vocabulary.build(words, _DECODER.vocab_size).encode(words), nodes)
    crops = sample_crops(jax.random.key(1), shards, steps * 4, 16)
    apply_fn, params = decoder.init(_DECODER, jax.random.key(0))

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        del key
        return next_token_loss(apply_fn(params, batch["tokens"]), batch["tokens"])

    return Problem(
        name="decoder",
        learning_rate=0.3,
        beta=0.8,
        start=jax.tree.map(np.asarray, optim.replicate(params, nodes)),
        fixed={},
        streamed={"tokens": np.asarray(crops).reshape(nodes, steps, 4, 17).swapaxes(0, 1)},
        loss=loss,
        torch_gradient=lambda peer: peer.decoder_gradient(_DECODER),
    )


def check_same_work(
    who: str, found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], start: Mapping[str, np.ndarray]
) -> float:
    """Distance between two results over the distance gone from the start.

    Raises:
      SystemExit: if it exceeds `TOLERANCE` or is not a number: then the two did not do the same work.
    """

    def distance(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
        return math.sqrt(sum(float(np.square(np.float64(a[name]) - b[name]).sum()) for name in start))

    difference = distance(found, expected) / distance(expected, start)
    if not difference <= TOLERANCE:
        raise SystemExit(f"{who}: differs by {difference:.1e} of the distance gone, more than {TOLERANCE:.0e} allows")
    return difference


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--problems", nargs="+", choices=["regression", "decoder"], default=["regression", "decoder"])
    parser.add_argument("--steps", type=int, default=250, help="jaxlab's steps a repeat")
    parser.add_argument("--peer-steps", type=int, default=25, help="the peer's steps a repeat, a divisor of --steps")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    for name, least in (
        ("nodes", min(options.nodes)),
        ("peer-steps", options.peer_steps),
        ("repeats", options.repeats),
    ):
        if least < 1:
            parser.error(f"--{name} must be at least 1, got {least}")
    if options.steps < 1 or options.steps % options.peer_steps:
        parser.error(f"--peer-steps must divide --steps, got {options.peer_steps} and {options.steps}")

    peer = _import_peer()
    problems = []
    if "regression" in options.problems:
        problems += [(nodes, regression_problem) for nodes in options.nodes]
    if "decoder" in options.problems:
        problems.append((min(options.nodes), decoder_problem))
    with jax.default_matmul_precision("float32"):
        rows = [
            row
            for nodes, make in problems
            for row in _compare(make(nodes, options.steps), nodes, peer, options.peer_steps, options.repeats)
        ]
    for problem in options.problems:
        _print_rows(problem, [row for row in rows if row["problem"] == problem])
    if options.out:
        write_json(
            options.out,
            "optim_gt_nsgdm",
            rows=rows,
            steps=options.steps,
            peer_steps=options.peer_steps,
            tolerance=TOLERANCE,
        )


def _import_peer() -> ModuleType | None:
    try:
        import torch_gt_nsgdm
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("torch is not installed (extra 'peers'): only jaxlab is measured")
        return None
    return torch_gt_nsgdm


def _compare(
    problem: Problem, nodes: int, peer: ModuleType | None, peer_steps: int, repeats: int
) -> list[dict[str, Any]]:
    """One row an implementation, the peer first, all checked against dense mixing on the same graph."""
    start = _flat(problem.start)
    rows: list[dict[str, Any]] = []
    after_peer_steps: dict[str, dict[str, np.ndarray]] = {}  # of the first implementation on each graph

    def add(
        implementation: str, devices: int, timing: Timing, steps: int, params: dict[str, np.ndarray], graph: str
    ) -> None:
        who = f"{problem.name} on {nodes} nodes, {implementation}"
        mean, spread = timing.rate(steps)
        rows.append(
            {
                "problem": problem.name,
                "nodes": nodes,
                "implementation": implementation,
                "devices": devices,
                "compile_seconds": timing.compile,
                "steps_per_second": mean,
                "steps_per_second_std": spread,
                "difference": check_same_work(who, params, after_peer_steps.setdefault(graph, params), start),
            }
        )

    for exchange, mixer, mesh in _exchanges(nodes):
        timing, blocks = measure(_training(problem, mixer, mesh, block=peer_steps), repeats=repeats)
        early = {name: leaf[0] for name, leaf in _flat(blocks).items()}
        graph = "complete" if exchange == "mean" else "ring"
        add(f"jaxlab, {exchange}", mesh.size if mesh else 1, timing, problem.steps, early, graph)
    if peer is None:
        return rows
    streamed = {name: leaf[:peer_steps] for name, leaf in problem.streamed.items()}
    network = peer.TorchNetwork(start, problem.fixed, streamed, topology.ring(nodes), problem.torch_gradient(peer))
    timing, params = measure(
        lambda: network.train(learning_rate=problem.learning_rate, beta=problem.beta), repeats=repeats
    )
    add(f"torch on {peer.DEVICE}", 1, timing, peer_steps, params, "ring")
    return [
        row | {"times_torch": row["steps_per_second"] / rows[-1]["steps_per_second"]} for row in (rows[-1], *rows[:-1])
    ]


def _exchanges(nodes: int) -> list[tuple[str, optim.Mixer, Mesh | None]]:
    ring = topology.ring(nodes)
    exchanges: list[tuple[str, optim.Mixer, Mesh | None]] = [
        (exchange, optim.make_mixer(ring, exchange=exchange), None) for exchange in ("dense", "sparse")
    ]
    devices = math.gcd(nodes, len(jax.devices()))
    if devices > 1:
        mesh = Mesh(np.asarray(jax.devices()[:devices]), ("node",))
        exchanges += [
            *(
                (exchange, optim.make_mixer(ring, axis_name="node", exchange=exchange), mesh)
                for exchange in ("neighbours", "all_gather")
            ),
            ("mean", optim.MeanMixer(nodes), None),
            ("mean", optim.MeanMixer(nodes, "node"), mesh),
        ]
    return exchanges


def _training(problem: Problem, mixer: optim.Mixer, mesh: Mesh | None, *, block: int) -> Callable[[], Any]:
    """All steps in one compiled call, which returns the parameters after every ``block`` of them."""
    optimizer = optim.gt_nsgdm(problem.learning_rate, mixer, problem.beta)
    step = optim.make_train_step(problem.loss, optimizer, mixer)
    params, fixed, streamed = (
        jax.tree.map(jnp.asarray, dict(x)) for x in (problem.start, problem.fixed, problem.streamed)
    )
    state = optimizer.init(params)
    if mesh is not None:
        batch = fixed | {name: leaf[0] for name, leaf in streamed.items()}
        step = optim.shard_train_step(step, mesh, mixer, params=params, state=state, batch=batch)
        params, state, fixed = (optim.put_on_mesh(tree, mesh, mixer) for tree in (params, state, fixed))
        streamed = jax.device_put(streamed, NamedSharding(mesh, PartitionSpec(None, "node")))

    @jax.jit
    def train(params: Any, state: Any, fixed: Any, streamed: Any) -> Any:
        def one_step(carry: Any, of_step: Any) -> tuple[Any, None]:
            params, state, _ = step(*carry, fixed | of_step, jax.random.key(0))
            return (params, state), None

        def one_block(carry: Any, of_block: Any) -> tuple[Any, Any]:
            carry, _ = jax.lax.scan(one_step, carry, of_block)
            return carry, carry[0]

        blocks = jax.tree.map(lambda leaf: leaf.reshape(-1, block, *leaf.shape[1:]), streamed)
        return jax.lax.scan(one_block, (params, state), blocks)[1]

    return lambda: train(params, state, fixed, streamed)


def _flat(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def _print_rows(problem: str, rows: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        f"GT-NSGDm, {problem}, on {device_name()}",
        ("", "nodes", "devices", "compile s", "steps/s", "±", "x torch", "difference"),
        [
            (
                row["implementation"],
                str(row["nodes"]),
                str(row["devices"]),
                f"{row['compile_seconds']:.2f}",
                f"{row['steps_per_second']:.0f}",
                f"{row['steps_per_second_std']:.0f}",
                f"{row['times_torch']:.1f}" if "times_torch" in row else "",
                f"{row['difference']:.1g}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
