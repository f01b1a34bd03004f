"""Detects code that checks, while it is traced, whether it is compiled: the trace would take the compilers' branch.

The exporter sets ``torch.compiler.is_compiling()`` during a trace. Only a call shows which variant of it a forward
uses, by which name and through which helper. For that reason, the functions themselves record their callers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType

import torch
from torch.fx import _symbolic_trace

from ..graph import place_now
from ..process import ThisThread
from ..region import CaptureError
from ..runtime import is_same_compiled

_FUNCTIONS: dict[str, FunctionType] = {
    "is_compiling": torch.compiler.is_compiling,  # type: ignore[dict-item]  # functions with less precise types
    "is_exporting": torch.compiler.is_exporting,  # type: ignore[dict-item]
    "is_fx_tracing": _symbolic_trace.is_fx_tracing,  # type: ignore[dict-item]
}
_OWN_CODE = {name: function.__code__ for name, function in _FUNCTIONS.items()}
_OWN = {name: FunctionType(code, _FUNCTIONS[name].__globals__) for name, code in _OWN_CODE.items()}
# Modules with functions that call these functions for their callers.
OF_HELPERS = ("transformers.utils.",)
# When compiled, this module keeps the hidden states of a call in a variable of all threads, else in a thread-local one.
_OF_ALL_THREADS = "transformers.utils.output_capturing"


class AskedForCompilers(CaptureError):
    """Code of the model may behave differently in a trace: it reads ``name``."""

    def __init__(self, name: str, place: str | None = None):
        function = "()" if name in _FUNCTIONS else ""
        super().__init__(f"the model's code reads {name}{function}, and may behave differently in a trace", place)


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
    frame = sys._getframe(1)
    name = frame.f_code.co_name
    askers = {_module_of(asker): asker for asker in _askers(frame.f_back)}
    if not _here or _OF_ALL_THREADS in askers:
        return _before[name]
    module, asker = next(reversed(askers.items()), (None, None))
    if not is_same_compiled(module):
        _noted.append((name, place_now(asker)))
    answer: bool = _OWN[name]()
    return answer


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _askers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames that read the flag: frames of helper modules, and the first frame outside of them."""
    while frame is not None:
        is_helper = _module_of(frame).startswith(OF_HELPERS)
        if is_helper or frame.f_code.co_name not in _FUNCTIONS:
            yield frame
            if not is_helper:
                return
        frame = frame.f_back
