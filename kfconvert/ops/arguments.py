"""Arguments of a wrong type: errors of one line that name the operator and the argument."""

import inspect
import sys
import typing
from operator import index
from types import FrameType

import torch

_NO_NUMBER: typing.Any = None  # which float and index refuse


def named(error: Exception) -> Exception:
    """A TypeError that names the argument which is no tensor, of the public function at work; else ``error``.

    Called where something has no attribute of a tensor: a call with tensors spends no time on it.
    """
    calls = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(__package__):
        function = frame.f_globals.get(frame.f_code.co_name)
        if inspect.isfunction(function) and function.__code__ is frame.f_code:
            calls.append((function, frame.f_locals))
        frame = frame.f_back
    for function, values in reversed(calls):  # the outermost first: its names are those that the caller knows
        for name, annotation in function.__annotations__.items():
            kinds = typing.get_args(annotation) or (annotation,)
            tensor = name != "return" and torch.Tensor in kinds and set(kinds) <= {torch.Tensor, type(None)}
            if tensor and not isinstance(values[name], kinds):
                return _type_error(function.__name__, name, "a tensor", values[name])
    return error


def require_tensors(*tensors) -> None:
    """The error of :func:`named` where one of these arguments of the public function at work is no tensor."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise named(TypeError(f"expected a tensor, got {type(tensor).__name__}"))


def within(operator: str, name: str, least: float, value, most: float) -> bool:
    """``least <= value <= most``; TypeError where that is no comparison of numbers."""
    try:
        return least <= value <= most
    except (TypeError, ValueError, RuntimeError):  # the last two of more numbers than one
        raise _type_error(operator, name, "a number", value) from None


def require_share(operator: str, name: str, value) -> None:
    """ValueError unless ``value`` is between 0 and 1; TypeError where it is no number."""
    if not within(operator, name, 0, value, 1):
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


def as_number(operator: str, name: str, value) -> float:
    """``float(value)``; TypeError where that is no number, or text."""
    try:
        return float(value if not isinstance(value, str) else _NO_NUMBER)
    except (TypeError, ValueError):
        raise _type_error(operator, name, "a number", value) from None


def as_integer(operator: str, name: str, value) -> int:
    """``operator.index(value)``; TypeError where that is no integer."""
    try:
        return index(value if not isinstance(value, bool) else _NO_NUMBER)
    except TypeError:
        raise _type_error(operator, name, "an integer", value) from None


def _type_error(operator, name, expected, value):
    return TypeError(f"kfconvert::{operator}: {name} must be {expected}, got {type(value).__name__}")
