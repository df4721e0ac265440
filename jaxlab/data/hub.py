"""Text of data sets that Hugging Face `datasets` or TensorFlow Datasets fetch, only when asked for by name.

Both libraries are imported when first used: they take seconds, and nothing offline needs them. TFDS data sets are read
through ``tfds.data_source``, which needs no TensorFlow.
"""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["DownloadError", "hugging_face_text", "tfds_text"]


class DownloadError(OSError):
    """A data set could not be fetched; the message says what was tried and what works offline."""


def hugging_face_text(reference: str, *, split: str | None = None) -> list[str]:
    """Text of one column of a Hugging Face data set, a string a row; missing values are empty.

    Args:
      reference: ``OWNER/NAME[/CONFIG][:COLUMN]``, or the path of a local folder that ``datasets.load_dataset`` reads,
        with the same ``:COLUMN``. Without a column: ``text``, or the only column of strings.
      split: split to read, in the syntax of ``datasets``; None means ``train``.

    Raises:
      DownloadError: if the data set cannot be had.
      ValueError: if there is no such column of strings; names those there are.
    """
    name, _, column = reference.partition(":")
    path, config = name, None
    if not Path(name).is_dir() and name.count("/") == 2:
        path, _, config = name.rpartition("/")
    try:
        import datasets

        rows = datasets.load_dataset(path, config, split=split or "train")
    except Exception as error:  # the library raises anything from OSError to its own classes
        raise _failure(f"hf:{reference}", "datasets.load_dataset", error) from error
    strings = [key for key, feature in rows.features.items() if getattr(feature, "dtype", "") in _STRINGS]
    return [row or "" for row in rows[_choose(column, strings, f"hf:{name}")]]


def tfds_text(reference: str, *, split: str | None = None) -> list[str]:
    """Text of one feature of a TensorFlow data set, a string an example.

    Args:
      reference: ``NAME[/CONFIG][:FEATURE]``. Without a feature: ``text``, or the only feature of text.
      split: split to read, in the syntax of TFDS; None means ``train``.

    Raises:
      DownloadError: if the data set cannot be had.
      ValueError: if there is no such feature of text; names those there are.
    """
    name, _, feature = reference.partition(":")
    try:
        import tensorflow_datasets as tfds

        examples = tfds.data_source(name, split=split or "train")
    except Exception as error:  # as above
        raise _failure(f"tfds:{reference}", "tensorflow_datasets.data_source", error) from error
    features = examples.dataset_info.features
    texts = [key for key, kind in features.items() if isinstance(kind, tfds.features.Text)]
    key = _choose(feature, texts, f"tfds:{name}")
    return [example[key].decode("utf-8") for example in examples]


_STRINGS = ("string", "large_string")


def _choose(column: str, columns: Sequence[str], source: str) -> str:
    if not column and len(columns) == 1:
        return columns[0]
    if (column or "text") in columns:
        return column or "text"
    wanted = f"no column of text {column!r}" if column else "no single column of text"
    names = ", ".join(f"{source}:{name}" for name in columns) or "none"
    raise ValueError(f"{source} has {wanted}; those there are: {names}")


def _failure(source: str, tried: str, error: Exception) -> DownloadError:
    reason = (str(error).strip().splitlines() or [""])[0]
    return DownloadError(
        f"cannot get {source}: {tried} failed with {type(error).__name__}: {reason}. "
        "Without a network use 'python-topics', which ships with Python, or the path of a text file"
    )
