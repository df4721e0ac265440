"""Every example goes to one client; the ends of both scales."""

import numpy as np
import pytest

from jaxlab.data import dirichlet_partition, gamma_similarity_partition

LABELS = np.random.default_rng(0).integers(10, size=2000)


def shares(parts):
    """Share of each class in each client's examples: ``[clients, classes]``."""
    return np.stack([np.bincount(LABELS[part], minlength=10) / len(part) for part in parts])


@pytest.mark.parametrize("partition", [dirichlet_partition, gamma_similarity_partition])
def test_every_example_goes_to_one_client_and_a_seed_repeats(partition) -> None:
    parts = partition(LABELS, 7, seed=3)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(2000))
    for part, again in zip(parts, partition(LABELS, 7, seed=3), strict=True):
        np.testing.assert_array_equal(part, again)
    assert any(len(x) != len(y) or (x != y).any() for x, y in zip(parts, partition(LABELS, 7, seed=4), strict=True))
    assert [len(part) for part in partition(LABELS, 1)] == [2000]


def test_the_ends_of_both_scales() -> None:
    whole = np.bincount(LABELS, minlength=10) / 2000
    # About 400 examples a client: five standard errors of a share of a tenth are 0.075.
    assert np.abs(shares(gamma_similarity_partition(LABELS, 5, gamma=1.0)) - whole).max() < 0.075
    assert np.abs(shares(dirichlet_partition(LABELS, 5, alpha=1e4)) - whole).max() < 0.02
    sorted_apart = shares(gamma_similarity_partition(LABELS, 5, gamma=0.0))
    assert ((sorted_apart > 0).sum(1) <= 4).all()  # two classes each, and what the cuts leave over
    alone = dirichlet_partition(LABELS, 5, alpha=1e-3)
    biggest = np.stack([np.bincount(LABELS[part], minlength=10) for part in alone]).max(0)
    assert (biggest / np.bincount(LABELS)).mean() > 0.98  # a class lies with one client
    sizes = [len(part) for part in gamma_similarity_partition(LABELS, 7, gamma=0.3)]
    assert max(sizes) - min(sizes) <= 2
    assert min(map(len, dirichlet_partition(LABELS, 20, alpha=0.3, least=20))) >= 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dirichlet_partition(LABELS, 0), r"n_clients must be at least 1, got 0"),
        (lambda: dirichlet_partition(LABELS, 5, alpha=0.0), r"alpha must be positive, got 0.0"),
        (lambda: dirichlet_partition(LABELS, 5, least=401), r"2000 examples are not 401 for each of 5 clients"),
        (lambda: dirichlet_partition(LABELS, 5, alpha=1e-3, least=390), r"no draw of 100 gave"),
        (lambda: gamma_similarity_partition(LABELS, 5, gamma=1.5), r"gamma must be in \[0, 1\], got 1.5"),
        (lambda: gamma_similarity_partition(LABELS[None], 5), r"one dimension, got shape \(1, 2000\)"),
    ],
)
def test_bad_values(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
