"""The search: what elitism, ranks and boxes promise, one step against optax, one scan against ask and tell."""

import doctest
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlab.blackbox import (
    ABOM,
    Structure,
    advance,
    ask,
    draw_masks,
    init,
    minimize,
    minimize_host,
    reproduce,
    tell,
)
from jaxlab.blackbox.settings import checked_box

D, N = 4, 8
LOWER, UPPER = -10 * jnp.ones(D), jnp.asarray([10.0, 10, 20, 5])
SMALL = ABOM(population_size=N)
KEY = jax.random.key(5)


def sphere(x):
    return jnp.sum((x - 2) ** 2)


def shifted(data, x):
    return jnp.sum((x - data) ** 2)


def exponential(x):
    return jnp.exp(sphere(x) / 300)


def affine(x):
    return 3 * sphere(x) + 7


@pytest.fixture(scope="module")
def found():
    return minimize(sphere, SMALL, LOWER, UPPER, KEY, max_evaluations=400)


def one_generation(settings, generations=2, function=sphere):
    """State before, candidates, and state and info after the last of some generations."""
    state = init(settings, LOWER, UPPER, KEY)
    for _ in range(generations):
        candidates, asked = ask(settings, state)
        before = state
        state, info = tell(settings, asked, candidates, jax.vmap(function)(candidates))
    return before, candidates, state, info


def test_the_best_never_gets_worse_and_the_population_stays_sorted(found) -> None:
    best = np.asarray(found.history.best_fitness)
    assert (np.diff(best) <= 0).all()
    assert best[-1] == found.best_fitness == found.state.fitness[0] < best[0] / 10
    assert (np.diff(found.state.fitness) >= 0).all()
    np.testing.assert_allclose(jax.vmap(sphere)(found.state.population), found.state.fitness, rtol=1e-6)
    np.testing.assert_allclose(sphere(found.best_solution), found.best_fitness, rtol=1e-6)
    assert found.evaluations == 400 == N * int(found.state.generation) == N * len(best)


def test_scan_equals_ask_and_tell_equals_the_host_form(found) -> None:
    steps = []
    hosted = minimize_host(
        lambda points: np.asarray(jax.vmap(sphere)(points)), SMALL, LOWER, UPPER, KEY, max_evaluations=400,
        callback=lambda generation, info: steps.append((generation, info["best_fitness"])),
    )  # fmt: skip
    np.testing.assert_allclose(hosted.history.best_fitness, found.history.best_fitness, rtol=1e-5)
    np.testing.assert_allclose(hosted.best_solution, found.best_solution, rtol=1e-5)
    assert [generation for generation, _ in steps] == list(range(50))
    stopped = minimize_host(
        lambda points: (points**2).sum(1), SMALL, LOWER, UPPER, KEY, max_evaluations=400, callback=lambda g, _: g == 2
    )
    assert stopped.evaluations == 3 * N


def test_jit_equals_eager() -> None:
    state = init(SMALL, LOWER, UPPER, KEY)
    fitness = jnp.arange(N, dtype=jnp.float32)
    with jax.disable_jit():
        candidates, asked = ask(SMALL, state)
        eager, _ = tell(SMALL, asked, candidates, fitness)
        offspring, _ = ask(SMALL, eager)
    candidates, asked = ask(SMALL, state)
    jitted, _ = tell(SMALL, asked, candidates, fitness)
    np.testing.assert_allclose(ask(SMALL, jitted)[0], offspring, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transformed", [exponential, affine])
def test_a_run_sees_ranks_alone(found, transformed) -> None:
    other = minimize(transformed, SMALL, LOWER, UPPER, KEY, max_evaluations=400)
    np.testing.assert_array_equal(other.state.population, found.state.population)
    np.testing.assert_array_equal(other.history.loss, found.history.loss)


def test_raw_fitness_is_not_invariant() -> None:
    raw = SMALL.replace(fitness="raw")
    runs = [minimize(f, raw, LOWER, UPPER, KEY, max_evaluations=400).best_solution for f in (sphere, affine)]
    assert not np.array_equal(*runs)


@pytest.mark.parametrize("settings", [SMALL, SMALL.replace(coordinate_range=100.0), ABOM.paper(population_size=N)])
def test_candidates_stay_in_the_box(settings) -> None:
    state = init(settings, LOWER, UPPER, KEY)
    for _ in range(4):
        candidates, state = ask(settings, state)
        assert ((candidates >= LOWER) & (candidates <= UPPER)).all()
        state, _ = tell(settings, state, candidates, jax.vmap(sphere)(candidates))


def gradient_by_hand(settings, before, after):
    """Value and gradient of the loss, written out over a fresh forward pass with the masks of that generation."""
    masks = draw_masks(
        jax.random.fold_in(before.key, before.generation),
        N,
        D,
        4,
        settings.structure,
        crossover_dropout=0.95,
        mutation_dropout=0.95,
    )
    released = settings.fitness == "rank"
    seen = jnp.arange(N, dtype=jnp.float32) if released else before.fitness

    @jax.jit
    @jax.value_and_grad
    def loss(parameters):
        offspring = reproduce(parameters, before.population, seen, masks, settings.structure)
        if released:
            return optax.losses.huber_loss(offspring - after.population[0]).sum()
        return jnp.sum((offspring - after.population) ** 2)

    return loss(before.parameters)


def first_update(optimizer, gradient, parameters):
    """Parameters and state after one step of a fresh optimiser."""

    @jax.jit
    def step(gradient, parameters):
        updates, state = optimizer.update(gradient, optimizer.init(parameters), parameters)
        return optax.apply_updates(parameters, updates), state

    return step(gradient, parameters)


def leaves(*trees):
    """Side by side, as NumPy's: every shape selected from or compared would be one more program to compile."""
    return zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in trees), strict=True)


