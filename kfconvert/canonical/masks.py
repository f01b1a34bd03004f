"""Removes attention masks without effect, which traces of unmasked calls contain."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..graph import Aliases, arguments, aten, constant_value, same_kind
from .attention_calls import change_attention
from .positions import counts, is_step_of_positions, number


def drop_true_masks(graph: fx.Graph) -> None:
    """Removes attention masks that are true everywhere, which traces of unmasked calls contain."""
    aliases = Aliases(graph)
    for node in graph.nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            mask = arguments(node)[3]
            if isinstance(mask, fx.Node) and is_true(mask, aliases):
                change_attention(node, attn_mask=None)


_SHAPE_ONLY = {
    aten.expand.default, aten.index.Tensor, aten.reshape.default, aten.slice.Tensor, aten.unsqueeze.default,
    aten.view.default,
}  # fmt: skip
_ONES = {aten.new_ones.default, aten.ones.default, aten.ones_like.default}


def is_true(node: fx.Node, aliases: Aliases) -> bool:
    """Whether all elements of a boolean mask are true."""
    if aliases.is_written(node):
        return False
    if node.target in _SHAPE_ONLY:
        return is_true(node.args[0], aliases)
    if node.target in _ONES:
        return node.meta["val"].dtype is torch.bool
    if node.target is aten.__and__.Tensor and node.meta["val"].dtype is torch.bool:
        return all(is_true(argument, aliases) for argument in node.args)
    if node.target is aten.to.dtype and node.args[1] is torch.bool:
        least, _ = _extent(node.args[0], aliases)
        return least is not None and _is_known(least > 0)
    if node.target is aten.ge.Scalar:
        least, _ = _extent(node.args[0], aliases)
        return least is not None and _is_known(least >= node.args[1])
    if node.target is aten.eq.Tensor:
        ends = [end for argument in node.args for end in _extent(argument, aliases)]
        return all(end is not None for end in ends) and all(_is_known(end == ends[0]) for end in ends)
    if node.target in _COMPARISONS:
        left, right = (_extent(argument, aliases) for argument in node.args)
        least, most = (right[0], left[1]) if node.target in _BELOW else (left[0], right[1])
        if least is None or most is None:
            return False
        return _is_known(most < least if node.target in _STRICT else most <= least)
    return False


_BELOW = {aten.le.Tensor, aten.lt.Tensor}
_STRICT = {aten.lt.Tensor, aten.gt.Tensor}
_COMPARISONS = {*_BELOW, *_STRICT, aten.ge.Tensor}


def _is_known(condition: Any) -> bool:
    """Whether a comparison of numbers is true for all values of free sizes."""
    return bool(statically_known_true(condition))


def _extent(node: Any, aliases: Aliases) -> tuple[Any, Any]:
    """The smallest and the largest element, which may depend on free sizes, if easily determined; else (None,
    None)."""
    unknown = None, None
    if not isinstance(node, fx.Node) or aliases.is_written(node):
        return unknown
    if node.target in _SHAPE_ONLY:
        return _extent(node.args[0], aliases)
    if node.target is aten.arange.default and counts(node):
        end = number(node.args[0])
        return unknown if end is None else (0, end - 1)
    if node.target in _ONES:
        return 1, 1
    if node.target is aten.cumsum.default:
        return (0, 0) if _is_false(node.args[0], aliases) else unknown
    if node.target is aten.add.Tensor and "alpha" not in node.kwargs and counts(node):
        least, most = _extent(node.args[0], aliases)
        added = number(node.args[1])
        return unknown if least is None or added is None else (least + added, most + added)
    return unknown


def _is_false(node: Any, aliases: Aliases) -> bool:
    """Whether a value is ``differences != 1`` of positions, which is false everywhere."""
    is_unequal = isinstance(node, fx.Node) and node.target is aten.ne.Scalar and not aliases.is_written(node)
    return is_unequal and node.args[1] == 1 and is_step_of_positions(node.args[0], aliases)


def drop_zero_masks(graph: fx.Graph) -> None:
    """Removes the addition of masks that are zero everywhere, which traces of unmasked calls contain."""
    aliases = Aliases(graph)
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs and _is_zero_mask(node.args[1], aliases):
            x = node.args[0]
            # The sum is a new tensor. x may replace it if nothing else reads or writes x.
            private = x.op == "call_function" and len(x.users) == 1 and aliases.members(x) == [x]
            if private and same_kind(x, node) and not aliases.is_written(node):
                node.replace_all_uses_with(x)
                graph.erase_node(node)


def _is_zero_mask(value: object, aliases: Aliases) -> bool:
    """Whether a value is ``where(true everywhere, zero, anything)``."""
    if not isinstance(value, fx.Node) or value.target is not aten.where.ScalarOther:
        return False
    return constant_value(value.args[1]) == 0 and is_true(value.args[0], aliases)
