"""Conversion of values to JSON, and messages for invalid JSON values."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


def json_ready(value: Any) -> Any:
    """Converts ``value`` to JSON values: dataclasses become dicts, NaN and infinities None, other objects text."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_ready(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def first_fault(error: ValidationError) -> str:
    """Returns one line on the first schema error of a value and its place: ``lacks 'name'``."""
    fault = error.errors(include_url=False, include_context=False)[0]
    *place, last = fault["loc"] or ("",)
    if fault["type"] == "missing":
        return f"lacks {str(last)!r}" + (f" in {_dotted(place)}" if place else "")
    return f"is wrong in {_dotted([*place, last])}: {' '.join(fault['msg'].split())}"


def _dotted(place: list[int | str]) -> str:
    return ".".join(str(step)[:50] for step in place) or "itself"
