"""Families of decoders: Llama, Qwen2, Qwen3 and Mistral."""

from jaxlab.nn.checkpoints.family import Family

__all__ = ["FAMILIES"]

FAMILIES: tuple[Family, ...] = ()
