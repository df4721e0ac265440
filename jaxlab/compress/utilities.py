"""What a model with some parts left out is worth: utilities, and their evaluation on many masks.

A utility is any callback from masks to values, larger is better. That of a network is the paper's score ::

    s(m) = PPL(M) / PPL(M_m) = exp(loss(1) - loss(m)),

1 for the whole network, near 1 where little is lost, 0 where the loss is infinite (arXiv 2602.07804, section 3.1).
It is computed from the losses, since perplexities overflow.

* `make_utility`: of a `ResidualStack`, in the form "prefix", "gather" or "gate" (`jaxlab.compress.masked_losses`).
* `gated_utility`: of any network that takes a mask, such as ViT or BERT by their ``block_mask``.
* `evaluate_masks`: a utility on many masks, each distinct one once, resumable.

Example::

    utility = make_utility(decoder_stack(model.config), model.params, token_batch(tokens, limit=10))
    cache = EvaluationCache("llama.masks", num_players=32, fingerprint=utility.fingerprint())
    values = evaluate_masks(utility, masks, cache=cache)
    masks, values = keep_finite(masks, values)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, PyTree

from jaxlab.compress.evaluations import EvaluationCache, fingerprint
from jaxlab.compress.masked_losses import gate_losses, gather_losses, kept_blocks, prefix_losses, prefix_program
from jaxlab.compress.masks import check_masks
from jaxlab.compress.residual_stack import ResidualStack, num_blocks

__all__ = ["StackUtility", "Utility", "evaluate_masks", "gated_utility", "keep_finite", "loss_increase", "make_utility"]


# Of masks [n, L] to values [n].
Utility = Callable[[Any], Any]


class StackUtility:
    """The score of a network with blocks left out; made by `make_utility`.

    Attributes:
      num_players: its number of blocks.
      full_loss: loss of the whole network, in nats.
    """

    def __init__(self, stack: ResidualStack, params: PyTree, batch: PyTree, *, mode: str, vectorize: int, mesh: Any):
        self._stack, self._params, self._batch = stack, params, jax.tree.map(jnp.asarray, batch)
        self._mode, self._vectorize, self._mesh = mode, vectorize, mesh
        self.num_players = num_blocks(stack, params)
        self.full_loss = float(self.losses(np.ones((1, self.num_players), bool))[0])
        if not np.isfinite(self.full_loss):
            raise ValueError(f"the loss of the whole network must be finite; got {self.full_loss}")

    def __call__(self, masks: Any, /) -> Float[np.ndarray, " n"]:
        """Scores, float32."""
        with np.errstate(over="ignore"):
            return np.exp(self.full_loss - self.losses(masks)).astype(np.float32)

    def losses(self, masks: Any) -> Float[np.ndarray, " n"]:
        """Losses in nats, float32."""
        array = check_masks(masks, self.num_players)
        # Sorted with True first, so that masks that begin alike stand together.
        distinct, inverse = np.unique(~array, axis=0, return_inverse=True)
        return self._of_distinct(~distinct)[inverse.reshape(-1)]

    def fingerprint(self) -> str:
        """Of the parameters, the batch and the network: all that decides the values but rounding."""
        return fingerprint(self._stack.description, self._params, self._batch)

    def _of_distinct(self, masks: Bool[np.ndarray, "n l"]) -> Float[np.ndarray, " n"]:
        devices = 1 if self._mesh is None else self._mesh.size
        if not len(masks):
            return np.zeros(0, np.float32)
        if self._mode == "gather":
            losses, sizes = np.zeros(len(masks), np.float32), masks.sum(1)
            for size in np.unique(sizes):
                kept, number = _padded(kept_blocks(masks[sizes == size]), devices)
                found = self._run(gather_losses, kept, vectorize=self._vectorize)
                losses[sizes == size] = np.asarray(found)[:number]
            return losses
        padded, number = _padded(masks, devices)
        if self._mode == "gate":
            return np.asarray(self._run(gate_losses, padded, vectorize=self._vectorize))[:number]
        # The room is rounded up, so that few programs are compiled.
        share = len(padded) // devices
        room = 1 << (share - 1).bit_length()
        found = self._run(prefix_losses, prefix_program(padded, rows=devices), number=room)
        return np.asarray(found).reshape(devices, room)[:, :share].reshape(-1)[:number]

    def _run(self, losses: Callable[..., Array], work: Any, **options: Any) -> Array:
        return losses(self._stack, self._params, self._batch, work, mesh=self._mesh, **options)


def make_utility(
    stack: ResidualStack,
    params: PyTree,
    batch: PyTree,
    *,
    mode: str = "prefix",
    vectorize: int = 1,
    mesh: Mesh | None = None,
) -> StackUtility:
    """Make the game whose players are the blocks of a network.

    Args:
      stack: the network; for a decoder `jaxlab.compress.decoder_stack` gives it.
      params: its parameters.
      batch: calibration data, as the stack takes it. The paper has 10 windows of 128 tokens.
      mode: how masks are evaluated; all give the same values up to rounding.
      vectorize: masks at a time in the forms "gather" and "gate".
      mesh: devices to share the masks, with one axis; the parameters are whole on each.

    Raises:
      ValueError: for an unknown mode, a mesh of several axes, or a network whose loss is not finite.
    """
    if mode not in ("prefix", "gather", "gate"):
        raise ValueError(f"mode must be 'prefix', 'gather' or 'gate'; got {mode!r}")
    if vectorize < 1:
        raise ValueError(f"vectorize must be at least 1; got {vectorize}")
    return StackUtility(stack, params, batch, mode=mode, vectorize=vectorize, mesh=mesh)


def gated_utility(
    loss_fn: Callable[[PyTree, PyTree, Array], Array], params: PyTree, batch: PyTree, *, num_players: int
) -> Callable[[Any], Float[Array, " n"]]:
    """The same game for any network that takes a mask; pure.

    Args:
      loss_fn: ``(params, batch, mask [L]) -> scalar``, the mean loss; the mask is float32.
      params: parameters.
      batch: calibration data.
      num_players: L.

    Example::

        loss = lambda params, batch, mask: cross_entropy(vit(params, batch["x"], block_mask=mask).logits, batch["y"])
        utility = gated_utility(loss, params, batch, num_players=config.num_layers)
    """
    full = _gated_losses(loss_fn, params, batch, jnp.ones((1, num_players), jnp.float32))

    def utility(masks: Any) -> Float[Array, " n"]:
        if not isinstance(masks, jax.core.Tracer):
            masks = check_masks(masks, num_players)
        return jnp.exp(full - _gated_losses(loss_fn, params, batch, jnp.asarray(masks, jnp.float32)))

    return utility


def evaluate_masks(
    utility: Utility,
    masks: Any,
    *,
    batch_size: int = 64,
    cache: EvaluationCache | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Float[np.ndarray, " n"]:
    """Values of masks; each distinct one is evaluated once.

    Args:
      utility: the game.
      masks: ``[n, L]``.
      batch_size: masks handed to the utility at a time, and written to the cache at a time. Those that begin alike
        come together, whatever their order here.
      cache: values known from before, which grows by those found here.
      progress: called as ``progress(done, total)`` over the distinct masks, those of the cache included.

    Raises:
      ValueError: if masks hold something other than 0 and 1, or the utility gives another number of values.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    array = check_masks(masks)
    distinct, inverse = np.unique(~array, axis=0, return_inverse=True)
    distinct = ~distinct
    cache = EvaluationCache(None, num_players=array.shape[1]) if cache is None else cache
    known, values = cache.find(distinct)
    missing = np.flatnonzero(~known)
    done = len(distinct) - len(missing)
    for begin in range(0, len(missing), batch_size):
        rows = missing[begin : begin + batch_size]
        found = np.asarray(utility(distinct[rows]), np.float32)
        if found.shape != (len(rows),):
            raise ValueError(f"the utility must give one value for each of {len(rows)} masks; got shape {found.shape}")
        cache.add(distinct[rows], found)
        values[rows] = found
        done += len(rows)
        if progress is not None:
            progress(done, len(distinct))
    return values[inverse.reshape(-1)]


