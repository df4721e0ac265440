import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab.data import hold_out, sample_crops, shard_tokens


class TestHoldOut:
    @given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 40))
    def test_no_token_is_lost_or_doubled(self, block, every, extra):
        tokens = np.arange(block * every + extra)
        train, held = hold_out(tokens, block=block, every=every)
        assert held.shape == (len(tokens) // block // every, block)
        assert (np.diff(train) > 0).all()
        np.testing.assert_array_equal(np.sort(np.concatenate([train, held.ravel()])), tokens)

    def test_tenth_blocks_of_320(self):
        train, held = hold_out(np.arange(6_500))
        np.testing.assert_array_equal(held, np.stack([np.arange(9 * 320, 3200), np.arange(19 * 320, 6400)]))
        assert len(train) == 6_500 - 640

    def test_bad_input(self):
        with pytest.raises(ValueError, match="need 3200 tokens to hold out one block of 320; got 100"):
            hold_out(np.arange(100))
        with pytest.raises(ValueError, match="must be at least 1; got 0 and 10"):
            hold_out(np.arange(100), block=0)


class TestShardTokens:
    @given(st.integers(1, 9), st.integers(0, 200), st.integers(1, 8), st.sampled_from(["contiguous", "iid"]))
    def test_no_token_is_doubled_and_few_are_left(self, n, extra, chunk, mode):
        tokens = np.arange(n * chunk + extra)
        shards = shard_tokens(tokens, n, mode=mode, chunk=chunk, seed=extra)
        assert shards.shape[0] == n
        assert len(np.unique(shards)) == shards.size
        left = len(tokens) - shards.size
        assert 0 <= left < n * (chunk if mode == "iid" else 1)
        if mode == "iid":
            runs = shards.reshape(-1, chunk)
            np.testing.assert_array_equal(runs, runs[:, :1] + np.arange(chunk))
            assert (runs[:, 0] % chunk == 0).all()
        else:
            np.testing.assert_array_equal(shards.ravel(), tokens[: shards.size])

    def test_seed_orders_the_chunks(self):
        tokens = np.arange(64 * 40)
        first, again, other = (shard_tokens(tokens, 4, mode="iid", seed=seed) for seed in (0, 0, 1))
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()
        # Each shard has chunks of the whole text: the mean of 10 of 40 is 20 ± 3.2, five of those.
        np.testing.assert_allclose(first.mean(axis=1) / 64, 20, atol=16)

    def test_bad_input(self):
        with pytest.raises(ValueError, match="need 8 tokens for 8 shards; got 7"):
            shard_tokens(np.arange(7), 8)
        with pytest.raises(ValueError, match="need 512 tokens for 8 shards; got 511"):
            shard_tokens(np.arange(511), 8, mode="iid")
        with pytest.raises(ValueError, match="n and chunk must be at least 1; got 0 and 64"):
            shard_tokens(np.arange(7), 0)


@pytest.fixture(scope="module")
def crops():
    return jax.jit(functools.partial(sample_crops, batch=3, length=6))


class TestSampleCrops:
    shards = jnp.arange(8 * 50).reshape(8, 50)

    def test_crops_are_runs_of_the_node_s_own_shard(self, crops):
        out = crops(jax.random.key(0), self.shards)
        assert out.shape == (8, 3, 7)
        np.testing.assert_array_equal(out, out[:, :, :1] + jnp.arange(7))
        np.testing.assert_array_equal(out // 50, jnp.broadcast_to(jnp.arange(8)[:, None, None], out.shape))
        np.testing.assert_array_equal(out, crops(jax.random.key(0), self.shards))
        assert (out != crops(jax.random.key(1), self.shards)).any()

    def test_nodes_draw_independently_of_each_other(self, crops):
        same = jnp.broadcast_to(self.shards[0], (8, 50))
        starts = crops(jax.random.key(0), same)[:, :, 0]
        assert len(np.unique(starts)) > 12, "24 draws of 44 starts; nodes that drew alike would give 3"

    def test_every_start_is_drawn_equally_often(self):
        starts = sample_crops(jax.random.key(2), jnp.arange(10)[None], 40_000, 6)[0, :, 0]
        counts = np.bincount(starts, minlength=4)
        assert len(counts) == 4
        # Binomial(40,000, 1/4): standard deviation 87; five of those.
        np.testing.assert_allclose(counts, 10_000, atol=435)

    def test_few_nodes_draw_as_all_do(self, crops):
        whole = crops(jax.random.key(3), self.shards)
        part = sample_crops(jax.random.key(3), self.shards[5:7], 3, 6, nodes=jnp.array([5, 6]))
        np.testing.assert_array_equal(part, whole[5:7])

    def test_shard_map_draws_as_one_device_does(self, crops):
        mesh = jax.make_mesh((4,), ("node",), devices=jax.devices()[:4])
        split = PartitionSpec("node")

        def local(key, shards, nodes):
            return sample_crops(key, shards, 3, 6, nodes=nodes)

        sharded = jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), split, split), out_specs=split)
        placed = jax.device_put((self.shards, jnp.arange(8)), NamedSharding(mesh, split))
        np.testing.assert_array_equal(
            jax.jit(sharded)(jax.random.key(3), *placed), crops(jax.random.key(3), self.shards)
        )

    def test_inside_a_scan(self, crops):
        keys = jax.random.split(jax.random.key(4), 5)
        scanned = jax.lax.scan(lambda _, key: (None, sample_crops(key, self.shards, 3, 6)), None, keys)[1]
        np.testing.assert_array_equal(scanned, jnp.stack([crops(key, self.shards) for key in keys]))

    def test_the_whole_shard_is_a_crop(self):
        np.testing.assert_array_equal(sample_crops(jax.random.key(0), self.shards, 2, 49)[:, 1], self.shards)

    def test_bad_input(self):
        with pytest.raises(ValueError, match="crops of 51 tokens do not fit shards of 50"):
            sample_crops(jax.random.key(0), self.shards, 2, 50)
        with pytest.raises(ValueError, match="must be at least 1; got 0 and 5"):
            sample_crops(jax.random.key(0), self.shards, 0, 5)
