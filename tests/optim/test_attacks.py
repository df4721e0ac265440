"""Closed forms of attacks, parity with byzfl, one program for all of them, a mesh of four devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxlab.optim import aggregation, attacks

SEVEN = np.array(
    [[1, 2, 3], [2, 1, 4], [0, 3, 2], [1.5, 2.5, 3.5], [1, 1, 3], [40, -30, 25], [38, -29, 20]], np.float32
)
HONEST = SEVEN[:5]
KEY = jax.random.key(0)


def crafted(attack: attacks.Attack, **options) -> np.ndarray:
    """The two Byzantine messages; the honest ones must come back as they were."""
    tree = {"a": SEVEN[:, 0], "b": SEVEN[:, 1:]}
    result = attack.apply(tree, 2, key=KEY, **options)
    rows = np.concatenate([result["a"][:, None], result["b"]], axis=1)
    np.testing.assert_array_equal(rows[:5], HONEST)
    return rows[5:]


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (attacks.NoAttack(), SEVEN[5:]),
        (attacks.SignFlip(), (-1.1, -1.9, -3.1)),
        (attacks.InnerProduct(), (-2.2, -3.8, -6.2)),
        (attacks.ALittleIsEnough(1.5), (2.212430, 3.241641, 4.212430)),
        (attacks.BitFlip(), -SEVEN[5:]),
        (attacks.Mimic(3), (1.5, 2.5, 3.5)),
        (attacks.Constant(), (0, 0, 0)),
        (attacks.Constant(np.inf), (np.inf, np.inf, np.inf)),
        (attacks.Constant(np.nan), (np.nan, np.nan, np.nan)),
    ],
)
def test_closed_forms(attack, expected) -> None:
    np.testing.assert_allclose(crafted(attack), np.broadcast_to(expected, (2, 3)), rtol=1e-6)


def test_the_rule_for_the_deviations_of_a_little_is_enough() -> None:
    """25 workers, 7 of them Byzantine: s = 12 + 1 - 7 = 6 of 18 to win over, and the quantile of 2 / 3 is 0.4307."""
    rows = np.random.default_rng(0).normal(size=(25, 4)).astype(np.float32)
    message = attacks.ALittleIsEnough().apply(rows, 7)[-1]
    mean, deviation = rows[:18].mean(0), rows[:18].std(0, ddof=1)
    np.testing.assert_allclose((message - mean) / deviation, 0.430727, rtol=1e-4)
    majority = attacks.ALittleIsEnough().apply(rows, 15)
    assert np.isfinite(majority).all()


def test_parity_with_byzfl(byzfl) -> None:
    rules, pre, peer = byzfl
    random = np.random.default_rng(3)
    rows = random.normal(size=(9, 12)).astype(np.float32) + 0.5
    honest = rows[:6].astype(np.float64)
    trimmed, krum = aggregation.TrimmedMean(3), aggregation.Krum(3)
    mixed = aggregation.compose(aggregation.NearestNeighbourMixing(3), trimmed)
    pairs = [
        (peer.SignFlipping(), attacks.SignFlip()),
        (peer.InnerProductManipulation(0.7), attacks.InnerProduct(0.7)),
        (peer.ALittleIsEnough(1.2), attacks.ALittleIsEnough(1.2)),
        (peer.Mimic(4), attacks.Mimic(4)),
        (peer.Inf(), attacks.Constant(np.inf)),
    ]
    search = {"f": 3, "evals": 12}
    for theirs, ours, line in (
        (rules.TrMean(3), trimmed, attacks.InnerProduct()),
        (rules.Krum(3), krum, attacks.InnerProduct()),
        (rules.TrMean(3), trimmed, attacks.ALittleIsEnough()),
        (rules.Median(), aggregation.CoordinateMedian(), attacks.ALittleIsEnough()),
    ):
        name = "InnerProductManipulation" if isinstance(line, attacks.InnerProduct) else "ALittleIsEnough"
        optimal = getattr(peer, f"Optimal_{name}")
        pairs.append((optimal(theirs, [], **search), attacks.OptimalScale(line, ours, evaluations=12)))
    # Behind mixing the error does not grow with every step, and the search has to turn back.
    pairs.append(
        (
            peer.Optimal_InnerProductManipulation(rules.TrMean(3), [pre.NNM(3)], **search),
            attacks.OptimalScale(attacks.InnerProduct(), mixed, evaluations=12),
        )
    )
    ours = jax.jit(lambda x: [attack.apply(x, 3)[-1] for _, attack in pairs])(rows)
    for (theirs, attack), message in zip(pairs, ours, strict=True):
        np.testing.assert_allclose(message, theirs(honest), rtol=1e-5, atol=1e-5, err_msg=str(attack))


def test_the_optimal_scale_does_more_harm_than_fixed_ones() -> None:
    rows = np.random.default_rng(0).normal(size=(9, 10)).astype(np.float32) + 0.3
    rule = aggregation.compose(aggregation.NearestNeighbourMixing(3), aggregation.TrimmedMean(3))

    @functools.partial(jax.jit, static_argnums=0)
    def harm(attack):
        return jnp.linalg.norm(rule.aggregate(attack.apply(rows, 3)) - rows[:6].mean(0))

    best = harm(attacks.OptimalScale(attacks.ALittleIsEnough(), rule, step=0.5, evaluations=30))
    assert best >= max(harm(attacks.ALittleIsEnough(scale)) for scale in (0.5, 1.5)) - 1e-6


@pytest.mark.parametrize("bound", ["min_max", "min_sum"])
def test_distance_attacks_go_just_as_far_as_their_bound(bound: str) -> None:
    rows = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    message = np.asarray(jax.jit(lambda x: attacks.DistanceAttack(bound).apply(x, 2)[-1])(rows), np.float64)
    honest = rows[:6].astype(np.float64)
    pairs = np.square(honest[:, None] - honest).sum(2)
    reach = np.square(message - honest).sum(1)
    got, limit = (reach.max(), pairs.max()) if bound == "min_max" else (reach.sum(), pairs.sum(1).max())
    np.testing.assert_allclose(got, limit, rtol=1e-5)
    scale = (honest.mean(0) - message) / honest.std(0, ddof=1)
    np.testing.assert_allclose(scale, scale[0], rtol=1e-4)
    assert scale[0] > 0
    equal = np.ones((8, 6), np.float32)
    # Optimised, as users compile it: else the mean of ones is rounded.
    craft = jax.jit(
        lambda x: attacks.DistanceAttack(bound).apply(x, 2), compiler_options={"xla_backend_optimization_level": 3}
    )
    np.testing.assert_array_equal(craft(equal), equal)


def test_gaussian_messages() -> None:
    rows = np.zeros((100, 500), np.float32) + 2.0
    drawn = np.asarray(attacks.Gaussian(1.0, 3.0).apply(rows, 40, key=KEY)[60:])
    # 20000 numbers: four standard errors.
    assert abs(drawn.mean() - 1.0) < 4 * 3.0 / 20_000**0.5
    assert abs(drawn.std() - 3.0) < 4 * 3.0 / 40_000**0.5
    assert np.unique(drawn[:, 0]).size == 40
    relative = np.asarray(attacks.Gaussian(0.0, 1.0, relative=True).apply(rows, 40, key=KEY)[60:])
    plain = np.asarray(attacks.Gaussian(0.0, 1.0).apply(rows, 40, key=KEY)[60:])
    np.testing.assert_allclose(relative, 2.0 * 500**0.5 * plain, rtol=1e-5)
    # However a message is cut into leaves, its numbers are other ones.
    cut = attacks.Gaussian(0.0, 1.0).apply({"a": rows[:, :200].reshape(100, 10, 20), "b": rows[:, 200:]}, 40, key=KEY)
    np.testing.assert_array_equal(np.concatenate([cut["a"].reshape(100, 200), cut["b"]], 1)[60:], plain)


def test_a_mask_may_name_any_workers_and_be_traced() -> None:
    mask = np.array([False, True, False, False, True, False, False])
    expected = SEVEN.copy()
    expected[mask] = -SEVEN[~mask].mean(0)
    np.testing.assert_allclose(attacks.SignFlip().apply(SEVEN, mask), expected, rtol=1e-6)
    traced = jax.jit(lambda x, m: attacks.SignFlip().apply(x, m))(SEVEN, mask)
    np.testing.assert_allclose(traced, expected, rtol=1e-6)
    spoilt = SEVEN.copy()
    spoilt[1] = np.nan  # what a Byzantine worker would have sent does not reach the honest mean
    np.testing.assert_allclose(attacks.SignFlip().apply(spoilt, mask), expected, rtol=1e-6)
    np.testing.assert_array_equal(attacks.SignFlip().apply(SEVEN, 0), SEVEN)


def test_one_program_for_all_attacks() -> None:
    """The index is traced; each branch gives what the attack gives by itself. Scales and masks may be traced, too."""
    everything = [make() for make in attacks.ATTACKS.values()]
    everything.append(attacks.OptimalScale(attacks.InnerProduct(), aggregation.CoordinateMedian(), evaluations=4))
    compiled = jax.jit(lambda index, x, mask: attacks.switch(index, everything, x, mask, key=KEY))
    mask = np.arange(7) >= 5
    each = jax.jit(lambda x: [attack.apply(x, 2, key=KEY) for attack in everything])(SEVEN)
    for index, expected in enumerate(each):
        np.testing.assert_allclose(compiled(index, SEVEN, mask), expected, rtol=1e-5, atol=1e-5)
    assert compiled._cache_size() == 1
    scales = jnp.array([0.5, 2.0])
    both = jax.vmap(lambda scale: attacks.InnerProduct(scale).apply(SEVEN, 2)[-1])(scales)
    np.testing.assert_allclose(both, -scales[:, None] * HONEST.mean(0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_any_tree_and_its_dtypes(dtype) -> None:
    tree = {"x": [jnp.ones((6, 2), dtype), (jnp.ones(6, dtype),)], "none": None, "empty": jnp.ones((6, 0), dtype)}
    for name, make in attacks.ATTACKS.items():
        result = jax.eval_shape(lambda t, make=make: make().apply(t, 2, key=KEY), tree)
        assert jax.tree.structure(result) == jax.tree.structure(tree), name
        assert jax.tree.map(lambda x: (x.shape, x.dtype), result) == jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def test_a_mesh_axis_gives_the_numbers_of_one_device(node_mesh) -> None:
    random = np.random.default_rng(0)
    tree = {"m": random.normal(size=(8, 3, 5)).astype(np.float32), "s": random.normal(size=8).astype(np.float32)}
    everything = {name: make() for name, make in attacks.ATTACKS.items()}
    everything["optimal"] = attacks.OptimalScale(attacks.ALittleIsEnough(), aggregation.TrimmedMean(3), evaluations=5)

    def all_of(stacked, axis_name=None):
        return {name: attack.apply(stacked, 3, key=KEY, axis_name=axis_name) for name, attack in everything.items()}

    mesh, spec = node_mesh(4), PartitionSpec("node")
    got = jax.jit(jax.shard_map(lambda t: all_of(t, "node"), mesh=mesh, in_specs=spec, out_specs=spec))(tree)
    expected = jax.jit(all_of)(tree)
    for name in everything:
        jax.tree.map(
            lambda x, y, name=name: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=name),
            got[name],
            expected[name],
        )


def test_flipped_labels() -> None:
    labels = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(attacks.flip_labels(labels, 6), 5 - labels)
    flipped = attacks.flip_labels(labels, 6, byzantine=np.array([False, True]))
    np.testing.assert_array_equal(flipped, [[0, 1, 2], [2, 1, 0]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: attacks.SignFlip().apply(SEVEN, 8), r"0 to 7 Byzantine workers of n=7, got 8"),
        (lambda: attacks.SignFlip().apply(SEVEN, -1), r"0 to 7 Byzantine workers of n=7, got -1"),
        (lambda: attacks.SignFlip().apply(SEVEN, 7), r"at least 1 honest worker"),
        (lambda: attacks.ALittleIsEnough().apply(SEVEN, 6), r"at least 2 honest workers, got 1"),
        (lambda: attacks.SignFlip().apply(SEVEN, np.array([True])), r"mask of Byzantine workers needs shape \(7,\)"),
        (lambda: attacks.SignFlip().apply({}, 1), r"no leaves"),
        (lambda: attacks.Mimic(7).apply(SEVEN, 2), r"target must be the index of one of n=7 workers, got 7"),
        (lambda: attacks.Mimic(-1).apply(SEVEN, 2), r"target must be the index of one of n=7 workers, got -1"),
        (lambda: attacks.SignFlip().apply({"a": SEVEN, "b": SEVEN[:3]}, 1), r"\['b'\] has shape \(3, 3\)"),
        (lambda: attacks.Gaussian().apply(SEVEN, 2), r"Gaussian draws at random: call it with key="),
        (lambda: attacks.make_attack("alien"), r"unknown attack 'alien'; the attacks are none, sign_flip"),
        (lambda: attacks.switch(0, [], SEVEN, 2), r"at least one attack"),
        (
            lambda: attacks.OptimalScale(attacks.InnerProduct(), aggregation.Mean(), evaluations=0),
            r"evaluations must be at least 1, got 0",
        ),
        (
            lambda: attacks.OptimalScale(attacks.InnerProduct(), aggregation.Mean(), ratio=0.5),
            r"ratio must be in \(0.5, 1\), got 0.5",
        ),
    ],
)
def test_bad_values(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_types(types_unchecked) -> None:
    with pytest.raises(TypeError, match="number or a mask of bools"):
        attacks.SignFlip().apply(SEVEN, np.arange(7))
    with pytest.raises(TypeError, match="number or a mask of bools"):
        attacks.SignFlip().apply(SEVEN, [False] * 5 + [True] * 2)
    with pytest.raises(TypeError, match=r"only real floating leaves.*dtype int"):
        attacks.SignFlip().apply(np.ones((7, 2), np.int32), 2)
    with pytest.raises(TypeError, match="only an attack with a scale can be searched, got BitFlip"):
        attacks.OptimalScale(attacks.BitFlip(), aggregation.Mean())
    with pytest.raises(ValueError, match="bound must be 'min_max' or 'min_sum', got 'max'"):
        attacks.DistanceAttack("max")
