"""Dihedrals, lDDT, contacts and trajectory files: hand-made cases, mdtraj, invariants, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from jaxlab.dynamics.molecules import (
    contact_correlation,
    contact_frequencies,
    dihedrals,
    failure_step,
    lddt,
    periodic_features,
    read_trajectory,
    root_mean_square_deviation,
    root_mean_square_fluctuation,
    trajectory_of,
    write_trajectory,
)
from jaxlab.dynamics.molecules.alanine_dipeptide import PDB


@pytest.fixture(scope="module")
def mdtraj():
    return pytest.importorskip("mdtraj", reason="needs the md extra: mdtraj")


@pytest.fixture(scope="module")
def files(mdtraj, tmp_path_factory):
    """The dipeptide with random displacements, as PDB, DCD and XTC."""
    folder = tmp_path_factory.mktemp("molecule")
    (folder / "top.pdb").write_text(PDB)
    one = mdtraj.load(str(folder / "top.pdb"))
    xyz = one.xyz + 0.01 * np.random.default_rng(0).normal(size=(6, *one.xyz.shape[1:]))
    whole = mdtraj.Trajectory(xyz, one.topology)
    whole.save_dcd(str(folder / "md.dcd"))
    whole.save_xtc(str(folder / "md.xtc"))
    return folder, whole


def test_signs_are_those_of_iupac():
    """Looking from the second atom to the third, the fourth is clockwise of the first where the angle is positive."""
    x = np.array([[1.0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 1, 1]])
    np.testing.assert_allclose(dihedrals(x, [[0, 1, 2, 3], [3, 2, 1, 0]]), [np.pi / 2, np.pi / 2], atol=1e-6)
    np.testing.assert_allclose(dihedrals(x * [1, -1, 1], [[0, 1, 2, 3]]), [-np.pi / 2], atol=1e-6)
    flat = np.array([[1.0, 0, 0], [0, 0, 0], [0, 0, 1], [-1, 0, 1]])
    np.testing.assert_allclose(np.abs(dihedrals(flat, [[0, 1, 2, 3]])), [np.pi], atol=1e-6)


def test_atoms_on_a_line_have_no_dihedral_and_a_finite_gradient():
    x = jnp.array([[0.0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 3]])
    assert float(dihedrals(x, [[0, 1, 2, 3]])[0]) == 0
    gradient = jax.grad(lambda x: dihedrals(x, [[0, 1, 2, 3], [0, 0, 1, 1]]).sum())(x)
    assert np.all(np.isfinite(gradient))


def test_dihedrals_are_those_of_mdtraj(mdtraj, files):
    folder, whole = files
    trajectory = read_trajectory(folder / "top.pdb", folder / "md.dcd")
    for kind in ("phi", "psi"):
        expected = getattr(mdtraj, f"compute_{kind}")(whole)[1]
        # Angstrom with three digits less than the nanometres: the angle of bonds of 1.5 A is good to 1e-5.
        np.testing.assert_allclose(dihedrals(trajectory.frames, trajectory.dihedrals[kind]), expected, atol=1e-4)


def test_features_are_continuous_at_pi():
    near = periodic_features(jnp.array([[np.pi - 1e-4], [-np.pi + 1e-4]]))
    np.testing.assert_allclose(near[0], near[1], atol=1e-3)


def test_angles_of_what_is_not_finite_are_no_angles():
    x = np.stack([np.random.default_rng(0).normal(size=(4, 3))] * 3)
    x[1, 2, 0], x[2, 0, 1] = np.nan, np.inf
    assert np.isnan(dihedrals(x, [[0, 1, 2, 3]])[:, 0]).tolist() == [False, True, True]


def test_other_atoms_are_refused():
    frames, one = np.zeros((3, 1, 3)), np.zeros((5, 3))
    with pytest.raises(ValueError, match=r"must hold the same atoms, got \(3, 1, 3\) and \(5, 3\)"):
        lddt(frames, one)
    with pytest.raises(ValueError, match=r"must hold the same atoms, got \(1, 3\) and \(5, 3\)"):
        root_mean_square_deviation(frames, one)
    assert np.isnan(lddt(frames, one[:1])).all()  # a single atom has no pair
    with pytest.raises(ValueError, match="there is no frame"):
        contact_frequencies(frames[:0], [0])
    with pytest.raises(ValueError, match="cutoff must be positive, got -1"):
        contact_frequencies(frames, [0], cutoff=-1.0)


@pytest.mark.parametrize(
    ("quadruples", "message"),
    [([[0, 1, 2]], r"takes four atoms, got indices of shape \(1, 3\)"), ([[0, 1, 2, 4]], "from 0 to 3, got 0 to 4")],
)
def test_bad_quadruples_are_refused(quadruples, message):
    with pytest.raises(ValueError, match=message):
        dihedrals(np.zeros((4, 3)), np.array(quadruples))


def test_lddt_is_one_on_itself_and_blind_to_rigid_motion():
    x = np.random.default_rng(0).normal(size=(12, 3)) * 5
    moved = Rotation.random(random_state=1).apply(x) + np.array([10, -5, 3])
    np.testing.assert_allclose(lddt(np.stack([x, moved]), x), 1, atol=1e-6)


def test_lddt_counts_thresholds():
    """Three atoms on a line; the last moves by 1.5 A: one of three pairs is untouched, two keep 2 of 4 thresholds."""
    reference = np.array([[0.0, 0, 0], [0, 0, 3], [0, 0, 6]])
    moved = reference + np.array([[0, 0, 0], [0, 0, 0], [0, 0, 1.5]])
    assert float(lddt(moved[None], reference)[0]) == pytest.approx((1 + 0.5 + 0.5) / 3)
    far = np.array([[0.0, 0, 0], [0, 0, 20.0]])
    assert np.isnan(lddt(far[None], far)[0])  # no pair within the radius
    assert np.isnan(lddt(np.full((1, 3, 3), np.nan), reference)[0])


def test_failure_is_the_first_bad_frame():
    assert failure_step(np.array([0.9, 0.65, 0.64, 0.9])) == 2
    assert failure_step(np.array([0.9, np.nan])) == 1
    assert failure_step(np.full(7, 0.7)) == 7


def test_contacts_by_hand():
    x = np.zeros((2, 4, 3))
    x[:, :, 0] = [[0, 4, 8, 0], [0, 4, 8, 4.4]]
    frequencies, counted = contact_frequencies(x, [0, 1, 2, 3])
    np.testing.assert_allclose(frequencies[0], [1, 1, 0, 1])
    np.testing.assert_allclose(frequencies[3], [1, 1, 0.5, 1])
    assert counted.sum() == 2
    assert counted[0, 3]
    rng = np.random.default_rng(0)
    ensemble = rng.normal(size=(30, 8, 3)) * 3
    assert contact_correlation(ensemble, ensemble, np.arange(8)) == pytest.approx(1)
    assert np.isnan(contact_correlation(x, x, [0, 0, 0, 0]))
    with pytest.raises(ValueError, match="one residue for each of the 4 atoms is needed"):
        contact_frequencies(x, [0, 1])


def test_fluctuation_of_known_spread():
    x = np.array([[[0.0, 0, 0], [1, 1, 1]], [[2.0, 0, 0], [1, 1, 1]]])
    np.testing.assert_allclose(root_mean_square_fluctuation(x), [1, 0])


@pytest.mark.parametrize(("name", "tolerance"), [("md.dcd", 1e-4), ("md.xtc", 0.01)])
def test_heavy_atoms_are_read_in_angstrom(files, name, tolerance):
    """XTC keeps 1e-3 nm."""
    folder, whole = files
    found = read_trajectory(folder / "top.pdb", [folder / name, folder / name], stride=2)
    assert found.names == ("CH3", "C", "O", "N", "CA", "CB", "C", "O", "N", "C")
    assert found.residues.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2]
    assert found.lengths == (3, 3)
    heavy = whole.topology.select("element != H")
    np.testing.assert_allclose(found.pieces()[1], 10 * whole.xyz[::2, heavy], atol=tolerance)
    assert found.dihedrals.keys() == {"phi", "psi"}
    assert np.flatnonzero(found.backbone).tolist() == [3, 4, 6, 7]  # of the alanine
    assert read_trajectory(folder / "top.pdb", folder / name, hydrogens=True).frames.shape == (6, 22, 3)


def test_water_is_left_out(mdtraj, files, tmp_path):
    folder, whole = files
    wet = PDB.split("TER")[0] + "HETATM   23  O   HOH A   4      20.000  20.000  20.000  1.00  0.00           O\nEND\n"
    (tmp_path / "wet.pdb").write_text(wet)
    topology = mdtraj.load_topology(str(tmp_path / "wet.pdb"))
    xyz = np.concatenate([whole.xyz, np.full((6, 1, 3), 2.0)], axis=1)
    mdtraj.Trajectory(xyz, topology).save_dcd(str(tmp_path / "wet.dcd"))
    dry = read_trajectory(tmp_path / "wet.pdb", tmp_path / "wet.dcd")
    np.testing.assert_array_equal(dry.frames, read_trajectory(folder / "top.pdb", folder / "md.dcd").frames)
    assert read_trajectory(tmp_path / "wet.pdb", tmp_path / "wet.dcd", water=True).frames.shape == (6, 11, 3)


def test_what_is_written_opens_again(mdtraj, files, tmp_path, capfd):
    folder, _ = files
    trajectory = read_trajectory(folder / "top.pdb", folder / "md.dcd")
    rolled = trajectory.frames[::-1] + 1
    dcd, pdb = write_trajectory(tmp_path / "out.dcd", trajectory, rolled)
    assert capfd.readouterr().out == ""
    opened = mdtraj.load(str(dcd), top=str(pdb))
    np.testing.assert_allclose(10 * opened.xyz, rolled, atol=1e-3)
    again = read_trajectory(pdb, dcd)
    assert (again.names, again.dihedrals.keys()) == (trajectory.names, trajectory.dihedrals.keys())


def test_bad_files_are_refused(files, tmp_path):
    folder, whole = files
    trajectory = read_trajectory(folder / "top.pdb", folder / "md.dcd")
    heavy = tmp_path / "heavy.pdb"
    whole.atom_slice(range(5))[0].save_pdb(str(heavy))
    with pytest.raises(ValueError, match=r"md.dcd does not go with the 5 atoms of .*heavy.pdb"):
        read_trajectory(heavy, folder / "md.dcd")
    with pytest.raises(FileNotFoundError, match=r"no such file: .*missing.dcd"):
        read_trajectory(folder / "top.pdb", folder / "missing.dcd")
    (tmp_path / "junk.pdb").write_text("nothing\n")
    with pytest.raises(ValueError, match=r"junk.pdb"):
        read_trajectory(tmp_path / "junk.pdb", folder / "md.dcd")
    (tmp_path / "junk.dcd").write_bytes(b"nothing")
    with pytest.raises((ValueError, OSError), match=r"junk.dcd"):
        read_trajectory(folder / "top.pdb", tmp_path / "junk.dcd")
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        read_trajectory(folder / "top.pdb", folder / "md.dcd", stride=0)
    broken = trajectory.frames.copy()
    broken[2, 1, 0] = np.inf
    with pytest.raises(ValueError, match="a coordinate is not finite, the first in frame 2, atom 1"):
        trajectory_of(trajectory.topology, broken)
    with pytest.raises(ValueError, match=r"has 10 atoms, the frames have shape \(6, 9, 3\)"):
        write_trajectory(tmp_path / "out.dcd", trajectory, trajectory.frames[:, :9])
    with pytest.raises(ValueError, match=r"out.xyz: frames are written as .dcd"):
        write_trajectory(tmp_path / "out.xyz", trajectory, trajectory.frames)
    with pytest.raises(ValueError, match=r"lengths must add up to the 6 frames, got \[3, 4\]"):
        trajectory_of(trajectory.topology, trajectory.frames, lengths=[3, 4])
    with pytest.raises(ValueError, match="the trajectory has no frame"):
        trajectory_of(trajectory.topology, trajectory.frames[:0])


def test_without_mdtraj_the_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "mdtraj", None)
    with pytest.raises(ValueError, match=r"need mdtraj: pip install 'jaxlab\[md\]'"):
        read_trajectory("a.pdb", "b.dcd")
