"""Run an experiment into a directory and give its verdict."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxlab
from jaxlab.experiments.base import PRESETS, Experiment, Progress, Run
from jaxlab.experiments.directory import conclude, open_directory, read_json, write_json
from jaxlab.experiments.interrupt import Interrupts

__all__ = ["Outcome", "execute"]


class Outcome(NamedTuple):
    """What came of a run.

    Attributes:
      result: the content of ``result.json``.
      out: the run's directory.
      figures: the plots in it.
    """

    result: dict[str, Any]
    out: Path
    figures: list[Path]

    @property
    def exit_status(self) -> int:
        """0 all claims hold, 1 some claim fails for no known reason, 130 interrupted."""
        if self.result.get("interrupted"):
            return 130
        return int(any(not claim["holds"] and "known_gap" not in claim for claim in self.result["claims"]))


def execute(
    experiment: Experiment,
    *,
    preset: str = "quick",
    config: Any = None,
    seed: int = 0,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Run an experiment and write ``config.json``, ``metrics.jsonl``, plots, ``checkpoint/`` and ``result.json``.

    Ctrl-C and SIGTERM end the run in order: the outcome then carries ``"interrupted": true`` and what was measured so
    far, and ``resume`` continues it to a result identical bit for bit to that of an uninterrupted run.

    Args:
      experiment: what to run.
      preset: smoke, quick, cpu or paper.
      config: by default the preset's.
      seed: non-negative.
      out: the directory; by default ``runs/NAME/<timestamp>-PRESET-seedN``, or on resume the newest such one.
      resume: continue the run in that directory.
      overwrite: replace the run in that directory, once there is something to replace it with.
      progress: who is told of every finished chunk.

    Raises:
      ValueError: bad input, here or found by the experiment itself; what was written until then stays.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {preset!r}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and 2**32 - 1, got {seed}")
    config = experiment.presets[preset] if config is None else config
    out = open_directory(experiment.name, preset, seed, config, out=out, resume=resume, overwrite=overwrite)
    earlier = read_json(out / "result.json")["seconds"] if resume and (out / "result.json").exists() else 0.0
    start = time.perf_counter()
    with Interrupts() as interrupts:
        run = Run(
            experiment.claims,
            preset=preset,
            seed=seed,
            out=out,
            resume=resume,
            progress=progress,
            interrupts=interrupts,
        )
        interrupted = True
        try:
            experiment.run(config, run)
            interrupted = False
        except KeyboardInterrupt:
            interrupts.accept()
        except BaseException:
            run.close(complete=False)
            conclude(out)
            raise
        with interrupts.shield():
            run.close(complete=not interrupted)
            result = {
                "experiment": experiment.name.replace("-", "_"),
                "preset": preset,
                "seed": seed,
                "versions": {"jaxlab": jaxlab.__version__, "jax": jax.__version__},
                "device": jax.default_backend(),
                "seconds": round(earlier + time.perf_counter() - start, 1),
                "table": run.table,
                **run.judge(complete=not interrupted),
                "notes": run.notes,
                **({"interrupted": True} if interrupted else {}),
            }
            write_json(out / "result.json", result)
            conclude(out)
    return Outcome(result, out, run.figures)
