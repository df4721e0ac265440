r"""The geometry of the messages: all that rules built on distances need, in ``O(workers^2)`` numbers.

A *point* is a worker's message, the origin, or the centre a rule remembers. Everything a distance-based rule computes
is an affine combination :math:`\sum_j w_j p_j` of points (:math:`\sum_j w_j = 1`), and

.. math:: \Bigl\lVert \sum_j a_j p_j - \sum_j b_j p_j \Bigr\rVert^2 = (a - b)^\top G (a - b)

for the Gram matrix ``G`` of the points about any common centre. So ``G`` is computed once, the rule runs on it, and the
model-sized numbers are read once more for the final weighted sum.

Distances far smaller than norms would cancel in ``G``. Where they would, ``G`` is computed a second time about the
message of the worker with the smallest median distance to the others. An honest majority stands close to it, so a
huge Byzantine message cannot blur the distances among honest workers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

__all__ = ["Geometry", "combine", "geometry_of", "medoid", "over_columns", "wide_dtype"]

# Columns that a loop over coordinates handles at a time: 64 workers of them stay in a core's cache.
COLUMNS = 16_384
# The same for products of rows with one another: twice as fast, and no gain from more.
CACHED_COLUMNS = 4096
# Up to this many workers a weighted sum or a sorting network is one fused loop over the coordinates.
UNROLLED = 128
# Recentre where a squared norm exceeds the squared distance that has to be told from it by more than this; below, the
# distance keeps all but 4 of float32's 24 bits.
CANCELLATION = 16.0


class Geometry(NamedTuple):
    """Messages (after any pre-aggregation) and reference points, as combinations of what the workers sent.

    Attributes:
      gram: ``[p, p]`` about a common centre: ``m`` messages, then the origin, then a rule's remembered centre if it has
        one. None where no rule needs it.
      finite: ``[m]``, False for a message with a NaN or an infinity, or too long for its squared norm to be a number.
      coefficients: ``[p, b]``, the points as combinations of the ``b`` points the workers sent (and the references).
    """

    gram: Float[Array, "p p"] | None
    finite: Bool[Array, " m"]
    coefficients: Float[Array, "p b"]

    @property
    def squared_distances(self) -> Float[Array, "m m"]:
        """Between messages; infinite to one that is not finite."""
        m = len(self.finite)
        assert self.gram is not None
        gram = self.gram[:m, :m]
        squares = jnp.diagonal(gram)
        distances = jnp.maximum(squares[:, None] + squares - 2 * gram, 0)
        known = self.finite[:, None] & self.finite
        return jnp.where(jnp.eye(m, dtype=bool), 0, jnp.where(known, distances, jnp.inf))

    @property
    def squared_norms(self) -> Float[Array, " m"]:
        """Of the messages, about the origin; infinite for one that is not finite."""
        m = len(self.finite)
        assert self.gram is not None
        squares = jnp.diagonal(self.gram)
        norms = jnp.maximum(squares[:m] + squares[m] - 2 * self.gram[:m, m], 0)
        return jnp.where(self.finite, norms, jnp.inf)

    def squared_distances_to(self, weights: Float[Array, " p"]) -> Float[Array, " m"]:
        """From the messages to the combination of the points with these weights."""
        m = len(self.finite)
        assert self.gram is not None
        product = jnp.matmul(self.gram, weights, precision=lax.Precision.HIGHEST)
        distances = jnp.maximum(jnp.diagonal(self.gram)[:m] - 2 * product[:m] + weights @ product, 0)
        return jnp.where(self.finite, distances, jnp.inf)

    def replaced(self, messages: Float[Array, "k p"], finite: Bool[Array, " k"]) -> "Geometry":
        """With other messages, given as combinations of the points."""
        m = len(self.finite)
        references = jnp.eye(len(self.coefficients), dtype=messages.dtype)[m:]
        points = jnp.concatenate([messages, references])
        gram = None
        if self.gram is not None:
            gram = _product(_product(points, self.gram), points.T)
        return Geometry(gram, finite, _product(points, self.coefficients))


def geometry_of(
    blocks: list[Array],
    centre: list[Array] | None = None,
    *,
    distances: bool = True,
    axis_name: str | None = None,
) -> Geometry:
    """Geometry of what the workers sent.

    Args:
      blocks: ``[n, columns]`` each; over a mesh axis this device's columns.
      centre: ``[columns]`` each, a point that a rule remembers.
      distances: whether a rule needs the Gram matrix.
      axis_name: mesh axis over which the columns are spread.
    """
    n, dtype = blocks[0].shape[0], wide_dtype(blocks)
    n_points = n + 1 + (centre is not None)
    if not distances:
        bad = jnp.stack([(~jnp.isfinite(block)).sum(1) for block in blocks]).sum(0)
        bad = bad if axis_name is None else lax.psum(bad, axis_name)
        return Geometry(None, bad == 0, jnp.eye(n_points, dtype=dtype))
    raw = jnp.zeros((n_points, n_points), dtype)
    for index, block in enumerate(blocks):
        raw = raw.at[:n, :n].add(_gram(block, dtype))
        if centre is not None:
            known = centre[index].astype(dtype)[None]
            cross = _rows_product(block, known, dtype)[:, 0]
            raw = raw.at[:n, -1].add(cross).at[-1, :n].add(cross).at[-1, -1].add(jnp.vdot(known, known))
    total = raw if axis_name is None else lax.psum(raw, axis_name)
    finite = jnp.isfinite(jnp.diagonal(total)[:n])
    known = jnp.concatenate([finite, jnp.ones(n_points - n, bool)])
    total = jnp.where(known[:, None] & known, total, 0)
    plain = Geometry(total, finite, jnp.eye(n_points, dtype=dtype))
    middle, spread = medoid(plain.squared_distances)

    def about_the_middle() -> Array:
        about = jnp.zeros_like(raw)
        for index, block in enumerate(blocks):
            reference = None if centre is None else centre[index].astype(dtype)
            about += _gram_about(block, reference, middle, finite, dtype)
        return about

    # Negated, so that a spread that is NaN recentres, too.
    cancels = ~(total[middle, middle] <= CANCELLATION * spread)
    gram = lax.cond(cancels, about_the_middle, lambda: raw)
    gram = gram if axis_name is None else lax.psum(gram, axis_name)
    return Geometry(jnp.where(known[:, None] & known, gram, 0), finite, jnp.eye(n_points, dtype=dtype))


def medoid(squared_distances: Float[Array, "m m"]) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """The message with the smallest median distance to the others, and the square of that distance.

    With a majority of honest messages it has an honest one within that distance, whatever the others send.
    """
    ranked = jnp.sort(squared_distances, axis=1)[:, len(squared_distances) // 2]
    middle = jnp.argmin(ranked)
    return middle, ranked[middle]


def combine(weights: Float[Array, " b"], blocks: list[Array], centre: list[Array] | None = None) -> list[Array]:
    """Weighted sums ``[columns]`` of the rows and the remembered centre. A row of weight 0 may hold anything."""
    n, dtype = blocks[0].shape[0], wide_dtype(blocks)
    sums = []
    for index, block in enumerate(blocks):
        if n <= UNROLLED:
            parts = [jnp.where(weights[i] == 0, 0, weights[i] * block[i].astype(dtype)) for i in range(n)]
            total = sum(parts[1:], parts[0])
        else:
            rows = jnp.where(weights[:n, None] == 0, 0, block.astype(dtype))
            total = jnp.matmul(weights[:n], rows, precision=lax.Precision.HIGHEST)
        if centre is not None:
            total += weights[-1] * centre[index].astype(dtype)
        sums.append(total)
    return sums


def over_columns(function, block: Array, dtype) -> Array:
    """``[columns]``: ``function`` of ``[n, some columns]`` at a time, so that its temporaries stay in cache."""
    n, columns = block.shape
    if columns <= COLUMNS:
        return function(block)

    def one(index: Array, result: Array) -> Array:
        # The last piece overlaps the one before, whose results it repeats.
        start = jnp.minimum(index * COLUMNS, columns - COLUMNS)
        piece = function(lax.dynamic_slice(block, (0, start), (n, COLUMNS)))
        return lax.dynamic_update_slice(result, piece, (start,))

    start = _varying_like(jnp.zeros(columns, dtype), block)
    return lax.fori_loop(0, -(-columns // COLUMNS), one, start)


def wide_dtype(blocks: list[Array]):
    """What sums are taken in: float32, or float64 where a block is."""
    return jnp.result_type(jnp.float32, *(block.dtype for block in blocks))


def _gram(block: Array, dtype) -> Array:
    """``block @ block.T``; on CPUs, whose products of long rows are slow, a piece that stays in cache at a time."""
    n, columns = block.shape
    whole, rest = divmod(columns, CACHED_COLUMNS)
    if whole < 2:
        return _rows_product(block, block, dtype)

    def piecewise(block: Array) -> Array:
        def one(index: Array, total: Array) -> Array:
            piece = lax.dynamic_slice(block, (0, index * CACHED_COLUMNS), (n, CACHED_COLUMNS))
            return total + _rows_product(piece, piece, dtype)

        end = lax.slice_in_dim(block, columns - rest, columns, axis=1)
        return lax.fori_loop(0, whole, one, _rows_product(end, end, dtype))

    return lax.platform_dependent(block, cpu=piecewise, default=lambda block: _rows_product(block, block, dtype))


def _gram_about(block: Array, reference: Array | None, middle: Array, finite: Array, dtype) -> Array:
    """Gram matrix of rows, origin and reference point about row ``middle``."""
    n, columns = block.shape
    width = min(columns, COLUMNS)

    def one(index: Array, total: Array) -> Array:
        start = jnp.minimum(index * width, columns - width)
        rows = jnp.where(finite[:, None], lax.dynamic_slice(block, (0, start), (n, width)).astype(dtype), 0)
        points = [rows, jnp.zeros((1, width), dtype)]
        if reference is not None:
            points.append(lax.dynamic_slice(reference, (start,), (width,))[None])
        done = jnp.arange(width) + start < index * width  # columns of the last piece that the one before has counted
        moved = jnp.where(done, 0, jnp.concatenate(points) - rows[middle])
        return total + _rows_product(moved, moved, dtype)

    n_points = n + 1 + (reference is not None)
    start = _varying_like(jnp.zeros((n_points, n_points), dtype), block)
    return lax.fori_loop(0, -(-columns // width) if columns else 0, one, start)


def _rows_product(left: Array, right: Array, dtype) -> Array:
    """``left @ right.T`` with sums in ``dtype``."""
    return lax.dot_general(
        left, right, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _varying_like(value: Array, like: Array) -> Array:
    """Marked as different on the devices of the mesh axes over which ``like`` is, as a loop's carry must be."""
    axes = tuple(jax.typeof(like).manual_axis_type.varying - jax.typeof(value).manual_axis_type.varying)
    return lax.pcast(value, axes, to="varying") if axes else value
