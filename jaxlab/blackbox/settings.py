"""Settings of ABOM: ten switches between the paper and its released code, three presets, and the checks of both."""

from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Real

from jaxlab.blackbox.operators import Structure

__all__ = ["ABOM", "Bound", "check_settings", "checked_box", "is_concrete"]

Scalar = int | float | Real[Array, ""]
Bound = Real[Array, " _"] | Real[np.ndarray, " _"]


class ABOM(flax.struct.PyTreeNode):
    """Settings of the search. Numbers may be traced, so that a vmap runs over them; the other fields are static.

    The defaults are the released code's (github.com/xiaofangxd/ABOM); the paper's differ in the fields marked with *.

    Attributes:
      population_size: ``n``; the paper's 20 (the released code has 16).
      structure: of the operators*.
      crossover_dropout: ``p_C``; about ``1 - p_C`` of the variables move.
      mutation_dropout: ``p_M``.
      learning_rate: of the operators' weights; its scale is that of the coordinates.
      weight_decay: decoupled, AdamW's.
      horizon: generations over which the learning rate falls to zero along a cosine; None keeps it, as published. It
        needs to know the budget, and lets the search settle at its end.
      fitness: what the selection sees of the values: "rank" (0 is best), "zscore", or "raw"*.
      target: "best" pulls every offspring to the best survivor, "elite"* row i to the i-th.
      loss: "smooth_l1" (summed, beta 1) or "squared"*.
      fresh_optimizer: AdamW starts anew every generation, which makes it ``-lr sign(gradient)``*.
      optimizer: any optax transformation in place of AdamW; learning rate, decay and horizon are then its own.
      adapt: False keeps the initial weights.
      initial: "latin_hypercube" (the paper's) or "uniform" (the released code's).
      coordinate_range: maps the box to ``[-c, c]^d`` for the operators; None leaves it, as published. Learning rate and
        attention depend on the scale of coordinates: use 100 for a box like ``[0, 1]`` or one of unlike sides.
      patience: generations without a better value until the search restarts from new points and new weights with the
        best value on record; None never does.
    """

    crossover_dropout: Scalar = 0.95
    mutation_dropout: Scalar = 0.95
    learning_rate: Scalar = 1e-3
    weight_decay: Scalar = 1e-5
    coordinate_range: Scalar | None = None
    patience: Scalar | None = None
    horizon: Scalar | None = None
    population_size: int = flax.struct.field(pytree_node=False, default=20)
    structure: Structure = flax.struct.field(pytree_node=False, default=Structure())
    fitness: Literal["rank", "raw", "zscore"] = flax.struct.field(pytree_node=False, default="rank")
    target: Literal["best", "elite"] = flax.struct.field(pytree_node=False, default="best")
    loss: Literal["smooth_l1", "squared"] = flax.struct.field(pytree_node=False, default="smooth_l1")
    fresh_optimizer: bool = flax.struct.field(pytree_node=False, default=True)
    optimizer: optax.GradientTransformation | None = flax.struct.field(pytree_node=False, default=None)
    adapt: bool = flax.struct.field(pytree_node=False, default=True)
    initial: Literal["latin_hypercube", "uniform"] = flax.struct.field(pytree_node=False, default="latin_hypercube")

    @classmethod
    def released(cls, **changes: Any) -> "ABOM":
        """The published code, with the paper's population of 20."""
        return cls(**changes)

    @classmethod
    def paper(cls, **changes: Any) -> "ABOM":
        """The paper's equations, literally."""
        structure = Structure(
            attention_bias=False,
            perceptron_bias=True,
            dropout_on="hidden",
            mutation_input="crossed",
            mutation="gene",
            swap=False,
        )
        settings: dict[str, Any] = {
            "structure": structure,
            "fitness": "raw",
            "target": "elite",
            "loss": "squared",
            "fresh_optimizer": False,
        }
        return cls(**(settings | changes))

    @classmethod
    def jaxlab(cls, max_evaluations: int, **changes: Any) -> "ABOM":
        """What was best over the odd BBOB functions in 30 variables, in COCO's and in MetaBox's instances.

        The box is mapped to ``[-100, 100]^d``, and the learning rate, three times as high at first, falls to zero over
        the budget. Tried and not better: dropout of 0.5 to 0.99, ranges of 30 and 300, learning rates up to 3e-2, more
        weight decay, populations of 10 and 40, the elite as target, restarts after 25 or
        100 generations without progress.
        """
        size = changes.get("population_size", 20)
        settings: dict[str, Any] = {
            "coordinate_range": 100.0,
            "learning_rate": 3e-3,
            "horizon": max(max_evaluations // max(size, 1), 1),
        }
        return cls(**(settings | changes))


def is_concrete(*values: Any) -> bool:
    """Whether no value is being traced, so that a check of values can raise."""
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def check_settings(settings: ABOM) -> None:
    """Raise ``ValueError`` on the first setting out of range."""
    size, structure = settings.population_size, settings.structure
    if size < 4:
        raise ValueError(f"population_size must be at least 4, got {size}")
    if structure.swap and size % 2:
        raise ValueError(f"population_size must be even where halves are swapped, got {size}")
    for name in ("attention_width", "hidden_width"):
        width = getattr(structure, name)
        if width is not None and width < 1:
            raise ValueError(f"{name} must be at least 1, got {width}")
    for name in ("crossover_dropout", "mutation_dropout"):
        value = getattr(settings, name)
        if is_concrete(value) and not np.all((np.asarray(value) >= 0) & (np.asarray(value) <= 1)):
            raise ValueError(f"{name} must be in [0, 1], got {value}")
    for name in ("learning_rate", "coordinate_range", "patience", "horizon"):
        value = getattr(settings, name)
        if value is not None and is_concrete(value) and not np.all((np.asarray(value) > 0) & np.isfinite(value)):
            raise ValueError(f"{name} must be positive, got {value}")
    decay = settings.weight_decay
    if is_concrete(decay) and not np.all((np.asarray(decay) >= 0) & np.isfinite(decay)):
        raise ValueError(f"weight_decay must be at least 0, got {decay}")
    for name, known in _CHOICES.items():
        given = getattr(settings if hasattr(settings, name) else structure, name)
        if given not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")


_CHOICES = {
    "fitness": ("rank", "raw", "zscore"),
    "target": ("best", "elite"),
    "loss": ("smooth_l1", "squared"),
    "initial": ("latin_hypercube", "uniform"),
    "dropout_on": ("output", "hidden"),
    "mutation_input": ("parents", "crossed"),
    "mutation": ("vector", "gene"),
}


def checked_box(lower: Bound, upper: Bound) -> tuple[Array, Array]:
    """Bounds as floating-point arrays of one dtype.

    Raises:
      ValueError: a side that is empty, not finite or missing, also where it becomes so in the dtype of the search.
    """
    if np.ndim(lower) != 1 or np.shape(lower) != np.shape(upper):
        raise ValueError(f"bounds must be two lists of one length, got shapes {np.shape(lower)} and {np.shape(upper)}")
    if len(lower) == 0:
        raise ValueError("the box has no side; give bounds of at least one variable")
    lower, upper = (side if hasattr(side, "dtype") else np.asarray(side) for side in (lower, upper))
    dtype = jnp.result_type(lower, upper)
    dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)
    if is_concrete(lower, upper):
        with np.errstate(over="ignore", invalid="ignore"):
            low, high = np.asarray(lower).astype(dtype), np.asarray(upper).astype(dtype)
            bad = np.flatnonzero(~(np.isfinite(high - low) & (low < high)))
        if len(bad):
            side = f"[{np.asarray(lower)[bad[0]]}, {np.asarray(upper)[bad[0]]}]"
            raise ValueError(f"bounds must be finite with lower < upper in {dtype}; side {bad[0]} is {side}")
    return jnp.asarray(lower, dtype), jnp.asarray(upper, dtype)
