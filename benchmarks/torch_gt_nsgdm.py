"""GT-NSGDm as published scripts write it: PyTorch, dicts of tensors, one node after the other.

What `optim_gt_nsgdm.py` compares with. Every node has its own dict of parameters; its gradient comes from autograd; an
exchange stacks what a node hears, parameter by parameter, and takes the weighted sum.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from jaxlab.nn import DecoderConfig

__all__ = ["DEVICE", "TorchNetwork", "decoder_gradient", "regression_gradient"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# With tensors this small more threads wait for one another: one is the fastest.
torch.set_num_threads(1)

Tensors = dict[str, torch.Tensor]
Gradient = Callable[[Tensors, Tensors], Tensors]


class TorchNetwork:
    """Nodes, their data and their graph, on torch's device.

    Args:
      start: parameters of every node, ``[n, ...]`` each.
      fixed: data of every node that each step uses, ``[n, ...]`` each.
      streamed: data of every step and node, ``[steps, n, ...]`` each.
      mixing_matrix: ``[n, n]``.
      gradient: from one node's parameters and data to its gradient.
    """

    def __init__(
        self,
        start: Mapping[str, np.ndarray],
        fixed: Mapping[str, np.ndarray],
        streamed: Mapping[str, np.ndarray],
        mixing_matrix: np.ndarray,
        gradient: Gradient,
    ) -> None:
        nodes = range(len(mixing_matrix))
        steps = range(len(next(iter(streamed.values()))))
        self._start, of_nodes = ([_to_torch(arrays, i) for i in nodes] for arrays in (start, fixed))
        self._data = [[of_nodes[i] | _to_torch(streamed, (step, i)) for i in nodes] for step in steps]
        self._gradient = gradient
        self._hears = [np.flatnonzero(row).tolist() for row in mixing_matrix]
        self._weights = [torch.tensor(row[row != 0], dtype=torch.float32, device=DEVICE) for row in mixing_matrix]

    def train(self, *, learning_rate: float, beta: float) -> dict[str, np.ndarray]:
        """All steps from the start; the parameters of all nodes, ``[n, ...]`` each."""
        params = self._start
        momentum = [{name: torch.zeros_like(leaf) for name, leaf in node.items()} for node in params]
        tracker = momentum
        for data in self._data:
            gradients = [self._gradient(*of_node) for of_node in zip(params, data, strict=True)]
            previous, momentum = (
                momentum,
                [
                    {name: beta * v[name] + (1 - beta) * g[name] for name in v}
                    for v, g in zip(momentum, gradients, strict=True)
                ],
            )
            tracker = self._exchange(
                [
                    {name: y[name] + v[name] - before[name] for name in y}
                    for y, v, before in zip(tracker, momentum, previous, strict=True)
                ]
            )
            params = self._exchange(
                [_normalised_step(x, y, learning_rate) for x, y in zip(params, tracker, strict=True)]
            )
        return {name: torch.stack([node[name] for node in params]).numpy(force=True) for name in params[0]}

    def _exchange(self, of_nodes: Sequence[Tensors]) -> list[Tensors]:
        return [
            {name: torch.tensordot(weights, torch.stack([of_nodes[r][name] for r in hears]), 1) for name in of_nodes[0]}
            for hears, weights in zip(self._hears, self._weights, strict=True)
        ]


def regression_gradient(constant: float) -> Gradient:
    """Gradient of the mean Tukey loss of a linear model, plus the given noise."""

    def gradient(params: Tensors, data: Tensors) -> Tensors:
        weights = params["weights"].requires_grad_()
        residual = data["features"] @ weights - data["labels"]
        inside = 1 - torch.clamp((residual / constant) ** 2, max=1)
        loss = (constant**2 / 6 * (1 - inside**3)).mean()
        return {"weights": torch.autograd.grad(loss, weights)[0] + data["noise"]}

    return gradient


def decoder_gradient(config: DecoderConfig) -> Gradient:
    """Gradient of the next-token loss of jaxlab's decoder with tied embeddings and as many keys as heads."""
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_size, 2, device=DEVICE) / config.head_size)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[-2], device=DEVICE)[:, None] * frequencies
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def loss(params: Tensors, tokens: torch.Tensor) -> torch.Tensor:
        table = params["model/embed_tokens/weight"]
        hidden = F.embedding(tokens, table)
        for layer in range(config.num_layers):
            block = {
                name.removeprefix("model/layers/").removesuffix("/weight"): leaf[layer]
                for name, leaf in params.items()
                if name.startswith("model/layers/")
            }
            z = F.rms_norm(hidden, (config.hidden_size,), block["input_layernorm"], config.norm_eps)
            query, key, value = (
                F.linear(z, block[f"self_attn/{name}_proj"]).unflatten(-1, (-1, config.head_size)).transpose(1, 2)
                for name in "qkv"
            )
            mixed = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
            hidden = hidden + F.linear(mixed.transpose(1, 2).flatten(2), block["self_attn/o_proj"])
            z = F.rms_norm(hidden, (config.hidden_size,), block["post_attention_layernorm"], config.norm_eps)
            gate = F.silu(F.linear(z, block["mlp/gate_proj"]))
            hidden = hidden + F.linear(gate * F.linear(z, block["mlp/up_proj"]), block["mlp/down_proj"])
        hidden = F.rms_norm(hidden, (config.hidden_size,), params["model/norm/weight"], config.norm_eps)
        logits = F.linear(hidden, table)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def gradient(params: Tensors, data: Tensors) -> Tensors:
        leaves = [leaf.requires_grad_() for leaf in params.values()]
        return dict(zip(params, torch.autograd.grad(loss(params, data["tokens"]), leaves), strict=True))

    return gradient


@torch.no_grad()
def _normalised_step(params: Tensors, tracker: Tensors, learning_rate: float) -> Tensors:
    norm = torch.sqrt(sum(y.square().sum() for y in tracker.values())).clamp(min=1e-12)
    return {name: x - learning_rate * tracker[name] / norm for name, x in params.items()}


def _to_torch(arrays: Mapping[str, np.ndarray], index: int | tuple[int, int]) -> Tensors:
    def tensor(array: np.ndarray) -> torch.Tensor:
        # torch embeds and compares with 64-bit ids alone.
        part = torch.tensor(np.asarray(array[index]), device=DEVICE)
        return part if part.is_floating_point() else part.long()

    return {name: tensor(array) for name, array in arrays.items()}
