"""Detects code that checks, while it is traced, whether it is compiled: the trace would take the compilers' branch.

The exporter sets ``torch.compiler.is_compiling()`` during a trace. Only a call shows whether a forward uses it, and
through which helper. For that reason, the function itself records its callers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType

import torch

from ..graph import place_now
from ..process import ThisThread
from ..region import CaptureError
from ..runtime import is_of_author

_FUNCTIONS: dict[str, FunctionType] = {
    "is_compiling": torch.compiler.is_compiling,  # type: ignore[dict-item]  # functions with less precise types
    "is_exporting": torch.compiler.is_exporting,  # type: ignore[dict-item]
}
_OWN_CODE = {name: function.__code__ for name, function in _FUNCTIONS.items()}
_OWN = {name: FunctionType(code, _FUNCTIONS[name].__globals__) for name, code in _OWN_CODE.items()}
# Libraries whose code may check whether it is compiled, but returns the same results either way.
_SAME_COMPILED = frozenset(("transformers", "timm", "torchvision", "diffusers", "accelerate", "peft"))
# In PyTorch itself, nn.TransformerEncoder writes zeros where a mask pads at the right, except when compiled.
_OTHER_COMPILED = "torch.nn.modules.transformer"
# Modules with functions that call these functions for their callers.
_OF_HELPERS = "transformers.utils."
# When compiled, this module keeps the hidden states of a call in a variable of all threads, else in a thread-local one.
_OF_ALL_THREADS = "transformers.utils.output_capturing"


class AskedForCompilers(CaptureError):
    """Code of the model may behave differently in a trace: it calls the function ``name``."""

    def __init__(self, name: str, place: str | None = None):
        super().__init__(f"the model's code reads {name}(), and may behave differently in a trace", place)


_here: ThisThread | None = None
_noted: list[tuple[str, str | None]] = []
# The result of each function before the trace, which other threads still get: the exporter's flags are global.
_before: dict[str, bool] = {}


@contextmanager
def no_compiler_asked_for() -> Iterator[None]:
    """Context manager that raises AskedForCompilers at the end where code in this thread has checked whether it is
    compiled, and may behave differently then. Other threads get the answers from before the trace."""
    with compiling_in_this_thread():
        yield
    if _noted:
        raise AskedForCompilers(*_noted[0])


@contextmanager
def compiling_in_this_thread() -> Iterator[None]:
    """Context manager under which other threads get the answers from before the trace, whatever flags the exporter
    sets. Only one thread may enter it at a time."""
    global _here
    _here = here = ThisThread()
    _noted.clear()
    _before.update({name: function() for name, function in _OWN.items()})
    for name, function in _FUNCTIONS.items():
        function.__code__ = _note.__code__.replace(co_name=name)
    try:
        yield
    finally:
        here.over = True
        for name, function in _FUNCTIONS.items():
            function.__code__ = _OWN_CODE[name]


def _note() -> bool:
    """The temporary code of each function of ``_FUNCTIONS``, which runs with the globals of that function."""
    from kfconvert.capture.compiler_questions import answered

    return answered()


def answered() -> bool:
    """Return the result of the function whose code calls this, and record the caller. Other threads, and code that
    would store the result for all threads, get the answer from before the trace."""
    frame: FrameType | None = sys._getframe(1)
    assert frame is not None
    name, module = frame.f_code.co_name, ""
    while frame is not None and (frame.f_code.co_name in _FUNCTIONS or module.startswith(_OF_HELPERS)):
        frame = frame.f_back
        module = "" if frame is None else frame.f_globals.get("__name__") or ""
        if not _here or module == _OF_ALL_THREADS:
            return _before[name]
    if module == _OTHER_COMPILED or (is_of_author(module) and module.partition(".")[0] not in _SAME_COMPILED):
        _noted.append((name, place_now(frame)))
    answer: bool = _OWN[name]()
    return answer
