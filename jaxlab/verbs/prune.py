"""``jaxlab prune MODEL --remove N --text FILE --out DIR``: a language model without its N least useful blocks.

MODEL is what `jaxlab.nn.checkpoints.load` takes; DIR becomes a Hugging Face folder that ``transformers`` loads, with
``contributions.json`` and ``pruning.png`` beside the weights. The game is that of arXiv 2602.07804, and by default both
surrogates rank and search, and the best of their sets by true evaluation is taken; ``--method`` has the paper's ranking
alone and all baselines. Evaluations are stored in DIR as they come, so that a killed run continues.
"""

import argparse
import dataclasses
import json
import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxlab import compress
from jaxlab.compress import EvaluationCache, StackUtility, TokenBatch, baselines
from jaxlab.compress.estimation import Estimate
from jaxlab.compress.recovery import recover
from jaxlab.data import load_text
from jaxlab.nn import DecoderConfig
from jaxlab.nn.checkpoints import BUILT_IN, Model, load, save

__all__ = ["METHODS", "Choice", "choose", "main"]

METHODS = (
    "game",
    "mlp",
    "pairwise",
    "shapley",
    "sleb",
    "leave-one-out",
    "block-influence",
    "angular",
    "taylor",
    "magnitude",
    "random",
    "deepest",
)
_GAME = ("game", "mlp", "pairwise")
_STORED = "masks-*.values"
_VERIFIED = 8  # sets of each surrogate that are evaluated truly
_Z = 1.96  # of a 95 % interval
_BATCH = 16  # masks between two writes to the disk


@dataclasses.dataclass
class Choice:
    """Which blocks to remove, and why.

    Attributes:
      removed: the blocks, the most dispensable first.
      scores: value of each block, larger is more valuable; None for methods that have no scores.
      error: standard error of each score, or None.
      estimates: surrogates by name.
    """

    removed: np.ndarray
    scores: np.ndarray | None = None
    error: np.ndarray | None = None
    estimates: dict[str, Estimate] = dataclasses.field(default_factory=dict)


def main(arguments: Sequence[str]) -> int:
    """Parse the words after ``jaxlab prune``, prune, and write the folder.

    Raises:
      ValueError: bad input, one line.
    """
    try:
        options = _parser().parse_args(arguments or ["--help"])
    except SystemExit:  # the help was printed
        return 0
    try:
        return _prune(options)
    except ModuleNotFoundError as error:  # a package of the extra; the message says which
        raise ValueError(str(error)) from error


def choose(
    method: str,
    stack: compress.ResidualStack,
    params: Any,
    batch: TokenBatch,
    utility: Callable[[Any], Any],
    *,
    num_players: int,
    remove: int,
    budget: int,
    protect: Sequence[int] = (),
    seed: int = 0,
) -> Choice:
    """Choose the blocks to remove by one of `METHODS`.

    Args:
      method: how.
      stack: the network.
      params: its parameters.
      batch: calibration text.
      utility: the game, such as `jaxlab.compress.evaluate_masks` on a stored one.
      num_players: its number of blocks.
      remove: how many go.
      budget: evaluations of masks for the methods that draw them.
      protect: blocks that stay.
      seed: of all draws.
    """
    if remove == 0:
        return Choice(np.zeros(0, int))
    key = jax.random.key(seed)
    rank = lambda scores, protect=protect: compress.rank(scores, remove, protect=protect)  # noqa: E731
    if method in _GAME:
        return _play(method, key, utility, num_players=num_players, remove=remove, budget=budget, protect=protect)
    if method == "shapley":
        found = compress.permutation_shapley(key, utility, num_players, budget=budget)
        return Choice(rank(found.mean), np.asarray(found.mean), np.asarray(found.stderr))
    if method == "sleb":
        return Choice(baselines.sleb(utility, num_players, remove, protect=protect).order)
    if method == "random":
        return Choice(baselines.random_blocks(key, num_players, remove, protect=protect))
    if method == "deepest":
        return Choice(baselines.deepest_blocks(num_players, remove, protect=protect))
    if method == "angular":
        states = compress.hidden_states(stack, params, batch)
        return Choice(baselines.angular_blocks(states, remove, protect=protect))
    if method == "leave-one-out":
        scores = baselines.leave_one_out(utility, num_players)
    elif method == "block-influence":
        scores = np.asarray(baselines.block_influence(compress.hidden_states(stack, params, batch)))
    elif method == "magnitude":
        scores = np.asarray(baselines.magnitude(stack, params))
    else:
        scores = np.asarray(baselines.taylor(stack, params, batch))
        protect = sorted({*protect, *baselines.taylor_protected(num_players)})
    return Choice(rank(scores, protect), scores)


