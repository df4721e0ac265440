"""Each way of merging one tensor: closed forms, limits, invariants, parity with mergekit and slow transcriptions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing import merging
from jaxlab.editing.merging import (
    METHODS,
    Dare,
    IsotropicMerging,
    RegMean,
    TaskArithmetic,
    TaskSingularVectors,
    Ties,
    TiesStatistics,
    Wudi,
    WudiClosedForm,
    WudiLowRank,
    input_gram,
    interference,
    make_method,
    weight_average,
)

K, ROWS, COLUMNS = 3, 6, 8
DATA_FREE = [name for name in METHODS if name != "regmean"]


@pytest.fixture(scope="module")
def vectors():
    return np.random.default_rng(0).normal(0, 0.1, (K, ROWS, COLUMNS)).astype(np.float32)


def run(method, vectors, **options):
    return np.asarray(jax.jit(lambda m, v: m.combine(v, **options))(method, vectors))


def key_of(method):
    return jax.random.key(0) if method.needs_key else None


def test_task_arithmetic_and_averages(vectors):
    np.testing.assert_allclose(run(TaskArithmetic(0.3), vectors), 0.3 * vectors.sum(0), rtol=1e-5, atol=1e-7)
    weights = (0.2, -0.5, 1.0)
    expected = 2.0 * np.tensordot(weights, vectors, 1)
    np.testing.assert_allclose(run(TaskArithmetic(2.0, weights), vectors), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(run(weight_average(), vectors), vectors.mean(0), rtol=1e-5, atol=1e-7)
    expected = np.average(vectors, axis=0, weights=(1, 2, 5))
    np.testing.assert_allclose(run(weight_average(weights=(1.0, 2.0, 5.0)), vectors), expected, rtol=1e-5, atol=1e-7)
    assert TaskArithmetic(0.5, weights).coefficients(3) == pytest.approx([0.1, -0.25, 0.5])
    # Weights that cancel are not divided by.
    assert np.isfinite(run(TaskArithmetic(1.0, (1.0, -1.0, 0.0), normalize=True), vectors)).all()


@pytest.mark.parametrize("name", DATA_FREE)
def test_promises_of_all_methods(name, vectors):
    method = make_method(name)
    key = key_of(method)
    eager, jitted = method.combine(jnp.asarray(vectors), key=key), run(method, vectors, key=key)
    assert eager.shape == (ROWS, COLUMNS)
    np.testing.assert_allclose(eager, jitted, rtol=1e-4, atol=1e-5)
    # Numbers are leaves: a method is mapped over, and what it makes is λ times what it makes for λ = 1.
    scales = jnp.array([0.5, 2.0])
    many = jax.vmap(lambda scale: make_method(name, scale=scale).combine(jnp.asarray(vectors), key=key))(scales)
    np.testing.assert_allclose(many[1], 4 * many[0], rtol=1e-4, atol=1e-5)
    # bfloat16 goes in, float32 comes out; vectors and biases are taken too.
    assert method.combine(jnp.asarray(vectors, jnp.bfloat16), key=key).dtype == jnp.float32
    flat = method.combine(jnp.asarray(vectors[:, 0]), key=key)
    assert flat.shape == (COLUMNS,)
    if isinstance(method, merging.MatrixMethod):
        np.testing.assert_allclose(flat, vectors[:, 0].mean(0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "tsv", "wudi", "wudi_closed_form"])
def test_a_single_expert_is_itself(name, vectors):
    options = {"density": 1.0} if name == "ties" else {}
    alone = vectors[:1]
    # 1e-6: rounding of numbers near 0.1; singular values and a pseudo-inverse add tenfold.
    np.testing.assert_allclose(run(make_method(name, scale=1.0, **options), alone), alone[0], atol=2e-6)


def test_ties_by_hand():
    hand = jnp.array([[1.0, -2.0, 3.0], [-0.5, -1.0, 1.0]])
    for election in ("release", "mergekit"):
        got = Ties(density=1.0, scope="tensor", election=election).combine(hand)
        np.testing.assert_array_equal(got, [1.0, -1.5, 2.0])
    # The sum of what agrees, without the division.
    np.testing.assert_array_equal(Ties(density=1.0, normalize=False).combine(hand), [1.0, -3.0, 4.0])
    # Two of three are kept; the first number of the second vector is trimmed before it votes.
    np.testing.assert_array_equal(Ties(density=0.7).combine(hand), [0.0, -1.5, 2.0])
    # Weights vote: the second vector decides the first number.
    got = Ties(density=1.0, weights=(1.0, 3.0)).combine(hand)
    np.testing.assert_allclose(got, [-0.5, (-2 - 3) / 4, (3 + 3) / 4])


def test_ties_where_the_sum_is_zero():
    even = jnp.array([[1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]])
    # Two numbers elect minus, so the first does; in mergekit it is plus.
    np.testing.assert_array_equal(Ties(density=1.0, election="release").combine(even), [-1.0, -2.0, -3.0])
    np.testing.assert_array_equal(Ties(density=1.0, election="mergekit").combine(even), [1.0, -2.0, -3.0])
    nobody = jnp.array([[1.0, 2.0, -3.0], [-1.0, 2.0, -3.0]])
    np.testing.assert_array_equal(Ties(density=1.0, election="release").combine(nobody), [0.0, 2.0, -3.0])


def test_ties_of_scope_global_trims_all_tensors_together():
    random = np.random.default_rng(1)
    tree = {"a": random.normal(0, 1, (2, 30)), "b": random.normal(0, 5, (2, 4, 10))}
    tree = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in tree.items()}
    method = Ties(density=0.2)
    statistics = method.statistics(tree)
    together = np.concatenate([np.abs(leaf).reshape(2, -1) for leaf in tree.values()], axis=1)
    np.testing.assert_array_equal(statistics.thresholds, np.sort(together)[:, -14])
    kept = {name: np.where(np.abs(leaf) >= np.sort(together)[:, -14].reshape(2, *[1] * (leaf.ndim - 1)), leaf, 0)
            for name, leaf in tree.items()}  # fmt: skip
    signs = {name: np.sign(leaf.sum(0)) for name, leaf in kept.items()}
    majority = np.sign(sum(sign.sum() for sign in signs.values()))
    assert int(statistics.majority) == majority
    merged = merging.combine(tree, method)
    for name in tree:
        sign = np.where(signs[name] == 0, majority, signs[name])
        agree = (kept[name] * sign > 0) & (kept[name] != 0)
        expected = (kept[name] * agree).sum(0) / np.maximum(agree.sum(0), 1)
        np.testing.assert_allclose(merged[name], expected, rtol=1e-6)
    assert Ties(scope="tensor").statistics(tree) is None


def test_densities_of_each_expert_and_none_at_all(vectors):
    method = Ties(density=(0.25, 1.0, 0.0), scope="tensor")
    thresholds = np.asarray(method.measure([jnp.asarray(vectors)]).thresholds)
    assert thresholds[0] == np.sort(np.abs(vectors[0]), axis=None)[-12]
    assert (np.abs(vectors[1]) >= thresholds[1]).all()
    assert thresholds[2] == np.inf
    # A density that is traced keeps as many as one that is known.
    traced = jax.jit(lambda density: Ties(density=density).combine(jnp.asarray(vectors)))(0.25)
    np.testing.assert_allclose(traced, Ties(density=0.25).combine(jnp.asarray(vectors)), rtol=1e-6)


def test_dare_keeps_the_expectation(vectors):
    method = Dare(drop=0.3, then=TaskArithmetic(1.0))
    alone = jnp.ones((1, 400, 500))
    made = np.asarray(method.combine(alone, key=jax.random.key(3)))[None]
    kept = made != 0
    assert set(np.unique(made).round(4)) == {0.0, np.float32(1 / 0.7).round(4)}
    # Five standard errors of a mean of 200,000 draws.
    assert abs(kept.mean() - 0.7) < 5 * np.sqrt(0.21 / kept.size)
    assert abs(made.mean() - 1) < 5 * np.sqrt(0.3 / 0.7 / kept.size)
    # Draws differ between experts, and between neighbours that share 32 random bits.
    pair = np.asarray(method.draw(jax.random.key(3), (2, 200_000), jnp.float32(0.3 * 65536)))
    assert abs(np.corrcoef(pair[0], pair[1])[0, 1]) < 5 / np.sqrt(200_000)
    assert abs(np.corrcoef(pair[0, ::2], pair[0, 1::2])[0, 1]) < 5 / np.sqrt(100_000)
    # Nothing is dropped: what comes after is alone.
    np.testing.assert_allclose(
        Dare(drop=0.0, then=TaskArithmetic(0.3)).combine(jnp.asarray(vectors), key=jax.random.key(0)),
        TaskArithmetic(0.3).combine(jnp.asarray(vectors)),
        rtol=1e-6,
    )
    for k, drop in enumerate(drops := (0.0, 0.5, 0.9)):
        alone = TaskArithmetic(1.0, tuple(float(k == j) for j in range(K)))
        made = Dare(drops, then=alone, rescale="none").combine(jnp.ones((K, 100, 100)), key=jax.random.key(1))
        assert abs(float(made.mean()) - (1 - drop)) <= 5 * np.sqrt(drop * (1 - drop) / 10_000)


def test_singular_vectors_and_isotropic(vectors):
    values = np.linalg.svd(run(IsotropicMerging(), vectors), compute_uv=False)
    np.testing.assert_allclose(values, np.linalg.svd(vectors.sum(0), compute_uv=False).mean(), rtol=1e-5)
    # TSV: U and V have orthonormal columns, so the singular values are those that were kept.
    values = np.linalg.svd(run(TaskSingularVectors(), vectors), compute_uv=False)
    kept = np.sort(np.linalg.svd(vectors, compute_uv=False)[:, : ROWS // K].ravel())[::-1]
    np.testing.assert_allclose(values, kept, rtol=1e-5)
    # More experts than the matrix has rows: one triplet each.
    many = np.random.default_rng(2).normal(size=(9, 4, 5)).astype(np.float32)
    assert np.isfinite(run(TaskSingularVectors(), many)).all()
    # Neither depends on the orientation.
    for method in (IsotropicMerging(), TaskSingularVectors()):
        np.testing.assert_allclose(run(method, vectors.swapaxes(1, 2)).T, run(method, vectors), atol=1e-5)


@pytest.mark.parametrize("name", DATA_FREE)
def test_nothing_and_what_is_no_number(name, vectors):
    options = {"steps": 3} if name.startswith("wudi") and name != "wudi_closed_form" else {}
    options |= {"drop": 0.0} if name.startswith("dare") else {}
    method = make_method(name, **options)
    made = jax.jit(lambda v: method.combine(v, key=key_of(method)))
    np.testing.assert_array_equal(made(np.zeros_like(vectors)), 0)
    assert made(np.zeros((K, 0, 4), np.float32)).shape == (0, 4)
    broken = vectors.copy()
    broken[1, 2, 3] = np.nan
    assert np.isnan(made(broken)[2, 3])
    if name in ("wudi", "task_arithmetic", "ties"):  # an expert that is the base has a gradient
        some = vectors.copy()
        some[1] = 0
        assert np.isfinite(jax.grad(lambda v: jnp.square(made(v)).sum())(some)).all()


def low_rank(random, rows, columns, rank):
    return (random.normal(size=(rows, rank)) @ random.normal(size=(rank, columns))).astype(np.float32)


def test_singular_vectors_of_nothing_do_not_count():
    """Of singular values that are zero the vectors are arbitrary: what is made does not depend on them."""
    random = np.random.default_rng(3)
    tsv, iso = TaskSingularVectors(), IsotropicMerging()
    one = low_rank(random, 9, 7, 2)
    # An expert that is the base, and one that is given twice, add nothing of their own. 2e-5: float32 near 4.
    kept = low_rank(random, 9, 7, 3)
    np.testing.assert_allclose(run(tsv, np.stack([kept, 0 * kept])), kept, atol=2e-5)
    np.testing.assert_allclose(run(tsv, np.stack([one, one])), one, atol=2e-5)
    # The largest triplet of each is kept, and those of rank one are all that there is: the result lies in their span.
    pair = np.stack([low_rank(random, 9, 7, 1), low_rank(random, 9, 7, 1)])
    merged = run(tsv, pair)
    assert np.linalg.matrix_rank(merged, tol=1e-4) == 2
    rows = np.linalg.svd(pair.reshape(-1, 7), full_matrices=False)[2][:2]
    np.testing.assert_allclose(merged @ rows.T @ rows, merged, atol=2e-5)
    # Iso-C of rank two: two equal values with the sum of before, and nothing else.
    values = np.linalg.svd(run(iso, one[None]), compute_uv=False)
    mean = np.linalg.svd(one, compute_uv=False)[:2].mean()
    np.testing.assert_allclose(values, [mean, mean, 0, 0, 0, 0, 0], atol=2e-5)
    np.testing.assert_array_equal(run(iso, 0 * pair), 0)
    # What is not a number does not vanish with them.
    pair[0, 0, 0] = np.nan
    assert np.isnan(run(tsv, pair)).any()
    assert np.isnan(run(iso, pair)).any()


def slow_wudi(vectors, targets, directions, start, learning_rate, steps):
    """The loss and Adam as they stand in the papers, in float64."""
    merged, first, second = start.copy(), np.zeros_like(start), np.zeros_like(start)
    losses = []
    for step in range(1, steps + 1):
        gradient, loss = np.zeros_like(start), 0.0
        for vector, target, direction in zip(vectors, targets, directions, strict=True):
            product = (merged - target) @ direction.T
            loss += (product**2).sum() / (vector**2).sum()
            gradient += 2 * product @ direction / (vector**2).sum()
        losses.append(loss)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        moment, spread = first / (1 - 0.9**step), second / (1 - 0.999**step)
        merged = merged - learning_rate * moment / (np.sqrt(spread) + 1e-8)
    return merged, losses


@pytest.mark.parametrize("shape", [(3, 6, 8), (2, 2, 9)])  # the Gram matrix of all rows, and the rows themselves
def test_wudi_is_adam_on_the_disturbance(shape):
    vectors = np.random.default_rng(3).normal(0, 0.1, shape)
    start = vectors.sum(0)
    expected, losses = slow_wudi(vectors, vectors, vectors, start, 1e-4, 300)
    assert np.all(np.diff(losses) < 0)
    got = run(Wudi(learning_rate=1e-4), vectors.astype(np.float32))
    # The way is 0.03 long; rounding is 1e-7 of numbers below 1.
    np.testing.assert_allclose(got, expected, atol=3e-6)
    np.testing.assert_allclose(interference(jnp.asarray(start), jnp.asarray(vectors)), losses[0], rtol=1e-5)
    turned = run(Wudi(learning_rate=1e-4, orientation="in_out"), vectors.astype(np.float32).swapaxes(1, 2))
    np.testing.assert_allclose(turned.T, got, atol=1e-6)


def test_wudi_at_its_own_rate_descends_all_the_way(vectors):
    steps = (0, 1, 10, 100, 200, 300)
    losses = [float(interference(jnp.asarray(run(Wudi(steps=n), vectors)), jnp.asarray(vectors))) for n in steps]
    assert np.all(np.diff(losses) < 0)
    best = float(interference(jnp.asarray(run(WudiClosedForm(), vectors)), jnp.asarray(vectors)))
    assert best < losses[-1]


def test_wudi_closed_form(vectors):
    got = run(WudiClosedForm(), vectors)
    wide = vectors.astype(np.float64)
    grams = np.stack([vector.T @ vector / (vector**2).sum() for vector in wide])
    expected = (wide @ grams).sum(0) @ np.linalg.pinv(grams.sum(0))
    np.testing.assert_allclose(got, expected, atol=2e-6)
    gradient = 2 * ((got - wide) @ grams).sum(0)
    assert np.abs(gradient).max() < 1e-5 * np.abs(wide @ grams).max()
    turned = run(WudiClosedForm(orientation="in_out"), vectors.swapaxes(1, 2))
    np.testing.assert_allclose(turned.T, got, atol=2e-6)
    # Rows of different experts at right angles: nothing is disturbed, and the sum is exact.
    apart = np.zeros((2, 3, 8), np.float32)
    apart[0, :, :4], apart[1, :, 4:] = vectors[0, :3, :4], vectors[1, :3, 4:]
    np.testing.assert_allclose(run(WudiClosedForm(), apart), apart.sum(0), atol=1e-6)
    assert float(interference(jnp.asarray(apart.sum(0)), jnp.asarray(apart))) < 1e-12
    # An expert that did not move has no say.
    still = np.concatenate([vectors, np.zeros_like(vectors[:1])])
    np.testing.assert_allclose(run(WudiClosedForm(), still), got, atol=2e-6)


def test_wudi_low_rank():
    vectors = np.random.default_rng(4).normal(0, 0.1, (2, 6, 8))
    mean, targets, directions = vectors.mean(0), [], []
    for vector in vectors:
        u, s, vt = np.linalg.svd(vector - mean, full_matrices=False)
        targets.append(mean + (u[:, :3] * s[:3]) @ vt[:3])
        _, s, vt = np.linalg.svd(vector, full_matrices=False)
        directions.append(s[:3, None] * vt[:3])
    expected, losses = slow_wudi(vectors, targets, directions, vectors.sum(0), 1e-4, 100)
    assert losses[-1] < losses[0]
    got = run(WudiLowRank(learning_rate=1e-4, steps=100), vectors.astype(np.float32))
    np.testing.assert_allclose(got, expected, atol=3e-6)


def test_regmean_is_least_squares(vectors):
    random = np.random.default_rng(5)
    inputs = random.normal(size=(K, 40, COLUMNS)).astype(np.float32)
    grams = jnp.stack([input_gram(jnp.asarray(of_expert)) for of_expert in inputs])
    got = run(RegMean(diagonal_pull=1.0), vectors, statistics=grams)
    outputs = [x @ w.T for x, w in zip(inputs, vectors, strict=True)]
    expected, *_ = np.linalg.lstsq(np.concatenate(inputs), np.concatenate(outputs), rcond=None)
    np.testing.assert_allclose(got, expected.T, atol=2e-6)
    turned = RegMean(diagonal_pull=1.0, orientation="in_out")
    np.testing.assert_allclose(run(turned, vectors.swapaxes(1, 2), statistics=grams).T, got, atol=2e-6)
    # With nothing off the diagonal every input is weighed by itself; equal inputs give the mean.
    diagonal = np.stack([np.diag(gram) for gram in grams])
    alone = run(RegMean(diagonal_pull=0.0), vectors, statistics=grams)
    np.testing.assert_allclose(alone, (vectors * diagonal[:, None]).sum(0) / diagonal.sum(0), rtol=1e-4, atol=1e-6)
    same = jnp.stack([grams[0]] * K)
    np.testing.assert_allclose(run(RegMean(), vectors, statistics=same), vectors.mean(0), atol=2e-6)


@pytest.fixture(scope="module")
def mergekit():
    pytest.importorskip("torch", reason="needs the peers extra: torch")
    return pytest.importorskip("mergekit.merge_methods", reason="needs mergekit (pip install --no-deps)")


def with_mergekit(mergekit, method, vectors, **parameters):
    import torch

    base = {"w": torch.zeros(vectors.shape[1:])}
    models = {"base": base} | {str(k): {"w": torch.from_numpy(vector.copy())} for k, vector in enumerate(vectors)}
    for name in ("weight", "density"):
        if isinstance(parameters.get(name), tuple):
            parameters[name] = {str(k): value for k, value in enumerate(parameters[name])}
    if method == "linear":
        models.pop("base")
        return mergekit.merge_state_dicts(models, method, parameters=parameters)["w"].numpy()
    return mergekit.merge_state_dicts(models, method, base="base", parameters=parameters)["w"].numpy()


PEERS = [
    ("task_arithmetic", {"weight": 0.3}, TaskArithmetic(1.0, 0.3)),
    ("task_arithmetic", {"weight": (0.5, -0.2, 1.0), "lambda": 0.7}, TaskArithmetic(0.7, (0.5, -0.2, 1.0))),
    ("task_arithmetic", {"weight": (0.5, 0.2, 1.0), "normalize": True},
     TaskArithmetic(1.0, (0.5, 0.2, 1.0), normalize=True)),
    ("linear", {"weight": (1.0, 2.0, 5.0)}, weight_average(weights=(1.0, 2.0, 5.0))),
    ("ties", {"weight": 1.0, "density": 0.2}, Ties(scope="tensor", election="mergekit")),
    ("ties", {"weight": (0.5, 0.3, 1.0), "density": (0.2, 0.55, 1.0), "lambda": 0.7},
     Ties(0.7, (0.5, 0.3, 1.0), (0.2, 0.55, 1.0), scope="tensor", election="mergekit")),
    ("ties", {"weight": (0.5, -0.3, 1.0), "density": 0.4, "normalize": False},
     Ties(1.0, (0.5, -0.3, 1.0), 0.4, normalize=False, scope="tensor", election="mergekit")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parameters", "ours"), PEERS, ids=[f"{n}{i}" for i, (n, *_) in enumerate(PEERS)])
def test_parity_with_mergekit(mergekit, name, parameters, ours, vectors):
    expected = with_mergekit(mergekit, name, vectors, **dict(parameters))
    np.testing.assert_allclose(run(ours, vectors), expected, atol=1e-6)


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize("rescale", [True, False])
def test_parity_of_dare_with_mergekit_where_the_mask_is_shared(mergekit, name, rescale, vectors, monkeypatch):
    import torch

    mask = np.random.default_rng(6).uniform(size=vectors.shape) < 0.7
    masks = iter(torch.from_numpy(mask.astype(np.float32)))
    monkeypatch.setattr(torch, "bernoulli", lambda probabilities: next(masks).reshape(probabilities.shape))
    expected = with_mergekit(mergekit, name, vectors, weight=(0.5, 0.3, 1.0), density=0.7, rescale=rescale)
    option = "l1" if rescale else "none"
    ours = make_method(name.replace("_linear", ""), rescale=option, weights=(0.5, 0.3, 1.0), scale=1.0, normalize=False)
    thinned = ours.thin(jnp.asarray(vectors), jnp.asarray(mask), np.float32(0.3))
    np.testing.assert_allclose(ours.then.combine(thinned), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ties(density=1.5), r"density must be in \[0, 1\], got 1.5"),
        (lambda: Ties(density=(0.5, -0.1)), r"density must be in \[0, 1\], got -0.1"),
        (lambda: Ties(scope="layer"), "scope must be 'global' or 'tensor', got 'layer'"),
        (lambda: Ties(election="majority"), "election must be 'release' or 'mergekit', got 'majority'"),
        (lambda: Dare(drop=1.0), "drop must be below 1, got 1.0"),
        (lambda: Dare(rescale="l2"), "rescale must be 'probability', 'l1' or 'none', got 'l2'"),
        (lambda: Dare().combine(jnp.ones((2, 3))), "give a key"),
        (lambda: TaskArithmetic(float("nan")), "scale must be finite, got nan"),
        (lambda: TaskArithmetic("0.3"), "scale must be a number, got '0.3'"),
        (lambda: TaskArithmetic(1.0, (1.0, 2.0)).combine(jnp.ones((3, 4))), "one number or 3, one a model"),
        (lambda: Wudi(steps=-1), "steps must be finite and at least 0, got -1"),
        (lambda: Wudi(orientation="flax"), "orientation must be 'out_in' or 'in_out', got 'flax'"),
        (lambda: WudiClosedForm(tolerance=2.0), r"tolerance must be in \[0, 1\], got 2"),
        (lambda: RegMean().combine(jnp.ones((2, 3, 4))), r"Gram matrices \[2, 4, 4\] of the inputs, got none"),
        (lambda: RegMean(diagonal_pull=2.0), r"diagonal_pull must be in \[0, 1\], got 2"),
        (lambda: make_method("slerp"), "unknown method 'slerp'; the methods are task_arithmetic"),
        (lambda: make_method("tsv", density=0.2), "tsv has no option 'density'; it has scale"),
        (lambda: make_method("dare-ties", steps=1), "dare-ties has no option 'steps'; it has drop, rescale, scale"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_statistics_are_taken_as_given(vectors):
    low = TiesStatistics(jnp.zeros(K), 1)
    got = Ties(density=0.1, election="mergekit").combine(jnp.asarray(vectors), statistics=low)
    np.testing.assert_allclose(got, run(Ties(density=1.0, election="mergekit"), vectors), rtol=1e-6)
