"""Reduces the tracer's cost: it skips code for intermediate graphs, and shortens the stack traces of nodes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import fx
from torch.fx import proxy

from ..process import ThisThread, replaced


@contextmanager
def lean_graphs(outermost: CodeType) -> Iterator[None]:
    """Context manager under which graphs of this thread generate code when they are called, and nodes get the stack
    from ``outermost`` on."""
    here = ThisThread()
    recompile = fx.GraphModule.recompile
    places = (
        (fx.GraphModule, "recompile", _when_called(here, recompile)),
        (proxy, "CapturedTraceback", _Stacks(here, proxy.CapturedTraceback, outermost)),
    )
    try:
        with replaced(places):
            yield
    finally:
        here.over = True


def _when_called(here: ThisThread, recompile: Callable[[fx.GraphModule], Any]) -> Callable[[fx.GraphModule], Any]:
    def called(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        recompile(self)
        return self(*args, **kwargs)

    def wait(self: fx.GraphModule) -> Any:
        if not here:
            return recompile(self)
        setattr(type(self), "forward", called)  # noqa: B010 - each has its own class
        return None

    return wait


class _Stacks:
    """A replacement for the class whose ``extract().summary()`` returns the stack of the caller."""

    def __init__(self, here: ThisThread, own: Any, outermost: CodeType):
        self._here, self._own, self._outermost = here, own, outermost
        self._frames: dict[tuple[CodeType, int], traceback.FrameSummary] = {}

    def extract(self, **kwargs: Any) -> Any:
        if not self._here:
            return self._own.extract(**kwargs)
        found = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            place = frame.f_code, frame.f_lasti  # line lookup searches a table linearly
            summary = self._frames.get(place)
            if summary is None:
                code = frame.f_code
                summary = traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False)
                self._frames[place] = summary
            found.append(summary)
            frame = None if frame.f_code is self._outermost else frame.f_back
        return _Stack(found[::-1])


class _Stack:
    def __init__(self, frames: list[traceback.FrameSummary]):
        self._frames = frames

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary(self._frames)
