"""One-line errors for arguments of a wrong type, with the names of the operator and the argument."""

import inspect
import sys
import typing
from operator import index
from types import FrameType

import torch

_NO_NUMBER: typing.Any = None  # rejected by float and index


def named(error: Exception) -> Exception:
    """Returns a TypeError that names the non-tensor argument of the running public function; else ``error``.

    Called only after an AttributeError, so calls with tensors have no overhead.
    """
    calls = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        function = frame.f_globals.get(frame.f_code.co_name)
        if inspect.isfunction(function) and function.__code__ is frame.f_code:
            calls.append((function, frame.f_locals))
        frame = frame.f_back
    for function, values in reversed(calls):  # the outermost function first, because the caller knows its names
        for name, annotation in function.__annotations__.items():
            kinds = typing.get_args(annotation) or (annotation,)
            tensor = name != "return" and torch.Tensor in kinds and set(kinds) <= {torch.Tensor, type(None)}
            if tensor and not isinstance(values[name], kinds):
                return _type_error(function.__name__, name, "a tensor", values[name])
    return error


def require_tensors(*tensors) -> None:
    """Raises the error of :func:`named` if one of these arguments of the running public function is not a tensor."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise named(TypeError(f"expected a tensor, got {type(tensor).__name__}"))


def within(operator: str, name: str, least: float, value, most: float) -> bool:
    """Returns ``least <= value <= most``. Raises TypeError if ``value`` is not a number."""
    try:
        return least <= value <= most
    except (TypeError, ValueError, RuntimeError):  # the last two for several numbers
        raise _type_error(operator, name, "a number", value) from None


def require_share(operator: str, name: str, value) -> None:
    """Raises ValueError unless ``value`` is between 0 and 1, and TypeError if it is not a number."""
    if not within(operator, name, 0, value, 1):
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


def as_number(operator: str, name: str, value) -> float:
    """Returns ``float(value)``. Raises TypeError if ``value`` is not a number, or a string."""
    try:
        return float(value if not isinstance(value, str) else _NO_NUMBER)
    except (TypeError, ValueError):
        raise _type_error(operator, name, "a number", value) from None


def as_integer(operator: str, name: str, value) -> int:
    """Returns ``operator.index(value)``. Raises TypeError if ``value`` is not an integer."""
    try:
        return index(value if not isinstance(value, bool) else _NO_NUMBER)
    except TypeError:
        raise _type_error(operator, name, "an integer", value) from None


def _type_error(operator, name, expected, value):
    return TypeError(f"kfconvert::{operator}: {name} must be {expected}, got {type(value).__name__}")
