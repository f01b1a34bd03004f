"""Converted models on disk: saved, and loaded again by the decisions that were recorded; or exported as programs."""

from .exporting import export
from .files import ArtifactError, check_target, load, save
from .schema import RECORD_FILE

__all__ = [
    "ArtifactError",
    "RECORD_FILE",
    "check_target",
    "export",
    "load",
    "save",
]
