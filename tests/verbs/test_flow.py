"""The file tool end to end, and what it refuses."""

import matplotlib.image
import numpy as np
import pytest
from flax import nnx

from jaxlab import cli
from jaxlab.nn.dit import DiT, DiTConfig, save_dit
from jaxlab.verbs.flow import labels_of, read_image

NAMES = (("bag", "shoe"), ("bag", "shoe", "ankle boot"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flow")
    config = DiTConfig(
        image_shape=(4, 8, 1), patch_size=4, num_classes=(2, 3), hidden_size=8, num_layers=1, num_heads=1
    )
    graph, state = nnx.split(DiT(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    leaves = nnx.to_pure_dict(state)
    model = nnx.merge(graph, state)
    # A fresh network is zero everywhere and would edit nothing.
    model.head.kernel[...] = rng.normal(size=leaves["head"]["kernel"].shape).astype(np.float32) * 0.1
    model.modulation.kernel[...] = rng.normal(size=leaves["modulation"]["kernel"].shape).astype(np.float32)
    save_dit(folder / "model.npz", model, NAMES)
    np.save(folder / "image.npy", rng.uniform(-1, 1, (4, 8)))
    return folder


def edit(folder, image, *options, source="bag, bag", target="bag, ankle boot") -> int:
    words = ["flow", "edit", str(image), "--model", str(folder / "model.npz"), "--source", source, "--target", target]
    return cli.main([*words, *options])


def test_edits_an_image(folder, tmp_path, capsys) -> None:
    out = tmp_path / "edited.npy"
    assert edit(folder, folder / "image.npy", "--out", str(out), "--strength", "1") == 0
    assert str(out) in capsys.readouterr().out.splitlines()
    edited = np.load(out)
    assert edited.shape == (4, 8, 1)
    assert np.abs(edited[..., 0] - np.load(folder / "image.npy")).max() > 1e-3
    strip = matplotlib.image.imread(tmp_path / "edited-strip.png")
    assert strip[..., :3].std() > 0.05


def test_the_same_classes_leave_it(folder, tmp_path, capsys) -> None:
    """Source and target alike: what is left is the error of the round trip."""
    out = tmp_path / "same.npy"
    assert edit(folder, folder / "image.npy", "--out", str(out), "--steps", "60", target="bag, bag") == 0
    image = np.load(folder / "image.npy")
    same = np.abs(np.load(out)[..., 0] - image).max()
    assert edit(folder, folder / "image.npy", "--out", str(out), "--steps", "60") == 0
    assert same < 0.1 * np.abs(np.load(out)[..., 0] - image).max()


def test_pictures_are_averaged(tmp_path) -> None:
    pixels = np.zeros((8, 16, 3))
    pixels[:4, :8] = 1
    matplotlib.image.imsave(tmp_path / "big.png", pixels)
    found = read_image(tmp_path / "big.png", (4, 8, 1))
    assert found.shape == (4, 8, 1)
    np.testing.assert_allclose(found[:2, :4], 1)
    np.testing.assert_allclose(found[2:], -1)


def test_labels() -> None:
    np.testing.assert_array_equal(labels_of("shoe, ankle boot", NAMES), [1, 2])
    np.testing.assert_array_equal(labels_of("none,none", NAMES), [2, 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "bag"}, "'bag' must name 2 classes separated by commas, it names 1"),
        ({"target": "bag, hat"}, "unknown class 'hat'; there are bag, shoe, ankle boot and none"),
        ({"extra": ["--strength", "-1"]}, "strength must be finite and at least 0, got -1.0"),
        ({"extra": ["--delay-rate", "0"]}, "delay_rate must be in (0, 1]"),
        ({"extra": ["--steps", "1000000000000"]}, "--steps must be at most 100000, got 1000000000000"),
        ({"extra": ["--strength", "1e39"]}, "strength must be finite and at least 0, got 1e+39"),
        ({"extra": ["--steps", "0"]}, "steps of a time grid must be at least 1, got 0"),
        ({"extra": ["--out", "x.gif"]}, "an image is written as .png or .npy"),
        ({"image": "absent.npy"}, "No such file"),
        ({"image": "image.tif"}, "an image is a .png or .npy file"),
        ({"image": "odd.npy"}, "odd.npy is [3, 8, 1]; the network takes [4, 8, 1] or whole multiples"),
        ({"image": "empty.npy"}, "empty.npy is [0, 8, 1]; the network takes [4, 8, 1] or whole multiples"),
        ({"image": "words.npy"}, "words.npy: an array of real numbers is needed, it is <U1"),
        ({"image": "cut.npy"}, "cut.npy is no .npy file"),
        ({"image": "text.png"}, "text.png is no image (not a PNG file)"),
        ({"image": "cut.png"}, "cut.png is no image"),
        ({"image": "folder.png"}, "Is a directory"),
        ({"extra": ["--strength", "nan"]}, "strength must be finite and at least 0, got nan"),
        ({"extra": ["--delay-rate", "nan"]}, "delay_rate must be in (0, 1]"),
        ({"extra": ["--out", "absent/x.png"]}, "there is no folder absent"),
        ({"image": "loud.npy"}, "loud.npy: values must lie in [-1, 1], they are in [2, 2]"),
    ],
)
def test_bad_input_is_one_line(folder, capsys, options, message) -> None:
    np.save(folder / "odd.npy", np.zeros((3, 8)))
    np.save(folder / "loud.npy", np.full((4, 8), 2.0))
    np.save(folder / "empty.npy", np.zeros((0, 8)))
    np.save(folder / "words.npy", np.array([["a"]]))
    (folder / "cut.npy").write_bytes((folder / "image.npy").read_bytes()[:-9])
    (folder / "text.png").write_text("hello")
    matplotlib.image.imsave(folder / "cut.png", np.zeros((4, 8)))
    (folder / "cut.png").write_bytes((folder / "cut.png").read_bytes()[:-30])
    (folder / "folder.png").mkdir(exist_ok=True)
    labels = {name: options[name] for name in ("source", "target") if name in options}
    assert edit(folder, folder / options.get("image", "image.npy"), *options.get("extra", []), **labels) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_image_itself_and_folders_are_not_written_over(folder, tmp_path, capsys) -> None:
    image = tmp_path / "a-strip.png"
    matplotlib.image.imsave(image, np.zeros((4, 8)), cmap="gray")
    before = image.read_bytes()
    (tmp_path / "b.png").mkdir()
    for out, message in (
        (image, "is the image itself, which would be lost"),
        (tmp_path / "a.png", "is the image itself, which would be lost"),
        (tmp_path / "b.png", "is a folder"),
    ):
        assert edit(folder, image, "--out", str(out)) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert image.read_bytes() == before


@pytest.mark.parametrize(("mode", "size"), [("L", (4, 8)), ("LA", (4, 8, 2)), ("RGBA", (8, 16, 4)), ("I;16", (4, 8))])
def test_kinds_of_png(tmp_path, mode, size) -> None:
    """Grey, transparent, coloured and of 16 bits: the luminance that Pillow itself finds."""
    pillow = pytest.importorskip("PIL.Image", reason="writes .png files with Pillow")
    deep = mode == "I;16"
    pixels = np.random.default_rng(0).integers(0, 2**16 if deep else 2**8, size).astype(np.uint16 if deep else np.uint8)
    pillow.fromarray(pixels).save(tmp_path / "x.png")
    found = read_image(tmp_path / "x.png", (4, 8, 1))
    grey = pixels[..., : 1 if mode == "LA" else 3].mean(2) if pixels.ndim == 3 else pixels
    grey = grey.reshape(4, size[0] // 4, 8, size[1] // 8).mean((1, 3))
    np.testing.assert_allclose(found[..., 0], 2 * grey / (2**16 - 1 if deep else 2**8 - 1) - 1, atol=1e-6)


def test_hundreds_of_steps_fit_the_strip(folder, tmp_path) -> None:
    out = tmp_path / "long.npy"
    assert edit(folder, folder / "image.npy", "--out", str(out), "--steps", "700", "--delay-rate", "1") == 0
    strip = matplotlib.image.imread(tmp_path / "long-strip.png")
    assert strip.shape[1] < 4000


def test_two_channels_are_written_as_arrays(tmp_path, capsys) -> None:
    """No picture has two channels: the edit is an array by default, and the strip shows their mean."""
    config = DiTConfig(image_shape=(4, 4, 2), patch_size=4, num_classes=(2,), hidden_size=4, num_layers=1, num_heads=1)
    save_dit(tmp_path / "model.npz", DiT(config, rngs=nnx.Rngs(0)), NAMES[:1])
    image = tmp_path / "image.npy"
    np.save(image, np.zeros((4, 4, 2)))
    assert edit(tmp_path, image, source="bag", target="shoe") == 0
    assert np.load(tmp_path / "image-edited.npy").shape == (4, 4, 2)
    assert (tmp_path / "image-edited-strip.png").exists()
    assert edit(tmp_path, image, "--out", str(tmp_path / "x.png"), source="bag", target="shoe") == 2
    assert "x.png: an image of 2 channels is written as .npy" in capsys.readouterr().err
    # An ending in capitals stays as it is.
    assert edit(tmp_path, image, "--out", str(tmp_path / "loud.NPY"), source="bag", target="shoe") == 0
    assert np.load(tmp_path / "loud.NPY").shape == (4, 4, 2)


def test_help(capsys) -> None:
    assert cli.main(["flow"]) == 0
    assert cli.main(["flow", "edit", "--help"]) == 0
    assert "--strength" in capsys.readouterr().out
