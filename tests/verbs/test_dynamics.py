"""The file tool end to end: formats, rates, output, bad input."""

import csv
import re

import numpy as np
import pytest

from jaxlab import cli
from jaxlab.verbs.dynamics import compare


def wave(frequency: float, dt: float = 0.01, seed: int = 0) -> np.ndarray:
    t = np.arange(int(4 / dt)) * dt
    noise = 1e-3 * np.random.default_rng(seed).normal(size=(len(t), 2))
    return np.stack([np.sin(2 * np.pi * frequency * t), np.cos(2 * np.pi * frequency * t + 0.3)], 1) + noise


def test_files_of_four_formats_and_two_rates(tmp_path, capsys) -> None:
    np.save(tmp_path / "slow.npy", wave(1.0))
    np.savez(tmp_path / "slower.npz", only=wave(1.1, seed=1))
    np.savetxt(tmp_path / "fast.csv", wave(3.0, dt=0.02, seed=2), delimiter=",", header="x,y", comments="")
    channels = [",".join(f"{v:.9f}" for v in column) for column in wave(3.1, seed=3).T]
    (tmp_path / "faster.ts").write_text("@classLabel true a\n@data\n" + ":".join([*channels, "a"]) + "\n")
    files = [str(tmp_path / name) for name in ("slow.npy", "slower.npz", "fast.csv", "faster.ts")]
    out = tmp_path / "out"
    arguments = [
        "dynamics",
        "compare",
        *files,
        "--dt",
        "0.01",
        "0.01",
        "0.02",
        "0.01",
        "--rank",
        "2",
        "--out",
        str(out),
    ]
    assert cli.main(arguments) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[0]: line[1] for line in lines[1:5]} == {
        "slow": "slower", "slower": "slow", "fast": "faster", "faster": "fast",
    }  # fmt: skip
    rows = list(csv.reader((out / "distances.csv").open()))
    assert rows[0][1:] == [row[0] for row in rows[1:]] == ["slow", "slower", "fast", "faster"]
    matrix = np.array([row[1:] for row in rows[1:]], float)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(np.diag(matrix), 0)
    for picture in ("embedding.png", "spectra.png"):
        assert (out / picture).stat().st_size > 5_000


def test_help_tells_the_options(capsys) -> None:
    assert cli.main(["dynamics"]) == 0
    assert cli.main(["dynamics", "compare", "--help"]) == 0
    assert "--rank" in capsys.readouterr().out


