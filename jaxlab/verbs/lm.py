"""``jaxlab lm``: text from a language model, and how well it predicts a text.

``jaxlab lm generate MODEL --prompt TEXT`` prints the continuation as it comes, ``jaxlab lm perplexity MODEL FILE`` the
perplexity of a text. MODEL is what `jaxlab.nn.checkpoints.load` takes. Text and numbers go to stdout, notes to stderr.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxlab.data import load_text
from jaxlab.nn import DecoderConfig, generate_stream, unstack_layers
from jaxlab.nn.checkpoints import BUILT_IN, Model, load
from jaxlab.nn.evaluation import needs_padding_mask, perplexity
from jaxlab.nn.tokenizer import Tokenizer

__all__ = ["main"]

_MAX_NEW = 128


def main(arguments: Sequence[str]) -> int:
    """Parse the words after ``jaxlab lm`` and run one of its verbs.

    Raises:
      ValueError: bad input, one line.
    """
    parser = _parser()
    try:
        options = parser.parse_args(arguments or ["--help"])
    except SystemExit:  # the help was printed
        return 0
    try:
        options.run(options)
    except ModuleNotFoundError as error:  # a package of the extra; the message says which
        raise ValueError(str(error)) from error
    return 0


def _generate(options: argparse.Namespace) -> None:
    if options.system is not None and not options.chat:
        raise ValueError("--system needs --chat")
    # The end of the last line is the shell's, as in $(...), and no part of what is to be continued.
    text = sys.stdin.read().rstrip("\r\n") if options.prompt == "-" else options.prompt
    if not -(2**63) <= options.seed < 2**63:
        raise ValueError(f"--seed must fit into 64 bits, got {options.seed}")
    if options.max_new is not None and options.max_new < 1:
        raise ValueError(f"--max-new must be at least 1, got {options.max_new}")
    model, tokenizer = _load(options)
    if options.chat:
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        messages = [*system, {"role": "user", "content": text}]
        prompt = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True), special=False)
    else:
        prompt = tokenizer.encode(text)
    if not prompt:
        raise ValueError("the prompt is empty; give --prompt at least one character")
    config, params, stop = model.config, model.params, model.stop_ids
    room = _MAX_NEW if config.context_length is None else config.context_length - len(prompt)
    least = 1 if options.max_new is None else options.max_new
    if config.context_length is not None and least > room:
        raise ValueError(
            f"the prompt has {len(prompt)} of the {config.context_length} tokens that the model was made for, which "
            f"leaves room for --max-new {max(room, 0)}, got {least}"
        )
    if jax.default_backend() == "cpu":
        params = unstack_layers(params)
    del model  # and with it the stacked parameters
    began = time.perf_counter()
    chunks = generate_stream(
        config,
        params,
        np.asarray([prompt], np.int32),
        key=jax.random.key(options.seed),
        max_new_tokens=min(_MAX_NEW, room) if options.max_new is None else options.max_new,
        chunk=4,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        stop_tokens=stop,
    )
    clock: list[tuple[float, int]] = []

    def tokens() -> Iterator[int]:
        for chunk in chunks:
            new = [int(token) for token in chunk[0] if token >= 0]
            clock.append((time.perf_counter() - began, len(new)))
            yield from (token for token in new if token not in stop)

    for piece in tokenizer.stream(tokens(), before=() if options.chat else prompt):
        print(piece, end="", flush=True)
    print(flush=True)
    print(_speed(len(prompt), clock), file=sys.stderr)


def _speed(prompt: int, clock: Sequence[tuple[float, int]]) -> str:
    """What was done and how fast: the first chunk compiles and reads the prompt, the second compiles the loop."""
    seconds, total = clock[-1][0], sum(number for _, number in clock)
    said = f"{prompt} tokens read, {total} written in {seconds:.1f} s"
    if len(clock) < 3 or not (steady := sum(number for _, number in clock[2:])):
        return said
    return f"{said}; {steady / (seconds - clock[1][0]):.1f} tokens/s once compiled (after {clock[1][0]:.1f} s)"


def _perplexity(options: argparse.Namespace) -> None:
    if options.tokens is not None and options.tokens < 2:
        raise ValueError(f"--tokens must be at least 2, got {options.tokens}")
    text = load_text(options.file)
    model, tokenizer = _load(options)
    tokens = tokenizer.encode(text)[: options.tokens]
    longest = model.config.context_length
    window = min(1024, longest or 1024) if options.window is None else options.window
    if longest is not None and window > longest:
        raise ValueError(f"--window must be at most the model's context of {longest} tokens, got {window}")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("windows")
        result = perplexity(
            model.apply_fn,
            model.params,
            tokens,
            window=window,
            stride=options.stride,
            batch_size=options.batch_size,
            mask_padding=needs_padding_mask(model.config),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    found: dict[str, Any] = result._asdict()
    if result.tokens == len(tokens) - 1:  # otherwise these are not the bytes of what was counted
        size = len(tokenizer.decode(tokens[1:], special=True).encode())
        found["bits_per_byte"] = result.nats / math.log(2) / max(1, size)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name.replace('_', ' '):<16}{value:.4f}" if isinstance(value, float) else f"{name:<16}{value}")


def _load(options: argparse.Namespace) -> tuple[Model, Tokenizer]:
    model = load(options.model, dtype=options.dtype, download=options.download)
    if not isinstance(model.config, DecoderConfig):
        raise ValueError(f"{options.model} is no language model but a {model.family.model_type}")
    if model.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer that can be read (tokenizer.json)")
    return model, model.tokenizer


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; see {self.prog} --help")

    models = f"a folder, a .gguf file, OWNER/NAME on the Hugging Face hub, or {', '.join(BUILT_IN)}"
    parser = Parser(prog="jaxlab lm", description="Language models.")
    verbs = parser.add_subparsers(required=True, metavar="generate|perplexity", parser_class=Parser)

    generate = verbs.add_parser("generate", help="continue a prompt", description="Continue a prompt.")
    generate.set_defaults(run=_generate)
    generate.add_argument("model", metavar="MODEL", help=models)
    generate.add_argument("--prompt", required=True, help="text to continue, - for standard input")
    generate.add_argument("--max-new", type=int, help=f"most tokens to add (default {_MAX_NEW}, or what fits)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default 0)")
    generate.add_argument("--top-k", type=int, help="draw among so many likeliest tokens")
    generate.add_argument("--top-p", type=float, help="draw among the likeliest tokens of this probability")
    generate.add_argument("--min-p", type=float, help="draw among tokens this share as likely as the likeliest")
    generate.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")
    generate.add_argument("--chat", action="store_true", help="put the prompt to the model as a user's message")
    generate.add_argument("--system", help="message of the system, with --chat")

    measure = verbs.add_parser(
        "perplexity", help="how well a text is predicted", description="Perplexity of a text in overlapping windows."
    )
    measure.set_defaults(run=_perplexity)
    measure.add_argument("model", metavar="MODEL", help=models)
    measure.add_argument("file", metavar="FILE", help="a text file, or a corpus by name such as python-topics")
    measure.add_argument("--window", type=int, help="tokens read at a time (default 1024, or the model's context)")
    measure.add_argument("--stride", type=int, help="tokens from window to window (default half a window)")
    measure.add_argument("--batch-size", type=int, default=1, help="windows at a time (default 1)")
    measure.add_argument("--tokens", type=int, help="measure the first so many tokens only")
    measure.add_argument("--json", action="store_true", help="print JSON")
    for verb in (generate, measure):
        verb.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the checkpoint's")
        verb.add_argument("--download", action="store_true", help="fetch a model of the hub that is not here")
    return parser
