"""Three ways to leave blocks out, and all agree with the network's own; stored values survive a kill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.compress import (
    EvaluationCache,
    all_masks,
    decoder_stack,
    evaluate_masks,
    fingerprint,
    gated_utility,
    keep_finite,
    loss_increase,
    make_utility,
    prune_config,
    prune_stacked,
    stack_trees,
    token_batch,
)
from jaxlab.compress.masked_losses import gather_losses, kept_blocks, prefix_program
from jaxlab.nn import bert, decoder, next_token_loss, vit
from jaxlab.nn.bert import BertConfig
from jaxlab.nn.vit import ViTConfig

MASKS = all_masks(5)


@pytest.fixture(scope="module")
def expected(tiny):
    """By the decoder's own mask."""

    def loss(mask):
        logits = tiny.apply_fn(tiny.params, tiny.batch.tokens, block_mask=mask)
        return next_token_loss(logits, tiny.batch.tokens)

    return np.asarray(jax.jit(jax.vmap(loss))(MASKS.astype(np.float32)))


@pytest.mark.parametrize("mode", ["prefix", "gather", "gate"])
def test_forms_agree_with_the_decoders_own_mask(tiny, expected, mode):
    utility = make_utility(decoder_stack(tiny.config), tiny.params, tiny.batch, mode=mode)
    np.testing.assert_allclose(utility.losses(MASKS), expected, atol=1e-5)
    assert utility.full_loss == pytest.approx(float(expected[-1]), abs=1e-5)
    np.testing.assert_allclose(utility(MASKS), np.exp(expected[-1] - expected), rtol=1e-5)
    # In any order, with repeats, and one alone.
    rows = np.array([3, 31, 3, 0, 17])
    np.testing.assert_allclose(utility.losses(MASKS[rows]), expected[rows], atol=1e-5)
    np.testing.assert_allclose(utility.losses(MASKS[:1]), expected[:1], atol=1e-5)


@pytest.mark.parametrize("mode", ["prefix", "gather", "gate"])
def test_over_eight_devices(tiny, expected, mode):
    if jax.device_count() < 8:
        pytest.skip("needs 8 virtual devices")
    mesh = jax.make_mesh((8,), ("masks",), axis_types=(jax.sharding.AxisType.Auto,))
    utility = make_utility(decoder_stack(tiny.config), tiny.params, tiny.batch, mode=mode, mesh=mesh)
    np.testing.assert_allclose(utility.losses(MASKS), expected, atol=1e-5)
    np.testing.assert_allclose(utility.losses(MASKS[5:8]), expected[5:8], atol=1e-5)


def test_vectorised_over_masks(tiny, expected):
    for mode in ("gather", "gate"):
        utility = make_utility(decoder_stack(tiny.config), tiny.params, tiny.batch, mode=mode, vectorize=3)
        np.testing.assert_allclose(utility.losses(MASKS), expected, atol=1e-5)


def test_a_left_out_block_is_a_zeroed_and_a_deleted_one(tiny, expected):
    removed = [1, 3]
    row = int(np.flatnonzero((MASKS == [True, False, True, False, True]).all(1))[0])
    model = tiny.params["model"]
    keep = jnp.array([1.0, 0.0, 1.0, 0.0, 1.0])
    zeroed = jax.tree.map(lambda leaf: leaf * keep.reshape(-1, *[1] * (leaf.ndim - 1)), model["layers"])
    logits = tiny.apply_fn({**tiny.params, "model": {**model, "layers": zeroed}}, tiny.batch.tokens)
    assert next_token_loss(logits, tiny.batch.tokens) == pytest.approx(float(expected[row]), abs=1e-5)
    smaller = prune_config(tiny.config, removed)
    deleted = {**tiny.params, "model": {**model, "layers": prune_stacked(model["layers"], removed)}}
    logits = decoder.make_apply(smaller)(deleted, tiny.batch.tokens)
    assert next_token_loss(logits, tiny.batch.tokens) == pytest.approx(float(expected[row]), abs=1e-5)


def test_a_block_that_explodes_can_be_left_out(tiny):
    params = jax.tree.map(jnp.asarray, tiny.params)
    weight = params["model"]["layers"]["mlp"]["down_proj"]["weight"]
    params["model"]["layers"]["mlp"]["down_proj"]["weight"] = weight.at[2].set(jnp.inf)
    with pytest.raises(ValueError, match="the loss of the whole network must be finite; got nan"):
        make_utility(decoder_stack(tiny.config), params, tiny.batch)
    losses = {}
    mask = np.array([[True, True, False, True, True]])
    for mode, work in (("gather", kept_blocks(mask)),):
        losses[mode] = gather_losses(decoder_stack(tiny.config), params, tiny.batch, work)
    reference = tiny.utility.losses(mask)
    np.testing.assert_allclose(losses["gather"], reference, atol=1e-5)


