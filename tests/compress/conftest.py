"""A tiny decoder with windows in some blocks, and a small game that can be enumerated."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxlab.compress import StackUtility, TokenBatch, all_masks, decoder_stack, make_utility, token_batch
from jaxlab.nn import DecoderConfig, decoder

CONFIG = DecoderConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_layers=5,
    num_heads=2,
    num_kv_heads=1,
    qk_norm=True,
    sliding_window=4,
    layer_types=("sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"),
    initializer_range=0.3,
)


class Tiny(NamedTuple):
    config: DecoderConfig
    apply_fn: object
    params: dict
    batch: TokenBatch
    utility: StackUtility


@pytest.fixture(scope="session", params=[0, 1], ids=["seed0", "seed1"])
def tiny(request) -> Tiny:
    apply_fn, params = decoder.init(CONFIG, jax.random.key(request.param))
    tokens = np.random.default_rng(request.param).integers(0, CONFIG.vocab_size, 60)
    batch = token_batch(tokens, window=12, limit=3)
    return Tiny(CONFIG, apply_fn, params, batch, make_utility(decoder_stack(CONFIG), params, batch))


class Game(NamedTuple):
    """s(m) = exp(-Σ c r - Σ J r r) of eight parts, neighbours backing each other up."""

    single: np.ndarray
    pair: np.ndarray
    masks: np.ndarray
    values: np.ndarray

    def __call__(self, masks):
        removed = 1.0 - np.asarray(masks, np.float64)
        return np.exp(-removed @ self.single - np.einsum("ni,ij,nj->n", removed, self.pair, removed))


@pytest.fixture(scope="session")
def game() -> Game:
    rng = np.random.default_rng(0)
    single = rng.gamma(1.5, 0.1, 8)
    distance = np.arange(8)[None] - np.arange(8)[:, None]
    pair = np.triu(0.25 * np.exp(-distance / 1.5) * rng.uniform(0.2, 1, (8, 8)), 1)
    without_values = Game(single, pair, all_masks(8), np.zeros(0))
    return without_values._replace(values=without_values(without_values.masks))
