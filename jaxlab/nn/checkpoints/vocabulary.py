"""Tokenizers rebuilt from a bare vocabulary, as GGUF and llama2.c files hold it.

Two kinds of byte-pair encoding are in use. GPT-2's maps bytes to printable characters, cuts the text by a regular
expression that differs between models, and carries its merges. SentencePiece's works on characters, writes a space as
``▁``, falls back to bytes, and carries a score for each piece; the merge with the highest score comes first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlab.nn.tokenizer import Tokenizer

__all__ = ["gguf_tokenizer", "sentencepiece_bpe", "with_ends"]


def gguf_tokenizer(metadata: Mapping[str, Any], *, source: str = "the file") -> Tokenizer:
    """Rebuild the tokenizer from the metadata of a GGUF file.

    Args:
      metadata: as in `jaxlab.nn.checkpoints.gguf.GGUF`.
      source: what an error calls it.

    Raises:
      ValueError: if the metadata lack it, or it is of an unknown kind, naming those that are known.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    model, pieces = get("model"), get("tokens")
    if model not in ("gpt2", "llama"):
        raise ValueError(f"{source} has a tokenizer of the unknown kind {model!r}: known are gpt2, llama")
    if not pieces:
        raise ValueError(f"{source} has no vocabulary (tokenizer.ggml.tokens)")
    kinds = get("token_type") or [_NORMAL] * len(pieces)
    if len(kinds) != len(pieces):
        raise ValueError(f"{source} has {len(pieces)} tokens but {len(kinds)} token types")
    named = {name: get(f"{key}_token_id") for name, key in _SPECIAL.items()}
    if outside := [f"{key} = {index}" for key, index in named.items() if index is not None and index >= len(pieces)]:
        raise ValueError(f"{source} has {len(pieces)} tokens, but {outside[0]}")
    settings: dict[str, Any] = {name: pieces[index] for name, index in named.items() if index is not None}
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    if model == "llama":
        prefix = bool(get("add_space_prefix", True))
        backend = sentencepiece_bpe(pieces, get("scores") or [], kinds, add_space_prefix=prefix)
    else:
        backend = _byte_level_bpe(pieces, get("merges") or [], kinds, get("pre", "default"), source)
    begin, end = get("add_bos_token", model == "llama"), get("add_eos_token", False)
    return Tokenizer(with_ends(backend, settings, begin=begin, end=end), settings)


def sentencepiece_bpe(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *, add_space_prefix: bool = True
) -> Any:
    """A `tokenizers.Tokenizer` like SentencePiece's byte-pair encoding.

    Args:
      pieces: the vocabulary in the order of the ids, with ``▁`` for a space and ``<0x0A>`` for a byte.
      scores: of each piece.
      kinds: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
      add_space_prefix: put a space in front of each text, and drop it again when decoding.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    if len(scores) != len(pieces):
        raise ValueError(f"a vocabulary of {len(pieces)} pieces needs as many scores; got {len(scores)}")
    ids = {piece: i for i, piece in enumerate(pieces)}
    mergeable = {piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _NORMAL}
    merges = []
    for piece in sorted(mergeable, key=lambda piece: (-scores[ids[piece]], ids[piece])):
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        whole = [(left, right) for left, right in halves if left in mergeable and right in mergeable]
        merges += sorted(whole, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    unknown = next((piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _UNKNOWN), None)
    backend = Tokenizer(models.BPE(ids, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
    prefix = [normalizers.Prepend("▁")] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip],
    )
    _add_special(backend, pieces, kinds)
    return backend


def with_ends(backend: Any, settings: Mapping[str, Any], *, begin: bool, end: bool = False) -> Any:
    """The tokenizer with its first token, last token or both put around each text."""
    from tokenizers import processors

    first = [settings["bos_token"]] if begin and "bos_token" in settings else []
    last = [settings["eos_token"]] if end and "eos_token" in settings else []
    if not first and not last:
        return backend
    around = [(token, backend.token_to_id(token)) for token in dict.fromkeys(first + last)]
    template = processors.TemplateProcessing(
        single=[*first, "$A", *last], pair=[*first, "$A", *last, *first, "$B", *last], special_tokens=around
    )
    if backend.pre_tokenizer is None:
        backend.post_processor = template
    else:
        backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is cut before bytes are merged, by ``tokenizer.ggml.pre``: GPT-2's own expression, that after splitting off
# every digit, or another one with digits by threes or one by one.
_GPT2 = ("gpt-2", "gpt2")
_SINGLE_DIGITS = ("smollm", "starcoder", "codeshell", "refact")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_EXPRESSIONS = {
    **dict.fromkeys(_LLAMA3, _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST),
}


def _byte_level_bpe(pieces: Sequence[str], merges: Sequence[str], kinds: Sequence[int], cut: str, source: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut not in _EXPRESSIONS)
    before: list[Any] = []
    if cut in _EXPRESSIONS:
        before = [pre_tokenizers.Split(Regex(_EXPRESSIONS[cut]), behavior="isolated", invert=False)]
    elif cut in _SINGLE_DIGITS:
        before = [pre_tokenizers.Digits(individual_digits=True)]
    elif cut not in _GPT2:
        known = ", ".join(sorted((*_GPT2, *_SINGLE_DIGITS, *_EXPRESSIONS)))
        raise ValueError(f"{source} cuts its text by the unknown rule {cut!r} (tokenizer.ggml.pre): known are {known}")
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{source} has no usable merges (tokenizer.ggml.merges)")
    try:
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        model = models.BPE(vocabulary, pairs, ignore_merges=cut in _LLAMA3)
    except Exception as error:  # a merge outside the vocabulary is a bare Exception
        raise ValueError(f"{source} has a damaged vocabulary: {error}") from error
    backend = Tokenizer(model)
    if "qwen" in cut:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    backend.decoder = decoders.ByteLevel()
    _add_special(backend, pieces, kinds)
    return backend


def _add_special(backend: Any, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    from tokenizers import AddedToken

    of_kind = {kind: [piece for piece, k in zip(pieces, kinds, strict=True) if k == kind] for kind in set(kinds)}
    control = of_kind.get(_CONTROL, []) + of_kind.get(_UNKNOWN, [])
    backend.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in of_kind.get(_USER_DEFINED, [])])
