"""One-line errors for arguments of a wrong type.

Python treats True as 1, 0.1 as true, and a tensor as a number in multiplications. A call with arguments in the order of
another function, such as of torch.nn.functional, could therefore run and return wrong numbers.
"""

import functools
import inspect
import sys
import typing
from collections.abc import Callable
from operator import index

import torch


def checked(function: Callable) -> Callable:
    """Wraps ``function`` (or ``__init__`` of a class) to raise a one-line TypeError for wrong arguments: a flag that is
    not a bool, a number that is a bool, a tensor with several elements, or another type, and no tensor for a tensor."""
    parameters = list(_parameters(function))
    checks = tuple(check for check in map(_check, parameters) if check)
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def public(*args, **kwargs):
        given = len(args)
        for place, name, is_wrong, expected in checks:
            if place < given:
                value = args[place]
            elif name in kwargs:
                value = kwargs[name]
            else:
                continue
            if is_wrong(value):
                raise _type_error(called, name, expected, value)
        try:
            return function(*args, **kwargs)
        except (AttributeError, TypeError, RuntimeError):  # only then, so that calls with tensors have no overhead
            for place, name, kinds in parameters:
                value = args[place] if place < given else kwargs.get(name)
                is_given = place < given or name in kwargs
                if is_given and torch.Tensor in kinds <= _TENSOR and not isinstance(value, tuple(kinds)):
                    raise _type_error(called, name, "a tensor", value) from None
            raise

    return public


_TENSOR = {torch.Tensor, type(None)}


def _parameters(function):
    """Yields (position, name, kinds) of each parameter."""
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        kinds = {typing.get_origin(kind) or kind for kind in typing.get_args(parameter.annotation)}
        by_place = parameter.kind == parameter.POSITIONAL_OR_KEYWORD
        yield place if by_place else sys.maxsize, parameter.name, kinds or {parameter.annotation}


def _check(parameter):
    """Returns (position, name, predicate for wrong values, expected kind) of a parameter to check before the call."""
    place, name, kinds = parameter
    optional, kinds = type(None) in kinds, kinds - {type(None)}
    if kinds == {bool}:
        return place, name, lambda value: not isinstance(value, bool), "True or False"
    if kinds & {int, float} and torch.Tensor in kinds:
        return place, name, _is_flag, "a number or a tensor"
    if int in kinds and tuple in kinds:
        return place, name, _is_flag, "an integer or a tuple of integers"
    if kinds & {int, float}:
        is_wrong = (lambda value: value is not None and _is_no_number(value)) if optional else _is_no_number
        return place, name, is_wrong, "a number" if float in kinds else "an integer"
    return None


def _is_flag(value):
    return isinstance(value, bool)


def _is_no_number(value):
    if isinstance(value, (int, float)):
        return isinstance(value, bool)
    if isinstance(value, torch.Tensor):
        return value.numel() != 1
    return not hasattr(value, "__float__") or getattr(value, "size", 1) != 1  # an array has a size


def require_share(name: str, value: float) -> None:
    """Raises ValueError unless ``value`` is between 0 and 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


def as_number(operator: str, name: str, value) -> float:
    """Returns ``float(value)``. Raises TypeError if ``value`` is not a number, or a string."""
    try:
        return float(value if not isinstance(value, str) else None)  # type: ignore[arg-type]  # rejected
    except (TypeError, ValueError):
        raise _type_error(operator, name, "a number", value) from None


def as_integer(operator: str, name: str, value) -> int:
    """Returns ``operator.index(value)``. Raises TypeError if ``value`` is not an integer."""
    try:
        return index(value if not isinstance(value, bool) else None)  # type: ignore[arg-type]  # rejected
    except TypeError:
        raise _type_error(operator, name, "an integer", value) from None


def _type_error(operator, name, expected, value):
    return TypeError(f"kfconvert::{operator}: {name} must be {expected}, got {type(value).__name__}")
