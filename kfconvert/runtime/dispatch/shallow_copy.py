"""``copy.copy`` of a converted module drops what the conversion added."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from ..state.contents import OF_CONVERSION, OfConversion
from ..state.weak_module import WeakModule


class StateForCopies(OfConversion):
    """The ``__getstate__`` in the instance dict of a module with a guarded forward.

    A shallow copy has the attributes of its source, and may be given others. A guarded forward cannot detect which of
    the two has called it, so the copy runs the forward from before the conversion. Pickles and deep copies keep the
    guarded forward.

    Python looks this name up on the object to get its state: https://docs.python.org/3/library/pickle.html
    """

    def __init__(self, module: nn.Module, own_forward: Callable[..., Any] | None):
        self._module, self._own_forward = WeakModule(module), own_forward

    def __call__(self) -> Any:
        module = self._module()
        of_class = getattr(type(module), "__getstate__", None)  # every class has it since Python 3.11
        state = module.__dict__ if of_class is None else of_class(module)
        if not isinstance(state, dict) or sys._getframe(1).f_code is not copy.copy.__code__:
            return state
        frozen = getattr(state.get("forward"), "frozen", None)
        if frozen is not None:
            frozen.bring_back("a shallow copy shares them and runs the original forward")
        kept = {k: v for k, v in state.items() if k not in OF_CONVERSION and not isinstance(v, OfConversion)}
        return kept if self._own_forward is None else {**kept, "forward": self._own_forward}
