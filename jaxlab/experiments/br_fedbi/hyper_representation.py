"""Hyper-representation: clients learn features on validation data for a last layer that is fitted on training data.

The upper variable is a hidden tanh layer, the lower one the last layer, with a ridge that makes its problem strongly
convex. Images are dealt out with gamma-similarity; the last clients, which have drawn no other data than the rest, are
Byzantine.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxlab.data.images import LabelledImages
from jaxlab.experiments.br_fedbi.simulation import LABEL_FLIP, METHODS, Scenario, share_out, stepper_for
from jaxlab.optim import bilevel, make_aggregator
from jaxlab.optim.attacks import flip_labels
from jaxlab.optim.bilevel import BilevelProblem, ClientBatches

__all__ = ["FederatedImages", "Setting", "deal", "initial_point", "problem_of", "train"]

# Shares of a client's images that it trains the last layer and the features on.
_LOWER_SHARE = 0.6


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compiled into a program.

    Attributes:
      clients, byzantine: how many, and how many the aggregators assume.
      aggregators, attacks: names of all that a run can choose among.
      rounds, blocks: rounds, in so many blocks of which the average accuracy is reported.
      batch, big_batch: images of a batch, and of one with which PAGE refreshes.
      refresh_probability: of PAGE.
      classes, hidden: sizes of the network.
      ridge: on the last layer.
      ratios: step sizes of lower and auxiliary variable, as multiples of the upper one's.
      radius: of the ball that z stays in.
    """

    clients: int
    byzantine: int
    aggregators: tuple[str, ...]
    attacks: tuple[str, ...]
    rounds: int
    blocks: int
    batch: int
    big_batch: int
    refresh_probability: float
    classes: int
    hidden: int
    ridge: float
    ratios: tuple[float, float]
    radius: float


class FederatedImages(NamedTuple):
    """Images of clients, and held-out ones to choose step sizes on and to judge on.

    Attributes:
      images, labels: ``[clients, images, features]`` and ``[clients, images]``.
      choosing, judging: pairs of ``[images, features]`` and ``[images]``.
    """

    images: Float[Array, "n m features"]
    labels: Int[Array, "n m"]
    choosing: tuple[Array, Array]
    judging: tuple[Array, Array]


def deal(data: LabelledImages, *, clients: int, gamma: float, held_out: int, seed: int) -> FederatedImages:
    """Share images out among clients, all of which get the same number.

    Raises:
      ValueError: if the clients would get fewer than 5 images.
    """
    outside, inside = np.split(np.random.default_rng(seed).permutation(len(data.labels)), [held_out])
    rows = share_out(data.labels, inside, clients=clients, gamma=gamma, seed=seed)
    choosing, judging = np.array_split(outside, 2)

    def pick(index: np.ndarray) -> tuple[Array, Array]:
        return jnp.asarray(data.images[index]), jnp.asarray(data.labels[index])

    return FederatedImages(*pick(rows), pick(choosing), pick(judging))


def logits(x: PyTree, y: PyTree, images: Array) -> Array:
    """Of the network."""
    return jnp.tanh(images @ x["kernel"] + x["bias"]) @ y["kernel"] + y["bias"]


def problem_of(ridge: float) -> BilevelProblem:
    """Cross-entropy above, cross-entropy with a ridge on the last layer below; a batch is (images, labels)."""

    def upper(x: PyTree, y: PyTree, batch: tuple[Array, Array]) -> Array:
        images, labels = batch
        return optax.softmax_cross_entropy_with_integer_labels(logits(x, y, images), labels).mean()

    def lower(x: PyTree, y: PyTree, batch: tuple[Array, Array]) -> Array:
        return upper(x, y, batch) + ridge / 2 * optax.tree.norm(y, squared=True)

    return BilevelProblem(upper, lower)


def initial_point(key: Key[Array, ""], features: int, hidden: int, classes: int) -> bilevel.BilevelPoint:
    """Random features and a last layer of zeros."""
    kernel = jax.random.normal(key, (features, hidden)) / jnp.sqrt(features)
    return bilevel.bilevel_point(
        {"kernel": kernel, "bias": jnp.zeros(hidden)},
        {"kernel": jnp.zeros((hidden, classes)), "bias": jnp.zeros(classes)},
    )


