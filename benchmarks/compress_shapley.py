"""Masks a second and contributions: jaxlab against PyTorch's released pipeline and shapiq on the same work.

    python benchmarks/compress_shapley.py [--parts evaluation estimator sampling] [--model NAME] [--masks 32]
        [--tokens 2x128] [--queries 80000] [--players 32] [--repeats 3] [--threads 2] [--out FILE]

1. evaluation: the losses of masks drawn by strata. PyTorch does what the released code of arXiv 2602.07804 does: it
   keeps a copy of the parameters, zeroes those of the removed blocks, runs the model at full depth, and puts them back.
   jaxlab runs its three forms. Losses must agree. Without ``--model`` the network is a random Llama of 24 blocks.
2. estimator: contributions of all players under the surrogate from ``queries`` masks. PyTorch calls the network on one
   mask at a time, 2 · queries · players times; a slice of that is timed and multiplied, as the table says.
3. sampling: Shapley values of a 12-player game from the same number of evaluations: shapiq's samplers and
   `permutation_shapley`, with their error against the exact values.

Set the number of threads before Python starts where the machine has more cores: ``taskset -c 0,1 python ...``.
"""

import argparse
import dataclasses
import importlib.util
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import Timing, device_name, measure, print_table, write_json

from jaxlab import compress
from jaxlab.compress.surrogate import mlp_surrogate
from jaxlab.nn import DecoderConfig, decoder
from jaxlab.nn.checkpoints import Model, find_decoder_family, load, save

__all__ = ["TOLERANCE", "contributions", "evaluation", "main", "sampling"]

# Largest difference of two losses in nats; float32 products of a deep network in another order.
TOLERANCE = 2e-3
SLICE = 2_000  # calls of the surrogate that are timed for the extrapolation
GAME_PLAYERS = 12
PARTS = ("evaluation", "estimator", "sampling")


