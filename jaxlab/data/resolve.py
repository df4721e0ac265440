"""From the name of a data set to where it lies, without a network.

A name is looked up in this order:

1. an explicit path: a `pathlib.Path`, or a string that is the path of something that exists;
2. ``$JAXLAB_DATA/<name>``, a folder with one sub-folder a data set;
3. what the caller has built in, such as files of an installed package or of the standard library.

Nothing here downloads. A reader of some kind of data (`jaxlab.data.load_text`) may understand more names, like
``hf:OWNER/NAME``, for which the user asks for a download.
"""

import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

__all__ = ["resolve"]

T = TypeVar("T")


def resolve(name: str | Path, *, built_in: Mapping[str, Callable[[], T]] | None = None, holding: str = "*") -> Path | T:
    """Find the file or folder that a name stands for.

    Args:
      name: a path, the name of a sub-folder of ``$JAXLAB_DATA``, or a key of ``built_in``.
      built_in: what to call for each name that needs no folder; the value it returns is returned.
      holding: of the sub-folders of ``$JAXLAB_DATA`` only those with a file that matches this pattern count.

    Returns:
      The path, or what ``built_in[name]()`` returned.

    Raises:
      FileNotFoundError: if ``name`` can only be a path (it has a separator or a suffix, or is a `Path`) and nothing is
        there, or if ``$JAXLAB_DATA`` is set to what is not a folder.
      ValueError: if the name is unknown; the message has the nearest known name and all the others.
    """
    built_in = built_in or {}
    path = Path(name).expanduser()
    if path.exists() and str(name):
        return path
    folders = _data_folders(holding)
    if name in folders:
        return folders[name]
    if name in built_in:
        return built_in[name]()
    if isinstance(name, Path) or len(path.parts) > 1 or path.suffix:
        raise FileNotFoundError(f"no such file or folder: {name}")
    known = sorted({*folders, *built_in})
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    unset = "" if _VARIABLE in os.environ else f" (${_VARIABLE}, a folder of data sets, is not set)"
    raise ValueError(f"unknown data set {name!r}: {hint}known are {', '.join(known) or 'none'}{unset}")


_VARIABLE = "JAXLAB_DATA"


def _data_folders(holding: str) -> dict[str, Path]:
    if not os.environ.get(_VARIABLE):
        return {}
    root = Path(os.environ[_VARIABLE]).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"${_VARIABLE} is not a folder: {root}")
    return {folder.name: folder for folder in root.iterdir() if folder.is_dir() and any(folder.glob(holding))}
