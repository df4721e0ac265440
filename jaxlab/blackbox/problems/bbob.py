r"""The 24 noiseless BBOB functions in JAX: the instances of COCO, and those of MetaBox that the paper was measured on.

Every function is ``g(B T(A (x - shift)))`` for a linear map ``A``, a fixed non-linear transformation ``T`` and a linear
map ``B``; an `Instance` holds the maps, the shift and the optimum, and `excess` is ``f(x) - f_opt``. All instances of
one dimension have the same structure, so that one program, compiled once, minimises all functions:

* `coco_instance`: the true BBOB functions on [-5, 5]^d, equal to those of COCO and IOHexperimenter;
* `metabox_instance`: the same formulas with other shifts and rotations on [-100, 100]^d. Results on the two sets do not
  compare: a search that never leaves the box sees a range twenty times as wide.

Two of MetaBox's instances reward a search that looks at the middle of the box: f9 and f19 have their optimum within one
unit of the centre (`CENTRE_SEEKING`). f20 has values far below ``f_opt`` there, since Schwefel's function was meant for
[-5, 5]^d.

`excess` is what to minimise in float32: adding ``f_opt``, up to 2,500, loses the last digits. Its branch is taken by
the instance's number, so map over instances with `jax.lax.map` and over points with `jax.vmap`; a vmap over instances
evaluates all 24 functions for each.

Reference: Hansen et al., "Real-Parameter Black-Box Optimization Benchmarking 2009: Noiseless Functions Definitions",
INRIA research report RR-6829; MetaBox: Ma et al., arXiv 2310.08252.

Example:
  >>> problem = coco_instance(1, 2)
  >>> float(excess(problem, problem.x_opt))
  0.0
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = [
    "CENTRE_SEEKING",
    "FUNCTIONS",
    "Instance",
    "coco_instance",
    "excess",
    "excess_of",
    "metabox_instances",
    "value",
]

FUNCTIONS = tuple(range(1, 25))
"""Numbers of the functions."""

CENTRE_SEEKING = (9, 19)
"""Functions whose optimum lies near the centre of MetaBox's box."""

_PEAKS = 101
_SCHWEFEL = 4.2096874633


@flax.struct.dataclass
class Instance:
    """One function with its shift, its maps and its optimum.

    Attributes:
      function: 1 to 24.
      x_opt: where the optimum is (the one intended, see the module on f20).
      f_opt: its value.
      half_width: the box is ``[-half_width, half_width]^d``.
      inner: the map ``A``.
      outer: the map ``B``; the identity where the function has none.
      peaks: of Gallagher's functions, mapped by ``A``.
      peak_scales: curvature of each peak along each axis.
      peak_heights: zero where there is no peak.
    """

    function: Int[Array, "*batch"]
    x_opt: Float[Array, "*batch d"]
    f_opt: Float[Array, "*batch"]
    half_width: Float[Array, "*batch"]
    inner: Float[Array, "*batch d d"]
    outer: Float[Array, "*batch d d"]
    peaks: Float[Array, "*batch peaks d"]
    peak_scales: Float[Array, "*batch peaks d"]
    peak_heights: Float[Array, "*batch peaks"]

    @property
    def lower(self) -> Float[Array, "*batch d"]:
        """Of the box."""
        return jnp.broadcast_to(-self.half_width[..., None], self.x_opt.shape)

    @property
    def upper(self) -> Float[Array, "*batch d"]:
        """Of the box."""
        return jnp.broadcast_to(self.half_width[..., None], self.x_opt.shape)


def excess(instance: Instance, x: Float[Array, " d"]) -> Float[Array, ""]:
    """``f(x) - f_opt``, zero at the optimum."""
    return excess_of(FUNCTIONS)(instance, x)


@lru_cache
def excess_of(functions: tuple[int, ...]) -> Callable[[Instance, Array], Array]:
    """`excess` for some of the functions, which compiles faster than that for all; any other is taken for the first."""
    formulas = tuple(dict.fromkeys(_FORMULAS[function - 1] for function in functions))
    table = [formulas.index(formula) if formula in formulas else 0 for formula in _FORMULAS]

    def excess_of_these(instance: Instance, x: Array) -> Array:
        return jax.lax.switch(jnp.asarray(table)[instance.function - 1], formulas, instance, x)

    return excess_of_these


def value(instance: Instance, x: Float[Array, " d"]) -> Float[Array, ""]:
    """``f(x)``."""
    return excess(instance, x) + instance.f_opt


