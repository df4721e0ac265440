"""Load a model with its tokenizer, and save one so that ``transformers`` loads it.

Example::

    model = load("smollm2-135m-instruct")
    logits = model.apply_fn(model.params, jnp.asarray([model.tokenizer.encode("Once upon a time")]))
    save("copy", model)                                      # AutoModelForCausalLM.from_pretrained("copy")
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxlab.nn.checkpoints.family import Family, find_family
from jaxlab.nn.checkpoints.gguf import open_gguf
from jaxlab.nn.checkpoints.llama2c import open_llama2c, read_llama2c_tokenizer
from jaxlab.nn.checkpoints.reading import parameter_shapes, path_of, read_params, tensor_names
from jaxlab.nn.checkpoints.sources import locate
from jaxlab.nn.checkpoints.tensors import Tensors, TensorWriter, check_writable, open_tensors
from jaxlab.nn.checkpoints.vocabulary import gguf_tokenizer
from jaxlab.nn.tokenizer import TOKENIZER_FILES, Tokenizer, read_tokenizer
from jaxlab.nn.untrusted import read_object, refused

__all__ = ["Model", "load", "save"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A network with its parameters and its tokenizer.

    Attributes:
      config: of the network.
      params: nested dict, paths as the names in a checkpoint, blocks stacked.
      family: how both are written in a checkpoint.
      tokenizer: None where there is none.
      stop_ids: tokens that end a generated text.
      source: the file or folder it was read from; None if it was not.
    """

    config: Any
    params: Any
    family: Family
    tokenizer: Tokenizer | None = None
    stop_ids: tuple[int, ...] = ()
    source: Path | None = None

    @functools.cached_property
    def apply_fn(self) -> Callable[..., Any]:
        """The network as a pure function ``apply_fn(params, inputs)``; always the same object, so jit compiles once."""
        return self.family.make_apply(self.config)


def load(
    model: str | Path, *, dtype: str | None = None, sharding: Any = None, download: bool = False, tokenizer: bool = True
) -> Model:
    """Load a model.

    The memory needed is that of the parameters and of one tensor. Nothing in a checkpoint is executed.

    Args:
      model: the path of a Hugging Face folder, a ``.gguf`` file or a llama2.c folder; a built-in name (see
        `jaxlab.nn.checkpoints.sources`); or ``OWNER/NAME`` on the Hugging Face hub.
      dtype: in which the parameters are kept and products computed: "float32", "bfloat16" or "float16". None means that
        of the checkpoint, float32 for a GGUF file.
      sharding: where the parameters go: a `jax.sharding.Sharding` for all, or a function from the config to a tree of
        them like the parameters; each device then reads only its part. None means the default device.
      download: fetch a model of the hub that is not on this machine.
      tokenizer: read the tokenizer too.

    Raises:
      DownloadError: if a download fails.
      FileNotFoundError: if something is missing, naming it.
      ModuleNotFoundError: if a package that this needs is not installed, naming it.
      ValueError: if the name is unknown, or a file is damaged or not supported; the message says which and why.

    Example::

        mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        where = lambda config: jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(config, mesh))
        model = load("Qwen/Qwen3-8B", dtype="bfloat16", sharding=where, download=True)
    """
    source = locate(model, download=download)
    settings, tensors, found_tokenizer = _open(source, tokenizer)
    _check_depth(settings, tensors, source)
    with refused(f"the config of {source}"):
        family = find_family(settings, source=f"the config of {source}")
    config = _read_config(family, settings, source)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    if found_tokenizer is not None and hasattr(config, "vocab_size"):
        found_tokenizer.check_fits(config.vocab_size, source=str(source))
    if callable(sharding):
        sharding = sharding(config)
    with refused(source):
        params = read_params(family, config, tensors, sharding=sharding, source=str(source))
    return Model(
        config=config,
        params=params,
        family=family,
        tokenizer=found_tokenizer,
        stop_ids=_stop_ids(settings.get("eos_token_id"), found_tokenizer, source),
        source=source,
    )


