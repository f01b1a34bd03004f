"""What the environment sets."""

from __future__ import annotations

import os
import re
from pathlib import Path


class SettingError(ValueError):
    """An environment variable whose value makes no sense. One clear line."""


def max_rewrites(default: int) -> int:
    """How many sites may be replaced: KFCONVERT_MAX_REWRITES, or ``default`` where it is unset or empty.

    With it a wrong output is bisected to one site.

    Raises:
        SettingError: it is set to something else than a number from 0 on.
    """
    value = os.environ.get("KFCONVERT_MAX_REWRITES", "").strip()
    if not value:
        return default
    if not value.isdecimal():
        raise SettingError(f"KFCONVERT_MAX_REWRITES must be a whole number from 0 on, not {value!r}")
    return int(value)


def cache_folder() -> Path | None:
    """Where timings are kept between processes: KFCONVERT_CACHE, or None where that is "off".

    Where it is unset or empty that is ``kfconvert`` in XDG_CACHE_HOME, or in ``~/.cache`` where that names no folder.
    """
    value = os.environ.get("KFCONVERT_CACHE", "").strip()
    if value == "off":
        return None
    if value:
        return Path(os.path.expanduser(value))
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of that variable has relative paths ignored.
    return Path(root if os.path.isabs(root) else os.path.expanduser("~/.cache")) / "kfconvert"


def cuda_archs() -> list[str]:
    """What CUDA code is compiled for where there is no GPU: KFCONVERT_CUDA_ARCHS, as in setup.py, like ["80", "90"].

    Raises:
        SettingError: it is set to something else than compute capabilities.
    """
    value = os.environ.get("KFCONVERT_CUDA_ARCHS", "").strip() or "8.0 9.0"
    archs = [part.replace(".", "") for part in re.split(r"[;,\s]+", value) if part]
    if not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
        raise SettingError(f'KFCONVERT_CUDA_ARCHS must be like "8.0 9.0", not {value!r}')
    return archs
