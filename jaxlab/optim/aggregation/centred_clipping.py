r"""Centred clipping: a rule that remembers where the messages were last time."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from jaxlab.optim.aggregation.aggregator import GeometricAggregator, check_count, largest_tolerated
from jaxlab.optim.aggregation.geometry import Geometry
from jaxlab.optim.aggregation.layout import from_blocks, server_blocks

__all__ = ["CentredClipping"]


@dataclasses.dataclass(frozen=True)
class CentredClipping(GeometricAggregator):
    r"""The centre moves by the mean of the clipped differences to it (Karimireddy et al. 2021, arXiv 2012.10333).

    .. math:: v \leftarrow v + \frac1n \sum_i (v_i - v) \min\Bigl(1, \frac{\tau}{\lVert v_i - v \rVert}\Bigr)

    from the last result, zero at first. The state is that result, in float32 or wider: pass it on, or every call
    starts at zero again. A Byzantine worker moves the centre by at most :math:`\tau / n` an iteration; a message that
    is not finite does not move it. How far it is from the honest mean depends on :math:`\tau` and on where it started,
    and so no constant :math:`\kappa` is stated.

    Attributes:
      max_norm: :math:`\tau`.
      iterations: how often the centre moves in one aggregation.

    Raises:
      ValueError: if ``max_norm`` is negative or ``iterations`` is below 1; in `apply` for a state of other messages.
    """

    max_norm: float = 100.0
    iterations: int = 1

    def __post_init__(self) -> None:
        check_count("iterations", self.iterations, least=1)
        if not self.max_norm >= 0:
            raise ValueError(f"max_norm must not be negative, got {self.max_norm}")

    def init(self, params: PyTree) -> PyTree:
        return jax.tree.map(
            lambda p: jnp.zeros(jnp.shape(p), jnp.promote_types(jnp.result_type(p), jnp.float32)), params
        )

    def tolerates(self, n: int) -> int:
        return largest_tolerated(n)

    def kappa(self, n: int, f: int | None = None) -> float:
        del n
        return 0.0 if f == 0 and math.isinf(self.max_norm) else math.inf

    def _weights(self, geometry: Geometry) -> Array:
        m, points = len(geometry.finite), len(geometry.coefficients)

        def move(_, weights: Array) -> Array:
            distances = jnp.sqrt(geometry.squared_distances_to(weights))
            step = jnp.where(distances > self.max_norm, self.max_norm / jnp.where(distances > 0, distances, 1), 1) / m
            step = jnp.where(geometry.finite, step, 0)
            return weights * (1 - step.sum()) + jnp.pad(step, (0, points - m))

        start = jnp.zeros(points, geometry.coefficients.dtype).at[-1].set(1)
        return lax.fori_loop(0, self.iterations, move, start)

    def _centre(self, layout, state):
        known = jax.tree.structure(state), tuple(map(jnp.shape, jax.tree.leaves(state)))
        if known != (layout.structure, layout.shapes):
            raise ValueError(
                f"the state is of messages {known[0]} of shapes {known[1]}, and these are {layout.structure} of shapes "
                f"{layout.shapes}"
            )
        return server_blocks(layout, state)

    def _next_state(self, layout, blocks, state):
        del state
        return from_blocks(layout, blocks, wide=True)
