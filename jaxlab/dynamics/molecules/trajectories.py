"""Molecular trajectories in files: PDB or PSF with DCD, XTC and whatever else mdtraj reads; DCD and PDB to write.

mdtraj is the extra ``md`` (``pip install 'jaxlab[md]'``) and imported on first use. Coordinates are in angstrom here,
in nanometres there.

Example::

    trajectory = read_trajectory("top.pdb", ["a.dcd", "b.dcd"])
    trajectory.frames                                                # [frames, heavy atoms, 3], angstrom
    write_trajectory("out.dcd", trajectory, rollout)                 # and out.pdb with the heavy atoms
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from jaxtyping import Array, Float, Int

__all__ = ["Trajectory", "mdtraj_module", "read_trajectory", "trajectory_of", "write_trajectory"]

_ANGSTROM = 10.0
_CHI = ("chi1", "chi2", "chi3", "chi4", "chi5")


@dataclass(frozen=True)
class Trajectory:
    """Frames of the heavy atoms of one molecule.

    Attributes:
      frames: coordinates in angstrom, all files one after the other.
      lengths: frames of each file; nothing moves from the last frame of one to the first of the next.
      residues: number of the residue of each atom.
      names: of the atoms.
      topology: of the heavy atoms, an ``mdtraj.Topology``.
      dihedrals: quadruples of atoms for each kind, phi, psi and chi1 to chi5, those that the molecule has.
    """

    frames: Float[np.ndarray, "frames n 3"]
    lengths: tuple[int, ...]
    residues: Int[np.ndarray, " n"]
    names: tuple[str, ...]
    topology: Any
    dihedrals: dict[str, Int[np.ndarray, "q 4"]]

    @property
    def backbone(self) -> np.ndarray:
        """Which atoms are N, CA, C or O of an amino acid, caps left out."""
        acids = self.residues[np.equal(self.names, "CA")]
        return np.isin(self.names, ("N", "CA", "C", "O")) & np.isin(self.residues, acids)

    def pieces(self) -> list[Float[np.ndarray, "_ n 3"]]:
        """The frames of each file."""
        return np.split(self.frames, np.cumsum(self.lengths)[:-1])


def mdtraj_module() -> ModuleType:
    """Mdtraj.

    Raises:
      ValueError: it is not installed.
    """
    try:
        import mdtraj
    except ModuleNotFoundError as error:
        if error.name != "mdtraj":
            raise
        raise ValueError("molecular trajectories need mdtraj: pip install 'jaxlab[md]'") from None
    return mdtraj


def read_trajectory(
    topology: Path | str,
    trajectories: Sequence[Path | str] | Path | str,
    *,
    stride: int = 1,
    hydrogens: bool = False,
    water: bool = False,
) -> Trajectory:
    """Read frames of the heavy atoms, water left out: a solvent has no place that a latent could stand for.

    Args:
      topology: PDB, PSF or any other that mdtraj reads.
      trajectories: DCD, XTC or others, in time order.
      stride: keep every stride-th frame of each file.
      hydrogens: keep hydrogens too.
      water: keep water too.

    Raises:
      OSError: a file cannot be read.
      ValueError: mdtraj is missing, a file is of no kind that it reads or has another number of atoms than the
        topology, no frame, no heavy atom, coordinates that are not finite, a stride below 1.
    """
    mdtraj = mdtraj_module()
    paths = [Path(one) for one in ([trajectories] if isinstance(trajectories, Path | str) else trajectories)]
    topology = Path(topology)
    if stride < 1:
        raise ValueError(f"stride must be at least 1, got {stride}")
    for path in (topology, *paths):
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
    whole = _topology(mdtraj, topology)
    kept = [
        atom.index
        for atom in whole.atoms
        if (hydrogens or not _is_hydrogen(atom)) and (water or not atom.residue.is_water)
    ]
    if not kept:
        raise ValueError(f"{topology} has no heavy atom" + ("" if water else " but water's"))
    pieces = []
    for path in paths:
        try:
            with _quiet():
                piece = mdtraj.load(str(path), top=whole, stride=stride)
        except OSError as error:
            raise OSError(f"{path} cannot be read ({error})") from None
        except Exception as error:  # mdtraj reports other atoms and damaged files by exceptions of many kinds
            raise ValueError(f"{path} does not go with the {whole.n_atoms} atoms of {topology}: {error}") from None
        pieces.append(piece.xyz[:, kept] * np.float32(_ANGSTROM))
    frames = np.concatenate(pieces).astype(np.float32) if pieces else np.zeros((0, len(kept), 3), np.float32)
    return trajectory_of(whole.subset(kept), frames, lengths=[len(piece) for piece in pieces])


def trajectory_of(
    topology: Any, frames: Float[np.ndarray, "frames n 3"], *, lengths: Sequence[int] | None = None
) -> Trajectory:
    """A trajectory from frames in memory.

    Args:
      topology: ``mdtraj.Topology`` of the atoms.
      frames: coordinates in angstrom.
      lengths: frames of each part; ``None`` for one part.

    Raises:
      ValueError: no frame, no atom, another number of atoms, coordinates that are not finite, lengths of more or fewer
        frames than there are.
    """
    if topology.n_atoms < 1:
        raise ValueError("the topology has no atom")
    if frames.shape[1:] != (topology.n_atoms, 3):
        raise ValueError(f"the topology has {topology.n_atoms} atoms, the frames have shape {frames.shape}")
    if len(frames) == 0:
        raise ValueError("the trajectory has no frame")
    if not np.all(np.isfinite(frames)):
        frame, atom = np.argwhere(~np.isfinite(frames))[0][:2]
        raise ValueError(f"a coordinate is not finite, the first in frame {frame}, atom {atom}")
    if lengths is not None and (min(lengths, default=0) < 0 or sum(lengths) != len(frames)):
        raise ValueError(f"lengths must add up to the {len(frames)} frames, got {list(lengths)}")
    atoms = list(topology.atoms)
    return Trajectory(
        frames=frames,
        lengths=tuple(lengths) if lengths is not None else (len(frames),),
        residues=np.array([atom.residue.index for atom in atoms], np.int32),
        names=tuple(atom.name for atom in atoms),
        topology=topology,
        dihedrals=_dihedrals(topology),
    )


def write_trajectory(
    path: Path | str, trajectory: Trajectory, frames: Float[Array | np.ndarray, "frames n 3"]
) -> tuple[Path, Path]:
    """Write frames as DCD, and their first as a PDB of the same name.

    Args:
      path: ends in .dcd.
      trajectory: whose atoms they are.
      frames: coordinates in angstrom.

    Returns:
      The two paths.

    Raises:
      ValueError: another ending or number of atoms, coordinates that are not finite.
    """
    mdtraj = mdtraj_module()
    path, frames = Path(path), np.asarray(frames, np.float32)
    if path.suffix.lower() != ".dcd":
        raise ValueError(f"{path}: frames are written as .dcd")
    checked = trajectory_of(trajectory.topology, frames)
    written = mdtraj.Trajectory(checked.frames / _ANGSTROM, trajectory.topology)
    top = path.with_suffix(".pdb")
    with _quiet():
        written[:1].save_pdb(str(top))
        written.save_dcd(str(path))
    return path, top


def _topology(mdtraj: ModuleType, path: Path) -> Any:
    try:
        with _quiet():
            if path.suffix.lower() == ".psf":
                return mdtraj.load_psf(str(path))
            return mdtraj.load_topology(str(path))
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error})") from None
    except Exception as error:  # damaged files
        raise ValueError(f"{path} is no topology that mdtraj reads: {error}") from None


def _is_hydrogen(atom: Any) -> bool:
    if atom.element is not None and atom.element.symbol != "VS":
        return atom.element.symbol == "H"
    return atom.name.lstrip("0123456789").startswith("H")


def _dihedrals(topology: Any) -> dict[str, np.ndarray]:
    """By the names of the atoms, as mdtraj finds them."""
    from mdtraj.geometry import dihedral

    found = {}
    for kind in ("phi", "psi", *_CHI):
        quadruples = getattr(dihedral, f"indices_{kind}")(topology)
        if len(quadruples):
            found[kind] = np.asarray(quadruples, np.int32)
    return found


@contextlib.contextmanager
def _quiet(stream: Literal[1] = 1) -> Iterator[None]:
    """Keep what mdtraj's DCD plugin prints from C out of the output of a command."""
    sys.stdout.flush()
    try:
        saved = os.dup(stream)
    except OSError:  # closed
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream)
        yield
    finally:
        os.dup2(saved, stream)
        os.close(saved)