@functools.partial(jax.jit, static_argnames=("program", "setting"))
def train(
    data: FederatedImages,
    key: Key[Array, ""],
    learning_rate: Float[Array, ""],
    beta: Float[Array, ""],
    aggregator: Int[Array, ""],
    byzantine: Int[Array, ""],
    single_level: Any,
    *,
    program: str,
    setting: Setting,
) -> dict[str, Array]:
    """Train under every attack of the setting, one after the other.

    Args:
      data: of all clients.
      key: of the start, the batches, PAGE's coin and the attacks.
      learning_rate, beta: of the method.
      aggregator: index among the setting's.
      byzantine: how many clients really are.
      single_level: hold z at 0 and draw all batches from all of a client's images, so that both layers follow the
        plain gradient.
      program: as in `Method`.
      setting: all that is fixed.

    Returns:
      ``choosing`` and ``judging``, accuracies ``[attacks, blocks]``; ``boundary`` and ``convex``, shares of rounds in
      which z was projected and in which no client saw negative curvature, ``[attacks]``.
    """
    n, m = data.labels.shape
    method = next(method for method in METHODS.values() if method.program == program)
    sub_steps = (method.messages,) if program == "sub_loops" else ()
    start_key, lower_key, upper_key, big_key, coin_key, attack_key = jax.random.split(key, 6)
    # Drawn at once, flat: positions in [0, 1) of the images of every batch.
    shape = (setting.rounds, n, *sub_steps, setting.batch)
    draws = [jax.random.uniform(k, shape) for k in (lower_key, upper_key)]
    if program == "page":
        draws += list(jax.random.uniform(big_key, (2, setting.rounds, n, setting.big_batch)))
    coins = jax.random.bernoulli(coin_key, setting.refresh_probability, (setting.rounds,)).at[0].set(True)
    cut = int(_LOWER_SHARE * m)
    problem = problem_of(setting.ridge)
    start = initial_point(start_key, data.images.shape[-1], setting.hidden, setting.classes)
    rules = tuple(make_aggregator(name, f=setting.byzantine) for name in setting.aggregators)
    mask = jnp.arange(n) >= n - byzantine

    def under(attack: Array) -> dict[str, Array]:
        labels: Any = data.labels
        if LABEL_FLIP in setting.attacks:
            lying = mask & (attack == setting.attacks.index(LABEL_FLIP))
            labels = flip_labels(labels, setting.classes, byzantine=lying)

        def batches(lower: Array, upper: Array) -> ClientBatches:
            first = jnp.where(single_level, lower * m, lower * cut).astype(jnp.int32)
            second = jnp.where(single_level, upper * m, cut + upper * (m - cut)).astype(jnp.int32)
            return ClientBatches(
                *(jax.vmap(lambda a, b, i: (a[i], b[i]))(data.images, labels, i) for i in (first, second))
            )

        scenario = Scenario(attack, aggregator, mask, learning_rate, beta, attack_key)
        init, step = stepper_for(
            method,
            problem,
            scenario,
            refresh_probability=setting.refresh_probability,
            aggregators=rules,
            attack_names=setting.attacks,
            ratios=setting.ratios,
            radius=jnp.where(single_level, 0.0, setting.radius),
        )

        def one_round(state, draws):
            coin, lower, upper, *big = draws
            extra: dict[str, Any] = {}
            if program == "page":
                extra = {"refresh_batches": batches(*big), "refresh": coin}
            state, info = step(key, state, batches(lower, upper), **extra)
            point = state.point
            correct = {
                name: jnp.mean(logits(point.upper, point.lower, images).argmax(-1) == labels)
                for name, (images, labels) in (("choosing", data.choosing), ("judging", data.judging))
            }
            return state, correct | {"boundary": 1.0 * info.on_boundary, "convex": 1.0 * info.strongly_convex}

        _, found = jax.lax.scan(one_round, init(start), (coins, *draws))
        blocks = {name: found[name].reshape(setting.blocks, -1).mean(1) for name in ("choosing", "judging")}
        return blocks | {name: found[name].mean() for name in ("boundary", "convex")}

    return jax.lax.map(under, jnp.arange(len(setting.attacks)))


def worst(accuracies: Float[np.ndarray, "*batch attacks"], names: Sequence[str]) -> np.ndarray:
    """Least accuracy over the attacks; being left alone is none."""
    return accuracies[..., [name != "none" for name in names]].min(-1)


def at_messages(curves: Float[np.ndarray, "*batch blocks"], share: float) -> np.ndarray:
    """Accuracy in the block that ends with this share of the rounds, at most."""
    blocks = curves.shape[-1]
    return curves[..., max(int(share * blocks + 1e-9), 1) - 1]


def describe(names: Sequence[str], accuracies: np.ndarray) -> Mapping[str, float]:
    """Accuracy by attack, in percent."""
    return {name: 100 * float(value) for name, value in zip(names, accuracies, strict=True)}
