"""Configuration files of mergekit, for the methods that are here.

Read are ``merge_method`` (linear, task_arithmetic, ties, dare_linear, dare_ties), ``base_model``, ``models`` with their
``parameters`` (weight, density), ``parameters`` of all (normalize, lambda, rescale, weight, density), ``dtype`` and
``out_dtype``. A parameter is a number, a gradient over the blocks (``[0.2, 0.5, 1.0]``), or a list of ``filter`` and
``value``, of which the first whose filter is a part of the tensor's name counts. Whatever else a file holds is refused
by its name, but for ``int8_mask``, which changes no number, and ``tokenizer_source: base``, which is done anyway.

As there, all tensors are merged, also embeddings, norms and the head, each trimmed by itself.

Deviations from mergekit 0.1.5:
  1. Arithmetic is in float32 whatever ``dtype`` is, which is that of the result (``out_dtype`` wins).
  2. Of numbers that equal a threshold all are kept, see `jaxlab.editing.merging.ties`.
  3. Blocks are known by the first number in a tensor's name; all other tensors have the first value of a gradient, as
     those before the first block have there.
"""

import dataclasses
import math
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxlab.editing.merging.arithmetic import TaskArithmetic
from jaxlab.editing.merging.dare import Dare
from jaxlab.editing.merging.method import NOTHING, MergeMethod
from jaxlab.editing.merging.ties import Ties

__all__ = ["MergekitFile", "read_mergekit"]


@dataclasses.dataclass(frozen=True)
class MergekitFile:
    """A configuration file.

    Attributes:
      path: of the file.
      method: ``merge_method``.
      base: folder or name of the base.
      experts: of the models that are merged with it.
      settings: ``parameters`` of each expert, those of all behind them.
      shared: ``parameters`` of all.
      dtype: of the result; None is the base's.
    """

    path: Path
    method: str
    base: str
    experts: tuple[str, ...]
    settings: tuple[tuple[Mapping[str, Any], ...], ...]
    shared: Mapping[str, Any]
    dtype: str | None = None

    def methods(self, names: Iterable[str]) -> dict[str, MergeMethod]:
        """How each tensor is merged.

        Args:
          names: of all tensors; the largest number of a block among them is where gradients end.

        Raises:
          ValueError: a parameter that is missing, no number, or out of range; weights that cannot be used.
        """
        blocks = {name: _block(name) for name in names}
        last = max((block for block in blocks.values() if block is not None), default=0)
        # As in mergekit the only block of a model is its last, and what is in no block comes first.
        places = {name: 0.0 if block is None else block / last if last else 1.0 for name, block in blocks.items()}
        return {name: self._checked(name, place) for name, place in places.items()}

    def _checked(self, name: str, place: float) -> MergeMethod:
        try:
            return self._method(name, place)
        except (OverflowError, RecursionError) as error:  # an integer beyond floats, an alias inside its own anchor
            raise ValueError(f"{self.path}: a parameter cannot be evaluated for {name}: {error}") from error

    def _method(self, name: str, place: float) -> MergeMethod:
        def of_each(key: str, default: float | None = None) -> tuple[float, ...]:
            return tuple(self._number(key, scopes, name, place, default) for scopes in self.settings)

        def of_all(key: str, default: Any) -> Any:
            return self._number(key, (self.shared,), name, place, default)

        weights = of_each("weight", 1.0 if self.method == "linear" else None)
        normalize = bool(of_all("normalize", self.method in ("linear", "ties")))
        if self.method == "linear":
            if not normalize and not math.isclose(sum(weights), 1.0, rel_tol=1e-6):
                raise ValueError(f"{self.path}: linear without normalize needs weights that add up to 1, got {weights}")
            if abs(sum(weights)) < NOTHING:
                raise ValueError(f"{self.path}: weights of linear must not add up to 0, got {weights}")
            # Of a base that is one of the models the change is zero, and its weight counts in the sum.
            return TaskArithmetic(1.0, tuple(weight / sum(weights) for weight in weights[: len(self.experts)]))
        scale = float(of_all("lambda", 1.0))
        if self.method == "task_arithmetic":
            return TaskArithmetic(scale, weights, normalize=normalize)
        density = of_each("density", 1.0)
        drops = self.method.startswith("dare")
        if outside := [value for value in density if not 0 <= value <= 1 or (drops and value == 0)]:
            within = "(0, 1]" if drops else "[0, 1]"
            raise ValueError(f"{self.path}: density must be in {within}, got {outside[0]:g} for {name}")
        elects: Any = {"normalize": normalize, "scope": "tensor", "election": "mergekit"}
        if self.method == "ties":
            if of_all("rescale", False):
                raise ValueError(f"{self.path}: rescale is not supported for ties")
            return Ties(scale, weights, density, **elects)
        drop = tuple(1 - value for value in density)
        then = Ties(scale, weights, 1.0, **elects)
        plain = TaskArithmetic(scale, weights, normalize=normalize)
        rescale = "l1" if of_all("rescale", True) else "none"
        return Dare(drop, then if self.method == "dare_ties" else plain, rescale=rescale)

    def _number(
        self, key: str, scopes: Iterable[Mapping[str, Any]], name: str, place: float, default: Any
    ) -> float | bool:
        for scope in scopes:
            value = _evaluate(scope[key], name, place) if key in scope else None
            if isinstance(value, bool) and key in _SWITCHES:
                return value
            if value is not None:
                try:
                    number = math.nan if isinstance(value, bool) else float(value)
                except (TypeError, ValueError):
                    number = math.nan
                if not math.isfinite(number):
                    raise ValueError(f"{self.path}: {key} must be a number, got {reprlib.repr(value)}")
                return number
        if default is None:
            raise ValueError(f"{self.path}: {key} is missing for {name}")
        return default


