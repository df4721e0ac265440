"""The other searches: each against a transcription or a closed form, and evosax in both directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.blackbox import ABOM, ask, differential_evolution, init, particle_swarm, random_search, run_search, tell

D = 3
LOWER, UPPER = -4 * jnp.ones(D), jnp.asarray([4.0, 4, 8])
KEY = jax.random.key(1)


def sphere(x):
    return jnp.sum((x - 1) ** 2)


def points_of(search, generations=6):
    """What a search asks for, driven by hand."""
    state, asked = search.init(LOWER, UPPER, KEY, generations), []
    for _ in range(generations):
        candidates, state = search.ask(state)
        asked.append(np.asarray(candidates))
        state = search.tell(state, candidates, jax.vmap(sphere)(candidates))
    return asked


SEARCHES = [random_search(8), particle_swarm(8), differential_evolution(8)]


@pytest.mark.parametrize("search", SEARCHES, ids=["random", "pso", "de"])
def test_a_search_stays_in_the_box_and_the_scan_finds_the_lowest_it_asked_for(search) -> None:
    asked = np.stack(points_of(search))
    assert ((asked >= LOWER) & (asked <= UPPER)).all()
    found = run_search(search, sphere, LOWER, UPPER, KEY, max_evaluations=48)
    lowest = np.minimum.accumulate(((asked - 1) ** 2).sum(-1).min(1))
    np.testing.assert_allclose(found.history, lowest, rtol=1e-5)
    np.testing.assert_allclose(sphere(found.best_solution), found.best_fitness, rtol=1e-6)
    assert found.best_fitness == found.history[-1]


@pytest.mark.parametrize("search", SEARCHES[1:], ids=["pso", "de"])
def test_population_searches_converge_where_random_search_does_not(search) -> None:
    runs = [run_search(s, sphere, LOWER, UPPER, KEY, max_evaluations=2400).best_fitness for s in (search, SEARCHES[0])]
    assert runs[0] < 1e-3 * runs[1]


def test_trials_of_differential_evolution_mix_three_others() -> None:
    """With full crossover every trial is a + F (b - c) of three different members, none of them its own."""
    search = differential_evolution(5, differential_weight=0.5, crossover_rate=1.0)
    low, high = -100 * jnp.ones(D), 100 * jnp.ones(D)
    state = search.init(low, high, KEY, 3)
    state = search.tell(state, search.ask(state)[0], jnp.ones(5))
    trials = np.asarray(search.ask(state)[0])
    members = np.asarray(state.population)
    for i, trial in enumerate(trials):
        others = [j for j in range(5) if j != i]
        mixes = [
            members[a] + 0.5 * (members[b] - members[c])
            for a in others
            for b in others
            for c in others
            if len({a, b, c}) == 3
        ]
        assert min(np.abs(np.clip(mix, low, high) - trial).max() for mix in mixes) < 1e-4


def test_without_crossover_one_variable_changes() -> None:
    search = differential_evolution(6, crossover_rate=0.0)
    first, second, *_ = points_of(search)
    np.testing.assert_array_equal((first != second).sum(1), 1)


def test_particles_without_pull_stand_still() -> None:
    first, second, *_ = points_of(particle_swarm(6, cognitive=0.0, social=0.0))
    np.testing.assert_array_equal(first, second)


def test_equal_settings_share_a_program() -> None:
    assert particle_swarm(8) is particle_swarm(8)
    assert differential_evolution(8) is not differential_evolution(8, crossover_rate=0.9)


def test_bad_budgets_and_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="max_evaluations must pay for 8 candidates, got 7"):
        run_search(random_search(8), sphere, LOWER, UPPER, KEY, max_evaluations=7)
    with pytest.raises(ValueError, match="differential evolution needs four members, got 3"):
        differential_evolution(3)


def test_cma_es_of_evosax_in_the_same_scan() -> None:
    """The adapter equals evosax's own loop on the unit cube, and solves what it should."""
    algorithms = pytest.importorskip("evosax.algorithms", reason="needs the peers extra: evosax")
    from jaxlab.blackbox import evosax

    found = run_search(evosax.cma_es(D, 8), sphere, LOWER, UPPER, KEY, max_evaluations=8 * 60)
    assert found.best_fitness < 1e-6
    algorithm = algorithms.CMA_ES(8, jnp.zeros(D))
    params = algorithm.default_params.replace(std_init=jnp.asarray(0.3))
    state, lowest = algorithm.init(KEY, jnp.full(D, 0.5), params), []
    for generation in range(5):
        points, state = algorithm.ask(jax.random.fold_in(KEY, generation), state, params)
        points = jnp.clip(points, 0, 1)
        fitness = jax.vmap(lambda u: sphere(LOWER + u * (UPPER - LOWER)))(points)
        lowest.append(fitness.min())
        state, _ = algorithm.tell(KEY, points, fitness, state, params)
    np.testing.assert_allclose(found.history[:5], np.minimum.accumulate(lowest), rtol=1e-4)
    with pytest.raises(TypeError, match="an algorithm of evosax is needed, got object"):
        evosax.search(object())


def test_searches_of_evosax_with_a_population_start_from_uniform_points() -> None:
    """The swarm of evosax: its first generation is the initial swarm, the next those of evosax's own loop."""
    algorithms = pytest.importorskip("evosax.algorithms", reason="needs the peers extra: evosax")
    from jaxlab.blackbox import evosax

    algorithm = algorithms.PSO(8, jnp.zeros(D))
    params = algorithm.default_params
    asked = points_of(evosax.search(algorithm), generations=3)
    unit = [(points - LOWER) / (UPPER - LOWER) for points in asked]
    assert len(np.unique(unit[0])) == 8 * D
    state = algorithm.init(KEY, unit[0], jax.vmap(sphere)(asked[0]), params)
    for generation in (1, 2):
        points, state = algorithm.ask(jax.random.fold_in(KEY, generation), state, params)
        np.testing.assert_allclose(jnp.clip(points, 0, 1), unit[generation], rtol=1e-4, atol=1e-5)
        state, _ = algorithm.tell(KEY, unit[generation], jax.vmap(sphere)(asked[generation]), state, params)


def test_abom_behind_the_interface_of_evosax() -> None:
    pytest.importorskip("evosax", reason="needs the peers extra: evosax")
    from jaxlab.blackbox import evosax

    settings = ABOM(population_size=8)
    algorithm = evosax.strategy(settings, LOWER, UPPER)
    params = algorithm.default_params
    evaluate = jax.vmap(sphere)
    own = init(settings, LOWER, UPPER, KEY)
    population, asked = ask(settings, own)
    state = algorithm.init(KEY, population, evaluate(population), params)
    own, _ = tell(settings, asked, population, evaluate(population))
    for generation in range(3):
        key = jax.random.fold_in(KEY, generation)
        candidates, state = algorithm.ask(key, state, params)
        expected, asked = ask(settings, own.replace(key=key))
        np.testing.assert_allclose(candidates, expected, rtol=1e-5, atol=1e-5)
        fitness = evaluate(candidates)
        state, metrics = algorithm.tell(key, candidates, fitness, state, params)
        own, _ = tell(settings, asked, expected, fitness)
        np.testing.assert_allclose(metrics["best_fitness"], own.best_fitness, rtol=1e-6)
        np.testing.assert_allclose(state.fitness, own.fitness, rtol=1e-5)
