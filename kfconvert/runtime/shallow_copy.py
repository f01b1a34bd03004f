"""What copies take from a converted module: shallow ones all but what the conversion put there, others all but what
``freeze`` did."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from .contents import OF_CONVERSION, OfConversion
from .refusals import Refusal, frozen_by
from .weak_module import WeakModule


class StateForCopies(OfConversion):
    """Stands as ``__getstate__`` in the instance dict of a module with a guarded forward, or of a frozen model.

    A shallow copy has the very attributes of its source, and may be given others. It must not have the source's guarded
    forward, which tells in no way of which of the two it was called: the copy is the model as it was before the
    conversion. Pickles and deep copies get everything but the refusals of a frozen model, which they are not.

    ``stays``: whether pickles and deep copies have it as well, as those of a guarded forward need it.

    Python asks an object for its state by this name, wherever it has it: https://docs.python.org/3/library/pickle.html
    """

    def __init__(self, module: nn.Module, own_forward: Callable[..., Any] | None, stays: bool = True):
        self._module, self._own_forward, self._stays = WeakModule(module), own_forward, stays

    def __call__(self) -> Any:
        module = self._module()
        of_class = getattr(type(module), "__getstate__", None)  # from Python 3.11 on, each class has it
        state = module.__dict__ if of_class is None else of_class(module)
        if not isinstance(state, dict):
            return state
        if sys._getframe(1).f_code is not copy.copy.__code__:
            left_out = Refusal if self._stays else (Refusal, StateForCopies)
            return {name: value for name, value in state.items() if not isinstance(value, left_out)}
        if (frozen := frozen_by(module)) is not None:
            frozen.bring_back("a shallow copy, which runs the original forward, has the same tensors")
        kept = {k: v for k, v in state.items() if k not in OF_CONVERSION and not isinstance(v, OfConversion)}
        return kept if self._own_forward is None else {**kept, "forward": self._own_forward}