def coco_instance(function: int, dimension: int, instance: int = 1) -> Instance:
    """The function as COCO's suite "bbob" has it.

    Args:
      function: 1 to 24.
      dimension: at least 2.
      instance: at least 1; decides shift, rotations and ``f_opt``.

    Raises:
      ValueError: a number out of range.
    """
    _check(function, dimension)
    if instance < 1:
        raise ValueError(f"instances are numbered from 1, got {instance}")
    # Functions 4 and 18 share the random numbers of 3 and 17.
    seed = {4: 3, 18: 17}.get(function, function) + 10_000 * instance
    first, second = _coco_rotation(seed + 1_000_000, dimension), _coco_rotation(seed, dimension)
    shift = 8 * np.floor(1e4 * _coco_uniform(seed + 1_000_000 * (function == 12), dimension)) / 1e4 - 4
    shift[shift == 0] = -1e-5
    f_opt = 100 * _coco_normal(seed, 1)[0] / _coco_normal(seed + 1, 1)[0]
    f_opt = min(1000.0, max(-1000.0, np.floor(100 * f_opt + 0.5) / 100))
    match function:
        case 1 | 2 | 3 | 4 | 5 | 8:
            first = np.eye(dimension)
        case 9 | 19 | 21 | 22:
            first = second
    if function == 20:
        shift = _SCHWEFEL / 2 * np.where(_coco_uniform(seed, dimension) < 0.5, -1, 1)
    if function == 24:
        shift = 1.25 * np.where(_coco_normal(seed, dimension) < 0, -1, 1)
    peaks = _coco_peaks(seed, dimension, function) if function in (21, 22) else None
    return _assemble(function, shift, first, second, f_opt, 5.0, peaks)


def metabox_instances(
    dimension: int, functions: tuple[int, ...] = FUNCTIONS, *, seed: int = 3849, half_width: int | float = 100.0
) -> list[Instance]:
    """Functions as MetaBox draws them: all 24 from one stream of random numbers, of which those asked for are kept.

    Args:
      dimension: at least 2.
      functions: numbers from 1 to 24.
      seed: of the stream.
      half_width: of the box.

    Raises:
      ValueError: a number out of range.
    """
    for function in functions:
        _check(function, dimension)
    drawn = dict(zip(FUNCTIONS, _metabox_stream(dimension, seed, float(half_width), max(functions)), strict=False))
    return [drawn[function] for function in functions]


def _metabox_stream(dimension: int, seed: int, half_width: float, last: int) -> Iterator[Instance]:
    rng = np.random.RandomState(seed)
    signs = np.array([-1.0, 1.0])
    for function in range(1, last + 1):
        shift = 0.8 * (rng.random_sample(dimension) * 2 * half_width - half_width)
        rotation = _householder_rotation(rng, dimension)
        f_opt = 100.0 * rng.randint(1, 26)
        outer, peaks = rotation, None
        match function:
            case 6 | 7 | 13 | 15 | 16 | 17 | 18 | 23:
                outer = _householder_rotation(rng, dimension)
            case 8:
                rotation = np.eye(dimension)
            case 20:
                shift = _SCHWEFEL / 2 * rng.choice(signs, size=dimension)
            case 21 | 22:
                peaks = _metabox_peaks(rng, shift, half_width, function)
                shift = peaks[0][0]
            case 24:
                shift = rng.choice(signs, size=dimension) * half_width / 4
                outer = _householder_rotation(rng, dimension)
        # Here the second rotation that is drawn comes first where the map is Q L R.
        first, second = (outer, rotation) if function in (6, 7, 13, 23, 24) else (rotation, outer)
        yield _assemble(function, shift, first, second, f_opt, half_width, peaks)


Peaks = tuple[np.ndarray, np.ndarray, np.ndarray]


