"""Pre-training: transitions are those of the search, the loss is the written one, and the weights reach a search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.blackbox import ABOM, Structure, Transitions, collect, init, minimize, pretrain

SETTINGS = ABOM(population_size=6, coordinate_range=10.0)
LOWER, UPPER = jnp.zeros(3), jnp.asarray([1.0, 2, 4])
KEY = jax.random.key(0)


def bowl(x):
    return jnp.sum((x - 0.5) ** 2)


@pytest.fixture(scope="module")
def transitions() -> Transitions:
    return collect(bowl, SETTINGS, LOWER, UPPER, KEY, max_evaluations=6 * 12)


def test_transitions_chain_and_are_in_the_coordinates_of_the_operators(transitions) -> None:
    assert transitions.population.shape == (11, 6, 3)
    np.testing.assert_allclose(transitions.successor[:-1], transitions.population[1:], rtol=1e-5)
    assert np.abs(transitions.population).max() <= 10
    np.testing.assert_array_equal(transitions.feature, np.broadcast_to(np.arange(6), (11, 6)))
    found = minimize(bowl, SETTINGS, LOWER, UPPER, KEY, max_evaluations=6 * 12)
    last = transitions.successor[-1] / 10 * (UPPER - LOWER) / 2 + (UPPER + LOWER) / 2
    np.testing.assert_allclose(last, found.state.population, rtol=1e-4, atol=1e-5)


def test_training_fits_the_transitions(transitions) -> None:
    settings = SETTINGS.replace(crossover_dropout=0.0, mutation_dropout=0.0, structure=Structure(swap=False))
    parameters, losses = pretrain(transitions, settings, jax.random.key(1), steps=400, learning_rate=1e-2)
    assert losses[-20:].mean() < 0.7 * losses[:5].mean()
    started = init(settings, LOWER, UPPER, KEY, parameters=parameters)
    for ours, theirs in zip(jax.tree.leaves(started.parameters), jax.tree.leaves(parameters), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_copying_the_parents_costs_their_distance_to_the_survivors(transitions) -> None:
    """With full dropout and no swap nothing is added, so the first loss is the distance itself."""
    settings = SETTINGS.replace(structure=Structure(swap=False), crossover_dropout=1.0, mutation_dropout=1.0)
    one = jax.tree.map(lambda leaf: leaf[:1], transitions)
    _, losses = pretrain(one, settings, KEY, steps=1, batch_size=4)
    np.testing.assert_allclose(losses[0], jnp.sum((one.successor - one.population) ** 2), rtol=1e-5)


def test_what_cannot_be_trained_is_named(transitions) -> None:
    with pytest.raises(ValueError, match="transitions are of populations of 6, the settings of 20"):
        pretrain(transitions, ABOM(), KEY, steps=1)
    with pytest.raises(ValueError, match="at least one step, transition and batch entry, got 0, 11 and 256"):
        pretrain(transitions, SETTINGS, KEY, steps=0)
    with pytest.raises(ValueError, match="must pay for two populations of 6, got 11"):
        collect(bowl, SETTINGS, LOWER, UPPER, KEY, max_evaluations=11)
