"""Hugging Face models: from the hub, from a local folder, or from the built-in architectures."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from . import hub
from .architectures import ALIASES, ARCHITECTURES
from .common import Request, WeightsUnavailable, WeightsWarning, ZooError, ZooModel, first_line, with_weights
from .huggingface_inputs import example_inputs

_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def names() -> list[str]:
    """The names of the built-in architectures; others work where the hub can be reached."""
    return sorted(ARCHITECTURES)


def knows(name: str) -> bool:
    """Whether ``name`` is a built-in architecture or the hub's present name of one."""
    return ALIASES.get(name, name) in ARCHITECTURES


def build(name: str, request: Request) -> ZooModel:
    """The base model (``AutoModel``) that the hub has under ``name``, its example inputs and its recipe.

    Raises:
        ZooError: pretrained weights were demanded and cannot be had, or the checkpoint cannot be read.
    """
    model, weights = with_weights(name, request, lambda: _pretrained(name), lambda: _random(_config_of(name)))
    return _entry(model, {"kind": "transformers", "name": name, "weights": weights}, request)


def build_folder(path: Path, request: Request) -> ZooModel:
    """The model in a local folder that ``save_pretrained`` wrote, of the class that its config names."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # of transformers: many kinds, all of them about this file
        raise ZooError(f"{path}/config.json cannot be read ({first_line(error)})") from error
    model_class = _class_named(config)

    def pretrained() -> PreTrainedModel:
        if not any((path / name).exists() for name in _WEIGHT_FILES):
            raise WeightsUnavailable(f"the folder holds none of {', '.join(_WEIGHT_FILES)}")
        return _from_pretrained(str(path), config, model_class, local=True)

    model, weights = with_weights(str(path), request, pretrained, lambda: _random(config, model_class))
    return _entry(model, {"kind": "folder", "path": str(path.resolve()), "weights": weights}, request)


def rebuild(recipe: dict[str, Any]) -> nn.Module:
    """The architecture of a recipe made by ``build`` or ``build_folder``, with random weights."""
    values = dict(recipe["config"])
    model_class = getattr(transformers, recipe["class"], None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ZooError(f"transformers {transformers.__version__} has no model class {recipe['class']!r}")
    try:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        return model_class._from_config(config)
    except (KeyError, TypeError, ValueError) as error:
        raise ZooError(
            f"transformers {transformers.__version__} cannot build this {recipe['class']}: "
            f"{first_line(error)}"
        ) from error


def _entry(model: PreTrainedModel, recipe: dict[str, Any], request: Request) -> ZooModel:
    recipe |= {
        "class": type(model).__name__,
        "config": json.loads(model.config.to_json_string(use_diff=False)),
        "transformers": transformers.__version__,
    }
    return ZooModel(model, example_inputs(model, request), recipe)


def _pretrained(name: str) -> PreTrainedModel:
    in_cache = hub.cached(name, "config.json") and any(hub.cached(name, file) for file in _WEIGHT_FILES)
    try:
        config = _read_config(name, in_cache)
    except hub.HubUnreachable as error:
        raise WeightsUnavailable(f"the Hugging Face hub cannot be reached ({error})") from error
    return _from_pretrained(name, config, AutoModel, local=in_cache)


def _config_of(name: str) -> PreTrainedConfig:
    """The configuration alone: built in, cached or from the hub, whichever comes first."""
    if knows(name):
        config_class, values = ARCHITECTURES[ALIASES.get(name, name)]
        return getattr(transformers, config_class)(**values)
    return _read_config(name, in_cache=hub.cached(name, "config.json"))


def _read_config(name: str, in_cache: bool) -> PreTrainedConfig:
    if not in_cache and not hub.exists(name, "config.json"):
        raise ZooError(f"the Hugging Face hub has no model {name!r} that you may read")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=in_cache)
    except Exception as error:  # as in build_folder
        raise ZooError(f"{name}: its config cannot be read ({first_line(error)})") from error


def _from_pretrained(
    source: str, config: PreTrainedConfig, model_class: type, local: bool
) -> PreTrainedModel:
    _without_cache(config)
    try:
        model, info = model_class.from_pretrained(
            source, config=config, trust_remote_code=False, local_files_only=local, output_loading_info=True
        )
    except Exception as error:  # as in build_folder
        raise ZooError(f"{source}: the checkpoint cannot be read ({first_line(error)})") from error
    missing = sorted(info["missing_keys"])
    if missing:
        warnings.warn(
            f"{source}: the checkpoint lacks {len(missing)} of the model's tensors, which are RANDOM now: "
            f"{', '.join(missing[:3])}",
            WeightsWarning,
            stacklevel=2,
        )
    return model


def _random(config: PreTrainedConfig, model_class: type = AutoModel) -> PreTrainedModel:
    _without_cache(config)
    return model_class.from_config(config) if model_class is AutoModel else model_class._from_config(config)


def _without_cache(config: PreTrainedConfig) -> None:
    # A key/value cache in the output is of use to generate(), which asks for it by itself, and not to one
    # forward.
    if getattr(config, "use_cache", False):
        config.use_cache = False


def _class_named(config: PreTrainedConfig) -> type:
    """The class that the config names, so that a fine-tuned head is kept; AutoModel where it names none."""
    for name in config.architectures or []:
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
            return model_class
    return AutoModel
