"""The file tool end to end: numbers against fairlearn, files, several columns, warnings, bad input."""

import json

import numpy as np
import pytest

from jaxlab import cli
from jaxlab.verbs.fairness import report


def people(rows: int = 600, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    sex = random.choice(["female", "male"], rows)
    age = random.choice(["[young]", "old", "very $old$"], rows)
    label = (random.uniform(size=rows) < 0.3 + 0.2 * (sex == "male")).astype(int)
    score = np.clip(random.normal(0.35 + 0.25 * label + 0.05 * (sex == "male"), 0.2), 0, 1).round(4)
    return {"sex": sex, "age": age, "y": label, "p": score}


def write(path, columns) -> str:
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def call(file, out, *options, groups=("sex",)) -> list[str]:
    base = ["fairness", "report", file, "--label", "y", "--prediction", "p", "--group", *groups]
    return [*base, "--out", str(out), "--bootstrap", "200", *options]


def test_report_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table = people()
    out = tmp_path / "out"
    assert cli.main(call(write(tmp_path / "p.csv", table), out, groups=("sex", "age"))) == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 80
    found = json.loads((out / "report.json").read_text())
    assert (out / "report.png").stat().st_size > 10_000
    assert list(found["attributes"]) == ["sex", "age"]
    hard = table["p"] > 0.5
    for name, attribute in found["attributes"].items():
        rates = []
        for group, of in attribute["groups"].items():
            here = table[name] == group
            assert of["rows"] == here.sum()
            assert of["positive_rate"]["value"] == pytest.approx(hard[here].mean(), abs=1e-6)
            assert of["positive_rate"]["low"] < hard[here].mean() < of["positive_rate"]["high"]
            positives = here & (table["y"] == 1)
            assert of["true_positive_rate"]["value"] == pytest.approx(hard[positives].mean(), abs=1e-6)
            rest = abs(hard[here].mean() - hard[~here].mean())
            assert of["demographic_parity_difference_to_rest"] == pytest.approx(rest, abs=1e-6)
            rates.append(hard[here].mean())
        difference = attribute["differences"]["demographic_parity_difference"]
        assert difference["value"] == pytest.approx(max(rates) - min(rates), abs=1e-6)
        assert f"{difference['value']:.3f}" in printed
        assert f"{difference['low']:.3f} to {difference['high']:.3f}" in printed
    assert found["attributes"]["sex"]["overall"]["accuracy"]["value"] == pytest.approx((hard == table["y"]).mean())
    assert "[young]" in printed  # no markup
    assert "warning" not in printed


def test_the_same_numbers_as_fairlearn():
    fairlearn = pytest.importorskip("fairlearn.metrics", reason="compares with fairlearn")
    table = people(seed=1)
    hard = (table["p"] > 0.5).astype(int)
    found = report(table["y"], hard, list(table["age"]), resamples=2)["differences"]
    for name in ("demographic_parity_difference", "equal_opportunity_difference", "equalized_odds_difference"):
        expected = getattr(fairlearn, name)(table["y"], hard, sensitive_features=table["age"])
        assert found[name]["value"] == pytest.approx(expected, abs=1e-6)


def test_intersection_threshold_and_rows_without_a_group(tmp_path, capsys):
    table = people()
    table["sex"] = np.where(np.arange(600) < 50, "", table["sex"])
    table["p"] = 10 * table["p"] - 5
    options = ["--combine", "intersection", "--threshold", "0", "--undefined", "skip"]
    assert cli.main(call(write(tmp_path / "p.csv", table), tmp_path / "out", *options, groups=("sex", "age"))) == 0
    (name, found), *_ = json.loads((tmp_path / "out" / "report.json").read_text())["attributes"].items()
    assert name == "sex & age"
    assert len(found["groups"]) == 6
    assert sum(of["rows"] for of in found["groups"].values()) == 550
    assert found["overall"]["rows"] == 600
    assert found["overall"]["positive_rate"]["value"] == pytest.approx((table["p"] > 0).mean())
    assert "50 rows have no group" in capsys.readouterr().out


def test_what_makes_differences_doubtful_is_said(tmp_path, capsys):
    table = people(rows=200)
    table["sex"] = np.where(np.arange(200) < 12, "few", "many")
    table["y"] = np.where(np.arange(200) < 12, 0, table["y"])
    table["p"] = np.zeros(200)
    assert cli.main(call(write(tmp_path / "p.csv", table), tmp_path / "out")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "few has 12 rows, fewer than 30" in printed
    assert "few has no positives: its true positive rate is undefined" in printed
    assert "one class is predicted for 100.0 % of the rows" in printed
    found = json.loads((tmp_path / "out" / "report.json").read_text())["attributes"]["sex"]
    assert found["groups"]["few"]["true_positive_rate"] == {"value": None, "low": None, "high": None}


@pytest.mark.filterwarnings("error::UserWarning")
def test_names_that_are_hard_to_show(tmp_path, capsys, monkeypatch):
    """A group that is called "all", letters that the font lacks, and what would move the cursor of a terminal."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn, print_figure = [], FigureCanvasAgg.print_figure

    def remember(canvas, *arguments, **options):
        drawn.append([label.get_text() for label in canvas.figure.axes[0].get_yticklabels()])
        return print_figure(canvas, *arguments, **options)

    monkeypatch.setattr(FigureCanvasAgg, "print_figure", remember)
    table = people(rows=200)
    names = np.array(["all", "\x1b[31mred\x07", "男", 40 * "long"])
    table["sex"] = names[np.arange(200) % 4]
    out = tmp_path / "out"
    assert cli.main(call(write(tmp_path / "p.csv", table), out)) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert set(json.loads((out / "report.json").read_text())["attributes"]["sex"]["groups"]) == set(names)
    assert [line.split()[0] for line in printed.splitlines() if line.startswith(("all", "(all"))] == ["all", "(all"]
    ((*labels, last),) = drawn
    assert last == "(all rows) (200)"
    shown = ["all", "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}", "男", f"{(40 * 'long')[:31]}…"]
    assert sorted(labels) == sorted(f"{name} (50)" for name in shown)


def test_seeds_repeat_and_differ(tmp_path):
    file = write(tmp_path / "p.csv", people())
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert cli.main(call(file, tmp_path / name, "--seed", seed)) == 0
    read = [json.loads((tmp_path / name / "report.json").read_text())["attributes"] for name in "abc"]
    assert read[0] == read[1] != read[2]


def test_help_fits_eighty_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["fairness"]) == 0
    assert cli.main(["fairness", "report", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--threshold" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("y,p\n0,1\n", [], "has no column 'sex'; found y, p"),
        ("", [], "has no column 'y'; found an empty file"),
        ("y,p,sex\n", [], "has no rows"),
        ("y,p,sex,y\n0,1,a,1\n", [], "has more than one column 'y'"),
        ("y,p,sex\n0,1,a\n2,1,b\n", [], "line 3: label y must be 0 or 1, got '2'"),
        ("y,p,sex\nyes,1,a\n", [], "line 2: y must be a number, got 'yes'"),
        ("y,p,sex\n0,1,a\n1,nan,b\n", [], "line 3: p must be a number, got 'nan'"),
        ("y,p,sex\n0,,a\n", [], "line 2: p must be a number, got ''"),
        ("y,p,sex\n0\n", [], "line 2: p must be a number, got None"),
        ("y,p,sex\n0,1,a\n1,0,a\n", [], "column 'sex' needs at least two groups, got a"),
        ("y,p,sex\n0,1,\n1,0,\n", [], "column 'sex' needs at least two groups, got none"),
        ("y,p,sex\n0,-3,a\n1,0,b\n", [], "p has -3, which is no score in [0, 1]; give a --threshold"),
        ("y,p,sex\n" + "".join(f"0,1,{i}\n" for i in range(60)), [], "60 groups, more than 50: is it a number?"),
        ("y,p,sex\n0,1,a\n1,0,b\n", ["--bootstrap", "0"], "--bootstrap must be at least 1, got 0"),
        ("y,p,sex\n0,1,a\n1,0,b\n", ["--level", "95"], "the level must lie in (0, 1), got 95"),
        ("y,p,sex\n0,1,a\n1,0,b\n", ["--threshold", "nan"], "--threshold must be finite, got nan"),
        ("y,p,sex\n0,1,a\n1,0,b\n", ["--combine", "all"], "invalid choice: 'all'"),
        ("y,p,sex\n0,1,a\n1,0,b\n", ["--group", "sex", "sex"], "--group names the column 'sex' twice"),
        ("y,p,sex\n0,1,a\n1,0,b\n", ["--seed", "-1"], "--seed must be between 0 and 4294967295, got -1"),
        ("y,p,sex\n0,1,a\n1,0,b\n", ["--seed", "9" * 20], "--seed must be between 0 and 4294967295, got 999"),
        ("y,p,sex\n0,1,a\n1,0,b\n", ["--out", "pyproject.toml/x"], "a file is in the way of that folder"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, text, options, message):
    (tmp_path / "p.csv").write_text(text)
    out = tmp_path / "out"
    assert cli.main([*call(str(tmp_path / "p.csv"), out), *options]) == 2
    printed, err = capsys.readouterr()
    assert printed == ""
    assert message in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_a_file_that_is_not_there_or_no_text(tmp_path, capsys):
    assert cli.main(call(str(tmp_path / "none.csv"), tmp_path / "out")) == 2
    (tmp_path / "p.csv").write_bytes(b"y,p,sex\n\xff\xfe\n")
    assert cli.main(call(str(tmp_path / "p.csv"), tmp_path / "out")) == 2
    assert "is not a text file in UTF-8" in capsys.readouterr().err
