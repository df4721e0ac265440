"""LoRA: low-rank changes of the matrices of any network here (Hu et al. 2021, arXiv 2106.09685).

A matrix W ``[out, in]`` is kept and a product of two thin ones is added to it ::

    W + s B A,   A [rank, in] random,  B [out, rank] zero at first,  s = α / rank

so that the network starts where it was and only A and B are trained. With ``use_rslora`` s is α / √rank, which keeps
the change of the same order for every rank (Kalajdzievski 2023, arXiv 2312.03732). Blocks stacked on a leading axis
have a pair each, stacked too; in a file they may have ranks of their own (or none), and are then padded with zeros,
which no gradient moves.

The adapters are a tree apart from the parameters::

    adapters = init(params, key, rank=8, alpha=16.0, target=("q_proj", "v_proj"))
    logits = apply_fn(apply(params, adapters), tokens)              # the products x Aᵀ Bᵀ are added; no W is formed

    loss = lambda adapters: next_token_loss(apply_fn(apply(params, adapters), tokens), tokens)
    state = optimizer.init(adapters)                                # an optax transformation; W has no state
    updates, state = optimizer.update(jax.grad(loss)(adapters), state, adapters)
    adapters = optax.apply_updates(adapters, updates)

    params = merge(params, adapters)                                # plain matrices again, to be saved or served

Files of the PEFT library are read and written by `jaxlab.nn.checkpoints.adapters`.

Deviations from the paper:

1. A is drawn from U(-1/√in, 1/√in), as in the authors' code and in PEFT, where the paper says Gaussian.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Key

from jaxlab.nn.linear import LowRankSum
from jaxlab.nn.pure import parameter_shapes

__all__ = ["Adapters", "Target", "apply", "init", "matrices", "merge"]


@dataclasses.dataclass(frozen=True)
class Target:
    """One matrix, or one in each of the stacked blocks, with what its adapters are.

    Attributes:
      path: path of the linear map in the parameters: ``model/layers/self_attn/q_proj``.
      ranks: rank of each block's pair, 0 where it has none; one entry for a matrix that is not stacked.
      alphas: α of each.
    """

    path: str
    ranks: tuple[int, ...]
    alphas: tuple[float, ...]


@struct.dataclass
class Adapters:
    """Low-rank changes of some matrices. The factors are the leaves, so that it is trained like any parameters.

    Attributes:
      factors: tree with the paths of the parameters, below which ``lora_A/weight`` is A ``[..., rank, in]`` and
        ``lora_B/weight`` is B ``[..., out, rank]``.
      targets: which matrices, their ranks and α; static.
      use_rslora: s is α / √rank instead of α / rank; static.
    """

    factors: dict[str, Any]
    targets: tuple[Target, ...] = struct.field(pytree_node=False)
    use_rslora: bool = struct.field(pytree_node=False, default=False)

    def scales(self, target: Target) -> np.ndarray:
        """The scale s of each block's pair; float32."""
        ranks = [math.sqrt(rank) if self.use_rslora else rank for rank in target.ranks]
        pairs = zip(target.alphas, ranks, strict=True)
        return np.array([alpha / rank if rank else 0.0 for alpha, rank in pairs], np.float32)


