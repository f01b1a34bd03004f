"""Lessons: one computation at several levels, from plain PyTorch to a custom kernel, checked and timed.

``NAMES`` lists the lessons, ``lesson(name)`` returns one, ``run(name)`` checks and times its levels, and ``table`` and
``plot`` show the results.
"""

from .definition import NAMES, SIZES, Lesson, Level, lesson
from .measuring import LessonResult, LevelResult, run
from .showing import plot, table

__all__ = ["NAMES", "SIZES", "Lesson", "LessonResult", "Level", "LevelResult", "lesson", "plot", "run", "table"]
