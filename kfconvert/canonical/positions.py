"""Positions: values that count up by one along one dimension, from which models build masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph import Aliases, aten, same_sizes


def positions(node: Any, aliases: Aliases) -> tuple[int, Any] | None:
    """Returns (dimension, first value) of integers that count up by one along that dimension, and are equal along all
    others; None for other values. The dimension counts from the end, so that the last one is -1."""
    if not isinstance(node, fx.Node) or aliases.is_written(node) or not counts(node):
        return None
    if node.target in (aten.arange.default, aten.arange.start):
        first = 0 if node.target is aten.arange.default else number(node.args[0])
        return None if first is None else (-1, first)
    found = positions(node.args[0], aliases) if node.target in _KEPT else None
    if found is None:
        return None
    dimension, first = found
    if node.target is aten.expand.default and not same_sizes(node.args[0], node, dimension):
        return None
    if node.target is aten.add.Tensor:
        return (dimension, first + node.args[1]) if type(node.args[1]) is int and not node.kwargs else None
    if node.target is aten.unsqueeze.default:
        before = node.args[0].meta["val"].dim()
        new = node.args[1] if node.args[1] >= 0 else node.args[1] + before + 1
        return (dimension if new <= before + dimension else dimension - 1), first
    return found


_KEPT = {aten.add.Tensor, aten.expand.default, aten.unsqueeze.default}


def counts(node: fx.Node) -> bool:
    """Whether the values are integers that do not overflow: those of narrow dtypes start again."""
    return node.meta["val"].dtype is torch.int64


def number(value: Any) -> Any:
    """``value`` if it is an int, float or free size, else None."""
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    return value if isinstance(value, (int, float, torch.SymInt)) else None


def is_step_of_positions(node: Any, aliases: Aliases) -> bool:
    """Whether ``node`` is the differences of positions with the value before the first, which are all 1."""
    if not isinstance(node, fx.Node) or node.target is not aten.diff.default or aliases.is_written(node):
        return False
    x, times, dimension, before = (*node.args, *[None] * 4)[:4]
    last = x.meta["val"].dim() - 1
    found = positions(x, aliases)
    if found is None or found[0] != -1 or times != 1 or dimension not in (-1, last) or len(node.args) > 4:
        return False
    if not isinstance(before, fx.Node) or before.target is not aten.sub.Tensor or before.kwargs:
        return False
    first, one = before.args
    is_first = isinstance(first, fx.Node) and first.target is aten.slice.Tensor and first.args[0] is x
    return bool(is_first and first.args[1] in (-1, last) and (*first.args[2:],) == (0, 1) and one == 1)
