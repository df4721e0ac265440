"""Task vectors: identities of the algebra, LoRA experts, and what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing import task_vectors as tv
from jaxlab.nn import lora
from jaxlab.nn.decoder import DecoderConfig, init


def _tree(seed: int, dtype: str = "float32") -> dict:
    draws = np.random.default_rng(seed)
    return {
        "layers": {"q_proj": jnp.asarray(draws.normal(size=(3, 4, 5)), dtype), "norm": jnp.ones((3, 5), dtype)},
        "head": [jnp.asarray(draws.normal(size=(5,)), dtype)],
        "steps": jnp.asarray(7 + seed),
    }


BASE, TUNED = _tree(0), [_tree(1), _tree(2)]


def test_nothing_added_is_the_base_and_one_model_whole_is_that_model():
    vectors = tv.task_vectors(BASE, TUNED)
    assert set(vectors) == {"layers/q_proj", "layers/norm", "head/0"}
    jax.tree.map(np.testing.assert_array_equal, tv.apply(BASE, vectors, 0.0), BASE)
    first = tv.apply(BASE, vectors, jnp.array([1.0, 0.0]))
    # a + (b - a) may be off by a rounding of either sum
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=5e-7), first | {"steps": 0}, TUNED[0] | {"steps": 0}
    )
    assert int(first["steps"]) == 7


def test_scales_of_each_path_reach_stacked_blocks():
    vectors = tv.task_vectors(BASE, TUNED, include=("q_proj",))
    scale = jnp.arange(6.0).reshape(2, 3)
    found = tv.apply(BASE, vectors, {"layers/q_proj": scale})["layers"]["q_proj"]
    v = np.asarray(vectors["layers/q_proj"])
    wanted = BASE["layers"]["q_proj"] + np.einsum("kl,kloi->loi", scale, v)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_mean_is_a_sum_over_k_and_the_gradient_is_the_inner_product():
    vectors = tv.task_vectors(BASE, TUNED)
    mean, half = tv.apply(BASE, vectors, 0.8, reduce="mean"), tv.apply(BASE, vectors, 0.4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), mean, half)

    def squares(scales):
        changed = tv.apply(BASE, vectors, scales)
        return sum(jnp.sum(jnp.square(a - b)) / 2 for a, b in zip(*map(_floats, (changed, BASE)), strict=True))

    scales = jnp.array([0.3, -0.2])
    # d/dλ ||Σ λ τ||² / 2 = G λ
    np.testing.assert_allclose(jax.grad(squares)(scales), tv.grams(vectors) @ scales, rtol=1e-5)
    swept = jax.jit(jax.vmap(lambda s: tv.apply(BASE, vectors, s)["head"][0]))(jnp.linspace(0, 1, 3))
    np.testing.assert_allclose(swept[1], tv.apply(BASE, vectors, 0.5)["head"][0], rtol=1e-6)


def _floats(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def test_lengths_and_angles_are_those_of_all_parameters_as_one_vector():
    vectors = tv.task_vectors(BASE, TUNED)
    flat = np.concatenate([np.asarray(v).reshape(2, -1) for v in vectors.values()], 1).astype(np.float64)
    np.testing.assert_allclose(tv.grams(vectors), flat @ flat.T, rtol=1e-5)
    np.testing.assert_allclose(tv.norms(vectors), np.linalg.norm(flat, axis=1), rtol=1e-6)
    cosine = flat[0] @ flat[1] / np.prod(np.linalg.norm(flat, axis=1))
    np.testing.assert_allclose(tv.cosines(vectors), [[1, cosine], [cosine, 1]], atol=1e-6)


def test_bfloat16_parameters_are_subtracted_and_added_in_float32():
    base, tuned = _tree(0, "bfloat16"), _tree(1, "bfloat16")
    vectors = tv.task_vectors(base, [tuned], include=("q_proj",))
    vector = vectors["layers/q_proj"]
    exact = np.asarray(tuned["layers"]["q_proj"], np.float32) - np.asarray(base["layers"]["q_proj"], np.float32)
    assert vector.dtype == jnp.float32
    np.testing.assert_array_equal(vector[0], exact)
    again = tv.apply(base, vectors, 1.0)["layers"]["q_proj"]
    assert again.dtype == jnp.bfloat16
    np.testing.assert_array_equal(again, tuned["layers"]["q_proj"])


def test_vectors_of_several_calls_stack_like_those_of_one():
    both = tv.task_vectors(BASE, TUNED)
    each = [tv.task_vectors(BASE, [tree]) for tree in TUNED]
    jax.tree.map(np.testing.assert_array_equal, tv.stack_vectors(each), both)
    # into another model than the base
    injected = tv.apply(TUNED[0], each[1], 1.0)["head"][0]
    np.testing.assert_allclose(injected, TUNED[0]["head"][0] + TUNED[1]["head"][0] - BASE["head"][0], atol=1e-6)


def test_lora_experts_are_what_merging_them_changes():
    config = DecoderConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2)
    _, params = init(config, jax.random.key(0))
    experts = []
    for i, target in enumerate((("q_proj",), ("q_proj", "up_proj"))):
        expert = lora.init(params, jax.random.key(i), target=target, rank=2, alpha=3.0)
        experts.append(expert.replace(factors=jax.tree.map(lambda a: a + 0.1, expert.factors)))
    vectors = tv.adapter_vectors(params, experts)
    paths = {"model/layers/self_attn/q_proj/weight", "model/layers/mlp/up_proj/weight"}
    assert set(vectors) == paths
    dense = tv.task_vectors(params, [lora.merge(params, expert) for expert in experts], include=lambda p: p in paths)
    for path in paths:
        np.testing.assert_allclose(vectors[path], dense[path], atol=1e-6)
    assert not np.any(vectors["model/layers/mlp/up_proj/weight"][0])


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="at least one model"):
        tv.task_vectors(BASE, [])
    with pytest.raises(ValueError, match=r"tuned\[1\] is not like the base: steps is missing in tuned\[1\]"):
        tv.task_vectors(BASE, [TUNED[0], {k: v for k, v in TUNED[1].items() if k != "steps"}])
    with pytest.raises(ValueError, match=r"extra is missing in the base"):
        tv.task_vectors(BASE, [TUNED[0] | {"extra": jnp.zeros(1)}])
    with pytest.raises(ValueError, match=r"head/0 must be float32\[5\], got float32\[6\]"):
        tv.task_vectors(BASE, [TUNED[0] | {"head": [jnp.zeros(6)]}])
    with pytest.raises(ValueError, match=r"must be float32\[5\], got bfloat16\[5\]"):
        tv.task_vectors(BASE, [TUNED[0] | {"head": [jnp.zeros(5, jnp.bfloat16)]}])
    with pytest.raises(ValueError, match="'v_proj' stands for no parameter; there are head/0"):
        tv.task_vectors(BASE, TUNED, include=("v_proj",))
    with pytest.raises(ValueError, match="leave no floating-point parameter"):
        tv.task_vectors(BASE, TUNED, exclude=("",))
    with pytest.raises(ValueError, match="must be a sequence of patterns or a predicate, got the string 'norm'"):
        tv.task_vectors(BASE, TUNED, exclude="norm")
    vectors = tv.task_vectors(BASE, TUNED)
    with pytest.raises(ValueError, match=r"one for each of 2 vectors.* got \[3\]"):
        tv.apply(BASE, vectors, jnp.ones(3))
    with pytest.raises(ValueError, match="head/0 is in one of them only"):
        tv.apply(BASE, vectors, {p: jnp.ones(2) for p in vectors if p != "head/0"})
    with pytest.raises(ValueError, match="reduce must be 'sum' or 'mean', got 'max'"):
        tv.apply(BASE, vectors, 1.0, reduce="max")
    with pytest.raises(ValueError, match="head/0 is not a parameter here"):
        tv.apply({"layers": BASE["layers"]}, vectors, 1.0)
    with pytest.raises(ValueError, match="as many task vectors"):
        tv.norms(vectors | {"head/0": jnp.zeros((3, 5))})
    with pytest.raises(ValueError, match="vectors differ: head/0"):
        tv.stack_vectors([vectors, {k: v for k, v in vectors.items() if k != "head/0"}])
    slashed = {"a": {"b": jnp.zeros(1)}, "a/b": jnp.zeros(1)}
    with pytest.raises(ValueError, match="same path"):
        tv.task_vectors(slashed, [slashed])
