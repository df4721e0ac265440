"""Named tensors in safetensors files, read lazily and written as a stream.

A safetensors file is eight bytes of header length, a JSON header ``{name: {dtype, shape, data_offsets}}`` and the data
of all tensors, little-endian and in C order; a large checkpoint is several such files and an index of which tensor is
in which. Nothing in it is ever executed, unlike a pickle (``pytorch_model.bin``), which is refused.

Reading maps the files into memory: a tensor is a read-only view whose pages are loaded when they are touched, so that
a slice of it costs a slice. Writing needs the names, shapes and dtypes first and then takes the tensors in any order,
each going straight to its place on disk. So a tool that turns one checkpoint into another holds one tensor at a time,
however large the two are::

    tensors = open_tensors("model")
    half = {name: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16) for name, spec in tensors.specs.items()}
    with TensorWriter("half", half) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)

The format is parsed here because the PyPI package copies every tensor that it reads into NumPy, and can write a file
only from all its tensors at once. The tests read and write with that package on the other side.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["TensorWriter", "Tensors", "open_tensors"]

_Spec = jax.ShapeDtypeStruct


class Tensors(Mapping[str, np.ndarray]):
    """A mapping from names to arrays that are read when they are asked for.

    Args:
      entries: for each name the shape and dtype, and a function that reads the tensor.
      sliceable: what is read is a view, so that a slice of it costs a slice.
    """

    def __init__(
        self, entries: Mapping[str, tuple[jax.ShapeDtypeStruct, Callable[[], np.ndarray]]], *, sliceable: bool = True
    ) -> None:
        self._entries = dict(entries)
        self.sliceable = sliceable

    @property
    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of every tensor; reads none of them."""
        return {name: spec for name, (spec, _) in self._entries.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._entries[name][1]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def open_tensors(path: str | Path) -> Tensors:
    """Open the tensors of a checkpoint without reading them.

    Args:
      path: a ``.safetensors`` file, or a folder with a ``model.safetensors.index.json`` and its files, or with one
        ``.safetensors`` file.

    Returns:
      A mapping whose values are read-only views of the files.

    Raises:
      FileNotFoundError: if there is nothing, or a file that the index names is missing.
      ValueError: if a file is truncated or malformed, the index and its files disagree, or the folder has only pickles.
    """
    path = Path(path)
    if path.is_file():
        return Tensors(_open_file(path))
    if not path.is_dir():
        raise FileNotFoundError(f"no such checkpoint: {path}")
    index = path / _INDEX
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if (path / _SINGLE).is_file():
            files = [path / _SINGLE]
        if len(files) > 1:
            raise ValueError(f"{path} has {len(files)} .safetensors files but no {_INDEX} that says what is where")
        if not files:
            raise _nothing_to_read(path)
        return Tensors(_open_file(files[0]))
    weight_map = _read_index(index)
    entries = {}
    for file in sorted(set(weight_map.values())):
        if not (path / file).is_file():
            raise FileNotFoundError(f"{path} lacks {file}, which {_INDEX} names: the checkpoint is incomplete")
        found = _open_file(path / file)
        for name in (name for name, holder in weight_map.items() if holder == file):
            if name not in found:
                raise ValueError(f"{path / file} lacks the tensor {name}, which {_INDEX} places there")
            entries[name] = found[name]
    return Tensors(entries)


class TensorWriter:
    """Writes a checkpoint of safetensors files, a tensor at a time; a context manager.

    The files have other names until `close`, which the end of the context calls. After an error, or when the process
    dies, no file is left that could be taken for a part of a checkpoint.

    Args:
      directory: where to write; made if it is missing.
      specs: shape and dtype of every tensor, in the order in which they are laid out.
      max_shard_size: most bytes of tensors in a file, except that a tensor is never cut.
      overwrite: replace the tensors of a directory that is not empty.

    Raises:
      FileExistsError: if the directory is not empty and ``overwrite`` is false.
      ValueError: if there are no tensors, or one has a dtype that the format lacks.
    """

    def __init__(
        self,
        directory: str | Path,
        specs: Mapping[str, Any],
        *,
        max_shard_size: int = 5_000_000_000,
        overwrite: bool = False,
    ) -> None:
        if not specs:
            raise ValueError("a checkpoint needs at least one tensor")
        if max_shard_size < 1:
            raise ValueError(f"max_shard_size must be at least 1 byte; got {max_shard_size}")
        self._directory = Path(directory)
        check_writable(self._directory, overwrite=overwrite)
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in self._directory.glob("*.safetensors" + _PARTIAL):  # by a process that died
            left.unlink(missing_ok=True)
        self._specs = {name: _Spec(tuple(spec.shape), np.dtype(spec.dtype)) for name, spec in specs.items()}
        shards = _cut(self._specs, max_shard_size)
        names = [_SINGLE] if len(shards) == 1 else [_SHARD.format(i + 1, len(shards)) for i in range(len(shards))]
        self._file_of = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        self._offset: dict[str, int] = {}
        self._left = set(self._specs)
        try:
            for file, shard in zip(names, shards, strict=True):
                self._lay_out(file, shard)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, tensor: Any) -> None:
        """Store one tensor, converted to the dtype it was announced with.

        Raises:
          ValueError: if the tensor was not announced, was written before, or has another shape.
        """
        if name not in self._specs:
            raise ValueError(f"tensor {name} was not announced to the writer")
        if name not in self._left:
            raise ValueError(f"tensor {name} was written before")
        spec, value = self._specs[name], np.asarray(tensor)
        if value.shape != spec.shape:
            raise ValueError(f"tensor {name} was announced with shape {spec.shape}; got {value.shape}")
        value = np.ascontiguousarray(value, dtype=spec.dtype)
        with (self._directory / (self._file_of[name] + _PARTIAL)).open("r+b") as file:
            file.seek(self._offset[name])
            file.write(value.reshape(-1).view(np.uint8).data)
        self._left.remove(name)

    def close(self) -> None:
        """Give the files their names and write the index.

        Raises:
          ValueError: if a tensor was not written; the files are removed.
        """
        if self._left:
            self.abort()
            raise ValueError(f"{len(self._left)} tensors were never written, the first is {min(self._left)}")
        for stale in [*self._directory.glob("*.safetensors"), self._directory / _INDEX]:
            stale.unlink(missing_ok=True)
        files = sorted(set(self._file_of.values()))
        for file in files:
            os.replace(self._directory / (file + _PARTIAL), self._directory / file)
        if len(files) > 1:
            total = sum(_nbytes(spec) for spec in self._specs.values())
            index = {"metadata": {"total_size": total}, "weight_map": self._file_of}
            (self._directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def abort(self) -> None:
        """Remove what was written."""
        for file in set(self._file_of.values()):
            (self._directory / (file + _PARTIAL)).unlink(missing_ok=True)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _lay_out(self, file: str, shard: list[str]) -> None:
        """Write the header, and set the file to its final size so that a full disk is found early."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
        offset = 0
        for name in shard:
            spec = self._specs[name]
            end = offset + _nbytes(spec)
            header[name] = {
                "dtype": _name_of_dtype(name, spec.dtype),
                "shape": spec.shape,
                "data_offsets": [offset, end],
            }
            self._offset[name], offset = offset, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        for name in shard:
            self._offset[name] += 8 + len(text)
        with (self._directory / (file + _PARTIAL)).open("wb") as target:
            target.write(len(text).to_bytes(8, "little") + text)
            target.truncate(8 + len(text) + offset)


def check_writable(directory: Path, *, overwrite: bool) -> None:
    """Raise FileExistsError for a directory that holds something and may not be overwritten, or that is a file."""
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file; a checkpoint is written as a folder")
    if not overwrite and directory.is_dir() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; say overwrite=True to replace the checkpoint in it")


_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = "model-{:05d}-of-{:05d}.safetensors"
_PARTIAL = ".partial"
_LONGEST_HEADER = 100_000_000  # bytes, the format's own limit
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def _open_file(path: Path) -> dict[str, tuple[jax.ShapeDtypeStruct, Callable[[], np.ndarray]]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"{path} is truncated or no safetensors file: a header of {length} bytes in {size}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            fields = {}
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                fields[name] = entry["dtype"], tuple(entry["shape"]), begin, end
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is no safetensors file: its header cannot be read ({error!r})") from None
    start = 8 + length
    entries: dict[str, tuple[jax.ShapeDtypeStruct, Callable[[], np.ndarray]]] = {}
    data: np.ndarray = np.memmap(path, np.uint8, "r") if size > start else np.zeros(0, np.uint8)
    for name, (dtype, shape, begin, end) in fields.items():
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"{path}: tensor {name} has the unknown dtype {dtype!r}")
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, begin, end))
        if not whole or end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise ValueError(f"{path}: tensor {name} of shape {shape} and dtype {dtype} cannot lie at {begin}:{end}")
        if start + end > size:
            raise ValueError(f"{path} is truncated: tensor {name} ends at byte {start + end} of {size}")
        spec = _Spec(shape, _DTYPES[dtype])
        entries[name] = (spec, _View(data, start + begin, start + end, spec))
    return entries


class _View:
    """Reads one tensor as a view of the mapped file."""

    def __init__(self, data: np.ndarray, begin: int, end: int, spec: jax.ShapeDtypeStruct) -> None:
        self._data, self._begin, self._end, self._spec = data, begin, end, spec

    def __call__(self) -> np.ndarray:
        raw = self._data[self._begin : self._end].view(np.ndarray)
        return raw.view(self._spec.dtype).reshape(self._spec.shape)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        named = weight_map and all(isinstance(file, str) for file in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of tensors ({error!r})") from None
    if not named:
        raise ValueError(f"{path} is no index of tensors: it names no files")
    # A name from an untrusted file must not lead out of the folder.
    if outside := [
        file for file in weight_map.values() if Path(file).name != file or not file.endswith(".safetensors")
    ]:
        raise ValueError(f"{path} names {outside[0]!r}, which is no .safetensors file of its folder")
    return weight_map


def _nothing_to_read(path: Path) -> Exception:
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(path.glob(pattern))]
    if pickles:
        return ValueError(
            f"{path} holds its weights as a pickle ({pickles[0]}), which can run any code and is never loaded; "
            "convert it to safetensors"
        )
    return FileNotFoundError(f"{path} holds no .safetensors file")


def _cut(specs: Mapping[str, jax.ShapeDtypeStruct], most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + _nbytes(spec) > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += _nbytes(spec)
    return shards


def _nbytes(spec: jax.ShapeDtypeStruct) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _name_of_dtype(name: str, dtype: np.dtype) -> str:
    for spelling, known in _DTYPES.items():
        if known == dtype:
            return spelling
    raise ValueError(f"tensor {name} has dtype {dtype}, which safetensors does not have")
