import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlab.data import Vocabulary, split_words

TEXT = st.text(alphabet=string.printable + "éßΣİ", max_size=60)


def test_splits_letters_digits_and_marks():
    assert split_words("It's 42,\tNaïve!\n") == ["it", "'", "s", "4", "2", ",", "na", "ï", "ve", "!"]
    assert split_words("  \n") == []


@given(TEXT)
def test_splitting_joined_tokens_gives_them_again(text):
    words = split_words(text)
    assert split_words(" ".join(words)) == words
    assert "".join(words) == "".join(text.lower().split())


@given(TEXT)
def test_unknown_is_never_a_token(text):
    assert "<unk>" not in split_words(text + "<unk>")


@given(st.lists(st.sampled_from(["a", "b", "c", "dd", "."]), max_size=30), st.integers(2, 7))
def test_encoding_and_decoding(words, size):
    vocabulary = Vocabulary.build(words, size)
    ids = vocabulary.encode(words)
    assert ids.dtype == np.int32
    assert len(vocabulary) == min(size, 1 + len(set(words)))
    decoded = vocabulary.decode(ids)
    assert [d for d in decoded if d != "<unk>"] == [w for w in words if w in vocabulary.words]
    assert len(decoded) == len(words)
    if size > len(set(words)):
        assert decoded == words
    # No word left out is more frequent than one that is in.
    inside = [words.count(word) for word in vocabulary.words[1:]]
    outside = [words.count(word) for word in set(words) - set(vocabulary.words)]
    assert inside == sorted(inside, reverse=True)
    assert not outside or max(outside) <= min(inside)


def test_most_frequent_first_and_equals_in_order_of_appearance():
    vocabulary = Vocabulary.build(["b", "a", "c", "a", "d", "d"], 4)
    assert vocabulary.words == ("<unk>", "a", "d", "b")
    np.testing.assert_array_equal(vocabulary.encode(["d", "x", "b"]), [2, 0, 3])
    assert vocabulary.decode([0, 1]) == ["<unk>", "a"]


def test_share_outside_the_vocabulary():
    vocabulary = Vocabulary(("<unk>", "a"))
    assert vocabulary.out_of_vocabulary(["a", "b", "a", "<unk>"]) == 0.5
    assert np.isnan(vocabulary.out_of_vocabulary([]))


def test_unknown_in_the_text_keeps_id_zero():
    assert Vocabulary.build(["<unk>", "<unk>", "a"], 3).words == ("<unk>", "a")


def test_bad_input():
    with pytest.raises(ValueError, match="got size 1"):
        Vocabulary.build(["a"], 1)
    with pytest.raises(ValueError, match="the first word must be '<unk>'"):
        Vocabulary(("a", "b"))
    with pytest.raises(ValueError, match="'a' is there more than once"):
        Vocabulary(("<unk>", "a", "a"))
    for bad in (-1, 2):
        with pytest.raises(ValueError, match=rf"ids must lie in \[0, 2\); got {bad}"):
            Vocabulary(("<unk>", "a")).decode([bad])
