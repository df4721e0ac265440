"""One process of a robust training run over several. Started by ``test_robust_multihost.py``.

The first process has three workers. The second has two, and is Byzantine: what it feeds in as its data is garbage.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab import optim
from jaxlab.optim import aggregation

N_WORKERS, N_BYZANTINE, STEPS = 5, 2, 60
SOLUTION = np.float32([1.0, -2.0, 0.5])


def batches() -> np.ndarray:
    """Inputs of every worker ``[5, 8, 3]``; those of the last two are huge and no numbers at all."""
    inputs = np.random.default_rng(0).normal(size=(N_WORKERS, 8, 3)).astype(np.float32)
    inputs[3] *= -1e6
    inputs[4, 0, 0] = np.nan
    return inputs


def train(inputs, axis_name: str | None):
    """Parameters after least squares whose solution all honest workers share."""
    rule = aggregation.compose(aggregation.NearestNeighbourMixing(N_BYZANTINE), aggregation.TrimmedMean(N_BYZANTINE))
    optimizer = optax.chain(optim.robust_aggregate(rule, axis_name=axis_name), optax.sgd(0.3))

    def gradient(w, x):
        return x.T @ (x @ (w - SOLUTION)) / len(x)

    def step(carry, _):
        w, state = carry
        updates, state = optimizer.update(jax.vmap(gradient, (None, 0))(w, inputs), state, w)
        return (optax.apply_updates(w, updates), state), None

    w = jnp.zeros(3)
    (w, _), _ = jax.lax.scan(step, (w, optimizer.init(w)), length=STEPS)
    return w


def main() -> None:
    """Train as one of the processes and write the parameters."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    jax.distributed.initialize(
        arguments.coordinator, num_processes=2, process_id=arguments.process, initialization_timeout=120
    )
    mesh = jax.make_mesh((N_WORKERS,), ("worker",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = PartitionSpec("worker")
    # Each process hands in the rows of its own workers only.
    inputs = jax.make_array_from_callback(
        (N_WORKERS, 8, 3), NamedSharding(mesh, spread), lambda index: batches()[index]
    )
    sharded = jax.shard_map(
        lambda x: train(x, "worker"), mesh=mesh, in_specs=spread, out_specs=PartitionSpec(), check_vma=True
    )
    np.save(f"{arguments.out}{arguments.process}.npy", np.asarray(jax.jit(sharded)(inputs)))


if __name__ == "__main__":
    main()
