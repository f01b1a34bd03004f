"""Errors of artifacts, in one line."""

from __future__ import annotations

from pathlib import Path

from .schema import RECORD_FILE


class ArtifactError(ValueError):
    """An artifact that cannot be written, read or rebuilt. One clear line."""


def no_artifact(folder: Path) -> ArtifactError:
    return ArtifactError(f"{folder} is not a kfconvert artifact: it has no {RECORD_FILE}")


def printable(path: Path) -> str:
    """Returns ``path`` in one line for a message, with any name."""
    return ascii(str(path))[1:-1][:200]


def why(error: Exception) -> str:
    """Returns the reason without Python's decoration: the system's text, or the first line of another error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
