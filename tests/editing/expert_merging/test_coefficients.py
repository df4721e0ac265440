"""Coefficients: pieces as torch cuts them, limits of the merge, its gradient, and what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.editing.expert_merging.coefficients import (
    Coefficients,
    chunk_sizes,
    distance_to_anchor,
    initial,
    merge,
    tensor_layout,
    values,
)
from jaxlab.editing.task_vectors import apply, task_vectors


def _tree(seed: int, dtype: str = "float32") -> dict:
    draws = np.random.default_rng(seed)
    return {
        "layers": {"up": jnp.asarray(draws.normal(size=(3, 2, 5)), dtype)},
        "embed": jnp.asarray(draws.normal(size=(4, 3)), dtype),
        "steps": jnp.asarray(7),
    }


BASE, EXPERTS = _tree(0), [_tree(1), _tree(2)]
VECTORS = task_vectors(BASE, EXPERTS)
ANCHOR = jnp.array([0.3, 0.4])
CHUNKS = {"layers/up": [0, 4, 1], "embed": 5}


@pytest.mark.parametrize(
    ("size", "pieces", "wanted"),
    [(10, 4, [3, 3, 3, 1]), (9, 6, [2, 2, 2, 2, 1]), (3, 7, [1, 1, 1]), (8, 2, [4, 4]), (5, 1, [5])],
)
def test_pieces_are_those_of_torch(size, pieces, wanted):
    assert chunk_sizes(size, pieces).tolist() == wanted


def test_pieces_equal_torch_for_all_small_numbers():
    torch = pytest.importorskip("torch", reason="compares with torch.chunk")
    for size in range(1, 20):
        for pieces in range(1, 23):
            found = [len(piece) for piece in torch.arange(size).chunk(pieces)]
            assert chunk_sizes(size, pieces).tolist() == found


def test_no_coefficient_is_the_base_and_one_expert_whole_is_that_expert():
    layout = tensor_layout(VECTORS)
    zero = {leaf.path: jnp.zeros((2, len(leaf.pieces))) for leaf in layout.leaves}
    jax.tree.map(np.testing.assert_array_equal, merge(BASE, VECTORS, zero, layout), BASE)
    alone = task_vectors(BASE, EXPERTS[:1])
    one = {leaf.path: jnp.ones((1, len(leaf.pieces))) for leaf in layout.leaves}
    # a + (b - a) may be off by a rounding of either sum
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merge(BASE, alone, one, layout), EXPERTS[0])


def test_constant_coefficients_are_task_arithmetic_however_many_pieces():
    for chunks in (1, 3, CHUNKS):
        layout = tensor_layout(VECTORS, chunks=chunks)
        alpha = {leaf.path: jnp.full((2, int(leaf.slots.sum())), 0.25) for leaf in layout.leaves}
        found = merge(BASE, VECTORS, alpha, layout)
        jax.tree.map(np.testing.assert_array_equal, found, apply(BASE, VECTORS, 0.25))


def test_pieces_reach_their_elements_and_frozen_tensors_keep_the_anchor():
    layout = tensor_layout(VECTORS, chunks=CHUNKS)
    assert (layout.tensors, layout.trained) == (4, 4 + 1 + 4)  # 12 elements in 5 pieces are 4 of 3
    raw = initial(layout, ANCHOR, squash="none")
    draws = np.random.default_rng(3)
    raw = {path: jnp.asarray(draws.normal(size=leaf.shape), jnp.float32) for path, leaf in raw.items()}
    alpha = values(raw, layout, ANCHOR, squash="none")
    found = merge(BASE, VECTORS, alpha, layout)
    a = np.asarray(raw["embed"])
    wanted = np.asarray(BASE["embed"], np.float64)
    for k in range(2):
        wanted = wanted + (np.repeat(a[k], 3) * np.asarray(VECTORS["embed"][k]).ravel()).reshape(4, 3)
    np.testing.assert_allclose(found["embed"], wanted, rtol=1e-5, atol=1e-6)
    up, b, v = np.asarray(BASE["layers"]["up"]), np.asarray(raw["layers/up"]), np.asarray(VECTORS["layers/up"])
    lengths = [3, 3, 3, 1]
    second = up[1] + sum((np.repeat(b[k, :4], lengths) * v[k, 1].ravel()).reshape(2, 5) for k in range(2))
    np.testing.assert_allclose(found["layers"]["up"][1], second, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["layers"]["up"][2], up[2] + np.einsum("k,kij->ij", b[:, 4], v[:, 2]), rtol=1e-5)
    np.testing.assert_allclose(found["layers"]["up"][0], up[0] + np.einsum("k,kij->ij", ANCHOR, v[:, 0]), rtol=1e-5)
    means = Coefficients(alpha, layout).of_tensors()
    np.testing.assert_allclose(means["layers/up"][:, 0], ANCHOR)
    np.testing.assert_allclose(means["layers/up"][:, 1], b[:, :4] @ np.array(lengths) / 10, rtol=1e-5)
    named = Coefficients(alpha, layout).by_name()
    assert list(named) == ["embed", "layers/0/up", "layers/1/up", "layers/2/up"]
    np.testing.assert_allclose(named["layers/1/up"], b[:, :4])


@pytest.mark.parametrize("squash", ["sigmoid", "softplus", "none"])
def test_training_starts_at_the_anchor(squash):
    layout = tensor_layout(VECTORS, chunks=CHUNKS)
    alpha = values(initial(layout, ANCHOR, squash=squash), layout, ANCHOR, squash=squash)
    for one in alpha.values():
        np.testing.assert_allclose(one, np.broadcast_to(ANCHOR[:, None], one.shape), rtol=1e-6)
    assert distance_to_anchor(alpha, layout, ANCHOR) == 0
    moved = {path: one + 0.1 for path, one in alpha.items()}
    np.testing.assert_allclose(distance_to_anchor(moved, layout, ANCHOR), 0.1, rtol=1e-5)
    np.testing.assert_allclose(distance_to_anchor(moved, layout, ANCHOR, kind="release"), 0.2, rtol=1e-5)


def test_the_gradient_is_an_inner_product_and_that_of_differences():
    layout = tensor_layout(VECTORS, chunks=CHUNKS)
    raw = initial(layout, ANCHOR)
    target = _tree(4)

    def loss(raw):
        merged = merge(base, VECTORS, values(raw, layout, ANCHOR), layout)
        gaps = (merged["embed"] - target["embed"], merged["layers"]["up"] - target["layers"]["up"])
        return sum(jnp.square(gap).sum() for gap in gaps)

    with jax.enable_x64(True):
        base = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), BASE | {"steps": jnp.ones(())})
        raw = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), raw)
        found = jax.grad(loss)(raw)
        for path, leaf in raw.items():
            for place in np.ndindex(*leaf.shape):
                step = 1e-6
                ends = [loss(raw | {path: leaf.at[place].add(sign * step)}) for sign in (1, -1)]
                assert float(found[path][place]) == pytest.approx(float(ends[0] - ends[1]) / (2 * step), rel=1e-5)
        # The regulariser pushes no coefficient by more than γ / (number of them).
        push = jax.grad(lambda raw: distance_to_anchor(values(raw, layout, ANCHOR), layout, ANCHOR))(
            jax.tree.map(lambda leaf: leaf + 1, raw)
        )
        assert max(float(jnp.abs(one).max()) for one in push.values()) <= 1 / (2 * layout.trained)


def test_results_have_the_dtype_of_the_base():
    base, experts = _tree(0, "bfloat16"), [_tree(1, "bfloat16"), _tree(2, "bfloat16")]
    vectors = task_vectors(base, experts)
    layout = tensor_layout(vectors, chunks=2)
    alpha = values(initial(layout, ANCHOR), layout, ANCHOR)
    found = merge(base, {path: one.astype(jnp.bfloat16) for path, one in vectors.items()}, alpha, layout)
    assert found["embed"].dtype == jnp.bfloat16
    wanted = np.asarray(base["embed"], np.float32) + np.einsum("k,kij->ij", ANCHOR, vectors["embed"])
    # a bfloat16 has 8 bits; values are below 4
    np.testing.assert_allclose(np.asarray(found["embed"], np.float32), wanted, atol=4 * 2**-8)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (0, "all tensors are frozen"),
        (-1, "between 0 and its 12 elements, got -1"),
        (13, "between 0 and its 12 elements, got 13"),
        ({"embed": 1}, "chunks must have the paths of the vectors; layers/up differs"),
        ({"embed": 1, "layers/up": [1, 2]}, r"must be a number or 3 of them, got \[2\]"),
    ],
)
def test_pieces_that_do_not_fit(chunks, message):
    with pytest.raises(ValueError, match=message):
        tensor_layout(VECTORS, chunks=chunks)


def test_anchors_that_a_squash_cannot_give():
    layout = tensor_layout(VECTORS)
    with pytest.raises(ValueError, match=r"'sigmoid' the anchor must lie strictly in \(0, 1\), got"):
        initial(layout, np.array([1.0, 0.3]))
    with pytest.raises(ValueError, match="'softplus' the anchor must lie strictly"):
        initial(layout, np.array([0.0, 0.3]), squash="softplus")
    with pytest.raises(ValueError, match="squash must be"):
        initial(layout, ANCHOR, squash="tanh")
    with pytest.raises(ValueError, match="one number an expert"):
        initial(layout, 0.3)
    with pytest.raises(ValueError, match="at least one tensor"):
        tensor_layout({})
    with pytest.raises(ValueError, match="at least 1, got 0 and 2"):
        chunk_sizes(0, 2)
