"""Ground costs: closed forms for one atom, what they do not depend on, bad input."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.dynamics import (
    GaussianKernel,
    KernelSpectrum,
    SpectralGrassmannMetric,
    Spectrum,
    ground_cost,
    linear_kernel,
    similarity,
    unit_norm,
)

pytestmark = pytest.mark.usefixtures("float64")

CLOSED_FORMS = {
    "projector": lambda delta: np.sqrt(2 * (1 - delta**2)),
    "chordal": lambda delta: np.sqrt(1 - delta**2),
    "geodesic": np.arccos,
    "procrustes": lambda delta: np.sqrt(2 * (1 - delta)),
    "martin": lambda delta: np.sqrt(-np.log(delta**2)),
}


def atom(eigenvalue: complex, right_angle: float, left_angle: float) -> Spectrum:
    """One atom in the plane; cosines of angle differences are the inner products."""

    def vector(angle: float):
        return 3.0 * jnp.array([[jnp.cos(angle)], [jnp.sin(angle)]], complex)

    return Spectrum(jnp.array([eigenvalue], complex), vector(right_angle), vector(left_angle))


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_one_atom_has_the_closed_form(name: str) -> None:
    a, b = atom(1 + 2j, 0.0, 0.0), atom(0.5 - 1j, 0.4, 0.3)
    metric = SpectralGrassmannMetric(eta=0.3, eigenvalue_scale=(2.0, 0.5), grassmann=name)
    delta = np.cos(0.4) * np.cos(0.3)
    expected = 0.3 * np.hypot(2.0 * 0.5, 0.5 * 3.0) + 0.7 * CLOSED_FORMS[name](delta)
    np.testing.assert_allclose(ground_cost(a, b, metric), [[expected]], rtol=1e-12)
    powered = ground_cost(a, b, metric.replace(order=3.0))
    np.testing.assert_allclose(powered, [[expected**3]], rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "largest"),
    [("projector", np.sqrt(2)), ("chordal", 1.0), ("geodesic", np.pi / 2), ("procrustes", np.sqrt(2))],
)
def test_orthogonal_modes_are_as_far_as_can_be(name: str, largest: float) -> None:
    cost = ground_cost(atom(0, 0.0, 0.0), atom(0, np.pi / 2, 0.0), SpectralGrassmannMetric(eta=0.0, grassmann=name))
    np.testing.assert_allclose(cost, [[largest]], rtol=1e-12)


def test_martin_is_cut_for_orthogonal_modes() -> None:
    metric = SpectralGrassmannMetric(eta=0.0, grassmann="martin")
    cost = ground_cost(atom(0, 0.0, 0.0), atom(0, np.pi / 2, 0.0), metric)
    np.testing.assert_allclose(cost, [[np.sqrt(-np.log(1e-12))]], rtol=1e-12)


def test_pot_convention_has_the_closed_form() -> None:
    a, b = atom(1 + 2j, 0.0, 0.0), atom(0.5 - 1j, 0.4, 0.3)
    delta, gap = np.cos(0.4) * np.cos(0.3), np.hypot(0.5, 3.0)
    cost = ground_cost(a, b, SpectralGrassmannMetric.pot(eta=0.3, p=3, q=2))
    np.testing.assert_allclose(cost, [[(0.3 * gap**2 + 0.7 * (1 - delta**2)) ** 1.5]], rtol=1e-12)


def test_scale_and_phase_of_eigenvectors_carry_no_meaning(draw) -> None:
    rng = np.random.default_rng(0)
    a, b = draw(rng), draw(rng)
    factor = jnp.asarray(rng.normal(size=4) + 1j * rng.normal(size=4))
    scaled = a.replace(right=a.right * factor, left=a.left * factor[::-1])
    np.testing.assert_allclose(ground_cost(scaled, b), ground_cost(a, b), rtol=1e-13)


def test_a_common_orthogonal_change_of_basis_carries_no_meaning(draw) -> None:
    rng = np.random.default_rng(1)
    a, b = draw(rng), draw(rng)
    q = jnp.asarray(np.linalg.qr(rng.normal(size=(8, 8)))[0])
    turned = [s.replace(right=q @ s.right, left=q @ s.left) for s in (a, b)]
    np.testing.assert_allclose(ground_cost(*turned), ground_cost(a, b), rtol=1e-12)


def test_linear_kernel_is_the_primal_cost(draw) -> None:
    rng = np.random.default_rng(2)
    primal, dual = [], []
    for _ in range(2):
        x, y = (jnp.asarray(rng.normal(size=(6, 3))) for _ in range(2))
        s = draw(rng, 2, 6)
        dual.append(KernelSpectrum(s.eigenvalues, s.right, s.left, x, y, kernel=linear_kernel))
        primal.append(Spectrum(s.eigenvalues, x.T @ s.right, y.T @ s.left))
    np.testing.assert_allclose(ground_cost(*dual), ground_cost(*primal), rtol=1e-12)


def test_similarity_is_between_zero_and_one(draw) -> None:
    rng = np.random.default_rng(3)
    a, b = unit_norm(draw(rng)), unit_norm(draw(rng))
    assert 0 <= similarity(a, b).min() <= similarity(a, b).max() <= 1
    np.testing.assert_allclose(jnp.diag(similarity(a, a)), 1, rtol=1e-14)


def kernel_spectrum(kernel, channels: int) -> KernelSpectrum:
    ones = jnp.ones((4, 1), complex)
    points = jnp.ones((4, channels))
    return KernelSpectrum(jnp.ones(1, complex), ones, ones, points, points, kernel=kernel)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: ground_cost(s, s, SpectralGrassmannMetric(eta=1.5)), r"eta must be in \[0, 1\], got 1.5"),
        (lambda s: ground_cost(s, s, SpectralGrassmannMetric(eta=float("nan"))), r"eta must be in \[0, 1\], got nan"),
        (lambda s: ground_cost(s, s, SpectralGrassmannMetric(order=0.5)), "must be >= 1 and finite, got 0.5"),
        (
            lambda s: ground_cost(s, Spectrum(s.eigenvalues, jnp.ones((3, 1), complex), jnp.ones((3, 1), complex))),
            "different spaces: dimensions 2 and 3",
        ),
        (lambda s: ground_cost(s, kernel_spectrum(linear_kernel, 2)), "different spaces: Spectrum and KernelSpectrum"),
        (
            lambda s: ground_cost(kernel_spectrum(GaussianKernel(1.0), 2), kernel_spectrum(GaussianKernel(2.0), 2)),
            "different spaces: kernel",
        ),
        (
            lambda s: ground_cost(kernel_spectrum(linear_kernel, 2), kernel_spectrum(linear_kernel, 3)),
            r"different spaces: kernel .* on R\^2",
        ),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(atom(1.0, 0.0, 0.0))


def test_unknown_grassmann_distance_is_named() -> None:
    metric = SpectralGrassmannMetric()
    object.__setattr__(metric, "grassmann", "binet")  # past the type check that runs in tests only
    with pytest.raises(ValueError, match=r"grassmann must be one of projector, .* got 'binet'"):
        ground_cost(atom(1.0, 0.0, 0.0), atom(1.0, 0.0, 0.0), metric)