def keep_finite(masks: Any, values: Any) -> tuple[Bool[np.ndarray, "n l"], Float[np.ndarray, " n"]]:
    """Drop masks whose value is not finite, together with their values.

    Raises:
      ValueError: if there is not one value for each mask, or none is finite.
    """
    array, numbers = check_masks(masks), np.asarray(values, np.float32)
    if numbers.shape != (len(array),):
        raise ValueError(f"one value for each of the {len(array)} masks is needed; got shape {numbers.shape}")
    finite = np.isfinite(numbers)
    if not finite.any():
        raise ValueError(f"none of the {len(array)} values is finite")
    return array[finite], numbers[finite]


def loss_increase(scores: Any) -> Float[np.ndarray, " n"]:
    """By how many nats the loss rose: ``-log s``; infinite where the score is 0."""
    with np.errstate(divide="ignore"):
        return -np.log(np.asarray(scores, np.float32))


@functools.partial(jax.jit, static_argnums=0)
def _gated_losses(loss_fn: Callable[..., Array], params: PyTree, batch: PyTree, masks: Array) -> Array:
    return lax.map(lambda mask: loss_fn(params, batch, mask), masks)


def _padded(rows: np.ndarray, multiple: int) -> tuple[np.ndarray, int]:
    """Repeat the last row until the number divides; and the number before."""
    number = len(rows)
    return np.concatenate([rows, np.repeat(rows[-1:], -number % multiple, axis=0)]), number
