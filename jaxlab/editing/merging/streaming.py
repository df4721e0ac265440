"""The tensors of several checkpoints, read ahead in pieces and merged as they come.

A `Stream` goes over the tensors of a base and its experts in order. A tensor that is merged number by number comes in
pieces of `PIECE` numbers, padded to a power of two, so that a few compiled programs serve all tensors, a piece stays in
the caches, and the next one is copied from the mapped files while this one is merged. A tensor that its method needs
whole comes whole, and the next is not read before it is done.
"""

import collections
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxlab.editing.merging.dare import Dare
from jaxlab.editing.merging.experts import Base, Expert
from jaxlab.editing.merging.magnitude import kept_counts, magnitude_halves, streamed_threshold
from jaxlab.editing.merging.method import MergeMethod, widened
from jaxlab.editing.merging.ties import Ties, TiesStatistics

__all__ = ["PIECE", "Stream", "TensorSummary"]

PIECE = 2**18
"""Numbers of a tensor that are merged at once."""


@dataclasses.dataclass(frozen=True)
class TensorSummary:
    """What happened to one tensor.

    Attributes:
      merged: whether it was; otherwise it is the base's.
      base: ‖θ₀‖; None for a tensor that was not looked into, or is not finite and kept.
      vectors: ‖τ_k‖; None for an expert that has no such tensor, or one of another shape.
      change: norm of what was added, as it is in the dtype of the result.
      coefficients: what τ_k were multiplied with.
      thresholds: magnitudes below which numbers were trimmed, infinite for an expert of which nothing is kept; None
        where none were.
    """

    merged: bool
    base: float | None
    vectors: tuple[float | None, ...]
    change: float = 0.0
    coefficients: tuple[float, ...] = ()
    thresholds: tuple[float, ...] | None = None


