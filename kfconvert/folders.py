"""Folders that are there complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside ``path`` that takes its place when the block ends without an error.

    What was at ``path`` before stays until the new folder is complete and on disk. After any error, Ctrl-C
    included, ``path`` is as before and nothing else is left behind, created parent folders included.

    Raises:
        OSError: the folder cannot be written.
    """
    path = path.resolve()
    mark = uuid.uuid4().hex[:8]
    temporary, old = (
        path.with_name(f".{path.name}.{mark}.partial"),
        path.with_name(f".{path.name}.{mark}.old"),
    )
    with none_left_empty(path.parent):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            _flush(temporary)
            _swap(temporary, path, old)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextlib.contextmanager
def none_left_empty(path: Path) -> Iterator[None]:
    """Removes ``path`` and its parents at the end of the block, where the block made them and they are empty."""
    path = path.expanduser().resolve()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # it is not empty, or was never made
                folder.rmdir()


def check_writable(path: Path) -> None:
    """Raises OSError unless a folder can be made at ``path``; leaves no trace."""
    path = path.expanduser().resolve()
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file, not a folder")
    probe = path / f".{uuid.uuid4().hex[:8]}.probe"
    try:
        probe.touch(exist_ok=False)
    except FileNotFoundError:  # what a virtual file system like /proc answers, though the folder is there
        raise OSError(f"nothing can be created in {path}") from None
    finally:
        probe.unlink(missing_ok=True)


def _swap(temporary: Path, path: Path, old: Path) -> None:
    # No portable call exchanges two folders: between the two renames nothing is at `path`, and an
    # interruption there is answered by putting the old folder back.
    try:
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    finally:
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Brings the files of ``folder`` to disk; a failing disk says so before the old folder goes."""
    for file in folder.iterdir():
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())
