"""Results of conversions, read for display: the page of an artifact, and the statistics of several artifacts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .. import folders
from ..json_values import first_fault
from ..report import page
from .checksums import has_checksum
from .errors import ArtifactError, printable, reading, writing
from .record import read_json, read_record, sealed
from .schema import RECORD_FILE, REPORT_FILE, Results


def artifacts_in(path: str | os.PathLike) -> list[Path]:
    """Returns the folder ``path`` if it is an artifact, else the artifacts in it, sorted by name.

    Raises:
        ArtifactError: there is no artifact, or ``path`` cannot be read.
    """
    folder = folders.expanded(path)
    with reading(folder):
        if (folder / RECORD_FILE).exists():
            return [folder]
        found = [inner for inner in sorted(folder.iterdir()) if (inner / RECORD_FILE).exists()]
    if not found:
        raise ArtifactError(f"{printable(folder)} is not a kfconvert artifact: it has no {RECORD_FILE}")
    return found


def write_report(path: str | os.PathLike) -> Path:
    """Writes ``report.html`` of the artifact in the folder ``path``, in this version's form, from ``kfconvert.json``.

    A file of that name is replaced, and its checksum in the record updated.

    Raises:
        ArtifactError: there is no artifact, it is damaged, or the page cannot be written.
    """
    folder = folders.expanded(path)
    record, file = read_record(folder), folder / REPORT_FILE
    with reading(folder / RECORD_FILE):
        text = report_of(record)
    if file.is_file() and file.read_bytes() == text.encode() and has_checksum(file, record["files"].get(REPORT_FILE)):
        return file
    with writing(file), folders.replacing(folder) as new:
        (new / REPORT_FILE).write_text(text)
        (new / RECORD_FILE).write_text(sealed(record, new, record["files"]))
    return file


def report_of(record: dict[str, Any]) -> str:
    """Returns the text of ``report.html`` for the content of ``kfconvert.json``."""
    recipe = record["recipe"] or {}
    name, weights = (text if isinstance(text := recipe.get(key), str) else "" for key in ("name", "weights"))
    return page(record["statistics"], name, weights)


def results_in(path: str | os.PathLike) -> dict[str, dict[str, Any]]:
    """Returns the statistics of conversions by name: of an artifact, of the artifacts in a folder, or of the converted
    models in a file with the output of ``kfconvert --json``.

    Raises:
        ArtifactError: there are no statistics, or they are damaged.
    """
    file = folders.expanded(path)
    if not os.path.isfile(file):
        return {folder.resolve().name: read_record(folder)["statistics"] for folder in artifacts_in(path)}
    found = read_json(file)
    try:
        Results.model_validate(found)
    except ValidationError as error:
        raise ArtifactError(f"{file} is not the output of kfconvert --json: it {first_fault(error)}") from error
    results = {result["name"]: result["statistics"] for result in found["models"] if result["statistics"]}
    if not results:
        raise ArtifactError(f"{file} contains no converted model")
    return results
