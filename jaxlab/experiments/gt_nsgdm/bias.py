r"""Three nodes that disagree: where normalisation without tracking comes to rest.

:math:`f_i(x) = (x - a_i)^2 / 2` with :math:`a = (0, 0, 9)` on the complete graph, without noise. The average loss has its
minimum at 3. Normalised local gradients are signs, and their average vanishes at the median 0, where the average gradient
is 3; multiply ``a`` by any number and that error grows with it. Clipping at 1 rests at 0.5: the two gradients that are not
clipped there balance the one that is.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxlab import optim

__all__ = ["STEP", "trajectories"]

STEP = 0.003
_CENTRES = (0.0, 0.0, 9.0)
_EVERY = 50


def trajectories(start: float, *, steps: int = 10_000) -> Mapping[str, Float[np.ndarray, " evaluations"]]:
    """The nodes' average every 50 steps, method by method, all from the same start."""
    mixer = optim.MeanMixer(len(_CENTRES))
    optimizers = {
        "dsgd": optim.dsgd(STEP, mixer),
        "dsgd_gclip": optim.dsgd_gclip(STEP, mixer, 1.0),
        "nsgd": optim.nsgd(STEP, mixer),
        "nsgdm": optim.nsgdm(STEP, mixer, 0.9),
        "gt_nsgd": optim.gt_nsgdm(STEP, mixer, 0.0),
        "gt_nsgdm": optim.gt_nsgdm(STEP, mixer, 0.9),
    }
    centres = jnp.asarray(_CENTRES)[:, None]

    @jax.jit
    def run_all() -> dict[str, Array]:
        return {name: _run(optimizer, centres, start, steps) for name, optimizer in optimizers.items()}

    return jax.tree.map(np.asarray, run_all())


def _run(optimizer: optax.GradientTransformation, centres: Array, start: float, steps: int) -> Array:
    def step(carry: Any, _: None):
        params, state = carry
        updates, state = optimizer.update(params - centres, state, params)
        return (optax.apply_updates(params, updates), state), None

    def stretch(carry: Any, _: None):
        carry, _ = jax.lax.scan(step, carry, length=_EVERY)
        return carry, carry[0].mean()

    params = jnp.full_like(centres, start)
    return jax.lax.scan(stretch, (params, optimizer.init(params)), length=steps // _EVERY)[1]
