"""The ``jaxlab`` command.

``jaxlab list`` names the methods, ``jaxlab run NAME`` shows one keeping its paper's promise. Exit status: 0 all claims
hold, 1 some claim does not, 2 bad input, 130 interrupted. Bad input is one line on stderr; ``python -X dev -m jaxlab``
shows its traceback.
"""

import contextlib
import difflib
import io
import itertools
import json
import logging
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import jaxlab

if TYPE_CHECKING:
    from jaxlab.experiments.base import Experiment

__all__ = ["main"]

Config = TypeVar("Config")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default the process's, and return its exit status."""
    verb, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a claim may hold characters that the terminal cannot show
    status = 0
    try:
        if verb in ("-h", "--help"):
            print(_usage())
        elif verb == "--version":
            print(f"jaxlab {jaxlab.__version__}")
        elif verb in _VERBS:
            status = _VERBS[verb].run(rest)
        else:
            raise ValueError(f"unknown command {verb!r}; {_nearest(verb, _VERBS)}see jaxlab --help")
        sys.stdout.flush()
    except BrokenPipeError:  # head or less has read enough; nothing is left to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        if sys.flags.dev_mode:
            raise
        print(f"jaxlab: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxlab: interrupted", file=sys.stderr)
        return 130
    return status


def _list(arguments: Sequence[str]) -> int:
    from jaxlab.experiments.registry import METHODS

    if {"-h", "--help"} & set(arguments):
        print("usage: jaxlab list [--json]")
    elif unknown := [word for word in arguments if word != "--json"]:
        raise ValueError(f"unknown option {unknown[0]!r}; jaxlab list takes --json only")
    elif arguments:
        names = ("name", "title", "arxiv", "module", "state")
        print(json.dumps([{name: getattr(method, name) for name in names} for method in METHODS], indent=2))
    else:
        width = min(shutil.get_terminal_size().columns, 120)
        for method in METHODS:
            paper = f"arXiv {method.arxiv}" if method.arxiv else "-"
            print(f"{method.name:<26}{method.state:<9}{method.module:<18}{paper}")
            print(textwrap.fill(method.title, width, initial_indent="    ", subsequent_indent="    "))
    return 0


@dataclass(frozen=True)
class _Options:
    preset: Literal["smoke", "quick", "cpu", "paper"] = "quick"
    """size of the run: quick takes a minute, cpu ten, paper wants accelerators"""
    seed: int = 0
    """seed of every random number"""
    out: Path | None = None
    """directory to write, by default runs/NAME/TIME-PRESET-seedN"""
    resume: bool = False
    """continue the run in --out, by default the newest of this preset and seed"""
    overwrite: bool = False
    """replace the run in --out"""
    json: bool = False
    """print result.json instead of the table"""


@dataclass(frozen=True)
class _Invocation(Generic[Config]):
    run: _Options
    experiment: Config


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        if not {"-h", "--help"} & set(arguments):
            raise ValueError("jaxlab run needs the name of an experiment; see jaxlab list")
        print("usage: jaxlab run NAME [options]\n\njaxlab run NAME --help shows the options, jaxlab list the names.")
        return 0

    from rich.console import Console

    from jaxlab.experiments import registry, report
    from jaxlab.experiments.directory import dumps
    from jaxlab.experiments.outcome import execute

    name, *rest = arguments
    experiment = registry.load(name)
    parsed = _parse(experiment, rest)
    if parsed is None:
        return 0
    options, config = parsed
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax tells of half-done and damaged files, and we do
    with report.Watch(Console(stderr=True)) as watch:
        outcome = execute(
            experiment,
            preset=options.preset,
            config=config,
            seed=options.seed,
            out=options.out,
            resume=options.resume,
            overwrite=options.overwrite,
            progress=watch,
        )
    if options.json:
        print(dumps(outcome.result, indent=2))
    else:
        report.show(Console(), outcome)
    if outcome.exit_status == 130:
        words = [word for word in arguments if word not in ("--resume", "--overwrite")]
        words += ["--resume"] if options.out else ["--out", str(outcome.out), "--resume"]
        print(f"jaxlab: interrupted; to continue: jaxlab run {shlex.join(words)}", file=sys.stderr)
    return outcome.exit_status


