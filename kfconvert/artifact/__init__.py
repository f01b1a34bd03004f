"""Converted models on disk: saved, and loaded again by the decisions that were recorded."""

from .files import ArtifactError, check_target, load, save

__all__ = [
    "ArtifactError",
    "check_target",
    "load",
    "save",
]
