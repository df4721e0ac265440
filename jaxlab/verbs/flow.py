"""``jaxlab flow edit``: change the classes that an image shows, with a network that ``jaxlab run uniedit`` trained.

The image is inverted by Uni-Inv under its own classes and edited by Uni-Edit (arXiv 2504.13109).
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import flow
from jaxlab.nn.dit import load_dit

__all__ = ["labels_of", "main", "read_image"]

_NOTHING = "none"
_MASKS_SHOWN = 12
_MOST_STEPS = 100_000
_CHANNELS_OF_PICTURES = (1, 3)


def main(arguments: Sequence[str]) -> int:
    """Parse the words after ``jaxlab flow``, edit, write the image and a strip of what was done.

    Raises:
      ValueError: bad input, one line.
    """
    parser = _parser()
    try:
        options = parser.parse_args(arguments or ["--help"])
    except SystemExit:  # the help was printed
        return 0
    if not options.image.name:
        raise ValueError(f"{str(options.image)!r} is no image; an image is a .png or .npy file")
    if options.steps > _MOST_STEPS:
        raise ValueError(f"--steps must be at most {_MOST_STEPS}, got {options.steps}")
    model, class_names = load_dit(options.model)
    channels = model.config.image_shape[2]
    is_picture = channels in _CHANNELS_OF_PICTURES
    out = options.out or options.image.with_name(f"{options.image.stem}-edited{'.png' if is_picture else '.npy'}")
    if out.suffix.lower() == ".png" and not is_picture:
        raise ValueError(f"--out {out}: an image of {channels} channels is written as .npy")
    if out.suffix.lower() not in (".png", ".npy"):
        raise ValueError(f"--out {out}: an image is written as .png or .npy")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    strip = out.with_name(f"{out.stem}-strip.png")
    for path in (out, strip):
        if path.is_dir():
            raise ValueError(f"--out {out}: {path} is a folder")
        if path.resolve() == options.image.resolve():
            raise ValueError(f"--out {out}: {path} is the image itself, which would be lost")
    source, target = (labels_of(text, class_names) for text in (options.source, options.target))
    null = np.asarray(model.config.null_labels)
    image = read_image(options.image, model.config.image_shape)
    # The grid is part of the program, for its errors are told where it is known.
    edit = functools.partial(flow.uni_edit, grid=flow.time_grids.uniform(options.steps))
    found = jax.jit(edit, static_argnames=("strength", "delay_rate", "return_masks"))(
        flow.from_nnx(model, stages=("prepare", "apply")),
        jnp.asarray(image)[None],
        source=jnp.asarray(source)[None],
        target=jnp.asarray(target)[None],
        inversion=jnp.asarray(null if options.null_inversion else source)[None],
        strength=options.strength,
        delay_rate=options.delay_rate,
        return_masks=True,
    )
    edited = np.asarray(found.z[0])
    if not np.all(np.isfinite(edited)):
        raise ValueError(
            f"the edit of {options.image} is not finite; take a smaller --strength than {options.strength}"
        )
    _write(out, edited)
    _strip(strip, image, np.asarray(found.masks[:, 0]), edited)
    changed = np.abs(edited.astype(np.float64) - image).mean() / 2
    print(f"{options.source} -> {options.target}: mean change {changed:.3g} of the range of a pixel")
    print(out)
    print(strip)
    return 0


def labels_of(text: str, class_names: Sequence[Sequence[str]]) -> np.ndarray:
    """Ids of the classes named in a text, one a slot, separated by commas; "none" is the null label.

    Raises:
      ValueError: another number of names, or a name that is not of the slot.
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) != len(class_names):
        raise ValueError(f"{text!r} must name {len(class_names)} classes separated by commas, it names {len(words)}")
    for word, names in zip(words, class_names, strict=True):
        if word != _NOTHING and word not in names:
            raise ValueError(f"unknown class {word!r}; there are {', '.join(names)} and {_NOTHING}")
    return np.array(
        [
            len(names) if word == _NOTHING else list(names).index(word)
            for word, names in zip(words, class_names, strict=True)
        ],
        np.int32,
    )


