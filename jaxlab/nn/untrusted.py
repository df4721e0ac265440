"""Files that anyone may have written: what is wrong with them is one clear error, whatever broke first.

Example::

    settings = read_object(folder / "config.json")
    with refused(folder / "config.json"):
        depth = settings["num_hidden_layers"] + 1            # ValueError, naming the file, if it is a string or missing
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["read_object", "refused"]


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is no JSON, or holds something else than an object; names the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no object")
    return found


@contextlib.contextmanager
def refused(source: str | Path) -> Iterator[None]:
    """Turn what a value of a wrong kind raises where it is used into a ValueError that names where it came from."""
    try:
        yield
    except _OF_WRONG_KIND as error:
        what = str(error) or type(error).__name__
        raise ValueError(f"{source} holds something that cannot be used: {what}") from error


_OF_WRONG_KIND = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