def _assemble(
    function: int,
    shift: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    f_opt: float,
    half_width: float,
    peaks: Peaks | None,
) -> Instance:
    """Fold rotations and axis scales into the two maps.

    ``first`` is the rotation that the report calls R where it comes alone, and the outer one of ``Q L R``.
    """
    dimension = len(shift)
    axis = np.linspace(0, 1, dimension)

    def scales(condition: float | int) -> np.ndarray:
        return condition ** (axis / 2)

    inner, outer = first, np.eye(dimension)
    stretch = max(1.0, dimension**0.5 / 8)
    match function:
        case 4:
            shift = shift.copy()
            shift[::2] = np.abs(shift[::2])
        case 5:
            shift = np.where(shift < 0, -half_width, half_width)
        case 6 | 13:
            inner = first @ (scales(10)[:, None] * second)
        case 7:
            inner, outer = scales(10)[:, None] * second, first
        case 8:
            inner, shift = stretch * first, 0.75 * shift
        case 9 | 19:
            inner, shift = stretch * first, first.T @ np.full(dimension, 0.5 / stretch)
        case 12:
            outer = first
        case 15:
            outer = first @ (scales(10)[:, None] * second)
        case 16:
            outer = first @ (scales(0.01)[:, None] * second)
        case 17:
            outer = scales(10)[:, None] * second
        case 18:
            outer = scales(1000)[:, None] * second
        case 23 | 24:
            inner = first @ (scales(100)[:, None] * second)
    centres, curvatures, heights = np.zeros((_PEAKS, dimension)), np.zeros((_PEAKS, dimension)), np.zeros(_PEAKS)
    if peaks is not None:
        count = len(peaks[0])
        centres[:count], curvatures[:count], heights[:count] = peaks[0] @ first.T, *peaks[1:]
        shift = peaks[0][0]
    parts = (shift, f_opt, half_width, inner, outer, centres, curvatures, heights)
    return Instance(jnp.asarray(function, jnp.int32), *(jnp.asarray(part, float) for part in parts))


def _coco_uniform(seed: int, count: int) -> np.ndarray:
    """COCO's generator: Park and Miller's minimal standard with a shuffle of 32 entries."""
    state = max(abs(seed), 1)

    def step(state: int) -> int:
        state = 16807 * (state % 127773) - 2836 * (state // 127773)
        return state + 2147483647 if state < 0 else state

    table = [0] * 32
    for i in range(39, -1, -1):
        state = step(state)
        if i < 32:
            table[i] = state
    current = table[0]
    numbers = np.empty(count)
    for i in range(count):
        state = step(state)
        slot = current // 67108865
        current, table[slot] = table[slot], state
        numbers[i] = current / 2.147483647e9
    numbers[numbers == 0] = 1e-99
    return numbers


def _coco_normal(seed: int, count: int) -> np.ndarray:
    radius, angle = np.split(_coco_uniform(seed, 2 * count), 2)
    numbers = np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)
    numbers[numbers == 0] = 1e-99
    return numbers


def _coco_rotation(seed: int, dimension: int) -> np.ndarray:
    """Gram-Schmidt on the columns of a matrix of normal numbers."""
    columns = _coco_normal(seed, dimension * dimension).reshape(dimension, dimension)
    for i in range(dimension):
        for j in range(i):
            columns[i] -= (columns[i] @ columns[j]) * columns[j]
        columns[i] /= np.sqrt(columns[i] @ columns[i])
    return columns.T


def _coco_peaks(seed: int, dimension: int, function: int) -> Peaks:
    count, condition, spread = (101, 1000.0**0.5, 10.0) if function == 21 else (21, 1000.0, 9.8)
    order = np.argsort(_coco_uniform(seed, count - 1), kind="stable")
    conditions = np.concatenate([[condition], 1000.0 ** (order / (count - 2))])
    heights = np.concatenate([[10.0], np.linspace(1.1, 9.1, count - 1)])
    curvatures = np.empty((count, dimension))
    for i in range(count):
        order = np.argsort(_coco_uniform(seed + 1000 * i, dimension), kind="stable")
        curvatures[i] = conditions[i] ** (order / (dimension - 1) - 0.5)
    centres = spread * _coco_uniform(seed, count * dimension).reshape(count, dimension) - spread / 2
    centres[0] *= 0.8
    return centres, curvatures, heights


def _householder_rotation(rng: np.random.RandomState, dimension: int) -> np.ndarray:
    """A random rotation as a product of Householder reflections (Stewart 1980)."""
    product, signs = np.eye(dimension), np.ones(dimension)
    for n in range(1, dimension):
        x = rng.normal(size=dimension - n + 1)
        signs[n - 1] = np.sign(x[0])
        x[0] -= signs[n - 1] * np.sqrt(x @ x)
        columns = product[:, n - 1 :]
        product[:, n - 1 :] = columns - np.outer(columns @ x, 2 * x / (x @ x))
    signs[-1] = (-1) ** (1 - dimension % 2) * signs.prod()
    return signs[:, None] * product


