"""Errors of the compiler."""

from __future__ import annotations

import re
from pathlib import Path

_MOST_SHOWN = 10

_LINE = re.compile(
    r"(?:^|[\s)])(?:catastrophic |fatal |internal )*error(?: ?#[\w-]+)?\s*:"  # nvcc, ptxas, g++, cc1plus
    r"|^nvcc fatal\s*:|undefined reference to|multiple definition of|\bld: cannot find "
)
_IN_BRACKETS = re.compile(r"^([^\s(][^(]*)\((\d+)\): ")


class CompileError(RuntimeError):
    """Raised if a CUDA source cannot be compiled or loaded, or if a tool is missing.

    ``errors`` are the compiler's error lines, of which the message shows the first ones; ``log`` is the file with
    the full output. They are ``[]`` and None if no compiler failed.
    """

    def __init__(self, message: str, errors: list[str] | None = None, log: Path | None = None):
        super().__init__(message)
        self.errors = errors or []
        self.log = log


def failed_build(name: str, output: str, log: Path) -> CompileError:
    """Returns the error for ``output``, the full output of ninja, which is stored in ``log``."""
    errors = error_lines(output)
    if not errors:
        last = output.strip().splitlines()[-1:] or ["no output"]
        return CompileError(f"kfconvert: {name} did not compile: {last[0]}\nfull output: {log}", [], log)
    more = [f"... and {len(errors) - _MOST_SHOWN} more"] if len(errors) > _MOST_SHOWN else []
    shown = [*errors[:_MOST_SHOWN], *more, f"kfconvert: {name} did not compile; full output: {log}"]
    return CompileError("\n".join(shown), errors, log)


def error_lines(output: str) -> list[str]:
    """Returns the lines with an error, as ``file:line: ...``, without repetitions for other architectures."""
    lines = (line.strip() for line in output.splitlines())
    return list(dict.fromkeys(_IN_BRACKETS.sub(r"\1:\2: ", line) for line in lines if _LINE.search(line)))
