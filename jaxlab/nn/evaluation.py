"""How well a language model predicts text: perplexity, and the likelihood of continuations.

The perplexity of tokens x is ``exp(-1/n Σ log p(x_t | x_<t))``. A model reads only so many tokens at a time, so the
text is cut into windows that overlap: each begins ``stride`` tokens after the one before, and counts the tokens that no
earlier one counted. So every token counts once, after the first window with at least ``window - stride`` tokens before
it; the first of all is not predicted. Without an overlap (``stride = window``) the first of each window is not either.

A continuation y of a prompt x has the log-likelihood ``Σ log p(y_t | x, y_<t)``. For a multiple choice take the
largest, of the sum or of the mean over tokens, which does not favour short answers.

Any ``apply_fn(params, tokens [b, t]) -> logits [b, t, v]`` of a causal model will do. Batches have one shape, so that
it is compiled once; the losses are float32, their sum over batches float64.

Example::

    result = perplexity(apply_fn, params, tokens, window=1024, stride=512)                  # tokens [n]
    best = np.argmax(score(apply_fn, params, [question] * 4, answers).log_likelihoods)      # lists of arrays
    text_perplexity(load("stories260k"), "Once upon a time", window=128, stride=64)         # `jaxlab.nn.checkpoints`
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

if TYPE_CHECKING:
    from jaxlab.nn.checkpoints import Model

__all__ = [
    "Perplexity",
    "Score",
    "needs_padding_mask",
    "perplexity",
    "score",
    "text_perplexity",
    "text_score",
    "token_losses",
    "windows",
]

Tokens = Int[Array | np.ndarray, " _"] | Sequence[int]


class Perplexity(NamedTuple):
    """How well a text is predicted.

    Attributes:
      perplexity: exp of ``nats_per_token``; as good as choosing among so many tokens by chance.
      nats_per_token: mean loss.
      nats: total loss.
      tokens: number of tokens that count.
      windows: number of windows.
    """

    perplexity: float
    nats_per_token: float
    nats: float
    tokens: int
    windows: int


class Score(NamedTuple):
    """How likely each continuation is.

    Attributes:
      log_likelihoods: sum over its tokens, in nats.
      per_token: mean over its tokens.
      tokens: number of its tokens.
      greedy: whether greedy decoding of the prompt gives it.
    """

    log_likelihoods: Float[np.ndarray, " n"]
    per_token: Float[np.ndarray, " n"]
    tokens: Int[np.ndarray, " n"]
    greedy: Bool[np.ndarray, " n"]


def token_losses(
    apply_fn: Callable[..., Array], params: PyTree, tokens: Int[Array | np.ndarray, "b t"]
) -> Float[Array, "b t-1"]:
    """Loss ``-log p(x_t | x_<t)`` in nats of every token but the first; pure, float32."""
    return _losses_and_hits(apply_fn, params, jnp.asarray(tokens))[0]


def windows(
    tokens: Tokens, *, window: int, stride: int
) -> tuple[Int[np.ndarray, "windows window"], Bool[np.ndarray, "windows window-1"]]:
    """Cut tokens into overlapping windows.

    Args:
      tokens: token ids, at least two.
      window: tokens of a window, at least two; a shorter text gives one window of its length.
      stride: tokens from the start of one window to that of the next, between 1 and ``window``.

    Returns:
      The windows, the last padded on the right with id 0; and which of their tokens, without the first, count.

    Raises:
      ValueError: if there are fewer than two tokens, or a size is out of range.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise ValueError(f"a text must be one row of integer ids; got {tokens.dtype} of shape {tokens.shape}")
    if len(tokens) < 2:
        raise ValueError(f"a text needs at least two tokens to predict one from another; got {len(tokens)}")
    if window < 2:
        raise ValueError(f"window must be at least 2 tokens; got {window}")
    if not 1 <= stride <= window:
        raise ValueError(f"stride must be between 1 and the window of {window} tokens; got {stride}")
    window = min(window, len(tokens))
    # The last window is the first that reaches the end.
    starts = stride * np.arange(-(-max(len(tokens) - window, 0) // min(stride, window)) + 1)
    places = starts[:, None] + np.arange(window)
    counted_before = np.concatenate([[0], starts[:-1] + window])
    counts = (places >= counted_before[:, None]) & (places < len(tokens))
    return np.where(places < len(tokens), tokens[np.minimum(places, len(tokens) - 1)], 0), counts[:, 1:]


def perplexity(
    apply_fn: Callable[..., Array],
    params: PyTree,
    tokens: Tokens,
    *,
    window: int = 1024,
    stride: int | None = None,
    batch_size: int = 1,
    mask_padding: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Perplexity:
    """Perplexity of one text.

    Args:
      apply_fn: causal model, ``apply_fn(params, tokens [b, t]) -> logits [b, t, v]``; the same object reuses what was
        compiled.
      params: its parameters.
      tokens: ids of the text, a token that begins it included where the model wants one.
      window: most tokens that the model reads at a time.
      stride: tokens between the starts of two windows; None means half a window. A smaller one gives more context to
        each token and takes more windows.
      batch_size: windows at a time. Their logits take ``4 · batch_size · window · vocabulary`` bytes.
      mask_padding: tell ``apply_fn`` which tokens are real (``padding_mask=``). Padding comes last, where a causal
        model does not see it, but a rope scaling that depends on the length of a sequence (dynamic) counts it.
      progress: called after each batch with the number of windows done and of all.

    Raises:
      ValueError: if the text has fewer than two tokens or a size is out of range.
    """
    stride = max(1, window // 2) if stride is None else stride
    cut, counts = windows(tokens, window=window, stride=stride)
    lengths = np.minimum(len(tokens) - stride * np.arange(len(cut)), cut.shape[1]) if mask_padding else None
    nats, done = 0.0, 0
    for losses, _, counted in _batches(apply_fn, params, cut, counts, batch_size, lengths):
        nats += float(losses[counted].sum(dtype=np.float64))
        done += len(losses)
        if progress is not None:
            progress(done, len(cut))
    total = int(counts.sum())
    mean = nats / total
    return Perplexity(math.inf if mean > 700 else math.exp(mean), mean, nats, total, len(cut))


def score(
    apply_fn: Callable[..., Array],
    params: PyTree,
    prompts: Sequence[Tokens],
    continuations: Sequence[Tokens],
    *,
    batch_size: int = 8,
    length_bucket: int = 32,
    mask_padding: bool = False,
) -> Score:
    """Log-likelihood of each continuation given its prompt.

    Args:
      apply_fn: causal model, as for `perplexity`.
      params: its parameters.
      prompts: token ids, at least one each; repeat a prompt that has several continuations.
      continuations: token ids that follow the prompt, at least one each.
      batch_size: pairs at a time.
      length_bucket: all are padded to one multiple of this, so that other lengths compile nothing anew.
      mask_padding: as for `perplexity`.

    Raises:
      ValueError: if a prompt or continuation is empty (says which), or there is not one prompt a continuation.
    """
    if len(prompts) != len(continuations) or not len(prompts):
        raise ValueError(f"each continuation needs a prompt; got {len(prompts)} and {len(continuations)}")
    if length_bucket < 1:
        raise ValueError(f"length_bucket must be at least 1; got {length_bucket}")
    for kind, rows in (("prompt", prompts), ("continuation", continuations)):
        if empty := [i for i, row in enumerate(rows) if not len(row)]:
            raise ValueError(f"{kind} {empty[0]} is empty; it needs at least one token")
    lengths = np.array([len(prompt) + len(rest) for prompt, rest in zip(prompts, continuations, strict=True)])
    width = -(-int(lengths.max()) // length_bucket) * length_bucket
    tokens, counts = np.zeros((len(lengths), width), np.int32), np.zeros((len(lengths), width), bool)
    for i, (prompt, rest) in enumerate(zip(prompts, continuations, strict=True)):
        tokens[i, : lengths[i]] = [*prompt, *rest]
        counts[i, len(prompt) : lengths[i]] = True
    sums, greedy = [], []
    known = lengths if mask_padding else None
    for losses, hits, counted in _batches(apply_fn, params, tokens, counts[:, 1:], batch_size, known):
        sums.append(-np.sum(losses, axis=1, where=counted, dtype=np.float64))
        greedy.append(np.all(hits, axis=1, where=counted))
    number = counts.sum(axis=1)
    total = np.concatenate(sums)
    return Score(total, total / number, number, np.concatenate(greedy))


def text_perplexity(model: "Model", text: str, **options: Any) -> Perplexity:
    """`perplexity` of a text, with the tokenizer of the model.

    Raises:
      ValueError: if the model has no tokenizer, or the text is too short.
    """
    options = {"mask_padding": needs_padding_mask(model.config), **options}
    return perplexity(model.apply_fn, model.params, _tokenizer(model).encode(text), **options)


def text_score(model: "Model", prompts: Sequence[str], continuations: Sequence[str], **options: Any) -> Score:
    """`score` of texts, with the tokenizer of the model.

    The continuation is what the tokens of both together have beyond those of the prompt, since a word may be cut
    otherwise with a blank in front. Put that blank into the continuation.

    Raises:
      ValueError: if the model has no tokenizer, or a text has no tokens.
    """
    tokenizer = _tokenizer(model)
    before = [tokenizer.encode(prompt) for prompt in prompts]
    rest = [
        tokenizer.encode(prompt + continuation)[len(tokens) :]
        for prompt, continuation, tokens in zip(prompts, continuations, before, strict=True)
    ]
    options = {"mask_padding": needs_padding_mask(model.config), **options}
    return score(model.apply_fn, model.params, before, rest, **options)


def needs_padding_mask(config: Any) -> bool:
    """Whether padding after a sequence changes its logits: the ``mask_padding`` of a network with this config."""
    scaling = getattr(config, "rotary_scaling", None)
    return scaling is not None and scaling.rope_type == "dynamic"


def _tokenizer(model: "Model") -> Any:
    if model.tokenizer is None:
        raise ValueError(f"the model {model.source} has no tokenizer; give it token ids")
    return model.tokenizer


@functools.partial(jax.jit, static_argnums=0)
def _losses_and_hits(apply_fn, params, tokens, real=None):
    options = {} if real is None else {"padding_mask": real}
    logits, targets = apply_fn(params, tokens, **options)[:, :-1].astype(jnp.float32), tokens[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses, jnp.argmax(logits, axis=-1) == targets


def _batches(
    apply_fn: Callable[..., Array],
    params: PyTree,
    tokens: np.ndarray,
    counts: np.ndarray,
    batch_size: int,
    lengths: np.ndarray | None,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Losses, whether the token is the likeliest, and whether it counts; the last batch is filled up."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}")
    batch_size = min(batch_size, len(tokens))
    for begin in range(0, len(tokens), batch_size):
        batch = tokens[begin : begin + batch_size]
        rows = len(batch)
        batch = np.pad(batch, ((0, batch_size - rows), (0, 0)))
        real = None
        if lengths is not None:
            ends = np.pad(lengths[begin : begin + rows], (0, batch_size - rows))
            real = np.arange(batch.shape[1]) < ends[:, None]
        losses, hits = (np.asarray(part)[:rows] for part in _losses_and_hits(apply_fn, params, batch, real))
        yield losses, hits, counts[begin : begin + rows]
