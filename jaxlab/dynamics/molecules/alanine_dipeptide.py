"""Alanine dipeptide, ACE-ALA-NME: the 22 atoms on which molecular kinetics is tried first, recorded or simulated here.

`load_alanine_dipeptide` reads ``$JAXLAB_DATA/alanine_dipeptide`` (a topology ``*.pdb`` and trajectories ``*.dcd``)
where it is there, and otherwise simulates with OpenMM (extra ``md``) and keeps the frames in a cache, so that the wait
is once.

The simulation: Amber14 with implicit solvent (OBC2), no cut-off, bonds to hydrogen fixed, hydrogens of 3 amu, the
middle-scheme Langevin integrator at 350 K, 1/ps and 4 fs, one thread of the CPU.

Example::

    trajectory, spacing = load_alanine_dipeptide(2000)               # spacing of the frames in picoseconds
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxlab.data.resolve import resolve
from jaxlab.dynamics.molecules.trajectories import Trajectory, mdtraj_module, read_trajectory, trajectory_of

__all__ = ["PDB", "load_alanine_dipeptide", "simulate_alanine_dipeptide"]

TEMPERATURE = 350.0
TIMESTEP = 0.004  # ps

PDB = """\
ATOM      1  H1  ACE A   1       1.614   3.411   1.574  1.00  0.00           H
ATOM      2  CH3 ACE A   1       1.402   3.241   0.519  1.00  0.00           C
ATOM      3  H2  ACE A   1       2.211   3.649  -0.088  1.00  0.00           H
ATOM      4  H3  ACE A   1       0.465   3.730   0.254  1.00  0.00           H
ATOM      5  C   ACE A   1       1.280   1.755   0.272  1.00  0.00           C
ATOM      6  O   ACE A   1       2.100   1.176  -0.440  1.00  0.00           O
ATOM      7  N   ALA A   2       0.260   1.141   0.867  1.00  0.00           N
ATOM      8  H   ALA A   2      -0.366   1.700   1.430  1.00  0.00           H
ATOM      9  CA  ALA A   2      -0.038  -0.287   0.730  1.00  0.00           C
ATOM     10  HA  ALA A   2       0.865  -0.848   0.969  1.00  0.00           H
ATOM     11  CB  ALA A   2      -1.112  -0.656   1.761  1.00  0.00           C
ATOM     12  HB1 ALA A   2      -2.033  -0.113   1.548  1.00  0.00           H
ATOM     13  HB2 ALA A   2      -1.313  -1.726   1.718  1.00  0.00           H
ATOM     14  HB3 ALA A   2      -0.768  -0.404   2.764  1.00  0.00           H
ATOM     15  C   ALA A   2      -0.471  -0.686  -0.700  1.00  0.00           C
ATOM     16  O   ALA A   2      -0.969   0.139  -1.477  1.00  0.00           O
ATOM     17  N   NME A   3      -0.309  -1.973  -1.035  1.00  0.00           N
ATOM     18  H   NME A   3       0.090  -2.587  -0.340  1.00  0.00           H
ATOM     19  CH3 NME A   3      -0.660  -2.553  -2.332  1.00  0.00           C
ATOM     20  H1  NME A   3       0.165  -2.420  -3.032  1.00  0.00           H
ATOM     21  H2  NME A   3      -0.864  -3.618  -2.222  1.00  0.00           H
ATOM     22  H3  NME A   3      -1.548  -2.069  -2.738  1.00  0.00           H
TER
END
"""


def load_alanine_dipeptide(
    frames: int | None = None, *, seed: int = 0, spacing: float = 0.2, advance: Callable[[int], None] | None = None
) -> tuple[Trajectory, float]:
    """Frames of the heavy atoms, and the time between them in picoseconds.

    Args:
      frames: how many at most; ``None`` takes all that are recorded, or simulates 8000.
      seed: of the simulation.
      spacing: time between simulated frames in picoseconds; recorded ones are 1 ps apart.
      advance: called with the number of frames that have been simulated.

    Raises:
      OSError: recorded files cannot be read.
      ValueError: mdtraj or, without recorded frames, OpenMM is missing; fewer than two frames; a spacing that is no
        multiple of 4 fs.
    """
    if frames is not None and frames < 2:
        raise ValueError(f"at least 2 frames are needed, got {frames}")
    try:
        folder = resolve("alanine_dipeptide", holding="*.dcd")
    except ValueError:
        folder = None
    if folder is None:
        count = 8000 if frames is None else frames
        return _simulated(count, seed, spacing, advance), spacing
    recorded = read_trajectory(next(iter(sorted(folder.glob("*.pdb")))), sorted(folder.glob("*.dcd")))
    if frames is None or frames >= len(recorded.frames):
        return recorded, 1.0
    lengths, left = [], frames
    for length in recorded.lengths:
        lengths.append(min(length, left))
        left -= lengths[-1]
    return trajectory_of(recorded.topology, recorded.frames[:frames], lengths=[n for n in lengths if n]), 1.0


def simulate_alanine_dipeptide(
    frames: int, *, seed: int = 0, spacing: float = 0.2, advance: Callable[[int], None] | None = None
) -> Float[np.ndarray, "frames 22 3"]:
    """Simulate, after 20 ps to equilibrate; coordinates in angstrom.

    Raises:
      ValueError: OpenMM is missing, or a spacing that is no multiple of 4 fs.
    """
    steps = round(spacing / TIMESTEP)
    if steps < 1 or abs(steps * TIMESTEP - spacing) > 1e-9:
        raise ValueError(f"spacing must be a positive multiple of {TIMESTEP} ps, got {spacing}")
    try:
        import openmm
        from openmm import app, unit
    except ModuleNotFoundError as error:
        if error.name != "openmm":
            raise
        raise ValueError(
            "there is no alanine_dipeptide in $JAXLAB_DATA, and simulating it needs OpenMM: pip install 'jaxlab[md]'"
        ) from None
    from io import StringIO

    molecule = app.PDBFile(StringIO(PDB))
    system = app.ForceField("amber14-all.xml", "implicit/obc2.xml").createSystem(
        molecule.topology,
        nonbondedMethod=app.NoCutoff,
        constraints=app.HBonds,
        hydrogenMass=3 * unit.amu,
    )
    integrator = openmm.LangevinMiddleIntegrator(
        TEMPERATURE * unit.kelvin, 1 / unit.picosecond, TIMESTEP * unit.picosecond
    )
    integrator.setRandomNumberSeed(seed + 1)  # 0 would be a seed from the clock
    # The reference platform is far slower; a second thread slows so small a molecule down.
    platform = openmm.Platform.getPlatformByName("CPU")
    context = openmm.Context(system, integrator, platform, {"Threads": "1", "DeterministicForces": "true"})
    context.setPositions(molecule.positions)
    openmm.LocalEnergyMinimizer.minimize(context)
    context.setVelocitiesToTemperature(TEMPERATURE * unit.kelvin, seed + 1)
    integrator.step(round(20 / TIMESTEP))
    found = np.zeros((frames, molecule.topology.getNumAtoms(), 3), np.float32)
    for k in range(frames):
        integrator.step(steps)
        positions = context.getState(getPositions=True).getPositions(asNumpy=True)
        found[k] = positions.value_in_unit(unit.angstrom)
        if advance is not None:
            advance(k + 1)
    return found


def _simulated(frames: int, seed: int, spacing: float, advance: Callable[[int], None] | None) -> Trajectory:
    mdtraj = mdtraj_module()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlab" / "alanine_dipeptide"
    name = hashlib.sha256(repr((PDB, TEMPERATURE, TIMESTEP, frames, seed, spacing)).encode()).hexdigest()[:16]
    path = folder / f"{name}.npz"
    if path.is_file():
        with np.load(path, allow_pickle=False) as stored:
            coordinates = stored["coordinates"]
    else:
        coordinates = simulate_alanine_dipeptide(frames, seed=seed, spacing=spacing, advance=advance)
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{name}.{os.getpid()}.partial.npz"
        np.savez(partial, coordinates=coordinates)
        partial.replace(path)
    topology = _topology(mdtraj)
    heavy = topology.select("element != H")
    return trajectory_of(topology.subset(heavy), coordinates[:, heavy])


def _topology(mdtraj: ModuleType) -> Any:
    import tempfile

    # mdtraj reads files only.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "top.pdb"
        path.write_text(PDB)
        return mdtraj.load_topology(str(path))  # type: ignore[attr-defined]
