r"""The learnt evolutionary operators of ABOM: attention that selects, crosses and mutates a population.

For a population ``P [n, d]`` with one feature ``phi_i`` per row (its rank or its fitness),

.. math::
    A &= \mathrm{softmax}\big(((P W_q + b_q)(P W_k + b_k)^\top + (\phi w_{qf} + b_{qf})(\phi w_{kf} + b_{kf})^\top)
         / \sqrt{d_A}\big) \\
    P' &= P + \mathrm{MLP}_c(A P), \qquad O_i = P'_i + \mathrm{MLP}_m(M_i p_i), \qquad
    M_i = \mathrm{softmax}(p_i p_i^\top\, (w_{qm} \cdot w_{km}) / \sqrt{d_A}),

each ``MLP`` a tanh layer with inverted dropout that is never switched off: it is the exploration. ``p_i`` is the parent
or the crossed row. `reproduce` is all of it; `selection_matrix` and `mutation_matrix` show the two attentions.

Reference: Wang et al., "Task-free Adaptive Meta Black-box Optimization", arXiv 2601.21475.

Deviations from the reference:

1. ``M_i`` is the softmax of a number times an outer product, so neither it nor the ``[d, d_A]`` projections of single
   genes are ever formed: `gene_attention` adds one gene after the other into three sums ``[n, d]``, and its derivative
   with respect to the number is the variance of the same softmax. Memory is O(n d), not O(n d^2).
2. One 32-bit word decides both dropouts of an entry, so that probabilities are met to 1/65,536.

Example:
  >>> structure = Structure()
  >>> parameters = initial_parameters(jax.random.key(0), 4, structure)
  >>> population = jax.random.uniform(jax.random.key(1), (6, 4))
  >>> masks = draw_masks(jax.random.key(2), 6, 4, 4, structure, crossover_dropout=0.5, mutation_dropout=0.5)
  >>> reproduce(parameters, population, jnp.arange(6.0), masks, structure).shape
  (6, 4)
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, Real

__all__ = [
    "Masks",
    "Parameters",
    "Structure",
    "crossover",
    "draw_masks",
    "gene_attention",
    "initial_parameters",
    "latin_hypercube",
    "mutate",
    "mutation_matrix",
    "reproduce",
    "selection_matrix",
    "variable_swap",
]

Scalar = int | float | Real[Array, ""]

# Genes added per turn of the loop: fewer turns, and longer straight code to compile.
_GENES_PER_TURN = 8


@dataclass(frozen=True)
class Structure:
    """What decides the shapes and the wiring of the operators; the defaults are those of the released code.

    Attributes:
      attention_width: ``d_A``; None is the number of variables.
      hidden_width: ``d_M``; None is the largest power of two up to the number of variables.
      attention_bias: projections of the selection have biases.
      perceptron_bias: both layers of the two perceptrons have biases.
      dropout_on: "output" drops what a perceptron adds, "hidden" drops its hidden units.
      mutation_input: which rows the mutation attends to, "parents" or "crossed".
      mutation: "vector" is a perceptron d -> d_M -> d of the whole row, "gene" one 1 -> d_M -> 1 of each of its genes.
      swap: halves of the population exchange about half of their variables at the end.
    """

    attention_width: int | None = None
    hidden_width: int | None = None
    attention_bias: bool = True
    perceptron_bias: bool = False
    dropout_on: Literal["output", "hidden"] = "output"
    mutation_input: Literal["parents", "crossed"] = "parents"
    mutation: Literal["vector", "gene"] = "vector"
    swap: bool = True

    def widths(self, dimension: int) -> tuple[int, int]:
        """``(d_A, d_M)`` for a number of variables."""
        return self.attention_width or dimension, self.hidden_width or 1 << (dimension.bit_length() - 1)


class Perceptron(flax.struct.PyTreeNode):
    """Weights of ``tanh(z W + b) V + c``; biases are None where the structure has none."""

    inner: Float[Array, "*batch i h"]
    outer: Float[Array, "*batch h o"]
    inner_bias: Float[Array, "*batch h"] | None = None
    outer_bias: Float[Array, "*batch o"] | None = None


class Parameters(flax.struct.PyTreeNode):
    """Everything that is learnt during a search."""

    query: Float[Array, "*batch d a"]
    key: Float[Array, "*batch d a"]
    fitness_query: Float[Array, "*batch a"]
    fitness_key: Float[Array, "*batch a"]
    gene_query: Float[Array, "*batch a"]
    gene_key: Float[Array, "*batch a"]
    crossover: Perceptron
    mutation: Perceptron
    query_bias: Float[Array, "*batch a"] | None = None
    key_bias: Float[Array, "*batch a"] | None = None
    fitness_query_bias: Float[Array, "*batch a"] | None = None
    fitness_key_bias: Float[Array, "*batch a"] | None = None


class Masks(NamedTuple):
    """The random part of one generation: what dropout keeps, times ``1 / (1 - p)``, and what is swapped."""

    crossover: Float[Array, "n w"]
    mutation: Float[Array, "n ..."]
    swap: Bool[Array, "half d"] | None


def initial_parameters(
    key: Key[Array, ""], dimension: int, structure: Structure = Structure(), *, dtype: jnp.dtype | type = jnp.float32
) -> Parameters:
    """Xavier-uniform weights and zero biases."""
    attention, hidden = structure.widths(dimension)
    genes = 1 if structure.mutation == "gene" else dimension
    shapes = (
        *((dimension, attention),) * 2,
        *((1, attention),) * 4,
        *((dimension, hidden), (hidden, dimension)),
        *((genes, hidden), (hidden, genes)),
    )
    # One draw, cut into pieces: ten small generators would take longer to compile than the rest.
    flat = jax.random.uniform(key, (sum(a * b for a, b in shapes),), dtype, -1, 1)
    matrices, start = [], 0
    for rows, columns in shapes:
        bound = (6 / (rows + columns)) ** 0.5
        matrices.append(bound * flat[start : start + rows * columns].reshape(rows, columns))
        start += rows * columns
    query, key_weights, *of_one, cross_inner, cross_outer, inner, outer = matrices
    bias = jnp.zeros(attention, dtype) if structure.attention_bias else None

    def perceptron(inner: Array, outer: Array) -> Perceptron:
        if not structure.perceptron_bias:
            return Perceptron(inner, outer)
        return Perceptron(inner, outer, jnp.zeros(inner.shape[1], dtype), jnp.zeros(outer.shape[1], dtype))

    fitness_query, fitness_key, gene_query, gene_key = (row[0] for row in of_one)
    return Parameters(
        query=query,
        key=key_weights,
        fitness_query=fitness_query,
        fitness_key=fitness_key,
        gene_query=gene_query,
        gene_key=gene_key,
        crossover=perceptron(cross_inner, cross_outer),
        mutation=perceptron(inner, outer),
        query_bias=bias,
        key_bias=bias,
        fitness_query_bias=bias,
        fitness_key_bias=bias,
    )


def draw_masks(
    key: Key[Array, ""],
    population_size: int,
    dimension: int,
    hidden_width: int,
    structure: Structure = Structure(),
    *,
    crossover_dropout: Scalar,
    mutation_dropout: Scalar,
    dtype: jnp.dtype | type = jnp.float32,
) -> Masks:
    """The dropout and swap masks of one generation, from one draw of random bits.

    Raises:
      ValueError: an odd population with a structure that swaps halves.
    """
    if structure.swap and population_size % 2:
        raise ValueError(f"swapping halves needs an even population, got {population_size}")
    hidden = structure.dropout_on == "hidden"
    width = hidden_width if hidden else dimension
    per_gene = hidden and structure.mutation == "gene"
    crossed = population_size * width
    mutated = population_size * dimension * hidden_width if per_gene else crossed
    swapped = population_size // 2 * dimension if structure.swap else 0
    words = jax.random.bits(key, (max(crossed, mutated) + -(-swapped // 32),), jnp.uint32)

    def kept(sixteen_bits: Array, dropout: Scalar) -> Array:
        keep = 1 - jnp.asarray(dropout, dtype)
        threshold = jnp.round(keep.astype(jnp.float32) * 65536).astype(jnp.uint32)
        # With p = 1 nothing is kept, and 0 times an infinite scale would be NaN.
        return jnp.where(sixteen_bits < threshold, 1 / jnp.where(keep > 0, keep, 1), 0).astype(dtype)

    crossover_mask = kept(words[:crossed] >> 16, crossover_dropout).reshape(population_size, width)
    shape = (population_size, dimension, hidden_width) if per_gene else (population_size, width)
    mutation_mask = kept(words[:mutated] & 0xFFFF, mutation_dropout).reshape(shape)
    if not structure.swap:
        return Masks(crossover_mask, mutation_mask, None)
    bits = (words[max(crossed, mutated) :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    swap = bits.reshape(-1)[:swapped].reshape(-1, dimension).astype(bool)
    return Masks(crossover_mask, mutation_mask, swap)


def reproduce(
    parameters: Parameters,
    population: Float[Array, "n d"],
    feature: Float[Array, " n"],
    masks: Masks,
    structure: Structure = Structure(),
) -> Float[Array, "n d"]:
    """Offspring of a population, not yet clipped to any box; differentiable in the parameters.

    Args:
      parameters: of the operators.
      population: sorted by fitness, best first, where ``swap`` is to pair good rows with worse ones.
      feature: of each row, its rank (0 is best) or its fitness.
      masks: of this generation.
      structure: the same that made parameters and masks.
    """
    crossed = crossover(parameters, population, feature, masks.crossover, structure)
    attended = population if structure.mutation_input == "parents" else crossed
    mutated = mutate(parameters, crossed, attended, masks.mutation, structure)
    return mutated if masks.swap is None else variable_swap(mutated, masks.swap)


def selection_matrix(
    parameters: Parameters, population: Float[Array, "n d"], feature: Float[Array, " n"]
) -> Float[Array, "n n"]:
    """Who learns from whom: row i holds the weights of all rows in what row i is crossed with. Rows sum to 1."""

    def projected(weights: Array, bias: Array | None, values: Array) -> Array:
        return values @ weights + (0 if bias is None else bias)

    query = projected(parameters.query, parameters.query_bias, population)
    key = projected(parameters.key, parameters.key_bias, population)
    column = feature[:, None].astype(population.dtype)
    fitness_query = projected(parameters.fitness_query[None], parameters.fitness_query_bias, column)
    fitness_key = projected(parameters.fitness_key[None], parameters.fitness_key_bias, column)
    # One product of [P W, phi w] instead of two and a sum.
    logits = jnp.concatenate([query, fitness_query], 1) @ jnp.concatenate([key, fitness_key], 1).T
    return _softmax(logits / query.shape[1] ** 0.5)


def mutation_matrix(parameters: Parameters, population: Float[Array, "n d"]) -> Float[Array, "n d d"]:
    """How the genes of each row attend to one another, for looking at; the search itself never forms it."""
    logits = _gene_strength(parameters) * population[:, :, None] * population[:, None, :]
    return jax.nn.softmax(logits, axis=2)


def crossover(
    parameters: Parameters,
    population: Float[Array, "n d"],
    feature: Float[Array, " n"],
    mask: Float[Array, "n w"],
    structure: Structure = Structure(),
) -> Float[Array, "n d"]:
    """``P + MLP_c(A P)``."""
    mixed = selection_matrix(parameters, population, feature) @ population
    return population + _perceptron(parameters.crossover, mixed, mask, structure)


def mutate(
    parameters: Parameters,
    crossed: Float[Array, "n d"],
    attended: Float[Array, "n d"],
    mask: Float[Array, "n ..."],
    structure: Structure = Structure(),
) -> Float[Array, "n d"]:
    """``crossed_i + MLP_m(M_i attended_i)``."""
    genes = gene_attention(attended, _gene_strength(parameters))
    if structure.mutation == "gene":
        of_genes = _perceptron(parameters.mutation, genes[..., None], _with_genes(mask, structure), structure)
        return crossed + of_genes[..., 0]
    return crossed + _perceptron(parameters.mutation, genes, mask, structure)


def variable_swap(population: Float[Array, "n d"], mask: Bool[Array, "half d"]) -> Float[Array, "n d"]:
    """Row i of the first half and row i of the second exchange the masked entries; twice is the identity."""
    first, second = jnp.split(population, 2)
    return jnp.concatenate([jnp.where(mask, second, first), jnp.where(mask, first, second)])


def latin_hypercube(
    key: Key[Array, ""], samples: int, dimension: int, *, dtype: jnp.dtype | type = jnp.float32
) -> Float[Array, "samples dimension"]:
    """Points in the unit cube with exactly one in each of the ``samples`` equal slices of every axis."""
    order, place = jax.random.split(key)
    # Ranks of uniform numbers are a random permutation, and one sort does all columns.
    strata = jnp.argsort(jax.random.uniform(order, (samples, dimension)), axis=0).astype(dtype)
    within = jax.random.uniform(place, (samples, dimension), dtype)
    # Rounding must not lift a point into the next slice.
    return jnp.minimum((strata + within) / samples, jnp.nextafter((strata + 1) / samples, jnp.zeros((), dtype)))


@jax.custom_vjp
def gene_attention(genes: Float[Array, "n d"], strength: Float[Array, ""]) -> Float[Array, "n d"]:
    """``sum_k softmax_k(strength g_j g_k) g_k`` for every gene j of every row, in O(n d) memory.

    Args:
      genes: one row an individual.
      strength: ``(w_qm . w_km) / sqrt(d_A)``.
    """
    return _moments(genes, strength)[0]


def _gene_attention_forward(genes: Array, strength: Array) -> tuple[Array, tuple[Array, ...]]:
    mean, variance = _moments(genes, strength)
    return mean, (genes, strength, mean, variance)


def _gene_attention_backward(saved: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array]:
    genes, strength, mean, variance = saved
    # With t_j = strength g_j the mean's slope in t_j is the variance under the softmax.
    slope = cotangent * variance
    tilt, top = _tilt(genes, strength)
    total = _sums(genes, tilt, top)[0]

    def of_gene(_: None, gene: Array) -> tuple[None, Array]:
        weight = jnp.exp(tilt * (gene[:, None] - top)) / total
        return None, jnp.sum(cotangent * weight * (1 + tilt * (gene[:, None] - mean)), 1)

    direct = jax.lax.scan(of_gene, None, genes.T)[1].T
    return direct + strength * slope, jnp.sum(slope * genes).astype(strength.dtype)


gene_attention.defvjp(_gene_attention_forward, _gene_attention_backward)


def _tilt(genes: Array, strength: Array) -> tuple[Array, Array]:
    """``t_j``, and the gene that the softmax of gene j weighs most: the largest, or the smallest if ``t_j < 0``."""
    tilt = strength * genes
    return tilt, jnp.where(tilt > 0, jnp.max(genes, 1, keepdims=True), jnp.min(genes, 1, keepdims=True))


def _sums(genes: Array, tilt: Array, top: Array) -> tuple[Array, Array, Array]:
    def add(sums: tuple[Array, Array, Array], gene: Array) -> tuple[tuple[Array, Array, Array], None]:
        offset = gene[:, None] - top
        weight = jnp.exp(tilt * offset)
        first = weight * offset
        return (sums[0] + weight, sums[1] + first, sums[2] + first * offset), None

    zero = jnp.zeros_like(tilt)
    return jax.lax.scan(add, (zero, zero, zero), genes.T, unroll=min(_GENES_PER_TURN, genes.shape[1]))[0]


def _moments(genes: Array, strength: Array) -> tuple[Array, Array]:
    """Mean and variance under the softmax."""
    tilt, top = _tilt(genes, strength)
    # Offsets from the gene with the largest weight: a one-hot softmax then has a variance of exactly zero, not the
    # rounding error of a difference of large squares, whose sign the optimiser would follow.
    total, first, second = _sums(genes, tilt, top)
    return top + first / total, jnp.maximum(second / total - (first / total) ** 2, 0)


def _softmax(logits: Array) -> Array:
    """Over rows, of logits of any size.

    Raw fitness makes logits of 1e15, whose rounding exceeds the distances that matter: compiled code that computes one
    twice may get it above the maximum of the row, and exp overflows. Rows are scaled to where rounding is harmless;
    they are one-hot before and after.
    """
    largest = 0.1 / jnp.finfo(jnp.float32).eps
    size = jax.lax.stop_gradient(jnp.max(jnp.abs(logits), axis=1, keepdims=True))
    return jax.nn.softmax(logits * jnp.minimum(1, largest / jnp.maximum(size, 1)).astype(logits.dtype), axis=1)


def _gene_strength(parameters: Parameters) -> Array:
    return parameters.gene_query @ parameters.gene_key / parameters.gene_query.shape[-1] ** 0.5


def _with_genes(mask: Array, structure: Structure) -> Array:
    return mask if structure.dropout_on == "hidden" else mask[..., None]


def _perceptron(weights: Perceptron, values: Array, mask: Array, structure: Structure) -> Array:
    hidden = values @ weights.inner + (0 if weights.inner_bias is None else weights.inner_bias)
    hidden = jnp.tanh(hidden)
    if structure.dropout_on == "hidden":
        hidden = hidden * mask
    output = hidden @ weights.outer + (0 if weights.outer_bias is None else weights.outer_bias)
    return output if structure.dropout_on == "hidden" else output * mask
