from pathlib import Path

import pytest

from jaxlab.data import resolve


@pytest.fixture
def folder(tmp_path, monkeypatch):
    root = tmp_path / "data"
    for name in ("corn", "wheat"):
        (root / name).mkdir(parents=True)
        (root / name / "table.csv").write_text("1")
    (root / "wheat" / "notes.txt").write_text("dry")
    (root / "README.md").write_text("not a data set")
    monkeypatch.setenv("JAXLAB_DATA", str(root))
    monkeypatch.chdir(tmp_path)
    return root


def test_a_path_comes_before_the_folder_before_what_is_built_in(folder, tmp_path):
    built_in = {"wheat": lambda: "built in", "rye": lambda: "built in"}
    assert resolve("rye", built_in=built_in) == "built in"
    assert resolve("wheat", built_in=built_in) == folder / "wheat"
    (tmp_path / "wheat").mkdir()
    assert resolve("wheat", built_in=built_in) == Path("wheat")
    assert resolve(folder / "corn" / "table.csv") == folder / "corn" / "table.csv"


def test_only_what_is_asked_for_is_loaded(folder):
    def explode():
        raise AssertionError("must not be called")

    assert resolve("rye", built_in={"rye": lambda: 1, "oats": explode}) == 1
    assert resolve("corn", built_in={"corn": explode}) == folder / "corn"


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "corpus").mkdir()
    assert resolve("~/corpus") == tmp_path / "corpus"


def test_folders_that_hold_nothing_of_the_kind_do_not_count(folder):
    assert resolve("wheat", holding="*.txt") == folder / "wheat"
    with pytest.raises(ValueError, match=r"unknown data set 'corn': known are wheat$"):
        resolve("corn", holding="*.txt")


def test_unknown_name_suggests_the_nearest_and_lists_all(folder):
    with pytest.raises(
        ValueError, match=r"unknown data set 'wheet': did you mean 'wheat'\? known are corn, rye, wheat$"
    ):
        resolve("wheet", built_in={"rye": lambda: 1})
    with pytest.raises(ValueError, match=r"unknown data set '': known are corn, wheat$"):
        resolve("")


def test_unknown_name_without_a_folder_says_so(monkeypatch):
    monkeypatch.delenv("JAXLAB_DATA", raising=False)
    with pytest.raises(ValueError, match=r"known are none \(\$JAXLAB_DATA, a folder of data sets, is not set\)"):
        resolve("wheat")


@pytest.mark.parametrize("name", ["missing.txt", "some/where", Path("wheet")])
def test_missing_path(folder, name):
    with pytest.raises(FileNotFoundError, match=f"no such file or folder: {name}"):
        resolve(name)


def test_data_folder_that_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXLAB_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"\$JAXLAB_DATA is not a folder: .*nowhere"):
        resolve("wheat")
