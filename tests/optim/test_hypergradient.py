"""Directions and hypergradients against closed forms, the dense solution, finite differences and each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.optim import bilevel
from jaxlab.optim.bilevel import BilevelPoint, BilevelProblem, directions, exact_hypergradient, hypergradient
from tests.optim.quadratic import RIDGE, Quadratic

# A small network whose last layer is the lower variable: no closed form, trees of odd shapes (a scalar, an empty leaf).
CLASSES = 3


def logits(x, y, inputs):
    hidden = jnp.tanh(inputs @ x["w"] + x["shift"])
    return hidden @ y["w"] + y["bias"]


def cross_entropy(x, y, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits(x, y, batch[0]), batch[1]).mean()


NETWORK = BilevelProblem(
    upper=cross_entropy, lower=lambda x, y, b: cross_entropy(x, y, b) + 0.05 * optax.tree.norm(y, squared=True)
)


# One program: run operation by operation each of some hundred would be compiled on its own.
network_directions = jax.jit(functools.partial(directions, NETWORK))


def network(dtype=np.float64):
    random = np.random.default_rng(1)

    def draw(*shape):
        return np.asarray(random.normal(size=shape), dtype)

    x = {"w": draw(4, 5), "shift": draw(), "unused": np.zeros((0, 2), dtype)}
    y = {"w": draw(5, CLASSES), "bias": draw(CLASSES)}
    z = {"w": draw(5, CLASSES), "bias": draw(CLASSES)}
    batches = tuple((draw(12, 4), random.integers(0, CLASSES, 12)) for _ in range(2))
    return jax.tree.map(jnp.asarray, (BilevelPoint(x, y, z), batches))


def assert_trees_close(got, expected, **tolerances) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), got, expected)


def test_directions_of_a_quadratic() -> None:
    """The formulas of the quadratic, in double precision."""
    with jax.enable_x64(True):
        q = Quadratic.make()
        random = np.random.default_rng(0)
        x, y, z = random.normal(size=3), random.normal(size=4), random.normal(size=4)
        point = BilevelPoint(*map(jnp.asarray, (x, y, z)))
        each = jax.jit(jax.vmap(lambda lower, upper: directions(q.problem, point, lower, upper)))
        found, curvature = jax.tree.map(np.asarray, each(*q.batches))
        for i in range(8):
            np.testing.assert_allclose(found.upper[i], RIDGE * x - q.b[i].T @ z, atol=1e-12)
            np.testing.assert_allclose(found.lower[i], q.a[i] @ y - q.b[i] @ x - q.c[i], atol=1e-12)
            np.testing.assert_allclose(found.auxiliary[i], q.a[i] @ z + y - q.target[i], atol=1e-12)
            np.testing.assert_allclose(curvature[i], z @ q.a[i] @ z / (z @ z), atol=1e-12)


def test_quadratic_pinned() -> None:
    """Numbers computed once with NumPy from the same random draws."""
    q = Quadratic.make()
    x, y, z = q.solution()
    np.testing.assert_allclose(x, (-0.059249, 0.988971, -0.296906), atol=5e-7)
    np.testing.assert_allclose(q.hypergradient(np.ones(3)), (0.163603, -0.035819, 0.233828), atol=5e-7)
    np.testing.assert_allclose(q.hypergradient(x), 0, atol=1e-14)
    assert y.shape == z.shape == (4,)


@pytest.mark.parametrize("solver", ["cg", "dense"])
def test_exact_hypergradient_of_a_quadratic(solver: str) -> None:
    with jax.enable_x64(True):
        q = Quadratic.make()
        x = np.ones(3)
        lower, upper = q.averaged()
        exact = jax.jit(functools.partial(exact_hypergradient, q.problem, solver=solver))
        found = exact(jnp.asarray(x), jnp.asarray(q.inner(x)), lower, upper)
        np.testing.assert_allclose(found.hypergradient, q.hypergradient(x), atol=1e-12)
        np.testing.assert_allclose(found.auxiliary, q.auxiliary(x), atol=1e-12)
        assert found.residual < 1e-10


def test_exact_hypergradient_against_finite_differences() -> None:
    """Of a network, with the lower problem solved by Newton's method from where the unperturbed one ended."""
    with jax.enable_x64(True):
        (x, y, _), (lower, upper) = network()
        flat, unravel = jax.flatten_util.ravel_pytree(y)

        @jax.jit
        def solved(x):
            def objective(y):
                return NETWORK.lower(x, unravel(y), lower)

            def newton(y, _):
                return y - jnp.linalg.solve(jax.hessian(objective)(y), jax.grad(objective)(y)), None

            return unravel(jax.lax.scan(newton, flat * 0.1, length=30)[0])

        outer = jax.jit(lambda x: NETWORK.upper(x, solved(x), upper))

        @jax.jit
        def both(x, y):
            return [exact_hypergradient(NETWORK, x, y, lower, upper, solver=solver) for solver in ("cg", "dense")]

        cg, dense = both(x, solved(x))
        assert_trees_close(cg, dense._replace(residual=cg.residual), rtol=1e-7, atol=1e-10)
        assert cg.residual < 1e-9
        step = 1e-5  # rounding and curvature leave about 1e-10
        x = jax.tree.map(np.asarray, x)
        for index in [(0, 0), (3, 2)]:
            nudge = np.zeros_like(x["w"])
            nudge[index] = step
            up, down = ({**x, "w": x["w"] + s * nudge} for s in (1, -1))
            slope = (outer(up) - outer(down)) / (2 * step)
            np.testing.assert_allclose(cg.hypergradient["w"][index], slope, atol=1e-8)
        up, down = ({**x, "shift": x["shift"] + s} for s in (step, -step))
        np.testing.assert_allclose(cg.hypergradient["shift"], (outer(up) - outer(down)) / (2 * step), atol=1e-8)