def read_image(path: Path, shape: tuple[int, int, int]) -> np.ndarray:
    """An image in [-1, 1] of a shape; a larger one of whole multiples is averaged.

    Args:
      path: .png, or .npy with an array ``[H, W]`` or ``[H, W, C]`` in [-1, 1].
      shape: height, width and channels.

    Raises:
      OSError: the file cannot be read.
      ValueError: another kind of file, size or number of channels, or values missing or out of range.
    """
    height, width, channels = shape
    match path.suffix.lower():
        case ".npy":
            image = _read_array(path)
        case ".png":
            image = _read_picture(path)
        case _:
            raise ValueError(f"{path}: an image is a .png or .npy file")
    if image.ndim == 2:
        image = image[..., None]
    if image.ndim == 3 and image.shape[2] == 3 and channels == 1:
        image = image.mean(2, keepdims=True)
    if (
        image.ndim != 3
        or not image.size
        or image.shape[2] != channels
        or image.shape[0] % height
        or image.shape[1] % width
    ):
        raise ValueError(f"{path} is {list(image.shape)}; the network takes {list(shape)} or whole multiples of it")
    if not np.all(np.isfinite(image)) or np.abs(image).max() > 1:
        raise ValueError(f"{path}: values must lie in [-1, 1], they are in [{image.min():g}, {image.max():g}]")
    return image.reshape(height, image.shape[0] // height, width, image.shape[1] // width, channels).mean((1, 3))


def _read_array(path: Path) -> np.ndarray:
    try:
        values = np.load(path, allow_pickle=False)
    except OSError:
        raise
    # numpy's parser of the header lets errors of several kinds through.
    except Exception as error:
        raise ValueError(f"{path} is no .npy file ({error})") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        kind = values.dtype if isinstance(values, np.ndarray) else "an archive"
        raise ValueError(f"{path}: an array of real numbers is needed, it is {kind}")
    return values.astype(np.float32)


def _read_picture(path: Path) -> np.ndarray:
    """A .png in [-1, 1], its transparency ignored; of a moving one the first picture."""
    from matplotlib.image import imread

    try:
        pixels = imread(path)
    except OSError as error:
        # Of a file cut short it does not say which.
        raise error if error.filename else ValueError(f"{path} is no image ({error})") from None
    # Pillow reports a damaged file by exceptions of several kinds.
    except Exception as error:
        raise ValueError(f"{path} is no image ({error})") from None
    return 2 * (pixels if pixels.ndim == 2 else pixels[..., :3]).astype(np.float32) - 1


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}; see jaxlab flow edit --help")

    parser = Parser(prog="jaxlab flow", description="Edit images with a flow-matching model.")
    verbs = parser.add_subparsers(required=True, metavar="edit", parser_class=Parser)
    verb = verbs.add_parser("edit", help="change the classes that an image shows, and leave the rest")
    verb.add_argument("image", type=Path, help=".png, or .npy in [-1, 1], of the network's size or whole multiples")
    verb.add_argument("--model", type=Path, required=True, help="model.npz of a run of jaxlab run uniedit")
    verb.add_argument("--source", required=True, help='classes it shows, one a slot: "bag, sneaker"; "none" is none')
    verb.add_argument("--target", required=True, help="classes it shall show")
    verb.add_argument("--strength", type=float, default=0.5, help="step along the difference (default 0.5)")
    verb.add_argument("--delay-rate", type=float, default=0.6, help="share of the steps inverted (default 0.6)")
    verb.add_argument("--steps", type=int, default=15, help="steps of the time grid (default 15)")
    verb.add_argument("--null-inversion", action="store_true", help="invert without a condition, as the paper does")
    verb.add_argument("--out", type=Path, help=".png or .npy to write (default IMAGE-edited.png)")
    return parser


def _write(path: Path, image: np.ndarray) -> None:
    if path.suffix.lower() == ".npy":
        # By its name numpy would add a second ending to one in capitals.
        with path.open("wb") as file:
            np.save(file, image)
        return
    from matplotlib.image import imsave

    pixels = np.clip((image + 1) / 2, 0, 1)
    imsave(path, np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels)


def _strip(path: Path, image: np.ndarray, masks: np.ndarray, edited: np.ndarray) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # More would not fit the width that a picture may have.
    shown = np.unique(np.linspace(0, len(masks) - 1, min(len(masks), _MASKS_SHOWN)).round().astype(int))
    figure = Figure(figsize=(1.4 * (len(shown) + 2), 1.6), layout="constrained")
    pictures = [("source", image), *((f"mask {k + 1}", masks[k]) for k in shown), ("edit", edited)]
    for axes, (title, picture) in zip(figure.subplots(ncols=len(pictures)), pictures, strict=True):
        if title.startswith("mask"):
            axes.imshow(picture[..., 0], cmap="magma", vmin=0, vmax=1)
        else:
            shown_as = picture if picture.shape[2] in _CHANNELS_OF_PICTURES else picture.mean(2)
            axes.imshow(np.clip((shown_as + 1) / 2, 0, 1), cmap="gray", vmin=0, vmax=1)
        axes.set_title(title, fontsize=8)
        axes.axis("off")
    FigureCanvasAgg(figure).print_figure(path, dpi=150)
