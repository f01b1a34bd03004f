"""What a model holds beside its tree of modules: objects, such as configurations, functions, and modules that are not
registered in it."""

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
    """What ``model`` holds in attributes, in containers there, and in the attributes of plain objects. Each is looked
    up when it is asked for first: an object of this class is good for as long as nothing changes."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._own = dict.fromkeys(model.modules())

    @cached_property
    def _reached(self) -> list[Any]:
        return reached([value for module in self._own for value in attributes_of(module).values()])

    @cached_property
    def outside(self) -> list[nn.Module]:
        """The distinct modules that are held without being registered; none that the model is registered in."""
        return self._modules(around=False)

    @cached_property
    def around(self) -> list[nn.Module]:
        """The distinct modules of a larger model that this one lies in, where one of its own modules holds that."""
        return self._modules(around=True)

    @cached_property
    def configurations(self) -> list[Any]:
        """The distinct plain objects, such as a ``config``; and those that a larger model holds where this one knows in
        which one it lies."""
        modules = [*self._own, *self.outside, *self.around]
        found = [value for module in modules for name, value in attributes_of(module).items() if _is_read(name)]
        return plain_objects(found)

    @cached_property
    def config_dicts(self) -> list[Any]:
        """The distinct configurations that are dicts."""
        return [value for value in self._reached if is_config_dict(value)]

    @cached_property
    def functions(self) -> list[Any]:
        """What can be called, but for modules; and Python modules."""
        modules = (*self._own, *self.outside)
        values = [v for m in modules for k, v in vars(m).items() if k not in OF_EVERY_MODULE | OF_CONVERSION]
        found = [value for value in reached(values) if callable(value) or isinstance(value, types.ModuleType)]
        return [value for value in found if not isinstance(value, nn.Module)]

    def _modules(self, around: bool) -> list[nn.Module]:
        """The modules without the model's own in what these hold: of trees ``around`` it, or of others."""
        tops = [value for value in self._reached if isinstance(value, nn.Module) and value not in self._own]
        trees = (top for top in tops if lies_in(self.model, top) is around)
        found = dict.fromkeys(module for top in trees for module in top.modules())
        return [module for module in found if module not in self._own]


def configurations(model: nn.Module) -> list[Any]:
    """See ``Holdings.configurations``."""
    return Holdings(model).configurations


def _is_read(name: str) -> bool:
    # Only generate() reads the generation_config, and no forward does.
    return name != "generation_config" and name not in OF_CONVERSION
