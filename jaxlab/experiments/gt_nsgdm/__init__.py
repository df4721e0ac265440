"""GT-NSGDm: decentralised training that survives heavy-tailed gradient noise (arXiv 2505.03736).

* :mod:`~jaxlab.experiments.gt_nsgdm.bias`: normalisation without tracking rests at the wrong point, in closed form.
* :mod:`~jaxlab.experiments.gt_nsgdm.regression`: robust regression under Gaussian, Student-t and stable noise.
* :mod:`~jaxlab.experiments.gt_nsgdm.rates`: convergence rate and speed-up with the number of nodes.
* :mod:`~jaxlab.experiments.gt_nsgdm.language_model`: decentralised training of a decoder on real text.
* :mod:`~jaxlab.experiments.gt_nsgdm.claims`, :mod:`~jaxlab.experiments.gt_nsgdm.config`: bounds and sizes.
* :mod:`~jaxlab.experiments.gt_nsgdm.experiment`: the run that measures the claims.
"""

from jaxlab.experiments.gt_nsgdm.experiment import EXPERIMENT

__all__ = ["EXPERIMENT"]
