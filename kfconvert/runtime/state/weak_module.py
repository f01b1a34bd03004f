"""A weak reference to a module: a converted model's own attributes must not keep it alive."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn


class WeakModule:
    """``WeakModule(module)()`` is the module, for as long as another reference keeps it alive.

    The forward of a converted model is in the instance dict of that model. If it held the model, both would stay, with
    all weights, until Python's cyclic garbage collector runs. A deep copy that includes the module refers to the copy
    of the module; so does a pickle.
    """

    __slots__ = ("_reference",)

    def __init__(self, module: nn.Module):
        self._reference = weakref.ref(module)

    def __call__(self) -> nn.Module:
        """Raises ReferenceError where the module no longer exists."""
        module = self._reference()
        if module is None:
            raise ReferenceError(
                "the converted model no longer exists: keep a reference to the model, not only to a method of it"
            )
        return module

    def refers_to(self, module: nn.Module | None) -> bool:
        """Whether this refers to ``module``; for None, whether its module no longer exists."""
        return self._reference() is module

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakModule:
        return WeakModule(copy.deepcopy(self(), memo))

    def __reduce__(self):
        return WeakModule, (self(),)
