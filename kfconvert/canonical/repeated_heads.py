"""Removes the repetition of key and value heads before attention with more query heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ..graph import Aliases, arguments, aten, fixed_size, same_sizes
from ..torch_state import accepts_fewer_heads
from .attention_calls import change_attention


def share_heads(graph: fx.Graph) -> None:
    """Makes attention without a mask read the original heads instead of their copies.

    Models of transformers do so in unmasked calls, and repeat the heads if a trace has a mask.
    """
    aliases = Aliases(graph)
    for node in graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        query, key, value, mask, *_ = arguments(node)
        shared = [_before_repeat(each, aliases) for each in (key, value)]
        attended = query.meta["val"]
        if mask is not None or None in shared or not same_sizes(query, key, 1):
            continue
        if attended.is_cpu or accepts_fewer_heads(attended):
            change_attention(node, key=shared[0], value=shared[1], enable_gqa=True)


def _before_repeat(node: Any, aliases: Aliases) -> fx.Node | None:
    """The tensor [batch, heads, length, size] whose heads ``node`` repeats consecutively, or None."""
    expanded = _argument(node, aten.reshape.default, aliases)
    unsqueezed = _argument(expanded, aten.expand.default, aliases)
    heads = _argument(unsqueezed, aten.unsqueeze.default, aliases)
    if heads is None or unsqueezed.args[1] != 2:
        return None
    before, wide, after = (each.meta["val"].shape for each in (heads, expanded, node))
    if len(before) != 4 or len(after) != 4 or fixed_size(wide[2]) is None:
        return None
    repeated = (before[0], before[1] * wide[2], before[2], before[3])
    return heads if all(str(size) == str(other) for size, other in zip(after, repeated)) else None


def _argument(node: Any, target: Any, aliases: Aliases) -> fx.Node | None:
    """The argument of ``node`` if it is a call of ``target`` without writes to its result, else None."""
    if not isinstance(node, fx.Node) or node.target is not target or aliases.is_written(node):
        return None
    found = node.args[0]
    return found if isinstance(found, fx.Node) and isinstance(found.meta.get("val"), Tensor) else None
