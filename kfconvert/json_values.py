"""Any value as JSON."""

from __future__ import annotations

import math
from typing import Any


def json_ready(value: Any) -> Any:
    """``value`` made of JSON values only: NaN and infinities become None, other objects their text."""
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_ready(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
