import itertools
import json

import numpy as np
import pytest

from jaxlab.nn.checkpoints.vocabulary import gguf_tokenizer, sentencepiece_bpe, with_ends
from jaxlab.nn.tokenizer import Tokenizer, read_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs the models extra")
pytest.importorskip("jinja2", reason="needs the models extra")

CORPUS = ["the cat sat on the mat", "größe and 数字 and € 😀", "numbers 0123456789 are 42", "it's the cat's mat"] * 3
SPECIAL = ["<|end|>", "<|user|>", "<|model|>"]
TEMPLATE = (
    "{%- if tools is none and bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}{% if message.role not in ['user', 'model'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}\n"
    "    {% generation %}<|{{ message['role'] }}|>{{ message['content'] | trim }}{% endgeneration %}{{ eos_token }}"
    "{% if message.data is defined %}{{ message.data | tojson }}{% endif %}"
    "{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|model|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    settings = {
        "eos_token": "<|end|>",
        "bos_token": {"content": "<|user|>", "lstrip": False},
        "chat_template": TEMPLATE,
    }
    return Tokenizer(backend, settings)


@pytest.mark.parametrize("text", [*CORPUS[:4], "", " ", "a<|end|>b", "\n\n tab\t"])
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), special=True) == text


def test_special_tokens(tokenizer):
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (0, 1, 0)
    assert tokenizer.special_tokens == {"bos_token": "<|user|>", "eos_token": "<|end|>"}
    assert tokenizer.encode("<|model|>") == [2]
    assert tokenizer.decode([0, *tokenizer.encode("cat"), 0]) == "cat"
    assert Tokenizer(tokenizer.backend, {}).eos_id is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_the_single_texts_padded(tokenizer, side):
    texts = ["the cat", "it's the cat's mat", "数字"]
    tokens, mask = tokenizer.encode_batch(texts, side=side, length=40)
    assert tokens.shape == mask.shape == (3, 40)
    assert (tokens.dtype, mask.dtype) == (np.int32, bool)
    for row, real, text in zip(tokens, mask, texts, strict=True):
        single = tokenizer.encode(text)
        assert row[real].tolist() == single
        assert real[:: 1 if side == "right" else -1][: len(single)].all()
        assert (row[~real] == tokenizer.pad_id).all()
    assert tokenizer.encode_batch(texts)[0].shape[1] == max(len(tokenizer.encode(text)) for text in texts)


@pytest.mark.parametrize("text", [*CORPUS[:4], "€€😀😀", "a\ufffdb"])
def test_a_stream_never_cuts_a_character(tokenizer, text):
    tokens = tokenizer.encode(text)
    pieces = list(tokenizer.stream(iter(tokens)))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    assert len(tokens) > len(pieces) or text.isascii()


def test_a_stream_gives_each_piece_as_soon_as_it_is_whole(tokenizer):
    taken = []

    def tokens():
        for token in tokenizer.encode("the €€"):
            taken.append(token)
            yield token

    for piece in tokenizer.stream(tokens()):
        text = tokenizer.decode(taken)
        assert text.endswith(piece)
        assert not text.endswith("\ufffd")


def test_a_stream_that_breaks_off_within_a_character(tokenizer):
    tokens = tokenizer.encode("a€")
    assert "".join(tokenizer.stream(tokens[:-1])) == tokenizer.decode(tokens[:-1]) != "a€"


def test_a_stream_leaves_special_tokens_out(tokenizer):
    tokens = [0, *tokenizer.encode("cat"), 0, *tokenizer.encode(" mat"), 0]
    assert "".join(tokenizer.stream(tokens)) == "cat mat"
    assert "".join(tokenizer.stream(tokens, special=True)) == "<|end|>cat<|end|> mat<|end|>"


