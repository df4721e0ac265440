"""Arithmetic on the weights of trained models.

* :mod:`~jaxlab.editing.task_vectors`: what training changed, as something to add, scale and compare.
"""

from jaxlab.editing import task_vectors

__all__ = ["task_vectors"]
