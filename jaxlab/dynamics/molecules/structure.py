r"""How well frames keep the structure of a molecule: lDDT, contacts, fluctuations.

The local distance difference test of a frame against a reference is, over pairs of atoms closer than 15 A in the
reference, the mean share of thresholds 0.5, 1, 2, 4 A that the change of their distance stays below. A rollout has
failed at the first frame below 0.65.

Reference: Mariani et al., Bioinformatics 29, 2722 (2013); Sengar et al., arXiv 2509.02196 (threshold 0.65; contacts
between heavy atoms closer than 4.5 A; a separation of at least 3 residues is our choice). Coordinates are in angstrom.

Example:
  >>> x = jax.random.normal(jax.random.key(0), (5, 3))
  >>> float(lddt(x[None], x)[0])
  1.0
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

__all__ = [
    "contact_correlation",
    "contact_frequencies",
    "failure_step",
    "lddt",
    "root_mean_square_fluctuation",
]

THRESHOLDS = (0.5, 1.0, 2.0, 4.0)


@partial(jax.jit, static_argnames="radius")
def lddt(
    x: Float[Array | np.ndarray, "frames n 3"], reference: Float[Array | np.ndarray, "_ 3"], *, radius: float = 15.0
) -> Float[Array, " frames"]:
    """Local distance difference test of each frame, in [0, 1]; NaN frames give NaN.

    Args:
      x: frames.
      reference: what they are compared with, for a rollout its initial frame.
      radius: pairs closer than this in the reference count; NaN where there is none, as for a single atom.

    Raises:
      ValueError: frames of other atoms than the reference.
    """
    if np.ndim(x) != 3 or np.shape(x)[1:] != np.shape(reference):
        # One atom would be broadcast against many, and the score be of nothing.
        raise ValueError(f"frames and reference must hold the same atoms, got {np.shape(x)} and {np.shape(reference)}")
    wanted = _distances(jnp.asarray(reference))
    counted = (wanted < radius) & ~jnp.eye(len(wanted), dtype=bool)

    def of_frame(frame: Array) -> Array:
        change = jnp.abs(_distances(frame) - wanted)
        kept = sum((change < threshold).astype(jnp.float32) for threshold in THRESHOLDS) / len(THRESHOLDS)
        score = jnp.sum(jnp.where(counted, kept, 0)) / jnp.sum(counted)
        return jnp.where(jnp.all(jnp.isfinite(frame)), score, jnp.nan)

    return lax.map(of_frame, jnp.asarray(x))


def failure_step(scores: Float[Array | np.ndarray, " frames"], *, threshold: float = 0.65) -> int:
    """The first frame with a score below the threshold or that is not a number; the number of frames if none is."""
    failed = np.flatnonzero(~(np.asarray(scores) >= threshold))
    return int(failed[0]) if len(failed) else len(scores)


def contact_frequencies(
    x: Float[Array | np.ndarray, "frames n 3"],
    residues: Sequence[int] | Int[np.ndarray, " n"],
    *,
    cutoff: float = 4.5,
    separation: int = 3,
) -> tuple[Float[Array, "n n"], Bool[np.ndarray, "n n"]]:
    """How often each pair of atoms is closer than a cutoff, and which pairs count.

    Args:
      x: frames.
      residues: number of the residue of each atom.
      cutoff: in angstrom.
      separation: residues that lie at least so far apart in the sequence count.

    Raises:
      ValueError: no frame, another number of residues than atoms, a cutoff that is not positive.
    """
    residues = np.asarray(residues)
    if len(x) == 0:
        raise ValueError("there is no frame")
    if not cutoff > 0:
        raise ValueError(f"cutoff must be positive, got {cutoff}")
    if residues.shape != np.shape(x)[1:2]:
        raise ValueError(f"one residue for each of the {np.shape(x)[1]} atoms is needed, got shape {residues.shape}")
    counts = np.abs(residues[:, None] - residues[None, :]) >= separation
    return _contacts(jnp.asarray(x), jnp.asarray(cutoff, jnp.float32)), counts


def contact_correlation(
    a: Float[Array | np.ndarray, "frames_a n 3"],
    b: Float[Array | np.ndarray, "frames_b n 3"],
    residues: Sequence[int] | Int[np.ndarray, " n"],
    *,
    cutoff: float = 4.5,
    separation: int = 3,
) -> float:
    """Pearson correlation of the contact frequencies of two ensembles; NaN where no pair counts or none varies."""
    (first, counts), (second, _) = (
        contact_frequencies(x, residues, cutoff=cutoff, separation=separation) for x in (a, b)
    )
    upper = counts & np.triu(np.ones_like(counts), 1)
    pair = np.stack([np.asarray(first)[upper], np.asarray(second)[upper]])
    if pair.shape[1] < 2 or np.any(pair.std(1) == 0):
        return float("nan")
    return float(np.corrcoef(pair)[0, 1])


@jax.jit
def root_mean_square_fluctuation(x: Float[Array | np.ndarray, "frames n 3"]) -> Float[Array, " n"]:
    """Root of the mean squared deviation of each atom from its mean position, of aligned frames."""
    x = jnp.asarray(x)
    return jnp.sqrt(jnp.mean(jnp.sum((x - x.mean(0)) ** 2, axis=-1), axis=0))


@jax.jit
def _contacts(x: Array, cutoff: Array) -> Array:
    def add(total: Array, frame: Array) -> tuple[Array, None]:
        return total + (_distances(frame) < cutoff), None

    return lax.scan(add, jnp.zeros((x.shape[1], x.shape[1])), x)[0] / len(x)


def _distances(x: Array) -> Array:
    squared = sum((x[:, c, None] - x[None, :, c]) ** 2 for c in range(3))
    return jnp.sqrt(squared)
