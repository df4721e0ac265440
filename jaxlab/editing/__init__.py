"""Arithmetic on the weights of trained models.

* :mod:`~jaxlab.editing.task_vectors`: what training changed, as something to add, scale and compare.
* :mod:`~jaxlab.editing.merging`: one model of several experts, in memory or from files to files.
* :mod:`~jaxlab.editing.expert_merging`: the same with coefficients that are learned on a few inputs.
* :mod:`~jaxlab.editing.fairness`: group fairness, and what task arithmetic does to it.
"""

from jaxlab.editing import expert_merging, fairness, merging, task_vectors

__all__ = ["expert_merging", "fairness", "merging", "task_vectors"]
