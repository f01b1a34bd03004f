"""Factors of queries become the scale of attention, as in Whisper, which multiplies queries before it divides heads."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ..graph import Aliases, arguments, aten, fixed_size, same_kind
from .attention_calls import change_attention

_VIEWS = (aten.reshape.default, aten.view.default, aten.transpose.int, aten.permute.default)


def fold_query_scales(graph: fx.Graph) -> None:
    """Replaces attention of ``q * s``, or of a view of it, with attention of q whose scale has the factor s, if s is a
    positive number and nothing else reads the product."""
    aliases = Aliases(graph)
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        scaled = node.args[0]
        while scaled.target in _VIEWS and _is_read_once(scaled):
            scaled = scaled.args[0]
        query, factor = _factors(scaled)
        scale = _scale(node)
        if query is None or scale is None or not _is_read_once(scaled) or aliases.is_written(query):
            continue
        if aliases.is_written(scaled) or not _is_laid_out_alike(query, scaled):
            continue
        scaled.replace_all_uses_with(query)
        graph.erase_node(scaled)
        change_attention(node, scale=scale * factor)


def _is_read_once(value: fx.Node) -> bool:
    """Whether one argument of one call reads ``value``: a call may read it as the query and as the key."""
    readers = list(value.users)
    return len(readers) == 1 and [*readers[0].args, *readers[0].kwargs.values()].count(value) == 1


def _factors(product: fx.Node) -> tuple[Any, float]:
    """Returns (x, s) of ``x * s``, ``s * x`` or ``x / (1 / s)``, or (None, 1)."""
    first, second, *_ = (*product.args, None, None)
    if product.target is aten.mul.Tensor and isinstance(first, (int, float)):
        first, second = second, first
    if product.target not in (aten.mul.Tensor, aten.div.Tensor) or not isinstance(second, (int, float)):
        return None, 1.0
    if not isinstance(first, fx.Node) or not 0 < second < math.inf:
        return None, 1.0
    return first, float(second if product.target is aten.mul.Tensor else 1 / second)


def _scale(attention: fx.Node) -> float | None:
    """Returns the positive scale of a call, or None if it has none that is known."""
    given: Any = arguments(attention)[6]
    if isinstance(given, (int, float)):
        return float(given) if given > 0 else None
    size = fixed_size(attention.args[0].meta["val"].shape[-1])
    return 1 / math.sqrt(size) if given is None and size else None


def _is_laid_out_alike(one: fx.Node, other: fx.Node) -> bool:
    strides = [str(node.meta["val"].stride()) for node in (one, other)]
    return same_kind(one, other) and strides[0] == strides[1]
