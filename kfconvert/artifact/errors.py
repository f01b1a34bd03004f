"""What goes wrong with an artifact, in one line."""

from __future__ import annotations

from pathlib import Path

from .schema import RECORD_FILE


class ArtifactError(ValueError):
    """An artifact that cannot be written, read or rebuilt. One clear line."""


def no_artifact(folder: Path) -> ArtifactError:
    return ArtifactError(f"{folder} is no kfconvert artifact: there is no {RECORD_FILE} in it")


def printable(path: Path) -> str:
    """``path`` in one line of a message, whatever its name is made of."""
    return ascii(str(path))[1:-1][:200]


def why(error: Exception) -> str:
    """The reason without Python's decoration: what an OSError says, or the first line of another error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
