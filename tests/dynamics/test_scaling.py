"""Classical scaling recovers what it can."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.dynamics import classical_scaling


@pytest.mark.usefixtures("float64")
def test_points_of_the_plane_keep_their_distances() -> None:
    points = np.random.default_rng(0).normal(size=(9, 2))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    found = np.asarray(classical_scaling(jnp.asarray(distances)))
    np.testing.assert_allclose(np.linalg.norm(found[:, None] - found[None], axis=-1), distances, atol=1e-12)
    np.testing.assert_allclose(classical_scaling(jnp.asarray(distances), 4)[:, 2:], 0, atol=1e-6)


def test_few_systems_leave_coordinates_at_zero() -> None:
    assert classical_scaling(jnp.zeros((1, 1))).shape == (1, 2)
    with pytest.raises(ValueError, match="dimension must be at least 1, got 0"):
        classical_scaling(jnp.zeros((2, 2)), 0)


@pytest.mark.parametrize(
    ("distances", "message"),
    [
        (jnp.full((2, 2), jnp.nan), "distances must be finite"),
        (jnp.array([[0.0, 1.0], [2.0, 0.0]]), "distances must be symmetric"),
        (jnp.zeros((0, 0)), r"got shape \(0, 0\)"),
    ],
)
def test_what_is_no_distance_matrix_is_named(distances, message) -> None:
    with pytest.raises(ValueError, match=message):
        classical_scaling(distances)
