"""``kfconvert.json`` and checksums: damage is detected, and files are read as untrusted."""

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

LARGEST = 2**26  # bytes of a record; 100 times the largest known record


class RecordError(ValueError):
    """A file that cannot be read, or a damaged record. The message is one clear line without the file's name."""


def sealed(record: dict[str, Any], folder: Path, others: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Returns the text of ``kfconvert.json`` for ``record``, with the checksums of the files in ``folder``, of
    ``others`` in other places, and of the record.

    Raises:
        RecordError: the record is not JSON, or too large.
    """
    files = {**others, **{file.name: checksum(file) for file in folder.iterdir()}}
    record = {**record, "files": dict(sorted(files.items()))}
    try:
        text = json.dumps({**record, "checksum": _own_checksum(record)}, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:  # from a caller's recipe, or an infinity in it
        raise RecordError(f"its record is not JSON: {error}") from error
    if len(text.encode()) > LARGEST:
        raise RecordError(f"its record has more than {LARGEST} bytes")
    return text


def read(file: Path) -> dict[str, Any]:
    """Reads the record in ``file``, which matches the schema and its checksum.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: the record has an unknown format, or is damaged.
        OSError: the file cannot be read.
    """
    record = read_json(file)
    with _damage_told():
        _check_format(record)
        Record.model_validate(record)
        if "checksum" in record and record["checksum"] != _own_checksum(record):
            raise RecordError("is damaged: it does not match its own checksum")
    return record


def read_as(schema: type[BaseModel], file: Path) -> Any:
    """Returns the JSON content of ``file``, which matches ``schema``. Raises like ``read_json``."""
    found = read_json(file)
    with _damage_told():
        schema.model_validate(found)
    return found


def read_json(file: Path) -> Any:
    """Returns the JSON content of ``file``, without NaN and infinities.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: it is not JSON, or has more than LARGEST bytes.
        OSError: the file cannot be read.
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
    """Context manager that converts errors in the content of a file to RecordError."""
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
    """Returns {"bytes", "sha256"} of a file.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: it is not a regular file.
        OSError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with open(_regular(file), "rb") as stream:
        while piece := stream.read(2**20):
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def check_file(file: Path, expected: dict[str, Any] | None) -> None:
    """Raises RecordError unless ``file`` is a regular file with the ``expected`` checksum, None if unknown.

    Raises:
        FileNotFoundError: there is no such file.
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
        raise RecordError("is damaged: it does not match its checksum")


def _regular(file: Path) -> int:
    """Returns a descriptor of ``file``. Only regular files are read: a pipe may block, and a device is endless."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RecordError("is not a regular file")
    return descriptor


def _check_format(record: Any) -> None:
    found = record.get("format") if isinstance(record, dict) else None
    if not isinstance(found, int) or isinstance(found, bool) or found not in READABLE_FORMATS:
        raise RecordError(f"has format {str(found)[:50]}; kfconvert {__version__} reads formats up to {FORMAT}")


def _own_checksum(record: dict[str, Any]) -> str:
    """Returns the sha256 of ``record`` in canonical form: as JSON with sorted keys, without "checksum"."""
    said = {key: value for key, value in record.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _refuse_constant(name: str) -> NoReturn:
    raise RecordError(f"is damaged: {name} is not a JSON number")
