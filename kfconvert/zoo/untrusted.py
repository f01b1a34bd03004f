"""Checks of untrusted configurations, which may set sizes and options of their class but no code and no files."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.utils import is_kernels_available

from . import timm_models
from .common import ZooError, building

# A text under such a name is a path or address.
_REACHING = re.compile(
    r"(?:^|_)(?:path|dir|folder|file|filename|url|repo|hub|revision|checkpoint|weights|pretrained|remote|map|module|"
    r"kernel|kernels|implementation|quantization|index|dataset|tokenizer|backbone|backend|architecture)(?:_|$)"
)
_WANTS_WEIGHTS = re.compile(r"(?:^|_)(?:pretrained|remote|kernels)(?:_|$)")  # where it is True
_WORD = re.compile(r"[\w.+-]*")
# Free texts that are only used as names of outputs.
_LABELS = ("id2label", "label2id", "label_names")
# Origin and intended use of a model. They do not affect how a model is built.
_INERT = {
    *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map"),
    *("torch_dtype", "task_specific_params", "custom_pipelines", "pruned_heads", "num_labels"),
}
# The attribute that names a timm model, which timm may interpret as a path or repository.
_NAMES_TIMM = {"timm_backbone": "backbone", "timm_wrapper": "architecture"}


def config_of(config_class: type[PreTrainedConfig], values: Mapping[str, Any]) -> PreTrainedConfig:
    """Builds a configuration from ``values``, nested configurations included.

    Raises:
        ZooError: a text chooses code, files or a network, timm has no model of a name, or the class rejects the values.
    """
    _check_kernels(config_class)
    kept = _kept(values, config_class.__name__, config_class)
    with building(transformers, f"make this {config_class.__name__}"):
        return config_class(**kept)


def checked_values(values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Returns ``values``, arguments of the class ``owner``. Raises ZooError if a text chooses code, files or a
    network."""
    return _kept(values, owner)


def generation_config_of(values: Mapping[str, Any]) -> GenerationConfig:
    """Builds a GenerationConfig. Raises ZooError if a text chooses code, files or a network, or the class rejects the
    values."""
    for name, value in values.items():
        # Its own texts choose among names, such as kinds of caches.
        if not (_WORD.fullmatch(value) if isinstance(value, str) else not _reaches(name, value)):
            raise ZooError(_REFUSAL.format(f"{name[:100]} of its GenerationConfig"))
    with building(transformers, "make its GenerationConfig"):
        return GenerationConfig.from_dict(dict(values))


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


def _kept(values: Mapping[str, Any], owner: str, config_class: type[PreTrainedConfig] | None = None) -> dict[str, Any]:
    """Returns the ``values`` that affect the model. Raises ZooError if one of them chooses code, files or a network."""
    defaults = {} if config_class is None else _defaults(config_class)
    kept = {}
    for name, value in values.items():
        if name in _INERT or (name in defaults and value == defaults[name]):
            continue
        kept[name] = value
        kind = value.get("model_type") if isinstance(value, dict) else None
        inner = CONFIG_MAPPING[kind] if isinstance(kind, str) and kind and kind in CONFIG_MAPPING else None
        if inner is not None:
            _check_kernels(inner)
            kept[name] = {**_kept(value, inner.__name__, inner), "model_type": inner.model_type}
        elif config_class is not None and name == _NAMES_TIMM.get(config_class.model_type):
            if not (isinstance(value, str) and timm_models.knows(value)):
                raise ZooError(f"its recipe names a timm model, and timm has no model {str(value)[:100]!r}")
        elif name not in _LABELS and _reaches(name, value):
            raise ZooError(_REFUSAL.format(f"{name[:100]} of its {owner}"))
    return kept


_REFUSAL = "its recipe may access code, files or a network by {}: pass model=, or trust_source=True if you trust it"


def _reaches(name: str, value: Any) -> bool:
    """Whether a text in ``value``, or a flag, may choose code, files, weights or a network."""
    if isinstance(value, str):
        return bool(value) and (_REACHING.search(name) is not None or _WORD.fullmatch(value) is None)
    if isinstance(value, dict):
        return any(_reaches(f"{name}_{key}", each) for key, each in value.items() if key not in _LABELS)
    if isinstance(value, (list, tuple)):
        return any(_reaches(name, each) for each in value)
    return value is True and _WANTS_WEIGHTS.search(name) is not None


def _defaults(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The attributes of ``config_class`` with defaults. Creates no instance: some classes then query a hub."""
    own = {name: parameter.default for name, parameter in inspect.signature(config_class.__init__).parameters.items()}
    return json.loads(PreTrainedConfig().to_json_string(use_diff=False)) | own


def _check_kernels(config_class: type[PreTrainedConfig]) -> None:
    """Raises ZooError if building a model of this configuration fetches a kernel from a hub, as some do if ``kernels``
    is installed."""
    name = config_class.__module__.replace("configuration_", "modeling_")
    modeling = find_spec(name) if is_kernels_available() else None
    if modeling is not None and modeling.origin is not None:
        if re.search(r"\b(?:get|lazy_load)_kernel\(", Path(modeling.origin).read_text(encoding="utf-8")):
            raise ZooError(_REFUSAL.format(f"the kernels of its {config_class.__name__}"))
