"""What a user of fairlearn would do instead: other thresholds for each group, or a reduction to weighted training."""

import importlib.util
import warnings
from typing import Any

import numpy as np

from jaxlab.experiments.task_arithmetic_fairness.people import People

__all__ = ["has_fairlearn", "mitigate"]

_ROWS = 6_000  # of the training part, for reductions, which fit dozens of models


def has_fairlearn() -> bool:
    """Whether it and scikit-learn are installed."""
    return all(importlib.util.find_spec(name) for name in ("fairlearn", "sklearn"))


def mitigate(
    people: People, validation_logits: np.ndarray, test_logits: np.ndarray, *, seed: int
) -> dict[str, np.ndarray]:
    """Predictions on the test part, ``[n]``, 0 or 1.

    ``threshold_*`` post-process full fine-tuning's scores with thresholds fitted on the validation part and need to
    know the group of a person to predict; ``gradient_*`` reduce to weighted logistic regressions on the training part
    (at most 6,000 rows), the allowed violation chosen on the validation part among three by the sum of both differences
    (accuracy within a point of the best). Groups are those of `People`, one a person.
    """
    from fairlearn.metrics import demographic_parity_difference, equalized_odds_difference
    from fairlearn.postprocessing import ThresholdOptimizer
    from fairlearn.reductions import DemographicParity, EqualizedOdds, ExponentiatedGradient
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.linear_model import LogisticRegression

    class Scores(ClassifierMixin, BaseEstimator):
        """Reads scores off the only column."""

        classes_ = np.array([0, 1])

        def fit(self, x: Any, y: Any) -> "Scores":
            return self

        def predict_proba(self, x: Any) -> np.ndarray:
            scores = np.asarray(x)[:, 0]
            return np.stack([1 - scores, scores], 1)

        def predict(self, x: Any) -> np.ndarray:
            return (np.asarray(x)[:, 0] > 0.5).astype(int)

    parts = (people.train, people.validation, people.test)
    ids = [part.membership.argmax(1) for part in parts]
    scores = [1 / (1 + np.exp(-logits.astype(np.float64)))[:, None] for logits in (validation_logits, test_logits)]
    found: dict[str, np.ndarray] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's and fairlearn's deprecations of each other
        for name, constraint in (("parity", "demographic_parity"), ("odds", "equalized_odds")):
            optimizer = ThresholdOptimizer(
                estimator=Scores(), constraints=constraint, prefit=True, predict_method="predict_proba"
            )
            optimizer.fit(scores[0], people.validation.labels, sensitive_features=ids[1])
            found[f"threshold_{name}"] = np.asarray(
                optimizer.predict(scores[1], sensitive_features=ids[2], random_state=seed)
            )
        for name, kind in (("parity", DemographicParity), ("odds", EqualizedOdds)):
            tried = []
            for allowed in (0.01, 0.03, 0.1):
                reduction = ExponentiatedGradient(
                    LogisticRegression(solver="newton-cholesky"), kind(difference_bound=allowed), max_iter=20
                )
                reduction.fit(
                    people.train.inputs[:_ROWS], people.train.labels[:_ROWS], sensitive_features=ids[0][:_ROWS]
                )
                on_validation = reduction.predict(people.validation.inputs, random_state=seed)
                labels = people.validation.labels
                sums = [
                    metric(labels, on_validation, sensitive_features=ids[1])
                    for metric in (demographic_parity_difference, equalized_odds_difference)
                ]
                tried.append((np.mean(on_validation == labels), sum(sums), reduction))
            enough = max(accuracy for accuracy, _, _ in tried) - 0.01
            best = min((of for of in tried if of[0] >= enough), key=lambda of: of[1])[2]
            found[f"gradient_{name}"] = np.asarray(best.predict(people.test.inputs, random_state=seed))
    return {name: values.astype(np.float32) for name, values in found.items()}