MESSAGES = [{"role": "user", "content": " hé <b> "}, {"role": "model", "content": "yes", "data": {"é": "<"}}]


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_chats_are_rendered_as_transformers_does(tokenizer, tmp_path, add_generation_prompt):
    transformers = pytest.importorskip("transformers", reason="needs the peers extra")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rendered = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=add_generation_prompt)
    assert rendered == theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert rendered.startswith('<|user|><|user|>hé <b><|end|><|model|>yes<|end|>{"é": "<"}')
    for text in CORPUS[:4]:
        assert theirs.encode(text) == tokenizer.encode(text)
    assert theirs.eos_token_id == tokenizer.eos_id


def test_a_template_that_fails_or_reaches_out(tokenizer):
    def render(template):
        return Tokenizer(tokenizer.backend, {"chat_template": template}).apply_chat_template(MESSAGES)

    with pytest.raises(ValueError, match="the chat template fails: unknown role system"):
        tokenizer.apply_chat_template([{"role": "system", "content": ""}])
    with pytest.raises(ValueError, match=r"the chat template fails: .*unsafe"):
        render("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match=r"the chat template fails: .*unsafe"):
        render("{{ messages.append(1) }}")
    with pytest.raises(ValueError, match="the chat template fails"):
        render("{% for %}")
    with pytest.raises(ValueError, match="this tokenizer has no chat template"):
        Tokenizer(tokenizer.backend, {}).apply_chat_template(MESSAGES)
    for template in ("{{ 1 / 0 }}", "{{ messages + 1 }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"):
        with pytest.raises(ValueError, match="the chat template fails"):
            render(template)
    for reaching in ("raise_exception.__globals__", "messages|attr('__class__')", "'{0.__class__}'.format(1)"):
        assert render("{{ " + reaching + " }}") == ""
    for template in (5, [5], [{"name": "default"}], {"default": "b"}):
        with pytest.raises(ValueError, match="chat_template"):
            render(template)
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    assert render(several) == "b"


def test_saved_and_read_again(tokenizer, tmp_path):
    tokenizer.backend.enable_padding(length=64)
    tokenizer.backend.enable_truncation(2)
    tokenizer.save(tmp_path)
    tokenizer.backend.no_padding()
    tokenizer.backend.no_truncation()
    again = read_tokenizer(tmp_path)
    assert again.encode(CORPUS[0]) == tokenizer.encode(CORPUS[0])  # neither cut nor filled up
    assert again.special_tokens == tokenizer.special_tokens
    assert again.chat_template == TEMPLATE
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")  # where newer checkpoints keep it
    assert read_tokenizer(tmp_path).chat_template == "{{ eos_token }}"


def test_bad_input(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="a batch needs at least one text"):
        tokenizer.encode_batch([])
    with pytest.raises(ValueError, match=r"a text has \d+ tokens, more than length=2"):
        tokenizer.encode_batch(["the cat sat on the mat"], length=2)
    with pytest.raises(ValueError, match="ids up to 299, but the model has embeddings for 256"):
        tokenizer.check_fits(256)
    tokenizer.check_fits(tokenizer.vocab_size)
    for texts in (["a", "b\ud800"], ["\udcff"]):
        with pytest.raises(ValueError, match="a text must be Unicode; character"):
            tokenizer.encode_batch(texts)
    with pytest.raises(ValueError, match="a text must be Unicode; character 1 is"):
        tokenizer.encode("a\ud800")
    for outside in (-1, 2**40):
        with pytest.raises(ValueError, match=f"a token id must be at least 0 and fit into 32 bits; got {outside}"):
            tokenizer.decode([1, outside])
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        read_tokenizer(tmp_path)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": 5}')
    with pytest.raises(ValueError, match="has the eos_token 5; it must be a text"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged"):
        read_tokenizer(tmp_path)


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["▁", "a", "b", "c", "ab", "▁a", "bc", "▁ab", "abc", "<|x|>"]
SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0]
KINDS = [2, 3, 3, *[6] * 256, *[1] * 9, 4]


def slow_sentencepiece(text):
    """Merge the pair with the best score, the leftmost of several, until none is left."""
    pieces = ["▁", *text.replace(" ", "▁")]
    while True:
        joined = [(i, a + b) for i, (a, b) in enumerate(itertools.pairwise(pieces))]
        pairs = [(SCORES[PIECES.index(piece)], -i) for i, piece in joined if piece in PIECES]
        if not pairs:
            break
        i = -max(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    ids = []
    for piece in pieces:
        ids += [PIECES.index(piece)] if piece in PIECES else [3 + byte for byte in piece.encode()]
    return ids


@pytest.mark.parametrize("text", ["abc", "ab", "bca", "a b c", "abcabc abbc", "é a", "cc"])
def test_sentencepiece_merges_by_score(text):
    backend = sentencepiece_bpe(PIECES, SCORES, KINDS)
    assert backend.encode(text).ids == slow_sentencepiece(text)
    assert backend.decode(backend.encode(text).ids) == text


def test_sentencepiece_of_a_file():
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.encode("ab") == [1, PIECES.index("▁ab")]
    assert tokenizer.encode("ab", special=False) == [PIECES.index("▁ab")]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert PIECES.index("<|x|>") in tokenizer.encode("a<|x|>b")
    # A continuation keeps the blank that the decoder drops at the start of a text.
    rest = tokenizer.encode("ab abc", special=False)[1:]
    assert "".join(tokenizer.stream(rest)) == "abc"
    assert "".join(tokenizer.stream(rest, before=tokenizer.encode("ab"))) == " abc"
    without = gguf_tokenizer(
        {**metadata, "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    )
    assert without.encode("ab") == [PIECES.index("ab")]


def byte_level_metadata(cut):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", "123 4", "Ġ t", "h e", "Ġt he"]
    tokens = ["<|end|>", *alphabet, *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": cut,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
    }


@pytest.mark.parametrize(
    ("cut", "numbers"),
    [
        ("gpt-2", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_how_a_text_is_cut(cut, numbers):
    metadata = byte_level_metadata(cut)
    tokenizer = gguf_tokenizer(metadata)
    pieces = [metadata["tokenizer.ggml.tokens"][i] for i in tokenizer.encode("1234 the")]
    assert pieces == [*numbers, "Ġthe"]
    assert tokenizer.encode("the<|end|>")[-1] == 0
    assert tokenizer.decode(tokenizer.encode("größe 1234 the")) == "größe 1234 the"


def test_ends_are_put_around_a_text():
    metadata = byte_level_metadata("gpt-2") | {"tokenizer.ggml.bos_token_id": 0}
    plain = gguf_tokenizer(metadata)
    both = gguf_tokenizer({**metadata, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert both.encode("the") == [0, *plain.encode("the"), 0]
    assert both.encode("the", special=False) == plain.encode("the")
    assert with_ends(plain.backend, {}, begin=True) is plain.backend


def test_vocabularies_that_cannot_be_used():
    metadata = byte_level_metadata("gpt-2")

    def refuse(message, **changes):
        with pytest.raises(ValueError, match=message):
            gguf_tokenizer(
                {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}, source="f"
            )

    refuse("f has a tokenizer of the unknown kind 'bert': known are gpt2, llama", model="bert")
    refuse(r"f cuts its text by the unknown rule 'olmo' \(tokenizer\.ggml\.pre\): known are .*smollm", pre="olmo")
    refuse("f has no vocabulary", tokens=[])
    refuse("f has no usable merges", merges=[])
    refuse("f has no usable merges", merges=["a b c"])
    refuse("f has a damaged vocabulary", merges=["zz y"])
    refuse("f has 263 tokens but 2 token types", token_type=[1, 1])
    refuse("f has 263 tokens, but eos_token = 999", eos_token_id=999)
    refuse("a vocabulary of 263 pieces needs as many scores; got 1", model="llama", scores=[1.0])


def test_settings_are_valid_json(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["eos_token"] == "<|end|>"
