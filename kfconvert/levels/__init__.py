"""Lessons: one computation at several levels, from plain PyTorch to a custom kernel, checked and timed.

``NAMES`` lists the lessons, ``lesson(name)`` returns one, ``run(name)`` checks and times its levels, and ``table`` and
``plot`` show the results. The command is ``kfconvert levels``. torch is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

from .names import NAMES, SIZES

if TYPE_CHECKING:  # editors and type checkers do not evaluate __getattr__
    from .definition import Lesson, Level, lesson
    from .measuring import LessonResult, LevelResult, run
    from .showing import plot, table

_HOMES = {
    "Lesson": "definition",
    "Level": "definition",
    "lesson": "definition",
    "LessonResult": "measuring",
    "LevelResult": "measuring",
    "run": "measuring",
    "plot": "showing",
    "table": "showing",
}

__all__ = ["NAMES", "SIZES", "Lesson", "LessonResult", "Level", "LevelResult", "lesson", "plot", "run", "table"]


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
