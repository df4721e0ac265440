r"""Distances between dynamical systems to compare the spectral-Grassmann metric with.

- Hilbert-Schmidt ``|T - T'|_HS`` and operator norm ``|T - T'|``, for operators on one feature space.
- Martin distance of two linear systems by their poles,
  ``d^2 = log prod_ij |1 - mu_i conj(mu'_j)|^2 / (prod_ij |1 - mu_i conj(mu_j)| prod_ij |1 - mu'_i conj(mu'_j)|)``
  (Martin, "A metric for ARMA processes", 2000).
- Spectra alone (SOT in arXiv 2509.24920) and subspaces alone (GOT): `SpectralGrassmannMetric` with ``eta`` 1 and 0.
- Derivatives at distance zero, where the slope is not defined, are zero or finite, never NaN.
- Means in Hilbert-Schmidt norm: `hilbert_schmidt_mean` here, with a constrained spectrum
  `jaxlab.dynamics.constrained_hilbert_schmidt_mean`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Complex, Float

from jaxlab.dynamics.ground_cost import check_same_kernel, positive_power
from jaxlab.dynamics.reduced_rank import KernelOperator, LowRankOperator
from jaxlab.dynamics.transport import system_weights

__all__ = ["hilbert_schmidt_distance", "hilbert_schmidt_mean", "martin_distance", "operator_norm_distance"]

_LARGEST_MODULUS = 1 - 1e-6


def hilbert_schmidt_distance(
    a: LowRankOperator | KernelOperator, b: LowRankOperator | KernelOperator
) -> Float[Array, ""]:
    """``|T_a - T_b|_HS`` from the r x r Gram matrices of the factors; relative rounding error ``sqrt(eps)``.

    Raises:
      ValueError: the operators live in different spaces.
    """
    inputs, outputs = _difference_grams(a, b)
    return positive_power(jnp.sum(inputs * outputs), 0.5)


def operator_norm_distance(
    a: LowRankOperator | KernelOperator, b: LowRankOperator | KernelOperator
) -> Float[Array, ""]:
    """Largest singular value of ``T_a - T_b``.

    Raises:
      ValueError: the operators live in different spaces.
    """
    inputs, outputs = _difference_grams(a, b)
    values, vectors = jnp.linalg.eigh(inputs)
    half = vectors * positive_power(values, 0.5)
    return positive_power(jnp.linalg.eigvalsh(half.T @ outputs @ half)[-1], 0.5)


def martin_distance(a: Complex[Array, " r"], b: Complex[Array, " s"]) -> Float[Array, ""]:
    """Martin distance of two sets of poles ``mu = exp(lambda dt)``, moved to modulus ``1 - 1e-6`` if beyond."""
    a, b = _inside_unit_disc(a), _inside_unit_disc(b)

    def log_product(left: Array, right: Array) -> Array:
        return jnp.sum(jnp.log(jnp.abs(1 - left[:, None] * right[None, :].conj())))

    squared = 2 * log_product(a, b) - log_product(a, a) - log_product(b, b)
    return positive_power(squared, 0.5)


def hilbert_schmidt_mean(
    operators: Float[Array, "k d d"], weights: Float[Array, " k"] | None = None
) -> Float[Array, "d d"]:
    """``sum_k gamma_k T_k``, the minimiser of ``sum_k gamma_k |T - T_k|_HS^2``; ``None`` for equal weights.

    Raises:
      ValueError: weights that are no probability vector, or not one for each operator.
    """
    return jnp.tensordot(system_weights(weights, len(operators), operators.dtype), operators, axes=1)


def _difference_grams(a: LowRankOperator | KernelOperator, b: LowRankOperator | KernelOperator) -> tuple[Array, Array]:
    """Gram matrices of both factors of ``T_a - T_b = [P_a, P_b] [Q_a, -Q_b]^T``, in at least float32."""
    a, b = (jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), s) for s in (a, b))
    for operator in (a, b):
        if isinstance(operator, LowRankOperator | KernelOperator) and operator.input_factor.ndim != 2:
            raise ValueError(
                "one operator each is needed (pairwise_distances and jax.vmap take batches), got factors of shape "
                f"{operator.input_factor.shape}"
            )
    if isinstance(a, LowRankOperator) and isinstance(b, LowRankOperator):
        if a.input_factor.shape[0] != b.input_factor.shape[0]:
            raise ValueError(
                "operators live in different spaces: "
                f"dimensions {a.input_factor.shape[0]} and {b.input_factor.shape[0]}"
            )
        inputs = jnp.concatenate([a.input_factor, b.input_factor], axis=1)
        outputs = jnp.concatenate([a.output_factor, -b.output_factor], axis=1)
        return inputs.T @ inputs, outputs.T @ outputs
    if not (isinstance(a, KernelOperator) and isinstance(b, KernelOperator)):
        raise ValueError(f"operators live in different spaces: {type(a).__name__} and {type(b).__name__}")
    check_same_kernel(a, b)

    def gram(points: tuple[Array, Array], factors: tuple[Array, Array]) -> Array:
        return jnp.block(
            [
                [f.T @ a.kernel(p, q) @ g for q, g in zip(points, factors, strict=True)]
                for p, f in zip(points, factors, strict=True)
            ]
        )

    return (
        gram((a.x, b.x), (a.input_factor, b.input_factor)),
        gram((a.y, b.y), (a.output_factor, -b.output_factor)),
    )


def _inside_unit_disc(poles: Array) -> Array:
    modulus = jnp.abs(poles)
    beyond = modulus > _LARGEST_MODULUS
    # Where a pole is inside, the other branch must not divide by its modulus: at zero its derivative is NaN.
    return jnp.where(beyond, poles * (_LARGEST_MODULUS / jnp.where(beyond, modulus, 1)), poles)
