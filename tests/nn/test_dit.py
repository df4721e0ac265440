"""The network: shapes, a fresh one is zero, labels and time matter once trained, files, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlab.nn.dit import DiT, DiTConfig, load_dit, save_dit
from tests.flow.conftest import as_a_user

CONFIG = DiTConfig(
    image_shape=(4, 8, 2), patch_size=2, num_classes=(3, 5), hidden_size=8, num_layers=2, num_heads=2, mlp_ratio=2
)
IMAGES = jax.random.normal(jax.random.key(0), (2, 4, 8, 2))
TIME = jnp.array([0.2, 0.9])
LABELS = jnp.array([[0, 4], [3, 5]])


@pytest.fixture(scope="module")
def model() -> DiT:
    """A network all of whose weights are drawn, also those that start at zero."""
    graph, state = nnx.split(DiT(CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), state))


def test_a_fresh_network_is_zero() -> None:
    np.testing.assert_array_equal(DiT(CONFIG, rngs=nnx.Rngs(0))(IMAGES, TIME, LABELS), 0)


def test_samples_do_not_see_each_other_and_everything_counts(model) -> None:
    found = model(IMAGES, TIME, LABELS)
    assert found.shape == IMAGES.shape
    np.testing.assert_allclose(model(IMAGES[:1], TIME[:1], LABELS[:1]), found[:1], atol=1e-4)
    for other in (
        model(IMAGES, TIME.at[0].set(0.3), LABELS),
        model(IMAGES, TIME, LABELS.at[0, 0].set(3)),
        model(IMAGES, TIME, LABELS.at[0, 1].set(5)),
        model(IMAGES.at[0, 0, 0, 0].add(1.0), TIME, LABELS),
    ):
        assert jnp.abs(other[0] - found[0]).max() > 1e-3
        np.testing.assert_allclose(other[1], found[1], atol=1e-4)
    # A change in one corner reaches the other: the patches attend to each other.
    assert jnp.abs(other[0, -1, -1] - found[0, -1, -1]).max() > 1e-4


def test_against_a_loop_over_tokens_in_numpy(model) -> None:
    """One sample through the equations of the module, patch by patch."""
    state = {jax.tree_util.keystr(p, simple=True, separator="."): np.asarray(x, np.float64)
             for p, x in jax.tree.leaves_with_path(nnx.state(model))}  # fmt: skip
    by_name = {name.removesuffix(".value"): x for name, x in state.items()}

    def linear(name, x):
        return x @ by_name[f"{name}.kernel"] + by_name[f"{name}.bias"]

    def silu(x):
        return x / (1 + np.exp(-x))

    def norm(x):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-6)

    frequencies = np.exp(-np.log(10_000) * np.arange(64) / 64)
    angles = 1000 * 0.2 * frequencies
    condition = linear("time_out", silu(linear("time_in", np.concatenate([np.cos(angles), np.sin(angles)]))))
    condition = silu(condition + by_name["labels.0.weight"][0] + by_name["labels.1.weight"][4])
    places = [(y, x) for y in (0, 2) for x in (0, 2, 4, 6)]
    image = np.asarray(IMAGES[0], np.float64)
    tokens = [linear("patch", image[y : y + 2, x : x + 2].reshape(-1)) for y, x in places]
    tokens = [token + place for token, place in zip(tokens, by_name["positions"], strict=True)]
    for slot, label in ((0, 0), (1, 4)):
        added = by_name["places"][slot] * by_name[f"labels.{slot}.weight"][label]
        tokens = [token + extra for token, extra in zip(tokens, added, strict=True)]
    for layer in range(2):
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = np.split(
            linear(f"blocks.{layer}.modulation", condition), 6
        )
        mixed = [linear(f"blocks.{layer}.query_key_value", norm(h) * (1 + scale_1) + shift_1) for h in tokens]
        query, key, value = (np.array([np.split(m, 3)[i].reshape(2, 4) for m in mixed]) for i in range(3))
        out = []
        for i in range(8):
            heads = []
            for head in range(2):
                scores = np.exp(key[:, head] @ query[i, head] / 2)
                heads.append((scores / scores.sum()) @ value[:, head])
            out.append(tokens[i] + gate_1 * linear(f"blocks.{layer}.attention_out", np.concatenate(heads)))
        tokens = []
        for h in out:
            inner = linear(f"blocks.{layer}.mlp_in", norm(h) * (1 + scale_2) + shift_2)
            inner = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
            tokens.append(h + gate_2 * linear(f"blocks.{layer}.mlp_out", inner))
    shift, scale = np.split(linear("modulation", condition), 2)
    expected = np.zeros((4, 8, 2))
    for (y, x), h in zip(places, tokens, strict=True):
        expected[y : y + 2, x : x + 2] = linear("head", norm(h) * (1 + scale) + shift).reshape(2, 2, 2)
    # Float32 sines of angles of 200 are off by 1e-5, and the weights are of order one.
    np.testing.assert_allclose(model(IMAGES[:1], TIME[:1], LABELS[:1])[0], expected, atol=2e-3)


def test_unknown_labels_give_nan(model) -> None:
    found = model(IMAGES, TIME, LABELS.at[0, 0].set(4))
    assert np.all(np.isnan(found[0]))
    assert np.all(np.isfinite(found[1]))


def test_files_restore_the_network(model, tmp_path) -> None:
    names = (("a", "b", "c"), ("p", "q", "r", "s", "t"))
    save_dit(tmp_path / "model.npz", model, names)
    again, found = load_dit(tmp_path / "model.npz")
    assert found == names
    assert again.config == CONFIG
    np.testing.assert_array_equal(again(IMAGES, TIME, LABELS), model(IMAGES, TIME, LABELS))
    with pytest.raises(ValueError, match=r"must name \(3, 5\) classes a slot, got \(3,\)"):
        save_dit(tmp_path / "other.npz", model, names[:1])
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    (tmp_path / "text.npz").write_text("hello")
    for name in ("other.npz", "text.npz"):
        with pytest.raises(ValueError, match=f"{name} is not a network that save_dit wrote"):
            load_dit(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 3}, "patch_size must divide height and width 4 x 8; got 3"),
        ({"num_heads": 3}, "num_heads must divide hidden_size 8; got 3"),
        ({"num_layers": 0}, "num_layers must be at least 1; got 0"),
        ({"num_classes": ()}, r"num_classes must be at least 1; got \(\)"),
        ({"num_classes": (2.5,)}, r"num_classes must be made of whole numbers; got \(2.5,\)"),
        ({"image_shape": (4, 8)}, r"image_shape must be height, width and channels; got \(4, 8\)"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16; got 'int8'"),
    ],
)
def test_bad_configs_are_named(change, message) -> None:
    fields = {"image_shape": (4, 8, 2), "patch_size": 2, "num_classes": (3,), "hidden_size": 8, "num_heads": 2}
    with as_a_user(), pytest.raises(ValueError, match=message):
        DiTConfig(**{**fields, **change})


def test_bad_input_is_named(model) -> None:
    with pytest.raises(ValueError, match=r"images must be \(4, 8, 2\) each; got \(8, 4, 2\)"):
        model(IMAGES.swapaxes(1, 2), TIME, LABELS)
    with pytest.raises(ValueError, match=r"labels need 2 slots; got shape \(2, 1\)"):
        model(IMAGES, TIME, LABELS[:, :1])
    for time, labels in ((TIME[:1], LABELS), (TIME, LABELS[:1])):
        with as_a_user(), pytest.raises(ValueError, match=r"2 images need as many times and labels; got shapes"):
            model(IMAGES, time, labels)
    with as_a_user(), pytest.raises(TypeError, match="labels must be whole numbers; got float32"):
        model(IMAGES, TIME, LABELS.astype(jnp.float32))


def test_no_images() -> None:
    assert DiT(CONFIG, rngs=nnx.Rngs(0))(IMAGES[:0], TIME[:0], LABELS[:0]).shape == (0, 4, 8, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda arrays: arrays | {"head/bias/value": arrays["head/bias/value"][:3]},
            r"head/bias.* is float32\[3\], not",
        ),
        (lambda arrays: arrays | {"head/bias/value": arrays["head/bias/value"] * np.nan}, r"head/bias.* is not finite"),
        (lambda arrays: arrays | {"about": np.array("[1]")}, "list indices"),
        (lambda arrays: arrays | {"about": np.array("{")}, "Expecting property name"),
        (
            lambda arrays: arrays | {"about": np.array(str(arrays["about"]).replace('"a", ', ""))},
            r"its class names are not \(3, 5\) in number",
        ),
        (
            lambda arrays: arrays | {"about": np.array(str(arrays["about"]).replace("float32", "float8"))},
            "dtype must be one of",
        ),
    ],
)
def test_damaged_files_are_named(model, tmp_path, change, message) -> None:
    path = tmp_path / "model.npz"
    save_dit(path, model, (("a", "b", "c"), ("p", "q", "r", "s", "t")))
    with np.load(path) as arrays:
        np.savez(path, **change(dict(arrays)))
    with pytest.raises(ValueError, match=f"model.npz is not a network that save_dit wrote .*{message}"):
        load_dit(path)
