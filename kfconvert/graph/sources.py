"""Where in a model's source something came from: the line behind a node of a graph, or behind an error of the
exporter."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_DEFINITION = re.compile(r"\s*(?:async\s+)?def\s")
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
# What sysconfig tells of it takes a fifth of a second.
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
# Code of these packages runs in the forward of a model, but is not what the model's author wrote.
_TORCH, _KFCONVERT = (str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def location(node: fx.Node) -> str | None:
    """``file:line`` of the innermost frame of the model's own code that made ``node``.

    Frames of torch, of the standard library and of kfconvert are passed over: ``self.conv1(x)`` is told, not the line
    in ``torch/nn/modules/conv.py``. A file of an installed package is told from the package on
    (``transformers/models/llama/modeling_llama.py:123``). None where the graph does not know.
    """
    return node.meta.get("kfconvert_location") or _innermost(_frames_in(node.meta.get("stack_trace") or ""))


def mark_location(node: fx.Node, place: str) -> None:
    """Note the ``location`` of a node that has no frames of its own."""
    node.meta["kfconvert_location"] = place


def blame(error: BaseException) -> str | None:
    """``file:line``, as of ``location``, of the model's own code that the exporter stumbled over; None if unknown.

    The ``place`` that ``error``, or one behind it, names comes first, then their tracebacks, then their texts: for what
    the exporter finds after the model has run (such as a branch on a value) it prints the frames in the message.
    """
    errors = list(_with_causes(error))
    for each in errors:
        found = getattr(each, "place", None) or _innermost(_frames_of(each))
        if found:
            return found
    return next(filter(None, (_innermost(_frames_in(str(each))) for each in errors)), None)


def place_now(frame: FrameType | None = None) -> str | None:
    """``file:line``, as of ``location``, of the model's own code that runs in ``frame``, or around it; None where only
    code of torch and of this package runs there."""
    frame = sys._getframe(1) if frame is None else frame
    inside = False  # the model, which this package has called
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_own(file):
            return f"{_PACKAGES.sub('', file)}:{frame.f_lineno}"
        if file.startswith(_KFCONVERT) and inside and not frame.f_code.co_name.startswith("__torch_"):  # a mode
            return None
        inside |= not file.startswith(_KFCONVERT)
        frame = frame.f_back
    return None


def definition(module: nn.Module) -> str | None:
    """``file:line`` of the ``def`` of the forward of ``module``, which decorators may stand for; None where its source
    is not to be had."""
    forward = _undecorated(type(module).forward)
    try:
        lines, first = inspect.getsourcelines(forward)
        skipped = next((number for number, line in enumerate(lines) if _DEFINITION.match(line)), 0)
        return f"{_PACKAGES.sub('', inspect.getsourcefile(forward) or '')}:{first + skipped}"
    except (OSError, TypeError):
        return None


def _undecorated(function: Any) -> Any:
    """The function behind decorators, also such as do not tell what they stand for."""
    function = inspect.unwrap(function)
    held = inspect.getclosurevars(function).nonlocals.values() if inspect.isfunction(function) else ()
    inner = [each for each in held if inspect.isfunction(each) and each.__name__ == "forward"]
    return _undecorated(inner[0]) if inner and function.__name__ != "forward" else function


def at(place: str | None) -> str:
    """``" (file:line)"`` to end a reason with, or nothing where the place is not known."""
    return f" ({place})" if place else ""


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames_of(error: BaseException) -> list[tuple[str, int | None]]:
    """The frames of its traceback, but for those of kfconvert's callers."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    entry = next((index for index, (file, _) in enumerate(frames) if file.startswith(_KFCONVERT)), 0)
    return frames[entry:]


def _frames_in(text: str) -> list[tuple[str, int]]:
    return [(file, int(line)) for file, line in _FRAME.findall(text)]


def _innermost(frames: Iterable[tuple[str, int | None]]) -> str | None:
    own = [(file, line) for file, line in frames if _is_own(file)]
    return f"{_PACKAGES.sub('', own[-1][0])}:{own[-1][1]}" if own else None


def _is_own(file: str) -> bool:
    if file.startswith("<"):  # generated code, but for what was typed into an interpreter or a notebook
        return file.startswith(("<stdin", "<ipython-input"))
    if file.startswith(_STANDARD_LIBRARY) and not _PACKAGES.match(file):
        return False
    return not file.startswith((_TORCH, _KFCONVERT))