def test_directions_at_the_solution_are_the_hypergradient() -> None:
    """Where y and z solve their problems D_y = D_z = 0 and D_x is the hypergradient."""
    with jax.enable_x64(True):
        q = Quadratic.make()
        x = np.ones(3)
        point = BilevelPoint(*map(jnp.asarray, (x, q.inner(x), q.auxiliary(x))))
        found, _ = jax.jit(functools.partial(directions, q.problem))(point, *q.averaged())
        np.testing.assert_allclose(found.lower, 0, atol=1e-12)
        np.testing.assert_allclose(found.auxiliary, 0, atol=1e-12)
        np.testing.assert_allclose(found.upper, q.hypergradient(x), atol=1e-12)


def test_directions_of_a_network_equal_those_of_formed_hessians() -> None:
    with jax.enable_x64(True):
        point, (lower, upper) = network()
        flat_x, to_x = jax.flatten_util.ravel_pytree(point.upper)
        flat_y, to_y = jax.flatten_util.ravel_pytree(point.lower)
        flat_z, _ = jax.flatten_util.ravel_pytree(point.auxiliary)

        def of(loss, batch):
            return lambda x, y: loss(to_x(x), to_y(y), batch)

        f, g = of(NETWORK.upper, upper), of(NETWORK.lower, lower)

        @jax.jit
        def formed(x, y, z):
            mixed, second = jax.jacfwd(jax.grad(g, 0), 1)(x, y), jax.hessian(g, 1)(x, y)
            expected = BilevelPoint(
                to_x(jax.grad(f, 0)(x, y) + mixed @ z),
                to_y(jax.grad(g, 1)(x, y)),
                to_y(jax.grad(f, 1)(x, y) + second @ z),
            )
            return expected, z @ second @ z / (z @ z)

        expected, expected_curvature = formed(flat_x, flat_y, flat_z)
        found, curvature = network_directions(point, lower, upper)
        assert_trees_close(found, expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(curvature, expected_curvature, rtol=1e-10)
        # One at a time, as sub-loops need them.
        lower_alone = jax.jit(functools.partial(hypergradient.lower_direction, NETWORK))(point, lower)
        assert_trees_close(lower_alone, found.lower, rtol=1e-12)
        auxiliary_alone = jax.jit(functools.partial(hypergradient.auxiliary_direction, NETWORK))
        auxiliary, again = auxiliary_alone(point, lower, upper)
        assert_trees_close(auxiliary, found.auxiliary, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(again, curvature, rtol=1e-10)
        of_upper = jax.jit(functools.partial(hypergradient.upper_direction, NETWORK))(point, lower, upper)
        assert_trees_close(of_upper, found.upper, rtol=1e-10, atol=1e-12)


def test_no_hessian_is_formed() -> None:
    """No intermediate of the directions has as many numbers as the Hessian in y, nor as the mixed derivative."""
    m = 100
    problem = BilevelProblem(
        upper=lambda x, y, batch: jnp.sum((y - batch) ** 2), lower=lambda x, y, batch: jnp.sum(jnp.cosh(y - x) * batch)
    )
    point = BilevelPoint(jnp.ones(m), jnp.zeros(m), jnp.ones(m))
    jaxpr = jax.make_jaxpr(lambda p, b: directions(problem, p, b, b))(point, jnp.ones(m))
    sizes = [v.aval.size for equation in jaxpr.jaxpr.eqns for v in equation.outvars]
    assert max(sizes) == m


def test_curvature_flags_a_lower_problem_that_is_not_convex() -> None:
    saddle = BilevelProblem(upper=lambda x, y, b: x * y.sum(), lower=lambda x, y, b: y[0] ** 2 - y[1] ** 2)
    for z, expected in (([1.0, 0.0], 2.0), ([0.0, 2.0], -2.0), ([0.0, 0.0], 1.0)):
        point = BilevelPoint(jnp.array(1.0), jnp.zeros(2), jnp.array(z))
        assert directions(saddle, point, None, None)[1] == expected


def test_16_bit_inputs_stay() -> None:
    point, batches = network(jnp.bfloat16)
    found, curvature = network_directions(point, *batches)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), found) == jax.tree.map(lambda a: (a.shape, a.dtype), point)
    assert curvature.dtype == jnp.float32
    wide = jax.tree.map(
        lambda a: np.asarray(a, np.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a, (point, batches)
    )
    expected, _ = network_directions(wide[0], *wide[1])
    # Eight bits of mantissa, some operations deep, numbers of order one.
    assert_trees_close(jax.tree.map(lambda a: np.asarray(a, np.float32), found), expected, atol=0.1)


def test_point_starts_at_zero_and_names_what_is_wrong() -> None:
    y = {"w": jnp.ones((2, 3))}
    point = bilevel.bilevel_point(jnp.ones(2), y)
    assert_trees_close(point.auxiliary, {"w": np.zeros((2, 3))})
    with pytest.raises(ValueError, match=r"auxiliary variable must be shaped like the lower one.*\(2, 3\).*\(3,\)"):
        bilevel.bilevel_point(jnp.ones(2), y, {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="the lower variable has no leaves"):
        bilevel.bilevel_point(jnp.ones(2), {})
    with pytest.raises(TypeError, match=r"upper\['k'\] has dtype int32"):
        bilevel.bilevel_point({"k": jnp.ones(2, jnp.int32)}, y)


def test_unknown_solver_is_named() -> None:
    with pytest.raises(ValueError, match="solver must be 'cg' or 'dense', got 'lu'"):
        exact_hypergradient(NETWORK, 1.0, 1.0, None, None, solver="lu")
