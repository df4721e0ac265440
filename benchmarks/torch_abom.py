"""ABOM as its authors publish it: PyTorch modules, one run at a time, an optimiser made anew every generation.

What `blackbox_abom.py` compares with. A run evaluates a population, a generation draws the offspring, evaluates them,
keeps the best and takes one AdamW step; one run after the other, as a script over functions and seeds does.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F

__all__ = ["TorchABOM"]

# With tensors this small more threads wait for one another: one is the fastest.
torch.set_num_threads(1)

Masks = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TorchABOM:
    """One search.

    Args:
      parameters: weights by name, as `jaxlab.blackbox.Parameters` has them, matrices ``[in, out]``.
      function: values ``[n]`` of points ``[n, d]``.
      half_width: of the box around zero.
      learning_rate: of AdamW.
      weight_decay: of AdamW.
      dropout: of crossover and mutation.
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        function: Callable[[torch.Tensor], torch.Tensor],
        *,
        half_width: float,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-5,
        dropout: float = 0.95,
    ) -> None:
        self.parameters = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in parameters.items()}
        self._function, self._half_width, self._dropout = function, half_width, dropout
        self._settings = {"lr": learning_rate, "weight_decay": weight_decay}

    def offspring(self, population: torch.Tensor, masks: Masks) -> torch.Tensor:
        """Selection, crossover, mutation and swap of a sorted population."""
        p = self.parameters
        scale = p["query"].shape[1] ** 0.5
        rank = torch.arange(len(population), dtype=population.dtype)[:, None]
        logits = (population @ p["query"] + p["query_bias"]) @ (population @ p["key"] + p["key_bias"]).T
        fitness_query = rank @ p["fitness_query"][None] + p["fitness_query_bias"]
        logits = logits + fitness_query @ (rank @ p["fitness_key"][None] + p["fitness_key_bias"]).T
        mixed = torch.softmax(logits / scale, 1) @ population
        crossed = population + torch.tanh(mixed @ p["crossover_inner"]) @ p["crossover_outer"] * masks[0]
        genes = population[:, :, None]
        gene_logits = (genes @ p["gene_query"][None]) @ (genes @ p["gene_key"][None]).transpose(1, 2)
        attended = (torch.softmax(gene_logits / scale, 2) @ genes)[..., 0]
        mutated = crossed + torch.tanh(attended @ p["mutation_inner"]) @ p["mutation_outer"] * masks[1]
        first, second = mutated.chunk(2)
        return torch.cat([torch.where(masks[2], second, first), torch.where(masks[2], first, second)])

    def generation(
        self, population: torch.Tensor, fitness: torch.Tensor, masks: Masks
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Offspring, their values, the survivors, and one step of a new AdamW."""
        offspring = self.offspring(population, masks)
        candidates = offspring.detach().clamp(-self._half_width, self._half_width)
        both = torch.cat([fitness, self._function(candidates)])
        order = both.argsort(stable=True)[: len(population)]
        population, fitness = torch.cat([population, candidates])[order], both[order]
        optimizer = torch.optim.AdamW(self.parameters.values(), **self._settings)
        optimizer.zero_grad()
        F.smooth_l1_loss(offspring, population[:1].expand_as(offspring), reduction="sum").backward()
        optimizer.step()
        return population, fitness

    def masks(self, size: int, dimension: int) -> Masks:
        """Of one generation."""
        kept = [(torch.rand(size, dimension) >= self._dropout) / (1 - self._dropout) for _ in range(2)]
        return kept[0], kept[1], torch.rand(size // 2, dimension) < 0.5

    def run(self, population: torch.Tensor, generations: int) -> torch.Tensor:
        """The lowest value after some generations."""
        fitness = self._function(population)
        order = fitness.argsort()
        population, fitness = population[order], fitness[order]
        for _ in range(generations):
            population, fitness = self.generation(population, fitness, self.masks(*population.shape))
        return fitness[0]
