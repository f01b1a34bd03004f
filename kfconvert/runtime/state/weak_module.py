"""A reference to a module that does not keep it alive: what a converted model holds must not hold the model."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn


class WeakModule:
    """``WeakModule(module)()`` is the module, for as long as somebody else holds it.

    The forward of a converted model stands in the instance dict of that model. If it held the model in turn, the two
    would live on, with all weights, until Python's cyclic collector comes by. A deep copy, made together with the
    module, refers to the copy of the module; so does a pickled one.
    """

    __slots__ = ("_reference",)

    def __init__(self, module: nn.Module):
        self._reference = weakref.ref(module)

    def __call__(self) -> nn.Module:
        """Raises ReferenceError where the module is gone."""
        module = self._reference()
        if module is None:
            raise ReferenceError("the converted model is gone: keep the model, not only a method of it")
        return module

    def refers_to(self, module: nn.Module | None) -> bool:
        """Whether this is the reference of ``module``, and of no other; of None once its module is gone."""
        return self._reference() is module

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakModule:
        return WeakModule(copy.deepcopy(self(), memo))

    def __reduce__(self):
        return WeakModule, (self(),)
