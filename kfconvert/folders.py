"""Folders of files that change together: a reader finds all files of one writer, whoever is killed or writes beside it.

A writer fills a folder of its own within the target, ``.kfconvert-<id>.partial``. Its renaming to
``.kfconvert.complete`` is the moment at which the new files are those of the target; then they move up, one by one.
What stands in ``.kfconvert.complete`` therefore comes before what stands beside it, and whoever comes next finishes the
moving. The target itself stays the same folder throughout, be it the working directory of a process.

Folders are locked by ``flock`` on the folder, not on a file in it: the system ends it with the process that held it,
and nothing is left behind.
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
# What file systems answer that know no locks: saves to one folder at the same time are then not kept apart.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOSYS)
_ATTEMPTS = 20  # to make a folder that other writers make and remove


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields an empty folder, the files in which become those of the folder ``path`` when the block ends without error.

    Until they are complete and on disk ``path`` is as before, and so it is after any error in the block, Ctrl-C
    included; folders made for it go again. Saves at the same time, of threads and processes, all succeed; ``path`` then
    has the files of the one that ended last. What writers that were killed have left is cleared away.

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
    """As ``replacing``, for files that are made of others in ``path``: within the block these lie where they belong,
    and nobody else reads or writes them.

    Raises:
        OSError: there is no such folder, or it cannot be written.
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
    """Keeps writers from exchanging the files of ``path`` within the block; see ``newest``.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """
    with _locked(path, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Keeps others from reading and from exchanging files of ``path`` within the block.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """
    with _locked(path, fcntl.LOCK_EX):
        yield


def newest(path: Path, name: str) -> Path:
    """Where the file ``name`` of the folder ``path`` lies, whether or not it exists. Raises as ``_has_complete``."""
    complete = path / _COMPLETE / name
    return complete if _has_complete(path) and os.path.lexists(complete) else path / name


def _has_complete(path: Path) -> bool:
    """Whether a complete save waits to be moved to where it belongs.

    Raises:
        NotADirectoryError: something else has its name, such as a link, which may lead anywhere.
    """
    complete = path / _COMPLETE
    if not os.path.lexists(complete):
        return False
    if not stat.S_ISDIR(complete.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no folder of kfconvert's", str(complete))
    return True


def names(path: Path) -> set[str]:
    """The names of the files in the folder ``path``, without what only a writer needs. Raises as ``reading``."""
    with reading(path):
        found = {entry.name for entry in path.iterdir()}
        if _has_complete(path):
            found |= {entry.name for entry in (path / _COMPLETE).iterdir()}
    return {name for name in found if name != _COMPLETE and not fnmatch.fnmatch(name, _PARTIAL)}


def expanded(path: str | os.PathLike) -> Path:
    """``path`` with the home folder for a ``~`` in front; one that names no user is a folder's own name."""
    return Path(os.path.expanduser(path))


@contextlib.contextmanager
def none_left_empty(path: Path) -> Iterator[None]:
    """Removes ``path`` and its parents at the end of the block, where the block made them and they are empty."""
    path = expanded(path).resolve()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # it is not empty, or was never made
                folder.rmdir()


def check_writable(path: Path) -> None:
    """Raises OSError unless a folder can be made at ``path``; leaves no trace."""
    path = expanded(path).resolve()
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file, not a folder")
    try:
        tempfile.TemporaryFile(dir=path).close()  # without a name, where the system has such files
    except FileNotFoundError:  # what a virtual file system like /proc answers, though the folder is there
        raise OSError(f"nothing can be created in {path}") from None


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Yields a new folder for the files to come, locked to show that its writer lives; gone after an error."""
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
    """Makes the folder ``partial``, and what is missing above it; returns its lock."""
    failures = 0
    while True:
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _locked(partial.parent, fcntl.LOCK_EX):
                _settle(partial.parent)
                _clear(partial.parent)
                partial.mkdir()
                return _lock(partial, fcntl.LOCK_EX)
        except FileNotFoundError:  # another writer had made the folder, failed, and removed it again
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
    """A descriptor that holds a lock of the folder ``path``, shared or exclusive as ``kind`` says.

    Raises:
        FileNotFoundError: there is no such folder, or it is gone now that the lock is had.
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
    # A process that was forked meanwhile has the descriptor too: closing ours would not end the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _commit(partial: Path) -> None:
    """Makes the files of ``partial`` those of the folder that it lies in, which this writer has locked."""
    path = partial.parent
    _settle(path)
    _require_replaceable(path, partial)
    partial.rename(path / _COMPLETE)
    try:
        _settle(path)
    except BaseException:  # the files are the folder's by now: Ctrl-C must not leave them half way
        with contextlib.suppress(OSError):
            _settle(path)
        raise


def _require_replaceable(path: Path, partial: Path) -> None:
    """Raises OSError where a file of ``partial`` could not take the place of what stands in ``path``: found out later,
    the save would have failed and yet be there."""
    for file in partial.iterdir():
        old = path / file.name
        if not os.path.lexists(old):
            continue
        if stat.S_ISDIR(old.lstat().st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(old))
        owners = (0, path.stat().st_uid, old.lstat().st_uid)
        if path.stat().st_mode & stat.S_ISVTX and os.geteuid() not in owners:  # a folder like /tmp
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(old))


def _settle(path: Path) -> None:
    """Moves the files of a complete save to where they belong: this writer's, or that of one that was killed."""
    complete = path / _COMPLETE
    if not _has_complete(path):
        return
    for file in complete.iterdir():
        file.replace(path / file.name)
    _flush(path)
    complete.rmdir()


def _clear(path: Path) -> None:
    """Removes what dead writers have begun: those that no longer hold the lock of their folder."""
    for partial in path.glob(_PARTIAL):
        with contextlib.suppress(OSError):
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error too where there are no locks
                shutil.rmtree(partial, ignore_errors=True)
            finally:
                os.close(lock)


def _flush_all(folder: Path) -> None:
    """Brings ``folder`` and its files to disk: one that fails says so while the old files are still there."""
    for file in folder.iterdir():
        _flush(file)
    _flush(folder)


def _flush(path: Path) -> None:
    """Brings a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (error.errno == errno.EINVAL and path.is_dir()):  # some file systems flush no folders
            raise
    finally:
        os.close(descriptor)
