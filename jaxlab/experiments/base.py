'''What an experiment is, and what it sees while it runs.

A new paper is one module with a config dataclass, a function and a list of claims::

    @dataclass(frozen=True)
    class Config:
        """Gradient descent on half the squared norm."""

        chunks: int = 10
        """chunks of a hundred steps"""

    @jax.jit
    def descend(x, i):
        def step(x, _):
            x = x - 0.01 * x
            return x, x @ x / 2

        return jax.lax.scan(step, x, length=100)

    def run(config, run):
        run.plan(1.0)
        log = lambda i, losses: {"step": 100 * (i + 1), "loss": losses[-1]}
        x, losses = run.loop("descent", descend, jnp.ones(3), config.chunks, log=log)
        run.row("gradient_descent", loss=losses[-1, -1])
        run.measure("converges", losses[-1, -1])
        with run.figure("loss") as (_, axes):
            axes.semilogy(losses.ravel())

    EXPERIMENT = Experiment(
        name="descent",
        summary="Gradient descent on a quadratic.",
        claims=(Claim("converges", "The loss goes to zero.", "<", 1e-6),),
        presets={"smoke": Config(2), "quick": Config(), "cpu": Config(100), "paper": Config(10_000)},
        run=run,
        shapes=lambda config: jax.eval_shape(descend, jnp.ones(3), 0),
    )

Every expensive thing goes through :meth:`Run.loop` or :meth:`Run.stage`: they drive the progress bar, stream
``metrics.jsonl``, and checkpoint, so that a run which is interrupted, or killed, continues bit for bit.
'''

import contextlib
import dataclasses
import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from jaxlab.experiments.checkpoint import LoopCheckpoint, LoopState, settle
from jaxlab.experiments.directory import Metrics
from jaxlab.experiments.interrupt import Interrupts

__all__ = ["PRESETS", "Claim", "Experiment", "Progress", "Run"]

PRESETS = ("smoke", "quick", "cpu", "paper")
CHECKPOINT_SECONDS = 15.0
# Options of the command, which a config must not shadow.
RESERVED_FIELDS = frozenset({"preset", "seed", "out", "resume", "overwrite", "json", "help"})

