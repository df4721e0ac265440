r"""Paths for a drone over a terrain with threats: the path-planning problem of MetaBox, in JAX.

A path from ``start`` to ``end`` has ``n`` waypoints, each a step in spherical coordinates from the one before: length
``r``, climb ``psi`` and heading ``phi``, clipped to the map and to an altitude of 100 to 200 above the ground. With the
altitude of the ground added, the cost is

.. math::
    J = 5 J_1 + J_2 + 10 J_3 + J_4 + J_5

with the length ``J_1``, the threats ``J_2`` (cylinders: 1e4 for every segment that hits one, a linear ramp within ten
units of it), the distance ``J_3`` of the waypoints from the middle altitude, turns and changes of climb over 45 degrees
``J_4``, and ``J_5 = 1e4`` where the path runs into the ground.

A `Terrain` is generated (`generated_terrain`) or cut from a real elevation model (`real_terrain`); all terrains of one
size stack, so one compiled search runs over all of them.

Reference: Phung and Ha, "Safety-enhanced UAV path planning with spherical vector-based particle swarm optimization",
Applied Soft Computing 107 (2021); as a benchmark in MetaBox (Ma et al., arXiv 2310.08252).

Two habits of the benchmark are kept, so that costs compare:

1. The heading is measured with sine and cosine exchanged against the definition of the middle heading. The middle of
   the box is the mirror image of the direct line; with start and end in opposite corners the two are close.
2. Waypoints look their ground up in cells counted from one, collisions in cells counted from zero; a sample beyond
   the last cell counts as a collision.

Example:
  >>> terrain = generated_terrain(0, size=60, threats=2, levels=3)
  >>> lower, upper = bounds(terrain, 4)
  >>> lower.shape, bool(jax.jit(cost)(terrain, (lower + upper) / 2) > 0)
  ((12,), True)
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

__all__ = ["Terrain", "bounds", "cost", "generated_terrain", "real_terrain", "waypoints"]

_LOWEST, _HIGHEST = 100.0, 200.0
_COLLISION = 1e4
_DRONE, _DANGER = 1.0, 10.0
_LARGEST_TURN = 45.0
_SAMPLES = 12


@flax.struct.dataclass
class Terrain:
    """Ground, threats, start and end.

    Attributes:
      height: of the ground at column x and row y.
      threats: ``x, y, radius`` of each cylinder.
      start: ``x, y`` and altitude above the ground.
      end: the same.
    """

    height: Float[Array, "*batch rows columns"]
    threats: Float[Array, "*batch k 3"]
    start: Float[Array, "*batch 3"]
    end: Float[Array, "*batch 3"]


def bounds(terrain: Terrain, waypoint_count: int = 10) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
    """Lower and upper bounds of the ``3 n`` variables ``r, psi, phi`` of each waypoint.

    Raises:
      ValueError: no waypoint.
    """
    if waypoint_count < 1:
        raise ValueError(f"a path needs at least one waypoint, got {waypoint_count}")
    direct = terrain.end - terrain.start
    middle, quarter = jnp.arctan2(direct[1], direct[0]), jnp.pi / 4
    longest = 2 * jnp.linalg.norm(direct) / waypoint_count
    lower = jnp.stack([jnp.zeros_like(longest), jnp.full_like(longest, -quarter), middle - quarter])
    upper = jnp.stack([longest, jnp.full_like(longest, quarter), middle + quarter])
    return jnp.tile(lower, waypoint_count), jnp.tile(upper, waypoint_count)


def waypoints(terrain: Terrain, x: Float[Array, " d"]) -> Float[Array, "points 3"]:
    """The whole path, start and end included: ``x, y`` and altitude above the ground."""
    length, climb, heading = x.reshape(-1, 3).T
    flat = length * jnp.cos(climb)
    steps = jnp.stack([flat * jnp.sin(heading), flat * jnp.cos(heading), length * jnp.sin(climb)], 1)
    rows, columns = terrain.height.shape
    low = jnp.asarray([1.0, 1.0, _LOWEST], x.dtype)
    high = jnp.asarray([columns, rows, _HIGHEST], x.dtype)

    def advance(position: Array, step: Array) -> tuple[Array, Array]:
        position = jnp.clip(position + step, low, high)
        return position, position

    _, between = jax.lax.scan(advance, terrain.start.astype(x.dtype), steps, unroll=True)
    return jnp.concatenate([terrain.start[None], between, terrain.end[None]]).astype(x.dtype)


def cost(terrain: Terrain, x: Float[Array, " d"]) -> Float[Array, ""]:
    """``J`` of the path with the variables ``x``."""
    path = waypoints(terrain, x)
    cells = jnp.round(path[:, :2]).astype(jnp.int32) - 1
    absolute = path.at[:, 2].add(terrain.height[cells[:, 1], cells[:, 0]])
    length = jnp.sum(jnp.linalg.norm(jnp.diff(absolute, axis=0), axis=1))
    off_middle = jnp.sum(jnp.abs(path[1:-1, 2] - (_LOWEST + _HIGHEST) / 2))
    grounded = jnp.where(_is_clear(terrain.height, absolute), 0, _COLLISION)
    return 5 * length + _threat(terrain.threats, path[:, :2]) + 10 * off_middle + _turns(absolute) + grounded


def generated_terrain(
    seed: int,
    *,
    size: int = 900,
    threats: int = 15,
    levels: int = 8,
    relief: float | None = None,
    roughness: float | None = None,
) -> Terrain:
    """A random landscape: random points, each refined ``levels`` times into three around it, interpolated linearly.

    Args:
      seed: of everything.
      size: rows and columns.
      threats: number of cylinders, radius 1/15 to 1/10 of the size.
      levels: of refinement; every one quadruples the points, and eight take half a minute.
      relief: scale of the height differences, by default uniform in [-200, 400].
      roughness: how much the relief varies from place to place, by default uniform in [100, 900].

    Raises:
      ValueError: fewer than 10 cells or no level, or no start and end clear of all threats.
    """
    if size < 10 or levels < 1 or threats < 0:
        raise ValueError(
            f"a terrain needs 10 cells, a level and no negative number of threats, got {size}, {levels}, {threats}"
        )
    rng = np.random.default_rng(seed)
    relief = rng.uniform(-200, 400) if relief is None else relief
    roughness = rng.uniform(100, 900) if roughness is None else roughness
    return _with_mission(_landscape(rng, size, levels, relief, roughness), rng, threats)


def real_terrain(
    elevation: Real[np.ndarray, "rows columns"], seed: int, *, size: int = 800, threats: int = 15
) -> Terrain:
    """A square cut at random from an elevation model, with random threats.

    As in the source of the problem the horizontal unit is a pixel and heights stay in metres.

    Args:
      elevation: in metres.
      seed: of the cut, the threats, start and end.
      size: rows and columns of the square.
      threats: number of cylinders.

    Raises:
      ValueError: a square larger than the model, heights that are not finite, or no start and end clear of threats.
    """
    rows, columns = elevation.shape
    if not 10 <= size <= min(rows, columns):
        raise ValueError(f"the square must have 10 to {min(rows, columns)} cells a side, got {size}")
    rng = np.random.default_rng(seed)
    row, column = rng.integers(rows - size + 1), rng.integers(columns - size + 1)
    cut = np.asarray(elevation[row : row + size, column : column + size], float)
    if not np.all(np.isfinite(cut)):
        raise ValueError("the elevation must be finite")
    return _with_mission(cut, rng, threats)


def _landscape(rng: np.random.Generator, size: int, levels: int, relief: float, roughness: float) -> np.ndarray:
    count = rng.integers(1, 5)
    place = rng.normal(size=(count, 2))
    height, local = 130 + relief * rng.normal(size=count), relief + roughness * rng.normal(size=count)
    for level in range(1, levels + 1):
        apart, finer = 0.75**level, 0.5**level
        angle = rng.uniform(0, 2 * np.pi, 3 * count)
        distance = apart * rng.uniform(1, 2, 3 * count)
        new = np.repeat(place, 3, axis=0) + distance[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
        between = _interpolated(place, np.stack([height, local], 1), new)
        new_local = between[:, 1] + finer * roughness * rng.normal(size=3 * count)
        new_height = between[:, 0] + finer / apart * distance * new_local * rng.normal(size=3 * count)
        place = np.concatenate([place, new])
        height, local = np.concatenate([height, new_height]), np.concatenate([local, new_local])
        count *= 4
    place = (place - np.median(place, axis=0)) / place.std(axis=0)
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, size),) * 2), -1).reshape(-1, 2)
    return _interpolated(place, height[:, None], grid).reshape(size, size)


def _interpolated(place: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Linear between the points, and down to zero at four corners far outside of them."""
    from scipy.interpolate import LinearNDInterpolator

    corners = 100.0 * np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]])
    known = np.concatenate([np.zeros((4, values.shape[1])), values])
    return LinearNDInterpolator(np.concatenate([corners, place]), known)(wanted)


