"""Whether code asks, while it is traced, if it is being compiled: the trace would be of the branch meant for compilers.

The exporter lets ``torch.compiler.is_compiling()`` be true for its time. Which function of it a forward calls, under
which name and through which helper, shows when it is called only; that is why the functions themselves take note.
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
    "is_compiling": torch.compiler.is_compiling,  # type: ignore[dict-item]  # functions, of which types tell less
    "is_exporting": torch.compiler.is_exporting,  # type: ignore[dict-item]
    "is_fx_tracing": _symbolic_trace.is_fx_tracing,  # type: ignore[dict-item]
}
_OWN_CODE = {name: function.__code__ for name, function in _FUNCTIONS.items()}
_OWN = {name: FunctionType(code, _FUNCTIONS[name].__globals__) for name, code in _OWN_CODE.items()}
# Modules with functions that ask for whoever calls them.
OF_HELPERS = ("transformers.utils.",)
# Here the hidden states of a call are kept in a variable of all threads where it is compiled, else in one of its own.
_OF_ALL_THREADS = "transformers.utils.output_capturing"


class AskedForCompilers(CaptureError):
    """Code of the model may do something else where it is traced: it asks for ``name``."""

    def __init__(self, name: str, place: str | None = None):
        function = "()" if name in _FUNCTIONS else ""
        super().__init__(f"the model's code reads {name}{function}, and may behave differently in a trace", place)


_here: ThisThread | None = None
_noted: list[tuple[str, str | None]] = []
# What each function has said before the trace, and says to other threads meanwhile: the exporter's flags are of all.
_before: dict[str, bool] = {}


@contextmanager
def no_compiler_asked_for() -> Iterator[None]:
    """Raises AskedForCompilers at the end where code asked within the block, in this thread, whether it is being
    compiled, and may do something else then. Other threads are answered as if there were no trace."""
    with compiling_in_this_thread():
        yield
    if _noted:
        raise AskedForCompilers(*_noted[0])


@contextmanager
def compiling_in_this_thread() -> Iterator[None]:
    """Within the block, in which no other thread may enter one, other threads are answered as if there were no trace,
    however the exporter sets its flags."""
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
    """The code that a function of ``_FUNCTIONS`` has meanwhile, with the globals of that one."""
    from kfconvert.capture.compiler_questions import answered

    return answered()


def answered() -> bool:
    """What the function from whose code this is called would answer; it is noted who has asked it. Other threads,
    and what would keep something for all of them, are answered as if there were no trace."""
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
    """The frames whose code asks: those of Python modules with helpers, and the one that these ask for."""
    while frame is not None:
        is_helper = _module_of(frame).startswith(OF_HELPERS)
        if is_helper or frame.f_code.co_name not in _FUNCTIONS:
            yield frame
            if not is_helper:
                return
        frame = frame.f_back
