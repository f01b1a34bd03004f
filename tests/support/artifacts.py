"""Changes of saved artifacts, with checksums that fit, as somebody makes them who means harm."""

import json
from pathlib import Path

import pytest

import kfconvert
from kfconvert.artifact import record as record_file


def rewrite(path: Path, **changes) -> None:
    """Changes the record, and the checksums of all files in the folder."""
    record = json.loads((path / "kfconvert.json").read_text()) | changes
    (path / "kfconvert.json").write_text(record_file.sealed(record, path))


def rewrite_graphs(path: Path, graphs: str | dict | None) -> None:
    """Replaces the stored graphs, or removes them for None."""
    file = path / "graphs.json"
    if graphs is None:
        file.unlink()
    else:
        file.write_text(graphs if isinstance(graphs, str) else json.dumps(graphs))
    rewrite(path)


def refusal(path: Path, **arguments) -> str:
    """The one line with which ``load`` refuses an artifact."""
    with pytest.raises(kfconvert.ArtifactError) as caught:
        kfconvert.load(path, **arguments)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}
