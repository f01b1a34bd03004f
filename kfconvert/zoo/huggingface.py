"""Hugging Face models: from the hub, from a local folder, or from the built-in architectures."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)

from . import hub
from .architectures import ARCHITECTURES, built_in
from .common import (
    Request,
    WeightsUnavailable,
    WeightsWarning,
    ZooError,
    ZooModel,
    building,
    class_named,
    first_line,
    with_weights,
)
from .equal_models import reproduced
from .huggingface_inputs import example_inputs
from .tuples import tuple_places, with_tuples
from .untrusted import Undrawn, config_of, generation_config_of

_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def is_one(model: nn.Module) -> bool:
    return isinstance(model, PreTrainedModel)


def build(name: str, request: Request) -> ZooModel:
    """Builds the base model (``AutoModel``) of ``name`` on the hub, or the model with its generation head, with example
    inputs and recipe.

    Raises:
        ZooError: required pretrained weights are unavailable, the checkpoint cannot be read, or generation is requested
            of a model that does not generate.
    """
    of = _generating if request.generates else _base
    model, weights = with_weights(name, request, lambda: _pretrained(name, of), lambda: _random(_config_of(name), of))
    return _entry(model, {"kind": "transformers", "name": name, "weights": weights}, request)


def build_folder(path: Path, request: Request) -> ZooModel:
    """Builds the model of a local ``save_pretrained`` folder, of the class in its config."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many types for this file
        raise ZooError(f"{path}/config.json cannot be read ({first_line(error)})") from error
    named = _class_named(config)
    of = _generating if request.generates and not _generates(named) else lambda config: named

    def pretrained() -> PreTrainedModel:
        if not any((path / name).exists() for name in _WEIGHT_FILES):
            raise WeightsUnavailable(f"the folder has none of {', '.join(_WEIGHT_FILES)}")
        return _from_pretrained(str(path), config, of(config), local=True)

    model, weights = with_weights(str(path), request, pretrained, lambda: _random(config, of))
    return _entry(model, {"kind": "folder", "path": str(path.resolve()), "weights": weights}, request)


def rebuild(recipe: dict[str, Any], trusted: bool) -> nn.Module:
    """Builds the architecture of a recipe from ``build`` or ``build_folder``, see ``zoo.rebuild``."""
    recipe = with_tuples(recipe)
    values, class_name = recipe["config"], recipe["class"]
    model_type = values.pop("model_type", None)
    model_class = _model_class(class_name)
    if model_class is None:
        raise ZooError(f"transformers {transformers.__version__} has no model class {class_name!r}")
    config_class = model_class.config_class
    if config_class is None or model_type != config_class.model_type:
        raise ZooError(f"its recipe has a config of type {model_type!r}, which does not match {class_name}")
    config = config_class(**values) if trusted else config_of(config_class, values)
    with building(transformers, f"build this {class_name}"):
        with Undrawn():
            model = model_class._from_config(config)
        if recipe.get("generation") and model.can_generate():
            model.generation_config = generation_config_of(recipe["generation"])
        return model


def described(model: PreTrainedModel) -> dict[str, Any] | None:
    """Returns the recipe of a model that the user built; None if ``rebuild`` would not reproduce it, because its class
    is user code or the model has changed."""
    if _model_class(type(model).__name__) is not type(model):
        return None
    return reproduced(model, _recipe_of(model), rebuild)


_model_class = partial(class_named, transformers, base=PreTrainedModel)


def _entry(model: PreTrainedModel, recipe: dict[str, Any], request: Request) -> ZooModel:
    return ZooModel(model, example_inputs(model, request), _recipe_of(model) | recipe)


def _recipe_of(model: PreTrainedModel) -> dict[str, Any]:
    held = {"config": model.config, "generation": model.generation_config if model.can_generate() else None}
    stored = {
        "config": _in_order(json.loads(model.config.to_json_string(use_diff=False)), model.config.to_dict()),
        "generation": json.loads(model.generation_config.to_json_string()) if model.can_generate() else None,
    }
    return {
        "kind": "transformers",
        "class": type(model).__name__,
        "transformers": transformers.__version__,
        **stored,
        "tuples": tuple_places(stored, held),
    }


