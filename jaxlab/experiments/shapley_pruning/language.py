"""The blocks of a real language model: what is evaluated, what is chosen, and what it costs on text not seen before."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlab import compress
from jaxlab.compress import EvaluationCache, StackUtility, baselines
from jaxlab.data import load_text
from jaxlab.nn.checkpoints import Model, load

__all__ = ["Setting", "cache_folder", "open_setting", "scores_of_states"]


class Setting(NamedTuple):
    """A model with its calibration and test games.

    Attributes:
      model: the model.
      stack: the same, taken apart.
      batch: the calibration text.
      calibration: game on the calibration text.
      test: game on the test text.
      cache: values of masks of the calibration game.
      test_cache: of the test game.
    """

    model: Model
    stack: compress.ResidualStack
    batch: compress.TokenBatch
    calibration: StackUtility
    test: StackUtility
    cache: EvaluationCache
    test_cache: EvaluationCache

    def evaluate(self, masks: Any) -> np.ndarray:
        """Scores on the calibration text."""
        return compress.evaluate_masks(self.calibration, masks, cache=self.cache, batch_size=32)

    def test_perplexity(self, masks: Any) -> np.ndarray:
        """Perplexity on the test text."""
        scores = compress.evaluate_masks(self.test, masks, cache=self.test_cache, batch_size=32)
        with np.errstate(divide="ignore"):
            return np.exp(self.test.full_loss) / scores.astype(np.float64)


def cache_folder(folder: str) -> Path:
    """Where values of masks are kept: the folder that was named, or one in the user's cache."""
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "jaxlab" / "masks"


def open_setting(
    model: str,
    text: str,
    *,
    seed: int,
    window: int,
    windows: int,
    test_windows: int,
    cache: str,
    dtype: str | None,
    download: bool,
) -> Setting:
    """Load the model, and cut its text: calibration windows drawn from the first half, test windows over the second."""
    loaded = load(model, dtype=dtype, download=download)
    if loaded.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer that can be read (tokenizer.json)")

    whole = load_text(text)
    half = len(whole) // 2
    batch = compress.token_batch(
        loaded.tokenizer.encode(whole[:half]), window=window, limit=windows, key=jax.random.key(seed)
    )
    test_batch = compress.token_batch(loaded.tokenizer.encode(whole[half:]), window=window, limit=test_windows)
    stack = compress.decoder_stack(loaded.config)
    calibration, test = (compress.make_utility(stack, loaded.params, one) for one in (batch, test_batch))
    caches = []
    for game in (calibration, test):
        mark = game.fingerprint()
        path = cache_folder(cache) / f"{mark[:16]}.values"
        caches.append(EvaluationCache(path, num_players=game.num_players, fingerprint=mark))
    return Setting(loaded, stack, batch, calibration, test, *caches)


def scores_of_states(setting: Setting) -> dict[str, np.ndarray]:
    """Baselines that need one pass: scores, and the hidden states for the angular one."""
    states = compress.hidden_states(setting.stack, setting.model.params, setting.batch)
    return {
        "block_influence": np.asarray(baselines.block_influence(states)),
        "taylor": np.asarray(baselines.taylor(setting.stack, setting.model.params, setting.batch)),
        "magnitude": np.asarray(baselines.magnitude(setting.stack, setting.model.params)),
        # The angle needs the last token of each window only.
        "states": np.asarray(states[:, :, -1:], np.float32),
    }
