"""Closed forms, the (f, kappa) guarantee, parity with byzfl, messages that are no numbers, meshes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxlab.optim import aggregation
from jaxlab.optim.aggregation import compose, make_aggregator
from jaxlab.optim.aggregation.geometry import COLUMNS, geometry_of
from jaxlab.optim.aggregation.layout import layout_of, worker_blocks
from jaxlab.optim.aggregation.ordering import layers, ordered, sorted_rows

SEVEN = np.array(
    [[1, 2, 3], [2, 1, 4], [0, 3, 2], [1.5, 2.5, 3.5], [1, 1, 3], [40, -30, 25], [38, -29, 20]], np.float32
)
HONEST_MEAN = (1.1, 1.9, 3.1)
NNM, ARC = aggregation.NearestNeighbourMixing, aggregation.AdaptiveClipping


def as_tree(rows):
    """The same numbers as leaves of several shapes, one of them a scalar of every worker."""
    return {"a": rows[:, 0], "b": {"c": rows[:, 1:].reshape(len(rows), 1, -1)}}


def as_row(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


# Values of byzfl 0.0.11 on the rows above with f = 2.
CLOSED_FORMS = {
    "mean": (aggregation.Mean(), (11.928571, -7.071429, 8.642857)),
    "coordinate median": (aggregation.CoordinateMedian(), (1.5, 1, 3.5)),
    "trimmed mean": (aggregation.TrimmedMean(2), (1.5, 1.333333, 3.5)),
    "geometric median, byzfl": (aggregation.GeometricMedian(0.1, 3, "byzfl"), (1.741111, 1.269868, 3.599522)),
    "geometric median": (aggregation.GeometricMedian(iterations=100), (1.556925, 1.434602, 3.410665)),
    "Krum": (aggregation.Krum(2), (1, 2, 3)),
    "Multi-Krum": (aggregation.MultiKrum(2), HONEST_MEAN),
    "MDA": (aggregation.MinimumDiameterAveraging(2), HONEST_MEAN),
    "SMEA": (aggregation.MinimumEigenvalueAveraging(2), HONEST_MEAN),
    "MoNNA": (aggregation.Monna(2), HONEST_MEAN),
    "MeaMed": (aggregation.MeanAroundMedian(2), HONEST_MEAN),
    "centred clipping": (aggregation.CentredClipping(5.0), (1.820637, 0.574058, 2.80942)),
    "centred clipping, 20": (aggregation.CentredClipping(5.0, 20), (2.532311, 0.712865, 3.830315)),
    "NNM, trimmed mean": (compose(NNM(2), aggregation.TrimmedMean(2)), HONEST_MEAN),
    # The two last rows become (16.5, -10.9, 11.1) and the others the honest mean.
    "NNM, mean": (
        compose(NNM(2), aggregation.Mean()),
        (5 * np.array(HONEST_MEAN) + 2 * np.array([16.5, -10.9, 11.1])) / 7,
    ),
    "ARC, mean": (
        compose(ARC(2), aggregation.Mean()),
        (5.5 + 3.279024 + 3.360633, 9.5 - 2.459268 - 2.564694, 15.5 + 2.04939 + 1.768754) / np.float64(7),
    ),
}


@pytest.fixture(scope="module")
def closed_forms():
    return jax.jit(lambda tree: {name: rule.aggregate(tree) for name, (rule, _) in CLOSED_FORMS.items()})(
        as_tree(SEVEN)
    )


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_closed_forms(name: str, closed_forms) -> None:
    assert jax.tree.map(jnp.shape, closed_forms[name]) == {"a": (), "b": {"c": (1, 2)}}
    np.testing.assert_allclose(as_row(closed_forms[name]), CLOSED_FORMS[name][1], rtol=1e-5, atol=1e-5)


def test_the_state_of_centred_clipping_is_its_last_result() -> None:
    once, twice = aggregation.CentredClipping(5.0), aggregation.CentredClipping(5.0, 2)
    stacked = as_tree(SEVEN)
    state = once.init(jax.tree.map(lambda leaf: leaf[0], stacked))
    apply = jax.jit(once.apply)
    first, state = apply(stacked, state)
    jax.tree.map(np.testing.assert_array_equal, first, state)
    second, _ = apply(stacked, state)
    np.testing.assert_allclose(as_row(second), as_row(jax.jit(twice.aggregate)(stacked)), rtol=1e-6)


RULES = {
    "coordinate_median": {},
    "trimmed_mean": {},
    "mean_around_median": {},
    "geometric_median": {"iterations": 100},
    "krum": {},
    "multi_krum": {},
    "minimum_diameter_averaging": {},
    "minimum_eigenvalue_averaging": {},
    "monna": {},
    "nnm+trimmed_mean": {},
    "nnm+krum": {},
    "nnm+coordinate_median": {},
    "arc+geometric_median": {},
    "arc+nnm+trimmed_mean": {},
}
ROBUST = [*RULES, "centred_clipping", "static_clipping+coordinate_median"]


def _made(name: str):
    return make_aggregator(name, f=2, **RULES.get(name, {}))


@pytest.fixture(scope="module")
def of_seven():
    """All rules with f = 2 on messages ``[7, 3]``, in one program that the tests share."""
    names = [*ROBUST, "mean"]
    return jax.jit(lambda rows: {name: _made(name).aggregate(rows) for name in names})


def _attacked(random: np.random.Generator, n: int, f: int, cases: int) -> np.ndarray:
    """``[cases, n, 3]``: honest messages at several spreads, the last f replaced by what hurts various rules."""
    messages = random.normal(size=(cases, n, 3)) * 10 ** random.uniform(-1, 1, size=(cases, 1, 3))
    messages[::4] = messages[::4, :, :1] * np.array([1.0, 0, 0])  # on a line, where the constants are tight
    messages[1::4, : n // 2] = messages[1::4, :1]  # several equal ones
    mean, spread = messages[:, : n - f].mean(1), messages[:, : n - f].std(1, ddof=1)
    scale = 10 ** random.uniform(-1, 3, size=(cases, 1))
    crafted = np.stack([mean + scale * spread, -scale * mean, mean + scale * random.normal(size=mean.shape)])
    kind = random.integers(3, size=cases)
    messages[:, n - f :] = crafted[kind, np.arange(cases)][:, None]
    return messages.astype(np.float32)


@settings(max_examples=6, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_guarantee_holds_for_every_set_of_honest_messages(seed: int, of_seven) -> None:
    n, f = 7, 2
    messages = _attacked(np.random.default_rng(seed), n, f, 64)
    each = [of_seven(rows) for rows in messages]
    for name in RULES:
        kappa = _made(name).kappa(n, f)
        assert 0 < kappa < np.inf
        assert _made(name).tolerates(n) >= f
        results = np.stack([one[name] for one in each]).astype(np.float64)
        for chosen in itertools.combinations(range(n), n - f):
            if name == "monna" and 0 not in chosen:
                continue
            honest = messages[:, chosen].astype(np.float64)
            mean = honest.mean(1)
            spread = np.square(honest - mean[:, None]).sum(2).mean(1)
            error = np.square(results - mean).sum(1)
            # Float32 rounds distances to 1e-6 of the largest message that is not thrown out.
            slack = 1e-5 * np.square(np.median(np.abs(messages), 1)).sum(1)
            np.testing.assert_array_less(error, kappa * spread * (1 + 1e-4) + slack + 1e-9, err_msg=name)


def test_the_mean_and_a_trimmed_mean_beyond_its_f_have_no_guarantee() -> None:
    assert aggregation.Mean().kappa(7) == 0.0
    assert aggregation.Mean().kappa(7, 1) == np.inf
    assert aggregation.TrimmedMean(1).kappa(7, 2) == np.inf
    moved = np.concatenate([SEVEN[:5], np.full((2, 3), 1e6, np.float32)])
    error = np.square(aggregation.TrimmedMean(1).aggregate(jnp.asarray(moved)) - np.array(HONEST_MEAN)).sum()
    assert error > aggregation.TrimmedMean(2).kappa(7) * np.square(SEVEN[:5] - np.array(HONEST_MEAN)).sum(1).mean()


@pytest.mark.parametrize("name", [*RULES, "centred_clipping", "mean"])
def test_equivariance(name: str, of_seven) -> None:
    """The order of the workers does not matter; shifts and scales pass through."""

    def apply(rows):
        return of_seven(rows)[name]

    random = np.random.default_rng(0)
    rows = np.float32(random.normal(size=(7, 3)))
    base = apply(rows)
    if name != "monna":  # it trusts the first
        np.testing.assert_allclose(apply(rows[[3, 6, 0, 5, 1, 2, 4]]), base, rtol=1e-5, atol=1e-5)
    if "arc" not in name and name != "centred_clipping":  # clipping is about the origin
        np.testing.assert_allclose(apply(rows + np.float32(2.0)), base + 2.0, rtol=1e-5, atol=1e-5)
    if name != "centred_clipping":
        np.testing.assert_allclose(apply(np.float32(1e-4) * rows), 1e-4 * base, rtol=1e-5, atol=1e-9)
    equal = np.tile(np.float32([0.1, -0.3, 1e-3]), (7, 1))
    np.testing.assert_allclose(apply(equal), equal[0], rtol=2e-7)  # a mean of equal numbers may round once


def test_without_byzantine_workers_they_are_the_mean() -> None:
    names = ("trimmed_mean", "nnm+coordinate_median", "nnm+krum", "multi_krum", "monna", "mean_around_median")
    results = jax.jit(lambda rows: {name: make_aggregator(name).aggregate(rows) for name in names})(SEVEN)
    for name in names:
        np.testing.assert_allclose(results[name], SEVEN.mean(0), rtol=1e-6, err_msg=name)


def byzfl_cases(peer, n: int, f: int):
    rules, pre, _ = peer
    plain = {
        "mean": (rules.Average(), aggregation.Mean()),
        "median": (rules.Median(), aggregation.CoordinateMedian()),
        "trimmed mean": (rules.TrMean(f), aggregation.TrimmedMean(f)),
        "geometric median": (rules.GeometricMedian(0.1, 3), aggregation.GeometricMedian(0.1, 3, "byzfl")),
        "Krum": (rules.Krum(f), aggregation.Krum(f)),
        "Multi-Krum": (rules.MultiKrum(f), aggregation.MultiKrum(f)),
        "centred clipping": (rules.CenteredClipping(L=3, tau=1.5), aggregation.CentredClipping(1.5, 3)),
        "MDA": (rules.MDA(f), aggregation.MinimumDiameterAveraging(f)),
        "MoNNA": (rules.MoNNA(f, 1), aggregation.Monna(f, 1)),
        "MeaMed": (rules.Meamed(f), aggregation.MeanAroundMedian(f)),
    }
    for name, (theirs, ours) in plain.items():
        yield name, theirs, ours
    for name, their_pre, our_pre in (
        ("NNM", pre.NNM(f), NNM(f)),
        ("ARC", pre.ARC(f), ARC(f)),
        ("clipping", pre.Clipping(1.5), aggregation.StaticClipping(1.5)),
    ):
        for behind in ("trimmed mean", "Krum", "geometric median"):
            theirs, ours = plain[behind]
            yield f"{name}, {behind}", lambda x, p=their_pre, r=theirs: r(p(np.array(x))), compose(our_pre, ours)


def test_parity_with_byzfl(byzfl) -> None:
    n, f = 10, 4
    random = np.random.default_rng(n)
    rows = random.normal(size=(n, 20)).astype(np.float32)
    rows[-f:] += 3.0
    cases = list(byzfl_cases(byzfl, n, f))
    ours = jax.jit(lambda x: {name: rule.aggregate(x) for name, _, rule in cases})(rows)
    for name, theirs, _ in cases:
        np.testing.assert_allclose(ours[name], theirs(rows.astype(np.float64)), rtol=1e-5, atol=1e-5, err_msg=name)


def test_bucketing_averages_the_groups_of_a_permutation() -> None:
    key, rows = jax.random.key(4), np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    order = np.asarray(jax.random.permutation(jax.random.fold_in(key, 0), 7))
    groups = np.stack([rows[order[i : i + 3]].mean(0) for i in (0, 3, 6)])
    rule = compose(aggregation.Bucketing(3), aggregation.CoordinateMedian())
    np.testing.assert_allclose(rule.aggregate(rows, key=key), np.median(groups, 0), rtol=1e-6)
    # A group with a message that is no number is one extreme message.
    rows[order[4]] = np.nan
    assert np.isfinite(rule.aggregate(rows, key=key)).all()


def test_blanchard_s_neighbours_change_the_choice() -> None:
    """One point has a near pair and is otherwise remote: the fewer neighbours count, the better it looks."""
    rows = np.float32([0.0, 0.01, 4.0, 5.0, 6.0])[:, None]
    squares = np.square(rows - rows.T)
    for neighbours, count in (("byzfl", 3), ("blanchard", 2)):
        scores = np.sort(squares, 1)[:, 1 : 1 + count].mean(1)
        chosen = jax.jit(aggregation.Krum(1, neighbours=neighbours).aggregate)(rows)
        np.testing.assert_array_equal(chosen, rows[np.argmin(scores)])


def test_a_tiny_spread_far_from_the_origin_and_huge_byzantine_messages_do_not_blur_distances() -> None:
    """Spread 1e-2 about 1e3, and two messages of 1e6: float32 Gram matrices about the origin are all rounding."""
    random = np.random.default_rng(1)
    rows = (1e3 + 1e-2 * random.normal(size=(9, 50))).astype(np.float32)
    rows[[0, 4]] = 1e6
    exact = np.square(rows[:, None].astype(np.float64) - rows).sum(2)
    got = geometry_of([jnp.asarray(rows)]).squared_distances
    honest = np.ix_(*2 * [[1, 2, 3, 5, 6, 7, 8]])
    np.testing.assert_allclose(np.asarray(got)[honest], exact[honest], rtol=1e-5)
    chosen = np.argmin(np.sort(exact, 1)[:, 1:7].mean(1))
    np.testing.assert_array_equal(aggregation.Krum(2).aggregate(rows), rows[chosen])


def test_leaves_longer_than_a_piece_of_columns() -> None:
    """Both Gram matrices, mixing and windows, piece by piece; the last piece overlaps the one before."""
    random = np.random.default_rng(2)
    rows = (100 + random.normal(size=(5, 2 * COLUMNS + 77))).astype(np.float32)
    rows[4] = np.nan
    tree = {"long": rows[:, :-1], "short": rows[:, -1]}
    wide = rows.astype(np.float64)
    exact = np.square(wide[:, None] - wide).sum(2)
    geometry = geometry_of(worker_blocks(layout_of(tree), tree))
    np.testing.assert_allclose(np.asarray(geometry.squared_distances)[:4, :4], exact[:4, :4], rtol=1e-5)
    order = np.argsort(exact[:4, :4], 1)[:, :4]
    mixed = np.stack([wide[row].mean(0) for row in order])
    result = jax.jit(compose(NNM(1), aggregation.TrimmedMean(1)).aggregate)(tree)
    np.testing.assert_allclose(as_row(result), np.median(mixed, 0), rtol=1e-6)
    expected = np.sort(np.where(np.isnan(wide), np.inf, wide), 0)
    around = jax.jit(aggregation.MeanAroundMedian(1).aggregate)(tree)
    np.testing.assert_allclose(as_row(around), expected[:4].mean(0), rtol=1e-6)


@pytest.mark.parametrize("name", ROBUST)
def test_messages_that_are_no_numbers_are_among_the_f(name: str, of_seven) -> None:
    def rule(rows):
        return of_seven(rows)[name]

    for bad in (np.nan, np.inf, -np.inf, 1e38):
        for where in ([1, 6], [5, 6]):
            rows = SEVEN.copy()
            rows[5:] = SEVEN[:2] + 0.25  # otherwise harmless
            rows[where] = bad
            result = rule(rows)
            # Clipping to a fixed length, and the means of coordinate-wise rules, stay within the honest range or zero.
            np.testing.assert_array_less(np.abs(result), 5.0)
        rows[where, 1:] = 0.0  # a single entry spoils the message or its coordinate, no more
        assert np.isfinite(rule(rows)).all()


def test_the_mean_passes_nan_on_and_too_many_are_nan() -> None:
    rows = SEVEN.copy()
    rows[4:] = np.nan
    names = [
        "mean",
        "krum",
        "multi_krum",
        "nnm+krum",
        "arc+krum",
        "monna",
        "trimmed_mean",
        "nnm+trimmed_mean",
        "arc+mean",
    ]
    results = jax.jit(lambda x: {name: make_aggregator(name, f=2).aggregate(x) for name in names})(rows)
    for name, result in results.items():
        # A coordinate-wise rule may rank them as infinities.
        assert not np.isfinite(result).any() if name.endswith("trimmed_mean") else np.isnan(result).all(), name
    rows[3] = np.nan
    assert np.isnan(jax.jit(aggregation.GeometricMedian().aggregate)(rows)).all()


def test_the_network_sorts_everything() -> None:
    """By the 0-1 principle a network that sorts all inputs of zeros and ones sorts all inputs."""
    for n in range(1, 11):
        inputs = np.array(list(itertools.product([0.0, 1.0], repeat=n)), np.float32).T
        expected = np.sort(inputs, 0)
        if n in (1, 2, 7, 10):
            np.testing.assert_array_equal(sorted_rows(jnp.asarray(inputs)), expected)
        lines = [inputs[i] for i in range(n)]
        for i, j in itertools.chain(*layers(n)):
            lines[i], lines[j] = np.minimum(lines[i], lines[j]), np.maximum(lines[i], lines[j])
        np.testing.assert_array_equal(lines, expected)
    rows = np.random.default_rng(0).normal(size=(150, 5)).astype(np.float32)
    rows[3, 2], rows[4, 1], rows[5, 1] = np.nan, np.inf, -np.inf
    np.testing.assert_array_equal(ordered(jnp.asarray(rows)), np.sort(np.where(np.isnan(rows), np.inf, rows), 0))
    with_many = {"trimmed": aggregation.TrimmedMean(30), "krum": aggregation.Krum(30), "mean": aggregation.Mean()}
    many = np.random.default_rng(0).normal(size=(150, 5))
    np.testing.assert_allclose(
        with_many["trimmed"].aggregate(np.float32(many)), np.sort(many, 0)[30:-30].mean(0), rtol=1e-4, atol=1e-6
    )
    assert (many.astype(np.float32) == np.asarray(with_many["krum"].aggregate(np.float32(many)))).all(1).any()
    np.testing.assert_allclose(with_many["mean"].aggregate(np.float32(many)), many.mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_leaves_keep_their_dtype_and_sums_are_wide(dtype) -> None:
    names = [*aggregation.AGGREGATORS, "nnm+trimmed_mean", "arc+mean"]
    tree = {"half": jnp.asarray(SEVEN, dtype), "single": jnp.asarray(SEVEN[:, :2])}
    result = jax.eval_shape(lambda t: {name: make_aggregator(name, f=2).aggregate(t) for name in names}, tree)
    for name in names:
        assert result[name]["half"].dtype == dtype
        assert result[name]["single"].dtype == jnp.float32
    # 256 ones and one more: a bfloat16 sum stops at 256.
    ones = jnp.ones((257, 1), jnp.bfloat16)
    assert aggregation.Mean().aggregate(ones)[0] == 1.0
    assert aggregation.CentredClipping().init(tree)["half"].dtype == jnp.float32


def test_float64_stays() -> None:
    with jax.enable_x64(True):
        rows = jnp.asarray(SEVEN, jnp.float64)
        result = jax.jit(compose(NNM(2), aggregation.TrimmedMean(2)).aggregate)(rows)
        assert result.dtype == jnp.float64
        np.testing.assert_allclose(result, HONEST_MEAN, rtol=1e-14)


# Every way through the code: by columns, by distances, with memory, and what may go before.
SHARDED = ["mean_around_median", "geometric_median", "centred_clipping", "nnm+trimmed_mean", "arc+nnm+krum"]


def test_a_mesh_axis_gives_the_numbers_of_one_device(node_mesh) -> None:
    """Two workers a device; leaves that the devices do not divide; one message that is no number."""
    n, f = 8, 2
    random = np.random.default_rng(n)
    tree = {
        "matrix": random.normal(size=(n, 7, 5)).astype(np.float32),
        "scalar": random.normal(size=n).astype(np.float32),
        "half": jnp.asarray(random.normal(size=(n, 3)), jnp.bfloat16),
        "long": random.normal(size=(n, 20_001)).astype(np.float32),
    }
    tree["matrix"][1, 0, 0] = np.nan
    key = jax.random.key(0)
    rules = {name: make_aggregator(name, f=f) for name in SHARDED}
    rules["bucketing"] = make_aggregator("bucketing+coordinate_median")

    def all_of(stacked, axis_name=None):
        return {name: rule.aggregate(stacked, key=key, axis_name=axis_name) for name, rule in rules.items()}

    mesh, spec = node_mesh(4), PartitionSpec("node")
    everywhere = jax.shard_map(lambda t: all_of(t, "node"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    got, expected = jax.jit(everywhere)(tree), jax.jit(all_of)(tree)
    for name in rules:
        for x, y in zip(*map(jax.tree.leaves, (got[name], expected[name])), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_device_exchanges_two_models_and_not_one_a_worker(node_mesh) -> None:
    """By the shapes of the collectives in the compiled program: n = 16 workers of d numbers on 8 devices."""
    n, d = 16, 8 * 4096
    rule = compose(NNM(3), aggregation.TrimmedMean(3))
    sharded = jax.shard_map(
        lambda x: rule.aggregate(x, axis_name="node"),
        mesh=node_mesh(8),
        in_specs=PartitionSpec("node"),
        out_specs=PartitionSpec(),
    )
    jaxpr = jax.make_jaxpr(sharded)(jax.ShapeDtypeStruct((n, d), jnp.float32))
    moved: dict[str, list[int]] = {}

    def visit(inner) -> None:
        for equation in inner.eqns:
            name = equation.primitive.name
            if any(kind in name for kind in ("all_to_all", "all_gather", "psum", "ppermute")):
                moved.setdefault(name, []).append(sum(v.aval.size for v in equation.outvars))
            for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    visit(getattr(value, "jaxpr", value))

    visit(jaxpr.jaxpr)
    assert sum(sizes := list(itertools.chain(*moved.values()))) == n * d // 8 + d + 2 * (n + 1) ** 2, moved
    assert max(sizes) == n * d // 8


def test_it_is_a_value_and_a_name_makes_it() -> None:
    assert make_aggregator("nnm+trimmed_mean", f=2) == compose(NNM(2), aggregation.TrimmedMean(2))
    assert hash(make_aggregator("krum", f=1)) == hash(aggregation.Krum(1))
    assert compose(ARC(1), compose(NNM(1), aggregation.Mean())) == compose(ARC(1), NNM(1), aggregation.Mean())
    assert make_aggregator("geometric_median", f=3, iterations=5) == aggregation.GeometricMedian(iterations=5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: aggregation.TrimmedMean(4).aggregate(SEVEN), r"f=4 of n=7 workers: need 2f < n, at most f=3"),
        (lambda: aggregation.Krum(4).aggregate(SEVEN), r"f=4 of n=7 workers: need 2f < n, at most f=3"),
        (lambda: compose(NNM(4), aggregation.Mean()).aggregate(SEVEN), r"at most f=3"),
        (lambda: aggregation.Krum(3, neighbours="blanchard").aggregate(SEVEN), r"need 2f \+ 2 < n, at most f=2"),
        (lambda: aggregation.Krum(0).aggregate(SEVEN[:1]), r"no neighbour to score by: f=0 of n=1"),
        (lambda: aggregation.MultiKrum(2, 6).aggregate(SEVEN), r"selected must be at most n-f=5, got 6"),
        (lambda: aggregation.Krum(2, 3), r"Krum selects 1 message, got selected=3"),
        (lambda: aggregation.Monna(2, 7).aggregate(SEVEN), r"one of n=7 workers, got 7"),
        (lambda: aggregation.MinimumDiameterAveraging(12).check(40), r"at most 20000 are tried"),
        (lambda: aggregation.TrimmedMean(-1), r"f must be at least 0, got -1"),
        (lambda: aggregation.Bucketing(0), r"size must be at least 1, got 0"),
        (
            lambda: make_aggregator("bucketing+trimmed_mean", f=2).aggregate(SEVEN, key=jax.random.key(0)),
            r"n=4 workers",
        ),
        (lambda: make_aggregator("bucketing+mean").aggregate(SEVEN), r"draws at random: call it with key="),
        (lambda: aggregation.Mean().aggregate({}), r"no leaves"),
        (lambda: aggregation.Mean().aggregate(np.zeros((0, 3), np.float32)), r"at least 1 worker"),
        (
            lambda: aggregation.Mean().aggregate({"a": SEVEN, "b": SEVEN[:5]}),
            r"same leading axis of workers; \['b'\] has shape \(5, 3\), the first leaf \(7, 3\)",
        ),
        (lambda: aggregation.Mean().aggregate({"a": SEVEN, "b": np.float32(1)}), r"\['b'\] has shape \(\)"),
        (lambda: make_aggregator("krumm"), r"unknown name 'krumm'.*rules are mean, coordinate_median"),
        (lambda: make_aggregator("mnn+krum"), r"unknown name 'mnn'.*pre-aggregators are nnm, bucketing"),
        (lambda: compose(), r"at least a rule"),
        (lambda: aggregation.GeometricMedian(0.0), r"smoothing must be positive, got 0.0"),
        (lambda: aggregation.CentredClipping(-1.0), r"max_norm must not be negative, got -1.0"),
        (lambda: aggregation.CentredClipping(1.0, 0), r"iterations must be at least 1, got 0"),
        (
            lambda: aggregation.CentredClipping().apply(as_tree(SEVEN), {"a": jnp.zeros(())}),
            r"the state is of messages PyTreeDef\(\{'a': \*\}\) of shapes \(\(\),\), and these are",
        ),
        (lambda: aggregation.CentredClipping().apply(SEVEN, jnp.zeros(2)), r"shapes \(\(2,\),\).*shapes \(\(3,\),\)"),
    ],
)
def test_bad_values(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_types(types_unchecked) -> None:
    with pytest.raises(TypeError, match=r"\['b'\] has dtype int32"):
        aggregation.Mean().aggregate({"a": SEVEN, "b": np.zeros((7, 2), np.int32)})
    with pytest.raises(TypeError, match=r"f must be an integer, got 2\.0"):
        aggregation.TrimmedMean(2.0)
    with pytest.raises(TypeError, match="last part must be an aggregation rule"):
        compose(NNM(2), NNM(2))
    with pytest.raises(TypeError, match="must be pre-aggregators, got Mean"):
        compose(aggregation.Mean(), aggregation.Mean())
    with pytest.raises(ValueError, match="compat must be None or 'byzfl', got 'other'"):
        aggregation.GeometricMedian(compat="other")
    with pytest.raises(ValueError, match=r"neighbours must be 'byzfl' \(n-f-1\) or 'blanchard'"):
        aggregation.Krum(1, neighbours="other")
    with pytest.raises(NameError, match="mesh axis 'node' is not bound"):
        aggregation.Mean().aggregate(SEVEN, axis_name="node")
