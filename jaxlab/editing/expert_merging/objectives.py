"""What a merged model should do on unlabelled inputs: behave like each expert on that expert's own.

For inputs x of expert k, teacher θ_k and student θ(α), with hidden states h_j of the blocks j in S and logits z ::

    H_k = (1/|S|) Σ_j mean (h_j(x; θ(α)) - h_j(x; θ_k))²        Z_k = T² mean KL(softmax(z_k/T) ‖ softmax(z/T))

are the parts "hidden" and "logits" of `Alignment`. The teacher's outputs are computed once, with `Alignment.target`.
`Entropy`, the objective of AdaMerging (Yang et al. 2024, arXiv 2310.02575), needs no teacher.

A network enters as ``forward(params, batch) -> (logits, hiddens)``: logits ``[b, ..., v]``, hiddens a sequence of
``[b, ..., d]`` (or an array with one more axis in front), where ``...`` are positions, or nothing for a classifier.

All means are over the positions that the mask counts, then over features; each input counts alike, however long.
Everything is computed in float32.

Reference: section 3 of Zhang et al. 2026, Expert Merging, arXiv 2509.25712.

Deviations from the paper:

1. Hidden states are compared by the mean of squares over features, as in the authors' code, not by the sum: the weight
   then suits any width.
2. Logits are compared by the divergence. The authors' code has the cross-entropy, which differs by a constant.
3. For large vocabularies ``top_k`` keeps the teacher's k largest logits and the mass of all others together; the
   divergence is then that of k + 1 outcomes, a lower bound.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

__all__ = ["Alignment", "Entropy", "Forward", "Objective", "Rows"]

Forward = Callable[[Any, Any], tuple[Array, Any]]
"""``forward(params, batch) -> (logits, hiddens)``."""


class Rows(NamedTuple):
    """Inputs, with a leading axis for each.

    Attributes:
      batch: what the network takes.
      mask: weight of each position, ``[n, ...]``.
      target: what the objective keeps of the teacher.
    """

    batch: PyTree
    mask: Float[Array, "n ..."]
    target: PyTree


@runtime_checkable
class Objective(Protocol):
    """What coefficients are trained on. Hashable: equal objectives share a compiled program."""

    @property
    def forward(self) -> Forward:
        """The network."""

    @property
    def part_weights(self) -> dict[str, float]:
        """Factor of every part."""

    def target(self, params: PyTree, batch: PyTree) -> PyTree:
        """What to keep of an expert's outputs on its inputs, with a leading axis of n."""

    def __call__(self, params: PyTree, rows: Rows) -> dict[str, Float[Array, " n"]]:
        """The parts of the loss of each input."""


