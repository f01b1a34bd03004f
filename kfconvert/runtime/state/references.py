"""The objects that a model holds outside its module tree: configurations, functions, and unregistered modules."""

from __future__ import annotations

import types
from functools import cached_property
from typing import Any

from torch import nn

from .contents import (
    OF_CONVERSION,
    OF_EVERY_MODULE,
    attributes_of,
    is_config_dict,
    lies_in,
    plain_objects,
    reached,
)


class Holdings:
    """The objects that ``model`` holds in attributes, in containers there, and in attributes of plain objects. An
    instance looks them up on first use, and is valid as long as nothing changes."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._own = dict.fromkeys(model.modules())

    @cached_property
    def _reached(self) -> list[Any]:
        return reached([value for module in self._own for value in attributes_of(module).values()])

    @cached_property
    def outside(self) -> list[nn.Module]:
        """The distinct unregistered modules; none that contains the model."""
        return self._modules(around=False)

    @cached_property
    def around(self) -> list[nn.Module]:
        """The distinct modules of a larger model around this one, where one of its modules refers to that model."""
        return self._modules(around=True)

    @cached_property
    def configurations(self) -> list[Any]:
        """The distinct plain objects, such as a ``config``, including objects of a larger model around it."""
        modules = [*self._own, *self.outside, *self.around]
        found = [value for module in modules for name, value in attributes_of(module).items() if _is_read(name)]
        return plain_objects(found)

    @cached_property
    def config_dicts(self) -> list[Any]:
        """The distinct configurations that are dicts."""
        return [value for value in self._reached if is_config_dict(value)]

    @cached_property
    def functions(self) -> list[Any]:
        """The callables except modules, and the Python modules."""
        modules = (*self._own, *self.outside)
        values = [v for m in modules for k, v in vars(m).items() if k not in OF_EVERY_MODULE | OF_CONVERSION]
        found = [value for value in reached(values) if callable(value) or isinstance(value, types.ModuleType)]
        return [value for value in found if not isinstance(value, nn.Module)]

    def _modules(self, around: bool) -> list[nn.Module]:
        """The referenced modules without the model's own: of trees ``around`` it, or of others."""
        tops = [value for value in self._reached if isinstance(value, nn.Module) and value not in self._own]
        trees = (top for top in tops if lies_in(self.model, top) is around)
        found = dict.fromkeys(module for top in trees for module in top.modules())
        return [module for module in found if module not in self._own]


def configurations(model: nn.Module) -> list[Any]:
    """See ``Holdings.configurations``."""
    return Holdings(model).configurations


def _is_read(name: str) -> bool:
    # Only generate() reads the generation_config, no forward does.
    return name != "generation_config" and name not in OF_CONVERSION