def test_fresh_adamw_is_sign_descent_and_the_pull_back_is_the_gradient() -> None:
    before, _, after, info = one_generation(SMALL, generations=3)
    value, gradient = gradient_by_hand(SMALL, before, after)
    np.testing.assert_allclose(info.loss, value, rtol=1e-5)
    optimizer = optax.adamw(1e-3, weight_decay=1e-5)
    expected, _ = first_update(optimizer, gradient, before.parameters)
    compared = 0
    for old, new, reference, slope in leaves(before.parameters, after.parameters, expected, gradient):
        steep = np.abs(slope) > 1e-4
        compared += steep.sum()
        np.testing.assert_allclose(new[steep], reference[steep], atol=1e-6)
        np.testing.assert_allclose(new[steep], (old - 1e-3 * (np.sign(slope) + 1e-5 * old))[steep], atol=1e-6)
        np.testing.assert_allclose(new[slope == 0], (old * (1 - 1e-8))[slope == 0], atol=1e-7)
    assert compared > 20


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        (ABOM.paper(population_size=N), optax.adamw(1e-3, weight_decay=1e-5)),
        (SMALL.replace(optimizer=optax.sgd(1e-3)), optax.sgd(1e-3)),
    ],
)
def test_other_optimisers_are_those_of_optax(settings, optimizer) -> None:
    """AdamW that keeps its moments, towards the elite with the squared loss; and a transformation of the user's."""
    before, _, after, _ = one_generation(settings)
    _, gradient = gradient_by_hand(settings, before, after)
    expected, state = first_update(optimizer, gradient, before.parameters)
    for new, reference, slope in leaves(after.parameters, expected, gradient):
        np.testing.assert_allclose(new[np.abs(slope) > 1e-4], reference[np.abs(slope) > 1e-4], atol=1e-5)
    for ours, theirs in leaves(after.optimizer_state, state):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=1e-3)


def test_the_learning_rate_falls_to_zero_at_the_horizon() -> None:
    settings = SMALL.replace(horizon=4.0, weight_decay=0.0)
    state, steps = init(settings, LOWER, UPPER, KEY), []
    for _ in range(6):
        before = state.parameters
        state, _ = advance(sphere, settings, state, generations=1)
        steps.append(max(float(np.abs(new - old).max()) for new, old in leaves(state.parameters, before)))
    # Nothing is learnt from the initial population; then 1e-3 (1 + cos(pi t / 4)) / 2 for t = 1, 2, 3, 4, 5.
    np.testing.assert_allclose(steps, [0, 8.536e-4, 5e-4, 1.464e-4, 0, 0], atol=2e-7)


def test_a_search_goes_on_where_it_stopped(found) -> None:
    state = init(SMALL, LOWER, UPPER, KEY)
    for _ in range(5):
        state, _ = advance(sphere, SMALL, state, generations=10)
    np.testing.assert_array_equal(state.population, found.state.population)


