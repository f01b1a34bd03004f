"""Captured graphs: their guards, and the tensors that they read."""

from .expressions import Unstorable
from .guard import Answer, Dimensions, Guard, given_as, guard_from_placeholders
from .live_tensors import LiveTensors, Place
from .region import CaptureError, Read, Region
from .stored import keep, kept, made_reads, made_region

__all__ = [
    "Answer",
    "CaptureError",
    "Guard",
    "LiveTensors",
    "Place",
    "Dimensions",
    "Read",
    "Region",
    "Unstorable",
    "given_as",
    "guard_from_placeholders",
    "keep",
    "kept",
    "made_reads",
    "made_region",
]
