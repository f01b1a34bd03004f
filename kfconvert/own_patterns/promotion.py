"""In which dtypes a call computes: an int in the place of a float, of one value, may change them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..graph import arguments, aten

# They make floats of integers before they compute.
_OF_FLOATS = {aten.div.Tensor, aten.div.Scalar}
_BOOL, _INT, _FLOAT, _COMPLEX = range(4)


def computes_alike(call: fx.Node, other: fx.Node) -> bool:
    """Whether two calls of one operator compute in the same dtypes, and give them.

    Their tensors have the same dtypes, and their numbers the same values, but an int may stand in one for a float or
    a bool in the other: ``x * 2`` and ``x * 2.0`` are one computation where x is of floats, and two where it is of
    integers. Results do not tell of all: ``n > 5.0`` compares integers as floats.
    """
    return _dtypes(call) == _dtypes(other) and _category(call) == _category(other)


def _dtypes(call: fx.Node) -> list[torch.dtype | None]:
    return [getattr(value, "dtype", None) for value in pytree.tree_leaves(call.meta["val"])]


def _category(call: fx.Node) -> int | None:
    """Of bools, ints, floats and complex numbers, the largest among the arguments, which is that of the dtype in which
    the operator computes; None where no tensor takes part, so that the dtype of the result tells all."""
    if call.target is operator.getitem:
        return None
    values = [
        value.meta["val"] if isinstance(value, fx.Node) else value
        for argument, given in zip(call.target._schema.arguments, arguments(call))
        if "Tensor" in str(argument.type) or "number" in str(argument.type)  # others have one type in any call
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
