"""BR-FedBi and BILANTINE: the quadratic's solution, limiting cases, meshes, promises of optax, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

from jaxlab.optim import attacks, make_aggregator
from jaxlab.optim.bilevel import (
    BilevelPoint,
    BilevelProblem,
    ClientBatches,
    bilantine,
    bilevel_point,
    br_fedbi,
    make_bilevel_step,
    shard_bilevel_step,
)
from jaxlab.optim.robust import client_momentum, page, simulate_attack
from tests.optim.quadratic import RIDGE, Quadratic

KEY = jax.random.key(0)
MEAN = make_aggregator("mean")


def start(dtype=jnp.float32) -> BilevelPoint:
    return bilevel_point(jnp.zeros(3, dtype), jnp.zeros(4, dtype))


def iterate(stepper, point, batches, rounds: int, **options):
    """The last state and all infos, the same batches in every round."""

    @jax.jit
    def run(state):
        keys = jax.random.split(KEY, rounds)
        return jax.lax.scan(lambda s, key: stepper.step(key, s, batches, **options), state, keys)

    return run(stepper.init(point))


def solve(q: Quadratic, aggregator, *, attack=None, estimator=None, rounds: int = 3000, **options):
    optimizer = br_fedbi(aggregator, 0.05, ratios=(4.0, 4.0), attack=attack, estimator=estimator, **options)
    return iterate(make_bilevel_step(q.problem, optimizer), start(jnp.float64), q.batches, rounds)


def error(q: Quadratic, point: BilevelPoint) -> float:
    return max(float(np.abs(np.asarray(a) - b).max()) for a, b in zip(point, q.solution(), strict=True))


def assert_trees_close(got, expected, **tolerances) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)

    def close(a, b) -> None:
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, **tolerances)

    jax.tree.map(close, got, expected)


@pytest.fixture(scope="module")
def without_attack():
    with jax.enable_x64(True):
        q = Quadratic.make()
        state, info = solve(q, MEAN)
        return q, state, info


def test_reaches_the_solution(without_attack) -> None:
    q, state, info = without_attack
    assert error(q, state.point) < 1e-8  # the slowest mode contracts by 0.993 a round
    assert max(norm[-1] for norm in info.norms) < 1e-8
    assert not info.on_boundary.any()
    assert info.strongly_convex.all()
    assert info.finite.all()
    # Three vectors a round; a direction is two gradients and two products.
    assert set(np.asarray(info.messages)) == {3}
    assert set(np.asarray(info.gradients)) == {4}


def test_mean_diverges_where_a_robust_rule_rests_at_the_floor() -> None:
    """Two of eight: the mean is reversed beyond a scale of 6 / 2."""
    with jax.enable_x64(True):
        q = Quadratic.make()
        strike = simulate_attack(attacks.InnerProduct(4.0), 2)
        honest = Quadratic(*(v[:6] for v in q))
        state, _ = solve(q, MEAN, attack=strike, radius=1e300)
        assert error(honest, state.point) > 1e10
        state, info = solve(q, make_aggregator("trimmed_mean", f=2), attack=strike)
        gradient = np.linalg.norm(honest.hypergradient(np.asarray(state.point.upper)))
        assert 1e-3 < gradient < 1.0  # clients that differ leave a floor
        assert info.finite.all()


@pytest.mark.parametrize("name", ["geometric_median", "nnm+coordinate_median"])
def test_exact_recovery_of_clients_that_are_alike(name: str) -> None:
    """Three of eight, noiseless: every robust rule of equal honest messages is that message."""
    with jax.enable_x64(True):
        q = Quadratic.make(homogeneous=True)
        state, _ = solve(q, make_aggregator(name, f=3), attack=simulate_attack(attacks.InnerProduct(3.0), 3))
        assert error(q, state.point) < 1e-8


def test_momentum_removes_the_noise_floor() -> None:
    """Under ALIE the floor falls like the noise of the momentum, sqrt((1 - beta) / (1 + beta))."""
    q, n, rounds = Quadratic.make(homogeneous=True), 11, 1500
    a, b, c, target = (np.broadcast_to(v[0], (n, *v.shape[1:])).astype(np.float32) for v in q)
    problem = BilevelProblem(
        upper=lambda x, y, d: q.problem.upper(x, y, d) + d["x"] @ x + d["y"] @ y,
        lower=lambda x, y, d: q.problem.lower(x, y, d) + d["y"] @ y,
    )
    x, y, lower_noise = jnp.split(jax.random.normal(KEY, (rounds, n, 11)), (3, 7), axis=2)
    slope, offset = np.linalg.solve(q.a[0], q.b[0]), np.linalg.solve(q.a[0], q.c[0]) - q.target[0]

    def floor(beta):
        optimizer = br_fedbi(
            make_aggregator("trimmed_mean", f=3),
            0.05,
            ratios=(4.0, 4.0),
            estimator=client_momentum(n, beta),
            attack=simulate_attack(attacks.ALittleIsEnough(-1.5), 3),
        )
        init, step = make_bilevel_step(problem, optimizer)

        def one_round(state, noise):
            lower = {"a": a, "b": b, "c": c, "y": noise[2]}
            state, _ = step(KEY, state, ClientBatches(lower, {"target": target, "x": noise[0], "y": noise[1]}))
            exact = RIDGE * state.point.upper + slope.T @ (slope @ state.point.upper + offset)
            return state, jnp.sum(exact**2)

        _, squares = jax.lax.scan(one_round, init(start()), (x, y, lower_noise))
        return jnp.sqrt(squares[rounds // 2 :].mean())

    betas = np.array([0.0, 0.5, 0.9, 0.98], np.float32)
    floors = jax.jit(jax.vmap(floor))(betas)
    fitted = np.polyfit(np.log((1 - betas) / (1 + betas)), np.log(floors), 1)[0]
    # One half in theory; rounds of one problem and one stream of noise spread it by about 0.05.
    assert 0.38 < fitted < 0.62
    assert floors[-1] < 0.25 * floors[0]


def test_one_client_is_soba() -> None:
    """The update written out in NumPy, on the average of all clients."""
    with jax.enable_x64(True):
        q = Quadratic.make()
        a, b, c, target = (v.mean(0) for v in q)
        x, y, z = np.zeros(3), np.zeros(4), np.zeros(4)
        for _ in range(50):
            x, y, z = (
                x - 0.05 * (RIDGE * x - b.T @ z),
                y - 0.2 * (a @ y - b @ x - c),
                z - 0.15 * (a @ z + y - target),
            )
            z *= min(1.0, 0.5 / np.linalg.norm(z))
        optimizer = br_fedbi(make_aggregator("trimmed_mean", f=0), 0.05, ratios=(4.0, 3.0), radius=0.5)
        batches = ClientBatches(*(jax.tree.map(lambda v: v[None], tree) for tree in q.averaged()))
        state, info = iterate(make_bilevel_step(q.problem, optimizer), start(jnp.float64), batches, 50)
        assert_trees_close(state.point, BilevelPoint(x, y, z), atol=1e-12)
        # The projection counts: this ball is too small for the solution.
        assert info.on_boundary[-1]
        assert info.boundary_fraction[-1] == info.on_boundary.mean()
        np.testing.assert_allclose(np.linalg.norm(z), 0.5)


def test_limits_of_the_estimators() -> None:
    """No momentum is plain; PAGE that always refreshes is plain with big batches."""
    q = Quadratic.make()
    options = {"ratios": (4.0, 4.0)}
    rule = make_aggregator("coordinate_median")
    plain, _ = iterate(make_bilevel_step(q.problem, br_fedbi(rule, 0.05, **options)), start(), q.batches, 20)
    momentum = make_bilevel_step(q.problem, br_fedbi(rule, 0.05, estimator=client_momentum(8, 0.0), **options))
    assert_trees_close(iterate(momentum, start(), q.batches, 20)[0].point, plain.point, rtol=1e-6)
    paging = br_fedbi(rule, 0.05, estimator=page(8), **options)
    always = make_bilevel_step(q.problem, paging, refresh_probability=1.0)
    wrong = jax.tree.map(lambda v: 7 * v, q.batches)
    state, info = iterate(always, start(), wrong, 20, refresh_batches=q.batches)
    assert_trees_close(state.point, plain.point, rtol=1e-6)
    assert info.refreshed.all()
    assert set(np.asarray(info.gradients)) == {4}


def test_page_with_full_batches_telescopes() -> None:
    """Whatever the coin, the estimate is the direction at the current point."""
    q = Quadratic.make()
    stepper = make_bilevel_step(
        q.problem, br_fedbi(MEAN, 0.05, ratios=(4.0, 4.0), estimator=page(8)), refresh_probability=0.1
    )
    state, info = iterate(stepper, start(), q.batches, 100)
    plain, _ = iterate(make_bilevel_step(q.problem, br_fedbi(MEAN, 0.05, ratios=(4.0, 4.0))), start(), q.batches, 100)
    assert info.refreshed[0]
    assert 0 < info.refreshed[1:].sum() < 50
    assert_trees_close(state.point, plain.point, atol=1e-5)  # a hundred float32 differences
    np.testing.assert_array_equal(info.gradients, np.where(info.refreshed, 4, 8))


def test_page_corrects_with_both_iterates_on_one_sample() -> None:
    """The second round, written out: M1 = D(u0; big) + D(u1; small) - D(u0; small)."""
    q, small = Quadratic.make(), jax.tree.map(lambda v: v + 0.3, Quadratic.make().batches)
    stepper = make_bilevel_step(q.problem, br_fedbi(MEAN, 0.05, estimator=page(8)), refresh_probability=0.5)
    step = jax.jit(stepper.step)
    first, _ = step(KEY, stepper.init(start()), small, q.batches, refresh=jnp.array(True))
    second, _ = step(KEY, first, small, q.batches, refresh=jnp.array(False))

    @jax.jit
    def directions(point, batches):
        optimizer = br_fedbi(MEAN, 0.05)
        step = make_bilevel_step(q.problem, optimizer)
        moved, _ = step.step(KEY, step.init(point), batches)
        return jax.tree.map(lambda a, b: a - b, moved.point, point)

    expected = jax.tree.map(
        lambda u, big, now, before: u + big + now - before,
        first.point,
        directions(start(), q.batches),
        directions(first.point, small),
        directions(start(), small),
    )
    assert_trees_close(second.point, expected, atol=1e-6)


def test_sub_loops_written_out() -> None:
    with jax.enable_x64(True):
        q = Quadratic.make()
        a, b, c, target = (v.mean(0) for v in q)
        x, y = np.zeros(3), np.zeros(4)
        for _ in range(10):
            for _ in range(2):
                y = y - 0.2 * (a @ y - b @ x - c)
            z = np.zeros(4)
            for _ in range(3):
                z = z - 0.1 * (a @ z + y - target)
            x = x - 0.05 * (RIDGE * x - b.T @ z)
        batches = jax.tree.map(lambda v: jnp.repeat(v[:, None], 6, 1), q.batches)
        stepper = bilantine(q.problem, MEAN, 0.05, ratios=(4.0, 2.0), lower_steps=2)
        state, info = iterate(stepper, start(jnp.float64), batches, 10)
        assert_trees_close(state.point, BilevelPoint(x, y, z), atol=1e-12)
        assert set(np.asarray(info.messages)) == {6}
        assert set(np.asarray(info.gradients)) == {2 + 2 * 3 + 2}
        assert info.strongly_convex.all()


@functools.cache
def forms(axis_name: str | None = None):
    """One stepper of each form, under an attack that draws at random, and the big batches that PAGE takes."""
    q = Quadratic.make()
    options = {
        "ratios": (4.0, 4.0),
        "attack": simulate_attack(attacks.Gaussian(0.0, 5.0), 2, key=jax.random.key(3), axis_name=axis_name),
        "byzantine": 2,
        "axis_name": axis_name,
    }
    rule = make_aggregator("nnm+trimmed_mean", f=2)

    def single(estimator, probability=None, *, rule, server=None, key=None):
        optimizer = br_fedbi(rule, 0.05, estimator=estimator, server=server, key=key, **options)
        return make_bilevel_step(q.problem, optimizer, refresh_probability=probability, axis_name=axis_name)

    adam = BilevelPoint(optax.scale_by_adam(), optax.identity(), optax.trace(0.5))
    return {
        "momentum, bucketing, server optimisers": single(
            client_momentum(8, 0.5),
            rule=make_aggregator("bucketing+coordinate_median"),
            server=adam,
            key=jax.random.key(4),
        ),
        "page, centred clipping": single(page(8), 0.3, rule=make_aggregator("centred_clipping")),
        "sub-loops, nnm": bilantine(q.problem, rule, 0.05, **options),
    }


def batches_of(form: str) -> tuple[ClientBatches, ...]:
    batches = Quadratic.make().batches
    if form.startswith("sub-loops"):
        return (jax.tree.map(lambda v: jnp.repeat(v[:, None], 8, 1), batches),)
    return (jax.tree.map(lambda v: 1.1 * v, batches), batches) if form.startswith("page") else (batches,)


@pytest.fixture(scope="module")
def stacked():
    """Four rounds of every form on one device, in a scan."""

    def rounds(form: str):
        stepper = forms()[form]
        run = jax.jit(lambda s, keys: jax.lax.scan(lambda s, key: stepper.step(key, s, *batches_of(form)), s, keys))
        state, infos = run(stepper.init(start()), jax.random.split(KEY, 4))
        return state, jax.tree.map(lambda leaf: leaf[-1], infos)

    return functools.cache(rounds)


@pytest.mark.parametrize("form", list(forms()))
def test_a_loop_on_a_mesh_equals_a_scan_of_stacked_clients(stacked, form: str) -> None:
    devices = 4 if form.startswith("page") else 8  # two clients on each, or one
    mesh = jax.make_mesh((devices,), ("client",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    stepper, batches = forms("client")[form], batches_of(form)
    state = stepper.init(start())
    named = dict(zip(("batches", "refresh_batches"), batches, strict=False))
    step = jax.jit(shard_bilevel_step(stepper.step, mesh, "client", state=state, **named))
    for key in jax.random.split(KEY, 4):
        state, info = step(key, state, *batches)
    assert_trees_close((state, info), stacked(form), rtol=1e-5, atol=1e-6)


def test_states_survive_a_checkpoint(stacked, tmp_path) -> None:
    whole = {form: stacked(form)[0] for form in forms()}
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, whole)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", whole)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "state", target)
    assert_trees_close(again, whole, rtol=0, atol=0)


def test_every_variable_is_attacked_with_other_random_numbers() -> None:
    """The lower and the auxiliary variable are of one shape: with one key both would receive the same messages."""
    strike = simulate_attack(attacks.Gaussian(), 1, key=KEY)
    optimizer = br_fedbi(MEAN, 1.0, ratios=(1.0, 1.0), attack=strike, radius=1e9)
    y = jnp.zeros(4)
    point = bilevel_point(y, y)
    nothing = BilevelPoint(*[jnp.zeros((2, 4))] * 3)
    update = jax.jit(optimizer.update)
    moves, state = update(nothing, optimizer.init(point), point)
    for one, other in ((moves.upper, moves.lower), (moves.lower, moves.auxiliary), (moves.auxiliary, moves.upper)):
        assert np.abs(one - other).min() > 1e-4
    again, _ = update(nothing, state, point)
    assert np.abs(again.lower - moves.auxiliary).min() > 1e-4


def test_diagnostics_of_a_round() -> None:
    """Against NumPy: the aggregates beside the honest messages, and how far PAGE is from its directions."""
    q, n = Quadratic.make(), 8
    strike = simulate_attack(attacks.InnerProduct(4.0), 2)
    stepper = make_bilevel_step(
        q.problem,
        br_fedbi(MEAN, 0.05, estimator=page(n), attack=strike, byzantine=2),
        refresh_probability=0.5,
    )
    small = jax.tree.map(lambda v: 1.5 * v, q.batches)
    step = jax.jit(stepper.step)
    state, info = step(KEY, stepper.init(start()), small, q.batches)
    assert info.drift == 0.0
    messages = -np.asarray(q.c)  # D_y at the origin
    mean = messages[:6].mean(0)
    # The mean of six and two at minus four times theirs is (6 - 8) / 8 of it.
    np.testing.assert_allclose(info.agreement.lower.cosine, -1.0, rtol=1e-5)
    np.testing.assert_allclose(info.agreement.lower.error, 1.25 * np.linalg.norm(mean), rtol=1e-5)
    spread = np.sqrt(np.square(messages[:6] - mean).sum(1).mean())
    np.testing.assert_allclose(info.agreement.lower.spread, spread, rtol=1e-5)
    # M - D(u1; S) = D(u0; big) - D(u0; S), at the origin of c and of the targets alone.
    _, info = step(KEY, state, small, q.batches, refresh=jnp.array(False))
    drift = np.sqrt((np.square(0.5 * q.c).sum(1) + np.square(0.5 * q.target).sum(1)).mean())
    np.testing.assert_allclose(info.drift, drift, rtol=1e-5)


def test_vmap_over_step_sizes_and_eager() -> None:
    """A step size may be traced, and what is jitted is what is not."""
    q = Quadratic.make()

    def moved(rate):
        stepper = make_bilevel_step(q.problem, br_fedbi(MEAN, rate, estimator=client_momentum(8, 0.5)))
        return stepper.step(KEY, stepper.init(start()), q.batches)[0].point

    rates = jnp.array([0.01, 0.1])
    together = jax.jit(jax.vmap(moved))(rates)
    for i, rate in enumerate(rates):
        assert_trees_close(jax.tree.map(lambda v, i=i: v[i], together), moved(rate), rtol=1e-5, atol=1e-6)
    scheduled = br_fedbi(MEAN, optax.constant_schedule(0.1), estimator=client_momentum(8, 0.5))
    stepper = make_bilevel_step(q.problem, scheduled)
    assert_trees_close(stepper.step(KEY, stepper.init(start()), q.batches)[0].point, moved(0.1), rtol=1e-6)


def test_trees_of_odd_shapes_and_16_bit() -> None:
    """A scalar, an empty leaf, nested containers; accumulators are float32."""
    problem = BilevelProblem(
        upper=lambda x, y, b: jnp.square(y["w"].sum() - b) + jnp.square(x[0]),
        lower=lambda x, y, b: sum(jnp.square(leaf - x[0] * b).sum() for leaf in jax.tree.leaves(y)),
    )
    x = (jnp.bfloat16(0.5), {"none": jnp.zeros((0, 3), jnp.bfloat16)})
    y = {"w": jnp.ones((2, 1, 3), jnp.bfloat16), "b": [jnp.bfloat16(1.0)]}
    optimizer = br_fedbi(make_aggregator("nnm+trimmed_mean", f=1), 0.01, estimator=client_momentum(5, 0.9))
    stepper = make_bilevel_step(problem, optimizer)
    point = bilevel_point(x, y)
    data = jnp.arange(5, dtype=jnp.bfloat16)
    state, info = jax.jit(stepper.step)(KEY, stepper.init(point), ClientBatches(data, data))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), state.point) == jax.tree.map(lambda a: (a.shape, a.dtype), point)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.optimizer.estimator.momentum)} == {jnp.dtype(jnp.float32)}
    assert info.finite
    assert {norm.dtype for norm in info.norms} == {jnp.dtype(jnp.float32)}


def test_flags_instead_of_errors_under_jit() -> None:
    """A lower problem that is not strongly convex, and messages that are no numbers."""
    saddle = BilevelProblem(
        upper=lambda x, y, b: x * 0.0 + y.sum() + b, lower=lambda x, y, b: b * (y[0] ** 2 - y[1] ** 2)
    )
    stepper = make_bilevel_step(saddle, br_fedbi(MEAN, 0.1, radius=2.0))
    ones = jnp.ones(3)
    point = bilevel_point(jnp.array(0.0), jnp.ones(2))
    _, info = iterate(stepper, point, ClientBatches(ones, ones), 30)
    assert info.strongly_convex[0]  # z = 0: nothing to probe yet
    assert not info.strongly_convex[-1]
    assert info.boundary_fraction[-1] > 0.5
    nan = ClientBatches(ones.at[0].set(jnp.nan), ones)
    assert not iterate(stepper, point, nan, 2)[1].finite[-1]
    robust = make_bilevel_step(saddle, br_fedbi(make_aggregator("trimmed_mean", f=1), 0.1))
    assert iterate(robust, point, nan, 2)[1].finite[-1]


def test_bad_input_is_named(types_unchecked) -> None:
    q = Quadratic.make()
    for options, message in (
        ({"learning_rate": 0.0}, "learning_rate must be positive, got 0.0"),
        ({"ratios": (1.0, -2.0)}, r"ratios\[1\] must be positive, got -2.0"),
        ({"radius": 0}, "radius must be positive, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            br_fedbi(MEAN, **options)
    with pytest.raises(TypeError, match="expected an aggregator, got str"):
        br_fedbi("mean")
    with pytest.raises(ValueError, match="draws at random"):
        br_fedbi(make_aggregator("bucketing+trimmed_mean", f=1))
    with pytest.raises(ValueError, match=r"refresh_probability must be in \(0, 1\], got 0.0"):
        make_bilevel_step(q.problem, br_fedbi(MEAN), refresh_probability=0.0)
    with pytest.raises(ValueError, match="auxiliary_steps must be positive, got 0"):
        bilantine(q.problem, MEAN, auxiliary_steps=0)
    stepper = make_bilevel_step(q.problem, br_fedbi(MEAN))
    state = stepper.init(start())
    empty = q.batches._replace(upper={"target": jnp.zeros((8, 0, 4))})
    with pytest.raises(ValueError, match=r"without data.*batches.upper\['target'\] has shape \(8, 0, 4\)"):
        stepper.step(KEY, state, empty)
    fewer = q.batches._replace(upper={"target": jnp.zeros((7, 4))})
    with pytest.raises(ValueError, match=r"leading axis of clients; batches.upper\['target'\] has shape \(7, 4\)"):
        stepper.step(KEY, state, fewer)
    with pytest.raises(ValueError, match="batches have no leaves"):
        stepper.step(KEY, state, ClientBatches(None, None))
    too_many = make_bilevel_step(q.problem, br_fedbi(make_aggregator("trimmed_mean", f=4)))
    with pytest.raises(ValueError, match="cannot tolerate f=4 of n=8 workers: need 2f < n, at most f=3"):
        too_many.step(KEY, too_many.init(start()), q.batches)
    wrong_n = make_bilevel_step(q.problem, br_fedbi(MEAN, estimator=client_momentum(7, 0.5)))
    with pytest.raises(ValueError, match=r"messages of every worker need shape \(7, 3\)"):
        wrong_n.step(KEY, wrong_n.init(start()), q.batches)
    no_coin = make_bilevel_step(q.problem, br_fedbi(MEAN, estimator=page(8)))
    with pytest.raises(ValueError, match="page needs update"):
        no_coin.step(KEY, no_coin.init(start()), q.batches)
    loops = bilantine(q.problem, MEAN)
    with pytest.raises(ValueError, match=r"8 sub-steps; batches.lower\['a'\] has shape \(8, 4, 4\)"):
        loops.step(KEY, loops.init(start()), q.batches)
    optimizer = br_fedbi(MEAN)
    with pytest.raises(ValueError, match="with the point"):
        optimizer.update(start(), optimizer.init(start()))
    mesh = jax.make_mesh((3,), ("client",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    with pytest.raises(ValueError, match="8 clients do not divide among the 3 devices of axis 'client'"):
        shard_bilevel_step(stepper.step, mesh, "client", state=state, batches=q.batches)
    with pytest.raises(ValueError, match=r"the mesh has axes \('client',\), not 'worker'"):
        shard_bilevel_step(stepper.step, mesh, "worker", state=state, batches=q.batches)
