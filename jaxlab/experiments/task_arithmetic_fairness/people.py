"""What the experiment reads: people with features, a label and the groups they are in, in three parts.

``compas``, ``adult`` and ``simulated`` are tables; `load_texts` gives posts with the communities that they aim at, or
the rows of Adult as sentences. Whoever is in the sensitive groups, features never say so.
"""

import csv
import gzip
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxlab.data.resolve import resolve
from jaxlab.data.tables import load_table

__all__ = ["ATTRIBUTES", "TEXTS", "People", "Split", "has_texts", "load_people", "load_texts"]

ATTRIBUTES = {"compas": ("sex", "race"), "adult": ("sex", "race"), "simulated": ("group",)}
TEXTS = ("hatexplain", "adult")
# Of a training, a validation and a test part; shares of a table, or rows where these suffice.
_PARTS = {"compas": (0.3, 0.1, 0.6), "simulated": (0.4, 0.2, 0.4)}
_ADULT_ROWS = (4_000, 8_000)  # validation and test
_COMMUNITIES = 4
_LEAST_OF_COMMUNITY = 40  # rows in every part


@dataclass(frozen=True)
class Split:
    """Rows of one part.

    Attributes:
      inputs: ``[n, features]``, or a list of n texts.
      labels: ``[n]``, 0 or 1.
      membership: ``[n, g]``, 0 or 1.
    """

    inputs: Any
    labels: np.ndarray
    membership: np.ndarray


@dataclass(frozen=True)
class People:
    """Three parts with no row in common, and the names of the groups."""

    train: Split
    validation: Split
    test: Split
    groups: tuple[str, ...]

    @property
    def rows(self) -> int:
        """Of all parts."""
        return sum(len(part.labels) for part in (self.train, self.validation, self.test))


def load_people(name: str, attribute: str, seed: int, *, rows: int = 0) -> People:
    """A table with groups by one attribute, split at random.

    Features are standardised by the training part and clipped to 4 deviations.

    Args:
      name: a key of `ATTRIBUTES`.
      attribute: one of its attributes.
      seed: of the split, and of the simulated table.
      rows: at most so many of each part, 0 for all.

    Raises:
      ValueError: an unknown name or attribute.
    """
    if name not in ATTRIBUTES or attribute not in ATTRIBUTES[name]:
        known = ", ".join(f"{table}.{of}" for table, names in ATTRIBUTES.items() for of in names)
        raise ValueError(f"unknown table and attribute {name}.{attribute}; there are {known}")
    features, labels, membership, groups = _simulated(seed) if name == "simulated" else _of_table(name, attribute)
    order = np.random.default_rng(seed).permutation(len(labels))
    if name == "adult":
        held = sum(_ADULT_ROWS)
        ends = [len(labels) - held, len(labels) - _ADULT_ROWS[1]]
    else:
        ends = np.round(np.cumsum(_PARTS[name])[:2] * len(labels)).astype(int).tolist()
    parts = [part[: rows or None] for part in np.split(order, ends)]
    mean, deviation = features[parts[0]].mean(0), features[parts[0]].std(0)
    scaled = np.clip((features - mean) / np.where(deviation > 0, deviation, 1.0), -4, 4).astype(np.float32)
    splits = [Split(scaled[part], labels[part], membership[part]) for part in parts]
    return People(splits[0], splits[1], splits[2], groups)


