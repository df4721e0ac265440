"""``jaxlab merge --base DIR --expert DIR --expert DIR --method ties --out DIR``: one model of several experts.

Models are Hugging Face folders, or names on the hub; an expert may be a folder of LoRA adapters. DIR becomes a folder
that ``transformers`` loads, with ``merge.json`` (what was merged, with which coefficients, and how far every expert had
moved from the base) and ``merge.png`` beside the weights. Tensors are streamed: models may be larger than memory.
``jaxlab merge config.yml --out DIR`` takes a configuration file of mergekit instead (needs pyyaml).

``--method expert-merging``, ``expert-merging++`` and ``adamerging`` learn a coefficient for every tensor and expert on
the texts of ``--calibration`` (`jaxlab.verbs.learned_merge`); ``coefficients.png`` shows them.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxlab.editing import merging
from jaxlab.editing.merging import DEFAULT_EXCLUDE, METHODS, Base, Expert, MergeMethod, TensorSummary
from jaxlab.verbs.learned_merge import LEARNED, learn

__all__ = ["Plan", "main"]

_DTYPES = ("float32", "bfloat16", "float16")
_FAR = 0.1  # of what is merged, that may be left out of it silently
_OPTIONS = (
    "scale",
    "weights",
    "density",
    "drop",
    "rescale",
    "normalize",
    "scope",
    "election",
    "learning_rate",
    "steps",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to merge, and how.

    Attributes:
      base: opened.
      experts: opened.
      methods: of each tensor that is merged.
      settings: for the report.
      dtype: of the result; None is the base's.
    """

    base: Base
    experts: Sequence[Expert]
    methods: Mapping[str, MergeMethod]
    settings: Mapping[str, Any]
    dtype: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Parse the words after ``jaxlab merge``, merge, and write the folder.

    Raises:
      ValueError: bad input, one line.
    """
    try:
        options = _parser().parse_args(arguments or ["--help"])
    except SystemExit:  # the help was printed
        return 0
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed must be between 0 and {2**32 - 1}, got {options.seed}")
    if not 0 < options.shard_size < math.inf:
        raise ValueError(f"--shard-size must be above 0 GB and finite, got {options.shard_size}")
    if any(folder.exists() and not folder.is_dir() for folder in (options.out, *options.out.parents)):
        raise ValueError(f"--out {options.out}: a file is in the way of that folder")
    if options.out.is_dir() and any(options.out.iterdir()) and not options.overwrite:
        raise ValueError(f"--out {options.out} is not empty; --overwrite replaces the model in it")
    try:
        plan = _from_file(options) if options.config else _from_words(options)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}; pip install pyyaml reads configuration files of mergekit") from error
    notes = merging.check_experts(plan.base, plan.experts, plan.methods)
    draws = any(method.needs_key for method in plan.methods.values())
    with _bar() as progress:
        summary = merging.merge_checkpoints(
            plan.base,
            plan.experts,
            options.out,
            plan.methods,
            dtype=options.dtype or plan.dtype,
            key=jax.random.key(options.seed) if draws else None,
            max_shard_size=int(options.shard_size * 1e9),
            overwrite=options.overwrite,
            progress=progress,
        )
    report = _report(plan, summary, notes, seed=options.seed if draws else None)
    (options.out / "merge.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    _plot(options.out / "merge.png", summary, [expert.name for expert in plan.experts])
    if "coefficients" in plan.settings:
        _plot_coefficients(options.out / "coefficients.png", summary, [expert.name for expert in plan.experts])
    _print(report, options.out)
    return 0


def _from_words(options: argparse.Namespace) -> Plan:
    """The plan that the options describe: one method for all tensors."""
    for name in ("base", "expert", "method"):
        if not getattr(options, name):
            raise ValueError(f"--{name} is needed (or a configuration file of mergekit); see jaxlab merge --help")
    chosen = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    if options.method in LEARNED:
        return _learned(options, chosen)
    if options.calibration:
        raise ValueError(f"--calibration is for {', '.join(LEARNED)}; {options.method} looks at no text")
    method = merging.make_method(options.method, **chosen)
    if method.needs_calibration:
        raise ValueError(f"--method {options.method} needs inputs of every layer; it is for models in memory only")
    for name in ("weights", "density", "drop"):
        given = chosen.get(name)
        if isinstance(given, tuple) and len(given) != len(options.expert):
            raise ValueError(f"--{name} must be one number or {len(options.expert)}, one an expert; got {len(given)}")
    base = merging.open_base(options.base, download=options.download)
    experts = [merging.open_expert(expert, base, download=options.download) for expert in options.expert]
    exclude = () if options.everything else options.exclude or DEFAULT_EXCLUDE
    names = merging.merged_names(base, include=options.include, exclude=exclude)
    settings = {"method": options.method, "options": _settings_of(method), "exclude": list(exclude)}
    return Plan(base, experts, dict.fromkeys(names, method), settings)


def _learned(options: argparse.Namespace, chosen: Mapping[str, Any]) -> Plan:
    if not options.calibration:
        raise ValueError(f"--method {options.method} learns from texts: --calibration is needed")
    if unknown := [name for name in chosen if name != "steps"]:
        raise ValueError(f"{options.method} has no option --{unknown[0].replace('_', '-')}")
    base = merging.open_base(options.base, download=options.download)
    experts = [merging.open_expert(expert, base, download=options.download) for expert in options.expert]
    exclude = () if options.everything else options.exclude or DEFAULT_EXCLUDE
    names = merging.merged_names(base, include=options.include, exclude=exclude)
    learned = {name: getattr(options, name) for name in ("length", "anchor", "gamma", "budget")}
    given = {name: value for name, value in learned.items() if value is not None}
    methods, settings = learn(options.method, base, experts, names, options.calibration, **given, **chosen)
    return Plan(base, experts, methods, settings | {"exclude": list(exclude)})


def _from_file(options: argparse.Namespace) -> Plan:
    others = ("base", "expert", "method", "calibration", "include", "exclude", "everything", *_OPTIONS)
    if clash := [name for name in others if getattr(options, name) is not None]:
        raise ValueError(f"--{clash[0].replace('_', '-')} and a configuration file exclude each other")
    config = merging.read_mergekit(options.config)
    base = merging.open_base(config.base, download=options.download)
    experts = [merging.open_expert(expert, base, download=options.download) for expert in config.experts]
    names = merging.merged_names(base, exclude=())
    return Plan(
        base,
        experts,
        config.methods(names),
        {"method": config.method, "configuration": str(options.config)},
        config.dtype,
    )


def _settings_of(method: MergeMethod) -> dict[str, Any]:
    found = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    return {
        name: {"method": type(value).__name__, **_settings_of(value)} if isinstance(value, MergeMethod) else value
        for name, value in found.items()
    }


def _report(
    plan: Plan, summary: Mapping[str, TensorSummary], notes: Sequence[str], *, seed: int | None
) -> dict[str, Any]:
    inside, outside = (
        [
            math.sqrt(sum((of.vectors[k] or 0.0) ** 2 for of in summary.values() if of.merged == merged))
            for k in range(len(plan.experts))
        ]
        for merged in (True, False)
    )
    warnings = list(notes)
    experts = []
    for expert, within, without in zip(plan.experts, inside, outside, strict=True):
        ratio = without / within if within else None
        experts.append(
            {"model": expert.name, "norm": within, "norm_not_merged": without, "not_merged_to_merged": ratio}
        )
        if within == 0:
            warnings.append(f"expert {expert.name} is the base in everything that is merged")
        elif ratio is not None and ratio > _FAR:
            warnings.append(
                f"expert {expert.name} moved {100 * ratio:.0f} % as far in what is not merged (embeddings, norms, ...) "
                "as in what is: that part of its skill is lost"
            )
    tensors: dict[str, Any] = {}
    for name, of in summary.items():
        if of.merged:
            tensors[name] = {"coefficients": list(of.coefficients), "norm": of.base, "change": of.change}
            tensors[name]["norms"] = list(of.vectors)
            if of.thresholds:  # infinite where nothing is kept, which JSON does not have
                tensors[name]["thresholds"] = [value if math.isfinite(value) else None for value in of.thresholds]
    return {
        "base": str(plan.base.folder),
        **plan.settings,
        "seed": seed,
        "experts": experts,
        "warnings": warnings,
        "merged": tensors,
        "kept": [name for name, of in summary.items() if not of.merged],
    }


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes that are read, on a terminal; gives the function that moves it."""
    console = Console(stderr=True)
    columns = (TextColumn("merging"), BarColumn(), TextColumn("{task.fields[size]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("merging", size="")
        yield lambda done, total: bar.update(
            task, completed=done, total=total, size=f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
        )


def _plot(path: Path, summary: Mapping[str, TensorSummary], experts: Sequence[str]) -> None:
    """How far each expert is from the base, ‖τ‖ / ‖θ₀‖, by kind of tensor and block; and what was made of it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows: dict[str, int] = {}
    cells: dict[tuple[str, int], TensorSummary] = {}
    for name, of in summary.items():
        if of.merged and of.base:
            parts = name.split(".")
            number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
            kind = ".".join(parts if number is None else parts[number + 1 :]).removesuffix(".weight")
            rows.setdefault(kind, len(rows))
            cells[kind, -1 if number is None else int(parts[number])] = of
    blocks = sorted({block for _, block in cells})
    values = np.full((len(experts) + 1, max(len(rows), 1), max(len(blocks), 1)), np.nan)
    for (kind, block), of in cells.items():
        norms = [*(np.nan if norm is None else norm for norm in of.vectors), of.change]
        values[:, rows[kind], blocks.index(block)] = np.array(norms) / (of.base or np.nan)
    titles = [*(re.sub(r".*/", "", name.rstrip("/")) or name for name in experts), "merged"]
    columns = min(math.ceil(math.sqrt(len(titles))), 4)
    lines = -(-len(titles) // columns)
    width, height = 1.5 + max(0.12 * len(blocks), 2.2), 0.9 + max(0.2 * len(rows), 1.0)
    figure = Figure(figsize=(min(columns * width + 2, 24), min(lines * height + 0.4, 40)), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True)
    limit = np.nanmax(values, initial=0.0)
    for axis, title, picture in zip(axes.flat, titles, values, strict=False):
        image = axis.imshow(picture, aspect="auto", vmin=0, vmax=limit or 1, interpolation="nearest")
        axis.set_title(title, fontsize=10, parse_math=False)
        axis.set_yticks(range(len(rows)), list(rows), fontsize=7, parse_math=False)
        ticks = range(0, len(blocks), max(1, len(blocks) // 8))
        axis.set_xticks(ticks, ["-" if blocks[i] < 0 else str(blocks[i]) for i in ticks], fontsize=7)
        axis.set_xlabel("block", fontsize=9)
    for axis in axes.flat[len(titles) :]:
        axis.set_visible(False)
    figure.colorbar(image, ax=axes, label="norm of the change / norm of the base", shrink=0.9)
    FigureCanvasAgg(figure).print_figure(path, dpi=150)


def _plot_coefficients(path: Path, summary: Mapping[str, TensorSummary], experts: Sequence[str]) -> None:
    """Coefficients of the tensors, means over their pieces, tensor by expert."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name, of in summary.items() if of.merged]
    table = np.array([summary[name].coefficients for name in names])
    figure = Figure(figsize=(4 + len(experts), min(1.5 + 0.16 * len(names), 40)), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(table, aspect="auto", interpolation="nearest")
    axis.set_xticks(range(len(experts)), [re.sub(r".*/", "", name.rstrip("/")) or name for name in experts])
    axis.set_yticks(range(len(names)), names, fontsize=5, parse_math=False)
    figure.colorbar(image, ax=axis, label="coefficient")
    FigureCanvasAgg(figure).print_figure(path, dpi=150)


def _print(report: Mapping[str, Any], out: Path) -> None:
    console = Console(width=min(Console().width, 80), highlight=False, markup=False)
    console.print(
        f"merged {len(report['merged'])} tensors by {report['method']}, kept {len(report['kept'])} of the base"
    )
    total = math.sqrt(sum(of["norm"] ** 2 for of in report["merged"].values()))
    moved = math.sqrt(sum(of["change"] ** 2 for of in report["merged"].values()))
    for name, norm in (*((expert["model"], expert["norm"]) for expert in report["experts"]), ("merged", moved)):
        # Of a base that is zero nothing is a share.
        far = f"{100 * norm / total:.3g} % of the base's norm" if total else f"by a norm of {norm:.3g}"
        console.print(f"{name}: moved {far}")
    for warning in report["warnings"]:
        console.print(f"warning: {warning}")
    learned = ("coefficients.png",) if "coefficients" in report else ()
    for name in ("config.json", "merge.json", "merge.png", *learned):
        console.print(str(out / name), soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; see jaxlab merge --help")

    def numbers(words: str) -> Any:
        values = tuple(float(word) for word in words.split(","))
        return values[0] if len(values) == 1 else values

    def pattern(words: str) -> str:
        try:
            re.compile(words)
        except re.error as error:
            raise argparse.ArgumentTypeError(f"{words!r} is no regular expression: {error}") from error
        return words

    parser = Parser(prog="jaxlab merge", description="Merge models that were trained from one base.")
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.yml", help="a configuration file of mergekit")
    model = "Hugging Face folder or OWNER/NAME on the hub"
    parser.add_argument("--base", metavar="MODEL", help=f"what the experts were trained from: a {model}")
    parser.add_argument("--expert", metavar="MODEL", action="append", help="one, or a folder of LoRA adapters; repeat")
    methods = [name.replace("_", "-") for name in METHODS if not getattr(METHODS[name], "needs_calibration", False)]
    parser.add_argument("--method", metavar="NAME", help=", ".join([*methods, *LEARNED]))
    parser.add_argument(
        "--calibration",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="JSON lines of texts to learn from, one file an expert",
    )
    parser.add_argument("--length", type=int, help="of these texts, most tokens (default 256)")
    parser.add_argument("--anchor", type=float, help="coefficient to start from (default 0.3)")
    parser.add_argument("--gamma", type=float, help="how strongly coefficients are held there (default 0.8)")
    parser.add_argument("--budget", type=float, help="expert-merging++: pieces of a tensor (default 1.2)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--scale", type=float, metavar="λ", help="of what is added to the base (default: the method's)")
    parser.add_argument("--weights", type=numbers, metavar="1,0.5", help="of the experts: one number, or one each")
    parser.add_argument("--density", type=numbers, help="ties: part of each task vector that is kept (default 0.2)")
    parser.add_argument("--drop", type=numbers, help="dare: probability that a number is dropped (default 0.2)")
    parser.add_argument("--rescale", choices=("probability", "l1", "none"), help="dare: of what is kept")
    parser.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, default=None, help="divide by the weights that count"
    )
    parser.add_argument("--scope", choices=("global", "tensor"), help="ties: what is trimmed together")
    parser.add_argument("--election", choices=("release", "mergekit"), help="ties: the sign where a sum is zero")
    parser.add_argument("--learning-rate", type=float, help="wudi: of Adam (default 1e-5, low rank 1e-6)")
    parser.add_argument("--steps", type=int, help="of Adam (default: wudi 300, learned coefficients 60)")
    parser.add_argument(
        "--include", nargs="+", type=pattern, metavar="PATTERN", help="merge only tensors with one in their name"
    )
    kept = ", ".join(DEFAULT_EXCLUDE)
    left_out = parser.add_mutually_exclusive_group()
    left_out.add_argument(
        "--exclude", nargs="+", type=pattern, metavar="PATTERN", help=f"keep the base's (default: {kept})"
    )
    left_out.add_argument("--everything", action="store_true", default=None, help="exclude nothing")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the result (default: the base's)")
    parser.add_argument("--shard-size", type=float, default=5.0, metavar="GB", help="most of a file (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default 0)")
    parser.add_argument("--download", action="store_true", help="fetch models of the hub that are not here")
    parser.add_argument("--overwrite", action="store_true", help="replace a model in --out")
    return parser
