"""Settings from environment variables."""

from __future__ import annotations

import os
import re
from pathlib import Path


class SettingError(ValueError):
    """Raised for an invalid value of an environment variable. The message has one line."""


def cache_folder() -> Path | None:
    """Returns the folder of timings and graphs shared by processes: KFCONVERT_CACHE, or None if it is "off".

    If it is unset or empty, this is ``kfconvert`` in XDG_CACHE_HOME, or in ``~/.cache`` if that names no folder.
    """
    value = os.environ.get("KFCONVERT_CACHE", "").strip()
    if value == "off":
        return None
    if value:
        return Path(os.path.expanduser(value))
    root = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification, relative paths are ignored.
    return Path(root if os.path.isabs(root) else os.path.expanduser("~/.cache")) / "kfconvert"


def cuda_archs() -> list[str]:
    """Returns the CUDA architectures for compilation without a GPU: KFCONVERT_CUDA_ARCHS as in setup.py, ["80", "90"].

    Raises:
        SettingError: the value is not a list of compute capabilities.
    """
    value = os.environ.get("KFCONVERT_CUDA_ARCHS", "").strip() or "8.0 9.0"
    archs = [part.replace(".", "") for part in re.split(r"[;,\s]+", value) if part]
    if not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
        raise SettingError(f'KFCONVERT_CUDA_ARCHS must be like "8.0 9.0", not {value!r}')
    return archs
