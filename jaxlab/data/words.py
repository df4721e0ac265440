"""Word tokens: a split of text into words, digits and marks, and a vocabulary of the most frequent ones."""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int

__all__ = ["Vocabulary", "split_words"]


def split_words(text: str) -> list[str]:
    """Split lower-cased text into runs of the letters a-z, single digits and single other characters; drop white space.

    Letters outside a-z are tokens of their own. Splitting tokens joined by spaces gives the same tokens again.
    """
    return _TOKEN.findall(text.lower())


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Words and their ids; id 0 is ``<unk>``, which `split_words` never gives and which stands for all other words.

    Attributes:
      words: the word of each id.

    Raises:
      ValueError: if ``words`` does not start with ``<unk>`` or has a word twice.

    Example::

        words = split_words(load_text("python-topics"))
        vocabulary = Vocabulary.build(words, 512)
        tokens = vocabulary.encode(words)
    """

    words: tuple[str, ...]

    def __post_init__(self):
        if not self.words or self.words[0] != _UNKNOWN:
            raise ValueError(f"the first word must be {_UNKNOWN!r}; got {self.words[:1]}")
        if len(self._ids) != len(self.words):
            twice = collections.Counter(self.words).most_common(1)[0][0]
            raise ValueError(f"words must differ; {twice!r} is there more than once")

    @classmethod
    def build(cls, words: Iterable[str], size: int) -> "Vocabulary":
        """Take ``<unk>`` and the ``size - 1`` most frequent words (all, if fewer); of equals, those that come first.

        Raises:
          ValueError: if ``size`` is below 2.
        """
        if size < 2:
            raise ValueError(f"a vocabulary needs room for {_UNKNOWN!r} and a word; got size {size}")
        counts = collections.Counter(words)
        del counts[_UNKNOWN]
        return cls((_UNKNOWN, *(word for word, _ in counts.most_common(size - 1))))

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Iterable[str]) -> Int[np.ndarray, " t"]:
        """Ids of the words, int32; 0 for words outside the vocabulary."""
        return np.fromiter((self._ids.get(word, 0) for word in words), np.int32)

    def decode(self, ids: Iterable[int] | Int[np.ndarray, " t"]) -> list[str]:
        """Words of the ids.

        Raises:
          ValueError: if an id is negative or not below the size of the vocabulary.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < len(self):
                raise ValueError(f"ids must lie in [0, {len(self)}); got {i}")
        return [self.words[i] for i in ids]

    def out_of_vocabulary(self, words: Iterable[str]) -> float:
        """Share of the words, in [0, 1], that are not in the vocabulary; NaN if there are no words."""
        ids = self.encode(words)
        return float(np.mean(ids == 0)) if ids.size else float("nan")

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


_TOKEN = re.compile(r"[a-z]+|[0-9]|[^\sa-z0-9]")
_UNKNOWN = "<unk>"
