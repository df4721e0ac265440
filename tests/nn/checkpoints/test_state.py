import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlab.nn import DecoderConfig, decoder, partition_specs
from jaxlab.nn.checkpoints import restore_state, save_state

CONFIG = DecoderConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=8)
OPTIMISER = optax.adam(1e-2)


def make_state(key):
    params = decoder.init(CONFIG, key)[1]
    return {"params": params, "optimiser": OPTIMISER.init(params), "step": jnp.int32(3)}


def shardings(state, devices):
    """Tensor-parallel over so many devices; the moments lie where their parameters do."""
    mesh = jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    specs = partition_specs(CONFIG, mesh)
    whole = PartitionSpec()
    adam = state["optimiser"][0]._replace(count=whole, mu=specs, nu=specs)
    tree = {"params": specs, "optimiser": (adam, state["optimiser"][1]), "step": whole}
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    state = make_state(jax.random.key(0))
    # One step, so that the moments are not zero.
    gradients = jax.tree.map(jnp.cos, state["params"])
    updates, state["optimiser"] = OPTIMISER.update(gradients, state["optimiser"], state["params"])
    state["params"] = optax.apply_updates(state["params"], updates)
    state = jax.device_put(state, shardings(state, 8))
    directory = tmp_path_factory.mktemp("state") / "step-3"
    save_state(directory, state)
    return directory, state


@pytest.mark.parametrize("devices", [4, 1])
def test_saved_on_eight_devices_restored_on_fewer(saved, devices):
    directory, state = saved
    assert len(state["params"]["lm_head"]["weight"].sharding.device_set) == 8
    like = jax.eval_shape(make_state, jax.random.key(0))
    where = shardings(state, devices)
    like = jax.tree.map(lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to), like, where)
    restored = restore_state(directory, like)
    assert jax.tree.structure(restored) == jax.tree.structure(state)  # adam's own tuples again
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert all(leaf.sharding == to for leaf, to in zip(jax.tree.leaves(restored), jax.tree.leaves(where), strict=True))
    weight = restored["params"]["lm_head"]["weight"]
    assert {shard.data.shape for shard in weight.addressable_shards} == {(32 // devices, 16)}


def test_without_a_sharding_it_goes_to_the_first_device(saved):
    directory, state = saved
    restored = restore_state(directory, jax.eval_shape(make_state, jax.random.key(0)))
    assert restored["params"]["lm_head"]["weight"].devices() == {jax.devices()[0]}
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_bad_input(saved, tmp_path):
    directory, state = saved
    with pytest.raises(FileNotFoundError, match="no saved state at"):
        restore_state(tmp_path / "absent", state)
    with pytest.raises(FileExistsError, match="say overwrite=True to replace it"):
        save_state(directory, state)
    missing = {name: part for name, part in state.items() if name != "step"}
    for like, message in [
        ({**state, "more": jnp.zeros(2)}, "it has no more"),
        (missing, "it has step, which is not asked for"),
        ({**state, "step": jnp.zeros(5)}, r"its step has shape \(\), not \(5,\)"),
    ]:
        with pytest.raises(ValueError, match=f"step-3 cannot be restored as this state: {message}"):
            restore_state(directory, like)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be restored as this state"):
        restore_state(tmp_path / "empty", state)


def test_overwriting(tmp_path):
    save_state(tmp_path / "a", {"x": jnp.zeros(3)})
    save_state(tmp_path / "a", {"x": jnp.ones(3)}, overwrite=True)
    np.testing.assert_array_equal(restore_state(tmp_path / "a", {"x": jnp.zeros(3)})["x"], np.ones(3))
