"""One process of robust training over several, single-level and bilevel. Started by ``test_robust_multihost.py``.

The first process has three workers. The second has two, and is Byzantine: what it feeds in as its data is garbage.
"""

import argparse
import functools

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


def targets() -> np.ndarray:
    """What the workers want the lower variable to be ``[5, 3]``."""
    wanted = np.tile(SOLUTION, (N_WORKERS, 1))
    wanted[3] *= -1e6
    wanted[4, 0] = np.nan
    return wanted


def bilevel(axis_name: str | None):
    """BR-FedBiM for a lower variable that follows the upper one, which should reach the honest target."""
    problem = optim.BilevelProblem(
        upper=lambda x, y, target: 0.5 * jnp.sum((y - target) ** 2),
        lower=lambda x, y, target: 0.5 * jnp.sum((y - x) ** 2),
    )
    rule = aggregation.compose(aggregation.NearestNeighbourMixing(N_BYZANTINE), aggregation.TrimmedMean(N_BYZANTINE))
    optimizer = optim.br_fedbi(
        rule, 0.1, ratios=(4.0, 4.0), estimator=optim.client_momentum(N_WORKERS, 0.5), axis_name=axis_name
    )
    stepper = optim.make_bilevel_step(problem, optimizer, axis_name=axis_name)
    return stepper.step, stepper.init(optim.bilevel_point(jnp.zeros(3), jnp.zeros(3)))


def iterate(step, state, wanted):
    """The upper variable after some rounds."""
    key = jax.random.key(0)  # of a coin that momentum does not toss

    def one_round(state, _):
        return step(key, state, optim.ClientBatches(wanted, wanted))[0], None

    return jax.lax.scan(one_round, state, length=3 * STEPS)[0].point.upper


def main() -> None:
    """Train as one of the processes and write what both trainings found."""
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
    step, state = bilevel("worker")
    wanted = jax.make_array_from_callback((N_WORKERS, 3), NamedSharding(mesh, spread), lambda index: targets()[index])
    step = optim.shard_bilevel_step(step, mesh, "worker", state=state, batches=optim.ClientBatches(wanted, wanted))
    state = optim.put_bilevel_state(state, mesh, "worker", n_clients=N_WORKERS)
    x = jax.jit(functools.partial(iterate, step))(state, wanted)
    w = jax.jit(sharded)(inputs)
    np.savez(f"{arguments.out}{arguments.process}.npz", w=np.asarray(w), x=np.asarray(x))


if __name__ == "__main__":
    main()