Relation = Literal["<", "<=", ">", ">=", "in"]
Config = TypeVar("Config")
Log = Callable[[int, Any], Mapping[str, Any] | Sequence[Mapping[str, Any]] | None]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and the bound that decides it.

    Attributes:
      id: snake case, fixed for good.
      claim: a sentence a reader of the paper would recognise.
      relation: how the measured value has to stand to ``bound``; "in" means within a closed interval.
      bound: a number, or a pair ``(low, high)`` where the relation is "in".
      known_gap: why the claim fails at the scale run here, and what was tried. A failing claim with this sentence is
        printed and recorded as failing, and no longer changes the exit status.
    """

    id: str
    claim: str
    relation: Relation
    bound: float | int | tuple[float | int, float | int]
    known_gap: str | None = None

    def __post_init__(self) -> None:
        if (self.relation == "in") != isinstance(self.bound, tuple):
            raise ValueError(f"claim {self.id!r}: relation {self.relation!r} does not go with bound {self.bound!r}")

    def holds(self, measured: float) -> bool:
        """Whether the measured value satisfies the claim; NaN never does."""
        if isinstance(self.bound, tuple):
            return self.bound[0] <= measured <= self.bound[1]
        match self.relation:
            case "<":
                return measured < self.bound
            case "<=":
                return measured <= self.bound
            case ">":
                return measured > self.bound
        return measured >= self.bound


class Progress:
    """Who watches a run; this one looks away."""

    def plan(self, total_cost: float | int) -> None:
        """The costs of all loops to come add up to ``total_cost``."""

    def advance(self, name: str, done: int, length: int, cost: float | int, restored: bool) -> None:
        """One chunk of the loop ``name`` is finished, ``done`` of ``length``; ``restored`` ones took no time."""


class Run:
    """One run of an experiment: its seed, its directory, and everything it may report.

    Attributes:
      seed: the seed of the run.
      preset: smoke, quick, cpu or paper.
      out: the run's directory; it exists.
      table: the rows so far.
      notes: the notes so far.
      figures: the plots saved so far.
    """

    def __init__(
        self,
        claims: Sequence[Claim],
        *,
        preset: str,
        seed: int,
        out: Path,
        resume: bool = False,
        progress: Progress | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:
        self.seed = seed
        self.preset = preset
        self.out = out
        self.table: list[dict[str, str | float]] = []
        self.notes: list[str] = []
        self.figures: list[Path] = []
        self._claims = {claim.id: claim for claim in claims}
        self._measured: dict[str, float] = {}
        self._skipped: dict[str, tuple[str, str]] = {}
        self._loops: set[str] = set()
        self._resume = resume
        self._progress = progress or Progress()
        self._interrupts = interrupts or Interrupts()
        self._metrics = Metrics(out / "metrics.jsonl", resume=resume)
        self._saved_at = time.monotonic()

    @property
    def key(self) -> jax.Array:
        """The random key of the run's seed; split it, never use it twice."""
        return jax.random.key(self.seed)

    def plan(self, total_cost: float | int) -> None:
        """Say what the costs of all loops and stages add up to, so that the progress bar knows an ETA."""
        self._progress.plan(float(total_cost))

    def loop(
        self,
        name: str,
        body: Callable[[Any, int], tuple[Any, Any]],
        init: PyTree,
        length: int,
        *,
        cost: float | int = 1.0,
        log: Log | None = None,
    ) -> tuple[PyTree, PyTree]:
        """``jax.lax.scan`` at the level of chunks: visible, checkpointed, resumable.

        Args:
          name: unique in the experiment; letters, digits, ``_``, ``-`` and ``.``.
          body: ``body(carry, i) -> (carry, output)`` with ``i`` a Python int; usually a jitted scan over many steps,
            about a second long. It must depend on nothing but its arguments and the config.
          init: the first carry, any pytree of arrays (typed random keys included). If ``body`` donates it, an
            interrupt falls back to the last periodic checkpoint.
          length: number of chunks, at least one.
          cost: share of the whole run's time, in the unit of :meth:`plan`.
          log: ``log(i, output)`` returns a dict of numbers, or a list of them, written to ``metrics.jsonl``; called
            once for every chunk in order, the restored ones too.

        Returns:
          The last carry, and the outputs stacked on a leading axis as numpy arrays. An output is an array or dicts,
          lists and tuples of them (a NamedTuple enters as ``info._asdict()``, since its structure is stored).
        """
        self._check(bool(re.fullmatch(r"[\w.-]+", name)), f"{name!r} cannot name a loop: use letters, digits, _ - .")
        self._check(name not in self._loops, f"two loops are called {name!r}")
        self._check(length >= 1, f"loop {name!r} has length {length}")
        self._loops.add(name)
        checkpoint = LoopCheckpoint(self.out / "checkpoint" / name)
        state = (checkpoint.restore(init) if self._resume else None) or LoopState(settle(init), [])
        for i, output in enumerate(state.outputs):
            self._chunk_done(name, i, length, cost, output, log, restored=True)
        saved = len(state.outputs)
        try:
            for i in range(len(state.outputs), length):
                carry, output = jax.block_until_ready(body(state.carry, i))
                with self._interrupts.shield():
                    state = state.advance(name, settle(carry), jax.tree.map(np.asarray, jax.device_get(output)))
                    self._chunk_done(name, i, length, cost, output, log, restored=False)
                    if i + 1 == length or time.monotonic() - self._saved_at > CHECKPOINT_SECONDS:
                        checkpoint.save(state)
                        saved, self._saved_at = i + 1, time.monotonic()
        except BaseException:
            if len(state.outputs) > saved and not state.donated:
                with self._interrupts.shield():
                    checkpoint.save(state)
            raise
        return state.carry, jax.tree.map(lambda *leaves: np.stack(leaves), *state.outputs)

    def stage(self, name: str, fn: Callable[[], PyTree], *, cost: float | int = 1.0, log: Log | None = None) -> PyTree:
        """A loop of length one without a carry: ``fn()`` is computed once and restored on resume, as numpy arrays."""
        _, outputs = self.loop(name, lambda carry, _: (carry, fn()), (), 1, cost=cost, log=log)
        return jax.tree.map(lambda leaf: leaf[0], outputs)

    def row(self, method: str, **numbers: Any) -> None:
        """One row of the table. ``x_mean`` and ``x_std``, over seeds, are shown as one column."""
        self.table.append({"method": method, **{name: float(number) for name, number in numbers.items()}})

    def measure(self, claim_id: str, value: Any) -> None:
        """What the claim's quantity came out as, a real scalar; the claim's bound decides whether it holds."""
        self._check_open(claim_id)
        self._measured[claim_id] = float(value)

    def skip(self, claim_id: str, preset: str, reason: str) -> None:
        """The claim cannot show at this size; ``preset`` is the one that shows it."""
        self._check_open(claim_id)
        self._check(preset in PRESETS, f"claim {claim_id!r} is skipped for the unknown preset {preset!r}")
        self._skipped[claim_id] = (preset, reason)

    def note(self, text: str) -> None:
        """A sentence to print under the table and to keep in ``result.json``."""
        self.notes.append(text)

    @contextlib.contextmanager
    def figure(self, name: str, **subplots: Any) -> Iterator[tuple[Any, Any]]:
        """Yield ``(figure, axes)`` and save them as ``name.png`` in the run's directory.

        Keywords are those of ``matplotlib.pyplot.subplots``. pyplot itself, and with it the user's backend, stays
        untouched.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        of_axes = {key: subplots.pop(key) for key in inspect.signature(Figure.subplots).parameters if key in subplots}
        figure = Figure(**({"layout": "constrained"} | subplots))
        canvas = FigureCanvasAgg(figure)
        yield figure, figure.subplots(**of_axes)
        path = self.out / f"{name}.png"
        self._check(path not in self.figures, f"two figures are called {name!r}")
        partial = path.with_suffix(".png.partial")
        canvas.print_figure(partial, format="png", dpi=150)
        partial.replace(path)
        self.figures.append(path)

    def judge(self, *, complete: bool) -> dict[str, list[dict[str, Any]]]:
        """The entries "claims" and "skipped" of ``result.json``.

        At ``smoke`` nothing is judged and every claim is skipped. With ``complete``, a claim that was neither measured
        nor skipped is an error in the experiment.
        """
        forgotten = sorted(self._claims.keys() - self._measured.keys() - self._skipped.keys())
        self._check(not (complete and forgotten), f"neither measured nor skipped: {', '.join(forgotten)}")
        claims, skipped = [], []
        for claim in self._claims.values():
            about = {"id": claim.id, "claim": claim.claim}
            if claim.id in self._skipped:
                preset, reason = self._skipped[claim.id]
                skipped.append(about | {"preset": preset, "reason": reason})
            elif self.preset == "smoke":
                skipped.append(about | {"preset": "quick", "reason": "smoke judges no claim"})
            elif claim.id in self._measured:
                measured = self._measured[claim.id]
                verdict = {"measured": measured, "relation": claim.relation, "bound": claim.bound}
                holds = claim.holds(measured)
                gap = {} if holds or claim.known_gap is None else {"known_gap": claim.known_gap}
                claims.append(about | verdict | {"holds": holds} | gap)
        return {"claims": claims, "skipped": skipped}

    def close(self, *, complete: bool) -> None:
        """Close ``metrics.jsonl``; a complete run drops lines of an earlier one that did not come again."""
        self._metrics.close(complete=complete)

    def _chunk_done(
        self, name: str, i: int, length: int, cost: float | int, output: Any, log: Log | None, *, restored: bool
    ) -> None:
        self._progress.advance(name, i + 1, length, cost / length, restored)
        lines = log(i, output) if log else None
        for line in [lines] if isinstance(lines, Mapping) else lines or []:
            self._metrics.write({"loop": name, "chunk": i, **line})

    def _check_open(self, claim_id: str) -> None:
        self._check(claim_id in self._claims, f"unknown claim {claim_id!r}; there are {', '.join(self._claims)}")
        self._check(claim_id not in self._measured | self._skipped, f"claim {claim_id!r} is measured or skipped twice")

    def _check(self, condition: bool, message: str) -> None:
        # Not a ValueError: those are the user's input, this is a mistake in the experiment and deserves a traceback.
        if not condition:
            raise RuntimeError(message)


@dataclass(frozen=True)
class Experiment(Generic[Config]):
    """A paper's claims and the code that measures them.

    Attributes:
      name: the method in kebab case.
      summary: one sentence that fits a line of 80 columns.
      claims: what is measured.
      presets: the configs of smoke, quick, cpu and paper: frozen dataclasses of plain fields, each documented by a
        string under it (a line break in it is one in the help). A config raises ``ValueError`` from
        ``__post_init__`` on bad values.
      run: ``run(config, run)`` measures every claim or skips it with a reason.
      shapes: builds the config's model and optimiser under ``jax.eval_shape``, so that ``paper`` is checked where it
        cannot be run.
    """

    name: str
    summary: str
    claims: tuple[Claim, ...]
    presets: Mapping[str, Config]
    run: Callable[[Config, Run], None]
    shapes: Callable[[Config], Any]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise ValueError(f"an experiment's name is kebab case, got {self.name!r}")
        if tuple(self.presets) != PRESETS:
            raise ValueError(f"{self.name}: presets must be {PRESETS} in this order, got {tuple(self.presets)}")
        ids = [claim.id for claim in self.claims]
        if len(set(ids)) != len(ids):
            raise ValueError(f"{self.name}: claim ids must differ, got {ids}")
        fields = {field.name for config in self.presets.values() for field in dataclasses.fields(config)}  # type: ignore[arg-type]
        if shadowed := fields & RESERVED_FIELDS:
            raise ValueError(f"{self.name}: config fields {sorted(shadowed)} shadow options of the command")
