"""Checksums of files. Several threads hash the pieces of a large file, since one thread hashes 15 GiB in 9 s."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_PIECE = 2**26  # bytes
_READ = 2**22  # bytes per read; each read waits for the lock of the interpreter
_MOST_THREADS = 16


def checksum(file: Path) -> str:
    """Returns the sha256 of a file. For a file of more than one piece, it is the sha256 of the pieces' sha256, in the
    form ``<bytes of a piece>:<sha256>``.

    Raises:
        OSError: the file cannot be read.
    """
    starts = range(0, file.stat().st_size, _PIECE)
    if len(starts) <= 1:
        return _sha256(file).hexdigest()
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        digests = threads.map(lambda start: _sha256(file, start, _PIECE).digest(), starts)
        return f"{_PIECE}:{hashlib.sha256(b''.join(digests)).hexdigest()}"


def has_checksum(file: Path, expected: str | None) -> bool:
    """Whether ``expected`` is the checksum of ``file``; it may be the sha256 of a large file, as in older artifacts.

    Raises:
        OSError: the file cannot be read.
    """
    if expected is None:
        return False
    return expected == (checksum(file) if ":" in expected else _sha256(file).hexdigest())


def _sha256(file: Path, start: int = 0, size: int | None = None) -> Any:
    """Returns the sha256 of ``size`` bytes of ``file`` from ``start`` on; None: of all."""
    digest = hashlib.sha256()
    left = file.stat().st_size - start if size is None else size
    with open(file, "rb", buffering=0) as stream:
        stream.seek(start)
        while piece := stream.read(min(left, _READ)):
            digest.update(piece)
            left -= len(piece)
    return digest
