"""Loads a compiled library: on trial in a process of its own, and for good in this one.

A mistake in what a library does while it is loaded (a schema that torch cannot read, a static initialiser that
throws) ends the process. So the first process that loads a library is one that nobody misses.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .errors import CompileError
from .registrations import Registrations, names

# For the import of torch in a new process, and the loading.
LIMIT_S = 120.0

_TRIAL = "import sys; from kfconvert.jit.loading import _trial; _trial(*sys.argv[1:])"
# Ends what Python and torch print before the library is loaded.
_START = "kfconvert: loading"
# What torch appends to a message: where in its own code it comes from.
_APPENDIX = re.compile(r"Exception raised from | \(originally from ")


def load(library: Path, name: str) -> ModuleType | None:
    """Loads ``library``; its Python module, where it has one."""
    torch.ops.load_library(str(library))
    if not hasattr(ctypes.CDLL(str(library)), f"PyInit_{name}"):
        return None
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None  # the name of a library ends as that of a module in C
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_on_trial(library: Path, name: str) -> Registrations:
    """What ``library`` registers, told by a process that has torch and nothing else.

    What depends on the state of the process that it is meant for is not seen: a kernel of C++ types (in a
    TORCH_LIBRARY_IMPL) that do not fit the schema of an operator that was defined in Python still ends it.

    Raises:
        CompileError: it cannot be loaded, kills its process, or takes more than LIMIT_S seconds.
    """
    report = library.with_suffix(".json")
    # sys.path: torch is to be found as it was found here. The root: no file there is taken for a module.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-c", _TRIAL, str(library), name, str(report)]
    options: dict[str, Any] = {
        "cwd": os.sep,
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
    }
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, timeout=LIMIT_S, **options)
    except subprocess.TimeoutExpired:
        raise cannot_be_loaded(name, f"that takes more than {LIMIT_S:g} s") from None
    if done.returncode != 0 or not report.exists():
        printed = done.stderr.decode(errors="replace").rpartition(f"{_START}\n")[2]
        reason = reason_of(printed.replace(f"{library.parent}{os.sep}", ""))
        if done.returncode < 0:
            died = signal.Signals(-done.returncode)
            # The stable ABI ignores that torch refuses a second namespace, and goes on without a library.
            guess = "perhaps STABLE_TORCH_LIBRARY of a namespace that there is" if died == signal.SIGSEGV else ""
            reason = f"it ends the process with {died.name}: {reason or guess}".removesuffix(": ")
        raise cannot_be_loaded(name, reason or "it ends the process without a word")
    return Registrations(**json.loads(report.read_text(encoding="utf-8")))


def cannot_be_loaded(name: str, reason: str) -> CompileError:
    return CompileError(f"kfconvert: {name} was compiled but cannot be loaded: {reason}")


def reason_of(printed: str) -> str:
    """In one line, why a process died that printed this: the text of the exception, or else the last line."""
    _, is_exception, text = printed.rpartition("what():")
    # torch marks the place in a line that it quotes by a line of ~.
    lines = (line.strip() for line in _APPENDIX.split(text)[0].splitlines())
    meant = [line for line in lines if line and not line.startswith("~")]
    return " ".join(meant if is_exception else meant[-1:])


def _trial(library: str, name: str, report: str) -> None:
    """What the process on trial does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = names()
    print(_START, file=sys.stderr, flush=True)
    try:
        load(Path(library), name)
    except Exception as error:
        sys.exit(str(error.__cause__ or error))  # torch puts the loader's own words into the cause
    registrations = dataclasses.asdict(Registrations.since(before))
    Path(report).write_text(json.dumps(registrations), encoding="utf-8")
    os._exit(0)  # it has been loaded: how it ends is not asked
