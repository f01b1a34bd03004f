"""Stack levels of the package's callers."""

from __future__ import annotations

import sys
from types import FrameType


def level_outside() -> int:
    """Returns the ``stacklevel`` for warnings that refer to the line that called this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "kfconvert":
        frame, level = frame.f_back, level + 1
    return level
