"""Converted models on disk: saved, and loaded again by the decisions that were recorded; or exported as programs."""

from .exporting import export
from .files import ArtifactError, check_target, load, save

__all__ = [
    "ArtifactError",
    "check_target",
    "export",
    "load",
    "save",
]
