import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxlab.nn.checkpoints import TensorWriter, open_tensors

INDEX = "model.safetensors.index.json"


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.normal(size=(3, 5)).astype(np.float32),
        "b.weight": rng.normal(size=(7,)).astype(np.float16),
        "c": np.array(3, np.int64),
        "d": np.zeros((0, 4), np.float32),
        "e": rng.normal(size=(2, 3)).astype(jnp.bfloat16),
    }


def specs(arrays):
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}


def write(folder, arrays, **options):
    with TensorWriter(folder, specs(arrays), **options) as writer:
        for name in reversed(arrays):  # in any order
            writer.write(name, arrays[name])


def test_what_the_package_writes_is_read(tmp_path, arrays):
    del arrays["e"]  # NumPy alone has no bfloat16
    save_file(arrays, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        tensors = open_tensors(path)
        assert tensors.specs == specs(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(tensors[name], array, strict=True)


def test_what_is_written_the_package_reads(tmp_path, arrays):
    write(tmp_path, arrays)
    bfloat16 = arrays.pop("e")
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("e").get_dtype() == "BF16"
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)
    torch = pytest.importorskip("torch", reason="needs the peers extra")
    from safetensors.torch import load_file as load_torch

    read = load_torch(tmp_path / "model.safetensors")["e"]
    assert read.dtype == torch.bfloat16
    np.testing.assert_array_equal(read.float().numpy(), bfloat16.astype(np.float32))


def test_shards_and_their_index(tmp_path, arrays):
    write(tmp_path, arrays, max_shard_size=70)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-0000{len(files)}.safetensors"
    assert len(files) == 2
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "np") as opened:
            assert name in opened.keys()  # noqa: SIM118
    tensors = open_tensors(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(tensors[name], array, strict=True)


def test_reading_maps_and_does_not_copy(tmp_path):
    write(tmp_path, {"a": np.arange(12.0).reshape(3, 4)})
    first, second = open_tensors(tmp_path)["a"], open_tensors(tmp_path)["a"]
    assert not first.flags.owndata
    assert not first.flags.writeable
    with (tmp_path / "model.safetensors").open("r+b") as file:  # seen through the mapping of both
        file.seek(-8, 2)
        file.write(np.float64(-1).tobytes())
    assert first[2, 3] == second[2, 3] == -1


def test_tensors_are_converted_to_what_was_announced(tmp_path):
    with TensorWriter(tmp_path, {"a": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}) as writer:
        writer.write("a", np.array([1.0, 1.00390625, 3.0]))
    np.testing.assert_array_equal(open_tensors(tmp_path)["a"], np.array([1, 1, 3], jnp.bfloat16), strict=True)


def test_writing_that_fails_leaves_nothing(tmp_path, arrays):
    def fail():
        with TensorWriter(tmp_path, specs(arrays), max_shard_size=70) as writer:
            writer.write("a.weight", arrays["a.weight"])
            assert not list(tmp_path.glob("*.safetensors"))  # nor does a half-written file look like one
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert not list(tmp_path.iterdir())


def test_tensors_that_were_not_written(tmp_path, arrays):
    with (
        pytest.raises(ValueError, match=r"4 tensors were never written, the first is b\.weight"),
        TensorWriter(tmp_path, specs(arrays)) as writer,
    ):
        writer.write("a.weight", arrays["a.weight"])
    assert not list(tmp_path.iterdir())


def test_writer_refuses(tmp_path, arrays):
    with pytest.raises(ValueError, match="at least one tensor"):
        TensorWriter(tmp_path, {})
    with pytest.raises(ValueError, match="max_shard_size must be at least 1 byte; got 0"):
        TensorWriter(tmp_path, specs(arrays), max_shard_size=0)
    with pytest.raises(ValueError, match="tensor z has dtype complex64"):
        TensorWriter(tmp_path / "complex", {"z": jax.ShapeDtypeStruct((), np.complex64)})
    writer = TensorWriter(tmp_path / "new", specs(arrays))
    with pytest.raises(ValueError, match="tensor x was not announced"):
        writer.write("x", arrays["c"])
    with pytest.raises(ValueError, match=r"tensor a.weight was announced with shape \(3, 5\); got \(7,\)"):
        writer.write("a.weight", arrays["b.weight"])
    writer.write("c", arrays["c"])
    with pytest.raises(ValueError, match="tensor c was written before"):
        writer.write("c", arrays["c"])


def test_a_folder_is_overwritten_only_when_asked(tmp_path, arrays):
    write(tmp_path, arrays, max_shard_size=70)
    with pytest.raises(FileExistsError, match="is not empty; say overwrite=True"):
        write(tmp_path, arrays)
    write(tmp_path, {"c": arrays["c"]}, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(FileExistsError, match="is a file; a checkpoint is written as a folder"):
        write(tmp_path / "model.safetensors", arrays)


def test_a_missing_shard_is_named(tmp_path, arrays):
    write(tmp_path, arrays, max_shard_size=70)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model-00002-of-00002\.safetensors"):
        open_tensors(tmp_path)


def test_an_index_that_lies(tmp_path, arrays):
    write(tmp_path, arrays, max_shard_size=70)
    index = json.loads((tmp_path / INDEX).read_text())
    for change, message in [
        ({"f": "model-00001-of-00002.safetensors"}, "lacks the tensor f, which"),
        ({"a.weight": "../model.safetensors"}, "no .safetensors file of its folder"),
        ({"a.weight": 3}, "names no files"),
    ]:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], **change}}))
        with pytest.raises(ValueError, match=message):
            open_tensors(tmp_path)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(ValueError, match="is no index of tensors"):
        open_tensors(tmp_path)


def test_truncated_and_damaged_files(tmp_path, arrays):
    write(tmp_path, arrays)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for raw, message in [
        (whole[:-1], f"is truncated: tensor e ends at byte {len(whole)} of {len(whole) - 1}"),
        (whole[:20], f"is truncated or no safetensors file: a header of {length} bytes in 20"),
        (b"", "is truncated or no safetensors file: a header of 0 bytes in 0"),
        (whole[:8] + b"[" + whole[9:], "its header cannot be read"),
        (whole.replace(b'"F32"', b'"F99"'), "unknown dtype 'F99'"),
        (whole.replace(b"[3,5]", b"[3,6]"), r"tensor a.weight of shape \(3, 6\) and dtype F32 cannot lie at 0:60"),
    ]:
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=message):
            open_tensors(tmp_path)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match=r"pickle \(pytorch_model.bin\).*never loaded; convert it to safetensors"):
        open_tensors(tmp_path)


def test_nothing_to_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \.safetensors file"):
        open_tensors(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        open_tensors(tmp_path / "absent")
    for name in ("a", "b"):
        save_file({"x": np.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"2 \.safetensors files but no model\.safetensors\.index\.json"):
        open_tensors(tmp_path)


def test_a_checkpoint_is_converted_a_tensor_at_a_time(tmp_path, arrays):
    """The example of the module."""
    write(tmp_path / "model", arrays, max_shard_size=70)
    tensors = open_tensors(tmp_path / "model")
    half = {name: jax.ShapeDtypeStruct(spec.shape, np.float16) for name, spec in tensors.specs.items()}
    with TensorWriter(tmp_path / "half", half) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    for name, array in load_file(tmp_path / "half" / "model.safetensors").items():
        np.testing.assert_array_equal(array, np.asarray(arrays[name], np.float16))
