import json
import sys
import types

import numpy as np
import pytest

from jaxlab.data import DownloadError, load_text


@pytest.fixture
def rows(tmp_path):
    """A folder that the `datasets` library reads, with two columns of text and one of numbers."""
    folder = tmp_path / "multi"
    folder.mkdir()
    lines = [{"en": "A dog.", "de": "Ein Hund.", "id": 0}, {"en": "Two cats.", "de": None, "id": 1}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "test.jsonl").write_text(json.dumps({"en": "A fish.", "de": "Ein Fisch.", "id": 2}))
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


class TestHuggingFace:
    def test_column_and_split_of_a_local_data_set(self, rows, cache):
        assert load_text(f"hf:{rows}:en") == "A dog.\nTwo cats."
        assert load_text(f"hf:{rows}:de", split="test") == "Ein Fisch."
        assert load_text(f"hf:{rows}:de") == "Ein Hund.\n", "a missing value is an empty row"

    def test_column_must_be_one_of_text(self, rows, cache):
        with pytest.raises(ValueError, match=f"no single column of text; those there are: hf:{rows}:en, hf:{rows}:de$"):
            load_text(f"hf:{rows}")
        with pytest.raises(ValueError, match="no column of text 'id'"):
            load_text(f"hf:{rows}:id")

    def test_name_configuration_and_split_are_passed_on(self, monkeypatch):
        import datasets

        calls = []

        def load_dataset(path, config, *, split):
            calls.append((path, config, split))
            return datasets.Dataset.from_dict({"text": ["one", "two"], "other": ["x", "y"]})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        assert load_text("hf:Owner/corpus") == "one\ntwo"
        assert load_text("hf:Owner/corpus/raw-v1:other", split="validation") == "x\ny"
        assert load_text("hf:corpus") == "one\ntwo"
        assert calls == [
            ("Owner/corpus", None, "train"),
            ("Owner/corpus", "raw-v1", "validation"),
            ("corpus", None, "train"),
        ]

    def test_failing_download_says_what_was_tried(self, monkeypatch):
        import datasets

        def load_dataset(*args, **options):
            raise ConnectionError("Couldn't reach 'bentrevett/multi30k' on the Hub\nand a second line")

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(DownloadError) as error:
            load_text("hf:bentrevett/multi30k:en")
        message = str(error.value)
        assert message.startswith(
            "cannot get hf:bentrevett/multi30k:en: datasets.load_dataset failed with ConnectionError"
        )
        assert "Couldn't reach" in message
        assert "'python-topics'" in message
        assert "\n" not in message

    def test_missing_library_is_a_failed_download(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(DownloadError, match=r"cannot get hf:a/b: .* ModuleNotFoundError"):
            load_text("hf:a/b")

    def test_empty_column(self, monkeypatch):
        import datasets

        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict({"text": ["", ""]}))
        with pytest.raises(ValueError, match="hf:a/b is empty"):
            load_text("hf:a/b")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A real TFDS data set, prepared without a network and without TensorFlow."""
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("importlib_resources", reason="tensorflow_datasets imports it")

    class TinyLines(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"text": tfds.features.Text(), "title": tfds.features.Text(), "label": np.int64}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, download_manager):
            return {"train": self._generate_examples(3), "test": self._generate_examples(1)}

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {"text": f"Zeile {i} für {count}", "title": f"Titel {i}", "label": i}

    folder = tmp_path_factory.mktemp("tfds")
    TinyLines(data_dir=folder, file_format="array_record").download_and_prepare()
    return tfds, folder


@pytest.fixture
def source(prepared, monkeypatch):
    tfds, folder = prepared
    original = tfds.data_source
    monkeypatch.setattr(tfds, "data_source", lambda name, **options: original(name, data_dir=folder, **options))


class TestTfds:
    def test_feature_and_split(self, source):
        assert sorted(load_text("tfds:tiny_lines").splitlines()) == [f"Zeile {i} für 3" for i in range(3)]
        assert load_text("tfds:tiny_lines:title", split="test") == "Titel 0"

    def test_feature_must_be_one_of_text(self, source):
        with pytest.raises(ValueError, match=r"no column of text 'label'; those there are: .*tfds:tiny_lines:title"):
            load_text("tfds:tiny_lines:label")

    def test_failing_download_says_what_was_tried(self, monkeypatch):
        def data_source(*args, **options):
            raise OSError("Max retries exceeded")

        monkeypatch.setitem(sys.modules, "tensorflow_datasets", types.SimpleNamespace(data_source=data_source))
        with pytest.raises(
            DownloadError, match=r"cannot get tfds:lm1b: tensorflow_datasets\.data_source failed with OSError"
        ):
            load_text("tfds:lm1b")
