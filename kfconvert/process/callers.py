"""Where this package was called from."""

from __future__ import annotations

import sys
from types import FrameType


def level_outside() -> int:
    """The ``stacklevel`` with which a warning of the caller tells of the line that called this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "kfconvert":
        frame, level = frame.f_back, level + 1
    return level
