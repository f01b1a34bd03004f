"""Constants in a graph, such as numbers, dtypes and devices, as JSON values."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..inputs import DEVICE
from .expressions import Unstorable

_OF_TORCH = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def stored_constant(value: Any) -> Any:
    """Returns a constant of a graph as JSON values. Raises Unstorable."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.device):
        return {"device": stored_device(value)}
    if type(value) in _OF_TORCH:
        return {_OF_TORCH[type(value)]: str(value).removeprefix("torch.")}
    raise Unstorable(f"it computes with a {type(value).__name__}")


def made_constant(stored: Any) -> Any:
    """Rebuilds a constant from the result of ``stored_constant``. Raises Unstorable."""
    if stored is None or type(stored) in (bool, int, float, str):
        return stored
    (kind, text), *others = stored.items() if isinstance(stored, dict) and stored else ((None, None),)
    if isinstance(text, str) and not others:
        if kind == "float" and text in _FLOATS:
            return _FLOATS[text]
        if kind == "device":
            return made_device(text)
        found = getattr(torch, text, None) if text.isidentifier() else None
        if found is not None and _OF_TORCH.get(type(found)) == kind:
            return found
    raise Unstorable(f"{str(stored)[:50]} is not a value")


def stored_device(device: torch.device) -> str:
    """Returns the name of ``device``, a CPU or CUDA device. Raises Unstorable."""
    if DEVICE.fullmatch(str(device)) is None:
        raise Unstorable(f"it computes on {device}")
    return str(device)


def made_device(text: Any) -> torch.device:
    """Returns the device of a name. Raises Unstorable."""
    if not isinstance(text, str) or DEVICE.fullmatch(text) is None:
        raise Unstorable(f"{str(text)[:50]} is not a device")
    return torch.device(text)
