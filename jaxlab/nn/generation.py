"""Continue prompts with a decoder: the prompt in one pass, then a token at a time with the keys and values kept.

The prompts are padded to a multiple of ``length_bucket`` and the number of new tokens likewise, so that all lengths of
one bucket share two compiled programs: one reads the prompts, one runs the loop, which ends when every sequence has
stopped. Temperatures, filters, stop tokens and the number of new tokens are traced; changing them compiles nothing.

Step i draws with ``jax.random.fold_in(key, i)``, so that fewer tokens, or the same in chunks, are the same tokens.

On CPUs pass ``unstack_layers(params)`` (`jaxlab.nn.decoder_layout`): generation is about twice as fast.

Example::

    out = generate(config, params, prompts, key=jax.random.key(0), max_new_tokens=64, temperature=0.8, stop_tokens=(2,))
    texts = [tokenizer.decode(row[:n]) for row, n in zip(np.asarray(out.tokens), out.lengths)]

    for tokens in generate_stream(config, params, prompts, key=key, max_new_tokens=64):        # NumPy [b, up to chunk]
        print(tokenizer.decode(tokens[0][tokens[0] >= 0]), end="", flush=True)
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxlab.nn import decoder
from jaxlab.nn.attention import check_padding
from jaxlab.nn.decoder_config import DecoderConfig
from jaxlab.nn.kv_cache import KVCache, init_cache
from jaxlab.nn.pure import check_tokens
from jaxlab.nn.sampling import sample, token_log_probs

__all__ = ["Generation", "generate", "generate_stream"]

# Lengths are checked where the message can name the option, not by these types.
Real = Float[Array | np.ndarray, " _"] | Float[Array | np.ndarray, ""] | float | int
Whole = Int[Array | np.ndarray, " _"] | Int[Array | np.ndarray, ""] | int
StopTokens = Collection[int] | Int[Array | np.ndarray, "_ k"]


class Generation(NamedTuple):
    """What `generate` gives.

    Attributes:
      tokens: new tokens, the stop token included; ``pad_token`` after it.
      log_probs: ``log softmax(z / T)`` of each new token, with z the model's logits over the whole vocabulary: before
        top-k, top-p and min-p, and with T = 1 in place of a temperature of 0. Without filters that is the
        distribution it was drawn from. 0 after the stop token; NaN where the model's logits are.
      lengths: new tokens of each sequence, the stop token included.
    """

    tokens: Int[Array, "b n"]
    log_probs: Float[Array, "b n"]
    lengths: Int[Array, " b"]


class _Options(NamedTuple):
    """What changes without compiling anew; None is another program."""

    temperature: Array
    top_k: Array | None
    top_p: Array | None
    min_p: Array | None
    stop_tokens: Array
    pad_token: Array
    block_mask: Array | None


class _State(NamedTuple):
    """Sequences after some steps; the last token of each is not in the cache yet."""

    cache: KVCache
    tokens: Array
    log_probs: Array
    lengths: Array
    stopped: Array
    step: Array


def generate(
    config: DecoderConfig,
    params: Mapping[str, Any],
    tokens: Int[Array | np.ndarray, "b t"],
    *,
    key: Key[Array, ""],
    max_new_tokens: int,
    padding_mask: Bool[Array | np.ndarray, "_ _"] | None = None,
    temperature: Real = 0.0,
    top_k: Whole | None = None,
    top_p: Real | None = None,
    min_p: Real | None = None,
    stop_tokens: StopTokens | None = None,
    pad_token: int = 0,
    block_mask: Float[Array | np.ndarray, " layers"] | None = None,
    length_bucket: int = 64,
) -> Generation:
    """Continue every prompt by up to ``max_new_tokens`` tokens.

    It may be called inside ``jax.jit``, with ``config`` and the integers static; values are then not checked. Under a
    mesh, parameters and tokens keep their sharding, and the cache follows them.

    Args:
      config: of the decoder.
      params: parameters, stacked or unstacked.
      tokens: prompts, padded on either side to one length.
      key: random key; of no effect at temperature 0.
      max_new_tokens: how many tokens to add at most.
      padding_mask: True for the real tokens of the prompts; None means all.
      temperature: T, a scalar or one value a sequence; 0 takes the likeliest token.
      top_k: draw among the k likeliest tokens; a scalar or one value a sequence, like all filters.
      top_p: draw among the likeliest tokens that hold this probability, in (0, 1].
      min_p: draw among tokens at least this share as likely as the likeliest, in [0, 1].
      stop_tokens: a sequence ends with one of these; a set of ids, or one row of ids a sequence, filled up with -1.
      pad_token: what stands in ``tokens`` after the end.
      block_mask: factor in [0, 1] on the residual branches of each block.
      length_bucket: prompts and new tokens are padded to a multiple of this.

    Returns:
      The new tokens with their log-probabilities, and how many there are of each sequence.

    Raises:
      ValueError: for an empty prompt, a row of padding alone or padding inside it, a token outside the vocabulary,
        prompt and new tokens longer than the context of the config, an option out of range or of the wrong length.
    """
    run = _prepare(
        config,
        params,
        tokens,
        key=key,
        max_new_tokens=max_new_tokens,
        padding_mask=padding_mask,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop_tokens=stop_tokens,
        pad_token=pad_token,
        block_mask=block_mask,
        length_bucket=length_bucket,
    )
    state = run.advance(run.start(), max_new_tokens)
    return Generation(state.tokens[:, :max_new_tokens], state.log_probs[:, :max_new_tokens], state.lengths)


def generate_stream(
    config: DecoderConfig,
    params: Mapping[str, Any],
    tokens: Int[Array | np.ndarray, "b t"],
    *,
    key: Key[Array, ""],
    max_new_tokens: int,
    chunk: int = 8,
    **options: Any,
) -> Iterator[Int[np.ndarray, "b n"]]:
    """Yield the tokens of `generate` as they come.

    Args:
      config: of the decoder.
      params: parameters, stacked or unstacked.
      tokens: prompts, padded on either side to one length.
      key: random key.
      max_new_tokens: how many tokens to add at most.
      chunk: tokens of a sequence to wait for before they are given; the first comes on its own.
      **options: the other options of `generate`, except ``pad_token``.

    Yields:
      The next tokens of all sequences, -1 where a sequence has ended; nothing any more when all have.

    Raises:
      ValueError: as `generate` does, at once and not with the first token.
    """
    _check_size("chunk", chunk)
    if "pad_token" in options:
        raise ValueError("generate_stream marks the end of a sequence with -1 and takes no pad_token")
    run = _prepare(config, params, tokens, key=key, max_new_tokens=max_new_tokens, pad_token=-1, **options)

    def chunks() -> Iterator[np.ndarray]:
        state, given = run.start(), 0
        while True:
            step = int(state.step)
            yield np.asarray(state.tokens[:, given:step])
            if step >= max_new_tokens or bool(jnp.all(state.stopped)):
                return
            given = step
            state = run.advance(state, min(step + chunk, max_new_tokens))

    return chunks()


class _Run(NamedTuple):
    """A checked and padded call of `generate`."""

    config: DecoderConfig
    params: Mapping[str, Any]
    prompts: Array
    real: Array
    key: Array
    options: _Options
    room: int

    def start(self) -> _State:
        return _prefill(self.config, self.params, self.prompts, self.real, self.key, self.options, room=self.room)

    def advance(self, state: _State, limit: int) -> _State:
        return _decode(self.config, self.params, self.key, self.options, state, jnp.int32(limit))


@functools.partial(jax.jit, static_argnums=0, static_argnames="room")
def _prefill(config, params, prompts, real, key, options, *, room):
    batch, length = prompts.shape
    unstacked = decoder.is_unstacked(params)
    # The last new token is never read, so that it needs no slot.
    cache = init_cache(config, batch, length + room - 1, unstacked=unstacked)
    logits, cache = decoder.apply_cached(
        config, params, prompts, cache, padding_mask=real, block_mask=options.block_mask, fresh=True, last=True
    )
    state = _State(
        cache=cache,
        tokens=jnp.full((batch, room), options.pad_token, jnp.int32),
        log_probs=jnp.zeros((batch, room)),
        lengths=jnp.zeros(batch, jnp.int32),
        stopped=jnp.zeros(batch, bool),
        step=jnp.zeros((), jnp.int32),
    )
    return _append(state, logits, key, options)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _decode(config, params, key, options, state, limit):
    def unfinished(state):
        return (state.step < limit) & ~jnp.all(state.stopped)

    def step(state):
        # After the end of a sequence its tokens are no longer looked at, but have to be in the vocabulary.
        last = jnp.maximum(lax.dynamic_slice_in_dim(state.tokens, state.step - 1, 1, axis=1), 0)
        logits, cache = decoder.apply_cached(
            config, params, last, state.cache, block_mask=options.block_mask, last=True
        )
        return _append(state._replace(cache=cache), logits, key, options)

    return lax.while_loop(unfinished, step, state)


def _append(state: _State, logits: Array, key: Array, options: _Options) -> _State:
    """Draw the next token of every sequence that has not stopped."""
    token = sample(
        jax.random.fold_in(key, state.step),
        logits,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
    )
    log_prob = token_log_probs(logits, token, temperature=options.temperature)
    token = jnp.where(state.stopped, options.pad_token, token)
    log_prob = jnp.where(state.stopped, 0.0, log_prob)
    return _State(
        cache=state.cache,
        tokens=lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.step, axis=1),
        log_probs=lax.dynamic_update_slice_in_dim(state.log_probs, log_prob[:, None], state.step, axis=1),
        lengths=state.lengths + ~state.stopped,
        stopped=state.stopped | jnp.any(token[:, None] == options.stop_tokens, axis=1),
        step=state.step + 1,
    )


def _prepare(
    config: DecoderConfig,
    params: Mapping[str, Any],
    tokens: Int[Array | np.ndarray, "b t"],
    *,
    key: Key[Array, ""],
    max_new_tokens: int,
    padding_mask: Bool[Array | np.ndarray, "_ _"] | None = None,
    temperature: Real = 0.0,
    top_k: Whole | None = None,
    top_p: Real | None = None,
    min_p: Real | None = None,
    stop_tokens: StopTokens | None = None,
    pad_token: int = 0,
    block_mask: Float[Array | np.ndarray, " layers"] | None = None,
    length_bucket: int = 64,
) -> _Run:
    check_tokens(tokens)
    batch, length = tokens.shape
    _check_size("max_new_tokens", max_new_tokens)
    _check_size("length_bucket", length_bucket)
    _check_ids("pad_token", pad_token)
    if not batch or not length:
        raise ValueError(f"prompts need at least one sequence of at least one token; got shape {tokens.shape}")
    _check_prompts(config, tokens, padding_mask, max_new_tokens)
    _check_option("temperature", temperature, batch, lambda x: (x >= 0) & (x < np.inf), "at least 0 and finite")
    _check_option("top_k", top_k, batch, lambda x: (x >= 1) & (x < 2**31), "an integer from 1 to 2^31 - 1", kinds="iu")
    _check_option("top_p", top_p, batch, lambda x: (x > 0) & (x <= 1), "in (0, 1]")
    _check_option("min_p", min_p, batch, lambda x: (x >= 0) & (x <= 1), "in [0, 1]")
    stops = jnp.asarray(_stop_rows(stop_tokens), jnp.int32)
    if stops.shape[0] not in (1, batch):
        raise ValueError(f"stop_tokens must have one row for each of {batch} sequences; got {stops.shape[0]}")

    def array(value: Any, dtype: Any) -> Array | None:
        return None if value is None else jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))

    real = jnp.ones((batch, length), bool) if padding_mask is None else jnp.asarray(padding_mask)
    padding = ((0, 0), (0, -length % length_bucket))
    return _Run(
        config=config,
        params=params,
        prompts=jnp.pad(jnp.where(real, jnp.asarray(tokens), 0), padding),
        real=jnp.pad(real, padding),
        key=key,
        options=_Options(
            temperature=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (batch,)),
            top_k=array(top_k, jnp.int32),
            top_p=array(top_p, jnp.float32),
            min_p=array(min_p, jnp.float32),
            stop_tokens=stops,
            pad_token=jnp.int32(pad_token),
            block_mask=None if block_mask is None else jnp.asarray(block_mask),
        ),
        room=max_new_tokens + -max_new_tokens % length_bucket,
    )


def _stop_rows(stop_tokens: StopTokens | None) -> Any:
    if stop_tokens is None:
        return [[-1]]
    if isinstance(stop_tokens, jax.Array | np.ndarray) and stop_tokens.ndim == 2:
        _check_ids("stop_tokens", stop_tokens)
        return stop_tokens
    if not isinstance(stop_tokens, Collection):
        raise ValueError(f"stop_tokens must be a set of ids or one row of ids a sequence; got {stop_tokens!r}")
    for token in stop_tokens:
        _check_ids("stop_tokens", token)
    return [[-1, *map(int, stop_tokens)]]


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1; got {value!r}")


def _check_ids(name: str, value: Any) -> None:
    known = _value(value)
    if known is None:
        return
    if known.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold ids of tokens, which are integers; got {_said(value, known)}")
    outside = (known < -1) | (known >= 2**31)
    if outside.any():
        raise ValueError(f"{name} must hold ids of tokens, from -1 to 2^31 - 1; got {known[outside].flat[0]}")


def _check_prompts(config: DecoderConfig, tokens: Any, padding_mask: Any, max_new_tokens: int) -> None:
    longest = tokens.shape[1]
    if padding_mask is not None and padding_mask.shape != tokens.shape:
        raise ValueError(f"padding_mask must have the shape of the prompts, {tokens.shape}; got {padding_mask.shape}")
    known = _value(padding_mask)
    if known is not None:
        if known.dtype != bool:
            raise ValueError(f"padding_mask must be True for real tokens and False for padding; got {known.dtype}")
        check_padding(known)
        lengths = known.sum(axis=1)
        if not lengths.all():
            raise ValueError(f"a prompt needs at least one real token; row {int(np.argmin(lengths))} is all padding")
        longest = int(lengths.max())
    if config.context_length is not None and longest + max_new_tokens > config.context_length:
        raise ValueError(
            f"a prompt of {longest} and {max_new_tokens} new tokens exceed the {config.context_length} positions the "
            "config is made for; set its max_position_embeddings to None to go beyond them"
        )
    ids = _value(tokens)
    if ids is not None and (padding_mask is None or known is not None):
        real = np.ones(ids.shape, bool) if known is None else known
        outside = real & ((ids < 0) | (ids >= config.vocab_size))
        if outside.any():
            row, column = np.argwhere(outside)[0]
            raise ValueError(
                f"token {ids[row, column]} of prompt {row} is outside the vocabulary of {config.vocab_size} ids"
            )


def _check_option(
    name: str,
    value: Any,
    batch: int,
    valid: Callable[[np.ndarray], np.ndarray],
    range_: str,
    *,
    kinds: str = "iuf",
) -> None:
    if value is None:
        return
    if np.shape(value) not in ((), (batch,)):
        raise ValueError(f"{name} must be one value or one for each of {batch} sequences; got shape {np.shape(value)}")
    known = _value(value)
    if known is not None and known.dtype.kind not in kinds:
        raise ValueError(f"{name} must be {range_}; got {_said(value, known)}")
    if known is not None and not valid(known).all():
        raise ValueError(f"{name} must be {range_}; got {known[~valid(known)].flat[0]}")


def _said(value: Any, known: np.ndarray) -> str:
    """What was given, in one line."""
    return repr(value) if known.ndim == 0 else f"{known.dtype} of shape {known.shape}"


def _value(array: Any) -> np.ndarray | None:
    """The numbers, or None where they cannot be seen: while tracing, or on another host."""
    if array is None or isinstance(array, jax.core.Tracer):
        return None
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return None
    return np.asarray(array)
