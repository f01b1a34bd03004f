"""Atomic updates of folders: a reader always finds all files of one writer, even with killed or concurrent writers.

A writer fills a separate folder within the target, ``.kfconvert-<id>.partial``. Renaming it to ``.kfconvert.complete``
atomically replaces the files of the target; then the files move up, one by one. Files in ``.kfconvert.complete``
therefore take precedence, and the next process finishes an interrupted move. The target remains the same folder, even
if it is the working directory of a process.

Folders are locked by ``flock`` on the folder, not on a file in it: the system releases it with the process, and no lock
file remains.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

_COMPLETE = ".kfconvert.complete"
_PARTIAL = ".kfconvert-*.partial"
# Errors of file systems without locks, where concurrent saves to one folder are not separated.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOSYS)
_ATTEMPTS = 20  # to create a folder that other writers create and remove


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that yields an empty folder, whose files replace the contents of ``path`` at the end.

    Until the files are complete and on disk, and after any error including Ctrl-C, ``path`` is unchanged, and newly
    created folders are removed. Concurrent saves of threads and processes all succeed, and ``path`` has the files of
    the last one. Remains of killed writers are removed.

    Raises:
        OSError: the folder cannot be written.
    """
    path = path.resolve()
    with none_left_empty(path), contextlib.ExitStack() as stack:
        partial = stack.enter_context(_partial(path))
        yield partial
        _flush_all(partial)
        with _locked(path, fcntl.LOCK_EX):
            _commit(partial)


@contextlib.contextmanager
def amending(path: Path) -> Iterator[Path]:
    """Context manager like ``replacing``, for files derived from others in ``path``, which are in their final place and
    locked for other readers and writers.

    Raises:
        OSError: the folder does not exist, or cannot be written.
    """
    path = path.resolve()
    with _locked(path, fcntl.LOCK_EX):
        _settle(path)
        partial = path / _new_partial()
        partial.mkdir()
        try:
            yield partial
            _flush_all(partial)
            _commit(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context manager that prevents writers from replacing the files of ``path``, see ``newest``.

    Raises:
        OSError: the folder does not exist, or cannot be read.
    """
    with _locked(path, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager that prevents others from reading or replacing files of ``path``.

    Raises:
        OSError: the folder does not exist, or cannot be read.
    """
    with _locked(path, fcntl.LOCK_EX):
        yield


def newest(path: Path, name: str) -> Path:
    """Returns the path of the file ``name`` of the folder ``path``, if any. Raises like ``_has_complete``."""
    complete = path / _COMPLETE / name
    return complete if _has_complete(path) and os.path.lexists(complete) else path / name


def _has_complete(path: Path) -> bool:
    """Whether a complete save is waiting to be moved.

    Raises:
        NotADirectoryError: its name belongs to another kind of file, such as a link, which is not safe to follow.
    """
    complete = path / _COMPLETE
    if not os.path.lexists(complete):
        return False
    if not stat.S_ISDIR(complete.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder of kfconvert", str(complete))
    return True


def names(path: Path) -> set[str]:
    """Returns the names of the files in the folder ``path``, without files of writers. Raises like ``reading``."""
    with reading(path):
        found = {entry.name for entry in path.iterdir()}
        if _has_complete(path):
            found |= {entry.name for entry in (path / _COMPLETE).iterdir()}
    return {name for name in found if name != _COMPLETE and not fnmatch.fnmatch(name, _PARTIAL)}


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


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Context manager that yields a new folder for the files, locked while its writer lives, and removed on errors."""
    partial = path / _new_partial()
    try:
        alive = _begin(partial)
        try:
            yield partial
        finally:
            _release(alive)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _new_partial() -> str:
    return _PARTIAL.replace("*", uuid.uuid4().hex[:8])


def _begin(partial: Path) -> int:
    """Creates the folder ``partial`` and missing parents, and returns its lock."""
    failures = 0
    while True:
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _locked(partial.parent, fcntl.LOCK_EX):
                _settle(partial.parent)
                _clear(partial.parent)
                partial.mkdir()
                return _lock(partial, fcntl.LOCK_EX)
        except FileNotFoundError:  # another writer created the folder, failed, and removed it
            failures += 1
            if failures == _ATTEMPTS:
                raise


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    lock = _lock(path, kind)
    try:
        yield
    finally:
        _release(lock)


def _lock(path: Path, kind: int) -> int:
    """Returns a descriptor with a lock of the folder ``path``, shared or exclusive by ``kind``.

    Raises:
        FileNotFoundError: the folder does not exist, or was removed before the lock was acquired.
    """
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, kind)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        if not os.path.samestat(os.fstat(lock), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except BaseException:
        os.close(lock)
        raise
    return lock


def _release(lock: int) -> None:
    # A process that was forked meanwhile also has the descriptor, so closing ours would not release the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _commit(partial: Path) -> None:
    """Moves the files of ``partial`` to its parent folder, which this writer has locked."""
    path = partial.parent
    _settle(path)
    _require_replaceable(path, partial)
    partial.rename(path / _COMPLETE)
    try:
        _settle(path)
    except BaseException:  # the files are committed, so Ctrl-C must not leave the move incomplete
        with contextlib.suppress(OSError):
            _settle(path)
        raise


def _require_replaceable(path: Path, partial: Path) -> None:
    """Raises OSError if a file of ``partial`` cannot replace the file in ``path``. A later error would leave a save
    that failed but exists."""
    for file in partial.iterdir():
        old = path / file.name
        if not os.path.lexists(old):
            continue
        if stat.S_ISDIR(old.lstat().st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(old))
        owners = (0, path.stat().st_uid, old.lstat().st_uid)
        if path.stat().st_mode & stat.S_ISVTX and os.geteuid() not in owners:  # a sticky folder such as /tmp
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(old))


def _settle(path: Path) -> None:
    """Moves the files of a complete save, of this or of a killed writer, to their final places."""
    complete = path / _COMPLETE
    if not _has_complete(path):
        return
    for file in complete.iterdir():
        file.replace(path / file.name)
    _flush(path)
    complete.rmdir()


def _clear(path: Path) -> None:
    """Removes folders of dead writers, which no longer hold the lock of their folder."""
    for partial in path.glob(_PARTIAL):
        with contextlib.suppress(OSError):
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # also an error without locks
                shutil.rmtree(partial, ignore_errors=True)
            finally:
                os.close(lock)


def _flush_all(folder: Path) -> None:
    """Flushes ``folder`` and its files to disk, so that errors are raised while the old files still exist."""
    for file in folder.iterdir():
        _flush(file)
    _flush(folder)


def _flush(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (error.errno == errno.EINVAL and path.is_dir()):  # some file systems cannot flush folders
            raise
    finally:
        os.close(descriptor)
