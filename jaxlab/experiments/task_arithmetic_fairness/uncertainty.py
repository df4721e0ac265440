"""How much of what is measured is noise: of the test rows, by a bootstrap that draws the same rows for all models, and
of splits and initialisations, by repeats.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.editing.fairness import (
    GroupStatistics,
    demographic_parity_difference,
    equalized_odds_difference,
    group_statistics,
    resample,
)

__all__ = ["bands", "metrics_of", "paired_draws", "standard_errors"]


def bands(key: jax.Array, logits: np.ndarray, labels: np.ndarray, membership: np.ndarray, resamples: int) -> np.ndarray:
    """95 % intervals of accuracy and both differences for the logits ``[λ, n]`` of every model, ``[λ, 3, 2]``."""
    found = []
    for row in logits > 0:
        drawn = resample(key, row, labels, membership, resamples=resamples)
        found.append(jnp.nanquantile(_three(drawn), jnp.array([0.025, 0.975]), axis=0).T)
    return np.stack(found)


def metrics_of(predictions: np.ndarray, labels: np.ndarray, membership: np.ndarray) -> np.ndarray:
    """Accuracy and both differences of every model, ``[model, 3]``."""
    ones = np.ones((1, len(labels)), np.float32)
    return np.asarray(_weighted(jnp.asarray(predictions), labels, membership, ones))[0]


def paired_draws(
    seed: int, predictions: np.ndarray, labels: np.ndarray, membership: np.ndarray, resamples: int
) -> np.ndarray:
    """Accuracy and both differences of every model on the same drawn rows, ``[resample, model, 3]``."""
    n = len(labels)
    times = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float32)
    return np.asarray(_weighted(jnp.asarray(predictions), labels, membership, jnp.asarray(times)))


def standard_errors(means: np.ndarray, variances: np.ndarray, shared: float) -> np.ndarray:
    """Mean over repeats in units of its standard error.

    The noise of test rows that two repeats share does not average out over repeats; that of the others, and of splits
    and initialisations, is what differs between repeats.

    Args:
      means: ``[repeat, ...]``.
      variances: of each by its test rows.
      shared: which part of their test rows two repeats share.
    """
    count = len(means)
    if count == 1:
        return means[0] / np.sqrt(variances[0] + 1e-12)
    between = means.var(0, ddof=1)
    return means.mean(0) / np.sqrt(shared * variances.mean(0) + between / count + 1e-12)


@jax.jit
@jax.vmap
def _three(statistics: GroupStatistics) -> jax.Array:
    return _metrics(statistics)


def _metrics(statistics: GroupStatistics) -> jax.Array:
    return jnp.stack(
        [
            statistics.overall.accuracy,
            demographic_parity_difference(statistics),
            equalized_odds_difference(statistics),
        ]
    )


@jax.jit
def _weighted(predictions: jax.Array, labels: jax.Array, membership: jax.Array, times: jax.Array) -> jax.Array:
    def at(weights: jax.Array) -> jax.Array:
        return jax.vmap(lambda p: _metrics(group_statistics(p, labels, membership, weights=weights)))(predictions)

    return jax.lax.map(at, times)
