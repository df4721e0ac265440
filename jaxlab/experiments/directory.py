"""The files of a run: ``config.json``, ``metrics.jsonl``, ``result.json``, plots and ``checkpoint/`` in one directory.

Whole files are written beside their place and moved there, and the stream is flushed line by line, so that a reader
never sees half a file, whatever ends the process. Numbers that JSON cannot hold are written as the strings "NaN",
"Infinity" and "-Infinity", which ``float()`` reads back.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Metrics", "conclude", "dumps", "open_directory", "read_json", "write_json"]

_CONFIG, _METRICS, _RESULT, _CHECKPOINT = "config.json", "metrics.jsonl", "result.json", "checkpoint"
_REPLACED = "replaced"


def open_directory(
    name: str, preset: str, seed: int, config: Any, *, out: Path | None, resume: bool, overwrite: bool
) -> Path:
    """Find or make the directory of a run and make sure that it is this run's.

    Args:
      name: the experiment.
      preset: one of the presets.
      seed: the seed.
      config: the config, a dataclass of plain fields.
      out: the directory; by default ``runs/NAME/<timestamp>-PRESET-seedN``, or on resume the newest such one.
      resume: continue what is there.
      overwrite: set the run that is there aside, until :func:`conclude`.

    Raises:
      ValueError: there is nothing to resume, there is something and neither ``resume`` nor ``overwrite``, or what
        is there was run with another config.
    """
    if resume and overwrite:
        raise ValueError("give --resume or --overwrite, not both")
    about = {"experiment": name.replace("-", "_"), "preset": preset, "seed": seed}
    about["fields"] = json.loads(dumps(dataclasses.asdict(config)))
    if out is None:
        home = Path("runs") / name
        old = sorted(path.parent for path in home.glob(f"*-{preset}-seed{seed}/{_CONFIG}")) if resume else []
        if resume and not old:
            raise ValueError(f"nothing to resume: no run of {name} with preset {preset} and seed {seed} in {home}")
        out = old[-1] if old else home / f"{datetime.now():%Y%m%d-%H%M%S}-{preset}-seed{seed}"
    path = out / _CONFIG
    if path.exists() and overwrite:
        aside = out / _REPLACED
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for name_of_file in (_CHECKPOINT, _METRICS, _RESULT, _CONFIG):
            if (out / name_of_file).exists():
                (out / name_of_file).replace(aside / name_of_file)
    if path.exists():
        if not resume:
            raise ValueError(f"{out} already holds a run; give --resume to continue it or --overwrite to replace it")
        _compare(path, read_json(path), about)
    elif resume:
        raise ValueError(f"nothing to resume: {path} does not exist")
    else:
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, about)
    return out


def conclude(out: Path) -> None:
    """Forget the run that was replaced; or, of a run that ended before it wrote anything but its config, all traces.

    The run that was to be replaced is then where it was. Files that no run wrote stay in any case.
    """
    aside = out / _REPLACED
    if _size(out / _METRICS) or (out / _CHECKPOINT).exists() or (out / _RESULT).exists():
        shutil.rmtree(aside, ignore_errors=True)
        return
    for name in (_CONFIG, _METRICS):
        (out / name).unlink(missing_ok=True)
    if aside.is_dir():
        for path in aside.iterdir():
            path.replace(out / path.name)
        aside.rmdir()
    with contextlib.suppress(OSError):  # it holds something, or somebody stands in it
        out.rmdir()


class Metrics:
    """``metrics.jsonl``, one line a record, flushed at once.

    On resume the records of restored chunks come again. They are compared with the lines on disk and nothing is
    written while they agree, so that the file never gets shorter than what it holds in common with the new run.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        text = path.read_bytes() if resume and path.exists() else b""
        # A process that was killed may have left half a line at the end.
        self._lines = deque(line for line in text.splitlines(keepends=True) if line.endswith(b"\n"))
        self._position = 0
        self._file = path.open("r+b" if text else "wb")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, or step over it where it is already there."""
        line = (dumps(record) + "\n").encode()
        if self._lines and self._lines.popleft() == line:
            self._position += len(line)
            return
        self._lines.clear()
        self._truncate()
        self._file.write(line)
        self._file.flush()
        self._position += len(line)

    def close(self, *, complete: bool) -> None:
        """Close the file; after a complete run, without lines that did not come again."""
        if complete:
            self._truncate()
        self._file.close()

    def _truncate(self) -> None:
        self._file.seek(self._position)
        self._file.truncate()


def dumps(value: Any, *, indent: int | None = None) -> str:
    """JSON of dicts, sequences, paths and numbers of Python, numpy and jax."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file at once or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
      ValueError: it is not JSON; the message names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _compare(path: Path, stored: Any, wanted: Mapping[str, Any]) -> None:
    if not isinstance(stored, dict) or not isinstance(stored.get("fields"), dict):
        raise ValueError(f"{path} is not the config of a run")
    old, new = ({**about, **about["fields"], "fields": None} for about in (stored, wanted))
    for name in [*new, *(name for name in old if name not in new)]:
        if old.get(name) != new.get(name):
            raise ValueError(
                f"cannot resume {path.parent}: it was run with {name} {old.get(name)!r}, now it is {new.get(name)!r}"
            )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if hasattr(value, "__array__"):
        return _plain(np.asarray(value).tolist())
    raise TypeError(f"JSON cannot hold {value!r}")
