"""Four changes of handwritten digits, a residual network that knows none of them, and one expert for each.

The network maps pixels x ``[n, 64]`` to ``h = x W₀``, then ``h ← h + gelu(LN(h) U) V`` in four blocks, and ``LN(h)`` to
ten logits. The base learns clean digits; each expert goes on from it on digits that are turned, inverted, mirrored or
shifted, with the head kept. All repeats, splits included, are trained in one program.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxlab.data.images import load_images

__all__ = ["DOMAINS", "Splits", "accuracy", "forward", "init", "split_digits", "train"]

DOMAINS = ("rotated", "inverted", "mirrored", "shifted")
BLOCKS = 4
TEST = 497


class Splits(NamedTuple):
    """Images of every repeat and domain, clean ones first.

    Attributes:
      train: ``[repeat, 1 + domain, n, 64]``.
      train_labels: ``[repeat, n]``.
      test: ``[repeat, 1 + domain, 497, 64]``.
      test_labels: ``[repeat, 497]``.
    """

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray


def split_digits(seed: int, repeats: int) -> Splits:
    """A split of its own for every repeat."""
    data = load_images("digits")
    pixels = data.images.reshape(-1, 8, 8)
    changed = [
        pixels,
        np.rot90(pixels, axes=(1, 2)),
        1 - pixels,
        pixels[:, :, ::-1],
        np.roll(pixels, (2, 2), axis=(1, 2)),
    ]
    images = ((np.stack(changed) - 0.3) / 0.38).reshape(len(changed), len(pixels), 64).astype(np.float32)
    draws = np.random.default_rng((seed, 0xE4))
    orders = np.stack([draws.permutation(len(pixels)) for _ in range(repeats)])
    held_out, rest = orders[:, :TEST], orders[:, TEST:]
    of_repeats = [np.stack([images[:, rows] for rows in part]) for part in (rest, held_out)]
    return Splits(of_repeats[0], data.labels[rest], of_repeats[1], data.labels[held_out])


def init(key: Array, width: int = 128) -> dict[str, Any]:
    """Fresh parameters; blocks are stacked."""
    keys = jax.random.split(key, 4)

    def draw(key: Array, *shape: int) -> Array:
        return jax.random.normal(key, shape) / np.sqrt(shape[-2])

    return {
        "embed": draw(keys[0], 64, width),
        "layers": {"up": draw(keys[1], BLOCKS, width, 2 * width), "down": draw(keys[2], BLOCKS, 2 * width, width) / 2},
        "head": draw(keys[3], width, 10),
    }


def forward(params: dict[str, Any], images: Float[Array, "b 64"]) -> tuple[Array, Array]:
    """Logits, and the states after every block ``[blocks, b, width]``."""

    def block(hidden: Array, matrices: dict[str, Array]) -> tuple[Array, Array]:
        hidden = hidden + jax.nn.gelu(jax.nn.standardize(hidden) @ matrices["up"]) @ matrices["down"]
        return hidden, hidden

    hidden, states = jax.lax.scan(block, images @ params["embed"], params["layers"])
    return jax.nn.standardize(hidden) @ params["head"], states


def accuracy(params: dict[str, Any], images: Float[Array, "d n 64"], labels: Array) -> Float[Array, " d"]:
    """Of one model on every domain."""
    return (jnp.argmax(forward(params, images.reshape(-1, 64))[0], -1).reshape(images.shape[:2]) == labels).mean(1)


def train(
    key: Array, splits: Splits, *, base_steps: int, expert_steps: int, batch_size: int, width: int = 128
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters of the base ``[repeat, ...]`` and of its experts ``[repeat, domain, ...]``."""
    keys = jax.random.split(key, 3)
    repeats, _, rows, _ = splits.train.shape

    def fit(params: Any, images: Array, labels: Array, chosen: Array, peak: float, steps: int, fixed: bool) -> Any:
        optimizer = optax.adam(optax.cosine_decay_schedule(peak, steps))

        def loss(params: Any, rows: Array) -> Array:
            logits, _ = forward(params, images[rows])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels[rows]).mean()

        def step(carry: Any, rows: Array) -> tuple[Any, None]:
            params, state = carry
            gradients = jax.grad(loss)(params, rows)
            if fixed:
                gradients["head"] = jnp.zeros_like(gradients["head"])
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), chosen)[0][0]

    draws = [
        jax.random.randint(keys[1], (repeats, base_steps, batch_size), 0, rows),
        jax.random.randint(keys[2], (repeats, len(DOMAINS), expert_steps, batch_size), 0, rows),
    ]

    @jax.jit
    def train_all(fresh: Any, images: Array, labels: Array, of_base: Array, of_experts: Array) -> Any:
        base = jax.vmap(lambda p, x, y, c: fit(p, x, y, c, 1e-3, base_steps, False))(
            fresh, images[:, 0], labels, of_base
        )
        of_domain = jax.vmap(lambda p, x, y, c: fit(p, x, y, c, 3e-4, expert_steps, True), in_axes=(None, 0, None, 0))
        return base, jax.vmap(of_domain)(base, images[:, 1:], labels, of_experts)

    fresh = jax.vmap(lambda key: init(key, width))(jax.random.split(keys[0], repeats))
    return train_all(fresh, splits.train, splits.train_labels, *draws)
