"""Checks of untrusted configurations, which may set sizes and options of their class but no code and no files."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.utils import is_kernels_available

from . import timm_models
from .common import ZooError, first_line

# A text under such a name is a path or address; a number is a size or an index.
_REACHING = re.compile(
    r"(?:^|_)(?:path|dir|folder|file|filename|url|repo|hub|revision|checkpoint|weights|pretrained|remote|map|module|"
    r"kernel|kernels|implementation|quantization|index|dataset|tokenizer|backbone|architecture)(?:_|$)"
)
_WANTS_WEIGHTS = re.compile(r"(?:^|_)(?:pretrained|remote|kernels)(?:_|$)")  # where it is True
_WORD = re.compile(r"[\w.+-]*")
# Free texts that are only used as names of outputs.
_LABELS = ("id2label", "label2id", "label_names")
# Origin and intended use of a model. They do not affect how a model is built.
_INERT = {
    *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "model_type", "architectures"),
    *("auto_map", "torch_dtype", "task_specific_params", "custom_pipelines", "pruned_heads", "num_labels"),
}
# The attribute that names a timm model, which timm may interpret as a path or repository.
_NAMES_TIMM = {"timm_backbone": "backbone", "timm_wrapper": "architecture"}
_LARGEST = 2**24  # largest number in a configuration; published models have up to 10 million positions
_NO_SIZES = re.compile(r"theta|base|factor|scale|seed|max_value|min_value|limit|clamp|clip|eps|infinity")
_ROOM = 2**32  # bytes for a computed tensor, such as a mask or a table of positions


def config_of(config_class: type[PreTrainedConfig], values: Mapping[str, Any]) -> PreTrainedConfig:
    """Builds a configuration from ``values``, which may contain safe attributes of ``config_class``.

    Plain numbers and words are also accepted, because old checkpoints contain them and some models read them. Nested
    configurations are treated in the same way. A value that affects the model is accepted or an error, never dropped.

    Raises:
        ZooError: a text chooses code, files or a network, a number is too large, timm has no model of a name, or the
            class rejects the values.
    """
    kept = _kept(config_class, values)
    try:
        return config_class(**kept)
    except Exception as error:  # the checks of a class may raise anything
        raise ZooError(
            f"transformers {transformers.__version__} cannot make this {config_class.__name__}: {first_line(error)}"
        ) from error


def checked_values(defaults: Mapping[str, Any], values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Checks that ``values``, arguments of a diffusers class, are safe, and returns them.

    Args:
        defaults: defaults of the arguments.
        owner: name of the class.

    Raises:
        ZooError: the class does not have an argument, a text chooses code, files or a network, or a number is too
            large.
    """
    for name, value in values.items():
        if name in defaults and value == defaults[name]:
            continue
        if name not in defaults or _reaches(name, value) or not _is_plain(name, value):
            raise ZooError(_REFUSAL.format(f"{name[:100]} of its {owner}"))
        _check_numbers(name, value)
    return dict(values)


def generation_config_of(values: Mapping[str, Any]) -> GenerationConfig:
    """Builds a GenerationConfig from numbers and words.

    Raises:
        ZooError: there are other values, or the class rejects them.
    """
    for name, value in values.items():
        words = isinstance(value, dict) and any(isinstance(each, (str, dict)) for each in value.values())
        if words or not (name.isidentifier() and _may_be_set(GenerationConfig, name, value)):
            raise ZooError(_REFUSAL.format(f"{name[:100]} of its GenerationConfig"))
    try:
        return GenerationConfig.from_dict(dict(values))
    except Exception as error:  # as in config_of
        version = transformers.__version__
        raise ZooError(f"transformers {version} cannot make its GenerationConfig: {first_line(error)}") from error


