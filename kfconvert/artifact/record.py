"""``kfconvert.json`` and checksums: written so that damage shows, read as from an unknown hand."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from ..json_values import first_fault
from ..version import __version__
from .schema import FORMAT, READABLE_FORMATS, Record

LARGEST = 2**26  # bytes of a record; the largest known has a hundredth


class RecordError(ValueError):
    """A file that cannot be read, or a record that is damaged. One clear line, which does not name the file."""


def sealed(record: dict[str, Any], folder: Path, others: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The text of ``kfconvert.json`` for ``record``, with the checksums of the files in ``folder``, those of ``others``
    that lie elsewhere, and its own.

    Raises:
        RecordError: it is no JSON, or too large to be read again.
    """
    files = {**others, **{file.name: checksum(file) for file in folder.iterdir()}}
    record = {**record, "files": dict(sorted(files.items()))}
    try:
        text = json.dumps({**record, "checksum": _own_checksum(record)}, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:  # a recipe of the caller's own, or one with an infinity
        raise RecordError(f"its record is no JSON: {error}") from error
    if len(text.encode()) > LARGEST:
        raise RecordError(f"its record has more than {LARGEST} bytes")
    return text


def read(file: Path) -> dict[str, Any]:
    """The record in ``file``, which fits the schema and its own checksum.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is of an unknown format, or damaged.
        OSError: it cannot be read.
    """
    record = read_json(file)
    with _damage_told():
        _check_format(record)
        Record.model_validate(record)
        if "checksum" in record and record["checksum"] != _own_checksum(record):
            raise RecordError("is damaged: it does not fit its own checksum")
    return record


def read_as(schema: type[BaseModel], file: Path) -> Any:
    """What ``file`` says in JSON, which fits ``schema``. Raises as ``read_json``."""
    found = read_json(file)
    with _damage_told():
        schema.model_validate(found)
    return found


def read_json(file: Path) -> Any:
    """What ``file`` says in JSON, without NaN and infinities.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is no JSON, or has more than LARGEST bytes.
        OSError: it cannot be read.
    """
    with open(_regular(file), "rb") as stream:
        content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise RecordError(f"has more than {LARGEST} bytes")
    with _damage_told():
        found = json.loads(content.decode(), parse_constant=_refuse_constant)
    return found


@contextmanager
def _damage_told() -> Iterator[None]:
    """Turns what is wrong with the content of a file into a RecordError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise RecordError(f"cannot be read: {error}") from error
    except ValidationError as error:
        raise RecordError(f"is damaged: it {first_fault(error)}") from error
    except RecursionError as error:
        raise RecordError("is damaged: it is nested too deeply") from error
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"is damaged: {error}") from error


def checksum(file: Path) -> dict[str, Any]:
    """{"bytes", "sha256"} of a file.

    Raises:
        FileNotFoundError: there is none.
        RecordError: it is no regular file.
        OSError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with open(_regular(file), "rb") as stream:
        while piece := stream.read(2**20):
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def check_file(file: Path, expected: dict[str, Any] | None) -> None:
    """Raises RecordError unless ``file`` is a regular one with the ``expected`` checksum, None of which is known.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
    """
    descriptor = _regular(file)
    try:
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if expected is None:
        return
    if size != expected["bytes"]:
        raise RecordError(f"cannot be read: it has {size} bytes, not {expected['bytes']}")
    if checksum(file)["sha256"] != expected["sha256"]:
        raise RecordError("is damaged: it does not fit its checksum")


def _regular(file: Path) -> int:
    """A descriptor of ``file``. Others than regular files are not read: a pipe may wait, a device has no end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RecordError("is no regular file")
    return descriptor


def _check_format(record: Any) -> None:
    found = record.get("format") if isinstance(record, dict) else None
    if not isinstance(found, int) or isinstance(found, bool) or found not in READABLE_FORMATS:
        raise RecordError(f"has format {str(found)[:50]}; kfconvert {__version__} reads formats up to {FORMAT}")


def _own_checksum(record: dict[str, Any]) -> str:
    """Of what ``record`` says, however it is laid out: sha256 of it as JSON with sorted keys, without "checksum"."""
    said = {key: value for key, value in record.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _refuse_constant(name: str) -> NoReturn:
    raise RecordError(f"is damaged: {name} is no number of JSON")
