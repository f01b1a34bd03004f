"""Numbers that a model writes as tensors, such as ``torch.tensor(8.0)`` or ``torch.full((), 8.0)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .aliases import is_written
from .sizes import sizes_of
from .trees import aten

_COPIES = {aten.alias.default, aten.clone.default, aten.detach.default, aten.to.dtype, aten.to.dtype_layout}


def constant_value(value: Any) -> float | None:
    """Returns the constant number ``value``: a Python number, or a one-element tensor created from one in the forward.

    Returns None for other values, including parameters, buffers and tensors held by Python code, which may be written.
    """
    if not isinstance(value, fx.Node):
        return value if isinstance(value, (int, float)) else None
    number = _number_of(value) if value.op == "call_function" else None
    if number is None or is_written(value):
        return None
    return torch.tensor(number, dtype=value.meta["val"].dtype).item()


def _number_of(node: fx.Node) -> float | None:
    if node.target is aten.lift_fresh_copy.default:
        return node.args[0].meta.get("kfconvert_value")
    if node.target in _COPIES:
        return constant_value(node.args[0])
    if node.target is aten.full.default and not node.args[0]:
        return constant_value(node.args[1])
    if node.target is aten.scalar_tensor.default:
        return constant_value(node.args[0])
    if node.target is aten.sqrt.default:
        number = constant_value(node.args[0])
        return number**0.5 if number is not None and number >= 0 else None
    # Only products of one element are searched further, because products of activations may be deeply nested.
    if node.target is aten.mul.Tensor and node.meta["val"].dim() == 0:
        left = constant_value(node.args[0])
        right = None if left is None else constant_value(node.args[1])
        return None if right is None else left * right
    return None


def spell_numbers(graph: fx.Graph) -> None:
    """Replaces factors and divisors that are one-element constants with Python numbers."""
    for node in graph.nodes:
        if node.target not in (aten.mul.Tensor, aten.div.Tensor):
            continue
        left, right = node.args
        if node.target is aten.mul.Tensor and _is_number(left):
            left, right = right, left
        if isinstance(left, fx.Node) and _is_number(right) and same_kind(left, node):
            node.args = (left, constant_value(right))


def _is_number(value: Any) -> bool:
    return isinstance(value, fx.Node) and constant_value(value) is not None


def same_kind(left: fx.Node, right: fx.Node) -> bool:
    """Whether two traced values have equal dtypes, and equal sizes for all values of free sizes."""
    before, after = left.meta["val"], right.meta["val"]
    return before.dtype is after.dtype and sizes_of(before) == sizes_of(after)
