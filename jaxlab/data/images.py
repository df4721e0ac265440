"""Labelled images: handwritten digits that scikit-learn brings along, Hugging Face data sets by name.

``digits`` is the test part of the *Optical Recognition of Handwritten Digits* set (Alpaydin and Kaynak, UCI, 1998):
1797 images of 8 x 8 pixels. Only its file is read; scikit-learn itself is not imported.
"""

import gzip
import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxlab.data.hub import DownloadError

__all__ = ["LabelledImages", "load_images"]


class LabelledImages(NamedTuple):
    """Images and their classes.

    Attributes:
      images: ``[n, features]``, float32 in [0, 1], pixels (and channels) in a row.
      labels: ``[n]``, int32 from 0 on.
    """

    images: np.ndarray
    labels: np.ndarray

    @property
    def n_classes(self) -> int:
        """Largest class and one."""
        return int(self.labels.max()) + 1


def load_images(name: str = "digits", *, split: str = "train") -> LabelledImages:
    """A data set of images that are all of one size.

    Args:
      name: ``digits``, or ``hf:OWNER/NAME`` (``hf:ylecun/mnist``, ``hf:uoft-cs/cifar10``), downloaded when asked for.
      split: of a Hugging Face data set.

    Raises:
      DownloadError: if the data set cannot be had; digits are found where scikit-learn is installed.
      ValueError: for an unknown name, or a data set without one column of images and one of labels.
    """
    if name == "digits":
        return _digits()
    if name.startswith("hf:"):
        return _hugging_face(name.removeprefix("hf:"), split)
    raise ValueError(f"unknown images {name!r}: known are digits and hf:OWNER/NAME")


def _digits() -> LabelledImages:
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DownloadError("the digits come with scikit-learn, which is not installed: pip install scikit-learn")
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return LabelledImages(rows[:, :-1] / 16, rows[:, -1].astype(np.int32))


def _hugging_face(reference: str, split: str) -> LabelledImages:
    try:
        import datasets

        rows = datasets.load_dataset(reference, split=split)
    except Exception as error:  # the library raises anything from OSError to its own classes
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DownloadError(
            f"cannot get hf:{reference}: datasets.load_dataset failed with {type(error).__name__}: {reason}. "
            "Without a network use 'digits'"
        ) from error
    pictures = [key for key, feature in rows.features.items() if isinstance(feature, datasets.Image)]
    classes = [key for key, feature in rows.features.items() if isinstance(feature, datasets.ClassLabel)]
    if len(pictures) != 1 or len(classes) != 1:
        raise ValueError(f"hf:{reference} needs one column of images and one of labels, has {pictures} and {classes}")
    images = np.stack([np.asarray(picture, np.float32).ravel() / 255 for picture in rows[pictures[0]]])
    return LabelledImages(images, np.asarray(rows[classes[0]], np.int32))
