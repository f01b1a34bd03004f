"""Errors of artifacts, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError

from ..conversion import first_line
from ..json_values import first_fault


class ArtifactError(ValueError):
    """Raised if an artifact cannot be written, read or rebuilt. The message has one line."""


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Context manager that raises ArtifactError, with the name of ``file``, for any error of reading it."""
    try:
        yield
    except ArtifactError:
        raise
    except FileNotFoundError:
        raise ArtifactError(f"{printable(file)} is missing") from None
    except OSError as error:
        raise ArtifactError(f"{printable(file)} cannot be read: {why(error)}") from error
    except ValidationError as error:
        raise ArtifactError(f"{printable(file)} is damaged: it {first_fault(error)}") from error
    except Exception as error:  # JSON and safetensors raise many types
        raise ArtifactError(f"{printable(file)} is damaged: {why(error)}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager that raises ArtifactError, with the name of ``path``, for an error of writing it."""
    try:
        yield
    except ArtifactError:
        raise
    except (OSError, SafetensorError, TypeError, ValueError, RuntimeError) as error:  # also for impossible names
        raise ArtifactError(f"cannot write {printable(path)}: {why(error)}") from error


def printable(path: Path) -> str:
    """Returns ``path`` in one line for a message, with any name."""
    return ascii(str(path))[1:-1][:200]


def why(error: Exception) -> str:
    """Returns the reason without Python's decoration: the system's text, or the first line of another error."""
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)[:300]
