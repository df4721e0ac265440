r"""Labelled examples shared out among clients, from identically distributed to one class each.

On the host, once, before training. Every function takes the labels and returns the indices of every client's examples:
each example goes to exactly one client.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["dirichlet_partition", "gamma_similarity_partition"]


def dirichlet_partition(
    labels: npt.ArrayLike, n_clients: int, *, alpha: float = 0.5, seed: int = 0, least: int = 0
) -> list[np.ndarray]:
    r"""The examples of every class are split in proportions drawn from :math:`\mathrm{Dirichlet}(\alpha, \dots)`.

    Small ``alpha`` gives every client few classes, large ``alpha`` all of them alike (Hsu et al. 2019, arXiv
    1909.06335).

    Args:
      labels: ``[examples]``.
      n_clients: at least 1.
      alpha: positive.
      seed: of the draws.
      least: draw again, at most 100 times, until every client has so many examples.

    Returns:
      Indices of each client's examples, ascending.

    Raises:
      ValueError: if ``labels`` is not one-dimensional, ``n_clients`` is below 1 or ``alpha`` not positive, there are
        not ``least`` examples for everybody, or no draw gave everybody so many.
    """
    labels = _checked(labels, n_clients)
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    if least * n_clients > len(labels):
        raise ValueError(f"{len(labels)} examples are not {least} for each of {n_clients} clients")
    random = np.random.default_rng(seed)
    for _ in range(100):
        parts: list[list[np.ndarray]] = [[] for _ in range(n_clients)]
        for label in np.unique(labels):
            members = random.permutation(np.flatnonzero(labels == label))
            shares = np.cumsum(random.dirichlet(np.full(n_clients, alpha)))[:-1]
            for part, chunk in zip(parts, np.split(members, (shares * len(members)).astype(int)), strict=True):
                part.append(chunk)
        clients = [np.sort(np.concatenate(part)) if part else np.zeros(0, int) for part in parts]
        if min(map(len, clients)) >= least:
            return clients
    raise ValueError(f"no draw of 100 gave each of {n_clients} clients {least} examples; raise alpha={alpha}")


def gamma_similarity_partition(
    labels: npt.ArrayLike, n_clients: int, *, gamma: float = 0.5, seed: int = 0
) -> list[np.ndarray]:
    """A random share ``gamma`` of the examples is dealt out at random, the rest sorted by label and cut in a row.

    ``gamma = 1`` is identically distributed; with ``gamma = 0`` a client has one or few classes (Karimireddy et al.
    2020, arXiv 1910.06378). All clients have the same number of examples, but for at most two.

    Args:
      labels: ``[examples]``.
      n_clients: at least 1.
      gamma: in [0, 1].
      seed: of the draws.

    Returns:
      Indices of each client's examples, ascending.

    Raises:
      ValueError: if ``labels`` is not one-dimensional, ``n_clients`` is below 1, or ``gamma`` is outside [0, 1].
    """
    labels = _checked(labels, n_clients)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}")
    order = np.random.default_rng(seed).permutation(len(labels))
    alike, rest = np.split(order, [int(gamma * len(labels))])
    rest = rest[np.argsort(labels[rest], kind="stable")]
    pairs = zip(np.array_split(alike, n_clients), np.array_split(rest, n_clients), strict=True)
    return [np.sort(np.concatenate(pair)) for pair in pairs]


def _checked(labels: npt.ArrayLike, n_clients: int) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels must have one dimension, got shape {labels.shape}")
    if n_clients < 1:
        raise ValueError(f"n_clients must be at least 1, got {n_clients}")
    return labels
