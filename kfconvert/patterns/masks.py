"""Lower bounds of additive attention masks, computed from the graph."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from ..graph import arguments, aten, constant_value, is_parameter, is_written
from .checks import traced

# Operators that return only elements of their first argument.
_FROM_FIRST = {
    aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default, aten.embedding.default,
    aten.expand.default, aten.gather.default, aten.index.Tensor, aten.permute.default, aten.repeat.default,
    aten.reshape.default, aten.select.int, aten.slice.Tensor, aten.squeeze.dim, aten.t.default,
    aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten.transpose.int, aten.unsqueeze.default,
    aten.view.default,
}  # fmt: skip
# Operators whose results are as finite as the scores, for any input.
_COMPUTED = {
    aten.addmm.default, aten.baddbmm.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.layer_norm.default, aten.linear.default, aten.matmul.default, aten.sigmoid.default, aten.tanh.default,
}  # fmt: skip
# Operators that return elements of these arguments, or zeros.
_CHOICES = {
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar), (1, 2)),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), (0, 2)),
    **dict.fromkeys((aten.cat.default, aten.triu.default, aten.tril.default), (0,)),
    **dict.fromkeys((aten.full.default, aten.full_like.default), (1,)),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), ()),
    aten.new_full.default: (2,),
}
# Products of computed values with factors up to this are as finite as the scores.
_MODERATE = 1e6
# A sum that exceeds the lowest value by less than this fraction is rounded to it in every dtype except float64.
_ROUNDED = 1e-8


def saturation(dtype: torch.dtype) -> float:
    """Returns the value below which numbers absorb any added score, and two of them may sum to -inf."""
    return torch.finfo(dtype).min / 4


def least(value: Any, dtype: torch.dtype, learned: bool = False) -> float:
    """Returns a lower bound of the elements of the mask ``value``; -inf if unknown.

    Products of activations count as 0, because they are as finite as the scores. Arguments, parameters and buffers are
    unknown, because they may be written at any time.

    Args:
        learned: whether parameters, such as a relative position bias, also count as 0: trained values have the scale
            of scores.
    """
    return _Bounds(dtype, learned).least(value)


def sum_bound(left: float, right: float, dtype: torch.dtype) -> float:
    """Returns the lower bound of a sum in ``dtype``; -inf if it may overflow."""
    lowest, total = torch.finfo(dtype).min, left + right
    return max(total, lowest) if total > lowest * (1 + _ROUNDED) else -math.inf


class _Bounds:
    """The bounds of the values of one graph, each computed once."""

    def __init__(self, dtype: torch.dtype, learned: bool):
        self.large, self._learned = saturation(dtype), learned
        self._known: dict[fx.Node, float] = {}

    def least(self, value: Any) -> float:
        if isinstance(value, (list, tuple)):
            return min(map(self.least, value), default=0.0)
        if not isinstance(value, fx.Node):
            return float(value) if isinstance(value, (int, float)) else -math.inf
        if not isinstance(value.meta.get("val"), Tensor):
            return -math.inf
        if value not in self._known:
            bound = self._of_node(value)
            dtype = traced(value).dtype
            overflows = dtype.is_floating_point and bound < torch.finfo(dtype).min
            self._known[value] = -math.inf if overflows else bound
        return self._known[value]

    def _of_node(self, node: fx.Node) -> float:
        number = constant_value(node)
        if number is not None:
            return float(number)
        if _is_indicator(node) or (self._learned and is_parameter(node)):
            return 0.0
        if node.op != "call_function" or not traced(node).is_floating_point() or is_written(node):
            return -math.inf
        if node.target in _COMPUTED:
            return 0.0
        if node.target in _FROM_FIRST:
            return self.least(node.args[0])
        if node.target is aten.add.Tensor and not node.kwargs:
            left, right = map(self.least, node.args)
            return sum_bound(left, right, traced(node).dtype)
        if node.target is aten.mul.Tensor:
            return self._product(*node.args)
        if node.target is aten.div.Tensor and constant_value(node.args[1]):
            return self._product(node.args[0], 1 / constant_value(node.args[1]))
        if _is_filled_everywhere(node):
            return min(self.least(arguments(node)[2]), self.least(arguments(node.args[0])[2]))
        if node.target in _CHOICES:
            given = arguments(node)
            return min((self.least(given[index]) for index in _CHOICES[node.target]), default=0.0)
        return -math.inf

    def _product(self, left: Any, right: Any) -> float:
        for factor, other in ((left, right), (right, left)):
            number = constant_value(factor)
            if number is not None and _is_indicator(other):
                return min(float(number), 0.0)
            if number is not None and abs(number) <= _MODERATE and self.least(other) > self.large:
                return 0.0
        return -math.inf


def _is_filled_everywhere(node: fx.Node) -> bool:
    """Whether ``node`` is ``x.masked_fill(y != c, a).masked_fill(y == c, b)``, in either order, as in masks of shifted
    windows."""
    inner = node.args[0] if node.args else None
    if node.target is not aten.masked_fill.Scalar or getattr(inner, "target", None) is not node.target:
        return False
    conditions = [arguments(each)[1] for each in (node, inner)]
    return {getattr(condition, "target", None) for condition in conditions} == {
        aten.eq.Scalar,
        aten.ne.Scalar,
    } and arguments(conditions[0]) == arguments(conditions[1])


def _is_indicator(value: Any) -> bool:
    """Whether ``value`` has only zeros and ones: a boolean tensor, a copy of one, or one minus such a copy."""
    if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), Tensor) or is_written(value):
        return False
    if traced(value).dtype is torch.bool:
        return True
    if value.target is aten.rsub.Scalar:
        return arguments(value)[1:] == (1, 1) and _is_indicator(value.args[0])
    return value.target in _FROM_FIRST and _is_indicator(value.args[0])