def _metabox_peaks(rng: np.random.RandomState, shift: np.ndarray, half_width: float, function: int) -> Peaks:
    count, shrink, condition = (101, 1.0, 1e3) if function == 21 else (21, 0.98, 1e6)
    dimension = len(shift)
    centres = shrink * (rng.random_sample((count, dimension)) * 2 * half_width - half_width)
    centres[0] = shrink * shift
    roots = np.concatenate([[condition**0.5], 1000 ** rng.permutation(np.linspace(0, 1, count - 1))])
    curvatures = np.stack([rng.permutation(root ** np.linspace(-0.5, 0.5, dimension)) for root in roots])
    return centres, curvatures, np.concatenate([[10.0], np.linspace(1.1, 9.1, count - 1)])


def _check(function: int, dimension: int) -> None:
    if function not in FUNCTIONS:
        raise ValueError(f"BBOB functions are numbered 1 to 24, got {function}")
    if dimension < 2:
        raise ValueError(f"BBOB functions need at least 2 variables, got {dimension}")


def _axis(x: Array) -> Array:
    return jnp.linspace(0, 1, len(x), dtype=x.dtype)


def _oscillate(x: Array) -> Array:
    """``T_osz``: bumps on a logarithmic scale."""
    scale = jnp.log(jnp.where(x == 0, 1, jnp.abs(x)))
    first, second = jnp.where(x > 0, 10, 5.5), jnp.where(x > 0, 7.9, 3.1)
    bumps = 0.049 * (jnp.sin(first * scale) + jnp.sin(second * scale))
    return jnp.sign(x) * jnp.exp(scale + bumps)


def _skew(x: Array, beta: float) -> Array:
    """``T_asy``: stretches positive coordinates."""
    positive = jnp.maximum(x, 0)
    return jnp.where(x > 0, positive ** (1 + beta * _axis(x) * jnp.sqrt(positive)), x)


def _outside(x: Array, half_width: Array) -> Array:
    return jnp.sum(jnp.maximum(jnp.abs(x) - half_width, 0) ** 2)


def _round(x: Array) -> Array:
    return jnp.floor(x + 0.5)


def _mapped(p: Instance, x: Array) -> Array:
    return p.inner @ (x - p.x_opt)


def _ripples(z: Array) -> Array:
    return 10 * (len(z) - jnp.sum(jnp.cos(2 * jnp.pi * z))) + jnp.sum(z**2)


def _sphere(p: Instance, x: Array) -> Array:
    return jnp.sum(_mapped(p, x) ** 2)


def _ellipsoid(p: Instance, x: Array) -> Array:
    return jnp.sum(10 ** (6 * _axis(x)) * _oscillate(_mapped(p, x)) ** 2)


def _rastrigin_separable(p: Instance, x: Array) -> Array:
    return _ripples(10 ** (_axis(x) / 2) * _skew(_oscillate(_mapped(p, x)), 0.2))


def _bueche_rastrigin(p: Instance, x: Array) -> Array:
    z = _oscillate(_mapped(p, x))
    steep = (z > 0) & (jnp.arange(len(x)) % 2 == 0)
    return _ripples(10 ** (_axis(x) / 2) * jnp.where(steep, 10 * z, z)) + 100 * _outside(x, p.half_width)


def _linear_slope(p: Instance, x: Array) -> Array:
    slope = jnp.sign(p.x_opt) * 10 ** _axis(x)
    z = jnp.where(x * p.x_opt < p.half_width**2, x, p.x_opt)
    return jnp.sum((p.x_opt - z) * slope)


def _attractive_sector(p: Instance, x: Array) -> Array:
    z = _mapped(p, x)
    return _oscillate(jnp.sum(jnp.where(z * p.x_opt > 0, 100 * z, z) ** 2)) ** 0.9


def _step_ellipsoid(p: Instance, x: Array) -> Array:
    z = _mapped(p, x)
    stepped = p.outer @ jnp.where(jnp.abs(z) > 0.5, _round(z), _round(10 * z) / 10)
    bowl = jnp.sum(100 ** _axis(x) * stepped**2)
    return 0.1 * jnp.maximum(jnp.abs(z[0]) * 1e-4, bowl) + _outside(x, p.half_width)


def _rosenbrock(p: Instance, x: Array) -> Array:
    z = _mapped(p, x) + 1
    return jnp.sum(100 * (z[:-1] ** 2 - z[1:]) ** 2 + (z[:-1] - 1) ** 2)


def _discus(p: Instance, x: Array) -> Array:
    squares = _oscillate(_mapped(p, x)) ** 2
    return 1e6 * squares[0] + jnp.sum(squares[1:])


def _bent_cigar(p: Instance, x: Array) -> Array:
    squares = (p.outer @ _skew(_mapped(p, x), 0.5)) ** 2
    return squares[0] + 1e6 * jnp.sum(squares[1:])


