"""The operators: rows that sum to one, limits of dropout, the attention of genes against the explicit form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.blackbox import (
    Structure,
    crossover,
    draw_masks,
    gene_attention,
    initial_parameters,
    latin_hypercube,
    mutation_matrix,
    reproduce,
    selection_matrix,
    variable_swap,
)

N, D = 6, 5
RELEASED = Structure()
PAPER = Structure(
    attention_bias=False,
    perceptron_bias=True,
    dropout_on="hidden",
    mutation_input="crossed",
    mutation="gene",
    swap=False,
)


@pytest.fixture
def population() -> jax.Array:
    return jax.random.uniform(jax.random.key(1), (N, D), minval=-3, maxval=3)


def masks(structure: Structure, crossover: float, mutation: float, seed: int = 2):
    width = structure.widths(D)[1]
    return draw_masks(
        jax.random.key(seed), N, D, width, structure, crossover_dropout=crossover, mutation_dropout=mutation
    )


def parameters(structure: Structure = RELEASED):
    return initial_parameters(jax.random.key(0), D, structure)


def transcription(p, population, feature, m, structure):
    """The equations of the paper and of the released code, written out in NumPy with every projection explicit."""
    P, phi = np.asarray(population, np.float64), np.asarray(feature, np.float64)[:, None]
    width = p.query.shape[1]

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def bias(b):
        return 0 if b is None else b

    def mlp(w, z, mask, on_hidden):
        h = np.tanh(z @ w.inner + bias(w.inner_bias))
        h = h * mask if on_hidden else h
        out = h @ w.outer + bias(w.outer_bias)
        return out if on_hidden else out * mask

    hidden = structure.dropout_on == "hidden"
    q, k = P @ p.query + bias(p.query_bias), P @ p.key + bias(p.key_bias)
    qf = phi @ p.fitness_query[None] + bias(p.fitness_query_bias)
    kf = phi @ p.fitness_key[None] + bias(p.fitness_key_bias)
    crossed = P + mlp(p.crossover, softmax((q @ k.T + qf @ kf.T) / width**0.5) @ P, np.asarray(m.crossover), hidden)
    attended = P if structure.mutation_input == "parents" else crossed
    rows = []
    for i, row in enumerate(attended):
        matrix = softmax((row[:, None] @ p.gene_query[None]) @ (row[:, None] @ p.gene_key[None]).T / width**0.5)
        genes = matrix @ row
        mask = np.asarray(m.mutation[i])
        if structure.mutation == "gene":
            rows.append(mlp(p.mutation, genes[:, None], mask, hidden)[:, 0])
        else:
            rows.append(mlp(p.mutation, genes, mask, hidden))
    mutated = crossed + np.stack(rows)
    if m.swap is not None:
        first, second = mutated[: N // 2].copy(), mutated[N // 2 :].copy()
        mutated = np.concatenate([np.where(m.swap, second, first), np.where(m.swap, first, second)])
    return mutated


@pytest.mark.parametrize("structure", [Structure(), PAPER, Structure(attention_width=3, hidden_width=7)])
def test_offspring_equal_the_equations_written_out(structure, population) -> None:
    p, m = parameters(structure), masks(structure, 0.3, 0.4)
    feature = jnp.arange(N, dtype=jnp.float32)
    ours = reproduce(p, population, feature, m, structure)
    np.testing.assert_allclose(ours, transcription(p, population, feature, m, structure), atol=2e-5)


def test_rows_of_both_attentions_sum_to_one(population) -> None:
    p = parameters()
    np.testing.assert_allclose(selection_matrix(p, population, jnp.arange(6.0)).sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(mutation_matrix(p, population).sum(2), 1, rtol=1e-6)


def test_logits_of_any_size_have_a_softmax(population) -> None:
    """Raw fitness of 1e8 makes logits of 1e15; compiled, their rounding must not reach exp."""
    feature = jnp.linspace(1e8, 9e8, N)
    rows = jax.jit(selection_matrix)(parameters(), population, feature)
    np.testing.assert_allclose(rows.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(rows.max(1), 1, rtol=1e-6)


def test_zero_weights_attend_to_all_alike(population) -> None:
    p = jax.tree.map(jnp.zeros_like, parameters())
    np.testing.assert_allclose(selection_matrix(p, population, jnp.arange(6.0)), 1 / N, rtol=1e-6)
    np.testing.assert_allclose(mutation_matrix(p, population), 1 / D, rtol=1e-6)
    genes = gene_attention(population, jnp.zeros(()))
    np.testing.assert_allclose(genes, jnp.broadcast_to(population.mean(1, keepdims=True), genes.shape), rtol=1e-5)


@pytest.mark.parametrize("strength", [-2.0, 0.3, 40.0])
def test_attention_of_genes_without_its_matrix(strength) -> None:
    """Value and both derivatives equal those of the formed matrix, also where the softmax is one-hot."""

    def formed(genes, strength):
        matrix = jax.nn.softmax(strength * genes[:, :, None] * genes[:, None, :], axis=2)
        return jnp.einsum("njk,nk->nj", matrix, genes)

    with jax.enable_x64(True):
        genes = jax.random.normal(jax.random.key(1), (3, 11))
        weights = jax.random.normal(jax.random.key(2), genes.shape)
        for argument in (None, 0, 1):

            def of(function, argument=argument):
                if argument is None:
                    return function(genes, jnp.asarray(strength))
                return jax.grad(lambda *a: jnp.sum(weights * function(*a)), argument)(genes, jnp.asarray(strength))

            np.testing.assert_allclose(of(gene_attention), of(formed), rtol=1e-9, atol=1e-11)


def test_a_one_hot_attention_has_no_slope() -> None:
    """What sign descent would follow is exactly zero, not the rounding of large squares."""
    genes = 100 * jax.random.normal(jax.random.key(1), (3, 11))
    slope = jax.grad(lambda s: gene_attention(genes, s).sum())(jnp.asarray(50.0))
    assert slope == 0


@pytest.mark.parametrize("structure", [Structure(swap=False), PAPER])
def test_full_dropout_without_swap_copies_the_parents(structure, population) -> None:
    m = masks(structure, 1.0, 1.0)
    offspring = reproduce(parameters(structure), population, jnp.arange(6.0), m, structure)
    np.testing.assert_array_equal(offspring, population)


def test_dropout_keeps_its_share_and_its_mean(population) -> None:
    kept = np.stack([masks(Structure(), 0.95, 0.5, seed).crossover for seed in range(200)])
    share = (kept > 0).mean()
    # 6,000 independent entries: three standard errors of 0.05.
    assert abs(share - 0.05) < 3 * (0.05 * 0.95 / kept.size) ** 0.5
    np.testing.assert_allclose(kept[kept > 0], 20, rtol=1e-5)
    assert (masks(Structure(), 0.0, 0.5).crossover == 1).all()


def test_masks_of_one_word_are_independent() -> None:
    m = [masks(Structure(), 0.5, 0.5, seed) for seed in range(300)]
    first, second = (np.stack([getattr(mask, name) > 0 for mask in m]) for name in ("crossover", "mutation"))
    swapped = np.stack([mask.swap for mask in m])
    n = first.size
    assert abs((first == second).mean() - 0.5) < 4 * 0.5 / n**0.5
    assert abs(swapped.mean() - 0.5) < 4 * 0.5 / swapped.size**0.5
    assert abs((swapped == first[:, : N // 2]).mean() - 0.5) < 4 * 0.5 / swapped.size**0.5


def test_swap_keeps_every_column_and_undoes_itself(population) -> None:
    mask = jax.random.bernoulli(jax.random.key(3), 0.5, (N // 2, D))
    swapped = variable_swap(population, mask)
    assert not np.array_equal(swapped, population)
    np.testing.assert_array_equal(np.sort(swapped, 0), np.sort(population, 0))
    np.testing.assert_array_equal(variable_swap(swapped, mask), population)


@pytest.mark.parametrize(("samples", "dimension"), [(7, 3), (20, 1), (100, 4)])
def test_latin_hypercube_has_one_point_a_stratum(samples, dimension) -> None:
    points = np.asarray(latin_hypercube(jax.random.key(samples), samples, dimension))
    strata = np.sort(np.floor(points * samples).astype(int), axis=0)
    np.testing.assert_array_equal(strata, np.broadcast_to(np.arange(samples)[:, None], points.shape))
    assert len({tuple(column) for column in np.argsort(points, 0).T}) == dimension


def test_bfloat16_stays_bfloat16(population) -> None:
    p = initial_parameters(jax.random.key(0), D, dtype=jnp.bfloat16)
    m = draw_masks(jax.random.key(2), N, D, 4, crossover_dropout=0.5, mutation_dropout=0.5, dtype=jnp.bfloat16)
    offspring = reproduce(p, population.astype(jnp.bfloat16), jnp.arange(N, dtype=jnp.bfloat16), m)
    assert offspring.dtype == jnp.bfloat16
    assert jnp.isfinite(offspring).all()


def test_crossover_alone_moves_what_dropout_keeps(population) -> None:
    m = masks(Structure(), 0.7, 1.0)
    moved = crossover(parameters(), population, jnp.arange(6.0), m.crossover) != population
    np.testing.assert_array_equal(moved, m.crossover > 0)


def test_an_odd_population_cannot_swap() -> None:
    with pytest.raises(ValueError, match="swapping halves needs an even population, got 5"):
        draw_masks(jax.random.key(0), 5, D, 4, crossover_dropout=0.5, mutation_dropout=0.5)
