"""Locations in a model's source: the line of a graph node, or of an error of the exporter."""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import fx, nn

_FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')
_DEFINITION = re.compile(r"\s*(?:async\s+)?def\s")
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
# Not from sysconfig, which takes 0.2 s.
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
# Packages whose code runs in the forward of a model, but is not the model's code.
_TORCH, _KFCONVERT = (str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def location(node: fx.Node) -> str | None:
    """Returns ``file:line`` of the innermost frame of model code that created ``node``.

    Frames of torch, the standard library and kfconvert are skipped: the location is ``self.conv1(x)``, not the line in
    ``torch/nn/modules/conv.py``. Paths of installed packages start with the package
    (``transformers/models/llama/modeling_llama.py:123``). Returns None if the location is unknown.
    """
    return node.meta.get("kfconvert_location") or _innermost(_frames_in(node.meta.get("stack_trace") or ""))


def mark_location(node: fx.Node, place: str) -> None:
    """Sets the ``location`` of a node without frames."""
    node.meta["kfconvert_location"] = place


def blame(error: BaseException) -> str | None:
    """Returns ``file:line``, see ``location``, of the model code that caused an error of the exporter; None if unknown.

    The sources are, in order, the ``place`` of ``error`` or of its causes, their tracebacks, and their texts. If the
    exporter raises after the model has run (such as for a branch on a value), the message has the frames.
    """
    errors = list(_with_causes(error))
    for each in errors:
        found = getattr(each, "place", None) or _innermost(_frames_of(each))
        if found:
            return found
    return next(filter(None, (_innermost(_frames_in(str(each))) for each in errors)), None)


def place_now(frame: FrameType | None = None) -> str | None:
    """Returns ``file:line``, see ``location``, of the model code that runs in ``frame`` or its callers; None if there
    is only code of torch and of this package."""
    frame = sys._getframe(1) if frame is None else frame
    inside = False  # whether a frame of the model was found
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
    """Returns ``file:line`` of the ``def`` of the forward of ``module``, without decorators; None if its source is not
    available."""
    forward = inspect.unwrap(type(module).forward)
    try:
        lines, first = inspect.getsourcelines(forward)
        skipped = next((number for number, line in enumerate(lines) if _DEFINITION.match(line)), 0)
        return f"{_PACKAGES.sub('', inspect.getsourcefile(forward) or '')}:{first + skipped}"
    except (OSError, TypeError):
        return None


def at(place: str | None) -> str:
    """Returns ``" (file:line)"`` for the end of a reason; "" if the place is unknown."""
    return f" ({place})" if place else ""


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames_of(error: BaseException) -> list[tuple[str, int | None]]:
    """The frames of its traceback, without frames of kfconvert's callers."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    entry = next((index for index, (file, _) in enumerate(frames) if file.startswith(_KFCONVERT)), 0)
    return frames[entry:]


def _frames_in(text: str) -> list[tuple[str, int]]:
    return [(file, int(line)) for file, line in _FRAME.findall(text)]


def _innermost(frames: Iterable[tuple[str, int | None]]) -> str | None:
    own = [(file, line) for file, line in frames if _is_own(file)]
    return f"{_PACKAGES.sub('', own[-1][0])}:{own[-1][1]}" if own else None


def _is_own(file: str) -> bool:
    if file.startswith("<"):  # generated code, except input of an interpreter or notebook
        return file.startswith(("<stdin", "<ipython-input"))
    if file.startswith(_STANDARD_LIBRARY) and not _PACKAGES.match(file):
        return False
    return not file.startswith((_TORCH, _KFCONVERT))
