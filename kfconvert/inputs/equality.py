"""Strict equality of two values."""

from __future__ import annotations

from typing import Any

import torch

# Types whose == compares the whole value. The == of user-defined types may compare less.
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.device)


def is_equal(value: Any, other: Any) -> bool:
    """Whether two values, or containers of them, are strictly equal. Objects of other types must be identical."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if type(value) in _VALUES:
        # 0.0 == -0.0, but their inverses differ, and NaN != NaN.
        return repr(value) == repr(other) if type(value) in (float, complex) else value == other
    if type(value) in (list, tuple, torch.Size):
        return len(value) == len(other) and all(map(is_equal, value, other))
    if type(value) is dict:
        return is_equal(list(value), list(other)) and all(is_equal(value[key], other[key]) for key in value)
    if type(value) not in (set, frozenset) or len(value) != len(other):
        return False
    return set(map(id, value)) == set(map(id, other)) or (
        value == other and all(type(item) in _VALUES for item in value)
    )