def test_presets_differ_from_the_released_settings_as_documented() -> None:
    tuned = ABOM.jaxlab(400, population_size=N)
    assert (tuned.coordinate_range, tuned.learning_rate, tuned.horizon) == (100.0, 3e-3, 50)
    assert ABOM.released() == ABOM()
    assert ABOM.paper(fitness="rank").fitness == "rank"
    moved = minimize(sphere, tuned, LOWER, UPPER, KEY, max_evaluations=400)
    scaled = minimize(
        lambda x: sphere(x / 50), tuned, 50 * LOWER, 50 * UPPER, KEY, max_evaluations=400
    )  # fmt: skip
    # In normalised coordinates a change of units changes nothing but rounding, which grows over a run.
    np.testing.assert_allclose(scaled.history.best_fitness[:5], moved.history.best_fitness[:5], rtol=1e-4)


def test_without_adaptation_the_weights_stay() -> None:
    before, _, after, info = one_generation(SMALL.replace(adapt=False))
    for new, old in leaves(after.parameters, before.parameters):
        np.testing.assert_array_equal(new, old)
    assert info.loss == 0


def test_the_order_of_equal_points_told_first_does_not_matter() -> None:
    state = init(SMALL, LOWER, UPPER, KEY)
    candidates, asked = ask(SMALL, state)
    order = np.random.default_rng(0).permutation(N)
    told = [tell(SMALL, asked, c, jax.vmap(sphere)(c))[0] for c in (candidates, candidates[order])]
    for first, second in leaves(*((s.population, s.fitness, s.parameters) for s in told)):
        np.testing.assert_array_equal(first, second)


def test_vmap_over_seeds_problems_and_settings_equals_single_runs() -> None:
    keys, centres = jax.random.split(KEY, 2), jnp.asarray([0.0, 3.0])
    rates = jnp.asarray([1e-3, 1e-2])

    def run(key, centre, rate):
        settings = SMALL.replace(learning_rate=rate)
        return minimize(shifted, settings, LOWER, UPPER, key, max_evaluations=160, data=centre).best_fitness

    # Optimised, as users compile it: steps by the sign of a gradient magnify the rounding of other programs.
    optimised = {"xla_backend_optimization_level": 3}
    batch = jax.jit(jax.vmap(run), compiler_options=optimised)(keys, centres, rates)
    alone = jax.jit(run, compiler_options=optimised)
    single = [alone(*each) for each in zip(keys, centres, rates, strict=True)]
    np.testing.assert_allclose(batch, jnp.stack(single), rtol=1e-4)


def test_runs_shard_over_devices() -> None:
    mesh = Mesh(np.asarray(jax.devices()), ("run",))
    keys = jax.random.split(KEY, 2 * mesh.size)

    @jax.jit
    def runs(keys):
        return jax.vmap(lambda k: minimize(sphere, SMALL, LOWER, UPPER, k, max_evaluations=32).best_fitness)(keys)

    spread = runs(jax.device_put(keys, NamedSharding(mesh, PartitionSpec("run"))))
    assert len(spread.sharding.device_set) == mesh.size
    # Over few generations: steps by the sign of a gradient magnify the rounding that differs between programs.
    np.testing.assert_allclose(spread, runs(keys), rtol=1e-4)


def test_a_stalled_search_restarts_and_keeps_its_best() -> None:
    settings = SMALL.replace(patience=3.0)
    found = minimize(jnp.max, settings, LOWER, UPPER, KEY, max_evaluations=1600)
    best, restarted = np.asarray(found.history.best_fitness), np.asarray(found.history.restarted)
    assert restarted.any()
    assert (np.diff(best) <= 0).all()
    # The generation after a restart evaluates a population drawn over the whole box.
    after = np.flatnonzero(restarted[:-1]) + 1
    assert (np.asarray(found.history.mean_fitness)[after] > best[after]).all()
    assert (np.asarray(found.history.loss)[after] == 0).all()


def test_values_that_are_not_finite_are_the_worst() -> None:
    def holed(x):
        return jnp.where(x[0] > 0, jnp.nan, jnp.where(x[1] > 0, -jnp.inf, sphere(x)))

    found = minimize(holed, SMALL, LOWER, UPPER, KEY, max_evaluations=400)
    assert np.isfinite(found.best_fitness)
    assert (found.best_solution[:2] <= 0).all()


def test_huge_raw_values_do_not_poison_the_attention() -> None:
    settings = ABOM.paper(population_size=N)
    found = minimize(lambda x: 1e34 * (1 + sphere(x)), settings, LOWER, UPPER, KEY, max_evaluations=160)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found.state.parameters))
    candidates, _ = ask(settings, found.state)
    assert jnp.isfinite(candidates).all()


