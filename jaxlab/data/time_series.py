"""Time series from files: numpy arrays, comma-separated text, and the ``.ts`` format of the UCR/UEA archives.

Nothing is downloaded: data sets of the archive are found on disk by name (`load_uea`).
"""

import csv
import importlib.util
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlab.data.resolve import resolve

__all__ = ["LabelledSeries", "has_uea", "load_uea", "read_time_series"]

SUFFIXES = (".npy", ".npz", ".csv", ".ts")


class LabelledSeries(NamedTuple):
    """Series of possibly different length with a label each.

    Attributes:
      series: arrays ``[time, channel]``, float64; a missing value of a ``.ts`` file is NaN.
      labels: class of a ``.ts`` case, name of an array in an ``.npz`` file, else the name of the file.
    """

    series: list[np.ndarray]
    labels: list[str]


def read_time_series(path: str | Path) -> LabelledSeries:
    """Read every series of a file.

    ``.npy`` holds ``[time]``, ``[time, channel]`` or ``[case, time, channel]``, ``.npz`` any number of such arrays,
    ``.csv`` one row a time and one column a channel, separated by commas, with an optional line of names first. The
    first line is one of names if no cell of it is a number. Text is UTF-8, with or without a byte-order mark; ``?`` is
    a missing value, blank lines do not count.

    Raises:
      FileNotFoundError: no such file.
      ValueError: another suffix, a folder, an array of another shape, text that is no number (with its line) or not
        UTF-8, channels of different length, time stamps in a ``.ts`` file, no series at all or an empty one.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, not a file")
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: time series are read from {', '.join(SUFFIXES)} files")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if suffix == ".ts":
        result = _read_ts(path)
    elif suffix == ".csv":
        result = LabelledSeries([_read_csv(path)], [path.stem])
    else:
        result = _read_numpy(path)
    if not result.series:
        raise ValueError(f"{path}: no time series in the file")
    for label, one in zip(result.labels, result.series, strict=True):
        if one.size == 0:
            raise ValueError(f"{path}: series {label!r} is empty, its shape [time, channel] is {one.shape}")
    return result


def load_uea(name: str | Path) -> tuple[LabelledSeries, LabelledSeries]:
    """Training and test cases of a data set of the UCR/UEA archive, for example ``"BasicMotions"``.

    ``name`` is a folder ``NAME`` with ``NAME_TRAIN.ts`` and ``NAME_TEST.ts``, or the name of one in ``$JAXLAB_DATA`` or
    in the data that an installed ``aeon`` or ``sktime`` bundles (its files are read without importing it).

    Raises:
      FileNotFoundError: no such folder, or one of the two files is not in it.
      ValueError: the name is unknown; the message lists the known ones.
    """
    folder = resolve(name, built_in=_bundled(), holding="*_TRAIN.ts")
    splits = []
    for split in ("TRAIN", "TEST"):
        splits.append(read_time_series(folder / f"{folder.name}_{split}.ts"))
    return splits[0], splits[1]


def has_uea(name: str) -> bool:
    """Whether `load_uea` knows this name."""
    try:
        resolve(name, built_in=_bundled(), holding="*_TRAIN.ts")
    except (ValueError, FileNotFoundError):
        return False
    return True


def _bundled() -> dict[str, Callable[[], Path]]:
    found: dict[str, Callable[[], Path]] = {}
    for package in ("sktime", "aeon"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            root = Path(spec.origin).parent / "datasets" / "data"
            found |= {file.parent.name: partial(Path, file.parent) for file in root.glob("*/*_TRAIN.ts")}
    return found


def _read_numpy(path: Path) -> LabelledSeries:
    arrays: dict[str, np.ndarray] = {}
    try:
        with path.open("rb") as file:
            # What the file holds decides, not how it is called.
            loaded = np.load(file)
            arrays = {path.stem: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (ValueError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: cannot be read as numpy arrays ({error})") from None
    series, labels = [], []
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub" or array.ndim not in (1, 2, 3):
            raise ValueError(
                f"{path}: {name!r} must be an array of numbers with one to three axes, "
                f"got {getattr(array, 'dtype', type(array).__name__)} of shape {np.shape(array)}"
            )
        cases = array.astype(float)
        cases = cases if array.ndim == 3 else cases[None] if array.ndim == 2 else cases[None, :, None]
        series += list(cases)
        labels += [name if len(cases) == 1 else f"{name}[{i}]" for i in range(len(cases))]
    return LabelledSeries(series, labels)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not text in UTF-8 ({error.reason} at byte {error.start})") from None


def _read_csv(path: Path) -> np.ndarray:
    reader = csv.reader(_text(path).splitlines())
    rows = [(number, row) for number, row in enumerate(reader, 1) if any(cell.strip() for cell in row)]
    if rows and not any(_is_number(cell) for cell in rows[0][1]):
        rows = rows[1:]
    width = len(rows[0][1]) if rows else 0
    for number, row in rows:
        if len(row) != width:
            raise ValueError(f"{path}, line {number}: {len(row)} columns where {width} were expected")
    values = [[_number(value, path, number) for value in row] for number, row in rows]
    return np.array(values, dtype=float).reshape(len(rows), width)


def _read_ts(path: Path) -> LabelledSeries:
    lines = enumerate(_text(path).splitlines(), 1)
    header = {}
    for _, line in lines:
        key, value = [*line.split(maxsplit=1), "", ""][:2]
        if key.lower() == "@data":
            break
        if key.startswith("@"):
            header[key.lower()] = value.strip().lower()
    else:
        raise ValueError(f"{path}: no @data line")
    if header.get("@timestamps") == "true":
        raise ValueError(f"{path}: time stamps are not supported, values must be equally spaced")
    labelled = any(header.get(key, "").startswith("true") for key in ("@classlabel", "@targetlabel"))
    series, labels = [], []
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        channels = line.strip().split(":")
        labels.append(channels.pop().strip() if labelled else path.stem)
        if not channels:
            raise ValueError(f"{path}, line {number}: a label without values")
        values = [[_number(value, path, number) for value in channel.split(",")] for channel in channels]
        if len({len(channel) for channel in values}) != 1:
            raise ValueError(
                f"{path}, line {number}: channels must have one length, got {sorted({len(v) for v in values})}"
            )
        series.append(np.array(values).T)
    return LabelledSeries(series, labels)


def _number(text: str, path: Path, line: int) -> float:
    text = text.strip()
    if text == "?":
        return float("nan")
    if not _is_number(text):
        hint = "; values are separated by commas" if any(c in text for c in "; \t|") else ""
        raise ValueError(f"{path}, line {line}: {text!r} is not a number{hint}")
    return float(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.strip() == "?"
    return True
