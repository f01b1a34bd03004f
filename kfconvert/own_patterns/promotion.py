"""Whether an int in place of an equal float changes the computation dtype of a call."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..graph import arguments


def computes_alike(call: fx.Node, other: fx.Node) -> bool:
    """Whether two calls of one operator with equal arguments compute in the same dtypes and return them.

    One may have an int where the other has a float or bool: ``x * 2`` and ``x * 2.0`` are equivalent for a float x, but
    not for an integer x. The dtype of the result is not sufficient: ``n > 5.0`` compares integers as floats.
    """
    if _dtypes(call) != _dtypes(other):
        return False
    values, others = _values(call), _values(other)
    tensors = [value for value in values if isinstance(value, Tensor)]
    same = list(map(type, values)) == list(map(type, others))
    return same or not tensors or any(tensor.is_floating_point() for tensor in tensors)


def _dtypes(call: fx.Node) -> list[torch.dtype | None]:
    return [getattr(value, "dtype", None) for value in pytree.tree_leaves(call.meta["val"])]


def _values(call: fx.Node) -> list[Any]:
    """The tensors and numbers among the arguments; other arguments have a fixed type."""
    if call.target is operator.getitem:
        return []
    return [
        value.meta["val"] if isinstance(value, fx.Node) else value
        for argument, given in zip(call.target._schema.arguments, arguments(call))
        if "Tensor" in str(argument.type) or "number" in str(argument.type)
        for value in pytree.tree_leaves(given)
    ]
