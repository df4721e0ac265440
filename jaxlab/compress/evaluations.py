"""Values of masks on disk: written as they come, so that a run that was killed continues where it was.

A file holds one game. Its first line says which, by a fingerprint of all that decides a value, and each further line is
a mask and its value; a line that was cut off by a kill is dropped, and its mask evaluated again::

    {"format": "jaxlab masks 1", "fingerprint": "5be1...", "parts": 30}
    3fffffff 0x1.fd54p-2

Example::

    cache = EvaluationCache("game.masks", num_players=30, fingerprint=fingerprint(params, batch))
    values = evaluate_masks(utility, masks, cache=cache)
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

from jaxlab.compress.masks import check_masks

__all__ = ["EvaluationCache", "fingerprint"]

_FORMAT = "jaxlab masks 1"


def fingerprint(*parts: Any) -> str:
    """A digest of arrays, trees of them, and anything with a `repr`: what decides the values of a game."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(parts):
        digest.update(jax.tree_util.keystr(path).encode())
        if hasattr(leaf, "dtype"):
            array = np.ascontiguousarray(jax.device_get(leaf))
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(array.reshape(-1).view(np.uint8).data)
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


class EvaluationCache:
    """Values of masks of one game, in memory and, with a path, in a file that grows.

    Args:
      path: the file, made with its folder if it is missing; None keeps the values in memory only.
      num_players: L.
      fingerprint: of the game.

    Raises:
      ValueError: if the file is of another game, or is no such file.
    """

    def __init__(self, path: str | Path | None, *, num_players: int, fingerprint: str = ""):
        self.path = None if path is None else Path(path)
        self.num_players = num_players
        self._values: dict[bytes, float] = {}
        self._header = {"format": _FORMAT, "fingerprint": fingerprint, "parts": num_players}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def __len__(self) -> int:
        return len(self._values)

    def find(self, masks: Any) -> tuple[Bool[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """Which masks are known, and their values, NaN where they are not."""
        keys = self._keys(masks)
        known = np.array([key in self._values for key in keys], bool)
        return known, np.array([self._values.get(key, np.nan) for key in keys], np.float32)

    def add(self, masks: Any, values: Float[np.ndarray, " n"]) -> None:
        """Remember values; they are in the file when this returns."""
        keys = self._keys(masks)
        new = {key: float(value) for key, value in zip(keys, values, strict=True) if key not in self._values}
        self._values |= new
        if self.path is None or not new:
            return
        lines = [f"{key.hex()} {value.hex()}\n" for key, value in new.items()]
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines.insert(0, json.dumps(self._header) + "\n")
        with self.path.open("a", encoding="ascii") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())

    def _keys(self, masks: Any) -> list[bytes]:
        return [row.tobytes() for row in np.packbits(check_masks(masks, self.num_players), axis=1)]

    def _read(self, path: Path) -> None:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        first, *rest = whole.decode("ascii", errors="replace").splitlines() or [""]
        try:
            header = json.loads(first) if first else None
        except ValueError:
            header = None
        if header is not None and (not isinstance(header, dict) or header.get("format") != _FORMAT):
            header = None
        if header is None and whole:
            raise ValueError(f"{path} is no file of mask values; name another one, or remove it")
        if header is not None and header != self._header:
            raise ValueError(
                f"{path} holds values of another game (another model, text or setting); name another file or remove it"
            )
        for number, line in enumerate(rest, 2):
            try:
                mask, value = line.split()
                self._values[bytes.fromhex(mask)] = float.fromhex(value)
            except ValueError:
                raise ValueError(f"{path}, line {number}: a mask and a value were expected, got {line!r}") from None
        if len(whole) < len(text):
            # What a kill cut off would run into the next line.
            with path.open("r+b") as file:
                file.truncate(len(whole))
            if not whole:
                path.unlink()
