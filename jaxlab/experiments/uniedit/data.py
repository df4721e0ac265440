"""Small pictures of known classes, and pairs of them side by side: a benchmark of editing whose regions are known.

A pair is two pictures and its condition their two classes. An edit changes the class on the right; what happens on the
left is damage, measured without any network, and a classifier says whether the right became what it should.
"""

import gzip
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlab.data import resolve

__all__ = ["DIGITS", "Pairs", "Pictures", "load_pictures", "make_pairs"]

DIGITS = "digits"
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_GARMENTS = (
    *("t-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)


class Pictures(NamedTuple):
    """Pictures in [-1, 1], shuffled and cut in two.

    Attributes:
      name: of the data set.
      train: ``[N, H, W, 1]``.
      train_labels: ``[N]``.
      test: pictures that no model has seen.
      test_labels: their classes.
      classes: names of the classes.
    """

    name: str
    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...]


class Pairs(NamedTuple):
    """Pairs to edit.

    Attributes:
      images: ``[B, H, 2 W, 1]``.
      source: classes left and right, ``[B, 2]``.
      target: the same with another class on the right.
    """

    images: np.ndarray
    source: np.ndarray
    target: np.ndarray


def load_pictures(name: str, *, seed: int, held_out: int) -> Pictures:
    """Read a data set and hold pictures out.

    Args:
      name: "digits" (8 x 8, in scikit-learn), "fashion" (Fashion-MNIST averaged to 14 x 14: all 70,000 pictures of the
        Debian package dataset-fashion-mnist where that is installed, otherwise ``fashion_mnist_900`` of
        ``$JAXLAB_DATA``, otherwise the digits), or a path to an .npz file with pictures ``x`` ``[N, H, W]`` in [0, 255]
        and classes ``y``.
      seed: of the shuffle.
      held_out: number of pictures held out.

    Raises:
      ValueError: an unknown name, a file of another kind, or fewer than twice ``held_out`` pictures.
      ModuleNotFoundError: the digits without scikit-learn.
    """
    name, images, labels, classes = _read(name)
    if len(images) < 2 * held_out:
        raise ValueError(f"{name} has {len(images)} pictures, too few to hold {held_out} out")
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = images[order, ..., None].astype(np.float32), labels[order].astype(np.int32)
    return Pictures(name, images[held_out:], labels[held_out:], images[:held_out], labels[:held_out], classes)


def make_pairs(images: np.ndarray, labels: np.ndarray, *, count: int, classes: int, seed: int) -> Pairs:
    """Draw pairs of pictures, and another class for the right one of each."""
    rng = np.random.default_rng(seed)
    index = rng.integers(len(images), size=(count, 2))
    source = labels[index]
    target = source.copy()
    target[:, 1] = (source[:, 1] + rng.integers(1, classes, size=count)) % classes
    return Pairs(np.concatenate([images[index[:, 0]], images[index[:, 1]]], axis=2), source, target)


def _read(name: str) -> tuple[str, np.ndarray, np.ndarray, tuple[str, ...]]:
    if name == "fashion":
        if _DEBIAN.is_dir():
            parts = [(_idx(_DEBIAN / f"{part}-images-idx3-ubyte.gz"), _idx(_DEBIAN / f"{part}-labels-idx1-ubyte.gz"))
                     for part in ("train", "t10k")]  # fmt: skip
            images, labels = (np.concatenate(both) for both in zip(*parts, strict=True))
            return "fashion", _halve(images), labels, _GARMENTS
        try:
            folder: Any = resolve("fashion_mnist_900")
        except (ValueError, FileNotFoundError):
            return _read(DIGITS)
        with np.load(folder / "fashion_mnist_900.npz") as arrays:
            return "fashion_mnist_900", _halve(arrays["x"]), arrays["y"], _GARMENTS
    if name == DIGITS:
        from sklearn.datasets import load_digits

        found = load_digits()
        return DIGITS, found.images / 8 - 1, found.target, tuple(map(str, range(10)))
    if not name.endswith(".npz"):
        raise ValueError(f"data must be 'digits', 'fashion' or an .npz file, got {name!r}")
    with np.load(name) as arrays:
        if not {"x", "y"} <= set(arrays) or arrays["x"].ndim != 3:
            raise ValueError(f"{name}: an .npz file needs pictures x [N, H, W] and classes y, it has {sorted(arrays)}")
        images, labels = arrays["x"] / 127.5 - 1, arrays["y"]
    return Path(name).stem, images, labels, tuple(map(str, range(int(labels.max()) + 1)))


def _halve(images: np.ndarray) -> np.ndarray:
    count, height, width = images.shape
    return images.reshape(count, height // 2, 2, width // 2, 2).mean((2, 4)) / 127.5 - 1


def _idx(path: Path) -> np.ndarray:
    """A file of the MNIST format: two zero bytes, dtype, number of axes, their sizes, the values."""
    with gzip.open(path) as file:
        content = file.read()
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