def _in_order(values: Any, like: Any) -> Any:
    """Restores the key order of ``like`` in ``values``, because transformers sorts keys of dicts and model code may
    depend on their order."""
    if not (isinstance(values, dict) and isinstance(like, dict)):
        return values
    held = {str(key): value for key, value in like.items()}
    names = [*(name for name in held if name in values), *(name for name in values if name not in held)]
    return {name: _in_order(values[name], held.get(name)) for name in names}


def _base(config: PreTrainedConfig) -> type[Any]:
    return AutoModel


def _generating(config: PreTrainedConfig) -> type[Any]:
    """The transformers class of ``config`` with a generation head.

    Raises:
        ZooError: the class does not exist.
    """
    for each in (AutoModelForSeq2SeqLM, AutoModelForCausalLM, AutoModelForSpeechSeq2Seq):
        if type(config) in each._model_mapping:
            return each
    raise ZooError(f"a model of type {config.model_type} does not generate")


def _generates(model_class: type[Any]) -> bool:
    return issubclass(model_class, PreTrainedModel) and model_class.can_generate()


def _pretrained(name: str, of: Callable[[PreTrainedConfig], type[Any]]) -> PreTrainedModel:
    in_cache = hub.cached(name, "config.json") and any(hub.cached(name, file) for file in _WEIGHT_FILES)
    try:
        config = _read_config(name, in_cache)
    except hub.HubUnreachable as error:
        raise WeightsUnavailable(f"the Hugging Face hub cannot be reached ({error})") from error
    return _from_pretrained(name, config, of(config), local=in_cache)


def _config_of(name: str) -> PreTrainedConfig:
    """Loads the configuration: built-in, cached or from the hub, in this order."""
    if (known := built_in(name)) is not None:
        config_class, values = ARCHITECTURES[known]
        return getattr(transformers, config_class)(**values)
    return _read_config(name, in_cache=hub.cached(name, "config.json"))


def _read_config(name: str, in_cache: bool) -> PreTrainedConfig:
    if not in_cache and not hub.exists(name, "config.json"):
        raise ZooError(f"the Hugging Face hub has no model {name!r} that you may read")
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False, local_files_only=in_cache)
    except Exception as error:  # as in build_folder
        raise ZooError(f"{name}: its config cannot be read ({first_line(error)})") from error


def _from_pretrained(source: str, config: PreTrainedConfig, model_class: type[Any], local: bool) -> PreTrainedModel:
    _without_cache(config, model_class)
    try:
        model, info = model_class.from_pretrained(
            source, config=config, trust_remote_code=False, local_files_only=local, output_loading_info=True
        )
    except Exception as error:  # as in build_folder
        raise ZooError(f"{source}: the checkpoint cannot be read ({first_line(error)})") from error
    missing = sorted(info["missing_keys"])
    if missing:
        warnings.warn(
            f"{source}: the checkpoint lacks {len(missing)} of the model's tensors, which stay RANDOM: "
            f"{', '.join(missing[:3])}",
            WeightsWarning,
            stacklevel=2,
        )
    return model


def _random(config: PreTrainedConfig, of: Callable[[PreTrainedConfig], type[Any]]) -> PreTrainedModel:
    model_class = of(config)
    _without_cache(config, model_class)
    make = model_class._from_config if issubclass(model_class, PreTrainedModel) else model_class.from_config
    return make(config)


def _without_cache(config: PreTrainedConfig, model_class: type[Any]) -> None:
    # Only generate() uses a key-value cache in the output, and base models do not have it.
    if model_class is AutoModel and getattr(config, "use_cache", False):
        config.use_cache = False


def _class_named(config: PreTrainedConfig) -> type:
    """The class that the config names, which keeps a fine-tuned head, or else AutoModel."""
    found = (_model_class(name) for name in config.architectures or [])
    return next((model_class for model_class in found if model_class is not None), AutoModel)