def _of_table(name: str, attribute: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
    table = load_table(name)
    if name == "compas":
        hidden = ("sex", "race", "two-year-recid", "decile-score")
        kept = [c for c in table.columns if c not in hidden and not c.startswith("c-charge-desc")]
        groups: tuple[str, ...] = {"sex": ("women", "men"), "race": ("other", "white")}[attribute]
        ids = table.column(attribute).astype(int)
        membership, labels = np.eye(2, dtype=np.int32)[ids], table.column("two-year-recid")
    else:
        ours = [c for c in table.columns if c.startswith(f"{attribute}_")]
        kept = [c for c in table.columns if not c.startswith(("sex_", "race_", "salary_")) and c != "fnlwgt"]
        groups = tuple(c.removeprefix(f"{attribute}_") for c in ours)
        membership = np.stack([table.column(c) for c in ours], 1).astype(np.int32)
        labels = table.column("salary_>50K")
    features = np.stack([table.column(c) for c in kept], 1)
    return features, labels.astype(np.int32), membership, groups


def _simulated(seed: int, rows: int = 2_000, width: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple]:
    """Two groups, one larger, whose features are shifted and whose labels follow other weights."""
    random = np.random.default_rng(seed)
    ids = (random.uniform(size=rows) < 0.7).astype(int)
    features = random.normal(size=(rows, width)) + 0.5 * ids[:, None] * (np.arange(width) < 3)
    weights = random.normal(size=(2, width)) * 0.5 + np.linspace(1, 0, width)
    logits = (features * weights[ids]).sum(1) - 0.5
    labels = (random.logistic(size=rows) < logits).astype(np.int32)
    return features, labels, np.eye(2, dtype=np.int32)[ids], ("few", "many")


def has_texts(name: str) -> bool:
    """Whether `load_texts` finds the posts, which lie in ``$JAXLAB_DATA/hatexplain``."""
    try:
        resolve(name, holding="*.csv.gz")
    except (ValueError, FileNotFoundError):
        return False
    return True


def load_texts(name: str, seed: int, *, rows: tuple[int, int, int]) -> People:
    """Texts with several groups, at most ``rows`` of each part.

    ``hatexplain`` (Mathew et al. 2021, arXiv 2012.10289): posts, hateful or offensive against normal by the majority of
    three annotators; a post is in the group of every community that any of them says it aims at, so that some are in
    several groups and many in none. Official parts, of which the training one here holds the posts on which annotators
    disagreed. ``adult``: rows of the census as sentences, groups by sex and race both.

    Raises:
      ValueError: an unknown name.
      FileNotFoundError: the data set is not there.
    """
    if name not in TEXTS:
        raise ValueError(f"unknown texts {name!r}; there are {', '.join(TEXTS)}")
    random = np.random.default_rng(seed)
    if name == "adult":
        return _adult_sentences(random, rows)
    posts: dict[str, dict[str, str]] = {}
    folder = resolve("hatexplain", holding="*.csv.gz")
    for file in ("disagreement", "val", "test"):
        with gzip.open(folder / f"{file}.csv.gz", "rt", encoding="utf-8", newline="") as stream:
            posts |= {row["post_id"]: row for row in csv.DictReader(stream)}
    parts: dict[str, list[tuple[str, int, set[str]]]] = {"train": [], "val": [], "test": []}
    for post in posts.values():
        label = post["majority_label"]
        if post["split"] in parts and label in ("normal", "hatespeech", "offensive"):
            aims = set(re.split(r"[|,]", post["target_groups"])) - {"None", "Other", ""}
            parts[post["split"]].append((post["text"], int(label != "normal"), aims))
    found = []
    for part, most in zip(("train", "val", "test"), rows, strict=True):
        order = random.permutation(len(parts[part]))[:most]
        found.append([parts[part][i] for i in order])
    counts = [Counter(community for _, _, aims in part for community in aims) for part in found]
    frequent = [c for c, _ in counts[0].most_common() if min(count[c] for count in counts) >= _LEAST_OF_COMMUNITY]
    groups = tuple(frequent[:_COMMUNITIES])
    if len(groups) < 2:
        groups = tuple(c for c, _ in counts[0].most_common(2))
    splits = [
        Split(
            [text for text, _, _ in part],
            np.array([label for _, label, _ in part], np.int32),
            np.array([[community in aims for community in groups] for _, _, aims in part], np.int32),
        )
        for part in found
    ]
    return People(splits[0], splits[1], splits[2], groups)


def _adult_sentences(random: np.random.Generator, rows: tuple[int, int, int]) -> People:
    table = load_table("adult")
    order = random.permutation(len(table.values))[: sum(rows)]
    kinds = {
        kind: [c for c in table.columns if c.startswith(f"{kind}_")]
        for kind in ("workclass", "education", "marital-status", "occupation", "native-country", "sex", "race")
    }
    ones = {kind: np.stack([table.column(c)[order] for c in names], 1) for kind, names in kinds.items()}

    def word(kind: str, row: int) -> str:
        return kinds[kind][int(ones[kind][row].argmax())].removeprefix(f"{kind}_").replace("-", " ").lower()

    numbers = {name: table.column(name)[order].astype(int) for name in ("age", "hours-per-week", "capital-gain")}
    sentences = [
        f"A {numbers['age'][i]} year old person from {word('native-country', i)} works in {word('workclass', i)} as "
        f"{word('occupation', i)}, education {word('education', i)}, {word('marital-status', i)}, "
        f"{numbers['hours-per-week'][i]} hours per week, capital gain {numbers['capital-gain'][i]}."
        for i in range(len(order))
    ]
    names = [c for kind in ("sex", "race") for c in kinds[kind]]
    membership = np.concatenate([ones["sex"], ones["race"]], 1).astype(np.int32)
    labels = table.column("salary_>50K")[order].astype(np.int32)
    common = membership[: rows[0]].sum(0) >= _LEAST_OF_COMMUNITY
    ends = np.cumsum(rows)[:2]
    splits = [
        Split(sentences[part[0] : part[-1] + 1], labels[part], membership[part][:, common])
        for part in np.split(np.arange(len(order)), ends)
    ]
    groups = tuple(c.split("_", 1)[1] for c, kept in zip(names, common, strict=True) if kept)
    return People(splits[0], splits[1], splits[2], groups)
