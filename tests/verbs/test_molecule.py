"""``jaxlab molecule simulate``: files that open again, resumption, bad input in one line."""

import json

import numpy as np
import pytest

from jaxlab import cli
from jaxlab.dynamics.molecules.alanine_dipeptide import PDB

mdtraj = pytest.importorskip("mdtraj", reason="needs the md extra: mdtraj")

SMALL = [
    *("--pool", "4", "2", "--width", "8", "--encoder-steps", "3", "--decoder-steps", "3"),
    *("--network", "8", "--epochs", "1", "--score-steps", "3", "--frames", "30"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The dipeptide with a slowly turning tail, 60 frames."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "top.pdb").write_text(PDB)
    one = mdtraj.load(str(folder / "top.pdb"))
    noise = np.random.default_rng(0).normal(size=(60, *one.xyz.shape[1:]))
    path = one.xyz + 0.003 * np.cumsum(noise, axis=0) + 0.003 * noise
    mdtraj.Trajectory(path, one.topology).save_dcd(str(folder / "md.dcd"))
    return ["--top", str(folder / "top.pdb"), "--traj", str(folder / "md.dcd")]


@pytest.mark.parametrize("propagator", ["koopman", "neural", "langevin"])
def test_what_is_written_opens(files, tmp_path, capsys, propagator):
    out = tmp_path / "out"
    command = ["molecule", "simulate", *files, *SMALL, "--propagator", propagator, "--out", str(out)]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    for name in ("rollout.dcd", "rollout.pdb", "metrics.json", "simulation.png"):
        assert str(out / name) in printed
        assert (out / name).stat().st_size > 0
    numbers = json.loads((out / "metrics.json").read_text())
    opened = mdtraj.load(str(out / "rollout.dcd"), top=str(out / "rollout.pdb"))
    assert opened.n_atoms == 10
    assert opened.n_frames == numbers["frames"] <= 30
    assert numbers["finite"] == (numbers["frames"] == 30)
    assert np.all(np.isfinite(opened.xyz))
    assert numbers["reconstruction_rmsd"] > 0
    if propagator == "koopman":
        before = (out / "rollout.dcd").read_bytes()
        assert cli.main([*command, "--resume"]) == 0
        assert (out / "rollout.dcd").read_bytes() == before
        assert cli.main([*command, "--resume", "--frames", "31"]) == 2
        assert "30" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--frames", "0"], "--frames must be at least 1, got 0"),
        (["--pool", "0", "2"], "--pool takes two sizes of at least 1, got 0 2"),
        (["--noise-level", "1"], "--noise-level must be in (0, 1), got 1.0"),
        (["--propagator", "magic"], "invalid choice: 'magic'"),
        (
            ["--skip", "40"],
            "need at least 42 frames in one piece for validation, there are 12 of 60",
        ),
        (["--stride", "20"], "need at least 3 frames in one piece for train"),
        (["--traj", "absent.dcd"], "no such file: absent.dcd"),
        (["--frames", "many"], "invalid int value: 'many'"),
    ],
)
def test_bad_input_is_one_line(files, tmp_path, capsys, more, message):
    assert cli.main(["molecule", "simulate", *files, *SMALL, "--out", str(tmp_path / "x"), *more]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("jaxlab: ")
    assert message in error


def test_help(capsys):
    assert cli.main(["molecule"]) == 0
    assert "simulate" in capsys.readouterr().out


def test_a_molecule_that_does_not_move_is_refused(files, tmp_path, capsys):
    one = mdtraj.load(files[1])
    mdtraj.Trajectory(np.repeat(one.xyz, 60, axis=0), one.topology).save_dcd(str(tmp_path / "still.dcd"))
    command = ["molecule", "simulate", *files[:2], "--traj", str(tmp_path / "still.dcd"), *SMALL]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == 2
    assert "no atom moves by 0.001 A in the 48 training frames" in capsys.readouterr().err


def test_residues_have_a_pooling_of_their_own(files, tmp_path):
    small = [word for word in SMALL if word not in ("--pool", "4", "2")]
    command = ["molecule", "simulate", *files, *small, "--residues", "--propagator", "koopman"]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["fields"]["pool"] == [1, 3]
