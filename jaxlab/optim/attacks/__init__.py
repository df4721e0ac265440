r"""Attacks on robust aggregation: what Byzantine workers send when they see all honest messages.

An :class:`Attack` rewrites the Byzantine rows of stacked messages (leaves ``[n, ...]``; inside ``jax.shard_map``, with
``axis_name``, ``[n / devices, ...]``) and leaves honest rows as they are. ``byzantine`` says which rows: a number (the
last ones) or a mask ``[n]`` over all workers. With :math:`\mu` and :math:`\sigma` the mean and the standard deviation
of the honest messages, coordinate by coordinate, a Byzantine worker sends

=================== ======================================= =====================================================
attack              message                                 source
=================== ======================================= =====================================================
`NoAttack`          its own
`SignFlip`          :math:`-\mu`                            byzfl
`InnerProduct`      :math:`-\epsilon \mu`                   Xie et al. 2019, arXiv 1903.03936 (IPM, FOE)
`ALittleIsEnough`   :math:`\mu + z \sigma`                  Baruch et al. 2019, arXiv 1902.06156 (ALIE)
`BitFlip`           its own, negated
`Mimic`             that of one honest worker               Karimireddy et al. 2022, arXiv 2006.09365
`Gaussian`          :math:`N(m, s^2)`
`Constant`          the same number everywhere: 0, NaN, inf
`DistanceAttack`    :math:`\mu + \gamma p`, gamma maximal   Shejwalkar, Houmansadr 2021 (min-max, min-sum)
`OptimalScale`      the worst scale of another attack       arXiv 2302.01772, byzfl
=================== ======================================= =====================================================

Label flipping is an attack on data: :func:`flip_labels`. :func:`switch` applies one of several attacks by a traced
index: one program for all of them.

Example:
  >>> import jax.numpy as jnp
  >>> from jaxlab.optim import attacks
  >>> messages = {"w": jnp.array([1.0, 3.0, 9.0])}
  >>> attacks.SignFlip().apply(messages, byzantine=1)["w"].tolist()
  [1.0, 3.0, -2.0]
"""

from jaxlab.optim.attacks.adaptive import DistanceAttack, OptimalScale
from jaxlab.optim.attacks.attack import Attack, Byzantine, ScaledAttack, byzantine_mask, flip_labels
from jaxlab.optim.attacks.choice import ATTACKS, make_attack, switch
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

__all__ = [
    "ATTACKS",
    "ALittleIsEnough",
    "Attack",
    "BitFlip",
    "Byzantine",
    "Constant",
    "DistanceAttack",
    "Gaussian",
    "InnerProduct",
    "Mimic",
    "NoAttack",
    "OptimalScale",
    "ScaledAttack",
    "SignFlip",
    "byzantine_mask",
    "flip_labels",
    "make_attack",
    "switch",
]
