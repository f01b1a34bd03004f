"""Loads a compiled library: on trial in a separate process, then in this process.

An error while a library is loaded (a schema that torch cannot parse, a static initialiser that throws) ends the
process. The first process that loads a library is therefore a separate one.
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

# Seconds for the import of torch in a new process, and the loading.
LIMIT_S = 120.0

_TRIAL = "import sys; from kfconvert.jit.loading import _trial; _trial(*sys.argv[1:])"
# Marks the end of the output of Python and torch before the library is loaded.
_START = "kfconvert: loading"
# The location in torch's code that torch appends to a message.
_APPENDIX = re.compile(r"Exception raised from | \(originally from ")


def load(library: Path, name: str) -> ModuleType | None:
    """Loads ``library`` and returns its Python module, if any."""
    torch.ops.load_library(str(library))
    if not hasattr(ctypes.CDLL(str(library)), f"PyInit_{name}"):
        return None
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None  # the suffix is an extension module's
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_on_trial(library: Path, name: str) -> Registrations:
    """Loads ``library`` in a new process that only imports torch, and returns its registrations.

    The trial does not detect errors that depend on the state of this process. For example, a C++ kernel (in a
    TORCH_LIBRARY_IMPL) with a wrong signature for an operator defined in Python still ends this process.

    Raises:
        CompileError: the library cannot be loaded, kills its process, or takes more than LIMIT_S seconds.
    """
    report = library.with_suffix(".json")
    # sys.path, to find the same torch. The root as working directory, because no file there shadows a module.
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
        raise cannot_be_loaded(name, f"loading takes more than {LIMIT_S:g} s") from None
    if done.returncode != 0 or not report.exists():
        printed = done.stderr.decode(errors="replace").rpartition(f"{_START}\n")[2]
        reason = reason_of(printed.replace(f"{library.parent}{os.sep}", ""))
        if done.returncode < 0:
            died = signal.Signals(-done.returncode)
            # The stable ABI ignores torch's error for a second namespace, and continues without a library.
            guess = "perhaps STABLE_TORCH_LIBRARY of an existing namespace" if died == signal.SIGSEGV else ""
            reason = f"it ends the process with {died.name}: {reason or guess}".removesuffix(": ")
        raise cannot_be_loaded(name, reason or "it ends the process without output")
    return Registrations(**json.loads(report.read_text(encoding="utf-8")))


def cannot_be_loaded(name: str, reason: str) -> CompileError:
    return CompileError(f"kfconvert: {name} was compiled but cannot be loaded: {reason}")


def reason_of(printed: str) -> str:
    """Returns one line on why a process with this output died: the text of the exception, or else the last line."""
    _, is_exception, text = printed.rpartition("what():")
    # torch marks a position in a quoted line by a line of ~.
    lines = (line.strip() for line in _APPENDIX.split(text)[0].splitlines())
    meant = [line for line in lines if line and not line.startswith("~")]
    return " ".join(meant if is_exception else meant[-1:])


def _trial(library: str, name: str, report: str) -> None:
    """Runs in the trial process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = names()
    print(_START, file=sys.stderr, flush=True)
    try:
        load(Path(library), name)
    except Exception as error:
        sys.exit(str(error.__cause__ or error))  # the cause has the loader's message
    registrations = dataclasses.asdict(Registrations.since(before))
    Path(report).write_text(json.dumps(registrations), encoding="utf-8")
    os._exit(0)  # the library is loaded, so skip the clean-up