def _dynamics(arguments: Sequence[str]) -> int:
    from jaxlab.verbs.dynamics import main

    return main(arguments)


def _lm(arguments: Sequence[str]) -> int:
    from jaxlab.verbs.lm import main

    return main(arguments)


def _bid(arguments: Sequence[str]) -> int:
    from jaxlab.verbs.bid import main

    return main(arguments)


def _fairness(arguments: Sequence[str]) -> int:
    from jaxlab.verbs.fairness import main

    return main(arguments)


def _flow(arguments: Sequence[str]) -> int:
    from jaxlab.verbs.flow import main

    return main(arguments)


def _prune(arguments: Sequence[str]) -> int:
    from jaxlab.verbs.prune import main

    return main(arguments)


def _merge(arguments: Sequence[str]) -> int:
    from jaxlab.verbs.merge import main

    return main(arguments)


def _molecule(arguments: Sequence[str]) -> int:
    from jaxlab.verbs.molecule import main

    return main(arguments)


def _parse(experiment: "Experiment", arguments: Sequence[str]) -> tuple[_Options, Any] | None:
    """The options and the config, None where the help was asked for and printed."""
    import tyro

    def parse(kind: Any, **settings: Any) -> tuple[Any, list[str]]:
        # tyro explains an error in a box of several lines; its first paragraph says all.
        box = io.StringIO()
        flat = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
        try:
            with contextlib.redirect_stderr(box):
                return tyro.cli(kind, args=arguments, return_unknown_args=True, config=flat, **settings)
        except SystemExit as end:
            if not end.code:
                raise
            raise ValueError(_first_paragraph(box.getvalue())) from None

    options, _ = parse(_Options, add_help=False)
    default = experiment.presets[options.preset]
    kind: Any = _Invocation
    try:
        invocation, unknown = parse(
            kind[type(default)],
            default=_Invocation(_Options(), default),
            prog=f"jaxlab run {experiment.name}",
            description=f"{experiment.summary}\n\nDefaults are those of preset {options.preset}.",
        )
    except SystemExit:
        return None
    if unknown:
        known = [f"--{field.name.replace('_', '-')}" for part in (options, default) for field in fields(part)]
        raise ValueError(
            f"unknown option {unknown[0]!r}; {_nearest(unknown[0], known)}see jaxlab run {experiment.name} --help"
        )
    return options, invocation.experiment


def _first_paragraph(box: str) -> str:
    # The first line is the title; frame and rules are drawn with these characters, colours with escape sequences.
    lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]]
    text = itertools.dropwhile(lambda line: not line.strip("─-"), lines)
    paragraph = " ".join(itertools.takewhile(lambda line: line.strip("─-╰╯"), text))
    return re.sub(r"^Error parsing (run|experiment): ", "", paragraph)


def _nearest(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def _usage() -> str:
    verbs = "\n".join(f"  jaxlab {name:<10}{verb.help}" for name, verb in _VERBS.items())
    return f"usage: jaxlab COMMAND [options]\n\n{verbs}\n\n  jaxlab --version"


@dataclass(frozen=True)
class _Verb:
    run: Callable[[Sequence[str]], int]
    help: str


_VERBS: Mapping[str, _Verb] = {
    "list": _Verb(_list, "the nineteen methods and their state"),
    "run": _Verb(_run, "measure a paper's claims; options: jaxlab run NAME --help"),
    "bid": _Verb(_bid, "replay a log of auctions; options: jaxlab bid --help"),
    "dynamics": _Verb(_dynamics, "compare dynamical systems; options: jaxlab dynamics --help"),
    "fairness": _Verb(_fairness, "fairness of predictions; options: jaxlab fairness --help"),
    "flow": _Verb(_flow, "edit an image; options: jaxlab flow --help"),
    "lm": _Verb(_lm, "generate and measure text; options: jaxlab lm --help"),
    "merge": _Verb(_merge, "one model of several; options: jaxlab merge --help"),
    "molecule": _Verb(_molecule, "simulate a molecule; options: jaxlab molecule --help"),
    "prune": _Verb(_prune, "remove blocks of a model; options: jaxlab prune --help"),
}
