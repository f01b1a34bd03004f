"""Replacement of files in a folder: complete files take the place of the old ones.

A writer fills a temporary folder within the target, and then replaces the target's files one by one. Only a kill during
these few renames leaves files of both. The target remains the same folder, even if it is the working directory of a
process. Several processes that write one folder at the same time are not coordinated.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _SUFFIX = ".kfconvert-", ".partial"
_SECONDS_OF_A_WRITER = 86_400  # older temporary folders are of killed writers


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that yields an empty folder, whose files replace those of ``path`` at the end.

    Until the files are complete and on disk, and after any error including Ctrl-C, ``path`` is unchanged, and newly
    created folders are removed. Other files in ``path`` remain.

    Raises:
        OSError: the folder cannot be written.
    """
    path = path.resolve()
    with none_left_empty(path):
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob(f"{_PREFIX}*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # its writer has ended meanwhile
                if old.stat().st_mtime < time.time() - _SECONDS_OF_A_WRITER:
                    shutil.rmtree(old, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(_SUFFIX, _PREFIX, path))
        try:
            yield partial
            for file in partial.iterdir():
                if (path / file.name).is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path / file.name))
                # A full disk raises an error while the old files still exist.
                descriptor = os.open(file, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            _move(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _move(partial: Path, path: Path) -> None:
    try:
        for file in partial.iterdir():
            os.replace(file, path / file.name)
    except BaseException:  # Ctrl-C must not leave the files of two artifacts
        for file in partial.iterdir():
            os.replace(file, path / file.name)
        raise


def names(path: Path) -> set[str]:
    """Returns the names of the files in the folder ``path``, without those of writers. Raises OSError."""
    found = {entry.name for entry in path.iterdir()}
    return {name for name in found if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX))}


def expanded(path: str | os.PathLike) -> Path:
    """Returns ``path`` with a leading ``~`` expanded, unless it names no user."""
    return Path(os.path.expanduser(path))


@contextlib.contextmanager
def none_left_empty(path: Path) -> Iterator[None]:
    """Context manager that removes ``path`` and its parents at the end if they are new and empty."""
    path = expanded(path).resolve()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # not empty, or never created
                folder.rmdir()


def check_writable(path: Path) -> None:
    """Raises OSError unless a folder can be created at ``path``. Leaves no files."""
    path = expanded(path).resolve()
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file, not a folder")
    try:
        tempfile.TemporaryFile(dir=path).close()  # unnamed if the system supports it
    except FileNotFoundError:  # from a virtual file system such as /proc, although the folder exists
        raise OSError(f"nothing can be created in {path}") from None