def evaluation(model: Model, *, masks: int, windows: int, window: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of the table: masks a second of each form.

    Raises:
      SystemExit: if losses differ, or a package is missing.
    """
    depth = model.config.num_layers
    strata = sorted({size for size in (depth - 2, depth - depth // 6, depth - depth // 3) if size > 0}, reverse=True)
    drawn = np.asarray(compress.stratified_masks(jax.random.key(0), depth, strata, masks))
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, windows * window + 1)
    batch = compress.token_batch(tokens, window=window, limit=windows)
    peer, losses = _torch_losses(model, batch, drawn)
    timing, expected = measure(peer, repeats=repeats)
    rows = [_row("evaluation", "PyTorch, zeroed", timing, masks, 0.0)]
    stack = compress.decoder_stack(model.config)
    for mode in ("gather", "gate", "prefix"):
        utility = compress.make_utility(stack, model.params, batch, mode=mode)
        timing, found = measure(lambda utility=utility: utility.losses(drawn), repeats=repeats)
        difference = float(np.abs(found - losses(expected)).max())
        if not difference < TOLERANCE:
            raise SystemExit(f"{mode}: losses differ by {difference:.1e} nats from those of PyTorch")
        rows.append(_row("evaluation", f"jaxlab, {mode}", timing, masks, difference))
    return rows


def contributions(*, players: int, queries: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of the table: seconds of the estimate.

    Raises:
      SystemExit: if the contributions differ, or a package is missing.
    """
    torch = _torch()
    network = mlp_surrogate(players)
    params = network.init(jax.random.key(0))
    strata = compress.strata_deploy(players, max(2, players * 14 // 32), step=3 if players >= 9 else 1)
    drawn = np.asarray(compress.stratified_masks(jax.random.key(1), players, strata, queries))
    timing, _ = measure(lambda: compress.contributions(network.apply, params, drawn), repeats=repeats)
    rows = [_row("estimator", "jaxlab", timing, 1, 0.0)]
    peer = torch.nn.Sequential(
        torch.nn.Linear(players, 2 * players), torch.nn.CELU(), torch.nn.Linear(2 * players, 1), torch.nn.Sigmoid()
    )
    with torch.no_grad():
        peer[0].weight.copy_(torch.tensor(np.asarray(params["hidden_weight"]).T))
        peer[0].bias.copy_(torch.tensor(np.asarray(params["hidden_bias"])))
        peer[2].weight.copy_(torch.tensor(np.asarray(params["output_weight"])[None]))
        peer[2].bias.copy_(torch.tensor(np.asarray(params["output_bias"])[None]))
        calls = min(SLICE, 2 * queries * players) // 2
        inputs = torch.tensor(drawn, dtype=torch.float32)
        start = time.perf_counter()
        gains = np.zeros(calls)
        for call in range(calls):
            query, player = divmod(call, players)
            pair = []
            for value in (1.0, 0.0):
                one = inputs[query % len(inputs)].clone()
                one[player] = value
                pair.append(peer(one[None]).item())
            gains[call] = pair[0] - pair[1]
        seconds = (time.perf_counter() - start) / calls * queries * players
    whole = calls // players  # queries of which all players were seen
    if whole:
        expected = gains[: whole * players].reshape(whole, players).mean(0)
        check = compress.contributions(network.apply, params, drawn[np.arange(whole) % len(drawn)]).mean
        difference = float(np.abs(np.asarray(check) - expected).max())
        if not difference < 1e-4:
            raise SystemExit(f"contributions differ by {difference:.1e}")
        rows[0]["difference"] = difference
    extrapolated = Timing(seconds, (seconds,))
    return [_row("estimator", "PyTorch, one mask a call (extrapolated)", extrapolated, 1, 0.0), *rows]


def sampling(*, budget: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of the table: seconds and error of Shapley values from the same number of evaluations."""
    if importlib.util.find_spec("shapiq") is None:
        raise SystemExit("shapiq is not installed: pip install shapiq")
    import shapiq

    masks = compress.all_masks(GAME_PLAYERS)
    rng = np.random.default_rng(0)
    single, pair = rng.gamma(1.5, 0.1, GAME_PLAYERS), np.triu(rng.uniform(0, 0.1, (GAME_PLAYERS, GAME_PLAYERS)), 1)

    def game(masks: Any) -> np.ndarray:
        removed = 1.0 - np.atleast_2d(np.asarray(masks, float))
        return np.exp(-removed @ single - np.einsum("ni,ij,nj->n", removed, pair, removed))

    exact = np.asarray(compress.exact_shapley(jnp.asarray(game(masks), jnp.float32)))
    own: dict[str, Callable[[], Any]] = {
        "jaxlab, permutations": lambda: (
            compress.permutation_shapley(jax.random.key(0), game, GAME_PLAYERS, budget=budget).mean
        ),
        "shapiq, permutations": lambda: (
            shapiq.PermutationSamplingSV(n=GAME_PLAYERS, random_state=0).approximate(budget, game).get_n_order_values(1)
        ),
        "shapiq, KernelSHAP": lambda: (
            shapiq.KernelSHAP(n=GAME_PLAYERS, random_state=0).approximate(budget, game).get_n_order_values(1)
        ),
    }
    rows = []
    for name, work in own.items():
        timing, found = measure(work, repeats=repeats)
        rows.append(_row("sampling", name, timing, 1, float(np.sqrt(np.mean((np.asarray(found) - exact) ** 2)))))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print one table, write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default=None, help="what jaxlab.nn.checkpoints.load takes")
    parser.add_argument("--blocks", type=int, default=24, help="of the random Llama")
    parser.add_argument("--width", type=int, default=256, help="of the random Llama")
    parser.add_argument("--masks", type=int, default=32)
    parser.add_argument("--tokens", default="2x128", help="windows x tokens")
    parser.add_argument("--queries", type=int, default=80_000)
    parser.add_argument("--players", type=int, default=32)
    parser.add_argument("--budget", type=int, default=1_000, help="evaluations of the samplers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch; XLA takes all cores it may use")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    _torch().set_num_threads(options.threads)
    windows, window = map(int, options.tokens.split("x"))
    rows: list[dict[str, Any]] = []
    if "evaluation" in options.parts:
        model = _random_llama(options.blocks, options.width) if options.model is None else load(options.model)
        rows += evaluation(model, masks=options.masks, windows=windows, window=window, repeats=options.repeats)
    if "estimator" in options.parts:
        rows += contributions(players=options.players, queries=options.queries, repeats=options.repeats)
    if "sampling" in options.parts:
        rows += sampling(budget=options.budget, repeats=options.repeats)
    first = {row["part"]: row["mean"] for row in reversed(rows)}
    table = [
        (
            f"{row['part']}: {row['implementation']}",
            f"{row['compile']:.2f}",
            f"{row['mean']:.4g}",
            f"{row['masks_per_second']:.3g}" if row["part"] == "evaluation" else "",
            f"{first[row['part']] / row['mean']:.2f}",
            f"{row['difference']:.1e}",
        )
        for row in rows
    ]
    headings = ("", "compile s", "run s", "masks/s", "times", "difference")
    print_table(f"Layer pruning on {device_name()}", headings, table)
    if options.out is not None:
        write_json(options.out, "compress_shapley", rows=rows, threads=options.threads, model=options.model or "random")


def _row(part: str, implementation: str, timing: Timing, masks: int, difference: float) -> dict[str, Any]:
    return {
        "part": part,
        "implementation": implementation,
        "compile": timing.compile,
        "seconds": timing.runs,
        "mean": timing.mean,
        "masks_per_second": masks / timing.mean,
        "difference": difference,
    }


def _random_llama(blocks: int, width: int) -> Model:
    config = DecoderConfig(
        vocab_size=2048,
        hidden_size=width,
        intermediate_size=3 * width,
        num_layers=blocks,
        num_heads=max(1, width // 64),
        max_position_embeddings=2048,
    )
    return Model(config=config, params=decoder.init(config, jax.random.key(0))[1], family=find_decoder_family(config))


def _torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("torch is not installed: pip install torch transformers")
    import torch

    return torch


def _torch_losses(
    model: Model, batch: compress.TokenBatch, masks: np.ndarray
) -> tuple[Callable[[], Any], Callable[[Any], np.ndarray]]:
    """The released loop on the same model through `transformers`, and how to read what it returns."""
    torch = _torch()
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("transformers is not installed: pip install transformers")
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        save(folder, dataclasses.replace(model, tokenizer=None), overwrite=True)
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    tokens = torch.tensor(np.asarray(batch.tokens), dtype=torch.int64)

    @torch.no_grad()
    def run() -> np.ndarray:
        losses = []
        for mask in masks:
            copies = {
                block: [parameter.clone() for parameter in peer.model.layers[block].parameters()]
                for block in np.flatnonzero(~mask)
            }
            for block in copies:
                for parameter in peer.model.layers[block].parameters():
                    parameter.zero_()
            losses.append(peer(tokens, labels=tokens, use_cache=False).loss.item())
            for block, kept in copies.items():
                for parameter, values in zip(peer.model.layers[block].parameters(), kept, strict=True):
                    parameter.copy_(values)
        return np.array(losses)

    return run, np.asarray


if __name__ == "__main__":
    main()
