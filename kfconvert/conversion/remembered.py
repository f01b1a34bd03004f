"""Cached timings of candidates from earlier conversions on this device, in a file shared by processes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, PositiveFloat, ValidationError

from ..extension import builds, cpu_capability
from ..runtime import library_switches
from ..settings import cache_folder
from ..version import __version__

# One file has the timings of one environment. An entry takes about 1 KB, so a file stays below some MB; the oldest
# entries are removed first.
MOST_ENTRIES = 2000


class Remembered:
    """Timings by a description of the measurement.

    The file is replaced atomically, so readers never see a partial one. A damaged, unreadable or unwritable file counts
    as missing. The environment variable ``KFCONVERT_CACHE`` sets its folder, or disables it.

    Args:
        device: where the candidates run.
    """

    def __init__(self, device: torch.device):
        self.found = 0  # number of cache hits
        self._environment = _environment(device)
        folder = cache_folder()
        text = json.dumps(self._environment, sort_keys=True)
        name = f"timings-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        self._path = None if folder is None else folder / name
        self._known = {} if self._path is None else _read(self._path, self._environment)
        self._new: dict[str, dict[str, float]] = {}

    def times(self, what: str, candidates: Collection[str]) -> dict[str, float] | None:
        """Returns microseconds by name: the first of ``candidates`` and others; None if they are not cached. The result
        omits candidates that were too slow to time."""
        first, *_ = candidates
        found = self._known.get(_key(what, candidates))
        if found is None or len(found) < 2 or first not in found or not found.keys() <= set(candidates):
            return None
        self.found += 1
        return found

    def note(self, what: str, candidates: Collection[str], times: Mapping[str, float]) -> None:
        """Store the microseconds of ``times`` for ``what``, measured with these candidates."""
        key = _key(what, candidates)
        self._known[key] = self._new[key] = dict(times)

    def save(self) -> None:
        """Add new timings to the file. Of processes that write at the same time, the last one wins."""
        if self._path is None or not self._new:
            return
        path, folder = self._path, self._path.parent
        with contextlib.suppress(OSError):  # read-only folder: the next conversion measures again
            folder.mkdir(parents=True, exist_ok=True)
            known = _read(path, self._environment)
            for what in self._new:
                known.pop(what, None)  # the newest entry is last
            latest = list((known | self._new).items())[-MOST_ENTRIES:]
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps({"environment": self._environment, "microseconds": dict(latest)}, indent=1))
            partial.replace(path)
        self._new = {}


class _File(BaseModel, strict=True):
    environment: dict[str, str]
    microseconds: dict[str, dict[str, PositiveFloat]]


def _read(path: Path, environment: dict[str, str]) -> dict[str, dict[str, float]]:
    try:
        file = _File.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return {}
    return file.microseconds if file.environment == environment else {}


def _key(what: str, candidates: Collection[str]) -> str:
    return f"{what}; {', '.join(candidates)}"


def _environment(device: torch.device) -> dict[str, str]:
    """Returns everything known that affects the time of an identical call."""
    facts: dict[str, Any] = {
        "kfconvert": __version__,
        "kernels": builds(),
        "torch": torch.__version__,
        "cpu": _cpu(),
        "cpu capability": (torch.backends.cpu.get_cpu_capability(), cpu_capability()),
        "threads": torch.get_num_threads(),
        "switches": (torch.backends.mkldnn.enabled, *library_switches()),
        "device": device.type,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": f"{properties.name}, {properties.multi_processor_count} multiprocessors",
            "compute capability": (properties.major, properties.minor),
            "cuda": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
        }
    return {name: str(value) for name, value in facts.items()}


@functools.cache
def _cpu() -> str:
    """Returns the processor's name, or the machine's architecture if the system does not report a name."""
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if named:
            return named[1]
    return platform.processor() or platform.machine()