def _play(
    method: str,
    key: jax.Array,
    utility: Callable[[Any], Any],
    *,
    num_players: int,
    remove: int,
    budget: int,
    protect: Sequence[int],
) -> Choice:
    ends = np.concatenate([~np.eye(num_players, dtype=bool), np.ones((1, num_players), bool)])
    alone = np.asarray(utility(ends))[:num_players]
    # Blocks that cost much alone stay, as far as there are others to remove; so do those that the user protects.
    others = [block for block in compress.costly_blocks(alone) if block not in protect]
    room = num_players - remove - len(protect)
    others = sorted(others, key=lambda block: alone[block])[: max(room - 1, 0)]
    protect = sorted({*protect, *others})
    # The sizes on the way to the one that is deployed; one more where that alone would be a single stratum.
    deepest = min(max(remove, 2), num_players - len(protect), num_players - 1)
    strata = compress.strata_deploy(num_players, max(deepest, 1))
    key_masks, key_fit = jax.random.split(key)
    total = max(budget, len(strata))
    drawn = compress.stratified_masks(key_masks, num_players, strata, total, dedupe=True, protect=protect)
    # The whole model and each block alone teach the surrogate what matters most.
    masks = np.unique(np.concatenate([np.asarray(drawn), ends]), axis=0)
    scores = np.asarray(utility(masks))
    kinds = compress.estimation.SURROGATES if method == "game" else (method,)
    estimates = {
        kind: compress.estimate_contributions(key_fit, masks, scores, strata, kind=kind, protect=protect)
        for kind in kinds
    }
    ranked = {
        kind: compress.rank(found.contribution.mean, remove, protect=protect) for kind, found in estimates.items()
    }
    if method == "game":
        sets = [compress.without(num_players, removed)[None] for removed in ranked.values()]
        for kind, found in estimates.items():
            candidates = compress.search(
                found.fit.apply, found.fit.params, num_players, remove, start=ranked[kind], protect=protect
            )
            sets.append(candidates.masks[:_VERIFIED])
        best = compress.verify(utility, np.concatenate(sets)).mask
        # The scores that are shown are those of the surrogate that predicts unseen masks better.
        shown = max(estimates, key=lambda kind: np.nan_to_num(estimates[kind].fit.quality.spearman, nan=-1.0))
        out = np.flatnonzero(~best)
        removed = out[np.argsort(np.asarray(estimates[shown].contribution.mean)[out])]
    else:
        shown, removed = method, ranked[method]
    found = estimates[shown]
    error = np.hypot(np.asarray(found.contribution.stderr), np.nan_to_num(np.asarray(found.fit_error)))
    return Choice(removed, np.asarray(found.contribution.mean), error, estimates)


