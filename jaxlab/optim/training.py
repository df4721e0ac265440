"""From a loss of one node to a train step of the whole network, on one device or over a mesh.

The loss is written for one node: ``loss_fn(params, batch, key) -> scalar`` with that node's parameters and batch. The
functions here lift it to trees with a leading node axis. A random key is folded with the node's index in the network,
so that a node draws the same numbers on every backend and every number of devices.

One device, or many::

    step = make_train_step(loss_fn, optimizer, mixer)
    step = jax.jit(step)                                             # nodes stacked on one device
    step = jax.jit(shard_train_step(step, mesh, mixer, params=params, state=state, batch=batch))   # over a mesh axis
    params, state, losses = step(params, state, batch, key)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxlab.optim.mixing import Mixer, local_nodes

__all__ = [
    "consensus_error",
    "make_train_step",
    "node_mean",
    "node_partition_specs",
    "put_on_mesh",
    "replicate",
    "shard_train_step",
    "value_and_grad_per_node",
]

LossFn = Callable[[PyTree, PyTree, Key[Array, ""]], Float[Array, ""]]
TrainStep = Callable[[PyTree, PyTree, PyTree, Key[Array, ""]], tuple[PyTree, PyTree, Float[Array, " n"]]]


def replicate(params: PyTree, n_nodes: int) -> PyTree:
    """The same parameters on every node: leaves ``[...]`` become ``[n_nodes, ...]``."""
    if n_nodes < 1:
        raise ValueError(f"n_nodes must be at least 1, got {n_nodes}")
    return jax.tree.map(lambda p: jnp.broadcast_to(p, (n_nodes, *jnp.shape(p))), params)


def node_mean(tree: PyTree) -> PyTree:
    """Average over the nodes of stacked (or sharded, outside ``shard_map``) parameters: the model to keep."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)).mean(0).astype(x.dtype), tree)


def consensus_error(tree: PyTree) -> Float[Array, ""]:
    r"""How far the nodes disagree: :math:`\sqrt{\frac1n \sum_i \lVert x_i - \bar x \rVert^2}` over all leaves."""

    def spread(x: Array) -> Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return jnp.square(wide - wide.mean(0)).sum() / x.shape[0]

    return jnp.sqrt(sum(spread(x) for x in jax.tree.leaves(tree)))


def value_and_grad_per_node(
    loss_fn: LossFn,
) -> Callable[[PyTree, PyTree, Key[Array, ""], Int[Array, " n"]], tuple[Float[Array, " n"], PyTree]]:
    """Loss and gradient of every node at its own parameters on its own batch.

    Returns:
      ``fn(params, batch, key, nodes) -> (losses[n], grads)`` where every leaf of ``params``, ``batch`` and ``grads``
      has a leading node axis and ``nodes[n]`` are the nodes' indices in the network.
    """

    def one_node(params: PyTree, batch: PyTree, key: Key[Array, ""], node: Int[Array, ""]):
        return jax.value_and_grad(loss_fn)(params, batch, jax.random.fold_in(key, node))

    return jax.vmap(one_node, in_axes=(0, 0, None, 0))


def make_train_step(loss_fn: LossFn, optimizer: optax.GradientTransformation, mixer: Mixer) -> TrainStep:
    """One step of every node.

    Args:
      loss_fn: loss of one node.
      optimizer: a decentralised optimiser, see :mod:`jaxlab.optim.decentralized`.
      mixer: the optimiser's mixer; says where the nodes live.

    Returns:
      ``step(params, state, batch, key) -> (params, state, losses[n])``, pure, to be jitted, scanned or given to
      :func:`shard_train_step`.
    """
    value_and_grad = value_and_grad_per_node(loss_fn)

    def step(params: PyTree, state: PyTree, batch: PyTree, key: Key[Array, ""]):
        n_local = jax.tree.leaves(params)[0].shape[0]
        losses, grads = value_and_grad(params, batch, key, local_nodes(n_local, mixer.axis_name))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, losses

    return step


def node_partition_specs(tree: PyTree, mixer: Mixer) -> PyTree:
    """``PartitionSpec`` of every leaf: along the node axis where its leading size is ``n_nodes``, else replicated."""

    def spec(leaf: Any) -> PartitionSpec:
        shape = jnp.shape(leaf)
        return PartitionSpec(mixer.axis_name) if shape and shape[0] == mixer.n_nodes else PartitionSpec()

    return jax.tree.map(spec, tree)


def put_on_mesh(tree: PyTree, mesh: Mesh, mixer: Mixer) -> PyTree:
    """Place a tree that is the same on every host (parameters, state) on the mesh, nodes spread over the node axis."""
    return place(tree, mesh, node_partition_specs(tree, mixer))


def place(tree: PyTree, mesh: Mesh, specs: PyTree) -> PyTree:
    """Place a tree that is the same on every host on the mesh, each leaf by its ``PartitionSpec``."""

    def put(leaf: Any, spec: PartitionSpec) -> Array:
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(put(jax.random.key_data(leaf), spec), impl=jax.random.key_impl(leaf))
        # A callback, not device_put: each host holds the whole value and gives its own devices their part.
        return jax.make_array_from_callback(
            jnp.shape(leaf), NamedSharding(mesh, spec), lambda index: np.asarray(leaf)[index]
        )

    return jax.tree.map(put, tree, specs)


def shard_train_step(
    step: TrainStep, mesh: Mesh, mixer: Mixer, *, params: PyTree, state: PyTree, batch: PyTree
) -> TrainStep:
    """Run a train step over a mesh whose axis ``mixer.axis_name`` carries the nodes.

    Call it with arguments placed by :func:`put_on_mesh`: several hosts, and meshes with explicit axes (the default of
    ``jax.make_mesh``), take no others.

    Args:
      step: what :func:`make_train_step` gives for the same mixer.
      mesh: its axis ``mixer.axis_name`` must divide the number of nodes; other axes stay with the compiler.
      mixer: a sharded mixer.
      params, state, batch: the step's arguments or their shapes, to tell which leaves have a node axis.

    Raises:
      ValueError: if the mixer is a stacked one, the mesh lacks the axis, the nodes do not divide among its devices, or
        a leaf of ``params`` or ``batch`` does not lead with the nodes.
    """
    axis = mixer.axis_name
    if axis is None:
        raise ValueError("the mixer averages nodes stacked on one device; make it with axis_name=... to use a mesh")
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has axes {tuple(mesh.shape)}, not the mixer's axis {axis!r}")
    if mixer.n_nodes % mesh.shape[axis]:
        raise ValueError(f"{mixer.n_nodes} nodes do not divide among the {mesh.shape[axis]} devices of axis {axis!r}")
    # One whose leading size is by chance a device's share would else pass for the same part on every device.
    for name, tree in (("params", params), ("batch", batch)):
        for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if jnp.shape(leaf)[:1] != (mixer.n_nodes,):
                raise ValueError(
                    f"every leaf needs a leading axis of {mixer.n_nodes} nodes; {name}{jax.tree_util.keystr(key_path)} "
                    f"has shape {jnp.shape(leaf)}"
                )
    params_spec, state_spec, batch_spec = (node_partition_specs(tree, mixer) for tree in (params, state, batch))
    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(params_spec, state_spec, batch_spec, PartitionSpec()),
        out_specs=(params_spec, state_spec, PartitionSpec(axis)),
        axis_names={axis},
    )
