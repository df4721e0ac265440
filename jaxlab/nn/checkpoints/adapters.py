"""LoRA adapters in the files of the PEFT library: ``adapter_config.json`` and ``adapter_model.safetensors``.

A pair of factors is stored under the name of the linear map it changes, one pair for each block ::

    base_model.model.model.layers.{i}.self_attn.q_proj.lora_A.weight     [rank, in]
    base_model.model.model.layers.{i}.self_attn.q_proj.lora_B.weight     [out, rank]

and the settings hold the rank ``r``, ``lora_alpha``, and exceptions from both by patterns of names. Which matrices are
changed is taken from the tensors, not from ``target_modules``. What is written always names every map in full.

Names are those of the network's checkpoint; a first part that its parameters here lack (``bert.``) is passed over.
ViT and DINOv2 are the exception: ``transformers`` 5 has other names in the network than in its files, and PEFT takes
those of the network. Both are read; to write them `save_adapters` has to know the config ::

    adapters = load_adapters("folder", params)
    save_adapters(adapters, "folder", base_model="HuggingFaceTB/SmolLM2-135M")
    save_adapters(adapters, "folder", config=model.config)                         # of a ViT
"""

import collections
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.nn.checkpoints.tensors import TensorWriter, open_tensors
from jaxlab.nn.dinov2 import Dinov2Config
from jaxlab.nn.lora import Adapters, Target, factors_of, matrices, place
from jaxlab.nn.untrusted import read_object
from jaxlab.nn.vit import ViTConfig

__all__ = ["load_adapters", "save_adapters"]


def load_adapters(directory: str | Path, params: Mapping[str, Any], *, dtype: str | None = None) -> Adapters:
    """Read adapters for a network.

    Args:
      directory: holds ``adapter_config.json`` and ``adapter_model.safetensors``.
      params: parameters of the network, or their shapes.
      dtype: of the factors; None means the one of the file.

    Raises:
      FileNotFoundError: if one of the files is missing.
      ValueError: if the weights are a pickle, the file is malformed, it is not plain LoRA (DoRA, biases, whole layers,
        and other variants, naming the setting), or a tensor does not fit the network, naming it.
    """
    directory = Path(directory)
    settings = _read_settings(directory)
    tensors = open_tensors(_weights(directory))
    known = matrices(params)
    pairs: dict[str, dict[int | None, dict[str, str]]] = collections.defaultdict(dict)
    modules: dict[tuple[str, int | None], str] = {}
    for name, spec in tensors.specs.items():
        module, factor = _split(name, directory)
        path, block = _locate(module, known)
        if path is None:
            raise ValueError(f"tensor {name} of {directory} changes {module}, which is no linear map of the network")
        *layers, out_features, in_features = known[path]
        if block is not None and block >= layers[0]:
            raise ValueError(f"tensor {name} of {directory} is for block {block}, but the network has {layers[0]}")
        size = in_features if factor == "lora_A" else out_features
        if len(spec.shape) != 2 or spec.shape[1 if factor == "lora_A" else 0] != size:
            wanted = f"[rank, {size}]" if factor == "lora_A" else f"[{size}, rank]"
            raise ValueError(f"tensor {name} of {directory} must have shape {wanted}; got {spec.shape}")
        if factor in pairs[path].setdefault(block, {}):
            raise ValueError(f"tensors {pairs[path][block][factor]} and {name} of {directory} are the same factor")
        if not jnp.issubdtype(spec.dtype, jnp.floating):
            raise ValueError(f"tensor {name} of {directory} must hold floating-point numbers; got {spec.dtype}")
        pairs[path][block][factor] = name
        modules[path, block] = module
    if not pairs:
        raise ValueError(f"{directory} holds no tensors")
    factors: dict[str, Any] = {}
    targets = []
    for path in sorted(pairs):
        *layers, out_features, in_features = known[path]
        blocks: list[int | None] = list(range(layers[0])) if layers else [None]
        ranks, alphas = [], []
        for block in blocks:
            rank, alpha = 0, 0.0
            if block in pairs[path]:
                rank = _rank(tensors.specs, pairs[path][block], directory)
                wanted_rank, alpha = _rank_and_alpha(settings, modules[path, block])
                if rank != wanted_rank:
                    raise ValueError(
                        f"tensor {pairs[path][block]['lora_A']} of {directory} has rank {rank}, "
                        f"but adapter_config.json says {wanted_rank}"
                    )
            ranks.append(rank)
            alphas.append(alpha)
        most = max(ranks)
        stored = next(iter(pairs[path].values()))["lora_A"]
        kept = jnp.dtype(dtype or tensors.specs[stored].dtype)
        down = np.zeros((len(blocks), most, in_features), kept)
        up = np.zeros((len(blocks), out_features, most), kept)
        for row, block in enumerate(blocks):
            if names := pairs[path].get(block):
                down[row, : ranks[row]] = tensors[names["lora_A"]]
                up[row, :, : ranks[row]] = tensors[names["lora_B"]]
        if not layers:
            down, up = down[0], up[0]
        place(factors, path, {"lora_A": {"weight": jnp.asarray(down)}, "lora_B": {"weight": jnp.asarray(up)}})
        targets.append(Target(path, tuple(ranks), tuple(alphas)))
    return Adapters(factors=factors, targets=tuple(targets), use_rslora=bool(settings.get("use_rslora")))


