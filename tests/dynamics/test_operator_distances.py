"""Baselines against dense linear algebra and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.dynamics import (
    GaussianKernel,
    KernelOperator,
    LowRankOperator,
    hilbert_schmidt_distance,
    hilbert_schmidt_mean,
    linear_kernel,
    martin_distance,
    operator_norm_distance,
)

pytestmark = pytest.mark.usefixtures("float64")


def low_rank(seed: int, d: int = 6, rank: int = 3) -> LowRankOperator:
    rng = np.random.default_rng(seed)
    return LowRankOperator(jnp.asarray(rng.normal(size=(d, rank))), jnp.asarray(rng.normal(size=(d, rank))))


def kernel_operator(seed: int, kernel=linear_kernel) -> KernelOperator:
    rng = np.random.default_rng(seed)
    x, y, u, v = (jnp.asarray(rng.normal(size=s)) for s in ((5, 4), (5, 4), (5, 2), (5, 2)))
    return KernelOperator(x, y, u, v, kernel=kernel)


def test_norms_are_those_of_the_dense_difference() -> None:
    a, b = low_rank(0), low_rank(1, rank=2)
    difference = np.asarray(a.matrix - b.matrix)
    np.testing.assert_allclose(hilbert_schmidt_distance(a, b), np.linalg.norm(difference), rtol=1e-12)
    np.testing.assert_allclose(operator_norm_distance(a, b), np.linalg.norm(difference, 2), rtol=1e-12)
    assert float(hilbert_schmidt_distance(a, a)) < 1e-6  # sqrt(eps) times the norm
    assert float(operator_norm_distance(a, a)) < 1e-6


def test_kernel_norms_with_the_linear_kernel_are_dense_ones() -> None:
    a, b = kernel_operator(0), kernel_operator(1)
    dense = [np.asarray(o.x.T @ o.input_factor @ o.output_factor.T @ o.y) for o in (a, b)]
    np.testing.assert_allclose(hilbert_schmidt_distance(a, b), np.linalg.norm(dense[0] - dense[1]), rtol=1e-12)
    np.testing.assert_allclose(operator_norm_distance(a, b), np.linalg.norm(dense[0] - dense[1], 2), rtol=1e-12)


def test_martin_distance_of_single_poles_has_the_closed_form() -> None:
    a, b = 0.5 + 0.3j, -0.2 + 0.6j
    expected = np.sqrt(np.log(abs(1 - a * np.conj(b)) ** 2 / (abs(1 - a * np.conj(a)) * abs(1 - b * np.conj(b)))))
    np.testing.assert_allclose(martin_distance(jnp.array([a]), jnp.array([b])), expected, rtol=1e-12)


def test_martin_distance_ignores_order_and_survives_the_unit_circle() -> None:
    rng = np.random.default_rng(2)
    poles = [jnp.asarray(0.6 * np.exp(1j * rng.uniform(0, 6, 3))) for _ in range(2)]
    d = martin_distance(*poles)
    np.testing.assert_allclose(martin_distance(poles[0][::-1], poles[1]), d, rtol=1e-12)
    np.testing.assert_allclose(martin_distance(*poles[::-1]), d, rtol=1e-12)
    assert float(martin_distance(poles[0], poles[0])) < 1e-7
    beyond = jnp.array([1.2 + 0j, 1j])
    assert np.isfinite(martin_distance(beyond, poles[0]))
    np.testing.assert_allclose(martin_distance(beyond, poles[0]), martin_distance(beyond / 1.0001, poles[0]), rtol=0.2)


def test_hilbert_schmidt_mean_is_the_minimiser() -> None:
    rng = np.random.default_rng(3)
    operators, weights = jnp.asarray(rng.normal(size=(3, 4, 4))), jnp.array([0.2, 0.3, 0.5])

    def spread(t) -> float:
        return float(weights @ jnp.sum((operators - t) ** 2, axis=(1, 2)))

    mean = hilbert_schmidt_mean(operators, weights)
    np.testing.assert_allclose(mean, 0.2 * operators[0] + 0.3 * operators[1] + 0.5 * operators[2], rtol=1e-12)
    step = jnp.asarray(rng.normal(size=(4, 4)))
    np.testing.assert_allclose(spread(mean + step), spread(mean) + float(jnp.sum(step**2)), rtol=1e-12)


@pytest.mark.parametrize("distance", [hilbert_schmidt_distance, operator_norm_distance])
@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (low_rank(0), low_rank(1, d=5), "different spaces: dimensions 6 and 5"),
        (low_rank(0), kernel_operator(0), "different spaces: LowRankOperator and KernelOperator"),
        (kernel_operator(0), kernel_operator(0, GaussianKernel(1.0)), "different spaces"),
    ],
)
def test_operators_of_different_spaces_are_refused(distance, a, b, message) -> None:
    with pytest.raises(ValueError, match=message):
        distance(a, b)


@pytest.mark.parametrize("distance", [hilbert_schmidt_distance, operator_norm_distance])
def test_norms_at_distance_zero_have_finite_derivatives(distance) -> None:
    a = low_rank(0)
    gradient = jax.grad(lambda factor: distance(a.replace(input_factor=factor), a))(a.input_factor)
    assert np.isfinite(gradient).all()


def test_martin_distance_has_finite_derivatives_at_zero() -> None:
    poles = jnp.array([0.5 + 0.1j, 0.0])
    assert np.isfinite(jax.grad(lambda factor: martin_distance(factor * poles, poles))(1.0))
    # A pole at the origin does not move with the factor: it may not change the derivative of the rest.
    other = jnp.array([0.3 + 0.2j, 0.1])
    slope = jax.grad(lambda factor: martin_distance(factor * poles, other))(1.0)
    step = 1e-6
    expected = (martin_distance((1 + step) * poles, other) - martin_distance((1 - step) * poles, other)) / (2 * step)
    np.testing.assert_allclose(slope, expected, rtol=1e-6)


@pytest.mark.parametrize("distance", [hilbert_schmidt_distance, operator_norm_distance])
def test_half_precision_is_computed_in_single(distance) -> None:
    half = [jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), low_rank(k)) for k in range(2)]
    single = [jax.tree.map(lambda leaf: leaf.astype(jnp.float32), operator) for operator in half]
    np.testing.assert_array_equal(distance(*half), distance(*single))


def test_weights_of_the_mean_are_checked() -> None:
    operators = jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])
    np.testing.assert_allclose(hilbert_schmidt_mean(operators), 2 * jnp.eye(2))
    with pytest.raises(ValueError, match=r"system weights must sum to 1, got a sum of 1\.4"):
        hilbert_schmidt_mean(operators, jnp.array([0.5, 0.9]))


def test_batches_are_refused() -> None:
    batch = jax.tree.map(lambda leaf: leaf[None], low_rank(0))
    with pytest.raises(ValueError, match=r"one operator each is needed .*jax.vmap take batches"):
        hilbert_schmidt_distance(batch, batch)
