"""Masks of attention that hide nothing, as the tracing of an unmasked call writes them, taken out of a graph."""

from __future__ import annotations

import torch
from torch import fx

from ..graph import Aliases, arguments, aten, constant_value, same_kind


def drop_true_masks(graph: fx.Graph) -> None:
    """Attention with a mask that is true everywhere, as the tracing of an unmasked call writes it, has no mask."""
    aliases = Aliases(graph)
    for node in graph.nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            if isinstance(mask, fx.Node) and _is_true(mask, aliases):
                query, key, value = node.args[:3]
                rest = [None, *arguments(node)[4:]]
                names = [a.name for a in node.target._schema.arguments[3:]]
                node.args = (query, key, value)
                node.kwargs = dict(zip(names, rest))


_SHAPE_ONLY = {
    aten.expand.default, aten.index.Tensor, aten.reshape.default, aten.slice.Tensor, aten.unsqueeze.default,
    aten.view.default,
}  # fmt: skip
_ONES = {aten.new_ones.default, aten.ones.default, aten.ones_like.default}


def _is_true(node: fx.Node, aliases: Aliases) -> bool:
    """Whether no element of a boolean mask is false."""
    if aliases.is_written(node):
        return False
    if node.target in _SHAPE_ONLY:
        return _is_true(node.args[0], aliases)
    if node.target in _ONES:
        return node.meta["val"].dtype is torch.bool
    if node.target is aten.__and__.Tensor and node.meta["val"].dtype is torch.bool:
        return all(_is_true(argument, aliases) for argument in node.args)
    if node.target is aten.to.dtype and node.args[1] is torch.bool:
        least = _least(node.args[0], aliases)
        return least is not None and least > 0
    if node.target is aten.ge.Scalar:
        least = _least(node.args[0], aliases)
        return least is not None and bool(least >= node.args[1])
    return False


def _least(node: fx.Node, aliases: Aliases) -> float | None:
    """A lower bound of all elements, where one is plain to see."""
    if aliases.is_written(node):
        return None
    if node.target in _SHAPE_ONLY:
        return _least(node.args[0], aliases)
    if node.target is aten.arange.default:
        return 0
    if node.target in _ONES:
        return 1
    if node.target is aten.add.Tensor and isinstance(node.args[1], (int, float)) and not node.kwargs:
        least = _least(node.args[0], aliases)
        return None if least is None else least + node.args[1]
    return None


def drop_zero_masks(graph: fx.Graph) -> None:
    """An additive mask that is zero everywhere, as the tracing of an unmasked call writes it, is not added."""
    aliases = Aliases(graph)
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs and _is_zero_mask(node.args[1], aliases):
            x = node.args[0]
            # The sum is a new tensor: x may take its place where nothing else reads or writes that.
            private = x.op == "call_function" and len(x.users) == 1 and aliases.members(x) == [x]
            if private and same_kind(x, node) and not aliases.is_written(node):
                node.replace_all_uses_with(x)
                graph.erase_node(node)


def _is_zero_mask(value: object, aliases: Aliases) -> bool:
    """Whether a value is ``where(true everywhere, zero, anything)``."""
    if not isinstance(value, fx.Node) or value.target is not aten.where.ScalarOther:
        return False
    return constant_value(value.args[1]) == 0 and _is_true(value.args[0], aliases)