@dataclass(frozen=True)
class Alignment:
    """Hidden states and logits like those of the expert.

    Attributes:
      forward: the network. Keep one function object: compiled programs are found by it.
      hidden_layers: which of its hidden states to compare, all by default.
      temperature: T; 1 as in the authors' command.
      top_k: logits of the teacher that are kept; None for all.
      teacher_dtype: in which its outputs are kept.
      hidden_weight: factor of "hidden"; 1 as in the authors' code.
      logit_weight: factor of "logits".

    Raises:
      ValueError: a temperature that is not positive, ``top_k`` below one, a negative weight, or both weights 0.
    """

    forward: Forward
    hidden_layers: tuple[int, ...] | None = None
    temperature: float = 1.0
    top_k: int | None = None
    teacher_dtype: str = "float32"
    hidden_weight: float = field(default=1.0, compare=False)
    logit_weight: float = field(default=1.0, compare=False)

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        weights = (self.hidden_weight, self.logit_weight)
        if not min(weights) >= 0 or not max(weights) > 0:
            raise ValueError(f"hidden_weight and logit_weight must not be negative, nor both 0; got {weights}")

    @property
    def part_weights(self) -> dict[str, float]:
        """Factors of the two parts."""
        return {"hidden": self.hidden_weight, "logits": self.logit_weight}

    def target(self, params: PyTree, batch: PyTree) -> dict[str, Any]:
        """Hidden states and logits (over T, the largest of a position at 0) of a teacher.

        Raises:
          ValueError: hidden layers that the network does not give, or ``top_k`` that is not below the vocabulary.
        """
        logits, hiddens = self.forward(params, batch)
        scaled = logits.astype(jnp.float32) / self.temperature
        scaled = scaled - scaled.max(-1, keepdims=True)
        kept: dict[str, Any] = {"hidden": [h.astype(self.teacher_dtype) for h in self._chosen(hiddens)]}
        if self.top_k is None:
            return kept | {"logits": scaled.astype(self.teacher_dtype)}
        if self.top_k >= logits.shape[-1]:
            raise ValueError(f"top_k must be below the {logits.shape[-1]} outcomes, got {self.top_k}")
        _, indices = jax.lax.top_k(scaled, self.top_k)
        return kept | {"logits": _coarse(scaled, indices).astype(self.teacher_dtype), "indices": indices}

    def __call__(self, params: PyTree, rows: Rows) -> dict[str, Float[Array, " n"]]:
        """``H`` and ``Z`` of each input."""
        logits, hiddens = self.forward(params, rows.batch)
        scaled = logits.astype(jnp.float32) / self.temperature
        if "indices" in rows.target:
            scaled = _coarse(scaled, rows.target["indices"])
        teacher = rows.target["logits"].astype(jnp.float32)
        if scaled.shape != teacher.shape:
            raise ValueError(f"teacher and student must share a vocabulary, got logits {teacher.shape}, {scaled.shape}")
        divergence = optax.losses.kl_divergence_with_log_targets(
            jax.nn.log_softmax(scaled), jax.nn.log_softmax(teacher)
        )
        parts = {"logits": self.temperature**2 * _mean(divergence, rows.mask)}
        pairs = list(zip(self._chosen(hiddens), rows.target["hidden"], strict=True))
        squares = [
            _mean(jnp.square(ours.astype(jnp.float32) - theirs.astype(jnp.float32)).mean(-1), rows.mask)
            for ours, theirs in pairs
        ]
        return parts | {"hidden": sum(squares, start=jnp.zeros_like(parts["logits"])) / max(len(pairs), 1)}

    def _chosen(self, hiddens: Any) -> list[Array]:
        count = len(hiddens)
        wanted = range(count) if self.hidden_layers is None else self.hidden_layers
        if any(not -count <= i < count for i in wanted):
            raise ValueError(f"hidden_layers must be among the {count} that forward gives, got {self.hidden_layers}")
        return [hiddens[i] for i in wanted]


@dataclass(frozen=True)
class Entropy:
    """AdaMerging: predictions that are sure of themselves, on the same inputs.

    Attributes:
      forward: the network.
    """

    forward: Forward

    @property
    def part_weights(self) -> dict[str, float]:
        """The one part."""
        return {"entropy": 1.0}

    def target(self, params: PyTree, batch: PyTree) -> tuple[()]:
        """Nothing."""
        return ()

    def __call__(self, params: PyTree, rows: Rows) -> dict[str, Float[Array, " n"]]:
        """Entropy of the predictions for each input, in nats."""
        logs = jax.nn.log_softmax(self.forward(params, rows.batch)[0].astype(jnp.float32))
        return {"entropy": _mean(-(jnp.exp(logs) * logs).sum(-1), rows.mask)}


def _mean(of_positions: Float[Array, "n ..."], mask: Array) -> Float[Array, " n"]:
    """Mean over the positions that count, 0 where none does."""
    if mask.shape != of_positions.shape:
        raise ValueError(f"a mask must have the positions of the outputs, {of_positions.shape}; got {mask.shape}")
    axes = tuple(range(1, mask.ndim))
    total = mask.sum(axes)
    return jnp.where(mask > 0, of_positions * mask, 0.0).sum(axes) / jnp.where(total > 0, total, 1.0)


def _coarse(logits: Float[Array, "... v"], indices: Array) -> Array:
    """The logits at these indices, and one that stands for all others together."""
    others = jnp.put_along_axis(logits, indices, -jnp.inf, axis=-1, inplace=False)
    rest = jax.nn.logsumexp(others, axis=-1, keepdims=True)
    return jnp.concatenate([jnp.take_along_axis(logits, indices, axis=-1), rest], -1)
