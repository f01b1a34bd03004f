"""The computation dtypes of a call, which an int in place of an equal float may change."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..graph import arguments, aten

# Operators that convert integers to floats.
_OF_FLOATS = {aten.div.Tensor, aten.div.Scalar}
_BOOL, _INT, _FLOAT, _COMPLEX = range(4)


def computes_alike(call: fx.Node, other: fx.Node) -> bool:
    """Whether two calls of one operator compute in the same dtypes and return them.

    Their tensors have equal dtypes, and their numbers equal values, but one may have an int where the other has a float
    or bool: ``x * 2`` and ``x * 2.0`` are equivalent for a float x, but not for an integer x. The dtype of the result
    is not sufficient: ``n > 5.0`` compares integers as floats.
    """
    return _dtypes(call) == _dtypes(other) and _category(call) == _category(other)


def _dtypes(call: fx.Node) -> list[torch.dtype | None]:
    return [getattr(value, "dtype", None) for value in pytree.tree_leaves(call.meta["val"])]


def _category(call: fx.Node) -> int | None:
    """The category (bool, int, float, complex) of the computation dtype: the largest among the arguments. None without
    tensor arguments, because the dtype of the result is then sufficient."""
    if call.target is operator.getitem:
        return None
    values = [
        value.meta["val"] if isinstance(value, fx.Node) else value
        for argument, given in zip(call.target._schema.arguments, arguments(call))
        if "Tensor" in str(argument.type) or "number" in str(argument.type)  # other arguments have a fixed type
        for value in pytree.tree_leaves(given)
    ]
    if not any(isinstance(value, Tensor) for value in values):
        return None
    return max(_FLOAT if call.target in _OF_FLOATS else _BOOL, *map(_category_of, values))


def _category_of(value: Any) -> int:
    if isinstance(value, Tensor):
        if value.dtype is torch.bool:
            return _BOOL
        return _COMPLEX if value.is_complex() else _FLOAT if value.is_floating_point() else _INT
    if isinstance(value, (bool, torch.SymBool, type(None))):
        return _BOOL
    return _INT if isinstance(value, (int, torch.SymInt)) else _COMPLEX if isinstance(value, complex) else _FLOAT