def check_sizes(build: Callable[[], nn.Module], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ZooError unless ``build`` returns a model with the tensors ``shapes``. The check runs on the meta device.
    For tied tensors one key is enough."""
    stored = sum(math.prod(shape) for shape in shapes.values())
    with torch.device("meta"), _Bounded(1000 + 100 * len(shapes), max(8 * stored, _ROOM)):
        outline = build().state_dict(keep_vars=True)
    held = {id(tensor): shapes[key] for key, tensor in outline.items() if key in shapes}
    for key, tensor in outline.items():
        if shapes.get(key, held.get(id(tensor))) != tuple(tensor.shape):
            found = f"has the size {list(shapes[key])}" if key in shapes else "is not there"
            raise ZooError(f"the weights do not fit the recipe: {key} {found}, expected {list(tensor.shape)}")


class Undrawn(TorchFunctionMode):
    """Mode that skips the random initialization of parameters, which takes most of the time of building a model whose
    weights are loaded afterwards. Calls with an explicit generator still run."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWING and kwargs.get("generator") is None:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, nn.Parameter):
                return tensor
        return func(*args, **kwargs)


# Compared by name, because transformers replaces the functions of torch.nn.init.
_DRAWING = frozenset((
    "normal_", "uniform_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_", "trunc_normal_",
))  # fmt: skip


class _Bounded(TorchFunctionMode):
    """Mode that raises if a model creates too many tensors, or a tensor that is too large."""

    def __init__(self, count: int, size: int):
        super().__init__()
        self.count, self.size = count, size

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.count -= 1
            if self.count < 0 or result.numel() * result.element_size() > self.size:
                raise ZooError("the recipe describes a far larger model than its weights")
        return result


def _kept(config_class: type[PreTrainedConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    defaults = _defaults(config_class)
    kept: dict[str, Any] = {}
    for name, value in values.items():
        inner = _class_within(config_class, name, value)
        if name in _INERT or (name in defaults and value == defaults[name]):
            continue
        if inner is not None:
            kept[name] = {**_kept(inner, value), "model_type": inner.model_type}
        elif name == _NAMES_TIMM.get(config_class.model_type):
            kept[name] = _timm_name(value)
        elif _reaches(name, value) or not (name in defaults or _may_be_set(config_class, name, value)):
            raise ZooError(_REFUSAL.format(f"{name[:100]} of its {config_class.__name__}"))
        else:
            _check_numbers(name, value)
            kept[name] = _dtype(value) if name == "dtype" else value
    if _loads_kernels(config_class):
        raise ZooError(_REFUSAL.format(f"the kernels of its {config_class.__name__}"))
    lacking = [name for name in config_class.sub_configs if not isinstance(kept.get(name), dict)]
    if lacking and _asks_for_defaults(config_class):
        raise ZooError(_REFUSAL.format(f"the missing {lacking[0]} in its {config_class.__name__}"))
    return kept


_REFUSAL = "its recipe may access code, files or a network by {}: pass model=, or trust_source=True if you trust it"


def _defaults(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The attributes of ``config_class`` with defaults. Creates no instance: some classes then query a hub."""
    own = {name: parameter.default for name, parameter in inspect.signature(config_class.__init__).parameters.items()}
    common = json.loads(PreTrainedConfig().to_json_string(use_diff=False))
    return {name: value for name, value in (common | own).items() if name not in ("self", "args", "kwargs")}


def _may_be_set(config_class: type, name: str, value: Any) -> bool:
    """Whether an undeclared attribute contains only numbers and words, and does not hide a method."""
    own = inspect.getattr_static(config_class, name, None)
    if isinstance(own, property):
        return own.fset is not None and _is_plain(name, value)
    return not isinstance(own, (FunctionType, classmethod, staticmethod)) and _is_plain(name, value)


def _is_plain(name: str, value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return all(_is_plain(name, each) for each in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, str) or name in _LABELS or _WORD.fullmatch(value) is not None


def _loads_kernels(config_class: type) -> bool:
    """Whether building a model of this configuration fetches a kernel, as some do if ``kernels`` is installed."""
    if not is_kernels_available():
        return False
    modeling = find_spec(config_class.__module__.replace("configuration_", "modeling_"))
    if modeling is None:
        return False
    assert modeling.origin is not None  # a file next to the configuration
    source = Path(modeling.origin).read_text(encoding="utf-8")
    return re.search(r"\b(?:get|lazy_load)_kernel\(", source) is not None


def _asks_for_defaults(config_class: type) -> bool:
    """Whether a missing nested configuration may be loaded from a hub."""
    module = inspect.getmodule(config_class)
    assert module is not None  # the class was imported from it
    source = inspect.getsource(module)
    return re.search(r"^\s*[^>\s].*\w\.from_pretrained\(", source, re.MULTILINE) is not None


def _class_within(config_class: type[PreTrainedConfig], name: str, value: Any) -> type[PreTrainedConfig] | None:
    """The class of the nested configuration ``value``; None if it is not a configuration."""
    if not isinstance(value, dict):
        return None
    kind = value.get("model_type")
    if isinstance(kind, str) and kind and kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind]
    declared = getattr(config_class, "sub_configs", {}).get(name)
    return declared if isinstance(declared, type) and issubclass(declared, PreTrainedConfig) else None


def _timm_name(value: Any) -> str:
    if not (isinstance(value, str) and timm_models.knows(value)):
        raise ZooError(f"its recipe names a timm model, and timm has no model {str(value)[:100]!r}")
    return value


def _dtype(value: Any) -> str | None:
    found = getattr(torch, value, None) if isinstance(value, str) else None
    return value if isinstance(found, torch.dtype) and found.is_floating_point else None


def _reaches(name: str, value: Any) -> bool:
    """Whether a text in ``value``, or a flag, may choose code, files, weights or a network."""
    if isinstance(value, str):
        return _REACHING.search(name) is not None
    if isinstance(value, dict):
        return name not in _LABELS and any(_reaches(f"{name}_{key}", each) for key, each in value.items())
    if isinstance(value, list):
        return name not in _LABELS and any(_reaches(name, each) for each in value)
    return value is True and _WANTS_WEIGHTS.search(name) is not None


def _check_numbers(name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _check_numbers(str(key), each)
    elif isinstance(value, list):
        for each in value:
            _check_numbers(name, each)
    elif isinstance(value, int) and abs(value) > _LARGEST and not _NO_SIZES.search(name):
        raise ZooError(f"its recipe has {name} = {str(value)[:30]}, more than the allowed {_LARGEST}")
