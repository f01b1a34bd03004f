"""One conversion from beginning to end: its steps, what is measured and judged, its statistics."""

from .own_state import OwnState
from .preparation import ConversionError, first_line, resolve_device
from .selector import Decision
from .steps import Conversion, Progress

__all__ = [
    "Conversion",
    "ConversionError",
    "Decision",
    "OwnState",
    "Progress",
    "first_line",
    "resolve_device",
]
