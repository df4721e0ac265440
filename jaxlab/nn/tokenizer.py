"""Text to token ids and back: the fast tokenizers of checkpoints, and their chat templates.

A thin layer over the PyPI package ``tokenizers`` that gives NumPy arrays, knows the special tokens, renders chats as
``transformers`` does and decodes a stream without ever cutting a character. That package and ``jinja2`` are imported
when first used (``pip install 'jaxlab[models]'``).

Example::

    tokenizer = read_tokenizer("model")                                         # a folder with a tokenizer.json
    tokens, mask = tokenizer.encode_batch(["A first text.", "Another"], side="left")           # [2, t], int32 and bool
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxlab.nn.untrusted import read_object, refused

if TYPE_CHECKING:
    import tokenizers

__all__ = ["TOKENIZER_FILES", "Tokenizer", "read_tokenizer"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")

TokenIds = Iterable[int] | Int[Array | np.ndarray, " _"]


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with the settings of its checkpoint.

    Attributes:
      backend: the `tokenizers.Tokenizer` that does the work.
      settings: as in ``tokenizer_config.json``: ``bos_token``, ``eos_token``, ``pad_token``, ``chat_template``, ...
    """

    backend: "tokenizers.Tokenizer"
    settings: Mapping[str, Any]

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text."""
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text or a turn."""
        return self._special_id("eos_token")

    @property
    def pad_id(self) -> int:
        """Id that fills the shorter sequences of a batch: that of the padding, end or unknown token, else 0."""
        found = (self._special_id(name) for name in ("pad_token", "eos_token", "unk_token"))
        return next((index for index in found if index is not None), 0)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The named special tokens, such as ``{"eos_token": "<|im_end|>"}``."""
        named = {name: _content(self.settings.get(name)) for name in _SPECIAL}
        return {name: token for name, token in named.items() if token is not None}

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of chats, if the checkpoint has one."""
        template = self.settings.get("chat_template")
        if isinstance(template, list):  # several, each {"name": ..., "template": ...}
            with refused("chat_template"):
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template is not None and not isinstance(template, str):
            raise ValueError(f"chat_template must be a text or a list of named ones; got {template!r}")
        return template

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
          text: any string. The special tokens it spells out become these tokens.
          special: add the tokens that this tokenizer puts around a text, such as one that begins it.

        Raises:
          ValueError: if the text holds half a character (a lone surrogate), as undecodable bytes become.
        """
        _check_text(text)
        return list(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: TokenIds, *, special: bool = False) -> str:
        """Text of token ids; ``special`` spells out the special tokens, which are left out otherwise.

        Ids that the tokenizer does not know stand for nothing.

        Raises:
          ValueError: if an id is negative, as those are that stand for no token, or too large for any tokenizer.
        """
        ids = [int(token) for token in tokens]
        if outside := [index for index in ids if not 0 <= index < 2**32]:
            raise ValueError(f"a token id must be at least 0 and fit into 32 bits; got {outside[0]}")
        return self.backend.decode(ids, skip_special_tokens=not special)

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        side: Literal["left", "right"] = "right",
        length: int | None = None,
        special: bool = True,
    ) -> tuple[Int[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
        """Token ids of several texts in one array.

        Args:
          texts: at least one.
          side: where the padding goes: right to train and score, left to generate.
          length: number of columns; None means that of the longest text.
          special: as in `encode`.

        Returns:
          Ids, int32, and a mask that is False on padding.

        Raises:
          ValueError: if there are no texts, or one is longer than ``length`` or holds half a character.
        """
        if not texts:
            raise ValueError("a batch needs at least one text")
        if side not in ("left", "right"):
            raise ValueError(f"side must be 'left' or 'right'; got {side!r}")
        for text in texts:
            _check_text(text)
        rows = [entry.ids for entry in self.backend.encode_batch(list(texts), add_special_tokens=special)]
        longest = max(map(len, rows))
        if length is not None and longest > length:
            raise ValueError(f"a text has {longest} tokens, more than length={length}")
        tokens = np.full((len(rows), longest if length is None else length), self.pad_id, np.int32)
        mask = np.zeros(tokens.shape, bool)
        for i, row in enumerate(rows):
            columns = slice(tokens.shape[1] - len(row), None) if side == "left" else slice(len(row))
            tokens[i, columns], mask[i, columns] = row, True
        return tokens, mask

    def stream(self, tokens: TokenIds, *, before: Sequence[int] = (), special: bool = False) -> Iterator[str]:
        """Text of tokens as they come.

        The pieces joined are the text of all tokens. A character that is spread over several tokens comes with the last
        of them; one that is never completed comes as U+FFFD at the end.

        Args:
          tokens: ids, read one at a time.
          before: tokens that the text continues, such as a prompt. Many tokenizers drop the blank in front of the
            first word, which a continuation needs.
          special: as in `decode`.
        """
        # A piece is decoded together with the one before it, for the blank between two words belongs to neither alone.
        held = list(before)[-8:]
        known = len(held)
        for token in tokens:
            held.append(int(token))
            piece, text = self._last_piece(held, known, special)
            if piece and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # what an unfinished character decodes to
                yield piece
                held, known = held[known:], len(held) - known
        piece, _ = self._last_piece(held, known, special)
        if piece:
            yield piece

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """Render a chat as the text that the model was trained on.

        The template runs in Jinja's sandbox with the names that ``transformers`` gives it, for it comes with the
        checkpoint and is not to be trusted. `encode` the result with ``special=False``: it spells out its own.

        Args:
          messages: dicts with ``role`` and ``content``.
          add_generation_prompt: end with what begins the assistant's turn.
          variables: more names for the template, such as ``tools`` or ``enable_thinking``.

        Raises:
          ValueError: if there is no template, or it fails on these messages.
        """
        template = self.chat_template
        if template is None:
            raise ValueError("this tokenizer has no chat template")
        try:
            return _compile_template(template).render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, **self.special_tokens, **variables},
            )
        except ModuleNotFoundError:
            raise
        except Exception as error:  # a template may add a number to a text, or divide by zero
            raise ValueError(f"the chat template fails: {error}") from error

    def check_fits(self, vocab_size: int, *, source: str = "the model") -> None:
        """Raise ValueError if the tokenizer knows ids for which the model has no embedding."""
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"tokenizer and vocabulary do not belong together: the tokenizer has ids up to {self.vocab_size - 1}, "
                f"but {source} has embeddings for {vocab_size}"
            )

    def save(self, directory: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, which ``transformers.AutoTokenizer`` reads."""
        directory = Path(directory)
        self.backend.save(str(directory / _FILE))
        defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        # Named tokens without the flags, which tokenizer.json has, and no pointer to code that is not written.
        settings = {**defaults, **self.settings, **self.special_tokens}
        settings.pop("auto_map", None)
        (directory / _SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _special_id(self, name: str) -> int | None:
        token = _content(self.settings.get(name))
        return None if token is None else self.backend.token_to_id(token)

    def _last_piece(self, held: Sequence[int], known: int, special: bool) -> tuple[str, str]:
        shown, text = self.decode(held[:known], special=special), self.decode(held, special=special)
        return text[len(shown) :], text


def read_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer in the folder of a checkpoint.

    Padding and truncation that ``tokenizer.json`` asks for are switched off.

    Raises:
      FileNotFoundError: if the folder has no ``tokenizer.json``.
      ValueError: if one of the files is damaged.
    """
    directory = Path(directory)
    file = directory / _FILE
    if not file.is_file():
        raise FileNotFoundError(f"{directory} has no {_FILE}")
    try:
        backend = _import("tokenizers").Tokenizer.from_file(str(file))
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(f"{file} is no tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    settings = {**_read_json(directory / _SPECIAL_TOKENS), **_read_json(directory / _SETTINGS)}
    template = directory / _TEMPLATE
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    for name in _SPECIAL:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, Mapping) else token
        if not isinstance(content, str | None):
            raise ValueError(f"{directory} has the {name} {token!r}; it must be a text")
    return Tokenizer(backend, settings)


_FILE, _SETTINGS, _SPECIAL_TOKENS, _TEMPLATE = TOKENIZER_FILES
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this needs the package {name.partition('.')[0]}: pip install 'jaxlab[models]'"
        ) from error


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a text must be Unicode; character {error.start} is {text[error.start]!r}") from None


def _content(token: Any) -> str | None:
    """A special token is a string or, with its flags, a dict."""
    return token.get("content") if isinstance(token, Mapping) else token


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


@functools.lru_cache(maxsize=16)
def _compile_template(source: str) -> Any:
    import datetime

    jinja2, extensions, sandbox = map(_import, ("jinja2", "jinja2.ext", "jinja2.sandbox"))

    class Generation(extensions.Extension):
        """``{% generation %}`` marks what the model said, for training; here it is just rendered."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    # Unlike Jinja's own filter this one does not escape for HTML.
    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)
