"""Models of diffusers (optional), built from class and configuration."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from .common import ZooError, first_line
from .synthetic import is_made_alike
from .untrusted import Undrawn, check_sizes, checked_values


def rebuild(recipe: dict[str, Any], trusted: bool, shapes: Mapping[str, tuple[int, ...]] | None) -> nn.Module:
    """Builds the architecture of a recipe from ``described``, see ``zoo.rebuild``. With ``shapes``, its weights are
    uninitialized memory."""
    class_name, values = recipe["class"], recipe["config"]
    if importlib.util.find_spec("diffusers") is None:
        raise ZooError(f"a {class_name} needs the package diffusers: pip install diffusers")
    import diffusers

    model_class: Any = _model_class(class_name)
    if model_class is None:
        raise ZooError(f"diffusers {diffusers.__version__} has no model class {class_name!r}")
    if not trusted:
        values = checked_values(_defaults(model_class), values, class_name)
    build = partial(model_class, **values)
    try:
        if shapes is not None:
            check_sizes(build, shapes)
        with nullcontext() if shapes is None else Undrawn():
            return build()
    except ZooError:
        raise
    except Exception as error:  # model code with unexpected values may raise anything
        raise ZooError(
            f"diffusers {diffusers.__version__} cannot build this {class_name}: {first_line(error)}"
        ) from error


def described(model: nn.Module) -> dict[str, Any] | None:
    """Returns the recipe of a model that the user built; None if ``rebuild`` would not reproduce it, because its class
    is user code or the model has changed."""
    import diffusers

    if _model_class(type(model).__name__) is not type(model):
        return None
    found: Any = model
    try:
        # A configuration holds more than arguments: notes of diffusers, and what ``__init__`` registers.
        arguments = _defaults(type(model))
        config = {name: value for name, value in found.config.items() if name in arguments}
        recipe = {
            "kind": "diffusers",
            "class": type(model).__name__,
            "config": json.loads(json.dumps(config)),
            "diffusers": diffusers.__version__,
        }
        with torch.device("meta"), torch.random.fork_rng(devices=()):
            again = rebuild(recipe, True, None)
    except (ZooError, TypeError, ValueError, RuntimeError):  # not JSON, or not buildable without data
        return None
    return recipe if is_made_alike(model, again) else None


def _model_class(name: str) -> type[Any] | None:
    """The model class ``name`` of diffusers; None if there is none."""
    import diffusers

    try:
        found = getattr(diffusers, name, None)
    except (ImportError, RuntimeError):  # a required package is not installed
        return None
    return found if isinstance(found, type) and issubclass(found, diffusers.ModelMixin) else None


def _defaults(model_class: type[Any]) -> dict[str, Any]:
    """The arguments of ``model_class`` with their defaults as JSON values."""
    parameters = list(inspect.signature(model_class.__init__).parameters.values())[1:]
    named = (each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    return {each.name: list(each.default) if isinstance(each.default, tuple) else each.default for each in named}
