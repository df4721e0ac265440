"""Arithmetic on the weights of trained models.

* :mod:`~jaxlab.editing.task_vectors`: what training changed, as something to add, scale and compare.
* :mod:`~jaxlab.editing.fairness`: group fairness, and what task arithmetic does to it.
"""

from jaxlab.editing import fairness, task_vectors

__all__ = ["fairness", "task_vectors"]
