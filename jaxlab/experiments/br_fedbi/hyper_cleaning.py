"""Hyper-cleaning: which labels of a public training set are wrong, from private validation data of clients some of
whom lie.

Every client knows the public training set, part of whose labels were replaced at random, and has clean validation
images of its own. The upper variable holds one weight a training image (a logit), the lower one is a linear classifier
trained on the weighted images. Clients see the whole training set, since a weight that only one client knew of would
have only one message, which no robust rule can trust.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from jaxlab.data.images import LabelledImages
from jaxlab.experiments.br_fedbi.simulation import METHODS, Scenario, share_out, stepper_for
from jaxlab.optim import bilevel, make_aggregator
from jaxlab.optim.bilevel import BilevelPoint, BilevelProblem, ClientBatches

__all__ = ["NoisyImages", "area_under_curve", "clean", "corrupt"]

RIDGE = 1e-2
# The linear classifier's problem is smooth with a constant near 2 (images in [0, 1], mean squared norm about 16).
LEARNING_RATE, RATIOS = 0.05, (4.0, 2.0)


class NoisyImages(NamedTuple):
    """A public training set with wrong labels, and clean images of clients and for judging.

    Attributes:
      images, labels: ``[N, features]`` and ``[N]``, public.
      wrong: ``[N]``, whose label was replaced by another class.
      validation: ``[n, m, features]`` and ``[n, m]``, of each client.
      judging: ``[k, features]`` and ``[k]``.
    """

    images: Float[Array, "N features"]
    labels: Int[Array, " N"]
    wrong: Bool[Array, " N"]
    validation: tuple[Array, Array]
    judging: tuple[Array, Array]


def corrupt(
    data: LabelledImages, *, examples: int, share: float, clients: int, gamma: float, held_out: int, seed: int
) -> NoisyImages:
    """Public training images, a ``share`` of them with another label drawn at random; the rest dealt out to clients.

    Raises:
      ValueError: if the clients would get fewer than 5 images.
    """
    random = np.random.default_rng(seed)
    outside, public, inside = np.split(random.permutation(len(data.labels)), [held_out, held_out + examples])
    wrong = random.permutation(examples) < round(share * examples)
    moved = data.labels[public] + random.integers(1, data.n_classes, examples).astype(np.int32)
    labels = np.where(wrong, moved % data.n_classes, data.labels[public])
    rows = share_out(data.labels, inside, clients=clients, gamma=gamma, seed=seed)

    def pick(index: np.ndarray) -> tuple[Array, Array]:
        return jnp.asarray(data.images[index]), jnp.asarray(data.labels[index])

    return NoisyImages(
        jnp.asarray(data.images[public]), jnp.asarray(labels), jnp.asarray(wrong), pick(rows), pick(outside)
    )


def area_under_curve(scores: Float[np.ndarray, " N"], positive: Bool[np.ndarray, " N"]) -> float:
    """Probability that a positive example scores higher than another; ties count half."""
    above, below = scores[positive][:, None], scores[~positive]
    return float(np.mean(above > below) + 0.5 * np.mean(above == below))


def logits(y: PyTree, images: Array) -> Array:
    """Of the linear classifier."""
    return images @ y["kernel"] + y["bias"]


def _upper(x: Array, y: PyTree, batch: tuple[Array, Array]) -> Array:
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(y, images), labels).mean()


def _lower(x: Array, y: PyTree, batch: tuple[Array, Array]) -> Array:
    images, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(y, images), labels)
    return jnp.mean(jax.nn.sigmoid(x) * losses) + RIDGE / 2 * optax.tree.norm(y, squared=True)


PROBLEM = BilevelProblem(_upper, _lower)


@functools.partial(jax.jit, static_argnames=("byzantine", "aggregators", "attack_names", "rounds", "classes"))
def clean(
    data: NoisyImages,
    key: Key[Array, ""],
    aggregator: Int[Array, ""],
    *,
    byzantine: int,
    aggregators: tuple[str, ...],
    attack_names: tuple[str, ...],
    rounds: int,
    classes: int,
) -> dict[str, Array]:
    """BR-FedBiM with Adam on the weights, under every attack.

    Returns:
      ``weights`` ``[attacks, N]`` in (0, 1), and ``accuracy`` ``[attacks]`` of the classifier on clean images.
    """
    n = len(data.validation[1])
    mask = jnp.arange(n) >= n - byzantine
    rules = tuple(make_aggregator(name, f=byzantine) for name in aggregators)
    start = bilevel.bilevel_point(
        jnp.zeros(len(data.labels)),
        {"kernel": jnp.zeros((data.images.shape[1], classes)), "bias": jnp.zeros(classes)},
    )
    public = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), (data.images, data.labels))
    method = METHODS["br_fedbi_m"]

    def under(attack: Array) -> dict[str, Array]:
        scenario = Scenario(attack, aggregator, mask, jnp.float32(LEARNING_RATE), jnp.float32(method.beta), key)
        init, step = stepper_for(
            method,
            PROBLEM,
            scenario,
            aggregators=rules,
            attack_names=attack_names,
            ratios=RATIOS,
            server=BilevelPoint(optax.scale_by_adam(), optax.identity(), optax.identity()),
        )

        def one_round(state, _):
            return step(key, state, ClientBatches(public, data.validation))[0], None

        state, _ = jax.lax.scan(one_round, init(start), length=rounds)
        images, labels = data.judging
        correct = logits(state.point.lower, images).argmax(-1) == labels
        return {"weights": jax.nn.sigmoid(state.point.upper), "accuracy": correct.mean()}

    return jax.lax.map(under, jnp.arange(len(attack_names)))
