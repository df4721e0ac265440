"""Paths over a terrain: costs of the benchmark as frozen numbers, terms one by one, terrains that can be flown."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.blackbox.problems import uav

# One program for each terrain: each operation on its own would be one more to compile.
cost, waypoints = jax.jit(uav.cost), jax.jit(uav.waypoints)


@pytest.fixture
def wavy() -> uav.Terrain:
    row, column = np.mgrid[0:120, 0:120]
    height = 60 + 40 * np.sin(column / 17.0) * np.cos(row / 11.0) + 0.3 * column
    threats = [[40.0, 50.0, 9.0], [75.0, 60.0, 12.0], [60.0, 100.0, 8.0]]
    return uav.Terrain(*map(jnp.asarray, (height, threats, [10.0, 8.0, 150.0], [108.0, 111.0, 150.0])))


@pytest.fixture
def flat() -> uav.Terrain:
    return uav.Terrain(jnp.zeros((100, 100)), jnp.zeros((0, 3)), jnp.array([10.0, 10, 150]), jnp.array([90.0, 90, 150]))


def straight(terrain: uav.Terrain, count: int) -> jax.Array:
    """Variables of the direct path on the diagonal, where exchanging sine and cosine changes nothing."""
    step = jnp.linalg.norm(terrain.end - terrain.start) / (count + 1)
    return jnp.tile(jnp.stack([step, jnp.zeros(()), jnp.asarray(jnp.pi / 4)]), count)


def test_costs_are_those_of_the_benchmark() -> None:
    """Values of metaevobox 2.0.2, ``Terrain.func`` of uav_numpy.py, for the terrain and the paths below."""
    expected = [
        *(22328.202781234744, 3198.504415848938, 22745.931869201195),
        *(21201.945334252137, 21083.243718542966, 12163.661768722024),
    ]
    with jax.enable_x64(True):
        row, column = np.mgrid[0:120, 0:120]
        height = 60 + 40 * np.sin(column / 17.0) * np.cos(row / 11.0) + 0.3 * column
        threats = np.array([[40.0, 50.0, 9.0], [75.0, 60.0, 12.0], [60.0, 100.0, 8.0]])
        ends = np.array([[10.0, 8.0, 150.0], [108.0, 111.0, 150.0]])
        terrain = uav.Terrain(jnp.asarray(height), jnp.asarray(threats), *jnp.asarray(ends))
        lower, upper = (np.asarray(bound) for bound in uav.bounds(terrain, 4))
        paths = np.random.RandomState(0).uniform(lower, upper, (6, 12))
        paths[1, 3], paths[3] = 0, (lower + upper) / 2
        paths[2, 0::3] *= 2
        paths[4, 1::3] = 0
        np.testing.assert_allclose(jax.jit(jax.vmap(uav.cost, (None, 0)))(terrain, paths), expected, rtol=1e-10)


def test_a_straight_path_over_flat_ground_costs_its_length(flat) -> None:
    path = straight(flat, 3)
    np.testing.assert_allclose(waypoints(flat, path)[:, 0], [10, 30, 50, 70, 90], rtol=1e-5)
    np.testing.assert_allclose(cost(flat, path), 5 * 80 * 2**0.5, rtol=1e-5)


def test_threats_ramp_and_collide(flat) -> None:
    def with_threat(distance: float) -> float:
        """A cylinder of radius 5 beside the middle of one segment, ``distance`` from it."""
        offset = distance / 2**0.5
        threat = jnp.asarray([[40 + offset, 40 - offset, 5.0]])
        return float(cost(flat.replace(threats=threat), straight(flat, 3)) - cost(flat, straight(flat, 3)))

    assert with_threat(17) == 0
    # The neighbouring segments end 10 sqrt(2) away along the path, too far to add to the ramp.
    np.testing.assert_allclose(with_threat(13), 16 - 13, atol=1e-2)
    assert with_threat(5.5) >= 1e4


def test_ground_is_a_wall(flat) -> None:
    ridge = flat.replace(height=flat.height.at[:, 36:40].set(400.0))
    path = straight(ridge, 3)
    assert cost(ridge, path) == pytest.approx(float(cost(flat, path)) + 1e4, rel=1e-6)
    assert cost(flat.replace(height=flat.height + 30), path) == pytest.approx(float(cost(flat, path)), rel=1e-5)


def test_sharp_turns_cost_their_angle(flat) -> None:
    quarter = jnp.asarray([20.0, 0, 0, 20.0, 0, jnp.pi / 2])
    corners = waypoints(flat, quarter)
    np.testing.assert_allclose(corners[1:3, :2], [[10, 30], [30, 30]], atol=1e-4)
    legs = 5 * (20 + 20 + 60 * 2**0.5)
    np.testing.assert_allclose(cost(flat, quarter), legs + 90, rtol=1e-4)


def test_waypoints_stay_on_the_map(wavy) -> None:
    lower, upper = uav.bounds(wavy, 5)
    path = waypoints(wavy, 3 * upper)
    assert ((path >= jnp.array([1.0, 1, 100])) & (path <= jnp.array([120.0, 120, 200]))).all()
    assert jnp.isfinite(cost(wavy, 3 * upper))
    assert lower.shape == upper.shape == (15,)


@pytest.mark.parametrize("seed", [0, 1])
def test_generated_terrains_can_be_flown(seed) -> None:
    terrain = uav.generated_terrain(seed, size=60, threats=4, levels=3)
    again = uav.generated_terrain(seed, size=60, threats=4, levels=3)
    np.testing.assert_array_equal(terrain.height, again.height)
    assert terrain.height.shape == (60, 60)
    assert jnp.isfinite(terrain.height).all()
    assert terrain.height.std() > 1
    assert ((terrain.threats[:, 2] >= 4) & (terrain.threats[:, 2] <= 6)).all()
    for end in (terrain.start, terrain.end):
        away = jnp.linalg.norm(terrain.threats[:, :2] - end[:2], axis=1)
        assert (away > terrain.threats[:, 2] + 11).all()


def test_real_terrains_are_cut_from_the_model() -> None:
    model = np.arange(40 * 50, dtype=np.uint16).reshape(40, 50)
    terrain = uav.real_terrain(model, 3, size=20, threats=0)
    first = int(terrain.height[0, 0])
    row, column = divmod(first, 50)
    np.testing.assert_array_equal(terrain.height, model[row : row + 20, column : column + 20])


def test_bad_terrains_are_named() -> None:
    with pytest.raises(ValueError, match="10 to 40 cells a side, got 41"):
        uav.real_terrain(np.zeros((40, 50)), 0, size=41)
    with pytest.raises(ValueError, match="the elevation must be finite"):
        uav.real_terrain(np.full((40, 50), np.nan), 0, size=20)
    with pytest.raises(ValueError, match="4000 threats leave no clear start and end"):
        uav.real_terrain(np.zeros((200, 200)), 0, size=200, threats=4000)
    with pytest.raises(ValueError, match="a level and no negative number of threats, got 60, 0, 4"):
        uav.generated_terrain(0, size=60, threats=4, levels=0)
    with pytest.raises(ValueError, match="at least one waypoint, got 0"):
        uav.bounds(uav.real_terrain(np.zeros((40, 50)), 0, size=20, threats=0), 0)
