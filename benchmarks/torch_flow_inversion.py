"""Uni-Inv, Uni-Edit and the DiT as published programs write them: PyTorch, a loop over steps.

What `flow_inversion.py` compares with. The weights are those of `jaxlab.nn.dit.DiT`, by name and in PyTorch's layout;
attention, norms and GELU are PyTorch's own, and both conditions go through the network in one call.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from jaxlab.nn.dit import DiTConfig

__all__ = ["DEVICE", "TorchDiT", "uni_edit"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TorchDiT:
    """The network of `jaxlab.nn.dit`.

    Args:
      config: its sizes.
      weights: its parameters by path.
    """

    def __init__(self, config: DiTConfig, weights: Mapping[str, np.ndarray]) -> None:
        self.config = config
        self._weights = {
            name.replace("/kernel", "/weight"): torch.tensor(
                np.ascontiguousarray(value.swapaxes(-1, -2)) if name.endswith("/kernel") else value, device=DEVICE
            )
            for name, value in weights.items()
        }
        self._layers = [
            {name.removeprefix(f"blocks/{k}/"): value for name, value in self._weights.items()
             if name.startswith(f"blocks/{k}/")}
            for k in range(config.num_layers)
        ]  # fmt: skip
        self._frequencies = torch.exp(-math.log(10_000.0) * torch.arange(64, device=DEVICE) / 64)

    def __call__(self, z: torch.Tensor, t: float, labels: torch.Tensor) -> torch.Tensor:
        """Velocity at ``z``, ``[b, h, w, c]``."""
        config, weights = self.config, self._weights
        side, (height, width, channels), batch = config.patch_size, config.image_shape, len(z)
        rows, columns = height // side, width // side
        patches = z.reshape(batch, rows, side, columns, side, channels).permute(0, 1, 3, 2, 4, 5)
        hidden = _linear(weights, "patch", patches.reshape(batch, rows * columns, -1)) + weights["positions"]
        angles = 1000.0 * t * self._frequencies
        sines = torch.cat([torch.cos(angles), torch.sin(angles)])
        condition = _linear(weights, "time_out", F.silu(_linear(weights, "time_in", sines)))
        for slot in range(labels.shape[1]):
            label = weights[f"labels/{slot}/weight"][labels[:, slot]]
            condition = condition + label
            hidden = hidden + weights["places"][slot] * label[:, None]
        condition = F.silu(condition)
        for layer in self._layers:
            hidden = self._block(layer, hidden, condition)
        shift, scale = _linear(weights, "modulation", condition)[:, None].chunk(2, dim=-1)
        out = _linear(weights, "head", _modulate(hidden, shift, scale))
        out = out.reshape(batch, rows, columns, side, side, channels).permute(0, 1, 3, 2, 4, 5)
        return out.reshape(z.shape)

    def _block(self, layer: Mapping[str, Any], hidden: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        parts = _linear(layer, "modulation", condition)[:, None].chunk(6, dim=-1)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = parts
        batch, tokens, size = hidden.shape
        heads = self.config.num_heads
        mixed = _linear(layer, "query_key_value", _modulate(hidden, shift_1, scale_1))
        query, key, value = mixed.reshape(batch, tokens, 3, heads, size // heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(hidden.shape)
        hidden = hidden + gate_1 * _linear(layer, "attention_out", attended)
        inner = F.gelu(_linear(layer, "mlp_in", _modulate(hidden, shift_2, scale_2)), approximate="tanh")
        return hidden + gate_2 * _linear(layer, "mlp_out", inner)


@torch.inference_mode()
def uni_edit(
    model: TorchDiT,
    images: torch.Tensor,
    grid: np.ndarray,
    *,
    source: torch.Tensor,
    target: torch.Tensor,
    strength: float,
    steps: int,
) -> torch.Tensor:
    """Uni-Inv under the source condition, then Uni-Edit, step by step."""
    z, v = images, model(images, float(grid[0]), source)
    for i in range(1, steps + 1):
        h = float(grid[i] - grid[i - 1])
        v = model(z + h * v, float(grid[i]), source)
        z = z + h * v
    labels = torch.cat([source, target])
    for i in range(steps, 0, -1):
        of_source, of_target = model(torch.cat([z, z]), float(grid[i]), labels).chunk(2)
        difference = of_target - of_source
        size = difference.abs().mean(-1, keepdim=True)
        low, high = size.amin((1, 2, 3), keepdim=True), size.amax((1, 2, 3), keepdim=True)
        mask = (size - low) / (high - low + 1e-7)
        fused = mask * of_target + (1 - mask) * of_source
        z = z + float(grid[i - 1] - grid[i]) * (strength * (1 + mask) * difference + fused)
    return z


def _modulate(hidden: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(hidden, hidden.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _linear(weights: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weights[f"{name}/weight"], weights[f"{name}/bias"])
