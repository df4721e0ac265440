"""Text corpora by name.

Offline names: ``python-topics``, the reference texts of ``help()`` that ship with Python (465,000 characters of
technical English in Python 3.11; the text changes a little with the version of Python), and ``python-source``, the
modules of the standard library. With ``$JAXLAB_DATA`` the folders in it that hold text, such as ``tinyshakespeare`` and
``wikitext2``.
"""

import gzip
import sysconfig
import zlib
from pathlib import Path

from jaxlab.data.hub import hugging_face_text, tfds_text
from jaxlab.data.resolve import resolve

__all__ = ["load_text"]


def load_text(name: str | Path, *, split: str | None = None) -> str:
    """Read a corpus as one string.

    Args:
      name: in this order: the path of a UTF-8 text file, plain or ``.gz``, or of a folder of ``.txt`` and ``.txt.gz``
        files; a folder of this kind in ``$JAXLAB_DATA``; ``python-topics`` or ``python-source``; or, asking for a
        download, ``hf:OWNER/NAME[/CONFIG][:COLUMN]`` or ``tfds:NAME[:FEATURE]``.
      split: name of a file in a folder without its suffixes, or a split of a hub data set. None means ``train`` where
        there is one, else all files of a folder in the order of their names.

    Returns:
      The text; rows and files are joined by newlines.

    Raises:
      FileNotFoundError: if a path is missing.
      DownloadError: if a download fails, saying what was tried.
      ValueError: if the name is unknown (suggests the nearest), the split is, or a file is empty, not UTF-8, binary or
        a damaged gzip file.

    Example::

        words = split_words(load_text("python-topics"))
    """
    kind, _, reference = str(name).partition(":")
    if kind in _HUBS and reference:
        return _check_text("\n".join(_HUBS[kind](reference, split=split)), name)
    found = resolve(name, built_in=_BUILT_IN, holding="*.txt*")
    if isinstance(found, Path) and found.is_dir():
        return "\n".join(_read(file) for file in _files_of_split(found, split))
    if split is not None:
        raise ValueError(f"{name} has no splits; got split={split!r}")
    return _read(found) if isinstance(found, Path) else _check_text(found, name)


def _python_topics() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[key] for key in sorted(topics))


def _python_source() -> str:
    # Build settings of this very installation are no library code.
    modules = (path for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if "sysconfigdata" not in path.name)
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(modules))


_BUILT_IN = {"python-topics": _python_topics, "python-source": _python_source}
_HUBS = {"hf": hugging_face_text, "tfds": tfds_text}


def _files_of_split(folder: Path, split: str | None) -> list[Path]:
    files = {
        path.name.split(".txt")[0]: path for path in sorted(folder.glob("*.txt*")) if path.suffix in (".txt", ".gz")
    }
    if not files:
        raise ValueError(f"{folder} holds no .txt or .txt.gz file")
    if split is None:
        return [files["train"]] if "train" in files else list(files.values())
    if split not in files:
        raise ValueError(f"{folder} has no split {split!r}; it has {', '.join(files)}")
    return [files[split]]


def _read(path: Path) -> str:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            return _check_text(file.read(), path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error


def _check_text(text: str, source: str | Path) -> str:
    if "\0" in text:
        raise ValueError(f"{source} is binary, not text: character {text.index(chr(0))} is NUL")
    if not text.strip():
        raise ValueError(f"{source} is empty")
    return text
