"""``kfconvert.json``: damage is detected, and files are read as untrusted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from ..version import __version__
from .checksums import checksum, has_checksum
from .errors import ArtifactError, reading
from .schema import FORMAT, RECORD_FILE, Record

_T = TypeVar("_T")


def sealed(record: dict[str, Any], folder: Path, others: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns the text of ``kfconvert.json`` for ``record``, with the checksums of the files in ``folder``, of
    ``others`` in other places, and of the record.

    Raises:
        TypeError, ValueError: the record is not JSON.
    """
    files = {**others, **{file.name: checksum(file) for file in folder.iterdir() if file.name != RECORD_FILE}}
    record = {**record, "files": dict(sorted(files.items()))}
    return json.dumps({**record, "checksum": _own_checksum(record)}, indent=2, allow_nan=False) + "\n"


def read_record(folder: Path) -> dict[str, Any]:
    """Returns the content of ``kfconvert.json`` in ``folder``, which matches the schema and its checksum.

    Raises:
        ArtifactError: there is no artifact, or it has another format, or is damaged.
    """
    file = folder / RECORD_FILE
    with reading(folder):
        if not file.exists():
            raise ArtifactError(f"{folder} is not a kfconvert artifact: it has no {RECORD_FILE}")
    record = read_json(file)
    with reading(file):
        found = record.get("format") if isinstance(record, dict) else None
        if found != FORMAT:
            raise ArtifactError(f"{file} has format {str(found)[:50]}; kfconvert {__version__} reads format {FORMAT}")
        Record.model_validate(record)
        if record["checksum"] != _own_checksum(record):
            raise ValueError("it does not match its own checksum")
    return record


def read_json(file: Path) -> Any:
    """Returns the JSON content of ``file``, without NaN and infinities. Raises ArtifactError."""
    with reading(file):
        return json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)


def read_checked(folder: Path, record: dict[str, Any], name: str, read: Callable[[Path], _T]) -> _T:
    """Returns what ``read`` returns for the file of this name, if it has the checksum in ``record``.

    Raises:
        ArtifactError: the file is missing or damaged.
    """
    with reading(folder / name):
        if not has_checksum(folder / name, record["files"].get(name)):
            raise ValueError("it does not match its checksum")
        return read(folder / name)


def _own_checksum(record: dict[str, Any]) -> str:
    """Returns the sha256 of ``record`` in canonical form: as JSON with sorted keys, without "checksum"."""
    rest = {key: value for key, value in record.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
