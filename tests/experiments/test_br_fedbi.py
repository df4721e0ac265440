"""What the experiment adds to the battery: the quadratic against NumPy, the protocol, configs that make no sense."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.data.images import LabelledImages, load_images
from jaxlab.experiments.br_fedbi import hyper_cleaning, hyper_representation, quadratic, simulation
from jaxlab.experiments.br_fedbi.config import PRESETS, Config


def test_the_quadratic_goes_where_numpy_goes() -> None:
    """Whole paths of alike clients with momentum, written out."""
    rounds, beta = 40, 0.5

    def written_out(clients: list[np.ndarray], solution: list[np.ndarray], aggregate: float) -> tuple[list, list]:
        """Errors and the last point, if the aggregate is so many times the honest message."""
        a, b, c, target = clients
        point, momentum, errors = [np.zeros(3), np.zeros(4), np.zeros(4)], None, []
        for _ in range(rounds):
            x, y, z = point
            found = [0.1 * x - b.T @ z, a @ y - b @ x - c, a @ z + y - target]
            previous = found if momentum is None else momentum
            momentum = [beta * m + (1 - beta) * d for m, d in zip(previous, found, strict=True)]
            rates = 0.05, 0.2, 0.2
            point = [v - rate * aggregate * m for v, rate, m in zip(point, rates, momentum, strict=True)]
            errors.append(max(np.abs(v - s).max() for v, s in zip(point, solution, strict=True)))
        return errors, point

    with jax.enable_x64(True):
        key = jax.random.key(5)
        clients = quadratic.Clients.draw(key, jnp.asarray(True))
        one, solution = [np.asarray(v[0]) for v in clients], [np.asarray(v) for v in clients.solution()]
        honest, end = written_out(one, solution, 1.0)
        reversed_mean, _ = written_out(one, solution, (8 - 3 * 3) / 11)

        def path(rule: int, attack: str, byzantine: int) -> dict:
            indices = (jnp.int32(i) for i in (rule, quadratic.ATTACKS.index(attack), byzantine))
            alike, noise = jnp.asarray(True), jnp.zeros(())
            return quadratic.path(key, alike, jnp.asarray(beta), noise, *indices, key, rounds=rounds)

        for rule, attack, byzantine, expected in (
            (0, "none", 3, honest),
            # What robust rules make of equal honest messages is that message, whoever lies.
            (1, "inner_product", 3, honest),
            (2, "inner_product", 5, honest),
            (0, "inner_product", 3, reversed_mean),
        ):
            np.testing.assert_allclose(path(rule, attack, byzantine)["error"], expected, rtol=1e-9)
        norm = np.linalg.norm(clients.hypergradient(jnp.asarray(end[0])))
        np.testing.assert_allclose(path(1, "none", 3)["norm"][-1], norm, rtol=1e-9)


def test_every_rule_refuses_half() -> None:
    assert all(quadratic.refuses_half(11).values())
    assert all(quadratic.refuses_half(12).values())


def test_clients_get_as_many_images_each_and_no_image_twice() -> None:
    data = load_images("digits")
    dealt = hyper_representation.deal(data, clients=25, gamma=0.3, held_out=297, seed=1)
    assert dealt.images.shape == (25, 60, 64)
    assert len(dealt.choosing[1]) + len(dealt.judging[1]) == 297
    everything = np.concatenate([np.asarray(dealt.images).reshape(-1, 64), dealt.choosing[0], dealt.judging[0]])
    # The set has no two equal images, so as many distinct ones as there are means that none is used twice.
    assert len(np.unique(everything, axis=0)) == len(np.unique(data.images, axis=0)) == 1797
    largest_class = [np.bincount(labels, minlength=10).max() for labels in np.asarray(dealt.labels)]
    assert np.mean(largest_class) > 30  # 42 of 60 are sorted by class
    with pytest.raises(ValueError, match="7 examples are too few for 2 clients, who need 5 each"):
        simulation.share_out(np.zeros(7, int), np.arange(7), clients=2, gamma=0.5, seed=0)


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    data = load_images("digits")
    np.testing.assert_array_equal(data.images, np.float32(digits.data / 16))
    np.testing.assert_array_equal(data.labels, digits.target)
    assert data.n_classes == 10
    with pytest.raises(ValueError, match="unknown images 'digit': known are digits and hf:OWNER/NAME"):
        load_images("digit")


def test_wrong_labels_are_wrong() -> None:
    data = load_images("digits")
    noisy = hyper_cleaning.corrupt(data, examples=300, share=0.4, clients=10, gamma=0.5, held_out=297, seed=0)
    assert noisy.wrong.sum() == 120
    truth = {image.tobytes(): label for image, label in zip(data.images, data.labels, strict=True)}
    right = np.array([truth[np.asarray(image).tobytes()] for image in noisy.images])
    np.testing.assert_array_equal(right != np.asarray(noisy.labels), noisy.wrong)


def test_area_under_the_curve_equals_scikit_learns() -> None:
    from sklearn.metrics import roc_auc_score

    random = np.random.default_rng(0)
    scores, positive = random.integers(0, 9, 60) / 9, random.random(60) < 0.4
    assert hyper_cleaning.area_under_curve(scores, positive) == pytest.approx(roc_auc_score(positive, scores))


def test_worst_leaves_out_being_left_alone() -> None:
    accuracies = np.array([[0.1, 0.9, 0.7], [0.2, 0.4, 0.8]])
    np.testing.assert_array_equal(hyper_representation.worst(accuracies, ("none", "alie", "nan")), [0.7, 0.4])


def test_equal_messages_are_three_eighths_of_the_blocks() -> None:
    curves = np.arange(40.0)
    assert hyper_representation.at_messages(curves, 3 / 8) == 14.0
    assert hyper_representation.at_messages(curves, 1.0) == 39.0


def test_label_flip_and_single_level_training() -> None:
    """What is traced decides: flipped labels of liars alone, and z at 0 where it has to be."""
    data = LabelledImages(np.eye(10, dtype=np.float32)[np.arange(400) % 10], np.arange(400, dtype=np.int32) % 10)
    dealt = hyper_representation.deal(data, clients=4, gamma=1.0, held_out=40, seed=0)
    config = Config(
        clients=4, byzantine=1, cleaning_clients=7, aggregators=("mean",), attacks=("none", "label_flip"), sweep=(0,),
        rounds=64, blocks=8, hidden=12, methods=("br_fedbi_m",),
    )  # fmt: skip

    def train(byzantine: int, single_level: bool) -> dict:
        scalars = jnp.float32(1.0), jnp.float32(0.5), jnp.int32(0), jnp.int32(byzantine), jnp.bool_(single_level)
        return hyper_representation.train(
            dealt, jax.random.key(0), *scalars, program="momentum", setting=config.setting(10)
        )

    honest, outvoted, single = train(0, False), train(3, False), train(0, True)
    np.testing.assert_array_equal(honest["judging"][0], honest["judging"][1])  # nobody flips
    assert honest["judging"][0, -1] == 1.0
    assert outvoted["judging"][1, -1] < 0.2  # three of four teach the opposite class
    np.testing.assert_array_equal(outvoted["judging"][0], honest["judging"][0])
    assert single["judging"][0, -1] == 1.0
    assert (single["boundary"] == 1.0).all()
    assert (honest["boundary"] < 1.0).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"aggregators": ("average",)}, "unknown name 'average'"),
        ({"aggregators": ("bucketing+coordinate_median",)}, "draw at random or remember something"),
        ({"aggregators": ("centred_clipping",)}, "draw at random or remember something"),
        ({"attacks": ("shout",)}, "unknown attack 'shout'"),
        ({"attacks": ("none",)}, "attacks must hold one beside none"),
        ({"methods": ("sgdm",)}, "methods must be some of br_fedbi, .*, got sgdm"),
        ({"byzantine": 13}, "cannot tolerate f=13 of n=25 workers: need 2f < n, at most f=12"),
        ({"sweep": (0, 13)}, "sweep must stay below half of the 25 clients, got 13"),
        ({"rounds": 100}, "rounds must be a multiple of 40, got 100"),
        ({"blocks": 20, "rounds": 100}, "blocks must be a multiple of 8, got 20"),
        ({"betas": (0.5, 0.0)}, "betas must be two or more in .*increasing order"),
        ({"gamma": 1.5}, "gamma must be at most 1, got 1.5"),
        ({"learning_rates": (0.0,)}, "learning_rates must be positive, got 0.0"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
    ],
)
def test_bad_configs_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)


def test_presets_compare_at_equal_messages() -> None:
    for config in PRESETS.values():
        assert config.blocks % 8 == 0
        assert config.rounds % config.blocks == 0
