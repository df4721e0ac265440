"""The file tool end to end: formats, rates, output, bad input."""

import csv

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
