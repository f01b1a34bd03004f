"""Errors of the operators in a program, which the original forward may catch or report differently."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

from ...region import Region
from ..state.random_generators import States, put_states_back


class ProgramError(Exception):
    """A program has raised ``error``. The original forward decides what the call does, as it may catch the error."""

    def __init__(self, error: Exception):
        text = str(error)
        # An assertion in the graph about data-dependent sizes.
        unlike = isinstance(error, RuntimeError) and "Runtime assertion failed" in text
        super().__init__(
            "data-dependent sizes differ from the example's"
            if unlike
            else f"its program raised {type(error).__name__}: {text.partition(chr(10))[0][:100]}"
        )


def leave_to_original(error: Exception, region: Region, drawn: States | None) -> None:
    """Raises ProgramError where an operator in the program of ``region`` has raised ``error`` and the call can be
    undone. ``drawn``: the states of the random generators before the call."""
    # A step on a static cache may have written part of it, a batch norm its statistics.
    if region.takes_static_cache or region.counts_statistics or _is_of_handler(error):
        return
    if drawn is not None:
        put_states_back(drawn)
    raise ProgramError(error) from error


def _is_of_handler(error: Exception) -> bool:
    """Whether a signal handler has raised the error, which can happen at any point: it is meant for the caller.
    User-defined operators may raise any other error."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {_code_of(handler) for handler in handlers if callable(handler)}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> Any:
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)  # of a method
    return getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
