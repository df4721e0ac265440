"""Attacks by name, and several of them in one program."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from jax import lax
from jaxtyping import Array, Int, Key, PyTree

from jaxlab.optim.attacks.adaptive import DistanceAttack
from jaxlab.optim.attacks.attack import Attack, Byzantine
from jaxlab.optim.attacks.crafted import (
    ALittleIsEnough,
    BitFlip,
    Constant,
    Gaussian,
    InnerProduct,
    Mimic,
    NoAttack,
    SignFlip,
)

__all__ = ["ATTACKS", "make_attack", "switch"]

ATTACKS: MappingProxyType[str, Callable[..., Attack]] = MappingProxyType(
    {
        "none": NoAttack,
        "sign_flip": SignFlip,
        "inner_product": InnerProduct,
        "alie": ALittleIsEnough,
        "bit_flip": BitFlip,
        "mimic": Mimic,
        "gaussian": Gaussian,
        "zero": Constant,
        "nan": lambda: Constant(float("nan")),
        "inf": lambda: Constant(float("inf")),
        "min_max": DistanceAttack,
        "min_sum": lambda: DistanceAttack("min_sum"),
    }
)


def make_attack(name: str, **options: Any) -> Attack:
    """An attack by name.

    Raises:
      ValueError: for an unknown name, listing the known ones.
      TypeError: for an option that the attack does not have.
    """
    if name not in ATTACKS:
        raise ValueError(f"unknown attack {name!r}; the attacks are {', '.join(ATTACKS)}")
    return ATTACKS[name](**options)


def switch(
    index: Int[Array, ""] | int,
    attacks: Sequence[Attack],
    stacked: PyTree,
    byzantine: Byzantine,
    *,
    key: Key[Array, ""] | None = None,
    axis_name: str | None = None,
) -> PyTree:
    """``attacks[index]``, chosen while the program runs. An index out of range takes the nearest one.

    Raises:
      ValueError: without attacks, and as `Attack.apply` does.
    """
    if not attacks:
        raise ValueError("switch needs at least one attack, got none")
    branches = [
        lambda messages, attack=attack: attack.apply(messages, byzantine, key=key, axis_name=axis_name)
        for attack in attacks
    ]
    return lax.switch(index, branches, stacked)
