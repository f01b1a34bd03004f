"""Heads of keys and values that are repeated for attention with more heads of queries, taken as they are instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from ..graph import Aliases, arguments, aten, fixed_size


def share_heads(graph: fx.Graph) -> None:
    """Attention without a mask whose keys and values are copies of heads reads the heads themselves.

    Models of transformers do so in their own unmasked calls, and repeat the heads where a trace has written a mask.
    On CUDA not all kernels of PyTorch take fewer heads of keys than of queries.
    """
    aliases = Aliases(graph)
    for node in graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        query, key, value, mask, *rest = arguments(node)
        shared = [_before_repeat(each, aliases) for each in (key, value)]
        if mask is not None or None in shared or query.meta["val"].device.type != "cpu":
            continue
        names = [argument.name for argument in node.target._schema.arguments[3:]]
        node.args = (query, *shared)
        node.kwargs = {**dict(zip(names, [mask, *rest])), "enable_gqa": True}


def _before_repeat(node: Any, aliases: Aliases) -> fx.Node | None:
    """The tensor [batch, heads, length, size] of which ``node`` repeats each head so many times in a row."""
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
    """What ``node``, a call of ``target`` that is written nowhere, is made of; None where it is no such call."""
    if not isinstance(node, fx.Node) or node.target is not target or aliases.is_written(node):
        return None
    found = node.args[0]
    return found if isinstance(found, fx.Node) and isinstance(found.meta.get("val"), Tensor) else None
