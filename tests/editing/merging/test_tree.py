"""Merging trees: stacked blocks, what is excluded, keys, and the decoders' own layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing.merging import (
    DEFAULT_EXCLUDE,
    Dare,
    RegMean,
    TaskArithmetic,
    TaskSingularVectors,
    Ties,
    WudiClosedForm,
    WudiLowRank,
    combine,
    merge,
)
from jaxlab.editing.task_vectors import task_vectors
from jaxlab.nn import DecoderConfig, decoder

CONFIG = DecoderConfig(vocab_size=20, hidden_size=8, intermediate_size=12, num_layers=3, num_heads=2)


@pytest.fixture(scope="module")
def models():
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: decoder.init(CONFIG, key)[1], jax.random.key(0))
    return [jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), "float32"), shapes) for _ in "123"]


def test_what_is_merged_and_what_stays(models):
    base, *experts = models
    vectors = task_vectors(base, experts, exclude=DEFAULT_EXCLUDE)
    assert {path.split("/")[-2] for path in vectors} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    merged = jax.jit(lambda base, vectors: merge(base, vectors, TaskArithmetic(0.5)))(base, vectors)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 2, *experts)
    for part, of_merged in merged["model"]["layers"]["mlp"].items():
        np.testing.assert_allclose(of_merged["weight"], mean["model"]["layers"]["mlp"][part]["weight"], atol=1e-6)
    np.testing.assert_array_equal(merged["model"]["embed_tokens"]["weight"], base["model"]["embed_tokens"]["weight"])


def test_stacked_blocks_are_merged_one_by_one(models):
    base, *experts = models
    vectors = task_vectors(base, experts, include=(r"mlp/up_proj",))
    (path,) = vectors
    for method in (WudiClosedForm(), Ties(scope="tensor", density=0.3)):
        got = jax.jit(lambda v, m=method: combine(v, m, stacked=("model/layers",)))(vectors)[path]
        one = jax.jit(lambda v, m=method: m.combine(v))
        for block in range(CONFIG.num_layers):
            np.testing.assert_allclose(got[block], one(vectors[path][:, block]), atol=1e-5)
    # Without it TIES would trim all blocks by one threshold, and WUDI take them for no matrices.
    np.testing.assert_allclose(combine(vectors, WudiClosedForm())[path], vectors[path].mean(0), rtol=1e-6)
    assert not np.allclose(combine(vectors, method)[path], got)


def test_draws_differ_between_leaves_and_blocks():
    vectors = {name: jnp.ones((1, 4, 50)) for name in "ab"}
    got = combine(vectors, Dare(0.5), key=jax.random.key(0), stacked=("a",))
    rows = np.concatenate([got["a"], got["b"]]) != 0
    assert len(np.unique(rows, axis=0)) == len(rows)
    again = combine(vectors, Dare(0.5), key=jax.random.key(0), stacked=("a",))
    np.testing.assert_array_equal(got["a"], again["a"])


def test_gram_matrices_by_path():
    random = np.random.default_rng(0)
    vectors = {
        "layers/w": jnp.asarray(random.normal(size=(2, 3, 4, 5)), jnp.float32),
        "layers/b": jnp.asarray(random.normal(size=(2, 3, 4)), jnp.float32),
    }
    x = random.normal(size=(2, 3, 30, 5))
    grams = {"layers/w": jnp.asarray(np.einsum("kbni,kbnj->kbij", x, x), jnp.float32)}
    got = combine(vectors, RegMean(), stacked=("layers",), grams=grams)
    for block in range(3):
        alone = RegMean().combine(vectors["layers/w"][:, block], statistics=grams["layers/w"][:, block])
        np.testing.assert_allclose(got["layers/w"][block], alone, atol=1e-5)
    np.testing.assert_allclose(got["layers/b"], vectors["layers/b"].mean(0), rtol=1e-6)
    with pytest.raises(ValueError, match=r"Gram matrices .* got none"):
        combine(vectors, RegMean(), stacked=("layers",))


def test_gradients_reach_the_coefficients(models):
    base, *experts = models
    vectors = task_vectors(base, experts, include=(r"mlp/up_proj",))

    def loss(weights):
        merged = merge(base, vectors, TaskArithmetic(1.0, weights))
        return jnp.square(merged["model"]["layers"]["mlp"]["up_proj"]["weight"]).sum()

    weights = jnp.array([0.3, -0.2])
    for k, slope in enumerate(jax.grad(loss)(weights)):
        step = jnp.zeros(2).at[k].set(0.05)
        # The loss is quadratic in each weight: central differences are exact but for rounding.
        np.testing.assert_allclose(slope, (loss(weights + step) - loss(weights - step)) / 0.1, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": {}}, "task vectors of at least one parameter, got none"),
        ({"method": Dare()}, "Dare draws: give a key"),
        ({"key": jax.random.key(0)}, "TaskArithmetic draws nothing"),
        ({"grams": {}}, "TaskArithmetic takes no Gram matrices"),
        ({"stacked": "w"}, "stacked must be a sequence of patterns"),
        ({"stacked": ("w",), "vectors": {"w": jnp.ones(2)}}, r"w of shape \[\] has no leading axis of blocks"),
    ],
)
def test_bad_input(change, message):
    given = {"vectors": {"w": jnp.ones((2, 3))}, "method": TaskArithmetic(), **change}
    with pytest.raises(ValueError, match=message):
        combine(given.pop("vectors"), given.pop("method"), **given)


@pytest.mark.parametrize("method", [TaskSingularVectors(), WudiLowRank(steps=3)])
def test_decompositions_of_several_tensors_in_one_program_follow_each_other(method):
    """At once they wait for each other's threads for ever, on two cores with matrices of this size."""
    keys = jax.random.split(jax.random.key(0), 3)
    vectors = {f"layers/{i}": jax.random.normal(key, (2, 3, 96, 160)) for i, key in enumerate(keys)}
    together = jax.jit(lambda v: combine(v, method, stacked=("layers",)))(vectors)
    for path, vector in vectors.items():
        alone = combine({path: vector}, method, stacked=("layers",))[path]
        np.testing.assert_allclose(together[path], alone, atol=2e-5)  # of numbers of order one, in float32