def save(
    directory: str | Path,
    model: Model,
    *,
    dtype: str | None = None,
    max_shard_size: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write a Hugging Face folder: safetensors, ``config.json`` and the tokenizer, which ``transformers`` loads.

    Tensors are written one at a time. ``config.json`` comes last, so that a folder with one is complete.

    Args:
      directory: folder to write; made if it is missing.
      model: what to write; for a network that was not loaded
        ``Model(config=config, params=params, family=find_decoder_family(config))``.
      dtype: to convert the parameters to; None keeps theirs.
      max_shard_size: most bytes of a file.
      overwrite: replace the checkpoint in a folder that is not empty.

    Raises:
      FileExistsError: if the folder is not empty and ``overwrite`` is false.
      ValueError: if parameters do not fit the config, or the family cannot express the config.
    """
    directory = Path(directory)
    check_writable(directory, overwrite=overwrite)
    family, config = model.family, model.config
    settings = {"architectures": [family.architectures[0]], **family.write_config(config)}
    _check_params(parameter_shapes(family, config), model.params)
    if model.tokenizer is not None and hasattr(config, "vocab_size"):
        model.tokenizer.check_fits(config.vocab_size)
    leaves = [(path_of(keys), leaf) for keys, leaf in jax.tree.leaves_with_path(model.params)]
    dtypes = {str(jnp.dtype(dtype or leaf.dtype)) for _, leaf in leaves}
    kept = dtypes.pop() if len(dtypes) == 1 else config.param_dtype
    settings |= {"model_type": family.model_type, "dtype": kept, "torch_dtype": kept}
    ids = _special_ids(model)
    parts = _parts(family, leaves)
    specs = {name: jax.ShapeDtypeStruct(shape, dtype or leaf.dtype) for name, (leaf, _, shape) in parts.items()}
    with TensorWriter(directory, specs, max_shard_size=max_shard_size, overwrite=overwrite) as writer:
        # Without a config.json the folder is no checkpoint while its tensors change.
        for stale in (_CONFIG, _GENERATION, *TOKENIZER_FILES):
            (directory / stale).unlink(missing_ok=True)
        for name, (leaf, block, _) in parts.items():
            writer.write(name, leaf if block is None else leaf[block])
    if model.tokenizer is not None:
        model.tokenizer.save(directory)
    if model.stop_ids:
        _write_json(directory / _GENERATION, ids)
    _write_json(directory / _CONFIG, {**settings, **ids})


_CONFIG = "config.json"
_GENERATION = "generation_config.json"


def _open(source: Path, with_tokenizer: bool) -> tuple[dict[str, Any], Tensors, Tokenizer | None]:
    """Settings of ``config.json``, tensors and tokenizer of a folder or file."""
    if source.is_dir() and not (source / _CONFIG).is_file():
        ggufs, llama2c = sorted(source.glob("*.gguf")), sorted(source.glob("*.bin"))
        vocabularies = sorted(source.glob("tok*.bin"))
        models = [file for file in llama2c if file not in vocabularies]
        if len(ggufs) == 1:
            source = ggufs[0]
        elif len(models) == len(vocabularies) == 1:
            settings, tensors = open_llama2c(models[0])
            return settings, tensors, read_llama2c_tokenizer(vocabularies[0]) if with_tokenizer else None
        else:
            raise FileNotFoundError(f"{source} has no {_CONFIG}: it is no Hugging Face checkpoint, or not a whole one")
    if not source.is_dir():
        if not source.is_file():
            raise FileNotFoundError(f"{source} is neither a file nor a folder")
        if source.suffix == ".safetensors":
            raise ValueError(f"{source} is a file of tensors; name its folder, which has the {_CONFIG}")
        opened = open_gguf(source)
        with refused(source):
            return opened.config, opened.tensors, _gguf_tokenizer(opened.metadata, source) if with_tokenizer else None
    settings = read_object(source / _CONFIG)
    generation = read_object(source / _GENERATION) if (source / _GENERATION).is_file() else {}
    if generation.get("eos_token_id") is not None:
        settings["eos_token_id"] = generation["eos_token_id"]
    has_tokenizer = with_tokenizer and (source / "tokenizer.json").is_file()
    return settings, open_tensors(source), read_tokenizer(source) if has_tokenizer else None


def _gguf_tokenizer(metadata: Mapping[str, Any], source: Path) -> Tokenizer | None:
    return gguf_tokenizer(metadata, source=str(source)) if "tokenizer.ggml.model" in metadata else None


def _read_config(family: Family, settings: Mapping[str, Any], source: Path) -> Any:
    try:
        with refused("config.json"):
            return family.read_config(settings)
    except ValueError as error:
        raise ValueError(f"the config of {source} cannot be used: {error}") from error


def _check_depth(settings: Mapping[str, Any], tensors: Tensors, source: Path) -> None:
    """Before anything is made for each block: every block has tensors of its own."""
    inner = settings.get("vision_config")
    for name in ("num_hidden_layers", "n_layers"):
        for depth in (settings.get(name), inner.get(name) if isinstance(inner, Mapping) else None):
            if isinstance(depth, int) and depth > len(tensors):
                raise ValueError(f"the config of {source} has {name} {depth}, but there are {len(tensors)} tensors")


def _stop_ids(setting: Any, tokenizer: Tokenizer | None, source: Path) -> tuple[int, ...]:
    listed = setting if isinstance(setting, list) else [setting]
    for index in listed:
        if index is not None and (not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 2**31):
            raise ValueError(f"the config of {source} has the eos_token_id {index!r}; it must be a token's id")
    own = tokenizer.eos_id if tokenizer is not None else None
    return tuple(dict.fromkeys(int(index) for index in (*listed, own) if index is not None))


def _special_ids(model: Model) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    if model.tokenizer is not None:
        ids = {"bos_token_id": model.tokenizer.bos_id, "pad_token_id": model.tokenizer.pad_id}
    if model.stop_ids:
        ids["eos_token_id"] = model.stop_ids[0] if len(model.stop_ids) == 1 else list(model.stop_ids)
    return ids


def _parts(family: Family, leaves: Sequence[tuple[str, Any]]) -> dict[str, tuple[Any, int | None, tuple[int, ...]]]:
    """For each tensor that is written the parameter, which block of it (None: all of it), and the shape."""
    parts: dict[str, tuple[Any, int | None, tuple[int, ...]]] = {}
    for path, leaf in leaves:
        names = tensor_names(family, path, leaf.shape)
        whole = names == [path.replace("/", ".")]
        for block, name in enumerate(names):
            written = family.written_name(name)
            parts[written] = (leaf, None, leaf.shape) if whole else (leaf, block, leaf.shape[1:])
    return parts


def _check_params(shapes: Any, params: Any) -> None:
    wanted, given = (
        {path_of(keys): tuple(leaf.shape) for keys, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (shapes, params)
    )
    for path in sorted(wanted.keys() | given.keys()):
        if wanted.get(path) != given.get(path):
            raise ValueError(
                f"params do not fit the config: {path} must have shape {wanted.get(path)}; got {given.get(path)}"
            )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".json.partial")
    temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, path)