def _prune(options: argparse.Namespace) -> int:
    _check(options)
    text, recovery = load_text(options.text), None if options.recover is None else load_text(options.recover)
    model = load(options.model, dtype=options.dtype, download=options.download)
    config = model.config
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"{options.model} is no language model but a {model.family.model_type}")
    if model.tokenizer is None:
        raise ValueError(f"{options.model} has no tokenizer that can be read (tokenizer.json)")
    if config.context_length is not None and options.window > config.context_length:
        raise ValueError(
            f"--window must be at most the model's context of {config.context_length} tokens, got {options.window}"
        )
    depth = config.num_layers
    own = baselines.taylor_protected(depth) if options.method == "taylor" and options.remove else ()
    compress.check_removal(depth, options.remove, sorted({*options.protect, *own}))
    calibration, test = _split(model.tokenizer.encode(text), options)
    # Before anything is evaluated, so that a text that is too short is told at once.
    lesson = None if recovery is None else compress.token_batch(model.tokenizer.encode(recovery), window=options.window)
    stack = compress.decoder_stack(config)
    game = compress.make_utility(stack, model.params, calibration)
    options.out.mkdir(parents=True, exist_ok=True)
    mark = game.fingerprint()
    cache = EvaluationCache(options.out / _STORED.replace("*", mark[:12]), num_players=depth, fingerprint=mark)
    before = len(cache)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", compress.UnreliableWarning)
        chosen = choose(
            options.method,
            stack,
            model.params,
            calibration,
            _stored(game, cache),
            num_players=depth,
            remove=options.remove,
            budget=options.budget or 10 * depth,
            protect=options.protect,
            seed=options.seed,
        )
    notes = [str(warning.message) for warning in caught]
    keep = compress.without(depth, chosen.removed)[None]
    pruned = compress.prune_model(model, chosen.removed)
    perplexity = {"calibration": _pair(game, keep)}
    if test is not None:
        perplexity["held_out"] = _pair(compress.make_utility(stack, model.params, test), keep)
    if lesson is not None:
        pruned = _recover(pruned, lesson, options)
        for name, batch in (("calibration", calibration), ("held_out", test)):
            if batch is not None:
                whole = compress.make_utility(compress.decoder_stack(pruned.config), pruned.params, batch)
                perplexity[name]["recovered"] = math.exp(whole.full_loss)
    report = _report(options, chosen, perplexity, evaluations=len(cache), stored=before, depth=depth, notes=notes)
    save(options.out, pruned, overwrite=True)
    (options.out / "contributions.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    _plot(options.out / "pruning.png", chosen, depth)
    _print(report, options.out)
    return 0


def _stored(game: StackUtility, cache: EvaluationCache) -> Callable[[Any], Any]:
    """The game with its values on disk, and a bar while they are computed."""
    console = Console(stderr=True)

    def utility(masks: Any) -> np.ndarray:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("masks")
            return compress.evaluate_masks(
                game,
                masks,
                batch_size=_BATCH,
                cache=cache,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )

    return utility


def _check(options: argparse.Namespace) -> None:
    for name, least in (("remove", 0), ("windows", 1), ("window", 2), ("budget", 1), ("recover_epochs", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed must be between 0 and {2**32 - 1}, got {options.seed}")
    out = options.out
    if any(folder.exists() and not folder.is_dir() for folder in (out, *out.parents)):
        raise ValueError(f"--out {out}: a file is in the way of that folder")
    if out.is_dir() and not options.overwrite:
        foreign = sorted(path.name for path in out.iterdir() if not path.match(_STORED))
        if foreign:
            raise ValueError(
                f"--out {out} is not empty, it holds {foreign[0]}; --overwrite replaces a checkpoint in it"
            )


def _split(tokens: list[int], options: argparse.Namespace) -> tuple[TokenBatch, TokenBatch | None]:
    """Calibration from the first half of the text, held-out windows from the second; all of it where it is short."""
    if len(tokens) < 4 * options.window:
        return compress.token_batch(tokens, window=options.window, limit=options.windows), None
    half = len(tokens) // 2
    pick: dict[str, Any] = {"window": options.window, "limit": options.windows}
    key = jax.random.key(options.seed)
    return compress.token_batch(tokens[:half], key=key, **pick), compress.token_batch(tokens[half:], **pick)


def _pair(game: StackUtility, keep: np.ndarray) -> dict[str, float]:
    loss = float(game.losses(keep)[0])
    return {"before": math.exp(game.full_loss), "after": math.exp(min(loss, 700.0))}


def _recover(pruned: Model, batch: TokenBatch, options: argparse.Namespace) -> Model:
    params, losses = recover(
        jax.random.key(options.seed), pruned.apply_fn, pruned.params, batch, epochs=options.recover_epochs
    )
    if not np.isfinite(losses).all():
        raise ValueError("the recovery diverged: its loss is not finite")
    return dataclasses.replace(pruned, params=params)


def _report(
    options: argparse.Namespace,
    chosen: Choice,
    perplexity: dict[str, dict[str, float]],
    *,
    evaluations: int,
    stored: int,
    depth: int,
    notes: list[str],
) -> dict[str, Any]:
    removed = [int(block) for block in chosen.removed]
    blocks: list[dict[str, Any]] = []
    for block in range(depth):
        entry: dict[str, Any] = {"block": block, "removed": block in removed, "protected": block in options.protect}
        if chosen.scores is not None:
            score = float(chosen.scores[block])
            entry["contribution"] = score if math.isfinite(score) else None
        if chosen.scores is not None and chosen.error is not None:
            half = _Z * float(chosen.error[block])
            entry |= {"low": score - half, "high": score + half}
        blocks.append(entry)
    quality = {
        kind: {name: value if math.isfinite(value) else None for name, value in found.fit.quality._asdict().items()}
        | {"target": found.target, "masks": len(found.fit.predicted)}
        for kind, found in chosen.estimates.items()
    }
    return {
        "model": str(options.model),
        "text": str(options.text),
        "method": options.method,
        "seed": options.seed,
        "removed": removed,
        "perplexity": perplexity,
        "evaluations": evaluations,
        "evaluations_restored": stored,
        "surrogates": quality,
        "notes": notes,
        "blocks": blocks,
    }


def _plot(path: Path, chosen: Choice, depth: int) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12 if chosen.estimates else 8, 4), layout="constrained")
    panels = figure.subplots(ncols=1 + len(chosen.estimates), squeeze=False)[0]
    axis, gone = panels[0], np.isin(np.arange(depth), chosen.removed)
    if chosen.scores is None:
        heights = np.zeros(depth)
        heights[chosen.removed] = np.arange(len(chosen.removed), 0, -1)
        axis.set(ylabel="removed earlier", title="order of removal")
    else:
        heights = np.where(np.isfinite(chosen.scores), chosen.scores, np.nan)
        axis.set(ylabel="contribution", title="blocks, with 95 % intervals" if chosen.error is not None else "blocks")
    error = None if chosen.error is None else _Z * chosen.error
    colours = np.where(gone, "tab:red", "tab:blue").tolist()
    axis.bar(np.arange(depth), heights, yerr=error, color=colours, error_kw={"lw": 1})
    axis.set(xlabel="block (red: removed)")
    positive = heights[np.isfinite(heights) & (heights > 0)]
    if chosen.scores is not None and positive.size and positive.max() > 20 * np.median(positive):
        axis.set_yscale("symlog", linthresh=float(np.median(positive)))
    for panel, (kind, found) in zip(panels[1:], chosen.estimates.items(), strict=True):
        out = found.fit.held_out
        panel.scatter(found.truth[out], found.fit.predicted[out], c=found.sizes[out], s=10, cmap="viridis")
        panel.axline((float(np.mean(found.truth)),) * 2, slope=1, color="k", lw=0.8)
        quality = found.fit.quality
        panel.set(xlabel=f"{found.target}, true", ylabel="predicted, held out")
        panel.set_title(f"{kind}: R² {quality.r2:.2f}, rank correlation {quality.spearman:.2f}", fontsize=10)
    FigureCanvasAgg(figure).print_figure(path, dpi=150)


def _print(report: dict[str, Any], out: Path) -> None:
    print(f"removed blocks {', '.join(map(str, sorted(report['removed']))) or 'none'} by {report['method']}")
    for name, values in report["perplexity"].items():
        listed = ", ".join(f"{when} {value:.4g}" for when, value in values.items())
        print(f"perplexity ({name.replace('_', ' ')} text): {listed}")
    restored = f", {report['evaluations_restored']} of them from before" if report["evaluations_restored"] else ""
    print(f"{report['evaluations']} masks evaluated{restored}")
    for note in report["notes"]:
        print(textwrap.fill(f"note: {note}", 80))
    for name in ("contributions.json", "pruning.png", "model.safetensors"):
        print(out / name)


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; see jaxlab prune --help")

    def blocks(words: str) -> list[int]:
        return sorted({int(word) for word in words.split(",") if word.strip()})

    parser = Parser(prog="jaxlab prune", description="Remove the least useful blocks of a language model.")
    models = f"a folder, a .gguf file, OWNER/NAME on the Hugging Face hub, or {', '.join(BUILT_IN)}"
    parser.add_argument("model", metavar="MODEL", help=models)
    parser.add_argument("--remove", type=int, required=True, help="number of blocks")
    parser.add_argument("--text", required=True, help="a text file to calibrate on, or a corpus such as python-topics")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="game",
        metavar="METHOD",
        help=f"{', '.join(METHODS)} (default game; the paper: mlp)",
    )
    parser.add_argument("--budget", type=int, help="masks to evaluate (default 10 a block; the paper: 8000)")
    parser.add_argument("--protect", type=blocks, default=[], metavar="0,1", help="blocks that stay")
    parser.add_argument("--windows", type=int, default=10, help="windows of calibration text (default 10)")
    parser.add_argument("--window", type=int, default=128, help="tokens of a window (default 128)")
    parser.add_argument("--recover", metavar="FILE", help="train adapters on this text afterwards, and merge them")
    parser.add_argument("--recover-epochs", type=int, default=2, help="passes over that text (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (default 0)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the checkpoint's")
    parser.add_argument("--download", action="store_true", help="fetch a model of the hub that is not here")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint in --out")
    return parser
