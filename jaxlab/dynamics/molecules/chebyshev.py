r"""Chebyshev graph convolution: a polynomial of the scaled Laplacian with a matrix for each term.

.. math::
    T_0 = x, \quad T_1 = \hat L x, \quad T_k = 2 \hat L T_{k-1} - T_{k-2}, \qquad y = \sum_{k < K} T_k W_k + b .

The Laplacian is a function on features (`jaxlab.dynamics.molecules.graph`), so that one layer serves nearest-neighbour
arrays, a `jraph.GraphsTuple` and a dense matrix.

Reference: Defferrard et al., arXiv 1606.09375, as in PyTorch Geometric's ``ChebConv``.

Example:
  >>> params = init_chebyshev(jax.random.key(0), 3, 8, order=1)
  >>> x = jnp.ones((5, 3))
  >>> bool(jnp.allclose(chebyshev_convolution(params, x, lambda x: 0 * x), x @ params["kernel"][0]))
  True
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from jaxlab.dynamics.molecules.graph import Laplacian

__all__ = ["chebyshev_convolution", "init_chebyshev"]


def init_chebyshev(key: Key[Array, ""], inputs: int, outputs: int, *, order: int = 4) -> dict[str, Array]:
    """Kernel ``[order, inputs, outputs]`` by Glorot's uniform rule and a bias of zeros.

    Raises:
      ValueError: a size below 1.
    """
    if min(inputs, outputs, order) < 1:
        raise ValueError(f"inputs, outputs and order must be at least 1, got {inputs}, {outputs} and {order}")
    bound = (6 / (inputs + outputs)) ** 0.5
    kernel = jax.random.uniform(key, (order * inputs * outputs,), minval=-bound, maxval=bound)
    return {"kernel": kernel.reshape(order, inputs, outputs), "bias": jnp.zeros(outputs)}


def chebyshev_convolution(
    params: dict[str, Array], x: Float[Array, "*nodes inputs"], laplacian: Laplacian
) -> Float[Array, "*nodes outputs"]:
    """The layer; its order is the length of the kernel."""
    kernel = params["kernel"].astype(x.dtype)
    before, term = x, x
    out = x @ kernel[0]
    for k in range(1, len(kernel)):
        before, term = term, laplacian(x) if k == 1 else 2 * laplacian(term) - before
        out = out + term @ kernel[k]
    return out + params["bias"].astype(x.dtype)
