"""Models of diffusers (optional), built from class and configuration."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

from torch import nn

from .common import ZooError, building, class_named
from .equal_models import reproduced
from .tuples import tuple_places, with_tuples
from .untrusted import Undrawn, checked_values


def rebuild(recipe: dict[str, Any], trusted: bool) -> nn.Module:
    """Builds the architecture of a recipe from ``described``, see ``zoo.rebuild``."""
    recipe = with_tuples(recipe)
    class_name, values = recipe["class"], recipe["config"]
    if importlib.util.find_spec("diffusers") is None:
        raise ZooError(f"a {class_name} needs the package diffusers: pip install diffusers")
    import diffusers

    model_class: Any = class_named(diffusers, class_name, diffusers.ModelMixin)
    if model_class is None:
        raise ZooError(f"diffusers {diffusers.__version__} has no model class {class_name!r}")
    with building(diffusers, f"build this {class_name}"), Undrawn():
        return model_class(**(values if trusted else checked_values(values, class_name)))


def described(model: nn.Module) -> dict[str, Any] | None:
    """Returns the recipe of a model that the user built; None if ``rebuild`` would not reproduce it, because its class
    is user code or the model has changed."""
    import diffusers

    if class_named(diffusers, type(model).__name__, diffusers.ModelMixin) is not type(model):
        return None
    found: Any = model
    # A configuration holds more than arguments: notes of diffusers, and what ``__init__`` registers.
    arguments = inspect.signature(type(model).__init__).parameters
    config = {name: value for name, value in found.config.items() if name in arguments}
    recipe = {
        "kind": "diffusers",
        "class": type(model).__name__,
        "config": config,
        "diffusers": diffusers.__version__,
        "tuples": tuple_places({"config": config}, {"config": config}),
    }
    return reproduced(model, recipe, rebuild)
