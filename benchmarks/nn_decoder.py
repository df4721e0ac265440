"""Prefill and decode speed of SmolLM2-135M: jaxlab's `generate` against `transformers` with the same weights.

    python benchmarks/nn_decoder.py [--model NAME] [--batches 1 8] [--prompt 128] [--new 64] [--dtype float32]
        [--attention xla] [--threads 2] [--repeats 5] [--out FILE]

Both sides read the same prompts and continue them greedily, on a GPU where torch and jax see one. Prefill is one call
that gives a single new token; decode is what a call with ``--new`` tokens takes longer, over the tokens after the
first. The two sides take turns and the best of the repeats counts, since other work on the machine only ever slows a
call down. Compile time is apart. Without ``--model`` (``smollm2-135m-instruct`` is built in) the weights are random, in
the sizes of SmolLM2-135M: speed does not depend on their values. The same work is done: most greedy tokens agree, or
the script stops with an error; all of them need not, since rounding decides between two tokens that are as likely.
``--threads`` is for torch; restrict the process (``taskset -c 0,1``) to do so for both. On a GPU: ``--dtype bfloat16
--attention cudnn``.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch_decoder
from harness import device_name, print_table, write_json

from jaxlab.nn import DecoderConfig, decoder, generate, unstack_layers

# Share of greedy tokens that must agree: one that rounding decided otherwise changes all that follow it.
SAME_TOKENS = 0.5

SMOLLM2_135M = DecoderConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    rope_theta=100_000.0,
    norm_eps=1e-5,
    tie_embeddings=True,
    max_position_embeddings=8192,
)


def random_params(config: DecoderConfig, seed: int) -> dict:
    """Matrices of N(0, 1 / columns), norms of ones: logits of order one."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.ndim < 2 or leaf.shape == (config.num_layers, config.hidden_size):
            return jnp.ones(leaf.shape)
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32) / np.sqrt(np.float32(leaf.shape[-1])))

    return jax.tree.map(draw, jax.eval_shape(lambda: decoder.init(config, jax.random.key(0))[1]))


def checkpoint(params: dict) -> dict[str, np.ndarray]:
    """Parameters by their names in a checkpoint."""
    weights = {}
    for path, leaf in jax.tree.leaves_with_path(unstack_layers(params)):
        weights[jax.tree_util.keystr(path, simple=True, separator=".")] = np.asarray(leaf, np.float32)
    return weights


def take_turns(works: dict[str, Callable[[], np.ndarray]], repeats: int) -> dict[str, tuple[float, list[float]]]:
    """Seconds of the first call and of ``repeats`` warm ones of each, all firsts before, then one by one in turn."""

    def seconds(work: Callable[[], np.ndarray]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(work())
        return time.perf_counter() - start

    first = {name: seconds(work) for name, work in works.items()}
    warm = [{name: seconds(work) for name, work in works.items()} for _ in range(repeats)]
    return {name: (first[name], [turn[name] for turn in warm]) for name in works}


def check_same_work(ours: np.ndarray, expected: np.ndarray) -> float:
    """The share of tokens that agree; stops the script if they are too few."""
    agreement = float(np.mean(ours == expected))
    if agreement < SAME_TOKENS:
        raise SystemExit(f"only {agreement:.0%} of the tokens of jaxlab and transformers agree")
    return agreement


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Llama-like checkpoint that jaxlab.nn.checkpoints can load")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--attention", choices=["xla", "cudnn"], default="xla")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    for name in ("prompt", "threads", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if min(options.batches) < 1:
        parser.error(f"--batches must be at least 1, got {min(options.batches)}")
    if options.new < 2:
        parser.error(f"--new must be at least 2, for the first token is part of the prefill; got {options.new}")

    if options.model:
        from jaxlab.nn import checkpoints

        loaded = checkpoints.load(options.model)
        config, params = loaded.config, loaded.params
    else:
        config, params = SMOLLM2_135M, random_params(SMOLLM2_135M, options.seed)
    peer = torch_decoder.llama(config, checkpoint(params), dtype=options.dtype, threads=options.threads)
    config = dataclasses.replace(
        config, dtype=options.dtype, param_dtype=options.dtype, attention_implementation=options.attention
    )
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, options.dtype), params)
    if jax.default_backend() == "cpu":
        params = unstack_layers(params)

    table, rows = [], []
    for batch in options.batches:
        prompts = np.random.default_rng(options.seed).integers(0, config.vocab_size, (batch, options.prompt))

        def ours(new: int, prompts: np.ndarray = prompts) -> Callable[[], jax.Array]:
            return lambda: generate(config, params, prompts, key=jax.random.key(0), max_new_tokens=new).tokens

        timings = take_turns(
            {
                "prefill transformers": torch_decoder.prefill(peer, prompts),
                "prefill jaxlab": ours(1),
                "all transformers": torch_decoder.generate(peer, prompts, options.new),
                "all jaxlab": ours(options.new),
            },
            options.repeats,
        )
        expected = torch_decoder.generate(peer, prompts, options.new)()
        agreement = check_same_work(np.asarray(ours(options.new)()), expected)
        for name in ("transformers", "jaxlab"):
            prefill, whole = (min(timings[f"{part} {name}"][1]) for part in ("prefill", "all"))
            row = {
                "implementation": name,
                "batch": batch,
                "prefill_tokens_per_second": batch * options.prompt / prefill,
                "decode_tokens_per_second": batch * (options.new - 1) / (whole - prefill),
                "first_call_seconds": timings[f"all {name}"][0],
                "prefill_seconds": timings[f"prefill {name}"][1],
                "all_seconds": timings[f"all {name}"][1],
                "same_tokens": agreement,
            }
            rows.append(row)
            speeds = (f"{row[f'{part}_tokens_per_second']:.1f}" for part in ("prefill", "decode"))
            table.append((name, str(batch), *speeds, f"{row['first_call_seconds']:.1f}"))

    print_table(
        f"{options.prompt} + {options.new} tokens, {options.dtype}, on {device_name()}",
        ("", "sequences", "prefill tokens/s", "decode tokens/s", "first call s"),
        table,
    )
    for peer_row, our_row in zip(rows[::2], rows[1::2], strict=True):
        prefill, decode = (
            our_row[f"{part}_tokens_per_second"] / peer_row[f"{part}_tokens_per_second"]
            for part in ("prefill", "decode")
        )
        print(
            f"batch {our_row['batch']}: prefill {prefill:.2f}, decode {decode:.2f} times as fast; "
            f"{our_row['same_tokens']:.0%} of tokens the same"
        )
    if options.out:
        facts = {name: getattr(options, name) for name in ("prompt", "new", "dtype", "attention", "threads")}
        write_json(options.out, "nn_decoder", rows=rows, model=options.model or "random weights", **facts)


if __name__ == "__main__":
    main()
