"""BR-FedBi: federated bilevel optimisation with Byzantine clients (ICLR 2026).

* :mod:`~jaxlab.experiments.br_fedbi.quadratic`: convergence, exact recovery, noise floor, breakdown; in closed form.
* :mod:`~jaxlab.experiments.br_fedbi.hyper_representation`: features that clients learn from digits.
* :mod:`~jaxlab.experiments.br_fedbi.hyper_cleaning`: finding wrong labels.
* :mod:`~jaxlab.experiments.br_fedbi.simulation`: methods, attacks and aggregators in one compiled program.
* :mod:`~jaxlab.experiments.br_fedbi.claims`, :mod:`~jaxlab.experiments.br_fedbi.config`: bounds and sizes.
* :mod:`~jaxlab.experiments.br_fedbi.experiment`: the run that measures the claims.
"""

from jaxlab.experiments.br_fedbi.experiment import EXPERIMENT

__all__ = ["EXPERIMENT"]
