"""Results of conversions, read for display: the page of an artifact, and the statistics of several artifacts."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .. import folders
from ..json_values import first_fault
from . import record as record_file
from .errors import ArtifactError, no_artifact, printable, why
from .files import read_record
from .record import RecordError
from .report_file import report_of
from .schema import RECORD_FILE, REPORT_FILE, Results


def artifacts_in(path: str | os.PathLike) -> list[Path]:
    """Returns the folder ``path`` if it is an artifact, else the artifacts in it, sorted by name.

    Raises:
        ArtifactError: there is no artifact, or ``path`` cannot be read.
    """
    folder = folders.expanded(path)
    try:
        if RECORD_FILE in folders.names(folder):
            return [folder]
        found = [inner for inner in sorted(folder.iterdir()) if inner.is_dir() and RECORD_FILE in folders.names(inner)]
    except FileNotFoundError:
        raise ArtifactError(f"there is no folder {printable(folder)}") from None
    except NotADirectoryError:
        raise ArtifactError(f"{printable(folder)} is not a folder") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{printable(folder)} cannot be read: {why(error)}") from error
    if not found:
        raise no_artifact(folder)
    return found


def write_report(path: str | os.PathLike) -> Path:
    """Writes ``report.html`` of the artifact in the folder ``path``, in this version's form, from ``kfconvert.json``.

    A file of that name is replaced, and its checksum in the record updated.

    Raises:
        ArtifactError: there is no artifact, it is damaged, or the page cannot be written.
    """
    folder = folders.expanded(path)
    text = report_of(read_record(folder))
    if _is_there(folder, text):
        return folder / REPORT_FILE
    try:
        with folders.amending(folder) as new:
            record = record_file.read(folder / RECORD_FILE)  # a concurrent save may have replaced it
            (new / REPORT_FILE).write_text(report_of(record))
            if "checksum" in record:
                files = {name: known for name, known in record["files"].items() if name != REPORT_FILE}
                (new / RECORD_FILE).write_text(record_file.sealed(record, new, files))
    except (OSError, RecordError) as error:
        raise ArtifactError(f"cannot write {folder / REPORT_FILE}: {why(error)}") from error
    return folder / REPORT_FILE


def results_in(path: str | os.PathLike) -> dict[str, dict[str, Any]]:
    """Returns the statistics of conversions by name: of an artifact, of the artifacts in a folder, or of the converted
    models in a file with the output of ``kfconvert --json``.

    Raises:
        ArtifactError: there are no statistics, or they are damaged.
    """
    file = folders.expanded(path)
    if os.path.isfile(file):
        return _results_of_file(file)
    return {folder.resolve().name: read_record(folder)["statistics"] for folder in artifacts_in(path)}


def _is_there(folder: Path, text: str) -> bool:
    """Whether ``report.html`` in ``folder`` is a regular file with this ``text``."""
    content = text.encode()
    expected = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    try:
        with folders.reading(folder):
            record_file.check_file(folders.newest(folder, REPORT_FILE), expected)
    except (OSError, RecordError):
        return False
    return True


def _results_of_file(file: Path) -> dict[str, dict[str, Any]]:
    try:
        found = record_file.read_json(file)
        Results.model_validate(found)
    except ValidationError as error:
        raise ArtifactError(f"{file} is not the output of kfconvert --json: it {first_fault(error)}") from error
    except (OSError, RecordError) as error:
        raise ArtifactError(f"{file} {error}" if isinstance(error, RecordError) else f"{file}: {why(error)}") from error
    results = {result["name"]: result["statistics"] for result in found["models"] if result["statistics"]}
    if not results:
        raise ArtifactError(f"{file} contains no converted model")
    return results