def save_adapters(
    adapters: Adapters,
    directory: str | Path,
    *,
    prefix: str = "",
    base_model: str | None = None,
    task_type: str | None = None,
    config: Any = None,
) -> None:
    """Write adapters so that PEFT reads them.

    Args:
      adapters: made by `jaxlab.nn.lora.init` or read.
      directory: where to write; made if it is missing. Adapters in it are replaced.
      prefix: what stands before our paths in the network that will read them, save before its head's: ``"bert"`` for
        BERT with a head.
      base_model: name or folder of the network they change.
      task_type: what PEFT shall wrap it as, say ``"CAUSAL_LM"``.
      config: of the network, as in ``Model.config``; needed for ViT and DINOv2 alone.

    Raises:
      ValueError: if there is nothing to save, or the adapters are for a ViT or DINOv2 and there is no config.
    """
    directory = Path(directory)
    renamed = _RENAMED.get(type(config), {})
    unnamed = [target.path for target in adapters.targets if "/attention/attention/" in target.path]
    if unnamed and type(config) not in _RENAMED:
        raise ValueError(f"{unnamed[0]} is of a ViT or a DINOv2, which PEFT names differently; give their config")
    named: dict[str, tuple[int, float, jax.Array, jax.Array]] = {}
    for target in adapters.targets:
        down, up = factors_of(adapters, target)
        parts = renamed.get(target.path, target.path).split("/")
        if prefix and parts[0] not in _HEADS:
            parts = [prefix, *parts]
        stacked = down.ndim == 3
        for row, (rank, alpha) in enumerate(zip(target.ranks, target.alphas, strict=True)):
            if rank == 0:
                continue
            pair = (down[row, :rank], up[row, :, :rank]) if stacked else (down, up)
            named[_module(parts, row if stacked else None)] = (rank, alpha, *pair)
    if not named:
        raise ValueError("there are no adapters to save: no matrix has a rank above 0")
    rank = _most_common(rank for rank, *_ in named.values())
    alpha = _most_common(alpha for _, alpha, *_ in named.values())
    settings = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "rank_pattern": {re.escape(module): r for module, (r, *_) in named.items() if r != rank},
        "alpha_pattern": {re.escape(module): a for module, (_, a, *_) in named.items() if a != alpha},
        "use_rslora": adapters.use_rslora,
        "target_modules": sorted(named),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "use_dora": False,
    }
    tensors = {}
    for module, (_, _, down, up) in named.items():
        tensors[f"{_ROOT}{module}.lora_A.weight"] = down
        tensors[f"{_ROOT}{module}.lora_B.weight"] = up
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / "adapter.partial"
    with TensorWriter(unfinished, tensors, max_shard_size=2**62, overwrite=True) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    (unfinished / "model.safetensors").replace(directory / _WEIGHTS)
    unfinished.rmdir()
    (directory / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


_ROOT = "base_model.model."
_SETTINGS = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_HEADS = ("classifier", "pre_classifier", "visual_projection", "lm_head")
# Our paths, which are those of the files, and what transformers 5 calls them in its networks.
_RENAMED: dict[type, dict[str, str]] = {
    ViTConfig: {
        "encoder/layer/attention/attention/query": "layers/attention/q_proj",
        "encoder/layer/attention/attention/key": "layers/attention/k_proj",
        "encoder/layer/attention/attention/value": "layers/attention/v_proj",
        "encoder/layer/attention/output/dense": "layers/attention/o_proj",
        "encoder/layer/intermediate/dense": "layers/mlp/fc1",
        "encoder/layer/output/dense": "layers/mlp/fc2",
    },
    Dinov2Config: {
        "encoder/layer/attention/attention/query": "encoder/layer/attention/q_proj",
        "encoder/layer/attention/attention/key": "encoder/layer/attention/k_proj",
        "encoder/layer/attention/attention/value": "encoder/layer/attention/v_proj",
        "encoder/layer/attention/output/dense": "encoder/layer/attention/o_proj",
    },
}
_OURS = {theirs: ours for names in _RENAMED.values() for ours, theirs in names.items()}
# Settings that make it something else than W + s B A with nothing besides, unless they are off.
_VARIANTS = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "use_qalora",
    "use_bdlora",
    "modules_to_save",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "layer_replication",
    "target_parameters",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
# These leave W as it was; others (PiSSA, OLoRA, CorDA) change it too.
_INITIALISERS = ("gaussian", "orthogonal", "eva")


def _read_settings(directory: Path) -> dict[str, Any]:
    path = directory / _SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"{directory} holds no {_SETTINGS}")
    settings = read_object(path)
    if str(settings.get("peft_type")).upper() != "LORA":
        raise ValueError(f"{path}: peft_type must be 'LORA'; got {settings.get('peft_type')!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(name) or {}, dict):
            raise ValueError(f"{path}: {name} must map patterns to numbers; got {settings[name]!r}")
    if not isinstance(settings.get("use_rslora") or False, bool):
        raise ValueError(f"{path}: use_rslora must be true or false; got {settings['use_rslora']!r}")
    wrong = [name for name in _VARIANTS if settings.get(name)]
    wrong += ["bias"] if settings.get("bias", "none") != "none" else []
    wrong += ["init_lora_weights"] if not _is_plain(settings.get("init_lora_weights")) else []
    if wrong:
        raise ValueError(f"{path}: {wrong[0]}={settings[wrong[0]]!r} is not supported, only plain LoRA")
    return settings


def _is_plain(initialiser: Any) -> bool:
    return initialiser is None or isinstance(initialiser, bool) or initialiser in _INITIALISERS


def _weights(directory: Path) -> Path:
    path = directory / _WEIGHTS
    if not path.is_file():
        if (directory / "adapter_model.bin").is_file():
            raise ValueError(
                f"{directory} holds its weights as a pickle (adapter_model.bin), which can run any code and is never "
                "loaded; convert it to safetensors"
            )
        raise FileNotFoundError(f"{directory} holds no {_WEIGHTS}")
    return path


def _split(name: str, directory: Path) -> tuple[str, str]:
    """The linear map and the factor that a tensor is for."""
    found = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.(lora_[AB])(?:\.default)?\.weight", name)
    if found is None:
        raise ValueError(f"tensor {name} of {directory} is no factor of a linear map; only plain LoRA is supported")
    return found[1], found[2]


def _locate(module: str, known: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """The path of a linear map in our parameters, and the block it is in."""
    parts = module.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal() and len(part) < 10]
    block = int(parts[numbers[0]]) if numbers else None
    parts = [part for place, part in enumerate(parts) if place not in numbers[:1]]
    for start in range(2):
        named = "/".join(parts[start:])
        for path in (named, _OURS.get(named, named)):
            if path in known and (len(known[path]) == 3) == (block is not None):
                return path, block
    return None, None


def _module(parts: list[str], block: int | None) -> str:
    """The name of a linear map in a checkpoint, with the block's number behind the stack's name."""
    if block is None:
        return ".".join(parts)
    place = next(place for place, part in enumerate(parts) if part in ("layer", "layers")) + 1
    return ".".join([*parts[:place], str(block), *parts[place:]])


def _rank(specs: Mapping[str, Any], names: Mapping[str, str], directory: Path) -> int:
    if len(names) != 2:
        present = next(iter(names.values()))
        raise ValueError(f"{directory} has the tensor {present} but not the other factor")
    down, up = specs[names["lora_A"]].shape[0], specs[names["lora_B"]].shape[1]
    if down != up:
        raise ValueError(f"tensor {names['lora_B']} of {directory} has rank {up}, but its lora_A has rank {down}")
    return down


def _rank_and_alpha(settings: Mapping[str, Any], module: str) -> tuple[int, float]:
    def pick(name: str, default: Any) -> Any:
        # As PEFT does: the first pattern that matches the end of the name.
        for pattern, value in (settings.get(name) or {}).items():
            try:
                found = re.match(rf"(.*\.)?({pattern})$", module)
            except re.error as error:
                raise ValueError(f"{_SETTINGS}: {name} has {pattern!r}, which is no regular expression") from error
            if found:
                return value
        return default

    rank, alpha = pick("rank_pattern", settings.get("r", 8)), pick("alpha_pattern", settings.get("lora_alpha", 8))
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{_SETTINGS}: the rank of {module} must be an integer above 0; got {rank!r}")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"{_SETTINGS}: lora_alpha of {module} must be a finite number; got {alpha!r}")
    return rank, float(alpha)


def _most_common(values: Any) -> Any:
    return collections.Counter(values).most_common(1)[0][0]
