"""The multilayer perceptron of the propagators, as a pure function of plain parameters.

``x -> W_n relu(... relu(W_1 x + b_1) ...) + b_n`` with dropout after each hidden activation where a key is given.
Weights start uniform in ``+- 1/sqrt(inputs)``, as in the released code of arXiv 2509.02196.
"""

import itertools
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

__all__ = ["Layers", "init_perceptron", "perceptron"]

Layers = list[dict[str, Array]]


def init_perceptron(key: Key[Array, ""], widths: Sequence[int]) -> Layers:
    """Fresh layers from ``widths[0]`` inputs to ``widths[-1]`` outputs.

    Raises:
      ValueError: fewer than two widths, or one below 1.
    """
    if len(widths) < 2 or min(widths) < 1:
        raise ValueError(f"a perceptron needs at least two widths of at least 1, got {list(widths)}")
    return _init(key, tuple(widths))


@partial(jax.jit, static_argnames="widths")
def _init(key: Array, widths: tuple[int, ...]) -> Layers:
    layers = []
    for k, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        of_kernel, of_bias = jax.random.split(jax.random.fold_in(key, k))
        bound = inputs**-0.5
        kernel = jax.random.uniform(of_kernel, (inputs * outputs,), minval=-bound, maxval=bound)
        bias = jax.random.uniform(of_bias, (outputs,), minval=-bound, maxval=bound)
        layers.append({"kernel": kernel.reshape(inputs, outputs), "bias": bias})
    return layers


def perceptron(
    layers: Layers, x: Float[Array, "*batch inputs"], *, dropout: float = 0.0, key: Key[Array, ""] | None = None
) -> Float[Array, "*batch outputs"]:
    """The outputs; ``dropout`` acts only with a key."""
    for k, layer in enumerate(layers):
        x = x @ layer["kernel"] + layer["bias"]
        if k + 1 == len(layers):
            break
        x = jax.nn.relu(x)
        if key is not None and dropout > 0:
            kept = jax.random.bernoulli(jax.random.fold_in(key, k), 1 - dropout, (x.size,)).reshape(x.shape)
            x = jnp.where(kept, x / (1 - dropout), 0)
    return x
