"""A `flax.nnx` network as a pure function of a plain tree of parameters.

`pure_function` keeps the structure of a network apart from its parameters, so that these are a nested dict like any
other: jitted, differentiated, stacked by ``jax.vmap``, sharded, averaged, merged, written to a file::

    apply_fn = pure_function(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    logits = apply_fn(params, tokens)
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlab.nn.linear import LowRankSum

__all__ = [
    "check_block_mask",
    "check_hidden_states",
    "check_parameters",
    "check_tokens",
    "parameter_shapes",
    "pure_function",
]


def pure_function(build: Callable[[], nnx.Module]) -> Callable[..., Any]:
    """Give a network as a pure function of its parameters.

    Args:
      build: makes the network; it is only traced, so that no parameter is allocated.

    Returns:
      ``apply_fn(params, *inputs, **options)``, which calls the network with ``params`` in place. It raises ValueError,
      naming the parameter, when ``params`` belong to another network.
    """
    graph, state = nnx.split(nnx.eval_shape(build))
    return functools.partial(_apply, graph, parameter_shapes(nnx.to_pure_dict(state)))


def parameter_shapes(params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Give the shape of every parameter by its path, with ``/`` between the keys; a `LowRankSum` is a parameter."""
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda node: isinstance(node, LowRankSum))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        if hasattr(leaf, "shape")
        else jnp.shape(leaf)
        for path, leaf in leaves
    }


def check_parameters(params: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError, naming the parameter, if the paths or shapes are not those that a network expects."""
    if not isinstance(params, Mapping):
        raise ValueError(f"params must be a dict as init or a checkpoint gives it; got a {type(params).__name__}")
    given = parameter_shapes(params)
    for path in sorted(expected.keys() | given.keys()):
        if path not in given:
            raise ValueError(f"params do not fit the config: {path} is missing")
        if path not in expected:
            raise ValueError(f"params do not fit the config: {path} is not a parameter of it")
        if given[path] != expected[path]:
            raise ValueError(
                f"params do not fit the config: {path} must have shape {expected[path]}; got {given[path]}"
            )


def check_tokens(tokens: Any, **others: Any) -> None:
    """Raise ValueError if tokens are no array of integers ``[b, t]``, or what goes with them has another shape.

    Args:
      tokens: token ids, which may be traced.
      **others: by name what must have their shape, such as a padding mask, or one row for all; None is not there.
    """
    if not hasattr(tokens, "shape") or not hasattr(tokens, "dtype"):
        raise ValueError(f"tokens must be an array [batch, length]; got a {type(tokens).__name__}")
    if len(tokens.shape) != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [batch, length]; got {tokens.dtype} of shape {tuple(tokens.shape)}")
    for name, value in others.items():
        if value is not None and tuple(jnp.shape(value)) not in (tokens.shape, (1, tokens.shape[1])):
            raise ValueError(f"{name} must have the shape of the tokens, {tokens.shape}; got {jnp.shape(value)}")


def check_block_mask(block_mask: Any, num_layers: int) -> None:
    """Raise ValueError if a mask, which may be traced, is no array with one entry a block."""
    if block_mask is None:
        return
    if not hasattr(block_mask, "shape"):
        raise ValueError(f"block_mask must be an array with one entry a block; got a {type(block_mask).__name__}")
    if block_mask.shape != (num_layers,):
        raise ValueError(f"block_mask must have shape ({num_layers},); got {block_mask.shape}")


def check_hidden_states(hidden_states: Any) -> None:
    """Raise ValueError if the hidden states asked for are no tuple of integers."""
    if hidden_states is None:
        return
    if not isinstance(hidden_states, tuple | list) or not all(
        isinstance(state, int | np.integer) and not isinstance(state, bool) for state in hidden_states
    ):
        raise ValueError(f"hidden_states must be a tuple of integers; got {hidden_states!r}")


def _apply(
    graph: Any, expected: Mapping[str, tuple[int, ...]], params: Mapping[str, Any], /, *inputs: Any, **options: Any
) -> Any:
    check_parameters(params, expected)
    return nnx.merge(graph, params)(*inputs, **options)