class Stream:
    """Reads a base and its experts, and merges them.

    Args:
      base: opened.
      experts: opened; `jaxlab.editing.merging.experts.check_experts` says whether they fit.
      methods: how each tensor is merged; those that are not in it are the base's. Tensors with the same `Ties` of scope
        "global" are trimmed and elect together.
      dtype: of the floating-point tensors that are made; None keeps the base's.
      key: of all draws.
      progress: called with the bytes read so far, and those of all passes.

    Attributes:
      written: shape and dtype of all tensors that are made, by name.

    Raises:
      ValueError: a name that is not in the base or holds no floating-point numbers, a key that is missing, a method
        that needs calibration.
    """

    def __init__(
        self,
        base: Base,
        experts: Sequence[Expert],
        methods: Mapping[str, MergeMethod],
        *,
        dtype: str | None = None,
        key: Key[Array, ""] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._base, self._experts, self._methods, self._key, self._progress = base, experts, methods, key, progress
        self._specs = base.tensors.specs
        _check(self._specs, methods, key)
        self.written = {
            name: jax.ShapeDtypeStruct(spec.shape, dtype if dtype and _is_floating(spec) else spec.dtype)
            for name, spec in self._specs.items()
            if name not in base.superfluous
        }
        # Adapters are multiplied out once for all pieces of a tensor; of two, since the next may be read ahead.
        self._read = [functools.lru_cache(2)(e.read) if e.is_difference else e.read for e in experts]
        self._jobs = {name: self._jobs_of(name) for name in self.written}
        self._together: dict[int, TiesStatistics] = {}
        passes = {name: 1 + _passes(methods.get(name)) for name in self.written}
        self._done = 0
        self._expected = sum(passes[name] * job.bytes for name, jobs in self._jobs.items() for job in jobs)

    def look_ahead(self) -> None:
        """Go over the tensors that are trimmed together; what `merge` does itself where it was not done before."""
        groups: dict[int, tuple[Ties, list[str]]] = {}
        for name, method in self._methods.items():
            if isinstance(method, Ties) and method.scope == "global":
                groups.setdefault(id(method), (method, []))[1].append(name)
        for group, (method, names) in groups.items():
            if group not in self._together:
                self._together[group] = self.ties(method, names)

    def merge(self) -> Iterator[tuple[str, np.ndarray, TensorSummary]]:
        """Merge or copy tensors one after the other.

        Yields:
          Name, tensor and what happened to it.

        Raises:
          ValueError: a base or an expert with numbers that are not finite where it is merged.
        """
        self.look_ahead()
        everything = self._all([job for jobs in self._jobs.values() for job in jobs])
        for name, spec in self.written.items():
            method, jobs = self._methods.get(name), self._jobs[name]
            pieces = itertools.islice(everything, len(jobs))
            if method is None or not jobs:
                tensor = np.asarray(self._base.tensors[name], spec.dtype)
                yield name, tensor, self._summary(name, self._measure(pieces))
                continue
            own = self._together.get(id(method))
            if own is None and isinstance(method, Ties):
                own = self.ties(method, [name])
            elif isinstance(method, Dare):
                own = method.statistics_of(len(self._experts))
            tensor, squares = self._merge_pieces(spec, method, own, pieces)
            yield name, tensor, self._summary(name, squares, method, own)

    def ties(self, method: Ties, names: Collection[str]) -> TiesStatistics:
        """What `Ties.measure` gives, of tensors that are read twice, and once more for an election by majority."""
        jobs = [job for name in names for job in self._jobs[name]]

        def magnitudes() -> Iterator[np.ndarray]:
            for job, start, others in self._all(jobs):
                halves = _magnitudes(start, others, differences=self._differences(job))
                yield np.asarray(halves)[..., : job.numbers]

        total = sum(job.numbers for job in jobs)
        thresholds = streamed_threshold(magnitudes, kept_counts(method.density, total, len(self._experts)))
        if method.election == "mergekit":
            return TiesStatistics(thresholds, 1)
        ballots = (
            _ballot(method, start, others, thresholds, differences=self._differences(job))
            for job, start, others in self._all(jobs)
        )
        return TiesStatistics(thresholds, int(np.sign(sum(int(ballot) for ballot in ballots))))

    def _jobs_of(self, name: str) -> list["_Job"]:
        """What to read of a tensor: nothing where no expert has it, or it cannot differ."""
        spec, method = self._specs[name], self._methods.get(name)
        known = [e.specs.get(name) for e in self._experts]
        present = tuple(k for k, other in enumerate(known) if other is not None and other.shape == spec.shape)
        if not present or not _is_floating(spec) or not spec.size:
            return []
        number = spec.dtype.itemsize + sum(self._experts[k].specs[name].dtype.itemsize for k in present)
        whole = method is not None and not method.blockwise
        step = spec.size if whole else PIECE
        ends = [(start, min(start + step, spec.size)) for start in range(0, spec.size, step)]
        return [_Job(name, start, stop, present, whole, (stop - start) * number) for start, stop in ends]

    def _differences(self, job: "_Job") -> tuple[bool, ...]:
        """For each expert whether what was read of it is a change: zero where it has no such tensor."""
        return tuple(expert.is_difference or k not in job.experts for k, expert in enumerate(self._experts))

    def _all(self, jobs: Sequence["_Job"]) -> Iterator["_Read"]:
        """What jobs read, some of it before it is asked for."""
        left, waiting, held = collections.deque(jobs), collections.deque[Future["_Read"]](), 0
        with ThreadPoolExecutor(1) as reader:
            while left or waiting:
                while left and (not held or held + left[0].numbers <= _AHEAD):
                    job = left.popleft()
                    waiting.append(reader.submit(self._load, job))
                    held += job.numbers
                read = waiting.popleft().result()
                self._done += read[0].bytes
                if self._progress is not None:
                    self._progress(self._done, self._expected)
                yield read
                held -= read[0].numbers

    def _load(self, job: "_Job") -> "_Read":
        """The piece of the base and of each expert, on the device."""
        padded = job.numbers if job.whole else max(_SMALLEST, 1 << (job.numbers - 1).bit_length())
        shape = self._specs[job.name].shape if job.whole else (padded,)

        def put(tensor: np.ndarray) -> Array:
            if job.whole:
                return jax.device_put(tensor)
            part = tensor.reshape(-1)[job.start : job.stop]
            return jax.device_put(part if len(part) == padded else np.pad(part, (0, padded - len(part))))

        others = [
            put(read(job.name)) if k in job.experts else jnp.zeros(shape, jnp.float32)
            for k, read in enumerate(self._read)
        ]
        return job, put(self._base.tensors[job.name]), tuple(others)

    def _merge_pieces(
        self, spec: Any, method: MergeMethod, statistics: Any, pieces: Iterator["_Read"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tensor, and sums of squares of the base, of what was added and of each vector."""
        tensor, squares = np.empty(spec.size, spec.dtype), np.zeros(2 + len(self._experts))
        waiting: collections.deque[tuple[_Job, Array, Array]] = collections.deque()

        def collect() -> None:
            job, merged, of_piece = waiting.popleft()
            tensor[job.start : job.stop] = np.asarray(merged).reshape(-1)[: job.stop - job.start]
            squares[:] += np.asarray(of_piece)

        for job, start, others in pieces:
            place = np.array([zlib.crc32(job.name.encode()), job.start // PIECE], np.uint32)
            these = self._differences(job)
            merged = _merge(method, start, others, statistics, self._key, place, differences=these, dtype=spec.dtype)
            waiting.append((job, merged, _squares(start, merged, others, differences=these)))
            if len(waiting) > 1:  # one is computed while the one before is put in its place
                collect()
        while waiting:
            collect()
        return tensor.reshape(spec.shape), squares

    def _measure(self, pieces: Iterator["_Read"]) -> np.ndarray | None:
        """Sums of squares of a tensor that is not merged; None where none was read."""
        found = [_squares(start, None, others, differences=self._differences(job)) for job, start, others in pieces]
        return np.asarray(np.sum(found, axis=0, dtype=np.float64)) if found else None

    def _summary(
        self, name: str, squares: np.ndarray | None, method: MergeMethod | None = None, statistics: Any = None
    ) -> TensorSummary:
        if squares is None:
            return TensorSummary(False, None, (None,) * len(self._experts))
        base, change, *vectors = (float(norm) for norm in np.sqrt(squares))
        if method is not None:
            sources = ["the base", *(f"expert {expert.name}" for expert in self._experts)]
            for source, norm in zip(sources, (base, *vectors), strict=True):
                if not math.isfinite(norm):
                    raise ValueError(f"{name} of {source} holds numbers that are not finite (or too large to square)")
            if not math.isfinite(change):
                raise ValueError(f"{name}: what {type(method).__name__} makes of it is not finite")
        # Masks that are kept may hold infinities: they have no length.
        finite = [norm if math.isfinite(norm) else None for norm in vectors]
        shape = self._specs[name].shape
        known = [e.is_difference or (name in e.specs and e.specs[name].shape == shape) for e in self._experts]
        thresholds = tuple(map(float, statistics.thresholds)) if isinstance(statistics, TiesStatistics) else None
        return TensorSummary(
            merged=method is not None,
            base=base if math.isfinite(base) else None,
            vectors=tuple(norm if there else None for norm, there in zip(finite, known, strict=True)),
            change=change,
            coefficients=() if method is None else tuple(method.coefficients(len(self._experts))),
            thresholds=thresholds,
        )


@dataclasses.dataclass(frozen=True)
class _Job:
    """Numbers ``[start, stop)`` of a tensor, or all of it in its own shape, of the base and experts that have it."""

    name: str
    start: int
    stop: int
    experts: tuple[int, ...]
    whole: bool
    bytes: int

    @property
    def numbers(self) -> int:
        return self.stop - self.start


_Read = tuple[_Job, Array, tuple[Array, ...]]
_AHEAD = 3 * PIECE  # numbers of a model that may be in memory, unless a single tensor is more
_SMALLEST = 2**10  # numbers that a piece is padded to


def _check(specs: Mapping[str, Any], methods: Mapping[str, MergeMethod], key: Any) -> None:
    for name, method in methods.items():
        if name not in specs:
            raise ValueError(f"{name} shall be merged, but the base has no such tensor")
        if not _is_floating(specs[name]):
            raise ValueError(f"{name} shall be merged, but holds {specs[name].dtype}")
        if method.needs_key and key is None:
            raise ValueError(f"{type(method).__name__} draws: give a key")
        if method.needs_calibration:
            raise ValueError(f"{type(method).__name__} needs inputs of every layer, which files do not have")


def _is_floating(spec: Any) -> bool:
    return jnp.issubdtype(spec.dtype, jnp.floating)


def _passes(method: MergeMethod | None) -> int:
    """How often tensors are read before they are merged."""
    return (3 if method.election == "release" else 2) if isinstance(method, Ties) else 0


@functools.partial(jax.jit, static_argnames=("differences", "dtype"))
def _merge(
    method: MergeMethod,
    start: Array,
    others: tuple[Array, ...],
    statistics: Any,
    key: Key[Array, ""] | None,
    place: Array,
    *,
    differences: tuple[bool, ...],
    dtype: Any,
) -> Array:
    vectors = _vectors(start, others, differences)
    if key is not None:
        key = jax.random.fold_in(jax.random.fold_in(key, place[0]), place[1])
    change = method.combine(jnp.stack(vectors), key=key, statistics=statistics)
    return (widened(start) + change).astype(jax.dtypes.canonicalize_dtype(dtype))


# Apart from the program above, which would form all vectors in memory for it: to read them again takes less time.
@functools.partial(jax.jit, static_argnames="differences")
def _squares(start: Array, merged: Array | None, others: tuple[Array, ...], *, differences: tuple[bool, ...]) -> Array:
    change = jnp.zeros(()) if merged is None else widened(merged) - widened(start)
    arrays = (widened(start), change, *_vectors(start, others, differences))
    return jnp.stack([jnp.vdot(array, array, precision="highest") for array in arrays]).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="differences")
def _magnitudes(start: Array, others: tuple[Array, ...], *, differences: tuple[bool, ...]) -> Array:
    return magnitude_halves(jnp.stack(_vectors(start, others, differences)))


@functools.partial(jax.jit, static_argnames="differences")
def _ballot(method: Ties, start: Array, others: Any, thresholds: Array, *, differences: tuple[bool, ...]) -> Array:
    return method.ballot(jnp.stack(_vectors(start, others, differences)), thresholds)


def _vectors(start: Array, others: tuple[Array, ...], differences: tuple[bool, ...]) -> list[Array]:
    pairs = zip(others, differences, strict=True)
    return [widened(other) if difference else widened(other) - widened(start) for other, difference in pairs]
