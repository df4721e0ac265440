"""The container of GGUF, versions 2 and 3: metadata, and tensors in blocks of a quantised type.

The file is a magic number and a version, then counts of tensors and of metadata, each of these as key, type and value
(strings have a length in front, arrays a type and a length), then name, sizes, type and place of each tensor, and the
data, aligned. All is little-endian. The package ``gguf`` is what dequantises the blocks.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["StoredTensor", "read_gguf"]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as it lies in the file.

    Attributes:
      shape: slowest axis first.
      kind: number of its type, such as 3 for Q4_1.
      data: its bytes, mapped.
    """

    shape: tuple[int, ...]
    kind: int
    data: np.ndarray

    def dequantize(self, name: str) -> np.ndarray:
        """Its values, float32; ValueError, with this name, if the package cannot dequantise the type."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(self.kind)
        unquantised = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
        if kind.name in unquantised:
            return self.data.view(unquantised[kind.name]).astype(np.float32, copy=False).reshape(self.shape)
        try:
            rows = self.data.reshape(*self.shape[:-1], -1)
            return np.asarray(dequantize(rows, kind), np.float32).reshape(self.shape)
        except NotImplementedError as error:
            raise ValueError(f"tensor {name} has the type {kind.name}, which gguf cannot dequantise") from error


def read_gguf(path: str | Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata by key, arrays as lists, and tensors by name.

    Raises:
      ModuleNotFoundError: if the package ``gguf`` is not installed.
      ValueError: if the file is no GGUF file, is truncated, or has a tensor of an unknown type.
    """
    path = Path(path)
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a .gguf file needs the package gguf: pip install 'jaxlab[models]'") from error
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is no GGUF file")
    data: Any = np.memmap(path, np.uint8, "r").view(np.ndarray)
    cursor = _Cursor(memoryview(data), str(path))
    version = cursor.number("I")
    if version not in (2, 3):
        what = "big-endian" if version and version & 0xFFFF == 0 else f"of version {version}"
        raise ValueError(f"{path} is {what}; GGUF files of versions 2 and 3, little-endian, can be read")
    tensor_count, entry_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    placed = {}
    for _ in range(tensor_count):
        name = cursor.text()
        sizes = [cursor.number("Q") for _ in range(cursor.number("I"))]
        placed[name] = (tuple(reversed(sizes)), cursor.number("I"), cursor.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{path} has the alignment {alignment}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in placed.items():
        if kind not in {known.value for known in GGMLQuantizationType}:
            raise ValueError(f"{path}: tensor {name} has the unknown type {kind}")
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not shape or shape[-1] % block:
            raise ValueError(f"{path}: tensor {name} of shape {shape} does not consist of blocks of {block}")
        begin, end = start + offset, start + offset + math.prod(shape) // block * size
        if end > len(data):
            raise ValueError(f"{path} is truncated: tensor {name} ends at byte {end} of {len(data)}")
        tensors[name] = StoredTensor(shape, kind, data[begin:end])
    return metadata, tensors


_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """A place in the file; everything that is read there moves it on."""

    def __init__(self, data: memoryview, source: str) -> None:
        self.at = 4
        self._data, self._source = data, source
        self._unpack: dict[str, Callable[..., Any]] = {
            form: struct.Struct("<" + form).unpack_from for form in _FORMATS.values()
        }

    def number(self, form: str) -> Any:
        try:
            (value,) = self._unpack[form](self._data, self.at)
        except struct.error:
            raise self._truncated() from None
        self.at += struct.calcsize("<" + form)
        return value

    def text(self) -> str:
        length = self.number("Q")
        begin, self.at = self.at, self.at + length
        if self.at > len(self._data):
            raise self._truncated()
        try:
            return str(self._data[begin : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self._source} is damaged: text at byte {begin} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _FORMATS:
            return self.number(_FORMATS[kind])
        if kind != _ARRAY:
            raise ValueError(f"{self._source} is damaged: metadata of the unknown type {kind} at byte {self.at}")
        inner, length = self.number("I"), self.number("Q")
        if inner == _ARRAY:
            raise ValueError(f"{self._source} is damaged: an array of arrays at byte {self.at}")
        if inner not in _FORMATS:
            if length > len(self._data) - self.at:  # each entry takes a byte at least
                raise self._truncated()
            return [self.value(inner) for _ in range(length)]
        dtype = np.dtype("<" + _FORMATS[inner])
        if length * dtype.itemsize > len(self._data) - self.at:
            raise self._truncated()
        begin, self.at = self.at, self.at + length * dtype.itemsize
        return np.frombuffer(self._data[begin : self.at], dtype).tolist()

    def _truncated(self) -> ValueError:
        return ValueError(f"{self._source} is truncated: its metadata go beyond its {len(self._data)} bytes")