def test_windows_of_unequal_length_count_their_tokens(tiny):
    batch = token_batch(np.arange(40) % 48, window=16)  # 16, 16 and 8 tokens
    assert batch.counts.sum() == 15 + 15 + 7
    utility = make_utility(decoder_stack(tiny.config), tiny.params, batch)
    losses = [
        float(next_token_loss(tiny.apply_fn(tiny.params, row[None, :size]), row[None, :size])) * (size - 1)
        for row, size in zip(batch.tokens, (16, 16, 8), strict=True)
    ]
    assert utility.full_loss == pytest.approx(sum(losses) / 37, rel=1e-5)


def test_windows_of_a_text():
    short = token_batch(np.arange(5), window=128)
    assert short.tokens.shape == (1, 5)
    spread = token_batch(np.arange(100), window=10, limit=3)
    np.testing.assert_array_equal(spread.tokens[:, 0], [0, 30, 60])
    drawn = token_batch(np.arange(100), window=10, limit=4, key=jax.random.key(0))
    assert len(np.unique(drawn.tokens[:, 0])) == 4
    with pytest.raises(ValueError, match="at least two tokens"):
        token_batch(np.arange(1))
    with pytest.raises(ValueError, match="at least one window is needed; got 0"):
        token_batch(np.arange(100), limit=0)


def test_beginnings_are_shared():
    masks = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 1], [0, 1, 1, 1]], bool)
    program = prefix_program(masks)
    # 4 blocks; nothing new; block 3 on the state after two; three blocks.
    assert int(program.length[0]) == 4 + 1 + 1 + 3
    assert program.block.shape == (1, 16)
    np.testing.assert_array_equal(program.block[0, :9], [0, 1, 2, 3, -1, 3, 1, 2, 3])
    np.testing.assert_array_equal(program.depth[0, :9], [0, 1, 2, 3, 3, 2, 0, 1, 2])
    np.testing.assert_array_equal(program.mask[0, :9], [-1, -1, -1, 0, 1, 2, -1, -1, 3])


def test_bert_and_vit_by_their_own_masks():
    config = BertConfig(
        vocab_size=30,
        hidden_size=8,
        intermediate_size=8,
        num_layers=3,
        num_heads=2,
        max_position_embeddings=8,
        num_labels=3,
        initializer_range=0.5,
    )
    apply_fn, params = bert.init(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 30, (4, 6))
    labels = np.array([0, 1, 2, 0])

    def loss_fn(params, batch, mask):
        log_likelihood = jax.nn.log_softmax(apply_fn(params, batch[0], block_mask=mask).logits)
        return -jnp.mean(jnp.take_along_axis(log_likelihood, batch[1][:, None], axis=1))

    utility = gated_utility(loss_fn, params, (tokens, labels), num_players=3)
    values = np.asarray(utility(all_masks(3)))
    assert values[-1] == pytest.approx(1.0, abs=1e-6)
    whole = float(loss_fn(params, (tokens, labels), jnp.ones(3)))
    second = float(loss_fn(params, (tokens, labels), jnp.array([0.0, 1.0, 0.0])))
    assert values[2] == pytest.approx(np.exp(whole - second), rel=1e-5)
    assert len(np.unique(values.round(5))) == 8
    np.testing.assert_allclose(jax.jit(utility)(all_masks(3)), values, rtol=1e-6)

    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_labels=2
    )
    apply_vit, params = vit.init(config, jax.random.key(0))
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    loss_vit = lambda params, images, mask: jnp.sum(apply_vit(params, images, block_mask=mask).logits ** 2)  # noqa: E731
    values = evaluate_masks(gated_utility(loss_vit, params, images, num_players=2), all_masks(2))
    assert values[3] == pytest.approx(1.0, abs=1e-6)
    assert values.shape == (4,)


class Counting:
    """A game of the mask's size that counts what it is asked for, and may die."""

    def __init__(self, die_after=None):
        self.asked, self.die_after = [], die_after

    def __call__(self, masks):
        if self.die_after is not None and len(self.asked) >= self.die_after:
            raise KeyboardInterrupt
        self.asked += [row.tobytes() for row in masks]
        return masks.sum(1) / 7


