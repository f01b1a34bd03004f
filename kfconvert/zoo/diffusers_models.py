"""Models of diffusers (optional), built from class and configuration."""

from __future__ import annotations

import importlib.util
import inspect
import json
from typing import Any

import torch
from torch import nn

from .common import ZooError, first_line
from .equal_models import is_made_alike
from .untrusted import Undrawn, checked_values


def rebuild(recipe: dict[str, Any], trusted: bool) -> nn.Module:
    """Builds the architecture of a recipe from ``described``, see ``zoo.rebuild``."""
    class_name, values = recipe["class"], recipe["config"]
    if importlib.util.find_spec("diffusers") is None:
        raise ZooError(f"a {class_name} needs the package diffusers: pip install diffusers")
    import diffusers

    model_class: Any = _model_class(class_name)
    if model_class is None:
        raise ZooError(f"diffusers {diffusers.__version__} has no model class {class_name!r}")
    try:
        with Undrawn():
            return model_class(**(values if trusted else checked_values(values, class_name)))
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
        arguments = inspect.signature(type(model).__init__).parameters
        config = {name: value for name, value in found.config.items() if name in arguments}
        recipe = {
            "kind": "diffusers",
            "class": type(model).__name__,
            "config": json.loads(json.dumps(config)),
            "diffusers": diffusers.__version__,
        }
        with torch.device("meta"), torch.random.fork_rng(devices=()):
            again = rebuild(recipe, True)
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