def _with_mission(height: np.ndarray, rng: np.random.Generator, count: int) -> Terrain:
    size = len(height)
    for attempt in range(2000):
        if attempt % 20 == 0:
            radius = np.round(size / 15 + rng.uniform(size=count) * size / 30)
            margin = np.minimum(radius, 0.1 * size)
            x = np.round(margin + rng.uniform(size=count) * 0.7 * size)
            y = np.round(margin + rng.uniform(size=count) * 0.9 * size)
        near = np.round((0.02 + 0.17 * rng.uniform(size=2)) * size)
        far = np.round((0.98 - 0.17 * rng.uniform(size=2)) * size)
        away = np.hypot(x - near[0], y - near[1]), np.hypot(x - far[0], y - far[1])
        if np.all(np.minimum(*away) > radius + _DRONE + _DANGER):
            break
    else:
        raise ValueError(f"{count} threats leave no clear start and end on a map of {size} x {size}; use fewer")
    ends = (np.append(point, (_LOWEST + _HIGHEST) / 2) for point in (near, far))
    return Terrain(*(jnp.asarray(part, float) for part in (height, np.stack([x, y, radius], 1), *ends)))


def _threat(threats: Array, path: Array) -> Array:
    """``J_2``, over all pairs of a threat and a segment."""
    first, along = path[:-1, None], jnp.diff(path, axis=0)[:, None]
    to_centre = threats[None, :, :2] - first
    square = jnp.sum(along**2, -1)
    share = jnp.clip(jnp.sum(to_centre * along, -1) / jnp.where(square > 0, square, 1), 0, 1)
    distance = jnp.linalg.norm(to_centre - share[..., None] * along, axis=-1)
    gap = distance - (threats[:, 2] + _DRONE)
    return jnp.sum(jnp.where(gap < 0, _COLLISION, jnp.maximum(_DANGER - gap, 0)))


