"""Checks for arguments whose type Python would silently convert.

Python treats True as 1, 0.1 as true, and a tensor as a number in multiplications. A call with arguments in the order of
another function, such as of torch.nn.functional, could therefore run and return wrong numbers.
"""

import functools
import inspect
import sys
import typing
from collections.abc import Callable

import torch


def checked(function: Callable) -> Callable:
    """Wraps ``function`` (or ``__init__`` of a class) to raise a one-line TypeError for wrong arguments: a flag that is
    not a bool, or a number that is a bool, a tensor with several elements, or another type."""
    checks = tuple(_checks(function))
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
                got = type(value).__name__
                raise TypeError(f"kfconvert::{called}: {name} must be {expected}, got {got}")
        return function(*args, **kwargs)

    return public


def _checks(function):
    """Yields (position, name, predicate for wrong values, expected kind) of each checked parameter."""
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        kinds = {typing.get_origin(kind) or kind for kind in typing.get_args(parameter.annotation)}
        kinds = kinds or {parameter.annotation}
        optional, kinds = type(None) in kinds, kinds - {type(None)}
        place = index if parameter.kind == parameter.POSITIONAL_OR_KEYWORD else sys.maxsize
        if kinds == {bool}:
            yield place, parameter.name, _is_no_flag, "True or False"
        elif kinds & {int, float} and torch.Tensor in kinds:
            yield place, parameter.name, _is_flag, "a number or a tensor"
        elif int in kinds and tuple in kinds:
            yield place, parameter.name, _is_flag, "an integer or a tuple of integers"
        elif kinds & {int, float}:
            is_wrong = _is_neither_number_nor_none if optional else _is_no_number
            yield place, parameter.name, is_wrong, "a number" if float in kinds else "an integer"


def _is_flag(value):
    return isinstance(value, bool)


def _is_no_flag(value):
    return not isinstance(value, bool)


def _is_no_number(value):
    if isinstance(value, (int, float)):
        return isinstance(value, bool)
    return value.numel() != 1 if isinstance(value, torch.Tensor) else not hasattr(value, "__float__")


def _is_neither_number_nor_none(value):
    return value is not None and _is_no_number(value)
