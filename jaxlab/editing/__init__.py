"""Arithmetic on the weights of trained models.

* :mod:`~jaxlab.editing.task_vectors`: what training changed, as something to add, scale and compare.
* :mod:`~jaxlab.editing.expert_merging`: one model from several experts, by imitation of each on a few inputs.
* :mod:`~jaxlab.editing.fairness`: group fairness, and what task arithmetic does to it.
"""

from jaxlab.editing import expert_merging, fairness, task_vectors

__all__ = ["expert_merging", "fairness", "task_vectors"]
