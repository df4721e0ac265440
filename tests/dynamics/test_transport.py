"""Transport against POT's linear programme, Sinkhorn's limit, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from jaxlab.dynamics import exact_transport, sinkhorn_transport

pytestmark = pytest.mark.usefixtures("float64")


def random_cost(n: int, m: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).uniform(size=(n, m)))


def linear_programme(cost: np.ndarray, source: np.ndarray, target: np.ndarray) -> float:
    n, m = cost.shape
    rows = np.kron(np.eye(n), np.ones(m))
    columns = np.kron(np.ones(n), np.eye(m))
    solved = scipy.optimize.linprog(
        cost.ravel(), A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([source, target])
    )
    return solved.fun


@pytest.mark.parametrize(("n", "m"), [(1, 1), (4, 4), (3, 4), (6, 4), (1, 5)])
def test_exact_solves_the_linear_programme(n: int, m: int) -> None:
    cost = random_cost(n, m)
    solved = jax.jit(exact_transport)(cost)
    np.testing.assert_allclose(
        solved.cost, linear_programme(np.asarray(cost), np.full(n, 1 / n), np.full(m, 1 / m)), rtol=1e-12
    )
    np.testing.assert_allclose(solved.plan.sum(1), 1 / n, rtol=1e-12)
    np.testing.assert_allclose(solved.plan.sum(0), 1 / m, rtol=1e-12)
    assert bool(solved.converged)


def test_pot_agrees_when_installed() -> None:
    ot = pytest.importorskip("ot", reason="POT is not installed")
    for seed in range(5):
        cost = random_cost(3, 5, seed)
        expected = ot.emd2(np.full(3, 1 / 3), np.full(5, 1 / 5), np.asarray(cost))
        np.testing.assert_allclose(exact_transport(cost).cost, expected, rtol=1e-12)


def test_repeated_atoms_are_integer_multiplicities() -> None:
    cost, counts = random_cost(3, 3, 7), np.array([2, 1, 1])
    repeated = jnp.repeat(cost, counts, axis=0)
    expected = linear_programme(np.asarray(cost), counts / 4, np.full(3, 1 / 3))
    np.testing.assert_allclose(exact_transport(repeated).cost, expected, rtol=1e-12)


def test_sinkhorn_goes_to_the_exact_value_from_above() -> None:
    cost = random_cost(4, 4, 1)
    exact = float(exact_transport(cost).cost)
    gaps = []
    for epsilon in (0.1, 0.01, 0.001):
        solved = sinkhorn_transport(cost, epsilon=epsilon)
        assert bool(solved.converged)
        gaps.append(float(solved.cost) - exact)
        # Entropic bias is at most epsilon log(nm); the marginals are met to 1e-4 in the sum.
        assert -1e-4 < gaps[-1] < epsilon * np.log(16) + 1e-4
    assert gaps[0] > gaps[1] > gaps[2] - 1e-4


def test_sinkhorn_takes_weights() -> None:
    cost, source, target = random_cost(3, 4, 2), np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.3, 0.4])
    solved = sinkhorn_transport(cost, jnp.asarray(source), jnp.asarray(target))
    np.testing.assert_allclose(solved.cost, linear_programme(np.asarray(cost), source, target), atol=2e-3)
    np.testing.assert_allclose(solved.plan.sum(1), source, atol=1e-3)


def test_sinkhorn_says_when_it_did_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxlab.dynamics.transport._MOST_ITERATIONS", 10)
    assert not bool(sinkhorn_transport(random_cost(5, 5), epsilon=1e-5).converged)


def test_gradient_is_the_plan() -> None:
    cost = random_cost(3, 2, 4)
    gradient = jax.grad(lambda c: exact_transport(c).cost)(cost)
    np.testing.assert_array_equal(gradient, exact_transport(cost).plan)


def test_cost_that_is_not_finite_gives_nan() -> None:
    for bad in (jnp.nan, jnp.inf):
        solved = exact_transport(random_cost(3, 3).at[1, 2].set(bad))
        assert np.isnan(solved.cost)
        assert not bool(solved.converged)


@pytest.mark.parametrize(
    ("weights", "epsilon", "message"),
    [
        ((jnp.array([0.5, 0.6]), None), None, "source weights must sum to 1, got a sum of 1.1"),
        ((None, jnp.array([1.5, -0.5])), None, "target weights must be >= 0, got -0.5"),
        ((jnp.array([jnp.nan, 1.0]), None), None, "source weights must sum to 1"),
        ((None, None), 0.0, "epsilon must be positive and finite, got 0"),
    ],
)
def test_bad_input_is_named(weights, epsilon, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sinkhorn_transport(random_cost(2, 2), *weights, epsilon=epsilon)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float16, jnp.bfloat16])
def test_integers_and_half_precision_are_computed_in_single(dtype) -> None:
    cost = jnp.array([[4, 1, 3], [2, 0, 5], [3, 2, 2]], dtype)  # 1 + 2 + 2 is the cheapest assignment
    np.testing.assert_allclose(exact_transport(cost).cost, 5 / 3, rtol=1e-6)
    solved = sinkhorn_transport(cost)
    assert bool(solved.converged)
    np.testing.assert_allclose(solved.cost, 5 / 3, rtol=1e-2)


@pytest.mark.parametrize("shift", [-3.0, -0.5])
def test_sinkhorn_takes_costs_below_zero(shift) -> None:
    cost = random_cost(4, 4, 1) + shift
    np.testing.assert_allclose(sinkhorn_transport(cost).cost, exact_transport(cost).cost, atol=2e-2)


def test_costs_of_zero_are_free() -> None:
    solved = sinkhorn_transport(jnp.zeros((3, 2)))
    assert bool(solved.converged)
    assert float(solved.cost) == 0


def test_weights_out_of_range_give_nan_under_jit() -> None:
    cost = random_cost(2, 2)
    solve = jax.jit(lambda weights, epsilon: sinkhorn_transport(cost, weights, epsilon=epsilon).cost)
    assert np.isfinite(solve(jnp.array([0.4, 0.6]), 0.1))
    assert np.isnan(solve(jnp.array([0.4, 0.7]), 0.1))
    assert np.isnan(solve(jnp.array([0.4, 0.6]), -0.1))


def test_weights_in_half_precision_sum_to_one_in_theirs() -> None:
    cost, weights = random_cost(3, 3), jnp.full(3, 1 / 3, jnp.bfloat16)
    np.testing.assert_allclose(sinkhorn_transport(cost, weights).cost, exact_transport(cost).cost, rtol=2e-2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: sinkhorn_transport(c, epsilon=np.inf), "epsilon must be positive and finite, got inf"),
        (lambda c: exact_transport(c[:0]), r"a row and a column for each atom, got shape \(0, 2\)"),
        (lambda c: sinkhorn_transport(c[:, :0]), r"a row and a column for each atom, got shape \(2, 0\)"),
    ],
)
def test_further_bad_input_is_named(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(random_cost(2, 2))
