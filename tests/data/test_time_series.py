"""Time series from files: every format, the bundled data sets, bad input."""

import importlib.util

import numpy as np
import pytest

from jaxlab.data.time_series import has_uea, load_uea, read_time_series

TS = """#comment
@problemName Tiny
@timeStamps false
@classLabel true left right
@data
1,2,3:4,5,6:left
7,?:8,9: right

"""


def test_ts_files(tmp_path) -> None:
    (tmp_path / "tiny.ts").write_text(TS)
    found = read_time_series(tmp_path / "tiny.ts")
    assert found.labels == ["left", "right"]
    np.testing.assert_array_equal(found.series[0], [[1, 4], [2, 5], [3, 6]])
    np.testing.assert_array_equal(found.series[1], [[7, 8], [np.nan, 9]])


def test_arrays_and_text(tmp_path) -> None:
    rng = np.random.default_rng(0)
    line, plane, cases = rng.normal(size=5), rng.normal(size=(5, 2)), rng.normal(size=(3, 5, 2))
    np.save(tmp_path / "line.npy", line)
    np.savez(tmp_path / "many.npz", plane=plane, cases=cases)
    np.savetxt(tmp_path / "named.csv", plane, delimiter=",", header="a,b", comments="")
    np.savetxt(tmp_path / "bare.csv", plane, delimiter=",")
    np.testing.assert_array_equal(read_time_series(tmp_path / "line.npy").series[0], line[:, None])
    many = read_time_series(tmp_path / "many.npz")
    assert many.labels == ["plane", "cases[0]", "cases[1]", "cases[2]"]
    np.testing.assert_array_equal(many.series[2], cases[1])
    for name in ("named", "bare"):
        found = read_time_series(tmp_path / f"{name}.csv")
        assert found.labels == [name]
        np.testing.assert_allclose(found.series[0], plane, rtol=1e-15)


@pytest.mark.skipif(
    importlib.util.find_spec("aeon") is None, reason="aeon, which bundles the data sets, is not installed"
)
def test_bundled_data_sets() -> None:
    train, test = load_uea("BasicMotions")
    assert {s.shape for s in train.series + test.series} == {(100, 6)}
    assert len(train.series) == len(test.series) == 40
    assert len(set(train.labels)) == 4
    train, test = load_uea("JapaneseVowels")
    assert (len(train.series), len(test.series)) == (270, 370)
    lengths = [len(s) for s in train.series + test.series]
    assert (min(lengths), max(lengths)) == (7, 29)


def test_folders_of_data_sets(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "Tiny"
    folder.mkdir()
    (folder / "Tiny_TRAIN.ts").write_text(TS)
    monkeypatch.setenv("JAXLAB_DATA", str(tmp_path))
    assert has_uea("Tiny")
    with pytest.raises(FileNotFoundError, match=r"Tiny_TEST\.ts: no such file"):
        load_uea("Tiny")
    (folder / "Tiny_TEST.ts").write_text(TS)
    for name in ("Tiny", folder):
        assert [len(part.series) for part in load_uea(name)] == [2, 2]
    assert not has_uea("Tinny")
    with pytest.raises(ValueError, match="unknown data set 'Tinny': did you mean 'Tiny'"):
        load_uea("Tinny")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "1", r"read from \.npy, \.npz, \.csv, \.ts files"),
        ("a.ts", "@classLabel true\n1,2:x\n", "no @data line"),
        ("a.ts", "@timeStamps true\n@data\n", "time stamps are not supported"),
        ("a.ts", "@classLabel true\n@data\n1,2:3:x\n", r"line 3: channels must have one length, got \[1, 2\]"),
        ("a.ts", "@data\n1,zwei\n", "line 2: 'zwei' is not a number"),
        ("a.ts", "@data\n\n", "no time series in the file"),
        ("a.csv", "a,b\n1,2\n3\n", "line 3: 1 columns where 2 were expected"),
        ("a.csv", "1,2\n3,x\n", "line 2: 'x' is not a number"),
        ("a.npy", "no numpy file", "cannot be read as numpy arrays"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_time_series(tmp_path / name)


def test_arrays_of_the_wrong_kind_are_named(tmp_path) -> None:
    np.save(tmp_path / "deep.npy", np.zeros((1, 2, 3, 4)))
    with pytest.raises(ValueError, match=r"'deep' must be an array of numbers with one to three axes.*\(1, 2, 3, 4\)"):
        read_time_series(tmp_path / "deep.npy")
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_time_series(tmp_path / "absent.npy")