def init(
    params: Mapping[str, Any],
    key: Key[Array, ""],
    *,
    target: Sequence[str],
    rank: int = 8,
    alpha: float = 8.0,
    use_rslora: bool = False,
    dtype: str = "float32",
) -> Adapters:
    """Make adapters that change nothing yet.

    Args:
      params: parameters, or their shapes.
      key: source of the draws of A.
      target: patterns of the linear maps to change. One with k parts stands for maps whose path ends in such k parts:
        ``"q_proj"``, ``"self_attn/*_proj"``, ``"*"`` for all (``*`` and ``?`` match within a part). Tables of
        embeddings and convolutions are never changed.
      rank: of every pair; the default is PEFT's.
      alpha: α; the default is PEFT's.
      use_rslora: divide α by √rank.
      dtype: of the factors.

    Raises:
      ValueError: if a pattern stands for nothing, naming it and some paths, ``rank`` is below one or larger than a
        matrix, naming that, or the blocks lie one by one (`unstack_layers`).
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1; got {rank}")
    if not math.isfinite(alpha):
        raise ValueError(f"alpha must be finite; got {alpha}")
    known = matrices(params)
    patterns = (target,) if isinstance(target, str) else tuple(target)
    if not patterns:
        raise ValueError("target must have at least one pattern")
    for pattern in patterns:
        if not any(_matches(path, pattern) for path in known):
            raise ValueError(f"target pattern {pattern!r} stands for no linear map; there are {_some(known)}")
    chosen = [path for path in known if any(_matches(path, pattern) for pattern in patterns)]
    factors: dict[str, Any] = {}
    for path, key_of_path in zip(chosen, jax.random.split(key, len(chosen)), strict=True):
        *layers, out_features, in_features = known[path]
        if rank > min(out_features, in_features):
            raise ValueError(f"rank {rank} is larger than {path} ({out_features} x {in_features})")
        bound = 1 / math.sqrt(in_features)
        down = jax.random.uniform(key_of_path, (*layers, rank, in_features), dtype, -bound, bound)
        up = jnp.zeros((*layers, out_features, rank), dtype)
        place(factors, path, {"lora_A": {"weight": down}, "lora_B": {"weight": up}})
    targets = [
        Target(path, (rank,) * math.prod(known[path][:-2]), (float(alpha),) * math.prod(known[path][:-2]))
        for path in chosen
    ]
    return Adapters(factors=factors, targets=tuple(targets), use_rslora=use_rslora)


def apply(params: Mapping[str, Any], adapters: Adapters) -> dict[str, Any]:
    """Give parameters in which each changed matrix is a `jaxlab.nn.linear.LowRankSum` of W and its pair.

    They go wherever ``params`` go as the parameters of a network. No changed matrix is formed, neither here nor in a
    linear map, and gradients reach the factors. Several adapters may be applied, one after the other.

    Raises:
      ValueError: if the adapters do not fit, naming the matrix.
    """
    changed: dict[str, Any] = _copy(params)
    known = matrices(params)
    for target in adapters.targets:
        down, up = factors_of(adapters, target)
        if target.path not in known:
            raise ValueError(f"the adapters do not fit: {target.path} is no linear map here; there are {_some(known)}")
        *layers, out_features, in_features = known[target.path]
        rank = down.shape[-2]
        for name, factor, wanted in (
            ("lora_A", down, (*layers, rank, in_features)),
            ("lora_B", up, (*layers, out_features, rank)),
        ):
            if factor.shape != wanted:
                raise ValueError(
                    f"the adapters do not fit: {target.path}/{name}/weight must have shape {wanted}; got {factor.shape}"
                )
        scale = np.reshape(adapters.scales(target), layers)
        node = find(changed, target.path)
        node["weight"] = LowRankSum(weight=node["weight"], down=down, up=up, scale=scale)
    return changed


def merge(params: Mapping[str, Any], adapters: Adapters) -> dict[str, Any]:
    """Give parameters with the changes added: ``W + s B A`` in float32, rounded once to the dtype of W.

    Raises:
      ValueError: if the adapters do not fit, naming the matrix.
    """
    return jax.tree.map(
        lambda leaf: leaf.astype(leaf.dtype) if isinstance(leaf, LowRankSum) else leaf,
        apply(params, adapters),
        is_leaf=lambda node: isinstance(node, LowRankSum),
    )


def matrices(params: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Give the linear maps that may be changed: their paths, and the shapes ``[..., out, in]`` of their weights.

    Blocks are known by a part ``layer`` or ``layers`` in the path, tables by ``embed`` in the last part.

    Raises:
      ValueError: if the blocks lie one by one.
    """
    model = params.get("model")
    if isinstance(model, Mapping) and isinstance(model.get("layers"), tuple | list):
        raise ValueError("adapters need stacked blocks; apply or merge them first, then unstack_layers")
    found = {}
    for path, shape in parameter_shapes(params).items():
        *parents, name = path.split("/")
        axes = 3 if {"layer", "layers"} & set(parents) else 2
        if name == "weight" and len(shape) == axes and parents and "embed" not in parents[-1]:
            found["/".join(parents)] = shape
    return found


def factors_of(adapters: Adapters, target: Target) -> tuple[Array, Array]:
    """Give A and B of a target."""
    node = find(adapters.factors, target.path)
    return node["lora_A"]["weight"], node["lora_B"]["weight"]


def find(tree: Mapping[str, Any], path: str) -> Any:
    """Give what lies at a path of a nested dict."""
    node: Any = tree
    for part in path.split("/"):
        node = node[part]
    return node


def place(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put a value at a path of a nested dict."""
    *parents, last = path.split("/")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _copy(tree: Any) -> Any:
    return {key: _copy(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("/"), pattern.split("/")
    tail = parts[-len(wanted) :]
    return len(tail) == len(wanted) and all(map(fnmatch.fnmatchcase, tail, wanted))


def _some(paths: Mapping[str, Any]) -> str:
    names = sorted(paths)
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "none"
