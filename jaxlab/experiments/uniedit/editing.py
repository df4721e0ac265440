"""Every way to edit the right half of a pair, scored by what happens to the left half and by a classifier.

All baselines get at least as many calls of the model as Uni-Edit's 28 (RF-Inversion its authors' 56), and their
settings are swept as Uni-Edit's strength is: each family is scored on two sets of pairs, chosen on the first and
reported on the second.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlab import flow
from jaxlab.experiments.uniedit.data import Pairs

__all__ = ["STRENGTHS", "Rows", "Setting", "background_at", "choose", "settings", "strip"]

Rows = Literal["few", "claims", "all"]

STEPS = 15
DELAY_RATE = 0.6
CALLS = 28  # 3 floor(0.6 * 15) + 1
# Closer where accuracy rises; 5 is the paper's, for models of another size.
STRENGTHS = (0.0, 0.25, 0.35, 0.5, 0.7, 1.0, 2.0, 5.0)
_RF_STEPS = 28


class Setting(NamedTuple):
    """One way to edit.

    Attributes:
      family: whose settings are chosen among one another.
      label: of the setting within its family.
      calls: of the model, a call on a pair of conditions counting two.
      edit: ``edit(velocity, key, images, source, target, null) -> images``; compiled.
      value: the strength, for families that are swept along it; NaN for others.
    """

    family: str
    label: str
    calls: int
    edit: Callable[..., Array]
    value: float = math.nan


def settings(rows: Rows) -> tuple[Setting, ...]:
    """The settings to score: a few of every family of the claims, all of these, or rows that no claim needs too."""
    wide, few = rows == "all", rows == "few"
    found = [
        Setting("sdedit", f"{rate:g}", CALLS, functools.partial(_sdedit, rate=rate))
        for rate in ((0.6,) if few else (0.4, 0.6, 0.8))
    ]
    pulls = [(0.5, 0.5)] if few else [(0.9, 0.25), (0.5, 0.5), (0.9, 0.5)]
    found += [
        Setting("rf_inversion", f"{eta:g}/{stop:g}", 2 * _RF_STEPS, functools.partial(_rf_inversion, eta, stop=stop))
        for eta, stop in pulls + ([(0.7, 0.5), (1.0, 0.25)] if wide else [])
    ]
    delays = [(rate, from_source) for from_source in (False, True) for rate in (0.6, 0.8, 1.0)]
    found += [
        Setting(
            "delayed_injection",
            f"{rate:g}/{'source' if from_source else 'null'}",
            2 * math.ceil(CALLS / 2) + 1,
            functools.partial(_delayed, rate=rate, from_source=from_source),
        )
        for rate, from_source in (delays[:1] if few else delays)
    ]
    strengths = (0.5, 5.0) if few else STRENGTHS
    found += [_swept("uni_edit", "abs", strength) for strength in strengths]
    found += [_swept("uni_edit_constant_mask", "constant", strength) for strength in strengths]
    if few:
        return tuple(found)
    found += [_swept("uni_edit_null", "abs", s, from_source=False) for s in (STRENGTHS if wide else (0.5, 1.0))]
    if wide:
        found += [_swept("uni_edit_mask_of_ones", "ones", s) for s in (0.0, 0.25, 0.5, 1.0)]
        found += [_swept("uni_edit_true_region", "region", s) for s in (0.0, 0.25, 0.5, 1.0)]
        found += [_swept("uni_edit_0.8", "abs", s, rate=0.8) for s in (0.25, 0.5, 1.0)]
    found += [
        Setting("flow_edit", f"{n_max}", 2 * n_max, functools.partial(_flow_edit, n_max=n_max))
        for n_max in ((17, 24) if wide else (17,))
    ]
    found.append(Setting("fireflow_to_target", "1", 2 * (STEPS + 1), _fireflow))
    return tuple(found)


def choose(accuracy: np.ndarray, background: np.ndarray, wanted: float) -> int:
    """The setting with the best background among those that reach the accuracy, otherwise the most accurate one."""
    reached = accuracy >= wanted
    return int(np.argmax(np.where(reached, background, -np.inf)) if reached.any() else np.argmax(accuracy))


def background_at(accuracy: np.ndarray, background: np.ndarray, wanted: float) -> float:
    """Background in decibels where a sweep along growing strength first reaches an accuracy, interpolated; or NaN."""
    for k in range(len(accuracy)):
        if accuracy[k] >= wanted:
            if k == 0:
                return float(background[0])
            share = (wanted - accuracy[k - 1]) / (accuracy[k] - accuracy[k - 1])
            return float(background[k - 1] + share * (background[k] - background[k - 1]))
    return math.nan


def strip(velocity: Any, pairs: Pairs, null: Array, strength: float) -> tuple[np.ndarray, np.ndarray]:
    """Edits, and the mask of every step first the noisiest, of a few pairs."""
    edit = jax.jit(flow.uni_edit, static_argnames=("return_masks",))
    found = edit(
        velocity,
        jnp.asarray(pairs.images),
        flow.time_grids.uniform(STEPS),
        source=jnp.asarray(pairs.source),
        target=jnp.asarray(pairs.target),
        inversion=jnp.asarray(pairs.source),
        strength=strength,
        return_masks=True,
    )
    return np.asarray(found.z), np.asarray(found.masks)


def _swept(family: str, mask: str, strength: float, *, from_source: bool = True, rate: float = DELAY_RATE) -> Setting:
    calls = 3 * flow.delayed_steps(flow.time_grids.uniform(STEPS), rate) + 1
    edit = functools.partial(_uni_edit, strength, mask=mask, from_source=from_source, rate=rate)
    return Setting(family, f"{strength:g}", calls, edit, strength)


@functools.partial(jax.jit, static_argnames=("mask", "from_source", "rate"))
def _uni_edit(
    strength: Any,
    velocity: Any,
    key: Array,
    images: Array,
    source: Array,
    target: Array,
    null: Array,
    *,
    mask: str,
    from_source: bool,
    rate: float,
) -> Array:
    return flow.uni_edit(
        velocity,
        images,
        flow.time_grids.uniform(STEPS),
        source=source,
        target=target,
        inversion=source if from_source else null,
        strength=strength,
        delay_rate=rate,
        mask_fn=_MASKS[mask],
    ).z


def _constant(difference: Array) -> Array:
    """The mean of the mask at every place: the same guidance, without the region."""
    mask = flow.velocity_mask(difference)
    return jnp.broadcast_to(mask.mean((1, 2, 3), keepdims=True), mask.shape)


def _region(difference: Array) -> Array:
    width = difference.shape[2]
    right = (jnp.arange(width) >= width // 2).astype(difference.dtype)
    return jnp.broadcast_to(right[:, None], difference[..., :1].shape)


_MASKS: dict[str, Callable[[Array], Array] | None] = {
    "abs": None,
    "constant": _constant,
    "ones": lambda difference: jnp.ones_like(difference[..., :1]),
    "region": _region,
}


@functools.partial(jax.jit, static_argnames=("rate",))
def _sdedit(
    velocity: Any, key: Array, images: Array, source: Array, target: Array, null: Array, *, rate: float
) -> Array:
    grid = flow.time_grids.uniform(math.ceil(CALLS / rate))
    return flow.sdedit(key, velocity, images, grid, target, delay_rate=rate)


@functools.partial(jax.jit, static_argnames=("rate", "from_source"))
def _delayed(
    velocity: Any,
    key: Array,
    images: Array,
    source: Array,
    target: Array,
    null: Array,
    *,
    rate: float,
    from_source: bool,
) -> Array:
    grid = flow.time_grids.uniform(math.ceil(CALLS / 2 / rate))
    inversion = source if from_source else null
    return flow.delayed_injection(velocity, images, grid, target=target, inversion=inversion, delay_rate=rate)


@functools.partial(jax.jit, static_argnames=("stop",))
def _rf_inversion(
    eta: Any,
    velocity: Any,
    key: Array,
    images: Array,
    source: Array,
    target: Array,
    null: Array,
    *,
    stop: float,
) -> Array:
    grid = flow.time_grids.uniform(_RF_STEPS)
    noise = flow.rf_inversion_invert(key, velocity, images, grid, null)
    return flow.rf_inversion_edit(velocity, noise, images, grid, target, eta=eta, stop=stop)


@functools.partial(jax.jit, static_argnames=("n_max",))
def _flow_edit(
    velocity: Any, key: Array, images: Array, source: Array, target: Array, null: Array, *, n_max: int
) -> Array:
    grid = flow.time_grids.uniform(28)
    return flow.flow_edit(key, velocity, images, grid, source=source, target=target, n_max=n_max)


@jax.jit
def _fireflow(velocity: Any, key: Array, images: Array, source: Array, target: Array, null: Array) -> Array:
    grid = flow.time_grids.uniform(STEPS)
    noise = flow.invert(velocity, images, grid, source, method="fireflow")
    return flow.sample(velocity, noise, grid, target, method="fireflow")
