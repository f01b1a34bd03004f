"""Shallow copies of a converted module, which drop what the conversion added."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from ..state.references import OfConversion, without_conversion
from ..state.weak_module import WeakModule


class _ForCopies(OfConversion):
    """A method in the instance dict of a module with a guarded forward.

    A shallow copy has the attributes of its source, and may be given others. A guarded forward cannot detect which of
    the two has called it, so the copy runs the forward from before the conversion.
    """

    def __init__(self, module: nn.Module, own_forward: Callable[..., Any] | None):
        self._module, self._own_forward = WeakModule(module), own_forward

    def _without_conversion(self, state: dict[str, Any]) -> dict[str, Any]:
        kept = without_conversion(state)
        return kept if self._own_forward is None else {**kept, "forward": self._own_forward}


class StateForCopies(_ForCopies):
    """The ``__getstate__`` of the module. Pickles and deep copies keep the guarded forward.

    Python looks this name up on the object to get its state: https://docs.python.org/3/library/pickle.html
    """

    def __call__(self) -> Any:
        module = self._module()
        of_class = getattr(type(module), "__getstate__", None)  # every class has it since Python 3.11
        state = module.__dict__ if of_class is None else of_class(module)
        is_copied = isinstance(state, dict) and sys._getframe(1).f_code is copy.copy.__code__
        return self._without_conversion(state) if is_copied else state


class Replicate(_ForCopies):
    """The ``_replicate_for_data_parallel`` of the module, which ``torch.nn.DataParallel`` calls for each device."""

    def __call__(self) -> nn.Module:
        module = self._module()
        replica: nn.Module = type(module)._replicate_for_data_parallel(module)
        replica.__dict__ = self._without_conversion(replica.__dict__)
        return replica