def _turns(path: Array) -> Array:
    """``J_4``; a segment without horizontal length takes the direction of its neighbour on the outer side."""
    flat = jnp.diff(path[:, :2], axis=0)
    count = len(flat)
    moves, index = jnp.any(flat != 0, axis=1), jnp.arange(count)
    before = jax.lax.cummax(jnp.where(moves, index, -1))
    after = jax.lax.cummin(jnp.where(moves, index, count), reverse=True)
    incoming = jnp.where((before >= 0)[:, None], flat[before], 0)[:-1]
    outgoing = jnp.where((after < count)[:, None], flat[jnp.minimum(after, count - 1)], 0)[1:]
    cross = incoming[:, 0] * outgoing[:, 1] - incoming[:, 1] * outgoing[:, 0]
    turn = jnp.degrees(jnp.arctan2(jnp.abs(cross), jnp.sum(incoming * outgoing, 1)))
    rise = jnp.diff(path[:, 2])
    climb_in = jnp.arctan2(rise[:-1], jnp.linalg.norm(incoming, axis=1))
    climb_out = jnp.arctan2(rise[1:], jnp.linalg.norm(outgoing, axis=1))
    change = jnp.abs(jnp.degrees(climb_out - climb_in))
    return jnp.sum(jnp.where(turn > _LARGEST_TURN, turn, 0) + jnp.where(change > _LARGEST_TURN, change, 0))


def _is_clear(height: Array, path: Array) -> Array:
    share = jnp.linspace(0, 1, _SAMPLES, dtype=path.dtype)[:, None, None]
    column, row, altitude = jnp.moveaxis(path[:-1] + share * jnp.diff(path, axis=0), -1, 0)
    rows, columns = height.shape
    left = jnp.clip(jnp.floor(column).astype(jnp.int32), 0, columns - 2)
    top = jnp.clip(jnp.floor(row).astype(jnp.int32), 0, rows - 2)
    right_share, low_share = column - left, row - top
    upper = height[top, left] * (1 - right_share) + height[top, left + 1] * right_share
    lower = height[top + 1, left] * (1 - right_share) + height[top + 1, left + 1] * right_share
    ground = upper * (1 - low_share) + lower * low_share
    return jnp.all((altitude > ground) & (column <= columns - 1) & (row <= rows - 1))
