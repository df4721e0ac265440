import gzip
import subprocess
import sys

import numpy as np
import pytest

from jaxlab.data import Vocabulary, load_text, resolve, split_words


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.delenv("JAXLAB_DATA", raising=False)


class TestOfflineNames:
    def test_python_topics(self, no_data):
        """465,048 characters, 120,566 tokens, 9.8 % and 4.5 % outside the vocabulary in Python 3.11.7.

        The reference changes with the language from version to version: for others the bounds are wide.
        """
        text = load_text("python-topics")
        assert 400_000 < len(text) < 750_000
        words = split_words(text)
        assert 100_000 < len(words) < 200_000
        for size, share in ((512, 0.098), (1024, 0.045)):
            assert Vocabulary.build(words, size).out_of_vocabulary(words) == pytest.approx(share, rel=0.2)
        if sys.version_info[:2] == (3, 11):
            # Patch releases change it too: 3.11.2 has 466,097 characters and 119,445 tokens.
            assert len(text) == pytest.approx(465_048, rel=0.02)
            assert len(words) == pytest.approx(120_566, rel=0.02)

    def test_python_source(self, no_data):
        text = load_text("python-source")
        assert len(text) > 2_000_000
        assert "def " in text

    def test_no_splits(self, no_data):
        with pytest.raises(ValueError, match="python-topics has no splits; got split='train'"):
            load_text("python-topics", split="train")

    def test_unknown(self, no_data):
        with pytest.raises(ValueError, match=r"did you mean 'python-topics'\? known are python-source, python-topics"):
            load_text("python-topic")


class TestDataFolder:
    """The layout that DATA documents for the two corpora."""

    def test_tinyshakespeare(self):
        if not has_text("tinyshakespeare"):
            pytest.skip("needs $JAXLAB_DATA/tinyshakespeare")
        text = load_text("tinyshakespeare")
        assert len(text) == 1_115_394
        assert text.startswith("First Citizen:")

    def test_wikitext2(self):
        if not has_text("wikitext2"):
            pytest.skip("needs $JAXLAB_DATA/wikitext2")
        valid, test = load_text("wikitext2", split="valid"), load_text("wikitext2", split="test")
        assert (len(valid.split()), len(test.split())) == (213_886, 241_211)
        assert load_text("wikitext2") == f"{test}\n{valid}"


def has_text(name):
    try:
        return resolve(name).is_dir()
    except ValueError:
        return False


class TestFiles:
    def test_plain_and_gzip(self, tmp_path):
        (tmp_path / "a.txt").write_text("Déjà vu\n", encoding="utf-8")
        with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
            file.write("Déjà vu\n")
        assert load_text(tmp_path / "a.txt") == load_text(str(tmp_path / "b.txt.gz")) == "Déjà vu\n"

    def test_folder(self, tmp_path):
        (tmp_path / "LICENSE.md").write_text("free")
        with pytest.raises(ValueError, match=r"holds no \.txt or \.txt\.gz file"):
            load_text(tmp_path)
        for name in ("valid", "test"):
            (tmp_path / f"{name}.txt").write_text(name)
        assert load_text(tmp_path) == "test\nvalid"
        assert load_text(tmp_path, split="valid") == "valid"
        with pytest.raises(ValueError, match="has no split 'train'; it has test, valid"):
            load_text(tmp_path, split="train")
        (tmp_path / "train.txt").write_text("train")
        assert load_text(tmp_path) == "train"

    def test_folder_by_name(self, tmp_path, monkeypatch):
        (tmp_path / "poems").mkdir()
        (tmp_path / "poems" / "input.txt").write_text("O rose")
        monkeypatch.setenv("JAXLAB_DATA", str(tmp_path))
        assert load_text("poems") == "O rose"

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("empty.txt", b"", "empty.txt is empty$"),
            ("blank.txt", b" \n\n", "blank.txt is empty$"),
            (
                "latin1.txt",
                "café".encode("latin-1"),
                r"latin1.txt is not UTF-8 text: unexpected end of data at byte 3$",
            ),
            ("picture.png", b"\x89PNG\r\n", r"picture.png is not UTF-8 text: invalid start byte at byte 0$"),
            ("zeros.bin", b"ab\0c", "zeros.bin is binary, not text: character 2 is NUL$"),
            ("not.gz", b"plain text", "not.gz is not a complete gzip file: Not a gzipped file"),
            ("cut.gz", gzip.compress(b"word " * 1000, mtime=0)[:-20], "cut.gz is not a complete gzip file: "),
            (
                "damaged.gz",
                gzip.compress(b"word " * 9, mtime=0)[:12] + b"\xff" * 20,
                "damaged.gz is not a complete gzip file: ",
            ),
        ],
    )
    def test_bad_file(self, tmp_path, name, content, message):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            load_text(tmp_path / name)
        assert "\n" not in str(error.value)

    def test_missing_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no such file or folder: .*nothing\.txt"):
            load_text(tmp_path / "nothing.txt")

    def test_split_of_a_file(self, tmp_path):
        (tmp_path / "a.txt").write_text("a")
        with pytest.raises(ValueError, match="has no splits; got split='test'"):
            load_text(tmp_path / "a.txt", split="test")


def test_import_is_light():
    code = "import sys, jaxlab.data; print({'datasets', 'tensorflow_datasets', 'tensorflow'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_words_of_a_file_through_to_ids(tmp_path):
    (tmp_path / "a.txt").write_text("The cat, the dog: 12 cats.")
    words = split_words(load_text(tmp_path / "a.txt"))
    assert words == ["the", "cat", ",", "the", "dog", ":", "1", "2", "cats", "."]
    np.testing.assert_array_equal(Vocabulary.build(words, 3).encode(words), [1, 2, 0, 1, 0, 0, 0, 0, 0, 0])
