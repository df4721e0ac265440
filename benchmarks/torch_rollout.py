"""Rollouts as published programs write them: PyTorch, one call of the propagator a step.

What `dynamics_rollout.py` compares with. Batched over replicas, which is more than the published programs do: they roll
out one trajectory; the benchmark reports both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["DEVICE", "koopman", "langevin", "neural", "roll"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def koopman(matrix: np.ndarray, factor: np.ndarray) -> Step:
    """``z A^T + F xi``."""
    transposed, noise = (torch.tensor(np.array(x.T), device=DEVICE) for x in (matrix, factor))
    return lambda z, xi: z @ transposed + xi[0] @ noise


def neural(layers: Sequence[Mapping[str, Any]], factor: np.ndarray) -> Step:
    """``z + g(z) + F xi``."""
    network, noise = _network(layers), torch.tensor(np.array(factor.T), device=DEVICE)
    return lambda z, xi: z + network(z) + xi[0] @ noise


def langevin(layers: Sequence[Mapping[str, Any]], *, time: float, level: float, dt: float) -> Step:
    """As many steps of Euler-Maruyama as there are draws."""
    network = _network(layers)

    def step(z: torch.Tensor, xi: torch.Tensor) -> torch.Tensor:
        for drawn in xi:
            times = torch.full((len(z), 1), time, device=DEVICE)
            z = z - dt / level * network(torch.cat([z, times], dim=1)) + (2 * dt) ** 0.5 * drawn
        return z

    return step


@torch.inference_mode()
def roll(step: Step, start: np.ndarray, steps: int, draws: int, noise: np.ndarray | None = None) -> np.ndarray:
    """The states after each step, ``[replica, step, latent]``; fresh noise in each unless it is given."""
    z = torch.tensor(start, device=DEVICE)
    given = None if noise is None else torch.tensor(noise, device=DEVICE)
    path = torch.empty((steps, *z.shape), device=DEVICE)
    for i in range(steps):
        z = step(z, torch.randn((draws, *z.shape), device=DEVICE) if given is None else given[i])
        path[i] = z
    return path.cpu().numpy().swapaxes(0, 1)


def _network(layers: Sequence[Mapping[str, Any]]) -> Callable[[torch.Tensor], torch.Tensor]:
    modules: list[torch.nn.Module] = []
    for layer in layers:
        kernel, bias = (np.array(layer[name]) for name in ("kernel", "bias"))
        linear = torch.nn.Linear(*kernel.shape, device=DEVICE)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(np.array(kernel.T)))
            linear.bias.copy_(torch.tensor(bias))
        modules += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*modules[:-1])
