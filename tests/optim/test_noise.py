"""The stable sampler against SciPy's distribution, its tails, and noise that does not depend on the backend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from scipy import stats

from jaxlab.optim import make_mixer, noise, topology


def kolmogorov_smirnov_p_value(samples: np.ndarray, **law: float) -> float:
    """Of SciPy's ``levy_stable`` in its S1 parametrisation.

    Its distribution function takes milliseconds a point, so it is computed at 400 quantiles and interpolated: the error
    is far below the 0.014 that 20 000 draws can tell apart.
    """
    assert stats.levy_stable.parameterization == "S1"
    grid = np.quantile(samples, np.linspace(0.0, 1.0, 402)[1:-1])
    cumulative = stats.levy_stable.cdf(grid, law["alpha"], law["beta"], scale=law["scale"])
    return stats.kstest(samples, lambda x: np.interp(x, grid, cumulative)).pvalue


@pytest.mark.parametrize(
    ("alpha", "beta", "scale"),
    [
        (1.5, 0.5, 1.0),
        (1.2, 0.5, 1.0),
        (1.5, -1.0, 0.5),
        (0.7, 0.3, 2.0),
        (1.0, 0.0, 1.0),
        (1.0, 1.0, 2.0),
        (1.0, -0.7, 0.3),
        (2.0, 0.0, 1.0),
    ],
)
def test_stable_draws_follow_scipys_law(alpha: float, beta: float, scale: float) -> None:
    samples = noise.alpha_stable(jax.random.key(1), (20_000,), alpha=alpha, beta=beta, scale=scale)
    # A correct sampler falls below once in a thousand keys; this key is fixed.
    assert kolmogorov_smirnov_p_value(np.asarray(samples), alpha=alpha, beta=beta, scale=scale) > 1e-3


@pytest.mark.parametrize("wrong", [{"alpha": 1.4}, {"beta": 0.3}, {"beta": -0.5}, {"scale": 1.1}])
def test_the_comparison_with_scipy_can_fail(wrong: dict[str, float]) -> None:
    law = {"alpha": 1.5, "beta": 0.5, "scale": 1.0}
    samples = noise.alpha_stable(jax.random.key(1), (20_000,), **(law | wrong))
    assert kolmogorov_smirnov_p_value(np.asarray(samples), **law) < 1e-3


def test_two_special_laws_in_closed_form() -> None:
    normal = np.asarray(noise.alpha_stable(jax.random.key(2), (20_000,), alpha=2.0, scale=3.0))
    cauchy = np.asarray(noise.alpha_stable(jax.random.key(2), (20_000,), alpha=1.0, scale=3.0))
    assert stats.kstest(normal, stats.norm(scale=3.0 * np.sqrt(2)).cdf).pvalue > 1e-3
    assert stats.kstest(cauchy, stats.cauchy(scale=3.0).cdf).pvalue > 1e-3
    # The variance of a normal sample has relative standard deviation sqrt(2 / m) = 0.01.
    assert normal.var() == pytest.approx(2 * 3.0**2, rel=0.05)


@pytest.mark.parametrize(("df", "scale"), [(1.0, 1.0), (1.5, 2.0), (4.0, 0.5), (50.0, 1.0)])
def test_student_draws_follow_scipys_law(df: float, scale: float) -> None:
    samples = np.asarray(noise.student_t(jax.random.key(3), (200, 100), df=df, scale=scale)).ravel()
    assert stats.kstest(samples, stats.t(df, scale=scale).cdf).pvalue > 1e-3
    assert stats.kstest(samples, stats.t(df, scale=1.1 * scale).cdf).pvalue < 1e-3  # the comparison can fail
    assert np.isfinite(np.asarray(noise.student_t(jax.random.key(4), (1_000_000,), df=df))).all()


@pytest.mark.parametrize("options", [{"df": 0.0}, {"df": -1.0}, {"df": 2.0, "scale": 0.0}])
def test_bad_student_laws(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be positive, got (0.0|-1.0)"):
        noise.student_t(jax.random.key(0), (2,), **options)


def test_a_million_draws_are_finite_and_reach_the_tail() -> None:
    draw = jax.jit(noise.alpha_stable, static_argnames=("shape", "alpha", "beta", "scale"))
    for alpha, beta in ((1.5, 0.5), (0.99, 1.0), (1.001, 1.0), (1.0, -1.0)):
        samples = draw(jax.random.key(0), (1_000_000,), alpha=alpha, beta=beta)
        assert bool(jnp.isfinite(samples).all()), (alpha, beta)
        # P(|X| > x) is about 2 Gamma(alpha) sin(pi alpha / 2) / pi / x**alpha: dozens of 1e6 draws pass 1e3.
        assert float(jnp.abs(samples - jnp.median(samples)).max()) > 1e3


@pytest.mark.parametrize("alpha", [0.5, 0.9, 0.999, 1.0, 1.001, 1.5, 1.999, 2.0])
def test_finite_at_the_ends_of_both_underlying_draws(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    angles = jnp.array([0.0, 0.5, 1.0])
    monkeypatch.setattr(
        jax.random, "uniform", lambda key, shape, minval, maxval: minval + angles[:, None] * (maxval - minval)
    )
    monkeypatch.setattr(jax.random, "exponential", lambda key, shape: jnp.array([0.0, 1e-7, 1.0, 16.0]))
    for beta in (-1.0, -0.3, 0.0, 1.0):
        assert bool(jnp.isfinite(noise.alpha_stable(jax.random.key(0), (3, 4), alpha=alpha, beta=beta)).all())


def test_skewness_flips_with_beta_and_the_mean_is_zero_above_one() -> None:
    draw = functools.partial(noise.alpha_stable, jax.random.key(3), (200_000,), alpha=1.8)
    right, left = draw(beta=0.9), draw(beta=-0.9)
    assert float((right > 20.0).mean()) > 5 * float((right < -20.0).mean())
    assert float((left < -20.0).mean()) > 5 * float((left > 20.0).mean())
    # The error of a mean of m draws is of order m**(1/alpha - 1) = 0.004; a skewed law centred elsewhere is off by 0.3.
    assert abs(float(right.mean())) < 0.05


def test_shapes_keys_and_scale() -> None:
    key = jax.random.key(0)
    assert noise.alpha_stable(key, alpha=1.5).shape == ()
    one = noise.alpha_stable(key, (3, 2), alpha=1.5, beta=0.5)
    assert one.dtype == jnp.float32
    np.testing.assert_array_equal(one, noise.alpha_stable(key, (3, 2), alpha=1.5, beta=0.5))
    np.testing.assert_allclose(noise.alpha_stable(key, (3, 2), alpha=1.5, beta=0.5, scale=4.0), 4 * one, rtol=1e-6)
    assert not np.allclose(one, noise.alpha_stable(jax.random.key(1), (3, 2), alpha=1.5, beta=0.5))


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, r"alpha must be in \(0, 2\], got 0.0"),
        ({"alpha": 2.1}, r"alpha must be in \(0, 2\], got 2.1"),
        ({"alpha": float("nan")}, r"alpha must be in \(0, 2\], got nan"),
        ({"alpha": 1.5, "beta": 1.5}, r"beta must be in \[-1, 1\], got 1.5"),
        ({"alpha": 1.5, "scale": 0.0}, "scale must be positive, got 0.0"),
    ],
)
def test_bad_laws(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noise.alpha_stable(jax.random.key(0), (2,), **options)


@pytest.mark.parametrize("tail_index", [0.8, 1.5, 3.0])
def test_hill_finds_the_index_of_an_exact_pareto_tail(tail_index: float) -> None:
    top = 10_000
    samples = jax.random.uniform(jax.random.key(0), (40_000,), minval=1e-7) ** (-1.0 / tail_index)
    # On exact Pareto samples the relative standard deviation is 1 / sqrt(top); four of them.
    assert float(noise.hill_estimator(samples, top=top)) == pytest.approx(tail_index, rel=4 / np.sqrt(top))


def test_hill_by_hand_whatever_the_order_and_unit() -> None:
    samples = jnp.exp(jnp.array([1.0, 3.0, 2.0, -5.0]))
    # The mean of (3 - 1, 2 - 1) is 3/2.
    assert float(noise.hill_estimator(samples, top=2)) == pytest.approx(2 / 3, rel=1e-6)
    assert float(noise.hill_estimator(100.0 * samples, top=2)) == pytest.approx(2 / 3, rel=1e-6)


@pytest.mark.parametrize("top", [0, 4, 5])
def test_hill_refuses_a_tail_that_is_not_there(top: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and 3 for 4 samples, got {top}"):
        noise.hill_estimator(jnp.arange(1.0, 5.0), top=top)


def gradient_noise_of(n_nodes: int, steps: int = 1, shape: tuple[int, ...] = (500,)) -> np.ndarray:
    """``[steps, leaves, n, *shape]``: what is added to gradients of zero."""
    transform = noise.add_gradient_noise(jax.random.key(7), jax.random.normal, make_mixer(topology.complete(n_nodes)))
    zeros = {"a": jnp.zeros((n_nodes, *shape)), "b": jnp.zeros((n_nodes, *shape))}
    state, drawn = transform.init(zeros), []
    for _ in range(steps):
        updates, state = transform.update(zeros, state)
        drawn.append([updates["a"], updates["b"]])
    return np.asarray(drawn)


def test_noise_is_independent_between_steps_leaves_and_nodes() -> None:
    drawn = gradient_noise_of(3, steps=2).reshape(12, 500)
    correlation = np.corrcoef(drawn)
    # Twelve unit normal rows of 500: correlations have standard deviation 1 / sqrt(500) = 0.045.
    assert np.abs(correlation - np.eye(12)).max() < 5 * 500**-0.5
    assert np.abs(drawn.std(1) - 1.0).max() < 5 * 1000**-0.5


def test_a_node_draws_the_same_in_any_network() -> None:
    np.testing.assert_array_equal(gradient_noise_of(3), gradient_noise_of(5)[:, :, :3])


def test_noise_is_added_and_keeps_the_dtype() -> None:
    mixer = make_mixer(topology.ring(3))
    transform = noise.add_gradient_noise(
        jax.random.key(0), functools.partial(noise.alpha_stable, alpha=1.5, scale=0.1), mixer
    )
    grads = {"w": jnp.ones((3, 4), jnp.bfloat16), "scalar": jnp.full((3,), 5.0), "none": None}
    updates, _ = transform.update(grads, transform.init(grads))
    noiseless, _ = transform.update(jax.tree.map(jnp.zeros_like, grads), transform.init(grads))
    assert updates["w"].dtype == jnp.bfloat16
    assert updates["none"] is None
    np.testing.assert_allclose(updates["scalar"] - 5.0, noiseless["scalar"], atol=1e-5)
    assert float(jnp.abs(noiseless["scalar"]).min()) > 0.0


def test_sharded_nodes_draw_what_stacked_nodes_draw(node_mesh) -> None:
    n_nodes, grads = 8, {"a": jnp.zeros((8, 3)), "b": jnp.zeros(8)}

    def two_steps(mixer, grads):
        transform = noise.add_gradient_noise(jax.random.key(0), jax.random.normal, mixer)
        first, state = transform.update(grads, transform.init(grads))
        return first, transform.update(grads, state)[0]

    stacked = jax.jit(functools.partial(two_steps, make_mixer(topology.ring(n_nodes))))(grads)
    sharded = jax.jit(
        jax.shard_map(
            functools.partial(two_steps, make_mixer(topology.ring(n_nodes), axis_name="node")),
            mesh=node_mesh(4),
            in_specs=PartitionSpec("node"),
            out_specs=PartitionSpec("node"),
        )
    )(grads)
    # The same bits are drawn; XLA may round the functions of them differently for another shape.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), sharded, stacked)
