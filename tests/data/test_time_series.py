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


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(
    ("header", "expected"),
    [("", 0), ("a,b\n", 0), (",b\n", 0), ("größe,µ\n", 0), ("# a,b\n", 0), ("\n  \n", 0), ("0,1\n", 1), ("?,1\n", 1)],
)
def test_a_first_line_without_numbers_is_one_of_names(tmp_path, encoding, header, expected) -> None:
    """A byte-order mark is no part of the first cell: it cost the first row once."""
    (tmp_path / "a.CSV").write_text(header + "1,2\r\n3,4\n \n", encoding=encoding)
    found = read_time_series(tmp_path / "a.CSV").series[0]
    assert found.shape == (2 + expected, 2)
    np.testing.assert_array_equal(found[expected:], [[1, 2], [3, 4]])


def test_what_a_numpy_file_holds_decides(tmp_path) -> None:
    np.save(tmp_path / "array.npy", np.ones((3, 2)))
    np.savez(tmp_path / "arrays.npz", a=np.ones((3, 2)), b=np.ones(4))
    (tmp_path / "array.npy").rename(tmp_path / "other.npz")
    (tmp_path / "arrays.npz").rename(tmp_path / "others.npy")
    assert [s.shape for s in read_time_series(tmp_path / "other.npz").series] == [(3, 2)]
    assert read_time_series(tmp_path / "others.npy").labels == ["a", "b"]


def test_ts_files_with_tabs_and_comments(tmp_path) -> None:
    (tmp_path / "a.ts").write_text("@classLabel\ttrue\tx\n@DATA\n# a comment\n1,2:x\n")
    found = read_time_series(tmp_path / "a.ts")
    assert found.labels == ["x"]
    np.testing.assert_array_equal(found.series[0], [[1], [2]])


def test_text_of_another_encoding_and_folders_are_named(tmp_path) -> None:
    for name in ("a.csv", "a.ts"):
        (tmp_path / name).write_text("größe\n1\n", encoding="latin-1")
        with pytest.raises(ValueError, match=rf"{name}: is not text in UTF-8 .* at byte 2"):
            read_time_series(tmp_path / name)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match="is a folder, not a file"):
        read_time_series(tmp_path / "folder.csv")


@pytest.mark.parametrize("shape", [(0,), (0, 2), (5, 0), (2, 0, 3)])
def test_empty_arrays_are_named(tmp_path, shape) -> None:
    np.save(tmp_path / "a.npy", np.zeros(shape))
    with pytest.raises(ValueError, match=r"a\.npy: series 'a.*' is empty"):
        read_time_series(tmp_path / "a.npy")


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
        ("a.csv", "x;y\n3;4\n", "line 2: '3;4' is not a number; values are separated by commas"),
        ("a.csv", "1\t2\n3\t4\n", r"line 2: '3\\t4' is not a number; values are separated by commas"),
        ("a.csv", "NA,2\n3,4\n", "line 1: 'NA' is not a number$"),
        ("a.csv", "1,2,\n", "line 1: '' is not a number$"),
        ("a.csv", "", "series 'a' is empty"),
        ("a.csv", "x,y\n", "series 'a' is empty"),
        ("a.ts", "@classLabel true x\n@data\nx\n", "line 3: a label without values"),
        ("a.npz", "", "cannot be read as numpy arrays"),
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
