"""One process of a training run over several: what a host of a cluster would run. Started by ``test_multihost.py``.

Every process holds some virtual devices, every device one node. A checkpoint is written after every step.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from jaxlab import optim
from jaxlab.optim import noise, topology

N_NODES = 4


def loss_fn(params, batch, key):
    """Least squares with noisy inputs, so that the loss uses its key."""
    inputs = batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)
    return jnp.square(inputs @ params["w"] + params["b"] - batch["y"]).mean()


def problem(axis_name: str | None):
    """A train step, its mixer, the initial (params, state) and the batch, all on this process."""
    mixer = optim.make_mixer(topology.ring(N_NODES), axis_name=axis_name)
    optimizer = optax.chain(
        noise.add_gradient_noise(jax.random.key(1), jax.random.normal, mixer), optim.gt_nsgdm(0.1, mixer)
    )
    random = np.random.default_rng(0)
    params = optim.replicate({"w": jnp.zeros(3), "b": jnp.zeros(())}, N_NODES)
    batch = {
        "x": random.normal(size=(N_NODES, 5, 3)).astype(np.float32),
        "y": random.normal(size=(N_NODES, 5)).astype(np.float32),
    }
    return optim.make_train_step(loss_fn, optimizer, mixer), mixer, (params, optimizer.init(params)), batch


def checkpoints(folder: str) -> ocp.CheckpointManager:
    """The last three steps."""
    return ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=False)
    )


def main() -> None:
    """Train for some steps as one of the processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoints", required=True)
    arguments = parser.parse_args()

    jax.distributed.initialize(
        arguments.coordinator,
        num_processes=arguments.processes,
        process_id=arguments.process,
        initialization_timeout=120,
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=10,
    )
    step, mixer, carry, batch = problem("node")
    mesh = jax.make_mesh((N_NODES,), ("node",))
    params, state = carry
    step = jax.jit(optim.shard_train_step(step, mesh, mixer, params=params, state=state, batch=batch))
    params, state, batch = optim.put_on_mesh((params, state, batch), mesh, mixer)
    with checkpoints(arguments.checkpoints) as manager:
        for t in range(arguments.steps):
            params, state, losses = step(params, state, batch, optim.put_on_mesh(jax.random.key(t), mesh, mixer))
            losses.block_until_ready()
            manager.save(t + 1, args=ocp.args.StandardSave((params, state)))


if __name__ == "__main__":
    main()
