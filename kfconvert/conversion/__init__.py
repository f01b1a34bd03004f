"""One conversion from beginning to end: its steps, what is measured and judged, its statistics."""

from .captures import Captures, gathered, trace
from .layouts import Layouts
from .memory_use import memory
from .own_state import OwnState
from .preparation import ConversionError, first_line, prepare, resolve_device
from .selector import Decision, Selector
from .sites import match
from .stages import Progress, Stages
from .steps import Result, calls_between_checks, hand_over, programs, replace, time
from .validation import revert, validate

__all__ = [
    "Captures",
    "ConversionError",
    "Decision",
    "Layouts",
    "OwnState",
    "Progress",
    "Result",
    "Selector",
    "Stages",
    "calls_between_checks",
    "first_line",
    "gathered",
    "hand_over",
    "match",
    "memory",
    "prepare",
    "programs",
    "replace",
    "resolve_device",
    "revert",
    "time",
    "trace",
    "validate",
]
