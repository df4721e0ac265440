"""Families of encoders: what reads text or pictures whole."""

from jaxlab.nn.checkpoints.family import Family

__all__ = ["FAMILIES"]

FAMILIES: tuple[Family, ...] = ()
