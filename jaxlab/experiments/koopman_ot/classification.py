"""Nearest-neighbour classification of multivariate time series by the distance of their dynamics.

All metrics go through one protocol: five folds, stratified; inside the training part of each fold the rank (and eta,
where a metric has one) with the best leave-one-out accuracy is chosen, smaller first; the test part is labelled by its
nearest training series. Estimation never sees labels; channels are standardised over the whole data set.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import dynamics
from jaxlab.data.time_series import load_uea
from jaxlab.dynamics import LowRankOperator, SpectralGrassmannMetric, Spectrum
from jaxlab.experiments.koopman_ot.oscillators import HERTZ

__all__ = ["ETA_SHARES", "METHODS", "SAMPLING_RATES", "Accuracies", "DataSet", "accuracies", "choose", "load_data_set"]

# BasicMotions: smart watch at 10 Hz. JapaneseVowels: cepstrum of frames shifted by 6.4 ms.
SAMPLING_RATES = {"BasicMotions": 10.0, "JapaneseVowels": 156.25}
# The heuristic's eta is the upper end of the grid (paper, section 6).
ETA_SHARES = (0.25, 0.5, 1.0)
METHODS = ("sgot", "sot", "got", "hilbert_schmidt", "operator_norm", "martin")
FOLDS = 5


class DataSet(NamedTuple):
    """Series padded to one length.

    Attributes:
      series: ``[case, time, channel]``, each channel with mean 0 and variance 1 over all cases.
      lengths: valid samples of each case.
      labels: class of each case as an integer.
      folds: test fold of each case.
      rate: sampling rate in Hz.
    """

    series: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    folds: np.ndarray
    rate: float

    def largest_rank(self, window: int) -> int:
        """The rank that the shortest series supports."""
        return min(int(self.lengths.min()) - window, window * self.series.shape[-1])


class Accuracies(NamedTuple):
    """Of one setting of the estimator, ``[method, fold, eta]`` (methods without eta repeat one value).

    Attributes:
      inner: leave-one-out accuracy on the training part.
      outer: accuracy on the test part.
      embedding: two coordinates of each case under the metric at the heuristic's eta.
    """

    inner: np.ndarray
    outer: np.ndarray
    embedding: np.ndarray


def load_data_set(name: str, cases: int, seed: int) -> DataSet:
    """A random subset of a data set, at most ``cases`` (0 for all), in folds that keep the shares of the classes.

    Raises:
      ValueError: a channel that is constant, a value that is missing, fewer cases of a class than folds.
    """
    parts = load_uea(name)
    series = [case for part in parts for case in part.series]
    labels = np.unique([label for part in parts for label in part.labels], return_inverse=True)[1]
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(series))[: cases or None]
    series, labels = [series[i] for i in order], labels[order]
    rows = np.concatenate(series)
    if not np.all(np.isfinite(rows)) or not np.all(rows.std(0) > 0):
        raise ValueError(f"data set {name!r} has missing values or constant channels")
    if min(np.bincount(labels)) < FOLDS:
        raise ValueError(f"{FOLDS} folds need as many cases of each class; {name!r} has {np.bincount(labels)}")
    lengths = np.array([len(case) for case in series])
    padded = np.zeros((len(series), lengths.max(), rows.shape[1]))
    for i, case in enumerate(series):
        padded[i, : len(case)] = (case - rows.mean(0)) / rows.std(0)
    folds = np.empty(len(labels), int)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        folds[members] = (np.arange(len(members)) + label) % FOLDS
    return DataSet(padded, lengths, labels, folds, SAMPLING_RATES.get(str(name), 1.0))


def accuracies(data: DataSet, *, window: int, rank: int, regularization: float) -> Accuracies:
    """Estimate every system with one setting, and score all metrics at all etas."""
    operators = dynamics.trajectory_operator(
        jnp.asarray(data.series),
        rank,
        dt=1 / data.rate,
        lags=window,
        regularization=regularization,
        lengths=jnp.asarray(data.lengths),
    )
    spectra = dynamics.generator_spectrum(operators, dt=1 / data.rate)
    eta = dynamics.eta_heuristic(data.rate)
    sgot = [np.asarray(_matrix(spectra, eta * share)) for share in ETA_SHARES]
    shared = [_matrix(spectra, 1.0), _matrix(spectra, 0.0), *_baselines(operators, spectra, 1 / data.rate)]
    matrices = [sgot] + [[np.asarray(matrix)] * len(ETA_SHARES) for matrix in shared]
    scores = np.array([[_score(matrix, data) for matrix in of_method] for of_method in matrices])
    return Accuracies(
        inner=scores[..., 0].swapaxes(1, 2),
        outer=scores[..., 1].swapaxes(1, 2),
        embedding=np.asarray(dynamics.classical_scaling(jnp.asarray(sgot[-1]))),
    )


def choose(inner: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """Test accuracy ``[method, fold]`` of the setting that does best inside, from ``[setting, method, fold, eta]``."""
    inner, outer = (np.moveaxis(a, 0, -1).reshape(*a.shape[1:3], -1) for a in (inner, outer))
    return np.take_along_axis(outer, inner.argmax(-1)[..., None], axis=-1)[..., 0]


def _matrix(spectra: Spectrum, eta: float) -> jax.Array:
    return dynamics.spectral_grassmann_distance_matrix(
        spectra, metric=SpectralGrassmannMetric(eta=eta, eigenvalue_scale=HERTZ)
    )


@jax.jit
def _baselines(operators: LowRankOperator, spectra: Spectrum, dt: float | jax.Array) -> list[jax.Array]:
    return [
        dynamics.pairwise_distances(dynamics.hilbert_schmidt_distance, operators),
        dynamics.pairwise_distances(dynamics.operator_norm_distance, operators),
        dynamics.pairwise_distances(dynamics.martin_distance, jnp.exp(spectra.eigenvalues * dt)),
    ]


def _score(distances: np.ndarray, data: DataSet) -> np.ndarray:
    """Inner and outer accuracy of each fold, ``[fold, 2]``."""
    scores = []
    for fold in range(FOLDS):
        test, train = np.flatnonzero(data.folds == fold), np.flatnonzero(data.folds != fold)
        inside = distances[np.ix_(train, train)] + np.diag(np.full(len(train), np.inf))
        scores.append(
            [
                np.mean(data.labels[train][found.argmin(1)] == data.labels[cases])
                for found, cases in ((inside, train), (distances[np.ix_(test, train)], test))
            ]
        )
    return np.array(scores)