def test_a_function_without_finite_values_is_an_error_outside_jit_and_inf_inside() -> None:
    def nothing(x):
        return x[0] * jnp.nan

    with pytest.raises(ValueError, match="none of the values is finite"):
        minimize(nothing, SMALL, LOWER, UPPER, KEY, max_evaluations=160)
    inside = jax.jit(lambda k: minimize(nothing, SMALL, LOWER, UPPER, k, max_evaluations=160).best_fitness)(KEY)
    assert inside == jnp.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"population_size": 7}, "population_size must be even where halves are swapped, got 7"),
        ({"population_size": 2}, "population_size must be at least 4, got 2"),
        ({"crossover_dropout": 1.5}, r"crossover_dropout must be in \[0, 1\], got 1.5"),
        ({"mutation_dropout": -0.1}, r"mutation_dropout must be in \[0, 1\], got -0.1"),
        ({"structure": Structure(hidden_width=0)}, "hidden_width must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, got 0.0"),
        ({"coordinate_range": -1.0}, "coordinate_range must be positive, got -1.0"),
        ({"patience": 0}, "patience must be positive, got 0"),
        ({"learning_rate": np.inf}, "learning_rate must be positive, got inf"),
        ({"weight_decay": np.nan}, "weight_decay must be at least 0, got nan"),
    ],
)
def test_settings_out_of_range_are_named(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        init(SMALL.replace(**changes), LOWER, UPPER, KEY)


@pytest.mark.parametrize("name", ["dropout_on", "mutation_input", "mutation"])
def test_an_unknown_structure_is_named(name) -> None:
    wrong = Structure()
    object.__setattr__(wrong, name, "both")  # past the type checker of the tests, which users do not have
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got 'both'"):
        init(SMALL.replace(structure=wrong), LOWER, UPPER, KEY)
    with pytest.raises(ValueError, match="population_size must be at least 4, got 0"):
        init(ABOM.jaxlab(400, population_size=0), LOWER, UPPER, KEY)


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        ([0.0, 3.0], [1.0, 3.0], r"side 1 is \[3.0, 3.0\]"),
        ([0.0, -np.inf], [1.0, 3.0], r"side 1 is \[-inf, 3.0\]"),
        ([], [], "the box has no side"),
        ([0.0], [1.0, 2.0], r"bounds must be two lists of one length, got shapes \(1,\) and \(2,\)"),
        # What is a box in double precision and none in that of the search.
        ([0.0, 1.0], [1.0, 1.0 + 1e-12], "lower < upper in float32; side 1 is"),
        ([-1e300], [1e300], "bounds must be finite with lower < upper in float32; side 0 is"),
        ([-3e38], [3e38], "side 0 is"),
    ],
)
def test_boxes_that_are_none_are_named(lower, upper, message) -> None:
    with pytest.raises(ValueError, match=message):
        checked_box(np.asarray(lower), np.asarray(upper))


def test_a_box_of_whole_numbers_is_searched_in_floating_point() -> None:
    lower, upper = checked_box(np.asarray([-5, 0]), np.asarray([5, 1]))
    assert lower.dtype == upper.dtype == jnp.float32
    assert checked_box(jnp.zeros(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16))[0].dtype == jnp.bfloat16


def test_misuse_is_named() -> None:
    state = init(SMALL, LOWER, UPPER, KEY)
    candidates, asked = ask(SMALL, state)
    with pytest.raises(ValueError, match="tell needs the state that ask returned"):
        tell(SMALL, state, candidates, jnp.zeros(N))
    with pytest.raises(ValueError, match=r"fitness \(8,\), got \(8, 4\) and \(7,\)"):
        tell(SMALL, asked, candidates, jnp.zeros(7))
    with pytest.raises(ValueError, match=r"one number a point, got shape \(4,\)"):
        advance(lambda x: x, SMALL, state, generations=1)
    with pytest.raises(ValueError, match="3 variables and this structure need parameters of shapes"):
        init(SMALL, LOWER[:3], UPPER[:3], KEY, parameters=state.parameters)
    with pytest.raises(ValueError, match="max_evaluations must pay for two populations of 8, got 15"):
        minimize(sphere, SMALL, LOWER, UPPER, KEY, max_evaluations=15)


@pytest.mark.parametrize("name", ["abom", "operators", "baselines", "pretraining", "problems.bbob", "problems.uav"])
def test_examples_in_docstrings(name) -> None:
    outcome = doctest.testmod(importlib.import_module(f"jaxlab.blackbox.{name}"))
    assert outcome.attempted > 0
    assert outcome.failed == 0
