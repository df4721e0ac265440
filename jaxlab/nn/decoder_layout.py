"""How the parameters of a decoder lie: its blocks stacked or one by one, its matrices whole or split over devices.

Example::

    params = unstack_layers(params)                                              # for generation on a CPU
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    specs = partition_specs(config, mesh)                                        # for tensor parallelism
    params = jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxlab.nn.decoder import init
from jaxlab.nn.decoder_config import DecoderConfig

__all__ = ["partition_specs", "unstack_layers"]


def unstack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Split ``model/layers`` into a tuple with one tree a block; everything else is shared, not copied.

    All functions of this module and of `jaxlab.nn.generation` take either layout. A scan over stacked blocks compiles
    once for any depth, but on CPUs it copies each block's weights before it uses them, and the generation of a few
    sequences does little else than to read weights. Unstacked blocks are read in place, and compile one after another.
    """
    layers = params["model"]["layers"]
    if isinstance(layers, tuple | list):
        return dict(params)
    depth = jax.tree.leaves(layers)[0].shape[0]
    split = tuple(jax.tree.map(lambda leaf, index=index: leaf[index], layers) for index in range(depth))
    return {**params, "model": {**params["model"], "layers": split}}


def partition_specs(config: DecoderConfig, mesh: Mesh, *, axis: str = "model") -> dict[str, Any]:
    """How to split (stacked) parameters over a mesh axis for tensor parallelism.

    Heads, feed-forward units and the vocabulary are split: the first projections by rows, the last of each branch by
    columns (Shoeybi et al. 2019, arXiv 1909.08053), the embedding table and the head by tokens. What the axis does
    not divide evenly is left whole on every device, keys and values where there are fewer heads than devices.

    Args:
      config: of the decoder.
      mesh: the devices; its axes of type ``jax.sharding.AxisType.Auto``, so that the compiler places what lies between.
      axis: name of the mesh axis.

    Returns:
      The tree of the parameters with a ``PartitionSpec`` in place of each.

    Raises:
      ValueError: if the mesh has no such axis, or axes of another type.
    """
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has no axis {axis!r}; its axes are {', '.join(map(str, mesh.shape))}")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        kinds = ", ".join(kind.name for kind in mesh.axis_types)
        raise ValueError(f"the axes of the mesh must be of type Auto; got {kinds}")
    size = mesh.shape[axis]
    # What is split, and into how many indivisible parts, along which axis of the weight counted from its end.
    rows = {
        "q_proj": config.num_heads,
        "k_proj": config.kv_heads,
        "v_proj": config.kv_heads,
        "gate_proj": config.intermediate_size,
        "up_proj": config.intermediate_size,
        "embed_tokens": config.vocab_size,
        "lm_head": config.vocab_size,
    }
    columns = {"o_proj": config.num_heads, "down_proj": config.intermediate_size}

    def spec(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        *_, module, kind = (entry.key for entry in path)
        if module in rows and rows[module] % size == 0:
            split = -2 if kind == "weight" else -1
        elif module in columns and columns[module] % size == 0 and kind == "weight":
            split = -1
        else:
            return PartitionSpec()
        return PartitionSpec(*(axis if i == leaf.ndim + split else None for i in range(leaf.ndim)))

    params = jax.eval_shape(lambda: init(config, jax.random.key(0))[1])
    return jax.tree.map_with_path(spec, params)
