"""What the environment sets."""

from __future__ import annotations

import os


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
