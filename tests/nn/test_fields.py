"""Configs refuse values of another type, whoever made them.

The whole test run checks types on its own, before a config can; so most of this is tested on a class of the test.
"""

import dataclasses
import math

import numpy as np
import pytest

from jaxlab.nn import DecoderConfig, RopeScaling
from jaxlab.nn.bert import BertConfig
from jaxlab.nn.fields import check_types
from jaxlab.nn.vit import ViTConfig

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 2}
CONFIGS = {
    "decoder": DecoderConfig(vocab_size=8, **SIZES),
    "bert": BertConfig(vocab_size=8, **SIZES),
    "vit": ViTConfig(image_size=16, patch_size=8, **SIZES),
}


@dataclasses.dataclass(frozen=True)
class Config:
    size: int = 2
    rate: float = 0.5
    tied: bool = False
    dtype: str = "float32"
    head: int | None = None
    image: int | tuple[int, int] = 8
    kinds: tuple[str, ...] | None = None
    scaling: RopeScaling | None = None

    def __post_init__(self):
        check_types(self)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": "16"}, "size must be an integer; got '16'"),
        ({"size": 16.0}, r"size must be an integer; got 16\.0"),
        ({"size": True}, "size must be an integer; got True"),
        ({"size": None}, "size must be an integer; got None"),
        ({"rate": "1e-5"}, "rate must be a finite number; got '1e-5'"),
        ({"rate": math.nan}, "rate must be a finite number; got nan"),
        ({"rate": False}, "rate must be a finite number; got False"),
        ({"tied": "no"}, "tied must be true or false; got 'no'"),
        ({"tied": 1}, "tied must be true or false; got 1"),
        ({"dtype": None}, "dtype must be a string; got None"),
        ({"head": 0.5}, r"head must be an integer or None; got 0\.5"),
        ({"image": (8, 8, 8)}, r"image must be an integer or a tuple of 2 values; got \(8, 8, 8\)"),
        ({"kinds": ["full"]}, r"kinds must be a tuple \(str, \.\.\.\) or None; got \['full'\]"),
        ({"kinds": (1,)}, r"kinds must be a tuple \(str, \.\.\.\) or None; got \(1,\)"),
        ({"scaling": {"factor": 2}}, r"scaling must be a RopeScaling or None; got \{'factor': 2\}"),
    ],
)
def test_values_of_another_type(change, message):
    with pytest.raises(ValueError, match=message):
        Config(**change)


def test_what_will_do():
    Config(size=np.int64(3), rate=2, head=4, image=(8, 16), kinds=(), scaling=RopeScaling("linear", 2.0))
    Config(rate=np.float32(0.5), kinds=("full", "sliding"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_checked(name):
    with pytest.raises(ValueError, match="num_heads must be an integer; got True"):
        dataclasses.replace(CONFIGS[name], num_heads=True)
    with pytest.raises(ValueError, match="norm_eps must be a finite number; got inf"):
        dataclasses.replace(CONFIGS[name], norm_eps=math.inf)


def test_scalings_are_checked():
    with pytest.raises(ValueError, match="factor must be a finite number; got inf"):
        RopeScaling("linear", math.inf)