def test_frequencies_come_out_in_cycles() -> None:
    _, spectra = compare([wave(1.0), wave(2.5, dt=0.02)], [0.01, 0.02], rank=2)
    for (frequency, growth), expected in zip(spectra, (1.0, 2.5), strict=True):
        np.testing.assert_allclose(np.abs(frequency), expected, rtol=1e-3)  # the ridge and the noise
        assert np.abs(growth).max() < 1e-2


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ([wave(1.0)], [], "between 2 and 10000 systems can be compared, got 1"),
        ([wave(1.0), wave(1.0)[:, :1]], [], "same channels, got 2 in 0 and 1 in 1"),
        ([wave(1.0), wave(1.0)], ["--dt", "0"], "steps must be positive and finite, got 0"),
        ([wave(1.0), wave(1.0)], ["--dt", "1", "1", "1"], "one for each of the 2 files, got 3"),
        ([wave(1.0), wave(1.0)], ["--rank", "0"], "rank must be in"),
        ([wave(1.0), wave(1.0)], ["--rank", "x"], "invalid int value: 'x'"),
        ([wave(1.0), wave(1.0)], ["--eta", "2"], "eta must be in [0, 1], got 2"),
        ([wave(1.0), wave(1.0)], ["--lags", "0"], "at least one lag, got 0"),
        ([wave(1.0), wave(1.0)[:9]], ["--rank", "4"], "lengths must be in"),
        ([wave(1.0), np.full((50, 2), np.nan)], [], "missing or not finite"),
        ([np.ones((50, 2)), np.ones((50, 2))], [], "channel 0 is constant"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, content, options, message) -> None:
    for k, array in enumerate(content):
        np.save(tmp_path / f"{k}.npy", array)
    files = [str(tmp_path / f"{k}.npy") for k in range(len(content))]
    assert cli.main(["dynamics", "compare", *files, "--out", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def save(tmp_path, arrays) -> None:
    for name, array in arrays.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / name, array)


def compare_files(tmp_path, arrays, *options: str) -> int:
    """Save the arrays under their names and compare the files."""
    save(tmp_path, arrays)
    files = [str(tmp_path / name) for name in arrays]
    return cli.main(["dynamics", "compare", *files, "--rank", "2", "--out", str(tmp_path / "out"), *options])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (np.where(np.arange(400)[:, None] == 7, np.nan, wave(1.0)), "second: a value is missing .* row 7, channel 0"),
        (np.zeros((400, 2)), "second: .*(eigenvalue ~0|support only rank)"),
        (np.sin(0.1 * np.arange(400)[:, None] + [0, 1]), "second: .*(eigenvalue ~0|support only rank)"),
        (wave(1.0)[:5], r"second: lengths must be in \[10, 400\] .* got 5"),
        (wave(1.0)[:, :1], "same channels, got 2 in first and 1 in second"),
        (1e200 * wave(1.0), "too large for double precision"),
    ],
    ids=["missing", "zero", "no noise", "short", "channels", "large"],
)
def test_the_series_that_fails_is_named(tmp_path, capsys, second, message) -> None:
    rank = "8" if len(second) > 5 else "2"  # a noiseless wave has rank two
    assert compare_files(tmp_path, {"first.npy": wave(1.0), "second.npy": second}, "--rank", rank) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "inf"], "window must be positive and finite, got inf"),
        (["--window", "0"], "window must be positive and finite, got 0"),
        (["--dt", "inf"], "steps must be positive and finite, got inf"),
        (["--dt", "0.01", "nan"], "steps must be positive and finite, got nan"),
        (["--lags", "99999999999"], "at most the 400 samples of the longest series"),
        (["--window", "1e-9", "--lags", "2"], "differ by more than 1e-6 sampling steps"),
    ],
)
def test_options_that_make_no_sense_are_one_line(tmp_path, capsys, options, message) -> None:
    assert compare_files(tmp_path, {"a.npy": wave(1.0), "b.npy": wave(2.0)}, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_file_in_the_way_is_found_before_the_work(tmp_path, capsys) -> None:
    (tmp_path / "out").write_text("mine")
    assert compare_files(tmp_path, {"a.npy": wave(1.0), "b.npy": wave(1.0)[:1]}) == 2
    assert "a file is in the way of that folder" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


def test_names_stay_apart_and_come_out_as_they_are(tmp_path, capsys) -> None:
    """Clashing stems, markup of the terminal, formulas and a leading underscore of the plots, arrays of one file."""
    np.savez(tmp_path / "many.npz", red=wave(1.0), blue=wave(2.0))
    names = ["[b]x.npy", "$a$.npy", "_x.npy", "same.npy", "deeper/same.npy"]
    arrays = {name: wave(1.0 + k) for k, name in enumerate(names)}
    save(tmp_path, arrays)
    files = [str(tmp_path / name) for name in [*arrays, "many.npz"]]
    assert cli.main(["dynamics", "compare", *files, "--rank", "2", "--out", str(tmp_path / "out")]) == 0
    heading = next(csv.reader((tmp_path / "out" / "distances.csv").open()))[1:]
    stems = ["[b]x", "$a$", "_x"]
    assert heading == [*stems, str(tmp_path / names[3]), str(tmp_path / names[4]), "many[red]", "many[blue]"]
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown for name in [*stems, "many[red]"])