def _sharp_ridge(p: Instance, x: Array) -> Array:
    z = _mapped(p, x)
    return z[0] ** 2 + 100 * jnp.sqrt(jnp.sum(z[1:] ** 2))


def _different_powers(p: Instance, x: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.abs(_mapped(p, x)) ** (2 + 4 * _axis(x))))


def _rastrigin(p: Instance, x: Array) -> Array:
    return _ripples(p.outer @ _skew(_oscillate(_mapped(p, x)), 0.2))


def _weierstrass(p: Instance, x: Array) -> Array:
    z = p.outer @ _oscillate(_mapped(p, x))
    order = jnp.arange(12, dtype=x.dtype)
    weight, frequency = 0.5**order, 3.0**order
    waves = jnp.sum(weight * jnp.cos(2 * jnp.pi * frequency * (z[:, None] + 0.5)), 1)
    lowest = jnp.sum(weight * jnp.cos(jnp.pi * frequency))
    return 10 * (jnp.mean(waves) - lowest) ** 3 + 10 / len(x) * _outside(x, p.half_width)


def _schaffers(p: Instance, x: Array) -> Array:
    z = p.outer @ _skew(_mapped(p, x), 0.5)
    square = z[:-1] ** 2 + z[1:] ** 2
    mean = jnp.mean(square**0.25 * (1 + jnp.sin(50 * square**0.1) ** 2))
    return mean**2 + 10 * _outside(x, p.half_width)


def _griewank_rosenbrock(p: Instance, x: Array) -> Array:
    z = _mapped(p, x) + 1
    s = 100 * (z[:-1] ** 2 - z[1:]) ** 2 + (z[:-1] - 1) ** 2
    return 10 * jnp.mean(s / 4000 + 1 - jnp.cos(s))


def _schwefel(p: Instance, x: Array) -> Array:
    twice = 2 * jnp.abs(p.x_opt)
    z = 2 * jnp.sign(p.x_opt) * x
    z = z.at[1:].add(0.25 * (z[:-1] - twice[:-1]))
    z = 100 * (10 ** (_axis(x) / 2) * (z - twice) + twice)
    lowest = 4.189828872724339
    return lowest - 0.01 * jnp.mean(z * jnp.sin(jnp.sqrt(jnp.abs(z)))) + 100 * _outside(z / 100, p.half_width)


def _gallagher(p: Instance, x: Array) -> Array:
    distance = jnp.sum(p.peak_scales * (p.inner @ x - p.peaks) ** 2, 1)
    highest = jnp.max(p.peak_heights * jnp.exp(-0.5 / len(x) * distance))
    return _oscillate(10 - highest) ** 2 + _outside(x, p.half_width)


def _katsuura(p: Instance, x: Array) -> Array:
    z = _mapped(p, x)
    dimension = len(x)
    power = 2.0 ** jnp.arange(1, 33, dtype=x.dtype)
    scaled = z[:, None] * power
    rough = jnp.sum(jnp.abs(scaled - _round(scaled)) / power, 1)
    logarithm = 10 / dimension**1.2 * jnp.sum(jnp.log1p(jnp.arange(1, dimension + 1) * rough))
    return 10 / dimension**2 * jnp.expm1(logarithm) + _outside(x, p.half_width)


def _lunacek(p: Instance, x: Array) -> Array:
    dimension = len(x)
    near = p.half_width / 2
    shape = 1 - 1 / (2 * (dimension + 20) ** 0.5 - 8.2)
    far = -jnp.sqrt((near**2 - 1) / shape)
    y = 2 * jnp.sign(p.x_opt) * x
    bowls = jnp.minimum(jnp.sum((y - near) ** 2), dimension + shape * jnp.sum((y - far) ** 2))
    waves = 10 * (dimension - jnp.sum(jnp.cos(2 * jnp.pi * (p.inner @ (y - near)))))
    return bowls + waves + 1e4 * _outside(x, p.half_width)


_FORMULAS: tuple[Callable[[Instance, Array], Array], ...] = (
    _sphere,
    _ellipsoid,
    _rastrigin_separable,
    _bueche_rastrigin,
    _linear_slope,
    _attractive_sector,
    _step_ellipsoid,
    _rosenbrock,
    _rosenbrock,
    _ellipsoid,
    _discus,
    _bent_cigar,
    _sharp_ridge,
    _different_powers,
    _rastrigin,
    _weierstrass,
    _schaffers,
    _schaffers,
    _griewank_rosenbrock,
    _schwefel,
    _gallagher,
    _gallagher,
    _katsuura,
    _lunacek,
)
