"""Checkpoints of other libraries: read them, write them, and the lazy tensors that tools on them stand on.

- `load` gives a `Model` (config, parameters, ``apply_fn``, tokenizer) from a Hugging Face folder, a GGUF file, a
  built-in name or a name on the hub; `save` writes a folder that ``transformers`` loads.
- `open_tensors` and `TensorWriter` read and write named tensors without ever holding a whole model.
- `save_state` and `restore_state` keep parameters with their optimiser state, sharded, through orbax.
- `load_adapters` and `save_adapters` read and write low-rank adapters as PEFT has them.
- A `Family` is how one model type maps to one of our networks.

Tokenizers, chat templates and GGUF files need ``pip install 'jaxlab[models]'``; those packages are imported when used.

Example::

    model = load("smollm2-135m-instruct", dtype="bfloat16")
    save("copy", model)
"""

from jaxlab.nn.checkpoints.adapters import load_adapters, save_adapters
from jaxlab.nn.checkpoints.decoders import find_decoder_family
from jaxlab.nn.checkpoints.family import Family, find_family, known_families
from jaxlab.nn.checkpoints.model import Model, load, save
from jaxlab.nn.checkpoints.sources import BUILT_IN, locate
from jaxlab.nn.checkpoints.state import restore_state, save_state
from jaxlab.nn.checkpoints.tensors import Tensors, TensorWriter, open_tensors

__all__ = [
    "BUILT_IN",
    "Family",
    "Model",
    "TensorWriter",
    "Tensors",
    "find_decoder_family",
    "find_family",
    "known_families",
    "load",
    "load_adapters",
    "locate",
    "open_tensors",
    "restore_state",
    "save",
    "save_adapters",
    "save_state",
]