def read_mergekit(path: str | Path) -> MergekitFile:
    """Read a configuration file.

    Raises:
      FileNotFoundError: no such file.
      ModuleNotFoundError: pyyaml is not installed.
      ValueError: no YAML, a method or key that is not supported, no base or models.
    """
    import yaml

    path = Path(path)
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except (ValueError, LookupError, AttributeError) as error:  # pyyaml lets them out for values such as !!bool x
        raise ValueError(f"{path} is no YAML: a value is not of the type that its tag names ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no mapping of keys to values")
    config = {str(key): value for key, value in config.items() if value is not None}
    method = config.get("merge_method")
    if not isinstance(method, str) or method not in _PARAMETERS:
        supported = ", ".join(_PARAMETERS)
        raise ValueError(f"{path}: merge_method {reprlib.repr(method)} is not supported; supported are {supported}")
    _refuse_others(path, "", config, _KEYS)
    if (tokenizer := config.get("tokenizer_source", "base")) != "base":
        raise ValueError(f"{path}: tokenizer_source {reprlib.repr(tokenizer)} is not supported, only base")
    models = config.get("models")
    if not isinstance(models, list) or not models or not all(isinstance(entry, dict) for entry in models):
        raise ValueError(f"{path}: models must be a list of entries with a model each, got {reprlib.repr(models)}")
    shared = _parameters(path, "", config, method)
    sources, settings = [], []
    for i, entry in enumerate(models):
        _refuse_others(path, f"models[{i}].", entry, ("model", "parameters"))
        sources.append(_source(path, f"models[{i}].model", entry.get("model")))
        settings.append((_parameters(path, f"models[{i}].", entry, method), shared))
    base = _source(path, "base_model", config["base_model"]) if "base_model" in config else None
    if base is None:
        if method != "linear":
            raise ValueError(f"{path}: {method} needs a base_model")
        base = sources[0]
    same = [_same(source, base) for source in sources]
    plain = [i for i, is_base in enumerate(same) if not is_base]
    experts = tuple(_without(sources[i], base, path) for i in plain)
    if not experts:
        raise ValueError(f"{path}: there is no model besides the base {base}")
    # The base's own entry has no say, but for linear, where it is one of the models.
    order = [*plain, *(i for i, is_base in enumerate(same) if is_base and method == "linear")]
    dtype = config.get("out_dtype", config.get("dtype"))
    if dtype is not None and str(dtype).removeprefix("torch.") not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{path}: dtype must be float32, bfloat16 or float16, got {reprlib.repr(dtype)}")
    return MergekitFile(
        path=path,
        method=method,
        base=base,
        experts=experts,
        settings=tuple(settings[i] for i in order),
        shared=shared,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
    )


_KEYS = ("merge_method", "base_model", "models", "parameters", "dtype", "out_dtype", "tokenizer_source")
_SWITCHES = ("normalize", "rescale")
_ELECTED = ("weight", "density", "normalize", "lambda", "rescale", "int8_mask")
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "linear": ("weight", "normalize"),
    "task_arithmetic": ("weight", "normalize", "lambda", "int8_mask"),
    "ties": _ELECTED,
    "dare_linear": _ELECTED,
    "dare_ties": _ELECTED,
}


def _refuse_others(path: Path, where: str, found: Mapping[str, Any], known: Iterable[str]) -> None:
    if others := [key for key in found if key not in known]:
        raise ValueError(f"{path}: key {where}{others[0]} is not supported; supported are {', '.join(known)}")


def _parameters(path: Path, where: str, entry: Mapping[str, Any], method: str) -> Mapping[str, Any]:
    parameters = entry.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"{path}: {where}parameters must map names to values, got {reprlib.repr(parameters)}")
    _refuse_others(path, f"{where}parameters.", parameters, _PARAMETERS[method])
    return parameters


def _source(path: Path, where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{path}: {where} must name a model, got {reprlib.repr(value)}")
    return value


def _without(source: str, base: str, path: Path) -> str:
    """``BASE+ADAPTERS`` names adapters of the base."""
    if "+" in source and not Path(source).exists():
        model, adapters = source.split("+", 1)
        if not _same(model, base):
            raise ValueError(f"{path}: model {source} has adapters of another model than the base {base}")
        return adapters
    return source


def _same(source: str, base: str) -> bool:
    """Whether two names are of one model: equal, or paths of one folder."""
    if source == base:
        return True
    first, second = Path(source).expanduser(), Path(base).expanduser()
    return first.exists() and second.exists() and first.samefile(second)


def _block(name: str) -> int | None:
    numbers = [int(part) for part in name.split(".") if part.isdecimal() and len(part) < 6]
    return numbers[0] if numbers else None


def _evaluate(setting: Any, name: str, place: float) -> Any:
    if isinstance(setting, dict):
        setting = [setting]
    if not isinstance(setting, list):
        return setting
    if setting and all(isinstance(entry, dict) for entry in setting):
        for entry in setting:
            pattern = entry.get("filter")
            if pattern in (None, "*") or str(pattern) in name:
                return _evaluate(entry.get("value"), name, place)
        return None
    if not setting or any(isinstance(entry, bool) or not isinstance(entry, int | float) for entry in setting):
        return setting or None
    scaled = place * (len(setting) - 1)
    low = int(scaled)
    high = min(low + 1, len(setting) - 1)
    return (1 - (scaled - low)) * setting[low] + (scaled - low) * setting[high]