def test_values_survive_a_kill(tmp_path):
    path = tmp_path / "deep" / "game.masks"
    masks = all_masks(5)[np.random.default_rng(0).permutation(32)]
    first = Counting(die_after=12)
    with pytest.raises(KeyboardInterrupt):
        evaluate_masks(first, masks, batch_size=4, cache=EvaluationCache(path, num_players=5, fingerprint="a"))
    with path.open("a") as file:
        file.write("f8 0x1.8p")  # a line that was cut off
    seen = []
    cache = EvaluationCache(path, num_players=5, fingerprint="a")
    assert len(cache) == 12
    second = Counting()
    values = evaluate_masks(second, masks, batch_size=4, cache=cache, progress=lambda *at: seen.append(at))
    np.testing.assert_allclose(values, (masks.sum(1) / 7).astype(np.float32))
    assert len(second.asked) == 20
    assert not set(first.asked) & set(second.asked)
    assert seen[-1] == (32, 32)
    third = Counting()
    again = evaluate_masks(third, masks, cache=EvaluationCache(path, num_players=5, fingerprint="a"))
    np.testing.assert_array_equal(again, values)
    assert not third.asked


def test_repeats_cost_nothing():
    utility = Counting()
    masks = all_masks(3)[[0, 5, 5, 7, 0]]
    np.testing.assert_allclose(evaluate_masks(utility, masks), masks.sum(1) / 7, rtol=1e-6)
    assert len(utility.asked) == 3


def test_values_of_another_game_are_refused(tmp_path):
    path = tmp_path / "game.masks"
    EvaluationCache(path, num_players=3, fingerprint="a").add(all_masks(3), np.arange(8, dtype=np.float32))
    with pytest.raises(ValueError, match="values of another game"):
        EvaluationCache(path, num_players=3, fingerprint="b")
    path.write_text("something else\n")
    with pytest.raises(ValueError, match="is no file of mask values"):
        EvaluationCache(path, num_players=3, fingerprint="a")
    path.write_bytes(b"")
    assert len(EvaluationCache(path, num_players=3, fingerprint="a")) == 0


def test_fingerprints_see_every_bit(tiny):
    assert (
        tiny.utility.fingerprint()
        == make_utility(decoder_stack(tiny.config), tiny.params, tiny.batch, mode="gather").fingerprint()
    )
    changed = jax.tree.map(lambda leaf: leaf, tiny.params)
    weight = changed["model"]["norm"]["weight"]
    changed["model"]["norm"]["weight"] = weight.at[0].add(1e-6)
    other = make_utility(decoder_stack(tiny.config), changed, tiny.batch)
    assert other.fingerprint() != tiny.utility.fingerprint()
    assert fingerprint({"a": np.zeros(2)}) != fingerprint({"b": np.zeros(2)}) != fingerprint({"a": np.zeros((2, 1))})


def test_values_that_are_not_finite_go_with_their_masks():
    masks, values = keep_finite(all_masks(2), [np.nan, 1.0, np.inf, 2.0])
    np.testing.assert_array_equal(masks, [[True, False], [True, True]])
    np.testing.assert_array_equal(values, [1.0, 2.0])
    np.testing.assert_allclose(loss_increase([1.0, np.exp(-2.0), 0.0]), [0.0, 2.0, np.inf], atol=1e-6)


def test_blocks_that_differ_are_named():
    with pytest.raises(ValueError, match=r"\['b'\] is absent in block 0 and float32 of shape \(3,\) in block 1"):
        stack_trees([{"a": jnp.zeros(2)}, {"a": jnp.zeros(2), "b": jnp.zeros(3)}])
    stacked = stack_trees([{"a": jnp.zeros(2)}, {"a": jnp.ones(2)}])
    np.testing.assert_array_equal(stacked["a"], [[0, 0], [1, 1]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: evaluate_masks(lambda m: np.zeros(3), all_masks(3)), r"each of 8 masks; got shape \(3,\)"),
        (lambda: evaluate_masks(lambda m: m.sum(1), [[0, 3]]), "0 and 1 only; got 3"),
        (lambda: evaluate_masks(lambda m: m.sum(1), all_masks(2), batch_size=0), "batch_size must be at least 1"),
        (lambda: keep_finite(all_masks(2), [1.0]), "one value for each of the 4 masks"),
        (lambda: keep_finite(all_masks(1), [np.nan, np.inf]), "none of the 2 values is finite"),
        (lambda: kept_blocks(all_masks(2)), r"the same number of blocks; got \[0, 1, 2\]"),
        (lambda: stack_trees([]), "at least one block"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_modes_and_meshes(tiny):
    stack = decoder_stack(tiny.config)
    with pytest.raises(ValueError, match="mode must be 'prefix', 'gather' or 'gate'; got 'zero'"):
        make_utility(stack, tiny.params, tiny.batch, mode="zero")
    with pytest.raises(ValueError, match="vectorize must be at least 1; got 0"):
        make_utility(stack, tiny.params, tiny.batch, vectorize=0)
    with pytest.raises(ValueError, match="one axis, over masks, of type Auto; got masks"):
        make_utility(stack, tiny.params, tiny.batch, mesh=jax.make_mesh((1,), ("masks",)))
    with pytest.raises(ValueError, match="each of the 5 parts; got 4"):
        tiny.utility(np.ones((2, 4), bool))
